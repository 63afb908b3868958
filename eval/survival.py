"""How many tokens until retrieval appears: survival curves over seeds, and whether arms differ.

    python -m eval.survival ablation=runs/ablate/emergence [levels=[0.5,0.9]]

Reads the runs of an ablation that were trained with needle_every=N. A run arrives at a level at the first check whose needle
accuracy is at least the level; a run that never does is censored at the end of its training: it counts as "not by then".
For each arm: the Kaplan-Meier estimate of the share of runs that have not arrived, with 95 % intervals, the median with its
interval, and the log-rank test against the first arm of the same point of the grid, with Holm's correction.
Writes survival.json and figures/survival.png into the ablation's folder.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import MISSING

from configs import command
from configs.files import read_json_lines, write_json
from configs.provenance import result_record
from eval.common import figure
from eval.report.statistics import holm

Z = 1.959964  # of a two-sided 95 % interval
LEVELS = (0.5, 0.9)
# In the order of the arms of experiment=emergence, so that plain variants have the colours they have elsewhere.
CYCLE = ("#0072B2", "#E69F00", "#D55E00", "#8C564B", "#7F7F7F", "#CC79A7", "#009E73", "#56B4E9", "#1f2328")


@dataclass
class SurvivalConfig:
    """ablation: the folder of an ablation's results. levels: needle accuracies that count as arrival."""

    ablation: str = MISSING
    levels: list[float] = field(default_factory=lambda: list(LEVELS))


@dataclass
class Curve:
    """The share of runs that have not arrived, from each of `times` on, with its 95 % interval.

    median: the first time at which half have arrived; low and high: its interval. None where the curve does not get there.
    """

    n: int
    arrived: int
    times: list[float]
    share: list[float]
    share_low: list[float]
    share_high: list[float]
    median: float | None
    low: float | None
    high: float | None


def tokens_to(path: Path, level: float) -> int | None:
    """Training tokens at the first needle check of a metrics.jsonl with at least that accuracy; None where there is none."""
    return next((line["tokens"] for line in read_json_lines(path) if line.get("needle_acc", -1.0) >= level), None)


def arrival(path: Path, level: float) -> tuple[int, bool]:
    """(tokens, arrived): when the run of this metrics.jsonl arrived, or else its last needle check."""
    checks = [line["tokens"] for line in read_json_lines(path) if "needle_acc" in line]
    if not checks:
        raise ValueError(f"{path} has no needle checks: train with needle_every=10")
    found = tokens_to(path, level)
    return (checks[-1], False) if found is None else (found, True)


def kaplan_meier(times: Sequence[float], arrived: Sequence[bool]) -> Curve:
    """The Kaplan-Meier estimate (1958), a run that is censored at a time being at risk up to and at that time.

    Intervals are Greenwood's on the scale log(-log S), which stays inside 0 to 1 (Kalbfleisch and Prentice 1980); the median's
    are the times at which the curve's interval crosses one half (Brookmeyer and Crowley 1982). Where the last run arrives, the
    scale has no interval: its upper bound stays where it was.
    """
    when, seen = np.asarray(times, dtype=np.float64), np.asarray(arrived, dtype=bool)
    share, spread = 1.0, 0.0
    points, shares, lows, highs = [], [], [], []
    for time in np.unique(when[seen]):
        risk, events = int((when >= time).sum()), int((seen & (when == time)).sum())
        share *= 1 - events / risk
        spread += events / (risk * (risk - events)) if risk > events else 0.0
        low, high = _log_log(share, spread) if share > 0 else (0.0, highs[-1] if highs else 1.0)
        points.append(float(time))
        shares.append(share)
        lows.append(low)
        highs.append(high)
    crossing = [_first_below_half(points, values) for values in (shares, lows, highs)]
    return Curve(len(when), int(seen.sum()), points, shares, lows, highs, *crossing)


def _log_log(share: float, spread: float) -> tuple[float, float]:
    """95 % interval of a survival share between 0 and 1."""
    reach = Z * math.sqrt(spread) / -math.log(share)
    return share ** math.exp(reach), share ** math.exp(-reach)


def _first_below_half(times: Sequence[float], shares: Sequence[float]) -> float | None:
    return next((time for time, share in zip(times, shares, strict=True) if share <= 0.5), None)


def log_rank(
    times: Sequence[float], arrived: Sequence[bool], other_times: Sequence[float], other_arrived: Sequence[bool]
) -> tuple[float, float]:
    """(chi square, p) of the log-rank test of two groups (Mantel 1966), 1 degree of freedom; (0, 1) where nobody arrived."""
    when = np.concatenate((times, other_times)).astype(np.float64)
    seen = np.concatenate((arrived, other_arrived)).astype(bool)
    first = np.arange(len(when)) < len(times)
    excess, variance = 0.0, 0.0
    for time in np.unique(when[seen]):
        risk, events = when >= time, seen & (when == time)
        n, own, d = int(risk.sum()), int((risk & first).sum()), int(events.sum())
        excess += int((events & first).sum()) - d * own / n
        variance += d * own * (n - own) * (n - d) / (n * n * (n - 1)) if n > 1 else 0.0
    if variance == 0:
        return 0.0, 1.0
    chi = excess * excess / variance
    return chi, math.erfc(math.sqrt(chi / 2))


def compare(arms: list[dict[str, Any]], folder: Path, level: float) -> list[dict[str, Any]]:
    """For each arm its curve and its test against the reference; `arms` as an ablation's results.json has them."""
    found: dict[str, list[tuple[int, bool]]] = {}
    for arm in arms:
        runs = [
            folder / run["run"] / "metrics.jsonl" for run in arm["runs"]
        ]  # a diverged one is censored where it ended
        found[arm["name"]] = [arrival(path, level) for path in runs]
    rows = []
    for arm in arms:
        own, other = found[arm["name"]], found.get(arm["reference"])
        about = {"arm": arm["name"], "point": arm["point"], "reference": arm["reference"]}
        rows.append(about | asdict(kaplan_meier(*_columns(own))))
        if other is not None:
            rows[-1]["chi_square"], rows[-1]["p"] = log_rank(*_columns(own), *_columns(other))
    tested = [row for row in rows if "p" in row]
    for row, p in zip(tested, holm([row["p"] for row in tested]), strict=True):
        row["p_holm"] = p
    return rows


def _columns(runs: list[tuple[int, bool]]) -> tuple[list[int], list[bool]]:
    return [time for time, _ in runs], [arrived for _, arrived in runs]


def draw(path: Path, levels: dict[str, list[dict[str, Any]]], end: float) -> None:
    """The share of runs that have arrived against training tokens: a row a point of the grid, a column a level."""
    points = list(dict.fromkeys(row["point"] for rows in levels.values() for row in rows))
    with figure(path, 5.2 * len(levels), 3.6 * len(points), columns=len(levels), rows=len(points)) as axes:
        for column, (level, rows) in enumerate(levels.items()):
            for ax, point in zip(axes[:, column], points, strict=True):
                for line, row in zip(CYCLE * 9, [row for row in rows if row["point"] == point], strict=False):
                    x = np.array([0, *row["times"], end]) / 1e6
                    low, high, y = (
                        1 - np.array([1, *row[name], row[name][-1] if row[name] else 1])
                        for name in ("share_high", "share_low", "share")
                    )
                    ax.step(x, y, where="post", color=line, label=row["arm"].removesuffix(f"-{point}"), linewidth=1.6)
                    ax.fill_between(x, low, high, step="post", color=line, alpha=0.08, linewidth=0)
                title = f"accuracy {level}" + (f" · {point}" if point else "")
                ax.set(title=title, ylim=(-0.02, 1.02), xlabel="training tokens (millions)", ylabel="runs that arrived")
                ax.grid(axis="y")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        axes[0, 0].figure.legend(handles, labels, loc="outside lower center", ncols=4)


@command("survival", SurvivalConfig)
def main(cfg: SurvivalConfig) -> None:
    folder = Path(cfg.ablation)
    if not (folder / "results.json").is_file():
        raise ValueError(f"{folder} has no results.json: run scripts/ablate.py experiment=emergence first")
    if not cfg.levels or not all(0 < level <= 1 for level in cfg.levels):
        raise ValueError(f"levels={cfg.levels} are not accuracies above 0: use levels=[0.5,0.9]")
    arms = json.loads((folder / "results.json").read_text())["results"]["arms"]
    levels = {f"{level:g}": compare(arms, folder, level) for level in cfg.levels}
    write_json(folder / "survival.json", result_record("survival", folder.name, cfg, {"levels": levels}))
    last = max(_end(folder / run["run"] / "metrics.jsonl") for arm in arms for run in arm["runs"])
    draw(folder / "figures" / "survival.png", levels, last)
    for level, rows in levels.items():
        for row in rows:
            test = f", log-rank p {row['p']:.3f} (Holm {row['p_holm']:.3f})" if "p" in row else ""
            half = "not reached" if row["median"] is None else f"{row['median'] / 1e6:.2f}M tokens"
            print(f"survival  {row['arm']}: accuracy {level}: {row['arrived']} of {row['n']} runs, median {half}{test}")


def _end(path: Path) -> int:
    return max((line["tokens"] for line in read_json_lines(path)), default=0)


if __name__ == "__main__":
    main()
