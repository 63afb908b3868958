"""Training tokens until runs retrieve or solve a task: survival curves over seeds, and tests of whether arms differ.

    python -m ablation.survival ablation=runs/ablate/emergence [levels=[0.5,0.9]]     # needle accuracies (needle_every=N)
    python -m ablation.survival ablation=runs/ablate/mqar losses=[0.05]               # validation losses (eval_every=N)

Reads an ablation's runs from their folders or records. For each arm: how many runs arrive, with Wilson's interval; the
Kaplan-Meier estimate (1958) of the share that has not, with Greenwood's 95 % interval on the scale log(-log S); Fisher's exact
and the log-rank test against the first arm of its point, with Holm's correction. The experiment's `pairs` are tested in the
same way (docs/METHODS.md, 7.12). Writes survival.json, survival.md and figures/survival.png.
"""

import itertools
import math
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from ablation.findings import RecordedConfig, read_study, write_findings
from configs import command
from configs.files import read_json_lines
from eval.common import figure
from eval.report.runs import colours_of
from eval.report.statistics import holm
from eval.report.tables import markdown

ABOUT = (
    "Arrived: with the 95 % interval of the share. Tokens: median over runs (95 % interval); a dash: the curve, or this end of "
    "its interval, does not fall to one half. p: Fisher's exact test of how many arrive and the log-rank test of when, in "
    "brackets with Holm's correction; arms against the first arm of their point."
)
ENDS = ("share_high", "share_low", "share")  # of runs that have not arrived
Arrivals = list[tuple[int, bool]]  # (tokens, arrived) of each run
Row = dict[str, Any]


@dataclass
class SurvivalConfig(RecordedConfig):
    levels: list[float] = field(default_factory=lambda: [0.5, 0.9])  # needle accuracies at which a run arrives
    losses: list[float] = field(default_factory=list)  # in place of `levels`, validation losses at which a run arrives


def arrival(checks: list[dict[str, float]], level: float, key: str = "needle_acc") -> tuple[int, bool]:
    """Tokens at a run's first check with accuracy `level` or more (val_loss: or less), else at the last; if it arrived."""
    arrived = ((line["tokens"], True) for line in checks if (line[key] <= level if key == "val_loss" else line[key] >= level))
    return next(arrived, (checks[-1]["tokens"], False))


def kaplan_meier(runs: Arrivals) -> Row:
    """The Kaplan-Meier estimate: `share` of the runs that have not arrived, from each of `times` on, with its 95 % interval.

    Where the last run arrives, the upper bound stays. median, low, high: the times at which they cross one half.
    """
    arrived = [time for time, seen in runs if seen]
    wilson = stats.binomtest(len(arrived), len(runs)).proportion_ci(method="wilson")  # Wilson 1927
    row = {"n": len(runs), "arrived": len(arrived), "arrived_low": float(wilson.low), "arrived_high": float(wilson.high)}
    survival = stats.ecdf(_censored(runs)).sf
    with warnings.catch_warnings(action="ignore"):  # scipy warns that the interval is undefined where no run is left
        interval = survival.confidence_interval(0.95, method="log-log")
    at = np.isin(survival.quantiles, arrived)
    times, shares, lows, highs = (
        np.array(values)[at]
        for values in (survival.quantiles, survival.probabilities, interval.low.probabilities, interval.high.probabilities)
    )
    if arrived and shares[-1] == 0:
        lows[-1], highs[-1] = 0.0, highs[-2] if len(highs) > 1 else 1.0
    row |= {"times": times.tolist(), "share": shares.tolist(), "share_low": lows.tolist(), "share_high": highs.tolist()}
    for end, side in (("median", shares), ("low", lows), ("high", highs)):
        row[end] = next((t for t, s in zip(row["times"], side, strict=True) if s <= 0.5 + 1e-9), None)
    return row


def _censored(runs: Arrivals) -> stats.CensoredData:
    return stats.CensoredData.right_censored([time for time, _ in runs], [not seen for _, seen in runs])


def log_rank(runs: Arrivals, others: Arrivals) -> Row:
    """chi_square and p of the log-rank test of two groups (Mantel 1966), 1 degree of freedom; 0 and 1 where undefined."""
    with np.errstate(divide="ignore", invalid="ignore"):
        test = stats.logrank(_censored(runs), _censored(others))
    if math.isnan(test.statistic):
        return {"chi_square": 0.0, "p": 1.0}
    return {"chi_square": float(test.statistic**2), "p": float(test.pvalue)}


def two_tests(runs: Arrivals, others: Arrivals) -> Row:
    """Of two groups: the log-rank test of when runs arrive, and p of Fisher's exact test (1935) of how many do."""
    counts = [[sum(seen == want for _, seen in group) for want in (True, False)] for group in (runs, others)]
    return log_rank(runs, others) | {"p_fisher": float(stats.fisher_exact(counts).pvalue)}


def compare(
    arms: list[Row], checks: dict[str, list], key: str, level: float, pairs: dict[str, list[str]]
) -> tuple[list[Row], list[Row]]:
    """Each arm's curve with its tests against the reference, and the tests of each pair; checks: by the runs' names."""
    arrivals = {arm["name"]: [arrival(checks[run["run"]], level, key) for run in arm["runs"]] for arm in arms}
    rows = []
    for arm in arms:
        until = max(checks[run["run"]][-1]["tokens"] for run in arm["runs"])  # beyond it the arm's curve is unknown
        about = {"arm": arm["name"], "point": arm["point"], "reference": arm["reference"], "until": until}
        rows.append(about | kaplan_meier(arrivals[arm["name"]]))
        if arm["reference"] in arrivals:
            rows[-1] |= two_tests(arrivals[arm["name"]], arrivals[arm["reference"]])
    by_point = {(arm["arm"], arm["point"]): arrivals[arm["name"]] for arm in arms}
    parts = [
        {"part": part, "arm": arm, "other": other, "point": point, **two_tests(by_point[arm, point], by_point[other, point])}
        for part, (arm, other) in pairs.items()
        for name, point in by_point
        if name == arm and (other, point) in by_point
    ]
    for family, test in itertools.product(([row for row in rows if "p" in row], parts), ("p", "p_fisher")):
        for row, p in zip(family, holm([row[test] for row in family]), strict=True):
            row[f"{test}_holm"] = p
    return rows, parts


def table(name: str, what: str, levels: dict[str, list[Row]], pairs: dict[str, list[Row]]) -> str:
    """The arms, and below them the pairs, as Markdown. what: the measure that a run must reach."""
    tested = ("p, arrived at", "p, tokens to")
    heads = [f"{head} {level}" for level in levels for head in ("arrived at", "million tokens to", *tested)]
    arms = [["arm", *heads]]
    for rows in zip(*levels.values(), strict=True):
        arms.append([rows[0]["arm"], *(cell for row in rows for cell in (*_arrived(row), *_p(row)))])
    parts = [["pair", "point", *(f"{head} {level}" for level in pairs for head in tested)]]
    for rows in zip(*pairs.values(), strict=True):
        parts.append([f"{rows[0]['arm']}, {rows[0]['other']}", rows[0]["point"], *(p for row in rows for p in _p(row))])
    tables = markdown(arms) + ("\n" + markdown(parts) if len(parts) > 1 else "")
    return f"**{name}: training tokens to a {what}**\n\n{tables}\n{ABOUT}\n"


def _arrived(row: Row) -> list[str]:
    """How many runs arrive, and the million tokens after which half of them have."""
    median, low, high = ("-" if row[end] is None else f"{row[end] / 1e6:.2f}" for end in ("median", "low", "high"))
    share = f"{row['arrived']} of {row['n']} ({row['arrived_low']:.2f} to {row['arrived_high']:.2f})"
    return [share, f"{median} ({low} to {high})"]


def _p(row: Row) -> list[str]:
    return [f"{row[test]:.3g} ({row[f'{test}_holm']:.3g})" if test in row else "" for test in ("p_fisher", "p")]


def draw(path: Path, what: str, levels: dict[str, list[Row]], shades: dict[str, str]) -> None:
    """The share of runs that have arrived against training tokens: one row per point of the grid, one column per level."""
    points = list(dict.fromkeys(row["point"] for rows in levels.values() for row in rows))
    with figure(path, 5.2 * len(levels), 3.6 * len(points), columns=len(levels), rows=len(points)) as axes:
        for column, (level, rows) in enumerate(levels.items()):
            for row in rows:
                ax = axes[points.index(row["point"]), column]
                x = np.array([0, *row["times"], row["until"]]) / 1e6
                low, high, y = (1 - np.array([1, *row[key], *(row[key] or [1])[-1:]]) for key in ENDS)
                shade, label = shades[row["arm"]], row["arm"].removesuffix(f"-{row['point']}")
                ax.step(x, y, where="post", color=shade, label=label, linewidth=1.6)
                ax.fill_between(x, low, high, step="post", color=shade, alpha=0.08, linewidth=0)
                title = f"{what} {level}" + (f" · {row['point']}" if row["point"] else "")
                ax.set(title=title, ylim=(-0.02, 1.02), xlabel="training tokens (millions)", ylabel="runs that arrived")
        axes[0, 0].figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2 * len(levels))


@command("survival", SurvivalConfig)
def main(cfg: SurvivalConfig) -> None:
    study, records = read_study(cfg)
    folder, arms, checks = Path(cfg.ablation), study["results"]["arms"], {}
    if not cfg.losses and (not cfg.levels or not all(0 < level <= 1 for level in cfg.levels)):
        raise ValueError(f"levels={cfg.levels} must be accuracies above 0 and at most 1: use levels=[0.5,0.9]")
    key, kept, what = ("val_loss", "val", "validation loss") if cfg.losses else ("needle_acc", "needle", "needle accuracy")
    for name in [run["run"] for arm in arms for run in arm["runs"]]:
        lines = [line for line in read_json_lines(folder / name / "metrics.jsonl") if key in line]
        checks[name] = lines or records.get(name, {}).get(kept, [])
        if not checks[name]:
            raise ValueError(f"{name} has no {key}: train with needle_every=10 or eval_every=10, or give records= of the runs")
    named = study["config"].get("pairs", {})
    both = {f"{level:g}": compare(arms, checks, key, level, named) for level in cfg.losses or cfg.levels}
    levels, pairs = ({level: rows[i] for level, rows in both.items()} for i in (0, 1))
    text, shades = table(folder.name, what, levels, pairs), colours_of(arms)
    write_findings("survival", cfg, {"levels": levels, "pairs": pairs}, text, lambda path: draw(path, what, levels, shades))


if __name__ == "__main__":
    main()
