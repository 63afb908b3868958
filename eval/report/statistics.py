"""Statistics of differences between arms over a few seeds, which pair the runs: intervals, p values, power, fits."""

import functools
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import optimize, stats

LEVEL, POWER = 0.05, 0.8
EXACT_UP_TO = 16  # largest n for which all 2^n sign flips are counted
PAIRED = ("n", "mean", "sd", "low", "high", "p", "p_permutation", "detectable")  # the numbers that `paired` makes


@dataclass
class Difference:
    """`arm` less `reference` in one metric at one point of a grid, over n seeds. What n seeds cannot give is None.

    low, high: 95 % interval. p: two-sided. by_seed: of every seed that both have. p_holm: p corrected for the differences
    that are tested with it (Holm 1979). se: standard error, of a model (differences.py). own_low, own_high: its interval
    alone. p_alone: paired t test. p_welch: unpaired. p_equal: test of equivalence. metric to better: its place.
    """

    n: int
    mean: float
    sd: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_permutation: float | None = None
    detectable: float | None = None
    p_holm: float | None = None
    se: float | None = None
    own_low: float | None = None
    own_high: float | None = None
    p_alone: float | None = None
    p_welch: float | None = None
    p_equal: float | None = None
    by_seed: dict[int, float] = field(default_factory=dict)
    metric: str = ""
    point: str = ""
    arm: str = ""
    reference: str = ""
    part: str = ""
    kind: str = ""
    group: str = ""
    better: str = ""

    def numbers(self, *keys: str) -> dict[str, Any]:
        return {key: getattr(self, key) for key in keys}

    @property
    def arms(self) -> str:
        return f"{self.arm} - {self.reference}"

    @property
    def text(self) -> str:
        """Mean and interval with as many digits as the mean needs."""
        size = abs(self.mean)
        shown = "+.3g" if 0 < size < 1e-3 else "+z.4f" if size < 1 else "+.2f"
        if self.low is None:
            return f"{self.mean:{shown}} ({'n = 1' if self.n == 1 else 'the same in every seed'})"
        return f"{self.mean:{shown}} [{self.low:{shown}}, {self.high:{shown}}]"

    @property
    def in_bold(self) -> str:
        """Mean and interval with four digits, in bold where p, after its correction, is below 5 %."""
        if self.low is None:
            return f"{self.mean:+z.4f}"
        text = f"{self.mean:+z.4f} ({self.low:+z.4f} to {self.high:+z.4f})"
        p = self.p if self.p_holm is None else self.p_holm
        return f"**{text}**" if p is not None and p < LEVEL else text

    @property
    def constant(self) -> bool:
        """Whether all of several seeds have one difference, which then has neither an interval nor a p."""
        return self.sd == 0

    @property
    def resolved(self) -> bool:
        """Whether zero lies outside of the interval, or all seeds have one difference that is not zero."""
        return self.constant and self.mean != 0 if self.low is None else not self.low <= 0 <= self.high


def paired(differences: Sequence[float], **place: Any) -> Difference:
    """Student's paired t test and interval (1908) of differences, one per seed. place: further fields of the Difference."""
    n = len(differences)
    result = Difference(n, math.fsum(differences) / n, **place)
    if n == 1:
        return result
    mean, sd = result.mean, statistics.stdev(differences)
    result.p_permutation = sign_flip_p(differences) if n <= EXACT_UP_TO else None
    if mean and sd < 1e-12 * abs(mean):  # equal differences, as of counts: the t test has no error to judge the mean by
        result.sd = 0.0
        return result
    half = t_quantile(1 - LEVEL / 2, n - 1) * sd / math.sqrt(n)
    result.p = 2 * float(stats.t.cdf(-abs(mean) / (sd / math.sqrt(n)), n - 1)) if sd else 1.0
    result.sd, result.low, result.high, result.detectable = sd, mean - half, mean + half, sd * detectable_effect(n)
    return result


def mean_sd(values: Sequence[float]) -> tuple[float, float | None]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


@functools.cache
def t_quantile(p: float, df: float) -> float:
    return float(stats.t.ppf(p, df))


def sign_flip_p(differences: Sequence[float]) -> float:
    """Exact two-sided p: the share of all 2^n sign flips whose mean is at least as far from 0 (Fisher 1935)."""
    d = np.asarray(differences, dtype=np.float64)
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(d))))  # (2^n, n)
    slack = 1e-12 * np.abs(d).sum()  # the sums of equal sets of numbers differ by rounding
    return float(np.mean(np.abs(signs @ d) >= abs(d.sum()) - slack))


def holm(ps: Sequence[float]) -> list[float]:
    """p values corrected for several tests (Holm 1979), in the order given."""
    adjusted = np.empty(len(ps))
    adjusted[np.argsort(ps)] = np.maximum.accumulate(np.sort(ps) * np.arange(len(ps), 0, -1)).clip(max=1)
    return adjusted.tolist()


def correct(differences: Iterable[Difference]) -> None:
    tested = [one for one in differences if one.p is not None]
    for one, p in zip(tested, holm([one.p for one in tested]), strict=True):
        one.p_holm = p


def power(effect: float, n: int) -> float:
    """Chance that the two-sided 5 % t test of n pairs finds a true difference of `effect` standard deviations."""
    df, shift = n - 1, effect * math.sqrt(n)
    critical = t_quantile(1 - LEVEL / 2, df)
    wrong_side = np.nan_to_num(stats.nct.cdf(-critical, df, shift))  # scipy has no number for the far tail, below 1e-15
    return float(stats.nct.sf(critical, df, shift) + wrong_side)


@functools.cache
def detectable_effect(n: int) -> float:
    """The true difference, in standard deviations, that the t test of n pairs finds with 80 % power."""
    enough = 2 * t_quantile(1 - LEVEL / 2, n - 1) / math.sqrt(n)
    return optimize.brentq(lambda effect: power(effect, n) - POWER, 0.0, enough, xtol=1e-14)


def geometric_interval(ratios: Sequence[float]) -> dict[str, float | None]:
    """The interval of the logarithms, as ratios: the inverse ratios have the inverse interval."""
    logs = paired([math.log(ratio) for ratio in ratios]).numbers("mean", "low", "high")
    return {"n": len(ratios)} | {key: None if value is None else math.exp(value) for key, value in logs.items()}


def p_text(p: float | None) -> str:
    return "" if p is None else f"{p:.3f}" if p >= 0.001 else "< 0.001"


def power_law(sizes: Sequence[float], losses: Sequence[float]) -> tuple[float, float]:
    """(a, b) of loss = a size^-b, by least squares in the logarithms."""
    slope, intercept = np.polyfit(np.log(sizes), np.log(losses), 1)
    return math.exp(intercept), -float(slope)


def size_ratio(reference: tuple[float, float], other: tuple[float, float], size: float) -> float:
    """Parameters that `other` needs for the loss that `reference` has at `size`, divided by `size`; nan or inf for none."""
    (a, b), (a2, b2) = reference, other
    logarithm = (math.log(a2 / a) + b * math.log(size)) / b2 if b2 > 0 else math.nan
    return math.inf if logarithm >= 700 else math.exp(logarithm) / size


def spikes(losses: Sequence[float], window: int = 50, over: float = 0.5) -> int:
    """How many losses, from the 11th on, are more than `over` nats above the median of the `window` losses before them."""
    before = ((loss, losses[max(0, i - window) : i]) for i, loss in enumerate(losses) if i >= 10)
    return sum(loss > statistics.median(earlier) + over for loss, earlier in before)
