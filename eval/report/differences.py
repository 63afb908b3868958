"""Differences between arms, from one long table (arm, point, seed, metric, value): paired, or with a pooled error.

y[arm, seed] = mean[arm] + block[seed] + slope * covariate[arm, seed] + error      (docs/METHODS.md, 8.3)
"""

import functools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from eval.report.runs import Arm
from eval.report.statistics import LEVEL, Difference, correct, detectable_effect, paired, t_quantile

FEWEST_DF = 3  # with two seeds a pooled error needs 3, as four arms give; with fewer, only paired intervals are shown
DRAWS = 2**18  # samples of the multivariate t: its quantiles' standard error is below 0.01 for df >= 4, and 0.03 for 2
EFFECT = ("mean", "se", "low", "high", "p", "own_low", "own_high", "n", "p_welch")


def long_table(arms: list[Arm], values: Mapping[Any, Sequence[Sequence[Any]]]) -> pd.DataFrame:
    """`values` (metric -> for each arm, one value per run) as a table with a row for each value that is there and finite."""
    rows = [
        (arm.name, arm.point, run.seed, metric, value)
        for metric, of_arms in values.items()
        for arm, of_runs in zip(arms, of_arms, strict=True)
        for run, value in zip(arm.runs, of_runs, strict=True)
        if isinstance(value, (int, float)) and math.isfinite(value)
    ]
    return pd.DataFrame(rows, columns=["arm", "point", "seed", "metric", "value"])


def by_seed(table: pd.DataFrame, *keys: str) -> Iterator[tuple[Any, pd.DataFrame]]:
    """For every value of the columns `keys`: the values with a row per seed and a column per arm, in the table's order."""
    for key, part in table.groupby(list(keys), sort=False):
        wide = part.pivot(index="seed", columns="arm", values="value")[list(dict.fromkeys(part["arm"]))]
        yield (key[0] if len(keys) == 1 else key), wide


def contrasts(table: pd.DataFrame, arms: list[Arm]) -> list[Difference]:
    """Every arm less its reference, paired over the seeds that both have; Holm's correction for the arms of one metric."""
    differences = []
    for metric, values in by_seed(table, "metric"):
        pairs = [(arm.name, arm.reference) for arm in arms if {arm.name, arm.reference} <= set(values)]
        of_metric = [one for pair in pairs if (one := paired_arms(values, *pair, metric=metric))]
        correct(of_metric)
        differences += of_metric
    return differences


def paired_arms(values: pd.DataFrame, arm: str, other: str, **place: str) -> Difference | None:
    """`arm` less `other`, paired by seed; None without a common seed. values: a row per seed, a column per arm."""
    less = (values[arm] - values[other]).dropna().to_dict()
    return paired(list(less.values()), by_seed=less, arm=arm, reference=other, **place) if less else None


class MixedModel:
    """A metric at one point. values: a row per seed, a column per arm, the reference first; nan where there is no run.

    beta[0] is the reference's mean, beta[i] arm i less it. error: the error's variance, 0 where it cannot be estimated: of
    less than two arms, of two seeds and less than FEWEST_DF degrees of freedom, with a covariate that no seed moves. ratio: the
    variance of the seeds' blocks (what all arms share at a seed) divided by it. place: metric and point of its differences.
    """

    def __init__(self, values: pd.DataFrame, covariate: pd.DataFrame | None = None, **place: str) -> None:
        if covariate is not None:
            covariate = covariate.reindex(index=values.index, columns=values.columns)
            values = values.where(covariate.notna())
        self.values = values = values.dropna(how="all").dropna(axis=1, how="all")
        self.place, self.slope, self.error = place, None, 0.0
        seed, arm = np.nonzero(values.notna().to_numpy())
        y, (seeds, arms) = values.to_numpy(dtype=float)[seed, arm], values.shape
        design, block = np.eye(arms)[arm], np.eye(seeds)[seed]
        design[:, :1] = 1  # the reference's mean; the other columns are differences to it
        if covariate is not None:
            x = covariate.loc[values.index, values.columns].to_numpy(dtype=float)[seed, arm]
            design = np.column_stack((design, x - x.mean()))
        self.df = len(y) - design.shape[1] - seeds + 1
        if arms > 1 and self.df >= (1 if seeds > 2 else FEWEST_DF) and np.linalg.matrix_rank(design) == design.shape[1]:
            beta, covariance, self.error, self.ratio = _reml(y, design, block)
            self.beta, self.covariance = beta[:arms], covariance[:arms, :arms]
            self.slope = float(beta[arms]) if covariate is not None else None
        self.enough = self.error > (1e-12 * np.abs(y).max(initial=0.0)) ** 2  # of equal values, the error is rounding alone
        self.reference = values.columns[0] if arms else None

    @functools.cached_property
    def bartlett_p(self) -> float | None:
        """p of one spread over seeds for all arms (Bartlett 1937); None for two arms, and with a covariate."""
        groups = [column for arm in self.values if len(column := self.values[arm].dropna()) > 1]
        if len(groups) < 3 or self.slope is not None:
            return None
        with np.errstate(divide="ignore"):  # an arm whose seeds are equal
            return float(stats.bartlett(*groups).pvalue)

    @property
    def spreads_differ(self) -> bool:
        return self.bartlett_p is not None and self.bartlett_p < LEVEL

    def less(self, arm: str, other: str, **place: str) -> Difference:
        """`arm` less `other` with the pooled error and Student's t; without one, the mean of the seeds' differences."""
        alone = paired_arms(self.values, arm, other) or Difference(0, math.nan)
        place |= self.place | {"arm": arm, "reference": other}
        one = Difference(alone.n, alone.mean, p_alone=alone.p, by_seed=alone.by_seed, **place)
        if self.enough:
            weights = (self.values.columns == arm).astype(float) - (self.values.columns == other)  # of beta
            weights[0] = 0  # beta has the first arm's mean, then the differences of the others to it
            one.mean, one.se = float(weights @ self.beta), math.sqrt(weights @ self.covariance @ weights)
            half = t_quantile(1 - LEVEL / 2, self.df) * one.se
            one.low, one.high = one.mean - half, one.mean + half
            one.p = 2 * float(stats.t.sf(abs(one.mean) / one.se, self.df))
            if self.spreads_differ:
                one.p_welch = welch_p(self.values[arm].dropna(), self.values[other].dropna())
        return one

    @functools.cached_property
    def effects(self) -> dict[str, Difference]:
        """Arm -> the arm less the reference; low, high and p are for all arms at once. n: seeds of the arm."""
        effects = {arm: self.less(arm, self.reference) for arm in self.values.columns[1:]}
        se = np.array([one.se for one in effects.values()])
        correlation = self.covariance[1:, 1:] / np.outer(se, se)
        largest = largest_t(tuple(map(tuple, correlation.round(9).tolist())), self.df) if len(se) > 1 else None
        self.critical = t_quantile(1 - LEVEL / 2, self.df) if largest is None else float(np.quantile(largest, 1 - LEVEL))
        for one in effects.values():
            if largest is not None:
                one.p = float(1 - np.searchsorted(largest, abs(one.mean) / one.se) / DRAWS)
            one.own_low, one.own_high, one.n = one.low, one.high, int(self.values[one.arm].count())
            one.low, one.high = one.mean - self.critical * one.se, one.mean + self.critical * one.se
        return effects

    def summary(self) -> dict[str, Any]:
        """Its numbers. sd: of the error, with its 95 % interval; sd_seed: of the seeds' blocks; detectable: with 80 % power."""
        n, df, sd = int(self.values[self.reference].count()), self.df, math.sqrt(self.error)
        low, high = (sd * math.sqrt(df / stats.chi2.ppf(p, df)) for p in (1 - LEVEL / 2, LEVEL / 2))
        whole = [one.se for one in self.effects.values() if one.n == n] or [one.se for one in self.effects.values()]
        # A t test with df degrees of freedom is that of df + 1 pairs, whose mean has sqrt(df + 1) times less spread than one.
        least = max(whole) * detectable_effect(df + 1) * math.sqrt(df + 1)
        of_seeds, effects = math.sqrt(self.error * self.ratio), {arm: one.numbers(*EFFECT) for arm, one in self.effects.items()}
        return {"reference": self.reference, "n": n, "sd": sd, "sd_low": low, "sd_high": high, "sd_seed": of_seeds, "df": df,
                "critical": self.critical, "detectable": least, "effects": effects, "bartlett_p": self.bartlett_p,
                "slope": self.slope}  # fmt: skip


def welch_p(one: pd.Series, other: pd.Series) -> float | None:
    """p of Welch's test of two samples; None if one has a single value, or if all values of both are equal."""
    with warnings.catch_warnings(action="ignore"):  # scipy's, about equal values
        p = float(stats.ttest_ind(one, other, equal_var=False).pvalue)
    return p if math.isfinite(p) else None


def _reml(y: np.ndarray, design: np.ndarray, block: np.ndarray) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Estimates, covariance, s_e^2 and the ratio s_b^2 / s_e^2: the likeliest (REML) of a grid of R ratios, 6 % apart."""
    ratios = np.array([0.0, *np.geomspace(1e-4, 1e8, 481)])
    spread = ratios[:, None] * block.sum(axis=0)  # (R, seeds): the ratio times the seed's runs
    weights = (ratios[:, None] / (1 + spread))[:, None]  # (R, 1, seeds)

    def weighted(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """a' (I + ratio block block')^-1 b for each ratio, by Woodbury's formula; block' block is diagonal."""
        return a.mT @ b - (a.mT @ block * weights) @ (block.T @ b)

    precision = weighted(design, design)  # (R, columns, columns)
    inverse = np.linalg.inv(precision)
    beta = inverse @ weighted(design, y[:, None])  # (R, columns, 1)
    rest, df = y[:, None] - design @ beta, len(y) - design.shape[1]
    error = weighted(rest, rest)[:, 0, 0] / df
    logs = np.log1p(spread).sum(axis=1) + np.linalg.slogdet(precision)[1]
    best = np.argmin(logs + df * np.log(np.maximum(error, 1e-300)))
    return beta[best, :, 0], error[best] * inverse[best], float(error[best]), float(ratios[best])


@functools.lru_cache(maxsize=16)  # many models have the same one
def largest_t(correlation: tuple[tuple[float, ...], ...], df: int) -> np.ndarray:
    """Draws of the largest |T| of a multivariate t, sorted, with a fixed seed."""
    root = np.linalg.cholesky(correlation)  # unique, unlike eigenvectors, so that every machine makes the same draws
    rng = np.random.default_rng(20240607)
    normal, scale = rng.standard_normal((DRAWS, len(correlation))), np.sqrt(rng.chisquare(df, DRAWS) / df)
    return np.sort(np.abs(normal @ root.T).max(axis=1) / scale)
