"""The tables and notes of an ablation as text; docs/METHODS.md defines every column."""

from collections.abc import Sequence
from typing import Any

from eval.report.comparison import EQUAL_FLOPS, Comparison
from eval.report.differences import FEWEST_DF
from eval.report.statistics import Difference, p_text
from eval.report.tables import markdown, mixed_precision, si

HEAD = ["arm", "heads", "head width", "head norm", "parameters", "FLOPs/token", "n", "diverged"]
ABOUT = (
    "Brackets: 95 % intervals of the mixed model, of arms for all of them at once. Bold: p below 5 %, of parts (an arm less "
    "the arm without it) after Holm's correction. p, alone is the paired t test. docs/METHODS.md, 8.3, defines all of them."
)
TOO_FEW = (
    f"No error is pooled over arms with two seeds and fewer than {FEWEST_DF} degrees of freedom (four arms): the intervals of "
    "the table with p, and of the figure, are paired by seed, and bold stands only in tables that are paired."
)
SEEDS = (
    "Seeds {seeds}; {most} training tokens{read}. ± is the standard deviation over seeds. A difference is the arm less "
    "{reference}, paired by seed (same data order, shared initial weights); negative is better for a loss, positive for an "
    "accuracy. p, Holm is corrected for the comparisons of each metric. Detectable: with 80 % power, given this spread."
)
P_KINDS = {"pooled": "p", "Holm": "p_holm", "alone": "p_alone", "Welch": "p_welch", "equal": "p_equal"}
ERROR = (
    "{where}: a difference of {detectable:.4f} to {reference} is found with 80 % power (n = {n}, 5 % level). An arm varies "
    "from seed to seed by {sd:.4f} (95 % interval {sd_low:.4f} to {sd_high:.4f}, {df} degrees of freedom), and all arms "
    "together by {sd_seed:.4f}."
)
SPREADS_DIFFER = (
    "{where}: the arms differ in their spread over seeds (Bartlett's test, p {p}): the pooled intervals are too narrow for the "
    "arms with a large spread, and too wide for the others. Compare with the paired intervals."
)


def difference_table(differences: Sequence[Difference], head: str) -> str:
    """A row for every part, or arm where there are no parts, and a column for every metric."""
    metrics = list(dict.fromkeys(one.metric for one in differences))
    lines = [[head, *["arms"] * bool(differences[0].part), "n", *(name.removesuffix(differences[0].kind) for name in metrics)]]
    for part, arms in dict.fromkeys((one.part, one.arms) for one in differences):
        row = {one.metric: one for one in differences if (one.part, one.arms) == (part, arms)}
        label = [part, arms] if part else [next(iter(row.values())).arm]
        n = " / ".join(dict.fromkeys(str(one.n) for one in row.values()))
        lines.append([*label, n, *(row[metric].in_bold if metric in row else "" for metric in metrics)])
    return markdown(lines).rstrip()


def tables(comparison: Comparison, point: str) -> list[str]:
    """The tables at one point: arms less the reference, also at equal FLOPs, and pairs; both also at equal covariate."""
    lines = []
    for differences in (comparison.effects, comparison.pairs):
        at_point = [one for one in differences if one.point == point]
        for kind in dict.fromkeys(one.kind for one in at_point):
            of_kind = [one for one in at_point if one.kind == kind]
            head = "part" if of_kind[0].part else f"arm less {of_kind[0].reference}"
            lines.append(difference_table(of_kind, head + kind))
    return lines


def table_by_seed(comparison: Comparison, point: str) -> str | None:
    """The pairs' differences at one point seed by seed; None without several seeds."""
    pairs = [one for one in comparison.pairs if (one.point, one.kind) == (point, "")]
    seeds = list(dict.fromkeys(seed for one in pairs for seed in one.by_seed))
    lines = [["part by seed", "arms", "metric", *(f"seed {seed}" for seed in seeds), *(f"p, {kind}" for kind in P_KINDS)]]
    for one in pairs:
        values = [f"{one.by_seed[seed]:+z.4f}" if seed in one.by_seed else "" for seed in seeds]
        lines.append([one.part, one.arms, one.metric, *values, *map(p_text, one.numbers(*P_KINDS.values()).values())])
    return markdown(lines).rstrip() if len(seeds) > 1 else None


def overview(comparison: Comparison) -> str:
    """A row for every arm: its size, its metrics, and its differences. A metric without a single value has no column."""
    arms, (first, *others) = comparison.arms, comparison.compared
    measured = set(comparison.table["metric"])
    shown = [metric for metric in comparison.metrics if metric in measured]
    lines = [[*HEAD, *shown, f"difference ({first})", "95 % interval", "p", "p, Holm", "p, sign flips", "detectable"]]
    lines[0] += [text.format(name) for name in others for text in ("difference ({})", "95 % ({})", "p, Holm ({})")]
    for arm in arms:
        sizes = [si(arm.facts[key]) for key in ("params_non_embedding", "flops_per_token")]
        counts = [str(comparison.summary(first, arm).n), str(sum(run.diverged is not None for run in arm.runs))]
        means = [_mean_text(comparison.summary(name, arm), len(arm.runs)) for name in shown]
        line = [arm.name, *(arm.facts[key] for key in ("heads", "d", "head_norm")), *sizes, *counts, *means]
        less = [_difference_cells(comparison.differences.get((metric, arm.name))) for metric in comparison.compared]
        lines.append(line + less[0] + [cells[i] for cells in less[1:] for i in (0, 1, 3)])
    return markdown(lines).rstrip()


def _mean_text(one: Difference, runs: int) -> str:
    if not one.n:
        return "not measured"
    digits = 4 if abs(one.mean) < 1e4 else 0  # tokens
    spread = f" ± {one.sd:.{digits}f}" if one.sd is not None else ""
    return f"{one.mean:.{digits}f}{spread}" + (f" (n = {one.n})" if one.n < runs else "")


def _difference_cells(one: Difference | None) -> list[str]:
    """Mean, 95 % interval, p, p after Holm, p of sign flips, smallest detectable difference; "" for unknown values."""
    if one is None:
        return [""] * 6
    spread = f"{one.low:+z.4f} to {one.high:+z.4f}" if one.low is not None else ""
    least = f"{one.detectable:.4f}" if one.detectable is not None else ""
    return [f"{one.mean:+z.4f}", spread, *map(p_text, (one.p, one.p_holm, one.p_permutation)), least]


def fit_table(fits: dict[str, Any]) -> str:
    lines = [["arm", "n", "exponent b", "95 % interval", "parameters for equal loss", "95 % interval"]]
    for name, fit in fits.items():
        cells = [name, str(fit["exponent"]["n"]) if fit["exponent"] else "0"]
        for one in (fit["exponent"], fit["size_ratio"]):
            known = one and one["low"] is not None
            cells += [f"{one['mean']:.4f}" if one else "no fit", f"{one['low']:.4f} to {one['high']:.4f}" if known else ""]
        lines.append(cells)
    return markdown(lines).rstrip()


def remarks(comparison: Comparison) -> list[str]:
    """What a reader of the tables must know, and the parts that are in none of them."""
    shown = {one.part for one in comparison.pairs}
    absent = [f"{name} ({' - '.join(arms)})" for name, arms in comparison.parts.items() if name not in shown]
    several = any(one.n > 1 for one in comparison.differences.values())
    lines = [ABOUT] if comparison.effects else [TOO_FEW] if several else []
    return lines + [f"Without a row, for lack of an arm or of a number for a common seed: {', '.join(absent)}."] * bool(absent)


def notes(comparison: Comparison, seeds: Sequence[int], epochs: float | None) -> list[str]:
    """Sentences on the overview. epochs: over the prepared text; 0 for data made during training, None if not known."""
    arms = comparison.arms
    runs = [run for arm in arms for run in arm.runs]
    tokens = {run.val[-1]["tokens"] for run in runs if run.val}
    most = ("up to " if len(tokens) > 1 else "") + si(max(tokens, default=0))
    reference = f"{arms[0].arm} at the same point of the grid" if any(arm.point for arm in arms) else arms[0].name
    read = f", {epochs:.2f} epochs of the prepared text" if epochs else "" if epochs is None else ", generated during training"
    lines = [SEEDS.format(seeds=", ".join(map(str, seeds)), most=most, read=read, reference=reference)]
    off = {arm.name: arm.facts.get("params_off") or 0 for arm in arms}
    if unmatched := [f"{name} ({share:+.1%})" for name, share in off.items() if abs(share) > 0.005]:
        lines.append(f"Not matched to the reference's parameters within 0.5 %: {', '.join(unmatched)}.")
    return lines + [f"{note[0].upper()}{note[1:]}." for note in [mixed_precision(runs)] if note]


def error_notes(comparison: Comparison) -> list[str]:
    """The error of every metric at every point, and a warning where arms differ in it."""
    lines = []
    for metric, at in comparison.models.items():
        for point, model in at.items() if not metric.endswith(EQUAL_FLOPS) else ():
            where = f"{metric}, {point}" if point else metric
            lines.append(ERROR.format(where=where, **model.summary()))
            lines += [SPREADS_DIFFER.format(where=where, p=p_text(model.bartlett_p))] * model.spreads_differ
    return lines
