"""Training tokens until retrieval appears: survival curves over seeds, and tests of whether arms differ.

    python -m ablation.survival ablation=runs/ablate/emergence [levels=[0.5,0.9]]

Reads the runs of an ablation that was trained with needle_every=N: from their folders, or from their records if the folders no
longer exist. (docs/results/NAME has such records, so ablation=docs/results/NAME works, too.) A run arrives at a level at its
first needle check whose accuracy is at least the level. A run that never arrives is censored at the end of its training. For
each arm, the command computes the Kaplan-Meier estimate of the share of runs that have not arrived, with 95 % intervals; the
median with its interval; and the log-rank test against the first arm of the same point of the grid, with Holm's correction. It
tests the experiment's `pairs` in the same way.
Writes survival.json, survival.md and figures/survival.png.
"""

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from ablation.records import records_of
from configs import command
from configs.files import read_json_lines
from eval.common import AblationEvalConfig, figure, write_findings
from eval.report.runs import ablation_in, colours_of
from eval.report.statistics import holm
from eval.report.tables import markdown

ABOUT = (
    "Tokens: median over runs (95 % interval); a dash: the curve, or this end of its interval, does not fall to one half. p: "
    "log-rank test, in brackets with Holm's correction; arms against the first arm of their point."
)


@dataclass
class SurvivalConfig(AblationEvalConfig):
    """levels: needle accuracies at which a run arrives."""

    records: str = "docs/results"  # runs whose folders are gone are read from NAME/records.jsonl.gz in this folder
    levels: list[float] = field(default_factory=lambda: [0.5, 0.9])


Checks = list[dict[str, float]]  # the lines of a metrics.jsonl that have a needle_acc
Arrivals = list[tuple[int, bool]]  # (tokens, arrived) of each run


def arrival(checks: Checks, level: float) -> tuple[int, bool]:
    """(tokens, arrived): tokens at the first of a run's needle checks with accuracy `level` or more, else at the last check."""
    tokens = next((line["tokens"] for line in checks if line["needle_acc"] >= level), None)
    return (checks[-1]["tokens"], False) if tokens is None else (tokens, True)


def kaplan_meier(runs: Arrivals) -> dict[str, Any]:
    """The Kaplan-Meier estimate (1958). A censored run is at risk until the time of its censoring, that time included.

    n, arrived: numbers of runs. share: of the runs that have not arrived, from each of `times` on, with its 95 % interval
    share_low to share_high. median: the first time at which half of the runs have arrived, with its interval low to high;
    None where the curve does not fall to one half.

    Intervals are Greenwood's on the scale log(-log S), which stays inside 0 to 1 (Kalbfleisch and Prentice 1980). The
    median's interval ends at the times at which the curve's interval crosses one half (Brookmeyer and Crowley 1982).
    Where the last run arrives, this scale has no interval; the upper bound then stays as at the time before.
    """
    arrived = [time for time, seen in runs if seen]
    found = {"n": len(runs), "arrived": len(arrived), "times": [], "share": [], "share_low": [], "share_high": []}
    if not arrived:
        return found | {"median": None, "low": None, "high": None}
    survival = stats.ecdf(_censored(runs)).sf
    with warnings.catch_warnings(action="ignore"):  # scipy warns that the interval is undefined where no run is left
        interval = survival.confidence_interval(0.95, method="log-log")
    at = np.isin(survival.quantiles, arrived)
    times, shares = survival.quantiles[at].tolist(), survival.probabilities[at]
    lows, highs = (np.asarray(side.probabilities)[at] for side in (interval.low, interval.high))
    if shares[-1] == 0:
        lows[-1], highs[-1] = 0.0, highs[-2] if len(highs) > 1 else 1.0
    found["times"] = times
    for name, end, side in (("share", "median", shares), ("share_low", "low", lows), ("share_high", "high", highs)):
        found[name] = side.tolist()
        found[end] = next((t for t, s in zip(times, side, strict=True) if s <= 0.5 + 1e-9), None)
    return found


def _censored(runs: Arrivals) -> stats.CensoredData:
    return stats.CensoredData.right_censored([time for time, _ in runs], [not seen for _, seen in runs])


def log_rank(runs: Arrivals, others: Arrivals) -> tuple[float, float]:
    """(chi square, p) of the log-rank test of two groups (Mantel 1966), 1 degree of freedom; (0, 1) where it is undefined."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = stats.logrank(_censored(runs), _censored(others))
    return (0.0, 1.0) if math.isnan(found.statistic) else (float(found.statistic**2), float(found.pvalue))


def compare(arms: list[dict[str, Any]], checks: dict[str, Checks], level: float) -> list[dict[str, Any]]:
    """Each arm's curve and its test against the reference. arms: as in an ablation's results.json.

    checks: run's name -> its needle checks. A diverged run is censored at its last check. `until`: tokens of the arm's
    last check, beyond which its curve is unknown.
    """
    found = {arm["name"]: [arrival(checks[run["run"]], level) for run in arm["runs"]] for arm in arms}
    rows = []
    for arm in arms:
        about = {"arm": arm["name"], "point": arm["point"], "reference": arm["reference"]}
        until = max((checks[run["run"]][-1]["tokens"] for run in arm["runs"]), default=0)
        rows.append(about | {"until": until} | kaplan_meier(found[arm["name"]]))
        if arm["reference"] in found:
            rows[-1]["chi_square"], rows[-1]["p"] = log_rank(found[arm["name"]], found[arm["reference"]])
    _correct(row for row in rows if "p" in row)
    return rows


def compare_pairs(
    arms: list[dict[str, Any]], checks: dict[str, Checks], level: float, pairs: dict[str, list[str]]
) -> list[dict[str, Any]]:
    """The log-rank test of every pair at every point where both of its arms have runs. pairs: part -> (arm, other arm)."""
    arms = [arm for arm in arms if arm["runs"]]
    found = {(arm["arm"], arm["point"]): [arrival(checks[run["run"]], level) for run in arm["runs"]] for arm in arms}
    rows = []
    for part, (arm, other) in pairs.items():
        for point in [point for name, point in found if name == arm and (other, point) in found]:
            chi_square, p = log_rank(found[arm, point], found[other, point])
            rows.append({"part": part, "arm": arm, "other": other, "point": point, "chi_square": chi_square, "p": p})
    _correct(rows)
    return rows


def _correct(rows: Iterable[dict[str, Any]]) -> None:
    """Add Holm's correction of all rows' p as `p_holm`."""
    rows = list(rows)
    for row, p in zip(rows, holm([row["p"] for row in rows]), strict=True):
        row["p_holm"] = p


def table(name: str, levels: dict[str, list[dict[str, Any]]], pairs: dict[str, list[dict[str, Any]]]) -> str:
    """The arms, and below them the pairs, as Markdown: one row per arm and point of the grid, three columns per level."""
    heads = [f"{head} {level}" for level in levels for head in ("arrived at", "million tokens to", "p at")]
    arms = [["arm", "n", *heads]]
    for rows in zip(*levels.values(), strict=True):
        cells = [cell for row in rows for cell in (f"{row['arrived']} of {row['n']}", _half(row), _p(row))]
        arms.append([rows[0]["arm"], str(rows[0]["n"]), *cells])
    tests = [["pair", "point", *(f"p at {level}" for level in pairs)]]
    for rows in zip(*pairs.values(), strict=True):
        tests.append([f"{rows[0]['arm']}, {rows[0]['other']}", rows[0]["point"], *map(_p, rows)])
    tables = markdown(arms) + ("\n" + markdown(tests) if len(tests) > 1 else "")
    return f"**{name}: training tokens to a needle accuracy**\n\n{tables}\n{ABOUT}\n"


def _half(row: dict[str, Any]) -> str:
    """The median with its interval; an end that the curve does not reach is a dash."""
    half, low, high = ("-" if row[key] is None else f"{row[key] / 1e6:.2f}" for key in ("median", "low", "high"))
    return f"{half} ({low} to {high})"


def _p(row: dict[str, Any]) -> str:
    return f"{row['p']:.3g} ({row['p_holm']:.3g})" if "p" in row else ""


def draw(path: Path, levels: dict[str, list[dict[str, Any]]], shades: dict[str, str]) -> None:
    """The share of runs that have arrived against training tokens: one row per point of the grid, one column per level."""
    points = list(dict.fromkeys(row["point"] for rows in levels.values() for row in rows))
    with figure(path, 5.2 * len(levels), 3.6 * len(points), columns=len(levels), rows=len(points)) as axes:
        for column, (level, rows) in enumerate(levels.items()):
            for ax, point in zip(axes[:, column], points, strict=True):
                for row in [row for row in rows if row["point"] == point]:
                    line = shades[row["arm"]]
                    x = np.array([0, *row["times"], row["until"]]) / 1e6
                    low, high, y = (
                        1 - np.array([1, *row[name], row[name][-1] if row[name] else 1])
                        for name in ("share_high", "share_low", "share")
                    )
                    ax.step(x, y, where="post", color=line, label=row["arm"].removesuffix(f"-{point}"), linewidth=1.6)
                    known = slice(-1 if y[-1] == 1 else None)  # where all runs have arrived, there is no interval
                    ax.fill_between(x[known], low[known], high[known], step="post", color=line, alpha=0.08, linewidth=0)
                title = f"accuracy {level}" + (f" · {point}" if point else "")
                ax.set(title=title, ylim=(-0.02, 1.02), xlabel="training tokens (millions)", ylabel="runs that arrived")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        axes[0, 0].figure.legend(handles, labels, loc="outside lower center", ncols=4)


@command("survival", SurvivalConfig)
def main(cfg: SurvivalConfig) -> None:
    folder = Path(cfg.ablation)
    study = ablation_in(folder)
    arms, asked = study["results"]["arms"], study["config"].get("pairs", {})
    if not cfg.levels or not all(0 < level <= 1 for level in cfg.levels):
        raise ValueError(f"levels={cfg.levels} must be accuracies above 0 and at most 1: use levels=[0.5,0.9]")
    if not any(arm["runs"] for arm in arms):
        raise ValueError(f"{folder} has no finished runs yet: finish the study with scripts/ablate.py first")
    records = records_of(folder, Path(cfg.records) / folder.name)
    checks = {run["run"]: _checks(folder / run["run"], records) for arm in arms for run in arm["runs"]}
    if missing := [name for name, own in checks.items() if not own]:
        raise ValueError(f"{missing[0]} has no needle checks: train with needle_every=10, or give records= of the runs")
    levels = {f"{level:g}": compare(arms, checks, level) for level in cfg.levels}
    pairs = {f"{level:g}": compare_pairs(arms, checks, level, asked) for level in cfg.levels}
    text, shades = table(folder.name, levels, pairs), colours_of(arms)
    write_findings("survival", cfg, {"levels": levels, "pairs": pairs}, text, lambda path: draw(path, levels, shades))


def _checks(folder: Path, records: dict[str, dict[str, Any]]) -> Checks:
    """The needle checks that training logged: from the run's folder, or from its record where the folder has none."""
    found = [line for line in read_json_lines(folder / "metrics.jsonl") if "needle_acc" in line]
    return found or records.get(folder.name, {}).get("needle", [])


if __name__ == "__main__":
    main()
