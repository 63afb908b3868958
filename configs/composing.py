"""Composes one command's configuration inside of another, writes overrides in Hydra's syntax, and knows what a sweep varies."""

import copy
import functools
import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs import CONFIG_DIR

OmegaConf.register_new_resolver("times", lambda factor, number: round(factor * number), replace=True)  # ${times:A,B}


def compose_job(name: str, overrides: list[str]) -> Any:
    """The configuration that the command `name` gets from these overrides.

    Hydra needs a third of a second, and a study hundreds of configurations: it composes each choice of groups once.
    """
    values = [override for override in overrides if _is_value(override)]
    groups = tuple(override for override in overrides if not _is_value(override))
    try:
        config = copy.deepcopy(_of_groups(GlobalHydra.instance().hydra, name, groups))
        for override in OverridesParser.create().parse_overrides(values):
            OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
        return config
    except (HydraException, OmegaConfBaseException):
        return composed_by_hydra(name, overrides)  # and refused in its words


@functools.lru_cache
def _of_groups(hydra: object, name: str, groups: tuple[str, ...]) -> Any:
    """The configuration of these groups, composed once for each `hydra`, whose search path may have folders of the user."""
    return composed_by_hydra(name, list(groups))


def composed_by_hydra(name: str, overrides: list[str]) -> Any:
    ready = GlobalHydra.instance().is_initialized()
    with nullcontext() if ready else initialize_config_dir(str(CONFIG_DIR.resolve()), version_base=None):
        return compose(name, overrides)


def _is_value(override: str) -> bool:
    """Whether the override only sets an existing key: it chooses no group, and adds or removes no key."""
    key = override.split("=")[0]
    return not (CONFIG_DIR / key).is_dir() and not set("+~/@") & set(key)


def merged(*parts: list[str]) -> list[str]:
    """The overrides in order, of each key the last one."""
    last: dict[str, str] = {}
    for override in (o for part in parts for o in part):
        last.pop(key_of(override), None)
        last[key_of(override)] = override
    return list(last.values())


def key_of(override: str) -> str:
    """ "+model.window=64" -> "model.window"."""
    return override.split("=")[0].lstrip("+~")


def overrides_of(values: dict[str, Any]) -> list[str]:
    """The values as key=value, in Hydra's syntax."""
    texts = {key: json.dumps(value) if value is None or isinstance(value, bool) else value for key, value in values.items()}
    return [quoted(f"{key}={text}") if isinstance(values[key], str | Path) else f"{key}={text}" for key, text in texts.items()]


def quoted(override: str) -> str:
    """The override, whose value is a text: in quotes if Hydra would read something else."""
    key, value = override.split("=", 1)
    path = re.fullmatch(r"/[A-Za-z0-9_./-]*", value)  # never quoted; a study asks for thousands, and Hydra needs milliseconds
    plain = path or not re.search(r"[$\s]", value) and read_value(override) == value
    return override if plain else f"{key}={quote(value)}"


def quote(text: str) -> str:
    """`text` in Hydra's quotes, because commas, quotes and braces have a meaning outside of them."""
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # OmegaConf reads a name in ${} as another key
    return QuotedString(text, Quote.single).with_quotes()


def read_value(override: str) -> Any:
    """The value that Hydra reads in KEY=VALUE, None if it cannot."""
    try:
        return OverridesParser.create().parse_override(override).value()
    except HydraException:
        return None


def in_sweep() -> bool:
    """Whether Hydra's -m trains several runs in this process."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def swept_keys() -> set[str]:
    """The keys of which a sweep's command gives several values; none where this is no sweep."""
    if not in_sweep():
        return set()
    typed = [word for word in sys.argv[1:] if "=" in word and not word.startswith("-")]
    several = {one.key_or_group for one in OverridesParser.create().parse_overrides(typed) if one.is_sweep_override()}
    return several | set(HydraConfig.get().sweeper.get("params") or ())
