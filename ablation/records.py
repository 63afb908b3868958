"""A finished run as one small JSON object, so that a comparison no longer needs the run's folder.

It has the values of the configuration that decide the losses and differ from the defaults, a few of the logged losses, the last
lambda by layer, and the results of every evaluation without long lists and values by layer.
"""

import functools
import gzip
import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from configs.files import json_text, read_json_lines, write_atomic
from eval.report.runs import Run, settings_of
from model.config import DecoderConfig, decoder_config
from training.monitor import last_lambdas
from training.run import TrainConfig, identity_of

PUBLISHED = "records.jsonl.gz"  # the finished runs of one study, in docs/results/STUDY
LONGEST = 32  # a record leaves out longer lists of numbers
TRIAL = "tune-"  # begins the name of a trial of learning rates
BY_LAYER = ("layers", "per_layer", "per_layer_head")  # the parts of an evaluation's results that it leaves out
POINTS = 12  # of the training loss's curve
# Means of the last tenth, which a thinned curve cannot give again. Only some runs log all of them.
LAST_TENTHS = ("loss_text", "loss_retrieval", "lr", "grad_norm", "tokens_per_s", "mfu", "mem_gb")
# Settings of train.py that decide what a run logs, and not what it learns.
MEASURES = ("eval_tokens", "log_every", "needle_every", "needle_samples")
LOGGED = ("step", "tokens", "loss", "val_loss", "tokens_per_s", "time_s", "needle_acc")
DEFAULTS = identity_of(asdict(TrainConfig()))
AS_IN_A_RUN = ("variant", "facts", "train", "val", "needle", "evals", "tokenizer", "diverged")

Record = dict[str, Any]


def record_of(run: Run) -> Record:
    """The record of a run that is trained and evaluated, or that diverged."""
    lambdas, tenths = last_lambdas(run.monitor), {key: run.last_tenth(key) for key in LAST_TENTHS}
    return {
        "run": run.folder.name,
        "variant": run.variant,
        "config": differing(run.config),
        "measures": {key: run.config.get(key, getattr(TrainConfig, key)) for key in MEASURES},
        "facts": {key: value for key, value in run.facts.items() if key not in ("step", "tokens")},
        "train": [logged(line) for line in thinned(run.train)],
        "val": [logged(line) for line in run.val],
        "needle": [logged(line) for line in run.needle],
        **({"lambda": lambdas} if lambdas else {}),
        "loss": run.last_tenth(),
        **{key: value for key, value in tenths.items() if value is not None},
        "spikes": run.spikes,
        "tokenizer": run.tokenizer,
        "diverged": run.diverged,
        "evals": {name: _shortened_evaluation(content) for name, content in run.evals.items()},
    }


def run_of(record: Record) -> Run:
    """The run that a record describes, without what the record leaves out."""
    counted = {key: record[key] for key in ("loss", "spikes", *LAST_TENTHS) if key in record}
    same = {key: record[key] for key in AS_IN_A_RUN} | {"config": recorded_config(record)}
    return Run(Path(record["run"]), record["run"], counted=counted, **same)


def recorded_config(record: Record) -> dict[str, Any]:
    """The configuration of a record's run: what the record leaves out has its default, or what train.py fills in."""
    config = asdict(TrainConfig())
    for key, value in record["config"].items():
        *groups, last = key.split(".")
        functools.reduce(lambda group, name: group.setdefault(name, {}), groups, config)[last] = value
    return config | {"model": asdict(decoder_config(config["model"]).filled())}


def describes(record: Record, config: TrainConfig) -> bool:
    """Whether a run with this configuration has the record's losses, and measures itself as the record's run did."""
    same = all(getattr(config, key) == value for key, value in record.get("measures", {}).items())
    return same and differing(recorded_config(record)) == differing(asdict(config))


def recorded_model(records: Iterable[Record], init_from: str | None = None) -> DecoderConfig | None:
    """The model of the first record, or with `init_from` of the first run that began with it; None without such a record."""
    begun = init_from and "/".join(Path(init_from).parts[-2:])
    same = (one for one in records if not begun or one["config"].get("init_from") == begun)
    return next((decoder_config(recorded_config(record)["model"]) for record in same), None)


def thinned(lines: list[Any]) -> list[Any]:
    """Some of the lines, at even distances, and the last."""
    return [*lines[: -1 : max(1, math.ceil((len(lines) - 1) / POINTS))], *lines[-1:]]


def logged(line: dict[str, Any]) -> dict[str, Any]:
    """What a record keeps of a line of metrics.jsonl. Training loss and speed have six digits."""
    kept = {key: line[key] for key in LOGGED if key in line}
    return kept | {key: float(f"{kept[key]:.6g}") for key in ("loss", "tokens_per_s") if key in kept}


def _shortened_evaluation(content: dict[str, Any]) -> dict[str, Any]:
    kept = {key: content[key] for key in ("eval", "step", "version") if key in content}
    return {**kept, "config": settings_of(content), "results": shortened(content["results"])}


def shortened(results: Any) -> Any:
    """`results` without lists of many numbers and without values by layer."""
    if isinstance(results, dict):
        kept = {key: shortened(value) for key, value in results.items() if key not in BY_LAYER}
        return {key: value for key, value in kept.items() if value is not None}
    if isinstance(results, list):
        long = len(results) > LONGEST and all(isinstance(value, int | float) for value in results)
        return None if long else [shortened(value) for value in results]
    return results


def rounded(content: Any) -> Any:
    """JSON `content` with seven digits of every number that has more than ten: tables have four, and records stay small."""

    def digits(text: str) -> float:
        return float(text) if float(f"{float(text):.10g}") == float(text) else float(f"{float(text):.7g}")

    return json.loads(json.dumps(content), parse_float=digits)


def differing(config: dict[str, Any]) -> dict[str, Any]:
    """The values that decide a run's losses and differ from the defaults, under dotted keys."""
    return {key: value for key, value in identity_of(config).items() if DEFAULTS.get(key) != value}


def records_of(folder: Path, *kept: Path) -> dict[str, Record]:
    """Run's name -> record, from an ablation's folder and then the folders `kept`; the first record of a run counts."""
    records: dict[str, Record] = {}
    for path in (*sorted(folder.glob("records/*.jsonl")), folder / PUBLISHED, *(path / PUBLISHED for path in kept)):
        for record in read_json_lines(path):
            records.setdefault(record["run"], record)
    return records


def write_records(path: Path, records: Iterable[Record]) -> None:
    """One line per run, sorted by name. A .gz file is compressed without a date, so that publishing twice changes nothing."""
    lines = (json_text(record, separators=(",", ":")) for record in sorted(records, key=lambda r: r["run"]))
    text = "".join(f"{line}\n" for line in lines).encode()
    write_atomic(path, gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
