"""What is compared: run folders read and checked against each other, seeds grouped into arms, and their tables."""

import json
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from eval.attention_noise import READINGS
from eval.common import colour, run_name, variant
from eval.statistics import mean_sd, paired

EVALUATIONS = (
    "perplexity",
    "needle",
    "attention_noise",
)  # every run is asked for these; others are shown where they are
LINES = ("-", "--", ":", "-.")  # arms of one variant share its colour and differ in line style


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
    monitor: list[dict[str, float]] = field(default_factory=list)  # lines of training/monitor.py

    @property
    def seed(self) -> int | None:
        return self.config.get("seed")

    @property
    def finished(self) -> bool:
        return self.train[-1]["step"] >= self.config.get("steps", 0)

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
    others = sorted(path.stem for path in (folder / "eval").glob("*.json") if path.stem not in EVALUATIONS)
    evals = {name: _read_json(folder / "eval" / f"{name}.json") for name in (*EVALUATIONS, *others)}
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
        monitor=[line for line in lines if "monitor_s" in line],
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text())
    except ValueError:
        raise ValueError(f"{path} is damaged: delete it and repeat the evaluation") from None


def read_runs(folders: list[str]) -> list[Run]:
    """Read the runs, refuse those that cannot be compared, and give each a label of its own."""
    if not folders:
        raise ValueError("runs is empty: give runs=[runs/A,runs/B]")
    if len({Path(folder).resolve() for folder in folders}) < len(folders):
        raise ValueError("a run is given twice: name each folder once in runs=[...]")
    runs = [read_run(Path(folder)) for folder in folders]
    refuse_incomparable(runs)
    labels = [run.label for run in runs]
    for run in runs:
        if labels.count(run.label) > 1:
            run.label = "/".join(run.folder.resolve().parts[-2:])
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
    for name in evaluations(runs):
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
    if name not in EVALUATIONS:
        return {key: value for key, value in run.evals[name]["config"].items() if key not in ("run", "device", "batch")}
    given = {key: run.evals[name]["config"].get(key) for key in ("seed", "text", "shards", "samples", "style")}
    if name == "attention_noise":
        return given, results.get("length"), list(results["signed"]["depths"])
    return given, [[cell[key] for key in ("length", "depth", "needles", "asked")] for cell in results["cells"]]


def evaluations(runs: list[Run]) -> list[str]:
    """Names of all evaluations that any of the runs has, those that every run is asked for first."""
    found = dict.fromkeys(name for run in runs for name in run.evals)
    return [name for name in found if name in EVALUATIONS] + [name for name in found if name not in EVALUATIONS]


# ---------------------------------------- arms


@dataclass
class Arm:
    """What is compared: one model and its training, run with one or several seeds."""

    runs: list[Run]
    label: str
    line: str = "-"

    @property
    def variant(self) -> str:
        return self.runs[0].variant

    @property
    def colour(self) -> str:
        return colour(self.variant)

    @property
    def several(self) -> bool:
        return len(self.runs) > 1

    def results(self, name: str) -> list[dict[str, Any]]:
        """The results of the evaluation, one per run that has it."""
        return [run.evals[name]["results"] for run in self.runs if name in run.evals]


def arms_of(runs: list[Run]) -> list[Arm]:
    """Group runs that differ in their seed alone, in the order given.

    Beside finished runs of its arm a half-finished one is left out: it would bias the mean.
    """
    kinds: dict[str, list[Run]] = {}
    for run in runs:
        kind = _kind(run)
        repeated = any(run.seed == other.seed for other in kinds.get(kind, []))
        kinds.setdefault(f"{kind} {run.folder}" if repeated else kind, []).append(run)
    arms = []
    for members in kinds.values():
        kept = [run for run in members if run.finished] or members
        arms.append(Arm(kept, _label(kept)))
    for i, arm in enumerate(arms):
        if arm.several and not any(other.variant == arm.variant for other in arms if other is not arm):
            arm.label = arm.variant
        arm.line = LINES[sum(other.variant == arm.variant for other in arms[:i]) % len(LINES)]
    for i, arm in enumerate(arms):
        if earlier := sum(other.label == arm.label for other in arms[:i]):
            arm.label += f" ({earlier + 1})"
    return arms


def _kind(run: Run) -> str:
    """Equal for runs that differ in nothing but the seed, and where and how fast they ran."""
    config = {key: run.config.get(key) for key in ("model", "optim", "steps", "batch_tokens")}
    elsewhere = {"model": ("backend",), "data": ("dir", "workers", "shard_tokens")}
    config["data"] = run.config["data"]
    for part, keys in elsewhere.items():
        config[part] = {key: value for key, value in config[part].items() if key not in keys}
    config["init_from"] = re.sub(r"s(eed)?=?\d+", "", run.config.get("init_from") or "")  # each seed from its own
    return json.dumps(_given(config), sort_keys=True, default=str)


def _given(tree: Any) -> Any:
    """Without what is null: runs of an older version lack keys that are null in the others."""
    if not isinstance(tree, dict):
        return tree
    return {key: _given(value) for key, value in tree.items() if value is not None}


def _label(runs: list[Run]) -> str:
    """The run's own label, or what the labels of several seeds have in common."""
    if len(runs) == 1:
        return runs[0].label
    common = os.path.commonprefix([run.label for run in runs])
    return re.sub(r"[-_./ ]*(s|seed)?[-_=]?$", "", common) or runs[0].variant


def notes(runs: list[Run], arms: list[Arm]) -> list[str]:
    """One line for each thing a reader must know before comparing: stopped early, not measured, unequal training."""
    lines = []
    kept = [run for arm in arms for run in arm.runs]
    for run in runs:
        done = run.train[-1]["step"]
        if not run.finished:
            left_out = "" if any(run is other for other in kept) else " and left out of its arm"
            steps = f"at step {done:,} of {run.config['steps']:,}"
            lines.append(f"{run.label} is half finished, {steps},{left_out}: continue it with resume=true")
        if absent := [name for name in EVALUATIONS if name not in run.evals]:
            lines.append(f"{run.label} has no {', '.join(absent)}: run python -m eval.{absent[0]} run={run.folder}")
        if not math.isfinite(last_tenth(run)):
            lines.append(f"{run.label} diverged: its training loss is no number; lower optim.lr and train it again")
        if old := [name for name, content in run.evals.items() if content.get("step", done) < done]:
            again = f"run python -m eval.{old[0]} run={run.folder} again"
            lines.append(f"{run.label} was trained further after {', '.join(old)}: {again}")
    if len({run.train[-1]["tokens"] for run in kept}) > 1:
        lines.append("the runs were trained on different numbers of tokens, so their losses are no fair comparison")
    seeds = [{run.seed for run in arm.runs} for arm in arms]
    if any(arm.several for arm in arms) and any(one != seeds[0] for one in seeds):
        lines.append("the arms have different seeds: differences are over those that two arms share")
    return lines


# ---------------------------------------- tables


@dataclass
class Cell:
    """An arm's value: of one run, with its standard error over samples where it has one, or the mean over seeds.

    values: one per run of the arm, None where it was not measured. sd: over seeds. value None: not measured at all.
    """

    value: float | str | None
    se: float | None = None
    text: str = ""
    sd: float | None = None
    values: list[Any] = field(default_factory=list)


@dataclass
class Row:
    """A line of a table: what it is, one cell per arm, and which way is better ("" where neither is)."""

    group: str
    name: str
    cells: list[Cell] = field(default_factory=list)
    better: str = ""


Shown = str | Callable[[float], str]


def table(arms: list[Arm]) -> list[Row]:
    """The headline table, one column per arm."""
    rows: list[Row] = []

    def add(group: str, name: str, read: Callable[[Run], Any], shown: Shown, better: str = "") -> None:
        rows.append(_row(arms, group, name, read, shown, better))

    add("Model", "variant", lambda run: run.variant, "{}")
    add("Model", "parameters without embeddings", lambda run: run.facts.get("params_non_embedding"), si)
    add("Model", "parameters in total", lambda run: run.facts.get("params"), si)
    add("Model", "training FLOPs per token", lambda run: run.facts.get("flops_per_token"), si)
    add("Training", "seed", lambda run: str(run.seed) if any(arm.several for arm in arms) else run.seed, "{}")
    add("Training", "tokens", lambda run: run.train[-1]["tokens"], si)
    add("Training", "tokens/s, median over the run", median_speed, si)
    add("Training", "training time, seconds", lambda run: run.train[-1].get("time_s"), "{:.0f}")
    add("Loss", "training loss, last tenth", last_tenth, "{:.3f}", "lower")
    add("Loss", "validation loss, end of training", last_validation, "{:.3f}", "lower")
    add("Loss", "test loss (nats per token)", _of("perplexity", lambda r: (r["loss"], r.get("se"))), "{:.3f}", "lower")
    add("Loss", "perplexity", _of("perplexity", lambda r: r["ppl"]), "{:.2f}", "lower")
    add("Loss", "bits per byte", _of("perplexity", lambda r: r["bits_per_byte"]), "{:.3f}", "lower")
    for n, r in _pairs(arms):
        asked, at = f"N={n}" if n == 1 else f"N={n}, R={r}", (n, r)
        add("Needle", f"needle accuracy, {asked}", _pair(at, "accuracy"), "{:.3f}", "higher")
        if n > 1:
            add("Needle", f"needle ranked first of {n}", _pair(at, "rank_accuracy"), "{:.3f}", "higher")
    for reading in READINGS:
        for what, name, better in (
            ("answer", "attention to the answer", "higher"),
            ("noise", "attention noise", "lower"),
        ):
            read = _of("attention_noise", _mean_of(reading, what))
            add("Attention", f"{name}, {reading}", read, "{:.3f}", better)
    more = (
        ("Loss", "loss on recalled tokens (AR hits)", _of("perplexity", _recall("hit")), "lower"),
        ("Loss", "loss on all other tokens", _of("perplexity", _recall("other")), "lower"),
        ("Attention", "entropy of an attention row (nats)", _of("attention_noise", _part("entropy")), ""),
        ("Attention", "negative share of the absolute mass", _of("attention_noise", _part("negative")), ""),
        ("Attention", "share of heads that are sinks", _of("attention_noise", _sinks), ""),
    )
    for group, name, read, better in more:  # older results have none
        if any(read(run) is not None for arm in arms for run in arm.runs):
            add(group, name, read, "{:.3f}", better)
    order = list(dict.fromkeys(row.group for row in rows))
    return sorted(rows, key=lambda row: order.index(row.group))


def _recall(which: str) -> Callable[[dict[str, Any]], tuple[float, float] | None]:
    def read(results: dict[str, Any]) -> tuple[float, float] | None:
        found = (results.get("recall") or {}).get(which) or {}
        return None if found.get("loss") is None else (found["loss"], found["se"])

    return read


def _part(name: str) -> Callable[[dict[str, Any]], tuple[float, float | None] | None]:
    return lambda results: (results[name]["mean"], results[name].get("se")) if name in results else None


def _sinks(results: dict[str, Any]) -> tuple[float, float] | None:
    """Of the longest text that was looked at."""
    by_length = results.get("sink") or {}
    if not by_length:
        return None
    found = by_length[max(by_length, key=int)]
    return found["share"], found["se"]


def _row(arms: list[Arm], group: str, name: str, read: Callable[[Run], Any], shown: Shown, better: str = "") -> Row:
    seeds = any(arm.several for arm in arms)
    return Row(group, name, [_cell([read(run) for run in arm.runs], shown, seeds) for arm in arms], better)


def _cell(found: list[Any], shown: Shown, seeds: bool) -> Cell:
    """`seeds`: the table has arms of several seeds, so that ± is over seeds in all of it."""
    values = [value[0] if isinstance(value, tuple) else value for value in found]
    measured = [value for value in values if value is not None]
    show = shown if callable(shown) else shown.format
    if not measured:
        return Cell(None, None, "not measured", None, values)
    if isinstance(measured[0], str):
        return Cell(measured[0], None, ", ".join(dict.fromkeys(measured)), None, values)
    if len(values) == 1:
        se = found[0][1] if isinstance(found[0], tuple) else None
        text = show(measured[0])
        return Cell(measured[0], se, f"{text} ± {se:.3f}" if se is not None and not seeds else text, None, values)
    mean, sd = mean_sd(measured)
    same = len(set(measured)) == 1
    text = show(measured[0]) if same else f"{show(mean)} ± {show(sd)}"
    return Cell(mean, None, text if len(measured) == len(values) else f"{text} (n = {len(measured)})", sd, values)


def _of(name: str, read: Callable[[dict[str, Any]], Any]) -> Callable[[Run], Any]:
    return lambda run: read(run.results(name)) if run.results(name) else None


def _mean_of(reading: str, what: str) -> Callable[[dict[str, Any]], tuple[float, float]]:
    return lambda results: (results[reading]["mean"][what], results[reading]["mean"][f"{what}_se"])


def _pairs(arms: list[Arm]) -> list[tuple[int, int]]:
    found = [
        (pair["needles"], pair["asked"])
        for arm in arms
        for results in arm.results("needle")
        for pair in results.get("pairs", [])
    ]
    return list(dict.fromkeys(found)) or [(1, 1)]


def _pair(at: tuple[int, int], key: str) -> Callable[[Run], tuple[float, float | None] | None]:
    def read(run: Run) -> tuple[float, float | None] | None:
        for pair in (run.results("needle") or {}).get("pairs", []):
            if (pair["needles"], pair["asked"]) == at:
                return pair[key], pair["se"] if key == "accuracy" else None
        return None

    return read


def median_speed(run: Run) -> float | None:
    """Median of the logged tokens/s: the first steps warm up, and machines stutter."""
    speeds = [line["tokens_per_s"] for line in run.train if "tokens_per_s" in line]
    return float(np.median(speeds)) if speeds else None


def last_tenth(run: Run) -> float:
    """Mean training loss of the last tenth of the logged steps."""
    losses = [line["loss"] for line in run.train]
    return float(np.mean(losses[-max(1, len(losses) // 10) :]))


def last_validation(run: Run) -> float | None:
    """Validation loss at the end of training."""
    return run.val[-1]["val_loss"] if run.val else None


def si(value: float) -> str:
    """1234567 -> 1.23M."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


# ---------------------------------------- differences


@dataclass
class Contrast:
    """An arm minus the first one in one row: mean over the seeds that both have, with its 95 % interval from two on."""

    group: str
    name: str
    better: str
    arm: str
    reference: str
    seeds: list[int]
    n: int
    mean: float
    low: float | None
    high: float | None
    p: float | None
    differences: list[float]

    @property
    def text(self) -> str:
        digits = 4 if abs(self.mean) < 1 else 2
        mean, *ends = (None if x is None else f"{x:+.{digits}f}" for x in (self.mean, self.low, self.high))
        return f"{mean} (n = 1)" if self.low is None else f"{mean} [{', '.join(ends)}]"

    @property
    def clear(self) -> bool:
        """The interval leaves out zero."""
        return self.low is not None and not self.low <= 0 <= self.high


def contrasts(arms: list[Arm], rows: list[Row]) -> list[Contrast]:
    """Paired differences of every arm to the first, row by row; none unless some arm has several seeds."""
    if not any(arm.several for arm in arms):
        return []
    found = []
    for row in rows:
        if row.group in ("Model", "Training"):
            continue
        first, *others = (_by_seed(arm, cell) for arm, cell in zip(arms, row.cells, strict=True))
        for arm, values in zip(arms[1:], others, strict=True):
            if seeds := sorted(first.keys() & values.keys()):
                found.append(_contrast(row, arm.label, arms[0].label, {s: values[s] - first[s] for s in seeds}))
    return found


def _by_seed(arm: Arm, cell: Cell) -> dict[int, float]:
    """What was measured, and is a number: a diverged seed has no difference."""
    pairs = zip(arm.runs, cell.values, strict=True)
    return {run.seed: value for run, value in pairs if isinstance(value, (int, float)) and math.isfinite(value)}


def _contrast(row: Row, arm: str, reference: str, by_seed: dict[int, float]) -> Contrast:
    test = paired(list(by_seed.values()))
    ends = (test.mean, test.low, test.high, test.p)
    return Contrast(
        row.group, row.name, row.better, arm, reference, list(by_seed), test.n, *ends, list(by_seed.values())
    )


# ---------------------------------------- further evaluations

ROWS_SHOWN = 40  # of one evaluation; all are in the JSON
TITLES = {
    "icl": "In-context learning",
    "outliers": "Activation outliers",
    "quantization": "Quantized attention logits",
    "harness": "Tasks of lm-evaluation-harness",
}


@dataclass
class Ablation:
    """What scripts/ablate.py wrote: its tables and remarks (Markdown), and its figures."""

    name: str
    text: str
    images: list[Path]


def read_ablation(path: Path) -> Ablation:
    """Read an ablation's folder, or the results.json in it. ValueError where it is none or is not done."""
    folder = path.parent if path.name == "results.json" else path
    content = _read_json(folder / "results.json")
    if not content or content.get("eval") != "ablation" or not (folder / "table.md").is_file():
        again = "give ablation= the folder that python scripts/ablate.py ended in"
        raise ValueError(f"{path} holds no results.json and table.md of an ablation: {again}")
    return Ablation(content["run"], (folder / "table.md").read_text(), sorted((folder / "figures").glob("*.png")))


@dataclass
class Section:
    """An evaluation shown as it is: its numbers by their names, its settings, and the figures it drew."""

    name: str
    rows: list[Row]
    settings: dict[str, Any]
    images: list[tuple[str, Path]]  # arm, file
    left_out: int = 0

    @property
    def title(self) -> str:
        return TITLES.get(self.name, self.name.replace("_", " ").capitalize())


def sections(arms: list[Arm]) -> list[Section]:
    """One section for each evaluation beyond those of the headline table."""
    names = [name for name in evaluations([run for arm in arms for run in arm.runs]) if name not in EVALUATIONS]
    return [_section(arms, name) for name in names]


def _section(arms: list[Arm], name: str) -> Section:
    flat = {id(run): dict(scalars(run.results(name) or {})) for arm in arms for run in arm.runs}
    measured = [values for values in flat.values() if values]
    keys = list(dict.fromkeys(key for values in measured for key in values))
    settings = {
        key: measured[0][key]
        for key in keys
        if isinstance(measured[0].get(key), int) and all(values.get(key) == measured[0][key] for values in measured)
    }  # whole numbers that are the same everywhere are counts and lengths
    errors = {key: error for key in keys for error in _errors(key) if error in keys}
    shown = [key for key in keys if key not in settings and key not in errors.values()]

    def read(run: Run, key: str) -> Any:
        value, error = flat[id(run)].get(key), flat[id(run)].get(errors.get(key, ""))
        return (value, error) if value is not None and error is not None else value

    rows = [_row(arms, name, key, lambda run, key=key: read(run, key), _short) for key in shown[:ROWS_SHOWN]]
    images = [
        (arm.label, path)
        for arm in arms
        for path in sorted((arm.runs[0].folder / "figures").glob(f"{name}*.png"))
        if name in arm.runs[0].evals
    ]
    return Section(name, rows, settings, images, max(0, len(shown) - ROWS_SHOWN))


def _errors(key: str) -> tuple[str, ...]:
    """What a standard error of `key` may be called."""
    beside = re.sub(r"(^|· )(accuracy|loss|mean)$", r"\1se", key)
    return f"{key}_se", f"{key}_stderr", *([beside] if beside != key else [])


def scalars(results: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """("a · b", number) of all numbers in nested dicts; a list of dicts goes by its items' first values ("bits=8").

    What is called per_... or by_... divides up a number that is there as well, and is left out.
    """
    for key, value in results.items():
        name = f"{path} · {key}" if path else str(key)
        if str(key).startswith(("per_", "by_")):
            continue
        if isinstance(value, dict):
            yield from scalars(value, name)
        elif isinstance(value, list) and value and all(isinstance(item, dict) and item for item in value):
            for label, rest in _labelled(value):
                yield from scalars(rest, f"{name} · {label}" if path else label)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, value


def _labelled(items: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Items with their first value, or as many as tell them apart, as a label: ("bits=8", the rest)."""
    for count in range(1, len(items[0]) + 1):
        labels = [", ".join(f"{key}={value}" for key, value in list(item.items())[:count]) for item in items]
        if len(set(labels)) == len(items):
            break
    for label, item in zip(labels, items, strict=True):
        yield label, dict(list(item.items())[count:])


def _short(value: float) -> str:
    return f"{value:.3f}" if 0.001 <= abs(value) < 1000 else f"{value:.3g}"


def as_json(arms: list[Arm], rows: list[Row], found: list[Contrast], parts: list[Section]) -> dict[str, Any]:
    """The report's numbers: runs, arms, the table, the differences and the further evaluations."""
    runs = [run for arm in arms for run in arm.runs]
    return {
        "runs": [{"run": run.label, "variant": run.variant, "config": run.config, "evals": run.evals} for run in runs],
        "arms": [{"arm": arm.label, "variant": arm.variant, "runs": [run.label for run in arm.runs],
                  "seeds": [run.seed for run in arm.runs]} for arm in arms],
        "results": [asdict(row) for row in rows],
        "differences": [asdict(contrast) for contrast in found],
        "evaluations": {part.name: [asdict(row) for row in part.rows] for part in parts},
    }  # fmt: skip
