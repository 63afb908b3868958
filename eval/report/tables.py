"""Tables of the arms' numbers and of their paired differences, as data and as text."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from data.stream import text_read
from eval.common import command_of
from eval.report.differences import contrasts, long_table
from eval.report.runs import EVALUATIONS, WITH_SE, Arm, Run
from eval.report.statistics import Difference, mean_sd

Show = Callable[[Any], str]
THREE = "{:.3f}".format
SETTINGS = ("depth", "needles", "asked", "length", "samples", "windows")  # how something was measured: never rows of results
Read = Callable[[Run], Any]  # a value, or (value, standard error), with None for what was not measured
LOSSES = {  # row of the headline table -> metric path
    "training loss, last tenth": "train.loss",
    "training loss on text, last tenth": "train.loss_text",
    "training loss on retrieval documents, last tenth": "train.loss_retrieval",
    "validation loss, end of training": "train.val_loss",
    "test loss (nats per token)": "perplexity.loss",
    "perplexity": "perplexity.ppl",
    "bits per byte": "perplexity.bits_per_byte",
    "loss on recalled tokens (AR hits)": "perplexity.recall.hit.loss",
    "loss on recalled tokens that are rare in training": "perplexity.recall.rare_hit.loss",
    "loss on all other tokens": "perplexity.recall.other.loss",
}
SHOWN_READINGS = ("signed", "absolute", "signed_per_layer")  # of attention_noise (docs/METHODS.md, 7.3)
# The main numbers of a comparison, with their names in the verdicts.
HEADLINES = {
    "test loss (nats per token)": "test loss",
    "validation loss, end of training": "validation loss",
    "needle accuracy, N=1": "needle accuracy",
    "attention to the answer, absolute": "attention to the answer (absolute)",
    "attention noise, absolute": "attention noise (absolute)",
}
OTHERS = 4  # numbers in a verdict of arms without main numbers in common


@dataclass
class Cell:
    """An arm's value: of one run, with its standard error if known, or mean and sd over seeds. values: one per run, or None."""

    value: float | str | None
    se: float | None = None
    text: str = ""
    sd: float | None = None
    values: list[Any] = field(default_factory=list)

    @property
    def n(self) -> int:
        return sum(value is not None for value in self.values)


@dataclass
class Row:
    """A line of a table, a cell per arm. better: "lower", "higher" or ""."""

    group: str
    name: str
    cells: list[Cell] = field(default_factory=list)
    better: str = ""


def row_of(arms: list[Arm], group: str, name: str, read: Read, show: Show = THREE, better: str = "") -> Row:
    seeds = any(arm.several for arm in arms)
    return Row(group, name, [_cell([read(run) for run in arm.runs], show, seeds) for arm in arms], better)


def _cell(readings: list[Any], show: Show, seeds: bool) -> Cell:
    """The cell of one arm. seeds: some arm has several seeds, so ± is over seeds in the whole table."""
    pairs = [reading if isinstance(reading, tuple) else (reading, None) for reading in readings]
    values, errors = map(list, zip(*pairs, strict=True))
    measured = [value for value in values if value is not None]
    if not measured:
        return Cell(None, text="not measured", values=values)
    if isinstance(measured[0], str):
        return Cell(measured[0], text=", ".join(dict.fromkeys(measured)), values=values)
    text, se = show(measured[0]), errors[0]
    if len(values) == 1:
        return Cell(measured[0], se, text if seeds or se is None else f"{text} ± {show(se)}", values=values)
    mean, sd = mean_sd(measured)
    text = text if len(set(measured)) == 1 else f"{show(mean)} ± {show(sd)}"
    return Cell(mean, None, text if len(measured) == len(values) else f"{text} (n = {len(measured)})", sd, values)


def at(path: str) -> Read:
    """A reader of the number at the path `path` (Run.value), with its standard error where there is one."""
    return lambda run: (run.value(path), run.error(path))


def headline_table(arms: list[Arm]) -> list[Row]:
    """The headline table, one column per arm, without the numbers that no run has."""
    row, several = functools.partial(row_of, arms), any(arm.several for arm in arms)
    rows = [
        row("Model", "variant", lambda run: run.variant, str),
        row("Model", "parameters without embeddings", lambda run: run.facts.get("params_non_embedding"), si),
        row("Model", "parameters in total", lambda run: run.facts.get("params"), si),
        row("Model", "training FLOPs per token", lambda run: run.facts.get("flops_per_token"), si),
        row("Training", "seed", lambda run: str(run.seed) if several else run.seed, str),
        row("Training", "tokens", at("train.tokens"), si),
        row("Training", "tokens/s, median over the run", lambda run: run.tokens_per_s, si),
        row("Training", "training time, seconds", at("train.seconds"), "{:.0f}".format),
    ]
    for name, path in LOSSES.items():
        show = "{:.2f}".format if path == "perplexity.ppl" else THREE
        rows.append(row("Loss", name, at(path), show, "lower"))
    for name, text in arms[0].runs[0].texts_in_common.items():
        rows.append(row("Loss", f"bits per byte of {text}", at(f"{name}.bits_per_byte"), better="lower"))
    rows += _needle_rows(arms)
    for reading in SHOWN_READINGS:
        for what, key, better in (("attention to the answer", "answer", "higher"), ("attention noise", "noise", "lower")):
            read = at(f"attention_noise.{reading}.mean.{key}")
            rows.append(row("Attention", f"{what}, {reading.replace('_', ' ')}", read, better=better))
    rows.append(row("Attention", "entropy of an attention row (nats)", at("attention_noise.entropy.mean")))
    rows.append(row("Attention", "negative share of the absolute mass", at("attention_noise.negative.mean")))
    return [row for row in rows if any(cell.n for cell in row.cells)]


def _needle_rows(arms: list[Arm]) -> list[Row]:
    measured = [results.get("pairs", []) for arm in arms for run in arm.runs if (results := run.results("needle"))]
    kinds = list(dict.fromkeys((pair["needles"], pair["asked"]) for pairs in measured for pair in pairs))

    def row(name: str, key: str, kind: tuple[int, int]) -> Row:
        def read(run: Run) -> Any:
            pairs = (run.results("needle") or {}).get("pairs", [])
            pair = next((pair for pair in pairs if (pair["needles"], pair["asked"]) == kind), None)
            return pair and ((pair[key], pair["se"]) if key == "accuracy" else pair[key])

        return row_of(arms, "Needle", name, read, better="higher")

    rows = []
    for needles, queries in kinds:
        of = f", R={queries}"
        rows.append(row(f"needle accuracy, N={needles}{of if needles > 1 else ''}", "accuracy", (needles, queries)))
        if needles > 1:
            several = sum(other == needles for other, _ in kinds) > 1  # R differs among as many needles
            rows.append(row(f"needle ranked first of {needles}{of if several else ''}", "rank_accuracy", (needles, queries)))
    return rows


def trained_on(arms: list[Arm]) -> str:
    def of(data: dict[str, Any]) -> str:
        weight = (data.get("retrieval") or {}).get("weight", 0)
        text = "generated questions" if data["source"] == "mqar" else "the training text"
        return f"text mixed with {weight} % synthetic retrieval documents" if weight else text

    return " or ".join(dict.fromkeys(of(arm.runs[0].config["data"]) for arm in arms))


def held_out(run: Run) -> str:
    data = run.config["data"]
    return "held-out questions" if data["source"] == "mqar" else f"held-out documents of {text_read(data)[0]}, text alone"


# ---------------------------------------- sections for further evaluations


@dataclass
class Section:
    """The numbers of one evaluation, and the settings that all runs share."""

    name: str
    rows: list[Row]
    settings: dict[str, Any]

    @property
    def title(self) -> str:
        return self.name.replace("_", " ").capitalize()


def sections(arms: list[Arm]) -> list[Section]:
    kept = [run for arm in arms for run in arm.runs if not (run.diverged or run.texts_in_common)]
    names = dict.fromkeys(name for run in kept for name in run.evals)
    return [_section(arms, name) for name in names if name not in EVALUATIONS]


def _section(arms: list[Arm], name: str) -> Section:
    """Whole numbers that are equal in all runs are counts and lengths: settings, not results."""
    values = {id(run): dict(scalars(run.results(name) or {})) for arm in arms for run in arm.runs}
    measured = [of_run for of_run in values.values() if of_run]
    keys = list(dict.fromkeys(key for of_run in measured for key in of_run))
    errors = {key: error for key in keys for error in _errors(key) if error in keys}
    same = {key for key in keys if isinstance(measured[0].get(key), int) and len({one.get(key) for one in measured}) == 1}
    hidden = {*same, *errors.values()}
    shown = [key for key in keys if key not in hidden and key.rpartition(" · ")[2] not in SETTINGS]

    def row(key: str) -> Row:
        pairs = {run: (of_run.get(key), of_run.get(errors.get(key))) for run, of_run in values.items()}
        return row_of(arms, name, key, lambda run: pairs[id(run)], lambda x: f"{x:.3f}" if 1e-3 <= abs(x) < 1e3 else f"{x:.3g}")

    settings = {key: measured[0][key] for key in keys if key in same and "=" not in key}  # not of one row
    return Section(name, list(map(row, shown)), settings)


def _errors(key: str) -> list[str]:
    """The possible names of the standard error of `key`; lm-eval's metrics are METRIC,FILTER."""
    parent, separator, last = key.rpartition(" · ")
    metric, comma, chosen = key.partition(",")
    return [f"{parent}{separator}se"] * (last in WITH_SE) + [f"{metric}_stderr{comma}{chosen}", f"{key}_se"]


def scalars(results: dict[str, Any], path: str = "") -> Iterator[tuple[str, float]]:
    """("a · b", number) of all numbers in nested dicts but `se` and what splits up another number: `layers`, per_..., by_..."""
    for key, value in results.items():
        name = f"{path} · {key}" if path else str(key)
        if str(key).startswith(("per_", "by_")) or key == "layers" or (key == "se" and isinstance(value, dict)):
            continue
        if isinstance(value, dict):
            yield from scalars(value, name)
        elif isinstance(value, list) and value and all(isinstance(item, dict) and item for item in value):
            for label, rest in _labelled(value):
                yield from scalars(rest, f"{name} · {label}" if path else label)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, value


def _labelled(items: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(label, rest) of each item, e.g. ("bits=8", ...). A label has as many first values as all labels need to differ."""
    for count in range(1, len(items[0]) + 1):
        named = [", ".join(f"{key}={value}" for key, value in list(item.items())[:count]) for item in items]
        if len(set(named)) == len(items):
            break
    for label, item in zip(named, items, strict=True):
        yield label, dict(list(item.items())[count:])


# ---------------------------------------- differences


def differences(arms: list[Arm], rows: Sequence[Row]) -> list[Difference]:
    """Every arm less its reference, row by row, paired by seed, but for the rows that say how a model was trained."""
    compared = [row for row in rows if row.group not in ("Model", "Training")]
    table = long_table(arms, {i: [cell.values for cell in row.cells] for i, row in enumerate(compared)})
    results = contrasts(table, arms)
    for one in results:
        row = compared[one.metric]
        one.group, one.metric, one.better = row.group, row.name, row.better
    return results


def verdicts(arms: list[Arm], differences: list[Difference]) -> list[str]:
    """One or two sentences for each arm: the HEADLINES that differ from the first arm, and those without a difference."""
    if len(arms) == 1:
        return [f"There is only one arm, {arms[0].name}: add runs of another arm to runs=[...] to compare them."]
    of_arms = {arm.name: main_numbers(arm, differences) for arm in arms[1:]}
    return [f"{name} compared with {arms[0].name}{_verdict(of_arm)}" for name, of_arm in of_arms.items()]


def main_numbers(arm: Arm, differences: list[Difference]) -> list[Difference]:
    """The arm's differences in the HEADLINES, or the first others where there are none."""
    of_arm = [one for one in differences if one.arm == arm.name]
    by_name = {one.metric: one for one in of_arm}
    return [by_name[name] for name in HEADLINES if name in by_name] or of_arm[:OTHERS]


def _verdict(headlines: list[Difference]) -> str:
    if not headlines:
        return ": the two arms have no number in common for a common seed."
    n = max(one.n for one in headlines)
    if n == 1:
        numbers = ", ".join(f"{HEADLINES.get(one.metric, one.metric)} {minus(f'{one.mean:+z.3f}')}" for one in headlines)
        return f" (n = 1 seed): {numbers}. One seed cannot tell a difference from chance: train with -m seed=1,2,3."
    clear, unclear = [], []
    for one in headlines:
        name, fewer = HEADLINES.get(one.metric, one.metric), [f"n = {one.n}"] if one.n < n else []
        if one.resolved:
            improved = (one.mean < 0) == (one.better == "lower")
            judged = ["better" if improved else "worse"] if one.better else []
            clear.append(", ".join([f"{name} {minus(one.text)}", *judged, *fewer]))
        else:
            same = "the difference is the same in every seed"
            least = [same] if one.constant else [f"{one.detectable:.3g}"] if one.sd else []
            unclear.append(f"{name} ({', '.join(least + fewer)})")
    sentences = [f"{'; '.join(clear)}."] if clear else []
    if unclear:
        sentences.append(f"No difference detected (smallest detectable difference in brackets): {', '.join(unclear)}.")
    return f" (n = {n} seeds): {' '.join(sentences)}"


# ---------------------------------------- text


def notes(runs: list[Run], arms: list[Arm]) -> list[str]:
    """Warnings for the reader, one line each. runs: also those that their arms leave out."""
    kept = [run for arm in arms for run in arm.runs]
    only = "the runs have different tokenizers or training texts, so only the bits per byte of a common text are compared"
    lines = [only] * bool(runs[0].texts_in_common)
    lines += [line for run in runs for line in _notes_of(run, run in kept)]
    if len({run.train[-1]["tokens"] for run in kept if run.train}) > 1:
        lines.append("the runs were trained on different numbers of tokens, so comparing their losses is not fair")
    if len({str(run.config["data"]["mqar"]) for run in kept if run.config["data"]["source"] == "mqar"}) > 1:
        lines.append("the runs were trained with different data.mqar, so comparing their losses is not fair")
    if mixed := mixed_precision(kept):
        lines.append(mixed)
    seeds = [{run.seed for run in arm.runs} for arm in arms]
    if any(arm.several for arm in arms) and any(of_arm != seeds[0] for of_arm in seeds):
        lines.append("the arms have different seeds: a difference is over the seeds that both of its arms have")
    return lines


def mixed_precision(runs: list[Run]) -> str | None:
    """A note where `dtype=auto` meant different dtypes on the machines of the runs."""
    dtypes = Counter(run.facts.get("dtype") for run in runs)  # older runs recorded none
    if len(dtypes.keys() - {None}) < 2:
        return None
    counts = " and ".join(sorted(f"{dtype or 'a dtype that is not recorded'} ({count})" for dtype, count in dtypes.items()))
    return f"runs were trained in {counts}, so their differences include those of rounding: set dtype to train all alike"


def _notes_of(run: Run, kept: bool) -> list[str]:
    lines, left_out = [], "" if kept else ", and left out of its arm"
    diverged = run.diverged or (not run.finished and run.skipped > run.step)  # no loss was finite after the last logged one
    if not (run.finished or diverged):
        steps = f"at step {run.step:,} of {run.config['steps']:,}"
        lines.append(f"{run.label} is not finished, {steps}{left_out}: continue it with resume=true")
    wanted = ("mqar",) if run.config["data"]["source"] == "mqar" else EVALUATIONS
    if not (run.texts_in_common or diverged) and (absent := [name for name in wanted if name not in run.evals]):
        commands = ", ".join(f"python -m eval.{name} run={run.folder}" for name in absent)
        lines.append(f"{run.label} has no {', '.join(absent)}: run {commands}")
    if diverged:
        lines.append(f"{run.label} diverged{left_out}: its training loss is not finite; lower optim.lr and train it again")
    if old := [name for name, content in run.evals.items() if content.get("step", run.step) < run.step]:
        again = f"run python -m eval.{command_of(old[0])} run={run.folder} again, with the settings in eval/{old[0]}.json"
        lines.append(f"{run.label} was trained further after {', '.join(old)}: {again}")
    return lines


def si(value: float) -> str:
    """1234567 -> 1.23M, and 999600, which is rounded up, -> 1M."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if float(f"{value:.3g}") >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def minus(text: str) -> str:
    return text.replace("-", "−")


def difference_lines(arms: list[Arm], rows: list[Row], differences: list[Difference], head: str) -> list[list[str]]:
    """The rows' differences as text, one column per arm after the first, the header first; [] without differences."""
    by_place = {(one.metric, one.arm): one.text for one in differences}
    lines = [[row.name, *(by_place.get((row.name, arm.name), "") for arm in arms[1:])] for row in rows]
    lines = [line for line in lines if any(line[1:])]
    return [[head, *(arm.name for arm in arms[1:])], *lines] if lines else []


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table in GitHub's Markdown, the header first, numbers to the right."""
    ruled = [lines[0], ["---", *("---:" for _ in lines[0][1:])], *lines[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in ruled)
