"""Tables of the arms' numbers and of their paired differences, as data and as text."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from eval.attention_noise import READINGS
from eval.report.runs import Arm, Run, paired_by_seed, text_of
from eval.report.statistics import Difference, holm, mean_sd, paired

Shown = str | Callable[[float], str]
Read = Callable[[Run], Any]  # a value, (value, standard error), or None where it was not measured


@dataclass
class Cell:
    """An arm's value: of one run, with its standard error over samples if known, or the mean over seeds.

    values: one per run of the arm, None where not measured. sd: standard deviation over seeds. value None: not measured
    in any run.
    """

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
    """A line of a table with one cell per arm. better: "lower", "higher", or "" for neither. hint: a remark under the name."""

    group: str
    name: str
    cells: list[Cell] = field(default_factory=list)
    better: str = ""
    hint: str = ""


@dataclass
class Contrast(Difference):
    """An arm minus its reference in one row of a table, paired over the seeds that both have.

    p_holm: p corrected for the arms that are compared in this row (Holm 1979).
    """

    group: str = ""
    name: str = ""
    better: str = ""
    arm: str = ""
    reference: str = ""
    seeds: list[int] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)
    p_holm: float | None = None

    @property
    def text(self) -> str:
        size = abs(self.mean)
        shown = "+.3g" if 0 < size < 1e-3 else "+z.4f" if size < 1 else "+.2f"
        mean, *ends = (None if x is None else f"{x:{shown}}" for x in (self.mean, self.low, self.high))
        if self.low is None:
            return f"{mean} ({'n = 1' if self.n == 1 else 'the same in every seed'})"
        return f"{mean} [{', '.join(ends)}]"

    @property
    def clear(self) -> bool:
        """Whether zero lies outside of the interval."""
        return self.low is not None and not self.low <= 0 <= self.high


# ---------------------------------------- rows


def row_of(arms: list[Arm], group: str, name: str, read: Read, shown: Shown, better: str = "", hint: str = "") -> Row:
    """A row of the values that `read` returns for each run."""
    seeds = any(arm.several for arm in arms)
    return Row(group, name, [_cell([read(run) for run in arm.runs], shown, seeds) for arm in arms], better, hint)


def _cell(found: list[Any], shown: Shown, seeds: bool) -> Cell:
    """The cell of one arm. seeds: some arm has several seeds, so ± is over seeds in the whole table."""
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
        return Cell(measured[0], se, f"{text} ± {show(se)}" if se is not None and not seeds else text, None, values)
    mean, sd = mean_sd(measured)
    text = show(measured[0]) if len(set(measured)) == 1 else f"{show(mean)} ± {show(sd)}"
    return Cell(mean, None, text if len(measured) == len(values) else f"{text} (n = {len(measured)})", sd, values)


def at(path: str, error: str | None = None) -> Read:
    """A reader of the number at the metric path `path` (Run.value), with its standard error at the path `error`."""

    def read(run: Run) -> Any:
        value = run.value(path)
        return (value, run.value(error)) if error and value is not None else value

    return read


def headline_table(arms: list[Arm]) -> list[Row]:
    """The headline table, one column per arm."""
    several = any(arm.several for arm in arms)

    def fact(name: str) -> Read:
        return lambda run: run.facts.get(name)

    rows = [
        row_of(arms, "Model", "variant", lambda run: run.variant, "{}"),
        row_of(arms, "Model", "parameters without embeddings", fact("params_non_embedding"), si),
        row_of(arms, "Model", "parameters in total", fact("params"), si),
        row_of(arms, "Model", "training FLOPs per token", fact("flops_per_token"), si),
        row_of(arms, "Training", "seed", lambda run: str(run.seed) if several else run.seed, "{}"),
        row_of(arms, "Training", "tokens", at("train.tokens"), si),
        row_of(arms, "Training", "tokens/s, median over the run", lambda run: run.tokens_per_s, si),
        row_of(arms, "Training", "training time, seconds", at("train.seconds"), "{:.0f}"),
    ]
    for name, read, shown, hint in _losses(arms):
        rows.append(row_of(arms, "Loss", name, read, shown, "lower", hint))
    pairs = _needle_pairs(arms)
    for needles, asked in pairs:
        rows += _needle_rows(arms, needles, asked, several=sum(other == needles for other, _ in pairs) > 1)
    for name, read, better, hint in _attention():
        rows.append(row_of(arms, "Attention", name, read, "{:.3f}", better, hint))
    # Optional numbers, which older runs and some kinds of training lack, have a row only if some run has them.
    return [row for row in rows if row.name not in OPTIONAL or any(cell.value is not None for cell in row.cells)]


RECALL = {
    "loss on recalled tokens (AR hits)": "hit",
    "loss on recalled tokens that are rare in training": "rare_hit",
    "loss on all other tokens": "other",
}
NEGATIVE = "negative share of the absolute mass"
OPTIONAL = {
    *RECALL,
    "training loss on text, last tenth",
    "training loss on retrieval documents, last tenth",
    "attention to the answer, signed per layer",
    "attention noise, signed per layer",
    "entropy of an attention row (nats)",
    NEGATIVE,
    "share of heads that are sinks",
}


def trained_on(arms: list[Arm]) -> str:
    """The text of the training loss, in words."""

    def of(data: dict[str, Any]) -> str:
        weight = (data.get("retrieval") or {}).get("weight", 0)
        text = "generated questions" if data["source"] == "mqar" else "the training text"
        return f"text mixed with {weight} % synthetic retrieval documents" if weight else text

    return " or ".join(dict.fromkeys(of(arm.runs[0].config["data"]) for arm in arms))


def held_out(run: Run) -> str:
    """The text of the validation loss, in words."""
    data = run.config["data"]
    return "held-out questions" if data["source"] == "mqar" else f"held-out documents of {data['name']}, text alone"


def _losses(arms: list[Arm]) -> Iterator[tuple[str, Read, str, str]]:
    run, trained = arms[0].runs[0], trained_on(arms)
    easier = ", which are easier than text: a higher validation loss does not mean overfitting by itself"
    hint = f"on {trained}{easier if 'retrieval' in trained else ''}"
    yield "training loss, last tenth", at("train.loss"), "{:.3f}", hint
    yield "training loss on text, last tenth", at("train.loss_text"), "{:.3f}", ""
    yield "training loss on retrieval documents, last tenth", at("train.loss_retrieval"), "{:.3f}", ""
    yield "validation loss, end of training", at("train.val_loss"), "{:.3f}", f"on {held_out(run)}"
    tested = f"on {text_of(run, 'perplexity')}" if "perplexity" in run.evals else ""
    yield "test loss (nats per token)", at("perplexity.loss", "perplexity.se"), "{:.3f}", tested
    yield "perplexity", at("perplexity.ppl"), "{:.2f}", ""
    yield "bits per byte", at("perplexity.bits_per_byte"), "{:.3f}", ""
    for name, part in RECALL.items():
        path = f"perplexity.recall.{part}"
        yield name, at(f"{path}.loss", f"{path}.se"), "{:.3f}", ""


def _attention() -> Iterator[tuple[str, Read, str, str]]:
    kinds = (("answer", "attention to the answer", "higher"), ("noise", "attention noise", "lower"))
    hints = {
        "signed": "masses summed over layers, then divided by the summed row sums",
        "signed_per_layer": "each layer divided by its own row sum, then averaged over layers",
    }
    for reading, (key, name, better) in itertools.product((*READINGS, "signed_per_layer"), kinds):
        path = f"attention_noise.{reading}.mean.{key}"
        yield f"{name}, {reading.replace('_', ' ')}", at(path, f"{path}_se"), better, hints.get(reading, "")
    for key, name in (("entropy", "entropy of an attention row (nats)"), ("negative", NEGATIVE)):
        yield name, at(f"attention_noise.{key}.mean", f"attention_noise.{key}.se"), "", ""
    yield "share of heads that are sinks", _sinks, "", ""


def _sinks(run: Run) -> Any:
    """The share of sinks, with its standard error, in the longest windows that were measured."""
    lengths = (run.results("attention_noise") or {}).get("sink") or {}
    path = f"attention_noise.sink.{max(lengths, key=int, default='none')}"
    return at(f"{path}.share", f"{path}.se")(run)


def _needle_pairs(arms: list[Arm]) -> list[tuple[int, int]]:
    found = [results.get("pairs", []) for arm in arms for results in arm.results("needle")]
    return list(dict.fromkeys((pair["needles"], pair["asked"]) for pairs in found for pair in pairs)) or [(1, 1)]


def _needle_rows(arms: list[Arm], needles: int, asked: int, several: bool) -> Iterator[Row]:
    """several: whether other numbers are asked of as many needles."""

    def read(run: Run, key: str) -> Any:
        for pair in (run.results("needle") or {}).get("pairs", []):
            if (pair["needles"], pair["asked"]) == (needles, asked):
                return (pair[key], pair["se"]) if key == "accuracy" else pair[key]
        return None

    which = f"N={needles}" if needles == 1 else f"N={needles}, R={asked}"
    yield row_of(arms, "Needle", f"needle accuracy, {which}", lambda run: read(run, "accuracy"), "{:.3f}", "higher")
    if needles > 1:
        name = f"needle ranked first of {needles}" + (f", R={asked}" if several else "")
        yield row_of(arms, "Needle", name, lambda run: read(run, "rank_accuracy"), "{:.3f}", "higher")


def si(value: float) -> str:
    """1234567 -> 1.23M, and 999600, which is rounded up, -> 1M."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if float(f"{value:.3g}") >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


# ---------------------------------------- differences


def contrasts(arms: list[Arm], rows: Iterable[Row]) -> list[Contrast]:
    """Every arm minus its reference, row by row, paired by seed. p_holm corrects for the arms of one row."""
    found = []
    for row in rows:
        if row.group in ("Model", "Training"):
            continue
        values = {arm.name: arm.by_seed(cell.values) for arm, cell in zip(arms, row.cells, strict=True)}
        of_row = []
        for arm in arms:
            # In an unfinished ablation, the reference may have no run yet.
            if arm.reference in values and (shared := paired_by_seed(values[arm.name], values[arm.reference])):
                where = (row.group, row.name, row.better, arm.name, arm.reference, list(shared), list(shared.values()))
                of_row.append(Contrast(*astuple(paired(list(shared.values()))), *where))
        tested = [contrast for contrast in of_row if contrast.p is not None]
        for contrast, p in zip(tested, holm([contrast.p for contrast in tested]), strict=True):
            contrast.p_holm = p
        found += of_row
    return found


# The main numbers of a comparison, with their names in the verdicts.
HEADLINES = {
    "test loss (nats per token)": "test loss",
    "validation loss, end of training": "validation loss",
    "needle accuracy, N=1": "needle accuracy",
    "attention to the answer, absolute": "attention to the answer (absolute)",
    "attention noise, absolute": "attention noise (absolute)",
}


def verdicts(arms: list[Arm], found: list[Contrast]) -> list[str]:
    """One or two sentences for each arm: the HEADLINES that differ from the first arm, and those without a difference."""
    if len(arms) == 1:
        return [f"There is only one arm, {arms[0].name}: add runs of another arm to runs=[...] to compare them."]
    by_place = {(contrast.arm, contrast.name): contrast for contrast in found}
    sentences = []
    for arm in arms[1:]:
        mine = [by_place[arm.name, name] for name in HEADLINES if (arm.name, name) in by_place]
        sentences.append(f"{arm.name} compared with {arms[0].name}{_verdict(mine)}")
    return sentences


def _verdict(found: list[Contrast]) -> str:
    if not found:
        return ": the two arms have no number in common for a common seed."
    n = max(contrast.n for contrast in found)
    parts = []
    if n == 1:
        numbers = ", ".join(f"{HEADLINES[contrast.name]} {minus(f'{contrast.mean:+.3f}')}" for contrast in found)
        return f" (n = 1 seed): {numbers}. One seed cannot tell a difference from chance: train with -m seed=1,2,3."
    # Equal differences have no spread, so no interval and no p.
    if clear := [one for one in found if one.clear or (one.n > 1 and one.mean and not one.sd)]:
        parts.append("; ".join(_finding(contrast, n) for contrast in clear) + ".")
    if unclear := [contrast for contrast in found if contrast not in clear]:
        numbers = ", ".join(f"{HEADLINES[contrast.name]} {_smallest(contrast, n)}" for contrast in unclear)
        parts.append(f"No difference detected (smallest detectable difference in brackets): {numbers}.")
    return f" (n = {n} seeds): {' '.join(parts)}"


def _finding(contrast: Contrast, n: int) -> str:
    worse = (contrast.mean > 0) == (contrast.better == "lower")
    fewer = f" (n = {contrast.n})" if contrast.n < n else ""
    return f"{HEADLINES[contrast.name]} {minus(contrast.text)}, {'worse' if worse else 'better'}{fewer}"


def _smallest(contrast: Contrast, n: int) -> str:
    if contrast.n == 1:
        return "(n = 1)"
    fewer = f", n = {contrast.n}" if contrast.n < n else ""
    return f"({contrast.detectable:.3g}{fewer})" if contrast.sd else f"(the difference is the same in every seed{fewer})"


def minus(text: str) -> str:
    """Typeset minus signs."""
    return text.replace("-", "−")


# ---------------------------------------- text


def report_lines(arms: list[Arm], rows: list[Row]) -> list[list[str]]:
    """The headline table as text, its header first."""
    return [["", *(arm.title for arm in arms)]] + [[row.name, *(cell.text for cell in row.cells)] for row in rows]


def difference_lines(arms: list[Arm], rows: list[Row], found: list[Contrast], head: str = "") -> list[list[str]]:
    """The rows' differences as text, one column per arm after the first, the header first; [] without differences."""
    by_place = {(contrast.name, contrast.arm): contrast.text for contrast in found}
    lines = [[row.name, *(by_place.get((row.name, arm.name), "") for arm in arms[1:])] for row in rows]
    lines = [line for line in lines if any(line[1:])]
    return [[head, *(arm.name for arm in arms[1:])], *lines] if lines else []


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table in GitHub's Markdown, the header first, numbers to the right."""
    ruled = [lines[0], ["---", *("---:" for _ in lines[0][1:])], *lines[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in ruled)


def columns(lines: Sequence[Sequence[str]]) -> str:
    """A table for the terminal."""
    first, *widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def padded(line: Sequence[str]) -> str:
        return "  ".join([line[0].ljust(first), *map(str.rjust, line[1:], widths)])

    return "\n".join(map(padded, lines))
