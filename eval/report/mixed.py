"""One mixed model over all arms and seeds: pooled error, seeds as random blocks, intervals for all arms at once.

    y[arm, seed] = mean[arm] + block[seed] + error,   block ~ N(0, s_b^2), error ~ N(0, s_e^2)

The variances are estimated by REML (Patterson and Thompson 1971), the arms by generalised least squares. With few
seeds, one arm's standard deviation is a poor estimate of the noise; the standard deviation pooled over arms is a good
estimate. Intervals and p values are simultaneous over the arms that are compared with one reference (Dunnett 1955).
For a single arm they are Student's t. For several arms, quantiles of the multivariate t come from samples with a fixed
seed; their standard error is below 0.01 with 4 or more degrees of freedom, and 0.03 with 2.

With a covariate x[arm, seed], slope * x is added to the model, so arms are compared at equal x (analysis of covariance,
Fisher 1932). If the arms change x, this is the part of their effect that does not go through x.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy import stats

from eval.report.runs import Arm
from eval.report.statistics import LEVEL, detectable_effect, difference_text, p_text, t_quantile

DRAWS = 2**18  # samples of the multivariate t
NULL_DRAWS = 2**12  # samples of a study whose arms have one error
Values = Mapping[str, Mapping[int, float]]  # arm -> seed -> value


@dataclass
class Effect:
    """An arm minus the reference. n: seeds of the arm.

    low, high: 95 % interval for all arms at once. p: p value for all arms at once. own_*: interval for this arm alone.
    """

    mean: float
    se: float
    low: float
    high: float
    p: float
    own_low: float
    own_high: float
    n: int


@dataclass
class MixedModel:
    """sd: the error's standard deviation, with its 95 % interval. sd_seed: the standard deviation of the blocks. df:
    the error's degrees of freedom. effects: arm -> Effect. detectable: the true difference between the reference and an
    arm with all seeds that a test at the 5 % level finds with 80 % power; with a covariate the largest of the arms'.
    p_spread: p of the hypothesis that all arms have one error, as the model assumes (`spread_p`). It is None where fewer than
    three arms have two or more seeds (a difference of two arms does not need that assumption), and with a covariate, whose
    `slope` is then given.
    """

    reference: str
    n: int
    sd: float
    sd_low: float
    sd_high: float
    sd_seed: float
    df: int
    critical: float
    detectable: float
    effects: dict[str, Effect]
    p_spread: float | None = None
    slope: float | None = None


@dataclass
class Estimate:
    """Generalised least squares: beta[0] is the reference's mean, beta[i] is arms[i] minus the reference; error: variance.

    slope: the covariate's, if there is one; beta and covariance are then at equal covariate.
    """

    arms: list[str]
    beta: np.ndarray
    covariance: np.ndarray
    error: float
    ratio: float
    df: int
    slope: float | None = None


def estimate(values: Values, reference: str, covariate: Values | None = None) -> Estimate | None:
    """Fit arm -> seed -> value. None for fewer than two arms, too few seeds to estimate the error, or a covariate that does
    not differ between the seeds of any arm.
    """
    values = _with_covariate(values, covariate)
    arms = [reference, *(arm for arm in values if arm != reference and values[arm])]
    seeds = sorted({seed for arm in arms for seed in values[arm]})
    cells = [(i, seeds.index(seed), value) for i, arm in enumerate(arms) for seed, value in values[arm].items()]
    df = len(cells) - len(arms) - len(seeds) + 1 - (covariate is not None)
    if len(arms) < 2 or len(seeds) < 2 or df < 1 or not values[reference]:
        return None
    y = np.array([value for _, _, value in cells])
    design = np.zeros((len(cells), len(arms)))  # column 0: the reference's mean; the others: differences to it
    block = np.zeros((len(cells), len(seeds)))
    for row, (arm, seed, _) in enumerate(cells):
        design[row, 0] = design[row, arm] = block[row, seed] = 1
    if covariate is not None:
        x = np.array([covariate[arm][seed] for arm in arms for seed in values[arm]])
        design = np.column_stack((design, x - x.mean()))
    if np.linalg.matrix_rank(design) < design.shape[1]:  # the covariate is equal in all runs of every arm
        return None
    beta, covariance, error, ratio = _reml(y, design, block)
    n = len(arms)
    slope = None if covariate is None else float(beta[n])
    return Estimate(arms, beta[:n], covariance[:n, :n], error, ratio, df, slope) if error else None


def fit(values: Values, reference: str, covariate: Values | None = None) -> MixedModel | None:
    """The model of arm -> seed -> value with its intervals, or None as `estimate`."""
    values = _with_covariate(values, covariate)
    found = estimate(values, reference, covariate)
    if not found:
        return None
    beta, df, n = found.beta, found.df, len(values[reference])
    se = np.sqrt(np.diag(found.covariance))[1:]
    correlation = found.covariance[1:, 1:] / np.outer(se, se)
    critical, p_values = _all_at_once(np.abs(beta[1:]) / se, correlation, df)
    own, effects = t_quantile(1 - LEVEL / 2, df), {}
    columns = (column.tolist() for column in (beta[1:], se, p_values))
    for arm, mean, spread, p in zip(found.arms[1:], *columns, strict=True):
        half, alone = critical * spread, own * spread  # of the intervals for all arms at once, and for this arm alone
        effects[arm] = Effect(mean, spread, mean - half, mean + half, p, mean - alone, mean + alone, len(values[arm]))
    sd, sd_seed = math.sqrt(found.error), math.sqrt(found.error * found.ratio)
    low, high = (sd * math.sqrt(df / stats.chi2.ppf(p, df)) for p in (1 - LEVEL / 2, LEVEL / 2))
    # A t test with df degrees of freedom is that of df + 1 pairs, whose mean has sqrt(df + 1) times less spread than one pair.
    whole = [effect.se for effect in effects.values() if effect.n == n] or list(se)
    least = float(max(whole)) * detectable_effect(df + 1) * math.sqrt(df + 1)
    p_spread = spread_p(values) if covariate is None else None
    return MixedModel(reference, n, sd, low, high, sd_seed, df, critical, least, effects, p_spread, found.slope)


def _with_covariate(values: Values, covariate: Values | None) -> Values:
    """The values of runs that have the covariate, too."""
    if covariate is None:
        return values
    return {arm: {s: value for s, value in of.items() if s in covariate[arm]} for arm, of in values.items()}


def spread_p(values: Values) -> float | None:
    """p of the hypothesis that all arms have one error; None where fewer than three arms have two or more seeds.

    The statistic is Bartlett's (1937), of what is left without the means of arms and seeds: with the seeds' blocks in them,
    all arms would spread alike. Its distribution comes from draws, because what is left of three arms is not independent.
    """
    arms = [arm for arm in values.values() if len(arm) > 1]
    seeds = sorted({seed for arm in arms for seed in arm})
    if len(arms) < 3:
        return None
    group = np.array([i for i, arm in enumerate(arms) for _ in arm])
    block = np.array([seeds.index(seed) for arm in arms for seed in arm])
    design = np.hstack((np.eye(len(arms))[group], np.eye(len(seeds))[block]))
    rest = np.eye(len(group)) - design @ np.linalg.pinv(design)  # takes the means of arms and seeds away
    y = np.array([value for arm in arms for value in arm.values()])
    z = np.random.default_rng(20240607).standard_normal((NULL_DRAWS, len(y)))
    found, null = (_bartlett(sample @ rest, group) for sample in (y[None] - y.mean(), z))
    return float((1 + np.sum(null >= found[0])) / (1 + NULL_DRAWS))


def _bartlett(left: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Bartlett's statistic (n,) up to a factor, of deviations from the arms' means (n, cells). group: each cell's arm."""
    members = np.eye(group.max() + 1)[group]  # (cells, arms)
    free = members.sum(axis=0) - 1
    squares = left**2 @ members
    return free.sum() * np.log(squares.sum(axis=1)) - np.log(np.maximum(squares / free, 1e-300)) @ free


def _reml(y: np.ndarray, design: np.ndarray, block: np.ndarray) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Estimates, their covariance, the error's variance s_e^2, and the ratio s_b^2 / s_e^2 of highest restricted likelihood.

    The ratio is 0 or one of a logarithmic grid with steps of 6 %, for all R of which everything is computed at once. Between
    two of them the error moves by less than 1 % (docs/METHODS.md, section 8.3).
    """
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


def _all_at_once(t: np.ndarray, correlation: np.ndarray, df: int) -> tuple[float, np.ndarray]:
    """The 5 % point of the largest |T| of all arms, and the p value of each arm's |T|, `t` (arms,)."""
    if len(t) == 1:
        return t_quantile(1 - LEVEL / 2, df), 2 * stats.t.sf(t, df)
    largest = _largest_t(tuple(map(tuple, correlation.round(9).tolist())), df)  # (DRAWS,) sorted
    return float(np.quantile(largest, 1 - LEVEL)), 1 - np.searchsorted(largest, t) / DRAWS


@functools.lru_cache(maxsize=16)  # 0.5 between all arms if all have the same seeds, so often asked for
def _largest_t(correlation: tuple[tuple[float, ...], ...], df: int) -> np.ndarray:
    """Draws of the largest |T| of a multivariate t, sorted."""
    root = np.linalg.cholesky(correlation)  # unique, unlike eigenvectors, so that every machine makes the same draws
    normal, scale = _draws(len(correlation), df)
    return np.sort(np.abs(normal @ root.T).max(axis=1) / scale)


@functools.lru_cache(maxsize=2)  # the metrics of a study mostly have the same arms and degrees of freedom
def _draws(k: int, df: int) -> tuple[np.ndarray, np.ndarray]:
    """Independent normal draws (DRAWS, k), and the draws' estimates of their standard deviation (DRAWS,)."""
    rng = np.random.default_rng(20240607)
    return rng.standard_normal((DRAWS, k)), np.sqrt(rng.chisquare(df, DRAWS) / df)


def by_point(arms: list[Arm], values: Values, covariate: Values | None = None) -> dict[str, MixedModel]:
    """Point of the grid -> the model of its arms, if a model can be fitted. values: arm's name -> seed -> value."""
    models = {}
    for point in dict.fromkeys(arm.point for arm in arms):
        here = [arm for arm in arms if arm.point == point]
        reference = next((arm.name for arm in here if arm.reference is None), None)  # None: it has no run yet
        model = reference and fit({arm.name: values[arm.name] for arm in here}, reference, covariate)
        if model:
            models[point] = model
    return models


def mixed_lines(models: Mapping[str, Mapping[str, MixedModel]], point: str, after: str = "") -> list[list[str]]:
    """The differences at one point of the grid: a row per arm, a column per metric. models: metric -> point -> model.

    after: more words of the first column's head.
    """
    here = {metric: at[point] for metric, at in models.items() if point in at}
    reference = next(iter(here.values())).reference
    lines = [[f"arm less {reference}{after}", "n", *here]]
    for arm in dict.fromkeys(arm for model in here.values() for arm in model.effects):
        found = [model.effects.get(arm) for model in here.values()]
        n = " / ".join(dict.fromkeys(str(e.n) for e in found if e))
        lines.append([arm, n, *(difference_text(e.mean, e.low, e.high, e.p) if e else "" for e in found)])
    return lines


def mixed_notes(models: Mapping[str, MixedModel], metric: str) -> list[str]:
    """A sentence about the pooled noise at each point of the grid, and a warning where arms differ in it."""
    notes = []
    for point, m in models.items():
        where = f"{metric}{f', {point}' if point else ''}"
        notes.append(
            f"{where}: error {m.sd:.4f} (95 % {m.sd_low:.4f} to {m.sd_high:.4f}, {m.df} degrees of freedom), seeds "
            f"{m.sd_seed:.4f}, smallest detectable difference {m.detectable:.4f} (n = {m.n}, pooled error, 80 % power, "
            f"5 % level); against {m.reference}."
        )
        if m.p_spread is not None and m.p_spread < LEVEL:
            notes.append(
                f"{where}: the arms differ in their spread over seeds (Bartlett's test, p {p_text(m.p_spread)}), which the "
                "pooled error ignores: its intervals are too narrow for the arms with a large spread, and too wide for "
                "the others. Compare with the paired intervals."
            )
    return notes
