"""Pairs of arms that differ in one part: what the part gives, at every point of the grid.

The error is pooled over all arms of the point (eval/report/mixed.py), so that two or three seeds already give an interval.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from eval.report.mixed import Estimate, Values, estimate
from eval.report.runs import Arm, paired_by_seed
from eval.report.statistics import LEVEL, difference_text, holm, p_text, paired, t_quantile

PAIR_NOTE = (
    "A part is an arm less the arm that lacks it. The interval uses the error pooled over all arms at that point (Student's "
    "t) and is not corrected for the number of parts; bold where p after Holm's correction for the parts is below 5 %."
)


@dataclass
class Pair:
    """`arm` minus `other` at a point of the grid.

    differences: seed -> difference, for the seeds that both arms have. mean: the model's estimate, or the mean of the
    differences where the seeds are too few for a model; low, high, p (Student's t with the pooled error) are then None.
    p_holm: p corrected for the pairs of this point (Holm 1979). p_alone: uncorrected p of the paired t test of these
    differences alone, which takes nothing from other arms: compare it with p where the arms differ in their spread.
    """

    name: str
    point: str
    arm: str
    other: str
    differences: dict[int, float]
    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_holm: float | None = None
    p_alone: float | None = None

    @property
    def n(self) -> int:
        return len(self.differences)


def compare_pairs(
    arms: list[Arm], values: Values, pairs: Mapping[str, Sequence[str]], covariate: Values | None = None
) -> list[Pair]:
    """The pairs at every point at which both arms have a seed in common. values: arm's name -> seed -> value.

    With a covariate the differences are those at equal covariate, and pairs without enough seeds for a model are left out.
    """
    found = []
    for point in dict.fromkeys(arm.point for arm in arms):
        here = {arm.arm: arm.name for arm in arms if arm.point == point}
        measured = {name: values[name] for name in here.values() if values[name]}
        model = estimate(measured, next(iter(measured)), covariate) if measured else None
        of_point = [
            _pair(name, point, here[arm], here[other], values, model)
            for name, (arm, other) in pairs.items()
            if arm in here and other in here and paired_by_seed(values[here[arm]], values[here[other]])
        ]
        tested = [pair for pair in of_point if pair.p is not None]
        of_point = of_point if covariate is None else tested
        for pair, p in zip(tested, holm([pair.p for pair in tested]), strict=True):
            pair.p_holm = p
        found += of_point
    return found


def pair_notes(found: Sequence[Pair], pairs: Mapping[str, Sequence[str]]) -> list[str]:
    """What the tables of pairs say, and the parts that are in none of them."""
    shown = {pair.name for pair in found}
    absent = [f"{name} ({' - '.join(arms)})" for name, arms in pairs.items() if name not in shown]
    missing = f"Without a row, because an arm is missing or has no number for a common seed: {', '.join(absent)}."
    return [PAIR_NOTE] * bool(found) + [missing] * bool(absent)


def _pair(name: str, point: str, arm: str, other: str, values: Values, model: Estimate | None) -> Pair:
    differences = paired_by_seed(values[arm], values[other])
    alone = paired(list(differences.values()))
    if not model or arm not in model.arms or other not in model.arms:
        return Pair(name, point, arm, other, differences, alone.mean, p_alone=alone.p)
    less = np.array([(a == arm) - (a == other) for a in model.arms], dtype=float)
    less[0] = 0  # beta[0] is the first arm's mean, and the others are differences to it
    mean, se = float(less @ model.beta), math.sqrt(less @ model.covariance @ less)
    half, p = t_quantile(1 - LEVEL / 2, model.df) * se, 2 * float(stats.t.sf(abs(mean) / se, model.df))
    return Pair(name, point, arm, other, differences, mean, mean - half, mean + half, p, p_alone=alone.p)


def pair_lines(found: Mapping[str, Sequence[Pair]], point: str, after: str = "") -> list[list[str]]:
    """The pairs at one point of the grid: a row per part, a column per metric. found: metric -> pairs.

    after: more words of the first column's head.
    """
    here = [{pair.name: pair for pair in pairs if pair.point == point} for pairs in found.values()]
    lines = [[f"part{after}", "arms", "n", *found]]
    for name in dict.fromkeys(itertools.chain(*here)):
        same = [of_metric.get(name) for of_metric in here]
        first = next(filter(None, same))
        texts = [difference_text(pair.mean, pair.low, pair.high, pair.p_holm) if pair else "" for pair in same]
        n = " / ".join(dict.fromkeys(str(pair.n) for pair in same if pair))
        lines.append([name, f"{first.arm} - {first.other}", n, *texts])
    return lines


def seed_lines(found: Mapping[str, Sequence[Pair]], point: str) -> list[list[str]]:
    """The difference of every seed at one point of the grid: a row per part and metric. found: metric -> pairs."""
    here = [(pair, metric) for metric, pairs in found.items() for pair in pairs if pair.point == point]
    seeds = list(dict.fromkeys(seed for pair, _ in here for seed in pair.differences))
    lines = [["part by seed", "arms", "metric", *(f"seed {seed}" for seed in seeds), "p, pooled", "p, Holm", "p, alone"]]
    for name in dict.fromkeys(pair.name for pair, _ in here):
        for pair, metric in here:
            if pair.name == name:
                values = [f"{pair.differences[seed]:+z.4f}" if seed in pair.differences else "" for seed in seeds]
                ps = map(p_text, (pair.p, pair.p_holm, pair.p_alone))
                lines.append([name, f"{pair.arm} - {pair.other}", metric, *values, *ps])
    return lines
