"""Tables of the arms' numbers and of their paired differences, as data and as text."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from eval.attention_noise import READINGS
from eval.report.differences import contrasts, long_table
from eval.report.runs import Arm, Run, text_of
from eval.report.statistics import Difference, mean_sd

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
    rows, several, run = [], any(arm.several for arm in arms), arms[0].runs[0]

    def add(group: str, name: str, read: Read, shown: Shown = "{:.3f}", better: str = "", hint: str = "") -> None:
        rows.append(row_of(arms, group, name, read, shown, better, hint))

    def add_optional(*about: Any) -> None:
        """Add the row of a number that older runs and some kinds of training lack if some run has it."""
        add(*about)
        if not any(cell.n for cell in rows[-1].cells):
            rows.pop()

    add("Model", "variant", lambda run: run.variant, "{}")
    add("Model", "parameters without embeddings", lambda run: run.facts.get("params_non_embedding"), si)
    add("Model", "parameters in total", lambda run: run.facts.get("params"), si)
    add("Model", "training FLOPs per token", lambda run: run.facts.get("flops_per_token"), si)
    add("Training", "seed", lambda run: str(run.seed) if several else run.seed, "{}")
    add("Training", "tokens", at("train.tokens"), si)
    add("Training", "tokens/s, median over the run", lambda run: run.tokens_per_s, si)
    add("Training", "training time, seconds", at("train.seconds"), "{:.0f}")
    trained = trained_on(arms)
    easier = ", which are easier than text: a higher validation loss does not mean overfitting by itself"
    hint = f"on {trained}{easier if 'retrieval' in trained else ''}"
    add("Loss", "training loss, last tenth", at("train.loss"), better="lower", hint=hint)
    for key, name in (("text", "text"), ("retrieval", "retrieval documents")):
        add_optional("Loss", f"training loss on {name}, last tenth", at(f"train.loss_{key}"), "{:.3f}", "lower")
    add("Loss", "validation loss, end of training", at("train.val_loss"), better="lower", hint=f"on {held_out(run)}")
    tested = f"on {text_of(run, 'perplexity')}" if "perplexity" in run.evals else ""
    add("Loss", "test loss (nats per token)", at("perplexity.loss", "perplexity.se"), better="lower", hint=tested)
    add("Loss", "perplexity", at("perplexity.ppl"), "{:.2f}", "lower")
    add("Loss", "bits per byte", at("perplexity.bits_per_byte"), better="lower")
    for name, part in RECALL.items():
        path = f"perplexity.recall.{part}"
        add_optional("Loss", name, at(f"{path}.loss", f"{path}.se"), "{:.3f}", "lower")
    rows += _needle_rows(arms)
    for reading, hint in HINTS.items():
        for key, name, better in (("answer", "attention to the answer", "higher"), ("noise", "attention noise", "lower")):
            path, optional = f"attention_noise.{reading}.mean.{key}", reading not in READINGS
            about = f"{name}, {reading.replace('_', ' ')}", at(path, f"{path}_se"), "{:.3f}", better, hint
            (add_optional if optional else add)("Attention", *about)
    for key, name in (("entropy", "entropy of an attention row (nats)"), ("negative", "negative share of the absolute mass")):
        add_optional("Attention", name, at(f"attention_noise.{key}.mean", f"attention_noise.{key}.se"))
    add_optional("Attention", "share of heads that are sinks", _sinks)
    return rows


RECALL = {
    "loss on recalled tokens (AR hits)": "hit",
    "loss on recalled tokens that are rare in training": "rare_hit",
    "loss on all other tokens": "other",
}
HINTS = {
    **dict.fromkeys(READINGS, ""),
    "signed": "masses summed over layers, then divided by the summed row sums",
    "signed_per_layer": "each layer divided by its own row sum, then averaged over layers",
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


def _sinks(run: Run) -> Any:
    """The share of sinks, with its standard error, in the longest windows that were measured."""
    lengths = (run.results("attention_noise") or {}).get("sink") or {}
    path = f"attention_noise.sink.{max(lengths, key=int, default='none')}"
    return at(f"{path}.share", f"{path}.se")(run)


def _needle_rows(arms: list[Arm]) -> Iterator[Row]:
    measured = [results.get("pairs", []) for arm in arms for results in arm.results("needle")]
    kinds = list(dict.fromkeys((pair["needles"], pair["asked"]) for pairs in measured for pair in pairs)) or [(1, 1)]
    for needles, asked in kinds:

        def read(run: Run, key: str, kind: tuple[int, int] = (needles, asked)) -> Any:
            pairs = (run.results("needle") or {}).get("pairs", [])
            pair = next((pair for pair in pairs if (pair["needles"], pair["asked"]) == kind), None)
            return pair and ((pair[key], pair["se"]) if key == "accuracy" else pair[key])

        name = f"needle accuracy, N={needles}" + (f", R={asked}" if needles > 1 else "")
        yield row_of(arms, "Needle", name, lambda run, read=read: read(run, "accuracy"), "{:.3f}", "higher")
        if needles > 1:
            several = sum(other == needles for other, _ in kinds) > 1  # other numbers are asked of as many needles
            name = f"needle ranked first of {needles}" + (f", R={asked}" if several else "")
            yield row_of(arms, "Needle", name, lambda run, read=read: read(run, "rank_accuracy"), "{:.3f}", "higher")


def si(value: float) -> str:
    """1234567 -> 1.23M, and 999600, which is rounded up, -> 1M."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if float(f"{value:.3g}") >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


# ---------------------------------------- differences


def differences(arms: list[Arm], rows: Sequence[Row]) -> list[Difference]:
    """Every arm less its reference, row by row, paired by seed, but for the rows that say how a model was trained."""
    compared = [row for row in rows if row.group not in ("Model", "Training")]
    table = long_table(arms, {i: [cell.values for cell in row.cells] for i, row in enumerate(compared)})
    found = contrasts(table, {arm.name: arm.reference for arm in arms})
    for one in found:
        row = compared[one.metric]
        one.group, one.metric, one.better = row.group, row.name, row.better
    return found


# The main numbers of a comparison, with their names in the verdicts.
HEADLINES = {
    "test loss (nats per token)": "test loss",
    "validation loss, end of training": "validation loss",
    "needle accuracy, N=1": "needle accuracy",
    "attention to the answer, absolute": "attention to the answer (absolute)",
    "attention noise, absolute": "attention noise (absolute)",
}


def verdicts(arms: list[Arm], found: list[Difference]) -> list[str]:
    """One or two sentences for each arm: the HEADLINES that differ from the first arm, and those without a difference."""
    if len(arms) == 1:
        return [f"There is only one arm, {arms[0].name}: add runs of another arm to runs=[...] to compare them."]
    by_place = {(one.arm, one.metric): one for one in found}
    of_arms = [(arm, [by_place[arm.name, name] for name in HEADLINES if (arm.name, name) in by_place]) for arm in arms[1:]]
    return [f"{arm.name} compared with {arms[0].name}{_verdict(of_arm)}" for arm, of_arm in of_arms]


def _verdict(found: list[Difference]) -> str:
    if not found:
        return ": the two arms have no number in common for a common seed."
    n, parts = max(one.n for one in found), {True: [], False: []}
    if n == 1:
        numbers = ", ".join(f"{HEADLINES[one.metric]} {minus(f'{one.mean:+.3f}')}" for one in found)
        return f" (n = 1 seed): {numbers}. One seed cannot tell a difference from chance: train with -m seed=1,2,3."
    for one in found:
        fewer, same = f"n = {one.n}" if one.n < n else "", one.n > 1 and not one.sd
        clear = one.clear or (same and bool(one.mean))  # equal differences have no spread, so no interval and no p
        if clear:
            worse = (one.mean > 0) == (one.better == "lower")
            text = f"{minus(one.text)}, {'worse' if worse else 'better'}{fewer and f' ({fewer})'}"
        else:
            least = "the difference is the same in every seed" if same else f"{one.detectable:.3g}" if one.sd else ""
            text = f"({', '.join(filter(None, (least, fewer)))})"
        parts[clear].append(f"{HEADLINES[one.metric]} {text}")
    sentences = [f"{'; '.join(parts[True])}."] if parts[True] else []
    if parts[False]:
        sentences.append(f"No difference detected (smallest detectable difference in brackets): {', '.join(parts[False])}.")
    return f" (n = {n} seeds): {' '.join(sentences)}"


def minus(text: str) -> str:
    """Typeset minus signs."""
    return text.replace("-", "−")


# ---------------------------------------- text


def report_lines(arms: list[Arm], rows: list[Row]) -> list[list[str]]:
    """The headline table as text, its header first."""
    return [["", *(arm.title for arm in arms)]] + [[row.name, *(cell.text for cell in row.cells)] for row in rows]


def difference_lines(arms: list[Arm], rows: list[Row], found: list[Difference], head: str = "") -> list[list[str]]:
    """The rows' differences as text, one column per arm after the first, the header first; [] without differences."""
    by_place = {(one.metric, one.arm): one.text for one in found}
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
