"""An ablation's runs read, compared arm by arm and seed by seed, and shown: table, JSON and figures.

scripts/ablate.py trains the runs and calls this. docs/METHODS.md defines every column.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from eval.common import COLOURS, INK, colour, figure
from eval.comparison import si
from eval.records import Record, value
from eval.statistics import Difference, detectable, holm, interval, mean_sd, paired, power_law, size_ratio

CYCLE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#1f2328", "#8C564B", "#B8A000")


@dataclass
class RunRecord:
    """One trained and evaluated run. values: metric -> number, None where it was not measured or the run diverged.

    curve: (tokens, seconds of training, validation loss). losses: (step, training loss), as logged.
    """

    seed: int
    run: str
    values: dict[str, float | None]
    curve: list[tuple[int, float, float]]
    losses: list[tuple[int, float]]
    spikes: int
    diverged: str | None
    tokens_per_s: float | None
    seconds: float
    machine: dict[str, Any]
    version: str


@dataclass
class Summary:
    """A metric of an arm over its seeds, and its paired difference to the reference arm (None: it is the reference)."""

    n: int
    mean: float | None
    sd: float | None
    difference: Difference | None = None
    p_holm: float | None = None


@dataclass
class Arm:
    """An arm at a point of the grid ("" where there is none), compared with `reference`, an arm of the same point."""

    name: str
    arm: str
    point: str
    reference: str | None
    variant: str
    overrides: list[str]
    facts: dict[str, Any]
    runs: list[RunRecord] = field(default_factory=list)
    metrics: dict[str, Summary] = field(default_factory=dict)

    def values(self, metric: str) -> dict[int, float]:
        """Seed -> value, of the runs that have one."""
        return {run.seed: run.values[metric] for run in self.runs if run.values[metric] is not None}


# Reading


def read_record(record: Record, seed: int, metrics: dict[str, str]) -> RunRecord:
    """A run's numbers from its record. metrics: name -> `EVALUATION.key.key` in its JSON, or `train.NAME`."""
    return RunRecord(
        seed=seed,
        run=record["run"],
        values={name: value(record, path) for name, path in metrics.items()},
        curve=[tuple(point) for point in record["curve"]],
        losses=[tuple(point) for point in record["losses"]],
        spikes=record["spikes"],
        diverged=record["diverged"],
        tokens_per_s=record["tokens_per_s"],
        seconds=record["seconds"],
        machine=record["machine"],
        version=record["version"],
    )


def refuse_other_text(records: Iterable[Record]) -> None:
    """Raise ValueError where runs' losses are of different text, as when shards were prepared anew between two runs."""
    seen: dict[str, dict[str, str]] = {}
    for record in records:
        for name, content in record["evaluations"].items():
            if "sha256" in content["results"]:
                seen.setdefault(name, {}).setdefault(content["results"]["sha256"], record["run"])
    for name, texts in seen.items():
        if len(texts) > 1:
            first, second, *_ = texts.values()
            again = f"delete eval/{name}.json of the one evaluated on the old text, {first} or {second}"
            raise ValueError(f"{first} and {second} were evaluated on different text: {again}, and repeat the command")


# Comparing


def compare(arms: list[Arm], metrics: Iterable[str]) -> None:
    """Fill in every arm's `metrics`; p_holm is over all of the ablation's differences of one metric."""
    by_name = {arm.name: arm for arm in arms}
    for metric in metrics:
        for arm in arms:
            values = arm.values(metric)
            mean, sd = mean_sd(list(values.values())) if values else (None, None)
            arm.metrics[metric] = Summary(len(values), mean, sd)
            if arm.reference:
                theirs = by_name[arm.reference].values(metric)
                if shared := [values[seed] - theirs[seed] for seed in values if seed in theirs]:
                    arm.metrics[metric].difference = paired(shared)
        tested = [arm.metrics[metric] for arm in arms if _p(arm.metrics[metric]) is not None]
        for summary, p in zip(tested, holm([_p(summary) for summary in tested]), strict=True):
            summary.p_holm = p


def _p(summary: Summary) -> float | None:
    return summary.difference.p if summary.difference else None


def noise_floor(arms: list[Arm], metric: str) -> dict[str, float | None]:
    """The tier's noise: standard deviations over seeds, of an arm and of paired differences, pooled over arms.

    smallest_detectable: for a comparison with that pooled deviation, at 80 % power (5 % level, before Holm's correction).
    """
    found = [arm.metrics[metric] for arm in arms]
    own = _pooled([(s.sd, s.n) for s in found])
    between = _pooled([(s.difference.sd, s.difference.n) for s in found if s.difference])
    n = max((s.difference.n for s in found if s.difference), default=0)
    smallest = detectable(between, n) if between is not None and n > 1 else None
    return {"n": n, "sd": own, "sd_of_differences": between, "smallest_detectable": smallest}


def _pooled(deviations: Sequence[tuple[float | None, int]]) -> float | None:
    known = [(sd, n - 1) for sd, n in deviations if sd is not None]
    return math.sqrt(sum(sd * sd * df for sd, df in known) / sum(df for _, df in known)) if known else None


def fit_sizes(arms: list[Arm], metric: str) -> dict[str, Any]:
    """loss = a N^-b for each arm of the grid, one fit per seed, N parameters without embeddings; means with intervals.

    size_ratio: parameters that the arm needs, as a share of the reference's, for the loss the reference has at the
    grid's middle size (geometric mean); the paper reports 0.62 for 6.8B parameters (arXiv 2410.05258, section 3.2).
    """
    names = list(dict.fromkeys(arm.arm for arm in arms))
    fits = {name: _fits([arm for arm in arms if arm.arm == name], metric) for name in names}
    middle = math.exp(np.mean([math.log(arm.facts["params_non_embedding"]) for arm in arms if arm.arm == names[0]]))
    results: dict[str, Any] = {}
    for name, by_seed in fits.items():
        shared = [seed for seed in by_seed if seed in fits[names[0]]]
        ratios = [size_ratio(fits[names[0]][seed], by_seed[seed], middle) for seed in shared]
        results[name] = {
            "a": {seed: a for seed, (a, _) in by_seed.items()},
            "b": {seed: b for seed, (_, b) in by_seed.items()},
            "exponent": asdict(interval([b for _, b in by_seed.values()])) if by_seed else None,
            "at_size": middle,
            "size_ratio": asdict(interval(ratios)) if ratios and all(map(math.isfinite, ratios)) else None,
        }
    return results


def _fits(arms: list[Arm], metric: str) -> dict[int, tuple[float, float]]:
    seeds = [seed for seed in arms[0].values(metric) if all(seed in arm.values(metric) for arm in arms)]
    sizes = [arm.facts["params_non_embedding"] for arm in arms]
    return {seed: power_law(sizes, [arm.values(metric)[seed] for arm in arms]) for seed in seeds}


# The table


def table(arms: list[Arm], metrics: Sequence[str]) -> list[list[str]]:
    """Rows of text, the first one the header; metrics nobody measured have no column. The first metric is compared."""
    shown = [m for m in metrics if any(arm.metrics[m].n for arm in arms)]
    first = metrics[0]
    header = ["arm", "heads", "d", "head norm", "parameters", "FLOPs/token", "n", *shown]
    header += [f"difference ({first})", "95 % interval", "p", "p, Holm", "p, sign flips", "detectable"]
    if any(run.diverged for arm in arms for run in arm.runs):
        header.insert(7, "diverged")
    rows = [header]
    for arm in arms:
        facts = arm.facts
        row = [arm.name, facts["heads"], facts["d"], facts["head_norm"], si(facts["params_non_embedding"])]
        row += [si(facts["flops_per_token"]), str(arm.metrics[first].n)]
        if "diverged" in header:
            row.append(str(sum(run.diverged is not None for run in arm.runs)))
        row += [_mean_text(arm.metrics[metric]) for metric in shown]
        rows.append(row + _difference_text(arm.metrics[first]))
    return rows


def _mean_text(summary: Summary) -> str:
    if summary.mean is None:
        return "not measured"
    return f"{summary.mean:.4f}" + (f" ± {summary.sd:.4f}" if summary.sd is not None else "")


def _difference_text(summary: Summary) -> list[str]:
    d = summary.difference
    if d is None:
        return ["", "", "", "", "", ""]
    spread = f"{d.low:+.4f} to {d.high:+.4f}" if d.low is not None else ""
    return [f"{d.mean:+.4f}", spread, _p_text(d.p), _p_text(summary.p_holm), _p_text(d.p_permutation)] + [
        f"{d.detectable:.4f}" if d.detectable is not None else ""
    ]


def _p_text(p: float | None) -> str:
    if p is None:
        return ""
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def notes(arms: list[Arm], metric: str, seeds: Sequence[int], epochs: float) -> list[str]:
    """What a reader of the table must know."""
    floor = noise_floor(arms, metric)
    tokens = next((run.curve[-1][0] for arm in arms for run in arm.runs if run.curve), 0)
    compared = len([arm for arm in arms if arm.reference])
    lines = [
        f"Seeds {', '.join(map(str, seeds))}; {si(tokens)} training tokens, {epochs:.2f} epochs of the prepared text. "
        f"± is the standard deviation over seeds. A difference is the arm less {_reference_text(arms)}, paired by seed "
        "(same data order, shared initial weights); negative is better for a loss.",
        f"p, Holm is corrected for {compared} comparisons. With n seeds p, sign flips cannot fall below 2^(1-n). "
        "Detectable: the true difference that would be found in 80 % of such experiments, given this comparison's spread.",
    ]
    if floor["smallest_detectable"] is not None:
        lines.append(
            f"Noise floor, pooled over arms: standard deviation over seeds {floor['sd']:.4f}, of paired differences "
            f"{floor['sd_of_differences']:.4f}; smallest detectable difference {floor['smallest_detectable']:.4f} "
            f"(n = {floor['n']}, 80 % power, 5 % level)."
        )
    worst = max((abs(a.facts["params_off"]) for a in arms if a.facts.get("params_off") is not None), default=0)
    if worst > 0.005:
        off = [f"{a.name} ({a.facts['params_off']:+.1%})" for a in arms if abs(a.facts["params_off"] or 0) > 0.005]
        lines.append(f"Not matched to the reference's parameters within 0.5 %: {', '.join(off)}.")
    if epochs > 1:
        lines.append("The training text was read more than once, so losses on it and on unseen text differ.")
    return lines


def _reference_text(arms: list[Arm]) -> str:
    return f"{arms[0].arm} at the same point of the grid" if any(arm.point for arm in arms) else arms[0].name


def fit_rows(fits: dict[str, Any]) -> list[list[str]]:
    """The power laws' table."""
    rows = [["arm", "n", "exponent b", "95 % interval", "parameters for equal loss", "95 % interval"]]
    for name, fit in fits.items():
        cells = [name, str(fit["exponent"]["n"]) if fit["exponent"] else "0"]
        for found in (fit["exponent"], fit["size_ratio"]):
            if not found:
                cells += ["no fit", ""]
                continue
            known = found["low"] is not None
            cells += [f"{found['mean']:.4f}", f"{found['low']:.4f} to {found['high']:.4f}" if known else ""]
        rows.append(cells)
    return rows


def markdown(rows: list[list[str]]) -> str:
    """A table as GitHub prints it, numbers to the right."""
    lines = [rows[0], ["---", *("---:" for _ in rows[0][1:])], *rows[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# Figures


def colours(arms: list[Arm]) -> dict[str, str]:
    """Arm -> colour: the variants' own where the arms are different variants, else a cycle of distinct ones."""
    first = {arm.arm: arm.variant for arm in reversed(arms)}
    names = list(dict.fromkeys(arm.arm for arm in arms))
    if len(set(first.values())) == len(names) and all(v in COLOURS for v in first.values()):
        return {name: colour(first[name]) for name in names}
    return {name: CYCLE[i % len(CYCLE)] for i, name in enumerate(names)}


def draw_losses(path: Path, arms: list[Arm]) -> None:
    """Mean validation loss with a band of one standard deviation over seeds, against tokens, FLOPs and wall-clock."""
    palette, points = colours(arms), list(dict.fromkeys(arm.point for arm in arms))
    with figure(path, 13.5, 4.6, columns=3) as axes:
        lows, highs = [], []
        for arm in arms:
            curves = [run.curve for run in arm.runs if not run.diverged]
            length = min((len(curve) for curve in curves), default=0)
            if not length:
                continue
            grid = np.array([curve[:length] for curve in curves])  # (n, points of the curve, 3)
            tokens, seconds, loss = grid[:, :, 0].mean(0), grid[:, :, 1].mean(0), grid[:, :, 2]
            mean, spread = loss.mean(0), loss.std(0, ddof=1) if len(loss) > 1 else 0 * loss.mean(0)
            style = LINES[points.index(arm.point) % len(LINES)]
            for ax, x in zip(axes[0], (tokens / 1e6, tokens * arm.facts["flops_per_token"], seconds), strict=True):
                ax.plot(x, mean, style, color=palette[arm.arm], label=arm.name, linewidth=1.6)
                ax.fill_between(x, mean - spread, mean + spread, color=palette[arm.arm], alpha=0.18, linewidth=0)
            lows.append(mean.min())
            highs.append(mean[length // 5])
        labels = ("training tokens (millions)", "training FLOPs", "seconds of training")
        for ax, label in zip(axes[0], labels, strict=True):
            ax.set(xlabel=label)
            ax.grid(axis="y")
            if lows:
                span = max(max(highs) - min(lows), 1e-3)
                ax.set_ylim(min(lows) - 0.05 * span, max(highs) + 0.05 * span)  # the first steps' fall is cut off
        if len({arm.facts["flops_per_token"] for arm in arms if not arm.reference}) > 1:
            axes[0, 1].set_xscale("log")  # several sizes
        axes[0, 0].set_ylabel("validation loss (nats per token)")
        _legend_below(axes[0, 0])


LINES = ("-", "--", ":", "-.")  # points of a grid


def _legend_below(ax: Any) -> None:
    handles, labels = ax.get_legend_handles_labels()
    if handles:
        ax.figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)), columnspacing=1.2)


def draw_differences(path: Path, arms: list[Arm], metric: str) -> None:
    """One row per compared arm: its differences to the reference (a dot a seed), their mean and 95 % interval."""
    compared = [arm for arm in arms if arm.metrics[metric].difference]
    palette, by_name = colours(arms), {arm.name: arm for arm in arms}
    with figure(path, 7.4, 1.5 + 0.42 * max(1, len(compared))) as axes:
        ax = axes[0, 0]
        for row, arm in enumerate(reversed(compared)):
            d, theirs = arm.metrics[metric].difference, by_name[arm.reference].values(metric)
            dots = [value - theirs[seed] for seed, value in arm.values(metric).items() if seed in theirs]
            if d.low is not None:
                ax.plot([d.low, d.high], [row, row], color=palette[arm.arm], linewidth=2.2, solid_capstyle="butt")
            ax.plot(
                dots,
                [row] * len(dots),
                "o",
                color=palette[arm.arm],
                markersize=5.5,
                markeredgecolor="white",
                linewidth=0,
            )
            ax.plot([d.mean], [row], "|", color=palette[arm.arm], markersize=15, markeredgewidth=2.2)
        ax.axvline(0, color=INK, linewidth=0.9)
        ax.set_yticks(range(len(compared)), [arm.name for arm in reversed(compared)])
        ax.set_ylim(-0.7, max(0, len(compared) - 1) + 0.7)
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="x")
        against = arms[0].arm if arms[0].point else arms[0].name
        ax.set(xlabel=f"{metric}, difference to {against}\ndots: seeds; bar: mean and its 95 % interval")
        bound = _readable_bound([(arm.metrics[metric].difference, arm) for arm in compared])
        if bound:
            ax.set_xlim(*bound)


def _readable_bound(found: list[tuple[Difference, Arm]]) -> tuple[float, float] | None:
    """Limits that show all means and dots; intervals of a few seeds may be many times wider and run off the edge."""
    means = [d.mean for d, _ in found]
    if not means:
        return None
    reach = max(max(abs(m) for m in means) * 1.6, max((3 * d.sd for d, _ in found if d.sd), default=0)) or 1e-3
    low = min([0.0, *means, *(d.low for d, _ in found if d.low is not None)])
    high = max([0.0, *means, *(d.high for d, _ in found if d.high is not None)])
    pad = 0.06 * max(high - low, 1e-9)
    return max(low - pad, -2 * reach), min(high + pad, 2 * reach)


def draw_grid(path: Path, arms: list[Arm], metric: str, fits: dict[str, Any] | None) -> None:
    """The metric over the points of the grid, mean and standard deviation over seeds; over parameters where fitted."""
    palette, points = colours(arms), list(dict.fromkeys(arm.point for arm in arms))
    with figure(path, 6.6, 4.4) as axes:
        ax = axes[0, 0]
        for name in dict.fromkeys(arm.arm for arm in arms):
            mine = [arm for arm in arms if arm.arm == name and arm.metrics[metric].mean is not None]
            if not mine:
                continue
            x = [arm.facts["params_non_embedding"] if fits else points.index(arm.point) for arm in mine]
            y, error = [arm.metrics[metric].mean for arm in mine], [arm.metrics[metric].sd or 0 for arm in mine]
            ax.errorbar(x, y, error, fmt="o" if fits else "o-", color=palette[name], label=name, capsize=3)
            if fits and fits[name]["a"]:
                line = np.geomspace(min(x), max(x), 50)
                laws = [fits[name]["a"][s] * line ** -fits[name]["b"][s] for s in fits[name]["a"]]
                ax.plot(line, np.mean(laws, axis=0), color=palette[name], linewidth=1.2)
        if fits:
            ax.set(xscale="log", xlabel="parameters without embeddings")
            ax.xaxis.set_major_formatter(lambda value, _: si(value))
        else:
            ax.set_xticks(range(len(points)), points)
        ax.set(ylabel=metric)
        ax.grid(axis="y")
        ax.legend()


def draw_all(folder: Path, arms: list[Arm], metrics: Sequence[str], fits: dict[str, Any] | None) -> list[Path]:
    """Every figure of the ablation."""
    paths = [folder / "loss.png", folder / "difference.png"]
    draw_losses(paths[0], arms)
    draw_differences(paths[1], arms, metrics[0])
    if any(arm.point for arm in arms):
        for metric in metrics:
            if any(arm.metrics[metric].n for arm in arms):
                paths.append(folder / f"grid_{_slug(metric)}.png")
                draw_grid(paths[-1], arms, metric, fits if metric == metrics[0] else None)
    return paths


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in text)
