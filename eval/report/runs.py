"""Reads run folders, refuses runs that cannot be compared, and groups runs into arms for all tables and figures."""

import itertools
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from configs.files import read_json_lines, read_json_object, read_run_config
from data.stream import text_read
from eval.common import INK, INPUTS, colour, command_of, given_input, variant
from eval.needle_text import trained_digits
from eval.report.statistics import spikes
from training.run import identity_of

EVALUATIONS = ("perplexity", "needle", "attention_noise")  # wanted of every run; others are shown where they exist
IGNORED_SETTINGS = ("device", "batch", "name", "training_counts", "ngram", "orders")  # those of old runs last
# Counts and digests in results. What older code did not record is not compared.
RECORDED = ("sha256", "input_sha256", "text_sha256", "length", "windows", "tokens", "task", "episodes", "queries", "needles")
# In a run's folder: its loss or a tensor was not finite, and a repeated run would diverge again.
DIVERGED = "diverged.json"
DATA_KEYS = ("name", "source", "path", "dataset", "subset", "split", "val_fraction")  # another value is another text
NOT_COMPARED = "so their losses cannot be compared: report them apart"
# Okabe and Ito's palette first: it suits the common kinds of colour blindness.
CYCLE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#1f2328", "#8C564B", "#B8A000")
OF_ANY_TOKENIZER = ("bits_per_byte", "text", "text_sha256")  # results of perplexity
# Parts of an evaluation's results without which its file is damaged.
NEEDED = {"perplexity": ("loss",), "needle": ("cells",), "attention_noise": ("signed", "absolute")}
WITH_SE = ("accuracy", "loss", "mean", "share")  # numbers with their standard error, `se`, beside them
LINES_WITH = {"train": "loss", "val": "val_loss", "monitor": "monitor_s", "needle": "needle_acc"}
LINES = ("-", "--", ":", "-.")  # one style per point of a grid


@dataclass
class Run:
    """A run folder. facts: the first line of metrics.jsonl. train, val, monitor, needle: the lines with LINES_WITH. diverged:
    the error that stopped training. skipped: the last step without an update. counted: loss and spikes of the whole log, in
    a record. texts_in_common: evaluation -> its text, where bits per byte are all that can be compared.
    """

    folder: Path
    label: str
    variant: str
    config: dict[str, Any]
    facts: dict[str, Any]
    train: list[dict[str, float]]
    val: list[dict[str, float]]
    evals: dict[str, dict[str, Any]]
    monitor: list[dict[str, float]] = field(default_factory=list)
    needle: list[dict[str, float]] = field(default_factory=list)
    tokenizer: str = "none"  # fingerprint of the tokenizer
    diverged: str | None = None
    skipped: int = 0
    counted: dict[str, Any] = field(default_factory=dict)
    texts_in_common: dict[str, str | None] = field(default_factory=dict)

    @property
    def seed(self) -> int | None:
        return self.config.get("seed")

    @property
    def step(self) -> int:
        return self.train[-1]["step"] if self.train else 0

    @property
    def finished(self) -> bool:
        return bool(self.train) and self.step >= self.config.get("steps", 0)

    @property
    def spikes(self) -> int:
        return self.counted["spikes"] if "spikes" in self.counted else spikes([line["loss"] for line in self.train])

    @property
    def tokens_per_s(self) -> float | None:
        """Median of the logged speeds: slow first steps do not count."""
        speeds = [line["tokens_per_s"] for line in self.train if "tokens_per_s" in line]
        return float(np.median(speeds)) if speeds else None

    def last_tenth(self, key: str = "loss") -> float | None:
        """Mean of a training loss over the last tenth of the logged steps; None if that loss was not logged."""
        if key in self.counted:
            return self.counted[key]
        losses = [line[key] for line in self.train if key in line]
        return float(np.mean(losses[-max(1, len(losses) // 10) :])) if losses else None

    def results(self, name: str) -> dict[str, Any] | None:
        """The results of the evaluation; None if the run lacks it or diverged."""
        return None if self.diverged or name not in self.evals else self.evals[name]["results"]

    def value(self, path: str) -> float | None:
        """The number at EVALUATION.KEY.KEY, for example `perplexity.recall.hit.loss`, or of training at `train.NAME`.

        A key may have dots, for example the depth 0.5. In a list of rows a key chooses the row whose first value equals
        it, for example `quantization.bits.4.loss_change`. NAME is val_loss, spikes, seconds, tokens, tokens_to_0.5 (tokens
        until a needle accuracy of 0.5), or a number of the lines with a training loss (mean of the last tenth). None if it was
        not measured or is not finite, and for a diverged run, except spikes, seconds, tokens and tokens_to_X.
        """
        evaluation, _, keys = path.partition(".")
        if evaluation == "train":
            return self._of_training(keys)
        value = _at(self.results(evaluation), keys)
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None

    def error(self, path: str) -> float | None:
        """The standard error of the number at `path`: at PATH_se or, of those in WITH_SE, at `se` beside it."""
        parent, _, key = path.rpartition(".")
        error = self.value(f"{path}_se")
        return self.value(f"{parent}.se") if error is None and key in WITH_SE else error

    def keys(self, path: str) -> list[str]:
        evaluation, _, keys = path.partition(".")
        tree = _at(self.results(evaluation), keys)
        return [key for key in tree if self.value(f"{path}.{key}") is not None] if isinstance(tree, dict) else []

    def _of_training(self, name: str) -> float | None:
        last = self.train[-1] if self.train else {}
        if name == "spikes":
            return self.spikes
        if name in ("tokens", "seconds"):
            return last.get("tokens", 0) if name == "tokens" else last.get("time_s")
        if name.startswith("tokens_to_"):
            level = float(name.removeprefix("tokens_to_"))
            return next((line["tokens"] for line in self.needle if line["needle_acc"] >= level), None)
        if self.diverged:
            return None
        if name == "val_loss":
            return self.val[-1]["val_loss"] if self.val else None
        return self.last_tenth(name)


def _at(tree: Any, path: str) -> Any:
    """The value at KEY.KEY in nested dictionaries and lists of rows, or None."""
    if isinstance(tree, list):  # a row is named by its first value; of equal names the first row counts
        rows = [row for row in tree if isinstance(row, dict) and row]
        tree = {str(next(iter(row.values()))): row for row in reversed(rows)}
    if not isinstance(tree, dict) or path in tree:
        return tree[path] if isinstance(tree, dict) else None
    for key in tree:  # which may have dots
        if path.startswith(f"{key}.") and (value := _at(tree[key], path.removeprefix(f"{key}."))) is not None:
            return value
    return None


def read_json(path: Path, fix: str = "repeat the command that writes it") -> dict[str, Any] | None:
    """The content of a JSON file; None if the file does not exist. ValueError with `fix` if the file is damaged."""
    return read_json_object(path, fix) if path.is_file() else None


def read_run(folder: Path) -> Run:
    """Read a run folder. ValueError if it is not a run, or a run without training metrics."""
    if not (folder / "config.yaml").is_file():
        raise ValueError(
            f"{folder} is not the folder of a run: give runs=[runs/A,runs/B], folders that python train.py has made"
        )
    config = read_run_config(folder)
    lines = list(read_json_lines(folder / "metrics.jsonl"))
    failure = read_json(folder / DIVERGED, "move it away and train the run again")
    tokenizer = read_json(folder / "tokenizer.json", "copy it from the folder of the run's data")
    if not failure and not any("loss" in line for line in lines):
        raise ValueError(f"{folder} has no training metrics: train the run first, or continue it with resume=true")
    again = "move it away and repeat the evaluation"
    evals = {path.stem: read_json_object(path, again) for path in sorted((folder / "eval").glob("*.json"))}
    for name, content in evals.items():
        results = content.get("results")
        if not isinstance(results, dict) or any(key not in results for key in NEEDED.get(name, ())):
            raise ValueError(f"{folder / 'eval' / name}.json has no results: {again}")
    return Run(
        folder=folder,
        label=folder.resolve().name,
        variant=variant(config),
        config=config,
        facts=lines[0] if lines else {},
        evals=evals,
        **{name: [line for line in lines if key in line] for name, key in LINES_WITH.items()},
        tokenizer=(tokenizer or {}).get("fingerprint", "none"),
        diverged=failure["error"] if failure else None,
        skipped=max((line["step"] for line in lines if "skipped" in line), default=0),
    )


def read_runs(folders: list[str]) -> list[Run]:
    """Read the runs, refuse those that cannot be compared, and give each a label."""
    names = labels(folders)
    runs = [read_run(Path(folder)) for folder in folders]
    if differ := other_data(runs):
        keep_bits_per_byte(runs, differ)
    refuse_other_shards(runs)
    refuse_other_settings(runs)
    for run, label in zip(runs, names, strict=True):
        run.label = label
    return runs


def labels(folders: Sequence[str | Path]) -> list[str]:
    """The name of each run folder; where two have one name, every path below the folder that has them all."""
    if not folders:
        raise ValueError("runs is empty: give runs=[runs/A,runs/B]")
    paths = [Path(folder).resolve() for folder in folders]
    names, common = [path.name for path in paths], os.path.commonpath([path.parent for path in paths])
    return names if len(set(names)) == len(names) else [str(path.relative_to(common)) for path in paths]


def text_named(run: Run, name: str) -> str | None:
    """The text that the run's evaluation `name` was given; None for the run's validation documents."""
    settings, results = run.evals[name].get("config", {}), run.evals[name]["results"]
    given = given_input(settings)
    return given and results.get("text", Path(given).name)  # an older result has a `text` of the run's shards, too


def text_of(run: Run, name: str) -> str:
    """The text of the run's evaluation `name`, in words."""
    return text_named(run, name) or f"the validation documents of {text_read(run.config['data'])[0]}"


def other_data(runs: list[Run]) -> str:
    """Which two runs have different tokenizers or data, so that their losses cannot be compared, in words; "" if none."""
    first, digest = runs[0], runs[0].facts.get("text_digest")
    for run in runs[1:]:
        differ = [f"data (data.{key})" for key in DATA_KEYS if run.config["data"].get(key) != first.config["data"].get(key)]
        if digest is not None and run.facts.get("text_digest") == digest:
            differ = []
        if wrong := ["tokenizers"] * (run.tokenizer != first.tokenizer) + differ:
            return f"{first.folder} and {run.folder} have different {wrong[0]}"
    return ""


def keep_bits_per_byte(runs: list[Run], differ: str) -> None:
    """Keep only the bits per byte of texts given to all runs. ValueError, beginning with `differ`, without such a text."""
    texts = [{name for name, one in run.evals.items() if "text_sha256" in one["results"]} for run in runs]
    common = {name for name in set.intersection(*texts) if command_of(name) == "perplexity"}
    if not common:
        raise ValueError(f"{differ}, {NOT_COMPARED}, or compare bits per byte (eval.perplexity text=FILE)")
    for run in runs:
        run.texts_in_common = {name: text_named(run, name) for name in sorted(common)}
        run.train = [{key: value for key, value in line.items() if "loss" not in key} for line in run.train]
        run.val, run.monitor, run.needle = [], [], []
        run.evals = {name: run.evals[name] for name in run.texts_in_common}
        for content in run.evals.values():
            content["results"] = {key: value for key, value in content["results"].items() if key in OF_ANY_TOKENIZER}


def refuse_other_shards(runs: list[Run]) -> None:
    """ValueError where two runs were trained on different shards of one text. An older run does not name its shards."""
    known: dict[tuple[str, ...], Run] = {}
    for run in (run for run in runs if run.facts.get("text_digest") is not None):
        first = known.setdefault((run.tokenizer, *(str(run.config["data"].get(key)) for key in DATA_KEYS)), run)
        if first.facts["text_digest"] != run.facts["text_digest"]:
            wrong = "were trained on different shards (other numbers of tokens or checksums)"
            raise ValueError(f"{first.folder} and {run.folder} {wrong}, {NOT_COMPARED}")


def settings_of(evaluation: dict[str, Any]) -> dict[str, Any]:
    """The settings in an evaluation's JSON that were given, the same on every machine: of a path, only its last part."""
    given = {key: value for key, value in evaluation.get("config", {}).items() if value is not None}
    given |= {key: Path(given[key]).name for key in (*INPUTS, "include_path") if key in given}
    given |= {key: sorted(given[key]) for key in ("tasks",) if key in given}
    return {key: value for key, value in given.items() if key not in ("run", "out")}


def measured(name: str, evaluation: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The settings, text and shape of a result, equal in results that can be compared. config: of the result's run."""
    results, settings = evaluation["results"], settings_of(evaluation)
    if name == "perplexity":
        known = {"text": results.get("sha256", ""), "frequent": (results.get("recall") or {}).get("rare_at_most")}
    elif command_of(name) in ("needle", "attention_noise"):  # also of a given text, as needle_books
        given = {key: settings.get(key) for key in ("seed", "text", "shards", "samples")}
        given["digits"] = trained_digits(config)  # of the numbers to find
        known = _shape(results) | {"settings": given, "windows": settings.get("windows")}
    else:
        known = _shape(results) | {"settings": {key: value for key, value in settings.items() if key not in IGNORED_SETTINGS}}
    return {key: value for key, value in known.items() if value is not None}


def _shape(results: dict[str, Any]) -> dict[str, Any]:
    shape: dict[str, Any] = {key: results.get(key) for key in RECORDED}
    if "cells" in results:
        shape["cells"] = [[cell.get(key) for key in ("length", "depth", "needles", "asked")] for cell in results["cells"]]
    if isinstance(absolute := results.get("absolute"), dict):
        shape["depths"] = list(absolute.get("depths", ()))
    if isinstance(shots := results.get("shots"), list):
        shape["shots"] = [row.get("shots") for row in shots]
    return shape | {f"documents of {task}": about.get("sha256") for task, about in results.get("per_task", {}).items()}


def refuse_other_settings(runs: list[Run]) -> None:
    """ValueError where one evaluation of two runs was on different text or with different settings."""
    known: dict[tuple[str, str], tuple[Any, Run]] = {}  # (evaluation, what was measured) -> its value, the first run with it
    results = [(run, name) for run in runs for name in run.evals]
    for run, name in results:
        for key, value in measured(name, run.evals[name], run.config).items():
            expected, first = known.setdefault((name, key), (value, run))
            if value == expected:
                continue
            what = "the text" if key.endswith("sha256") else key
            if key == "settings":
                what = next(setting for setting in (expected | value) if expected.get(setting) != value.get(setting))
            wrong = f"{first.folder} and {run.folder} ran eval.{command_of(name)} on different text or settings"
            raise ValueError(f"{wrong}: repeat both with the same ones; they differ in {what}")


@dataclass
class Arm:
    """One model and its training at one point of a grid, if any. name: `arm` and point. reference: what it is compared with."""

    name: str
    arm: str = ""
    point: str = ""
    reference: str | None = None
    variant: str = ""
    overrides: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    colour: str = INK
    line: str = "-"

    @property
    def several(self) -> bool:
        return len(self.runs) > 1


def trained_tokens(arm: Arm) -> float:
    return float(max(run.value("train.tokens") or 0 for run in arm.runs))


def arms_of(runs: list[Run]) -> list[Arm]:
    """Group runs that differ in their seed alone. An arm with finished runs leaves out others, which would bias the mean."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        key = _without_seed(run)
        repeated = any(run.seed == other.seed for other in groups.get(key, []))
        groups.setdefault(f"{key} {run.folder}" if repeated else key, []).append(run)
    kept = [[run for run in members if run.finished] or members for members in groups.values()]
    variants, names, arms = [members[0].variant for members in kept], [], []
    for members, kind in zip(kept, variants, strict=True):
        names.append(kind if len(members) > 1 and variants.count(kind) == 1 else _common_label(members))
        name = f"{names[-1]} ({names.count(names[-1])})" if names.count(names[-1]) > 1 else names[-1]
        arms.append(Arm(name, name, reference=arms[0].name if arms else None, variant=kind, runs=members))
    give_colours(arms)
    return arms


def _without_seed(run: Run) -> str:
    """A text that is equal for runs that differ only in the seed, the machine's folders, the speed and the dtype."""
    # A run of an older version lacks keys that are null in newer runs.
    config = {key: value for key, value in identity_of(run.config, but=("seed",)).items() if value is not None}
    config.pop("data.shard_tokens", None)
    config["init_from"] = config.get("init_from", "").removesuffix(str(run.seed))  # each seed may begin with another run
    return json.dumps(config, sort_keys=True, default=str)


def _common_label(runs: list[Run]) -> str:
    """The label of a single run, or the beginning that the labels of several seeds share before their seed."""
    if len(runs) == 1:
        return runs[0].label
    common = os.path.commonprefix([run.label.removesuffix(str(run.seed)) for run in runs]).rstrip("-_=./ ")
    return re.sub(r"(^|[-_./ ]+)(s|seed)$", "", common) or runs[0].variant


def give_colours(arms: list[Arm]) -> None:
    """Set each arm's colour (its variant's, or a free one for other arms) and each point's line style."""
    palette: dict[str, str] = {}
    variants = {arm.arm: arm.variant for arm in reversed(arms)}  # of an arm's first point
    for name in dict.fromkeys(arm.arm for arm in arms):
        shade = colour(variants[name])
        if shade != INK and shade not in palette.values():
            palette[name] = shade
    free = itertools.cycle([shade for shade in CYCLE if shade not in palette.values()] or CYCLE)
    points = list(dict.fromkeys(arm.point for arm in arms))
    for arm in arms:
        arm.colour = palette[arm.arm] = palette.get(arm.arm) or next(free)
        arm.line = LINES[points.index(arm.point) % len(LINES)]


def ablation_in(folder: Path) -> dict[str, Any]:
    """The results.json of an ablation. ValueError if the folder has none."""
    content = read_json(folder / "results.json")
    if not content or content.get("eval") != "ablation":
        wrong = f"{folder} has no results.json of an ablation"
        raise ValueError(f"{wrong}: give ablation= a folder that python scripts/ablate.py has written")
    return content


def colours_of(arms: list[dict[str, Any]]) -> dict[str, str]:
    """Name -> colour of the arms in a results.json, as in the ablation's figures."""
    shown = [Arm(arm["name"], arm["arm"], arm["point"], variant=arm["variant"]) for arm in arms]
    give_colours(shown)
    return {arm.name: arm.colour for arm in shown}
