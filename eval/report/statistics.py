"""What differences between arms over a few seeds allow to say: paired intervals, p values, power, fits.

Seeds pair the runs: arms of one seed read the same samples in the same order and share initial weights, so what is tested
is the mean of one difference per seed. mpmath (a requirement of torch's) supplies the incomplete beta function.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mpmath
import numpy as np
import torch

LEVEL, POWER = 0.05, 0.8
EXACT_UP_TO = 16  # seeds whose 2^n sign flips are all counted


@dataclass
class Difference:
    """Paired differences of n seeds. What n seeds cannot give (an interval from one) is None.

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
    sd = statistics.stdev(differences)
    half = t_quantile(1 - LEVEL / 2, n - 1) * sd / math.sqrt(n)
    flips = sign_flip_p(differences) if n <= EXACT_UP_TO else None
    return Difference(n, mean, sd, mean - half, mean + half, t_test_p(mean, sd, n), flips, detectable(sd, n))


def mean_sd(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation (None for one value)."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def t_test_p(mean: float, sd: float, n: int) -> float:
    """Two-sided p of the one-sample t test of `mean` against 0."""
    if sd == 0:
        return 1.0 if mean == 0 else 0.0
    return 2 * t_cdf(-abs(mean) / (sd / math.sqrt(n)), n - 1)


def t_cdf(t: float, df: float) -> float:
    """P(T <= t) of Student's t with `df` degrees of freedom (Abramowitz and Stegun 26.7.1 with 26.5.27)."""
    tail = 0.5 * float(mpmath.betainc(df / 2, 0.5, 0, df / (df + t * t), regularized=True))
    return tail if t < 0 else 1 - tail


@functools.cache
def t_quantile(p: float, df: float) -> float:
    """The t below which Student's t with `df` degrees of freedom falls with probability p, 0 < p < 1."""
    if p < 0.5:
        return -t_quantile(1 - p, df)
    high = 1.0
    while t_cdf(high, df) < p:
        high *= 2
    return _root(lambda t: t_cdf(t, df) - p, 0.0, high)


@functools.cache
def chi2_quantile(p: float, df: float) -> float:
    """The value below which chi-squared with `df` degrees of freedom falls with probability p (regularised gamma)."""
    high = df + 1.0
    while float(mpmath.gammainc(df / 2, 0, high / 2, regularized=True)) < p:
        high *= 2
    return _root(lambda x: float(mpmath.gammainc(df / 2, 0, x / 2, regularized=True)) - p, 0.0, high)


def _root(rising: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising function is 0, by bisection to float64's resolution."""
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return middle


def sign_flip_p(differences: Sequence[float]) -> float:
    """Exact two-sided p: the share of all 2^n sign flips whose mean is at least as far from 0 (Fisher 1935).

    Asks only that a difference be symmetric about 0 if the arms are equal; cannot fall below 2^(1-n).
    """
    d = np.asarray(differences, dtype=np.float64)
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(d))))  # (2^n, n)
    slack = 1e-12 * np.abs(d).sum()  # the sums of equal sets of numbers differ by rounding
    return float(np.mean(np.abs(signs @ d) >= abs(d.sum()) - slack))


def holm(ps: Sequence[float]) -> list[float]:
    """p values adjusted for being several, in the order given (Holm 1979): each bounds the chance of any false finding."""
    adjusted, worst = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        worst = max(worst, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = worst
    return adjusted


def power(effect: float, n: int) -> float:
    """Chance that the two-sided 5 % t test of n pairs finds a true difference of `effect` standard deviations.

    The tails of the noncentral t: with s^2 ~ chi^2_df / df, P(|Z + effect sqrt n| > c s), averaged over s by quadrature.
    """
    df, shift = n - 1, effect * math.sqrt(n)
    critical = t_quantile(1 - LEVEL / 2, df)
    s = (np.arange(20_000) + 0.5) * (_largest_s(df) / 20_000)
    log_density = (df - 1) * np.log(s) - df * s * s / 2
    weight = np.exp(log_density - log_density.max())
    tails = torch.special.ndtr(torch.from_numpy(np.stack((shift - critical * s, -shift - critical * s)))).numpy()
    return float((weight * tails.sum(0)).sum() / weight.sum())


def _largest_s(df: int) -> float:
    return 1 + 10 / math.sqrt(df)  # beyond it lies less than 1e-20 of the chi distribution


@functools.cache
def _detectable_effect(n: int) -> float:
    high = 1.0
    while power(high, n) < POWER:
        high *= 2
    return _root(lambda effect: power(effect, n) - POWER, 0.0, high)


def detectable(sd: float, n: int) -> float:
    """The smallest true difference that n pairs with standard deviation sd reveal with 80 % power at the 5 % level."""
    return sd * _detectable_effect(n)


def interval(values: Sequence[float]) -> dict[str, float | None]:
    """n, mean, and low and high of its 95 % t interval (None from a single seed), of one value per seed."""
    found = paired(values)
    return {"n": found.n, "mean": found.mean, "low": found.low, "high": found.high}


def power_law(sizes: Sequence[float], losses: Sequence[float]) -> tuple[float, float]:
    """(a, b) of loss = a size^-b, by least squares in the logarithms. Two sizes at least."""
    if len(set(sizes)) < 2:
        raise ValueError("a power law needs losses at two sizes at least: add points to grid=")
    slope, intercept = np.polyfit(np.log(sizes), np.log(losses), 1)
    return math.exp(intercept), -float(slope)


def size_ratio(reference: tuple[float, float], other: tuple[float, float], size: float) -> float:
    """How many times the parameters of `reference` the `other` needs for the loss that `reference` has at `size`.

    Below 1: fewer. Both are fits (a, b) of `power_law`; nan where `other` does not fall with size.
    """
    (a, b), (a2, b2) = reference, other
    if b2 <= 0:
        return math.nan
    return math.exp((math.log(a2 / a) + b * math.log(size)) / b2) / size


def spikes(losses: Sequence[float], window: int = 50, over: float = 0.5) -> int:
    """Number of losses more than `over` nats above the median of the `window` losses before them (10 at least)."""
    above = 0
    for i in range(10, len(losses)):
        above += losses[i] > statistics.median(losses[max(0, i - window) : i]) + over
    return above
