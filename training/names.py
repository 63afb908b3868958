"""The name of a run's folder, from the overrides of its command."""

import hashlib
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser

from training.checkpoint import flatten
from training.signals import in_sweep


def default_run_dir(cfg: Any) -> Path:
    """runs/NAME, the same on every rank: the experiment, the model, the overrides as KEYVALUE, and the seed.

    size= and data= give their values alone; sweep, resume, wandb, device, runs and run_dir are left out, and in a sweep all
    that is not swept. A key is shortened to its shortest ending that no other key of the configuration has, and a hash stands
    for the end of a long name. hydra.sweep.dir= takes the place of `runs`.
    """
    hydra = HydraConfig.get()
    choices, swept = hydra.runtime.choices, swept_keys()
    parts = [choices[group] for group in ("experiment", "model") if choices.get(group)]
    for override in hydra.overrides.task:
        key, _, value = override.lstrip("+~").partition("=")
        if swept and key not in swept:
            continue
        if key in ("size", "data"):
            parts.append(value)
        elif key not in ("experiment", "model", "sweep", "seed", "resume", "wandb", "device", "runs", "run_dir"):
            parts.append(_shortest(key, cfg) + value)
    name = "-".join([*(re.sub(r"[^\w.-]+", "-", part).strip("-") for part in parts), f"s{cfg.seed}"])
    if len(name.encode()) > 150:  # folders' names end at 255 bytes
        name = f"{name.encode()[:120].decode(errors='ignore')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}-s{cfg.seed}"
    in_place = in_sweep() and any(override.lstrip("+").startswith("hydra.sweep.dir=") for override in hydra.overrides.hydra)
    return Path(hydra.sweep.dir if in_place else cfg.runs) / name


def swept_keys() -> set[str]:
    """The keys of which a sweep's command gives several values; none where this is no sweep."""
    if not in_sweep():
        return set()
    typed = [word for word in sys.argv[1:] if "=" in word and not word.startswith("-")]
    several = {one.key_or_group for one in OverridesParser.create().parse_overrides(typed) if one.is_sweep_override()}
    return several | set(HydraConfig.get().sweeper.get("params") or ())


def _shortest(key: str, cfg: Any) -> str:
    parts, known = key.split("."), flatten(asdict(cfg))
    for count in range(1, len(parts)):
        short = ".".join(parts[-count:])
        if sum(other == short or other.endswith(f".{short}") for other in known) == 1:
            return short
    return key
