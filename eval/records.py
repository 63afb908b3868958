"""A finished run as one small JSON object, so that a comparison needs the run's folder no more.

A study that runs in several visits, or on a machine that is given back, keeps one line per run in `records.jsonl`:
what the run was (its configuration, as far as it differs from the defaults), what training logged, and the results of
every evaluation without their long lists.
"""

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from configs.files import read_json_lines, write_atomic
from eval.statistics import spikes
from training.run import DECIDES, TrainConfig, flatten

DIVERGED = "diverged.json"  # in a run's folder: its loss became infinite, which repeating would only repeat
LONGEST = 32  # numbers of a list that a record keeps
WHERE = ("data.dir", "data.path", "data.workers")  # say where the data lie on a machine, not what they are
POINTS = 150  # of the training loss's curve

Record = dict[str, Any]


@dataclass
class SpikeConfig:
    """A spike: a logged training loss more than `over` nats above the median of the `window` logged before it."""

    window: int = 50  # logged steps before
    over: float = 0.5  # nats


def record_of(folder: Path, spike: SpikeConfig | None = None) -> Record:
    """The record of a run that is trained (or diverged) and evaluated."""
    spike = spike or SpikeConfig()
    lines = list(read_json_lines(folder / "metrics.jsonl"))
    train, val = ([line for line in lines if key in line] for key in ("loss", "val_loss"))
    first, failure = (lines or [{}])[0], folder / DIVERGED
    evaluations = {}
    for path in sorted((folder / "eval").glob("*.json")):
        content = json.loads(path.read_text())
        evaluations[path.stem] = {
            "config": {k: v for k, v in content["config"].items() if k != "run" and v is not None},
            "step": content.get("step"),
            "version": content["version"],
            "results": shortened(content["results"]),
        }
    return {
        "run": folder.name,
        "config": differing(yaml.safe_load((folder / "config.yaml").read_text())),
        "diverged": json.loads(failure.read_text())["error"] if failure.is_file() else None,
        "steps": train[-1]["step"] if train else 0,
        "tokens": train[-1]["tokens"] if train else 0,
        "seconds": train[-1]["time_s"] if train else 0.0,
        "curve": [[line["tokens"], line.get("time_s", 0.0), round(line["val_loss"], 6)] for line in val],
        "losses": [[line["step"], round(line["loss"], 4)] for line in train[:: max(1, math.ceil(len(train) / POINTS))]],
        "loss": statistics.fmean(line["loss"] for line in train[-max(1, len(train) // 10) :]) if train else None,
        "spikes": spikes([line["loss"] for line in train], spike.window, spike.over),
        "tokens_per_s": sorted(line["tokens_per_s"] for line in train)[len(train) // 2] if train else None,
        "facts": {k: first[k] for k in ("params", "params_non_embedding", "flops_per_token") if k in first},
        "machine": first.get("machine", {}),
        "version": first.get("version", "unknown"),
        "evaluations": evaluations,
    }


def shortened(results: Any) -> Any:
    """`results` without lists of more than a few numbers, and with numbers of seven digits."""
    if isinstance(results, dict):
        kept = {key: shortened(value) for key, value in results.items()}
        return {key: value for key, value in kept.items() if value is not None}
    if isinstance(results, list):
        long = len(results) > LONGEST and all(isinstance(value, (int, float)) for value in results)
        return None if long else [shortened(value) for value in results]
    return float(f"{results:.7g}") if isinstance(results, float) else results


def differing(config: dict[str, Any]) -> dict[str, Any]:
    """What decides a run's losses, as far as it differs from the defaults; keys are dotted."""
    default = flatten({key: value for key, value in asdict(TrainConfig()).items() if key in DECIDES})
    given = flatten({key: config.get(key) for key in DECIDES})
    return {key: value for key, value in given.items() if key not in WHERE and default.get(key) != value}


def value(record: Record, path: str) -> float | None:
    """The number at `EVALUATION.key.key`, or `train.NAME`, of a record; None where it was not measured.

    Of a list of rows, a key selects the row whose first value it is, as in `quantization.bits.4.loss_change`.
    """
    evaluation, *keys = path.split(".")
    if evaluation == "train":
        own = {key: record[key] for key in ("seconds", "tokens", "spikes")}
        if record["curve"] and not record["diverged"]:
            own |= {"val_loss": record["curve"][-1][2], "loss": record["loss"]}
        return own.get(".".join(keys))
    if record["diverged"] or evaluation not in record["evaluations"]:
        return None
    found: Any = record["evaluations"][evaluation]["results"]
    for key in keys:
        if isinstance(found, list):
            found = next((row for row in found if str(next(iter(row.values()), None)) == key), None)
        else:
            found = found.get(key) if isinstance(found, dict) else None
    return float(found) if isinstance(found, (int, float)) and math.isfinite(found) else None


def read_records(paths: Iterable[Path]) -> dict[str, Record]:
    """Run's name -> record, of several files; the first file that has a run is the one that counts."""
    found: dict[str, Record] = {}
    for path in paths:
        for record in read_json_lines(path):
            found.setdefault(record["run"], record)
    return found


def write_records(path: Path, records: Iterable[Record]) -> None:
    """One line per run, sorted by name."""
    lines = (json.dumps(record, separators=(",", ":")) for record in sorted(records, key=lambda r: r["run"]))
    write_atomic(path, "".join(f"{line}\n" for line in lines).encode())
