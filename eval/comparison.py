"""What is compared: run folders read and checked against each other, and the table of their numbers."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from eval.attention_noise import READINGS
from eval.common import colour, run_name, variant

EVALUATIONS = ("perplexity", "needle", "attention_noise")
LINES = ("-", "--", ":", "-.")  # runs of one variant share its colour and differ in line style


@dataclass
class Run:
    """All that a run folder says: configuration, metrics and evaluations."""

    folder: Path
    label: str
    variant: str
    config: dict[str, Any]
    tokenizer: str  # fingerprint
    facts: dict[str, Any]  # first line of metrics.jsonl
    train: list[dict[str, float]]
    val: list[dict[str, float]]
    evals: dict[str, dict[str, Any]]
    line: str = "-"

    @property
    def colour(self) -> str:
        return colour(self.variant)

    def results(self, name: str) -> dict[str, Any] | None:
        return self.evals[name]["results"] if name in self.evals else None


def read_run(folder: Path) -> Run:
    """Read a run folder. ValueError where it is no run, never trained, or never evaluated."""
    if not (folder / "config.yaml").is_file():
        raise ValueError(
            f"{folder} is not a run: give runs=[runs/A,runs/B] of training runs (python train.py makes one)"
        )
    config = yaml.safe_load((folder / "config.yaml").read_text())
    path = folder / "metrics.jsonl"
    # A line that a kill cut in half is not a line yet.
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.is_file() else []
    if not any("loss" in line for line in lines):
        raise ValueError(f"{folder} has no training metrics: train it first, or continue it with resume=true")
    evals = {name: _read_json(folder / "eval" / f"{name}.json") for name in EVALUATIONS}
    evals = {name: content for name, content in evals.items() if content}
    if not evals:
        raise ValueError(
            f"{folder} has no evaluation: run python -m eval.perplexity run={folder} (and needle, attention_noise)"
        )
    return Run(
        folder=folder,
        label=run_name(folder),
        variant=variant(config),
        config=config,
        tokenizer=(_read_json(folder / "tokenizer.json") or {}).get("fingerprint", "none"),
        facts=lines[0],
        train=[line for line in lines if "loss" in line],
        val=[line for line in lines if "val_loss" in line],
        evals=evals,
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text())
    except ValueError:
        raise ValueError(f"{path} is damaged: delete it and repeat the evaluation") from None


def read_runs(folders: list[str]) -> list[Run]:
    """Read the runs, refuse those that cannot be compared, and give each a label and a line style of its own."""
    if not folders:
        raise ValueError("runs is empty: give runs=[runs/A,runs/B]")
    if len({Path(folder).resolve() for folder in folders}) < len(folders):
        raise ValueError("a run is given twice: name each folder once in runs=[...]")
    runs = [read_run(Path(folder)) for folder in folders]
    refuse_incomparable(runs)
    labels = [run.label for run in runs]
    for i, run in enumerate(runs):
        if labels.count(run.label) > 1:
            run.label = "/".join(run.folder.resolve().parts[-2:])
        run.line = LINES[sum(other.variant == run.variant for other in runs[:i]) % len(LINES)]
    return runs


def refuse_incomparable(runs: list[Run]) -> None:
    """Raise ValueError for runs whose losses or evaluations are not of the same thing."""
    first = runs[0]
    data = ("name", "source", "path", "dataset", "subset", "split", "val_fraction")
    for run in runs[1:]:
        pair = f"{first.folder} and {run.folder}"
        if run.tokenizer != first.tokenizer:
            raise ValueError(f"{pair} have different tokenizers, so their losses cannot be compared: report them apart")
        if differ := [key for key in data if run.config["data"].get(key) != first.config["data"].get(key)]:
            raise ValueError(
                f"{pair} have different data (data.{differ[0]}), so their losses cannot be compared: report them apart"
            )
    for name in EVALUATIONS:
        measured = [run for run in runs if name in run.evals]
        for run in measured[1:]:
            if _what(name, run) != _what(name, measured[0]):
                pair = f"{measured[0].folder} and {run.folder}"
                raise ValueError(
                    f"{pair} ran eval.{name} on different text or settings: repeat both with the same ones"
                )


def _what(name: str, run: Run) -> Any:
    """What an evaluation was of: equal for results that can be compared."""
    results = run.results(name)
    if name == "perplexity":
        return results.get("sha256")
    given = {key: run.evals[name]["config"].get(key) for key in ("seed", "text", "shards", "samples")}
    if name == "attention_noise":
        return given, results.get("length"), list(results["signed"]["depths"])
    return given, [[cell[key] for key in ("length", "depth", "needles", "asked")] for cell in results["cells"]]


def notes(runs: list[Run]) -> list[str]:
    """One line for each thing a reader must know before comparing: stopped early, not measured, unequal training."""
    lines = []
    for run in runs:
        done, steps = run.train[-1]["step"], run.config.get("steps", run.train[-1]["step"])
        if done < steps:
            lines.append(f"{run.label} is half finished, at step {done:,} of {steps:,}: continue it with resume=true")
        if absent := [name for name in EVALUATIONS if name not in run.evals]:
            lines.append(f"{run.label} has no {', '.join(absent)}: run python -m eval.{absent[0]} run={run.folder}")
        if old := [name for name, content in run.evals.items() if content.get("step", done) < done]:
            again = f"run python -m eval.{old[0]} run={run.folder} again"
            lines.append(f"{run.label} was trained further after {', '.join(old)}: {again}")
    if len({run.train[-1]["tokens"] for run in runs}) > 1:
        lines.append("the runs were trained on different numbers of tokens, so their losses are no fair comparison")
    return lines


@dataclass
class Cell:
    """A measured value, with its standard error over samples where it has one; value None is not measured."""

    value: float | str | None
    se: float | None = None
    text: str = ""


@dataclass
class Row:
    """A line of the table: what it is, and one cell per run."""

    group: str
    name: str
    cells: list[Cell] = field(default_factory=list)


def table(runs: list[Run]) -> list[Row]:
    """The headline table, one column per run."""
    rows: list[Row] = []

    def add(group: str, name: str, read: Callable[[Run], Any], shown: str | Callable[[float], str]) -> None:
        rows.append(Row(group, name, [_cell(read(run), shown) for run in runs]))

    add("Model", "variant", lambda run: run.variant, "{}")
    add("Model", "parameters without embeddings", lambda run: run.facts.get("params_non_embedding"), si)
    add("Model", "parameters in total", lambda run: run.facts.get("params"), si)
    add("Model", "training FLOPs per token", lambda run: run.facts.get("flops_per_token"), si)
    add("Training", "seed", lambda run: run.config.get("seed"), "{}")
    add("Training", "tokens", lambda run: run.train[-1]["tokens"], si)
    add("Training", "tokens/s, median over the run", median_speed, si)
    add("Training", "training time, seconds", lambda run: run.train[-1].get("time_s"), "{:.0f}")
    add("Loss", "training loss, last tenth", last_tenth, "{:.3f}")
    add("Loss", "validation loss, end of training", lambda run: run.val[-1]["val_loss"] if run.val else None, "{:.3f}")
    add("Loss", "test loss (nats per token)", _of("perplexity", lambda r: (r["loss"], r.get("se"))), "{:.3f}")
    add("Loss", "perplexity", _of("perplexity", lambda r: r["ppl"]), "{:.2f}")
    add("Loss", "bits per byte", _of("perplexity", lambda r: r["bits_per_byte"]), "{:.3f}")
    for n, r in _pairs(runs):
        asked = f"N={n}" if n == 1 else f"N={n}, R={r}"
        add("Needle", f"needle accuracy, {asked}", lambda run, at=(n, r): _pair(run, at, "accuracy"), "{:.3f}")
        if n > 1:
            add(
                "Needle",
                f"needle ranked first of {n}",
                lambda run, at=(n, r): _pair(run, at, "rank_accuracy"),
                "{:.3f}",
            )
    for reading in READINGS:
        for what, name in (("answer", "attention to the answer"), ("noise", "attention noise")):
            add("Attention", f"{name}, {reading}", _of("attention_noise", _mean_of(reading, what)), "{:.3f}")
    return rows


def _cell(value: Any, shown: str | Callable[[float], str]) -> Cell:
    value, se = value if isinstance(value, tuple) else (value, None)
    if value is None:
        return Cell(None, None, "not measured")
    text = shown(value) if callable(shown) else shown.format(value)
    return Cell(value, se, f"{text} ± {se:.3f}" if se is not None else text)


def _of(name: str, read: Callable[[dict[str, Any]], Any]) -> Callable[[Run], Any]:
    return lambda run: read(run.results(name)) if run.results(name) else None


def _mean_of(reading: str, what: str) -> Callable[[dict[str, Any]], tuple[float, float]]:
    return lambda results: (results[reading]["mean"][what], results[reading]["mean"][f"{what}_se"])


def _pairs(runs: list[Run]) -> list[tuple[int, int]]:
    found = [
        (pair["needles"], pair["asked"]) for run in runs for pair in (run.results("needle") or {}).get("pairs", [])
    ]
    return list(dict.fromkeys(found)) or [(1, 1)]


def _pair(run: Run, at: tuple[int, int], key: str) -> tuple[float, float | None] | None:
    for pair in (run.results("needle") or {}).get("pairs", []):
        if (pair["needles"], pair["asked"]) == at:
            return pair[key], pair["se"] if key == "accuracy" else None
    return None


def median_speed(run: Run) -> float | None:
    """Median of the logged tokens/s: the first steps warm up, and machines stutter."""
    speeds = [line["tokens_per_s"] for line in run.train if "tokens_per_s" in line]
    return float(np.median(speeds)) if speeds else None


def last_tenth(run: Run) -> float:
    """Mean training loss of the last tenth of the logged steps."""
    losses = [line["loss"] for line in run.train]
    return float(np.mean(losses[-max(1, len(losses) // 10) :]))


def si(value: float) -> str:
    """1234567 -> 1.23M."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"
