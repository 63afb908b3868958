"""Differences with a pooled error: against textbook values and the paired test, and on made-up studies whose truth is known."""

import math
import warnings

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from eval.report.differences import MixedModel, largest_t, welch_p
from eval.report.statistics import Difference, detectable_effect, paired
from eval.report.study_tables import difference_table

# Two-sided 5 % points for equal groups (Dunnett 1964, to three digits by scipy's multivariate_t):
# (comparisons, degrees of freedom) -> critical value.
DUNNETT = {(2, 10): 2.568, (5, 20): 2.735, (6, 60): 2.642, (7, 28): 2.784}


def equal_correlations(k: int) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, np.full((k, k), 0.5) + 0.5 * np.eye(k)))


def test_critical_values_are_dunnetts_and_the_same_on_every_machine() -> None:
    for (k, df), critical in DUNNETT.items():
        assert np.quantile(largest_t(equal_correlations(k), df), 0.95) == pytest.approx(critical, abs=0.015)
    # Equal correlations have no unique eigenvectors, so draws along them would depend on the machine.
    assert np.quantile(largest_t(equal_correlations(7), 28), 0.95) == pytest.approx(2.78643319, abs=1e-7)


def study(arms: dict[str, float], seeds: int, sd: float, sd_seed: float, draw: int) -> pd.DataFrame:
    """A row per seed, a column per arm."""
    rng = np.random.default_rng(draw)
    block = rng.normal(0, sd_seed, seeds)
    return pd.DataFrame({arm: mean + block + rng.normal(0, sd, seeds) for arm, mean in arms.items()})


THREE = {"a": 4.0, "b": 3.9, "c": 4.0}
FOUR = THREE | {"d": 4.1}


def test_a_balanced_study_is_the_textbooks_two_way_table() -> None:
    values = study(FOUR, 5, 0.01, 0.05, 0)
    y = values.to_numpy().T
    rest = y - y.mean(1, keepdims=True) - y.mean(0, keepdims=True) + y.mean()
    error = (rest**2).sum() / (3 * 4)
    model = MixedModel(values)
    effects, summary = model.effects, model.summary()
    assert model.df == 12 and summary["sd"] == pytest.approx(math.sqrt(error), rel=1e-2)  # the ratio lies on a grid
    assert effects["b"].mean == pytest.approx(y[1].mean() - y[0].mean(), abs=1e-9)
    assert effects["b"].se == pytest.approx(math.sqrt(2 * error / 5), rel=1e-2)
    assert effects["b"].high < 0 < effects["d"].low and effects["c"].p > 0.05 and effects["b"].low < effects["b"].own_low
    assert summary["sd_low"] < summary["sd"] < summary["sd_high"] and summary["reference"] == "a" and summary["n"] == 5


def test_intervals_cover_all_arms_at_once_and_p_values_are_theirs() -> None:
    """An interval of all arms at once without 0 has p below 5 %, and such a p is larger than that of the arm alone."""
    truth, covered = {"a": 0.0, "b": 0.0, "c": 0.1, "d": -0.1, "e": 0.0}, 0
    for draw in range(40):
        model = MixedModel(study(truth, 5, 0.05, 0.05, draw))
        covered += all(effect.low <= truth[arm] <= effect.high for arm, effect in model.effects.items())
        for effect in model.effects.values():
            alone = 2 * stats.t.sf(abs(effect.mean) / effect.se, model.df)
            assert (effect.p < 0.05) == effect.resolved and (effect.p > 1.3 * alone or effect.p > 0.9 or alone < 1e-4)
    assert covered >= 34  # 95 % of 40 is 38; fewer than 34 has a chance of 1 %


def test_arms_with_fewer_seeds_join_the_pooled_error() -> None:
    values = study(THREE, 5, 0.01, 0.0, 1)
    values["late"] = pd.Series([4.06, 4.04, 4.06])
    model = MixedModel(values)
    late, alone = model.effects["late"], MixedModel(values[list(THREE)]).summary()
    assert model.df == 18 - 4 - 5 + 1 and late.se > model.effects["b"].se and late.n == 3
    of_pairs = detectable_effect(alone["df"] + 1) * math.sqrt(alone["df"] + 1)
    assert alone["detectable"] == pytest.approx(alone["sd"] * math.sqrt(2 / 5) * of_pairs, rel=1e-2)


def test_a_single_arm_has_students_t() -> None:
    model = MixedModel(pd.DataFrame({"a": {1: 4.0, 2: 4.1, 3: 4.3}, "b": {1: 3.9, 2: 4.05, 3: 4.18}}))
    effect, alone = model.effects["b"], paired([-0.1, -0.05, -0.12])
    assert model.summary()["critical"] == pytest.approx(4.302653, abs=1e-6)  # of printed tables, 2 degrees of freedom
    assert (effect.low, effect.high) == (effect.own_low, effect.own_high) and model.bartlett_p is None
    assert effect.p == pytest.approx(alone.p, rel=1e-2)  # the ratio of variances lies on a grid
    assert effect.p_alone == pytest.approx(alone.p) and list(effect.by_seed) == [1, 2, 3]


def test_where_the_arms_differ_in_their_spread_welchs_test_stands_beside() -> None:
    values = study(FOUR, 5, 0.01, 0.0, 2)
    alike = MixedModel(values)
    assert alike.bartlett_p > 0.05 and not alike.spreads_differ and alike.less("b", "c").p_welch is None
    values["d"] = 4.1 + 20 * (values["d"] - 4.1)
    model = MixedModel(values)
    assert model.bartlett_p == stats.bartlett(*(values[arm] for arm in "abcd")).pvalue < 0.001 and model.spreads_differ
    pair = model.less("b", "c")  # two arms of a small spread
    assert pair.p_welch == stats.ttest_ind(values["b"], values["c"], equal_var=False).pvalue < 0.001 < pair.p
    values["d"] = 1.0
    with warnings.catch_warnings():  # none of scipy's about equal values
        warnings.simplefilter("error")
        assert MixedModel(values).bartlett_p == 0.0
        assert welch_p(pd.Series([1.0, 1.0]), pd.Series([1.0, 1.0])) is None
        assert welch_p(pd.Series([1.0]), pd.Series([1.0, 2.0])) is None


def with_covariate(seeds: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Values that are the arm's mean, a block, half of x and noise of 0.01; x differs by arm and, by much more, by run."""
    rng = np.random.default_rng(5)
    block = rng.normal(0, 0.05, seeds)
    x = pd.DataFrame({arm: 0.2 * i + rng.normal(0, 0.3, seeds) for i, arm in enumerate(FOUR)})
    return pd.DataFrame({arm: m + block + 0.5 * x[arm] + rng.normal(0, 0.01, seeds) for arm, m in FOUR.items()}), x


def test_a_covariate_is_least_squares_with_one_more_column_and_runs_without_it_are_left_out() -> None:
    """Seeds as fixed blocks, by numpy: in a study without missing runs, random blocks give nearly the same."""
    values, x = with_covariate(8)
    arm, seed = np.repeat(np.arange(4), 8), np.tile(np.arange(8), 4)
    design = np.column_stack((np.eye(4)[arm], np.eye(8)[seed][:, 1:], x.to_numpy().T.ravel()))
    beta, rest, *_ = np.linalg.lstsq(design, values.to_numpy().T.ravel(), rcond=None)
    alone, model = MixedModel(values), MixedModel(values, x)
    assert model.slope == pytest.approx(beta[-1], abs=2e-3) and alone.slope is model.bartlett_p is None
    assert model.summary()["sd"] == pytest.approx(math.sqrt(rest[0] / (32 - 12)), rel=0.02) and model.df == alone.df - 1 == 20
    assert [model.effects[arm].mean for arm in "bcd"] == pytest.approx(list(beta[1:4] - beta[0]), abs=2e-3)
    assert alone.summary()["sd"] > 0.05  # what the covariate takes out of the error
    values, x = with_covariate(5)
    x.loc[:1, "b"] = np.nan
    assert MixedModel(values, x).effects["b"].n == 5 - 2
    x["a"] = np.nan
    assert MixedModel(values, x).reference == "b"


def test_what_cannot_be_fitted_has_no_error() -> None:
    two, missing = {1: 4.0, 2: 4.1}, {1: np.nan, 2: np.nan}
    equal = [{arm: [0.9] * n for arm in "abcdefgh"} for n in range(4, 11)]  # whose error is rounding
    for values in ({"a": {1: 4.0}, "b": {1: 3.9}}, {"a": two}, {"a": two, "b": missing}, *equal):
        assert not MixedModel(pd.DataFrame(values)).enough
    of_two_seeds = {
        arms: MixedModel(study(dict(zip("abcd"[:arms], range(arms), strict=True)), 2, 0.01, 0.0, 3)) for arms in (3, 4)
    }
    assert not of_two_seeds[3].enough and of_two_seeds[4].df == 3
    values = study(THREE, 5, 0.01, 0.0, 3)
    for fixed in ({"a": 0.0, "b": 0.0, "c": 0.0}, {"a": 0.0, "b": 1.0, "c": 0.5}):  # a covariate that no seed moves
        assert not MixedModel(values, pd.DataFrame(fixed, index=values.index)).enough


def test_a_table_has_a_row_for_each_arm_and_a_column_for_each_metric() -> None:
    values = study(THREE, 5, 0.01, 0.0, 2)
    b, c = MixedModel(values, metric="loss").effects.values()
    fewer, _ = MixedModel(values[:3], metric="other").effects.values()
    header, row = difference_table([b, c, fewer], "arm less a").splitlines()[::2]
    assert header == "| arm less a | n | loss | other |"
    assert row == f"| b | 5 / 3 | **{b.mean:+.4f} ({b.low:+.4f} to {b.high:+.4f})** | {fewer.in_bold} |"
    assert "**" not in c.in_bold  # its interval includes zero
    texts = [Difference(1, -0.1, low=-0.19, high=-0.01, p=0.04, p_holm=p).in_bold for p in (0.04, 0.08, None)]
    assert texts == ["**-0.1000 (-0.1900 to -0.0100)**", "-0.1000 (-0.1900 to -0.0100)", texts[0]]
