"""scripts/convert.py what=compare: conversions of one source as arms of an ablation, and their changes before training."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import yaml
from omegaconf import MISSING

from configs.composing import quoted
from configs.files import write_atomic, write_json
from configs.provenance import result_record
from eval.report.tables import markdown
from model.conversion import Conversion
from training.checkpoint import LoadedRun, load_run

RECORD = "conversion.json"  # in a converted run's folder: what was converted, how, and what changed
EXPERIMENT = """# @package _global_
# Conversions of one model, trained on. Written by scripts/convert.py what=compare; scripts/ablate.py reads it.
defaults:
  - override /measure: own

"""
ARMS = {
    "baseline": Conversion(to="same"),
    "zero": Conversion(),
    "zero_random": Conversion(second="random"),
    "mirror": Conversion(init="mirror"),
    "open": Conversion(init="open", second="random"),
    "split": Conversion(heads="split"),
    "zero_norm": Conversion(second="random", sublayer_norm=True),
    "mirror_norm": Conversion(init="mirror", sublayer_norm=True),
    "split_norm": Conversion(heads="split", sublayer_norm=True),
    "diff_v2": Conversion(to="diff_v2"),
    "diff_v2_random": Conversion(to="diff_v2", second="random"),
}


@dataclass
class CompareConfig(Conversion):
    """What is compared, and how each arm is trained."""

    source: str | None = None  # a run, a transformers folder, or a name on the hub
    run_dir: str = MISSING  # folder of the new run, or of the comparison
    seed: Annotated[int, "[0, 4294967295]"] = 0  # for a conversion's random weights
    device: str = "auto"  # auto | cpu | cuda
    shards: str | None = None  # a prepared folder to test on; None: the validation shards of the source run
    text: str | None = None  # a text file to test on instead of shards
    tokens: int = 65536  # largest number of tokens of the text to test on
    steps: int = 200  # training steps for each arm of what=compare
    seeds: Annotated[int, "[1, 1000]"] = 1  # runs per arm of what=compare, each on other samples in another order
    jobs: Annotated[int | None, "[1, inf)"] = None  # runs of what=compare at a time, as in scripts/ablate.py
    arms: list[str] = field(default_factory=lambda: list(ARMS))  # the conversions that what=compare tries
    train: list[str] = field(default_factory=list)  # overrides of train.py for all arms of what=compare

    def check(self) -> None:
        """Check the options as `Conversion.check` does, and the arms."""
        super().check()
        if unknown := [name for name in self.arms if name not in ARMS]:
            raise ValueError(f"arms has no '{unknown[0]}': use {', '.join(ARMS)}")
        if min(self.steps, len(self.arms)) < 1:
            raise ValueError("steps or arms is empty: use steps=200, and leave arms out to try all of them")


def write_experiment(
    cfg: CompareConfig, source: LoadedRun, convert_run: Callable[[Conversion, Path], dict[str, Any]],
    train_overrides: Callable[[LoadedRun, Conversion], list[str]],
) -> list[str]:  # fmt: skip
    """Convert every arm, print what changed, and write the experiment; returns the overrides for scripts/ablate.py.

    convert_run makes and measures a converted run; train_overrides returns the overrides with which train.py
    continues it. Conversions that an interrupted comparison made are kept. ValueError: the folder has other conversions.
    """
    folder, arms, records = Path(cfg.run_dir), {}, {}
    lines = [["arm", "parameters", "largest logit change", "loss before", "loss at step 0", "cost"]]
    for name in dict.fromkeys(cfg.arms):
        how, start = ARMS[name], folder / name
        record = records[name] = _read_record(start, how, source, cfg) or convert_run(how, start)
        (before, after), (_, parameters) = record["loss"], record["parameters"]
        cells = [f"{parameters:,}", f"{record['change']['max_logit']:.1e}", f"{before:.4f}", f"{after:.4f}"]
        lines.append([name, *cells, f"{after - before:+.4f}"])
        arms[name] = train_overrides(load_run(start), how)
    print(table := markdown(lines))
    write_json(folder / "conversions.json", result_record("conversions", folder.name, cfg, records))
    write_atomic(folder / "conversions.md", table.encode())
    where = f"text={cfg.text}" if cfg.text else f"shards={cfg.shards}" if cfg.shards else ""
    on, result = (f"{quoted(where)} name=test", "perplexity_test") if where else ("", "perplexity")
    warmup = max(1, cfg.steps // 10)
    experiment = {
        "arms": arms,
        "common": [f"steps={cfg.steps}", f"optim.warmup={warmup}", "eval_every=0", f"device={cfg.device}", *cfg.train],
        "evaluations": [f"perplexity tokens={cfg.tokens} device={cfg.device} {on}".strip()],
        "metrics": {
            "valid": f"{result}.loss",
            "AR-Hit": f"{result}.recall.hit.loss",
            "Others": f"{result}.recall.other.loss",
        },
    }
    text = EXPERIMENT + yaml.safe_dump(experiment, sort_keys=False, width=1000)
    write_atomic(folder / "experiment" / "conversions.yaml", text.encode())
    seeds = [cfg.seed + 1000 + i for i in range(cfg.seeds)]  # not the source's seed: another order of samples
    overrides = [f"--config-dir={folder}", "experiment=conversions", f"runs={folder}", "name=trained"]
    return [*overrides, f"seeds={seeds}".replace(" ", ""), *([f"jobs={cfg.jobs}"] if cfg.jobs else [])]


def _read_record(start: Path, how: Conversion, source: LoadedRun, cfg: CompareConfig) -> dict[str, Any] | None:
    """The record of this arm that an earlier, interrupted comparison wrote; None if the arm has no folder."""
    if not start.exists():
        return None
    record = json.loads((start / RECORD).read_text()) if (start / RECORD).is_file() else {}
    wanted = {"source": str(source.path), "conversion": asdict(how), "seed": cfg.seed}
    if any(record.get(key) != value for key, value in wanted.items()):
        raise ValueError(f"{start} holds another conversion: choose another run_dir=..., or delete it")
    return record
