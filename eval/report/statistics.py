"""Statistics of differences between arms over a few seeds: paired intervals, p values, power, fits.

Seeds pair the runs: arms of one seed read the same samples in the same order and share initial weights, so the tests are of
the mean of one difference per seed. Distributions are scipy's.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats

LEVEL, POWER = 0.05, 0.8
EXACT_UP_TO = 16  # largest n for which all 2^n sign flips are counted


@dataclass
class Difference:
    """Paired differences of n seeds. A value that n seeds cannot give (an interval of one seed) is None.

    mean, sd: of the differences. low, high: 95 % t interval. p: two-sided paired t test. p_permutation: exact two-sided
    sign-flip test. detectable: the smallest true difference that the t test finds in 80 % of such experiments.
    """

    n: int
    mean: float
    sd: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_permutation: float | None = None
    detectable: float | None = None


def paired(differences: Sequence[float]) -> Difference:
    """Test whether the mean of paired differences is zero (Student 1908; scipy's ttest_rel gives the same p)."""
    n = len(differences)
    if n == 0 or not all(math.isfinite(d) for d in differences):
        raise ValueError("differences must be finite numbers, one per seed: leave out the seeds that diverged")
    mean = math.fsum(differences) / n
    if n == 1:
        return Difference(n, mean)
    sd, flips = statistics.stdev(differences), sign_flip_p(differences) if n <= EXACT_UP_TO else None
    if mean and sd < 1e-12 * abs(mean):  # equal differences, as of counts: the t test has no error to judge the mean by
        return Difference(n, mean, 0.0, p_permutation=flips)
    half = t_quantile(1 - LEVEL / 2, n - 1) * sd / math.sqrt(n)
    p = 2 * float(stats.t.cdf(-abs(mean) / (sd / math.sqrt(n)), n - 1)) if sd else 1.0
    return Difference(n, mean, sd, mean - half, mean + half, p, flips, detectable(sd, n))


def mean_sd(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation (None for one value)."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


@functools.cache
def t_quantile(p: float, df: float) -> float:
    """The p-quantile of Student's t with `df` degrees of freedom, 0 < p < 1."""
    return float(stats.t.ppf(p, df))


def sign_flip_p(differences: Sequence[float]) -> float:
    """Exact two-sided p: the share of all 2^n sign flips whose mean is at least as far from 0 (Fisher 1935).

    The test assumes only that differences are symmetric about 0 if the arms are equal. Its p is at least 2^(1-n).
    """
    d = np.asarray(differences, dtype=np.float64)
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(d))))  # (2^n, n)
    slack = 1e-12 * np.abs(d).sum()  # the sums of equal sets of numbers differ by rounding
    return float(np.mean(np.abs(signs @ d) >= abs(d.sum()) - slack))


def holm(ps: Sequence[float]) -> list[float]:
    """p values corrected for several tests, in the order given (Holm 1979), which limit the chance of any false finding."""
    adjusted, worst = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        worst = max(worst, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = worst
    return adjusted


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


def detectable(sd: float, n: int) -> float:
    """The smallest true difference that n pairs with standard deviation sd reveal with 80 % power at the 5 % level."""
    return sd * detectable_effect(n)


def interval(values: Sequence[float]) -> dict[str, float | None]:
    """n, mean, and low and high of the mean's 95 % t interval (None for a single seed), of one value per seed."""
    found = paired(values)
    return {"n": found.n, "mean": found.mean, "low": found.low, "high": found.high}


def geometric_interval(ratios: Sequence[float]) -> dict[str, float | None]:
    """`interval` of the logarithms, as ratios: the inverse ratios have the inverse interval. ratios: above 0."""
    found = interval([math.log(ratio) for ratio in ratios])
    return {key: value if key == "n" or value is None else math.exp(value) for key, value in found.items()}


def p_text(p: float | None) -> str:
    """A p value for a table, "" for None."""
    return "" if p is None else f"{p:.3f}" if p >= 0.001 else "< 0.001"


def difference_text(mean: float, low: float | None, high: float | None, p: float | None) -> str:
    """A difference and its interval for a table, in bold where p, after its correction, is below 5 %."""
    if low is None or high is None:
        return f"{mean:+z.4f}"
    text = f"{mean:+z.4f} ({low:+z.4f} to {high:+z.4f})"
    return f"**{text}**" if p is not None and p < LEVEL else text


def power_law(sizes: Sequence[float], losses: Sequence[float]) -> tuple[float, float]:
    """(a, b) of loss = a size^-b, by least squares in the logarithms. ValueError for fewer than two sizes."""
    if len(set(sizes)) < 2:
        raise ValueError("a power law needs losses at two or more sizes: add points to grid=")
    slope, intercept = np.polyfit(np.log(sizes), np.log(losses), 1)
    return math.exp(intercept), -float(slope)


def size_ratio(reference: tuple[float, float], other: tuple[float, float], size: float) -> float:
    """Parameters that `other` needs for the loss that `reference` has at `size`, divided by `size`.

    Below 1, `other` needs fewer parameters. Both are fits (a, b) of `power_law`; nan if `other` does not fall with
    size, inf if it falls so slowly that no size in reach has that loss.
    """
    (a, b), (a2, b2) = reference, other
    if b2 <= 0:
        return math.nan
    logarithm = (math.log(a2 / a) + b * math.log(size)) / b2
    return math.exp(logarithm) / size if logarithm < 700 else math.inf


def spikes(losses: Sequence[float], window: int = 50, over: float = 0.5) -> int:
    """Number of losses more than `over` nats above the median of the losses before them, at most `window` of them.

    The first 10 losses have too few before them to count.
    """
    before = ((loss, losses[max(0, i - window) : i]) for i, loss in enumerate(losses) if i >= 10)
    return sum(loss > statistics.median(earlier) + over for loss, earlier in before)
