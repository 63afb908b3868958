"""The mixed model against textbook values, and on made-up studies whose truth is known."""

import math

import numpy as np
import pytest
from scipy import stats

from eval.report import mixed
from eval.report.statistics import detectable_effect, paired

# Two-sided 5 % points for equal groups (Dunnett 1964, to three digits by scipy's multivariate_t):
# (comparisons, degrees of freedom) -> critical value.
DUNNETT = {(2, 10): 2.568, (5, 20): 2.735, (6, 60): 2.642, (7, 28): 2.784}


@pytest.mark.parametrize(("case", "critical"), DUNNETT.items())
def test_critical_values_are_dunnetts(case: tuple[int, int], critical: float) -> None:
    k, df = case
    correlation = np.full((k, k), 0.5) + 0.5 * np.eye(k)
    assert np.quantile(mixed._largest_t(tuple(map(tuple, correlation)), df), 0.95) == pytest.approx(critical, abs=0.015)


def test_every_machine_makes_the_same_draws() -> None:
    """Equal correlations have no unique eigenvectors, so draws along them would depend on the machine."""
    correlation = np.full((7, 7), 0.5) + 0.5 * np.eye(7)
    assert np.quantile(mixed._largest_t(tuple(map(tuple, correlation)), 28), 0.95) == pytest.approx(2.78643319, abs=1e-7)


def study(arms: dict[str, float], seeds: int, sd: float, sd_seed: float, draw: int) -> dict[str, dict[int, float]]:
    rng = np.random.default_rng(draw)
    block = rng.normal(0, sd_seed, seeds)
    return {arm: {s: mean + block[s] + rng.normal(0, sd) for s in range(seeds)} for arm, mean in arms.items()}


def test_a_balanced_study_is_the_textbooks_two_way_table() -> None:
    values = study({"a": 4.0, "b": 3.9, "c": 4.0, "d": 4.1}, 5, 0.01, 0.05, 0)
    y = np.array([[values[arm][s] for s in range(5)] for arm in values])
    rest = y - y.mean(1, keepdims=True) - y.mean(0, keepdims=True) + y.mean()
    error = (rest**2).sum() / (3 * 4)
    model = mixed.fit(values, "a")
    assert model.df == 12 and model.sd == pytest.approx(math.sqrt(error), rel=1e-2)  # the ratio lies on a grid
    assert model.effects["b"].mean == pytest.approx(y[1].mean() - y[0].mean(), abs=1e-9)
    assert model.effects["b"].se == pytest.approx(math.sqrt(2 * error / 5), rel=1e-2)
    assert model.effects["b"].high < 0 < model.effects["d"].low and model.effects["c"].p > 0.05
    assert model.effects["b"].low < model.effects["b"].own_low


def test_intervals_cover_all_arms_at_once() -> None:
    truth = {"a": 0.0, "b": 0.0, "c": 0.1, "d": -0.1, "e": 0.0}
    covered = [
        all(e.low <= truth[arm] <= e.high for arm, e in mixed.fit(study(truth, 5, 0.05, 0.05, i), "a").effects.items())
        for i in range(40)
    ]
    assert sum(covered) >= 34  # 95 % of 40 is 38; fewer than 34 has a chance of 1 %


def test_arms_with_fewer_seeds_join_the_pooled_error() -> None:
    values = study({"a": 4.0, "b": 3.9, "c": 4.0}, 5, 0.01, 0.0, 1)
    values["late"] = {seed: 4.05 + 0.01 * (-1) ** seed for seed in range(3)}
    model = mixed.fit(values, "a")
    assert model.df == 18 - 4 - 5 + 1 and model.effects["late"].se > model.effects["b"].se


def test_a_single_arm_has_students_t() -> None:
    model = mixed.fit({"a": {1: 4.0, 2: 4.1, 3: 4.3}, "b": {1: 3.9, 2: 4.05, 3: 4.18}}, "a")
    effect, alone = model.effects["b"], paired([-0.1, -0.05, -0.12])
    assert model.critical == pytest.approx(4.302653, abs=1e-6)  # of printed tables, 2 degrees of freedom
    assert (effect.low, effect.high) == (effect.own_low, effect.own_high)
    assert effect.p == pytest.approx(alone.p, rel=1e-2)  # the ratio of variances lies on a grid


@pytest.mark.parametrize("sd_seed", (0.0, 0.3))
def test_unequal_errors_are_seen_beside_the_seeds_blocks(sd_seed: float) -> None:
    equal = {arm: 0.0 for arm in "abcdefgh"}
    found = {"equal": [], "unequal": []}
    for draw in range(30):
        values = study(equal, 5, 0.1, sd_seed, draw)
        found["equal"].append(mixed.spread_p(values))
        middle = {seed: float(np.mean([values[arm][seed] for arm in equal])) for seed in range(5)}
        wide = {arm: {s: v + 4 * (arm in "abcd") * (v - middle[s]) for s, v in of.items()} for arm, of in values.items()}
        found["unequal"].append(mixed.spread_p(wide))
    assert sum(p < 0.05 for p in found["equal"]) <= 5 and sum(p < 0.05 for p in found["unequal"]) >= 25
    assert mixed.spread_p({"a": {1: 0.0, 2: 1.0}, "b": {1: 0.5, 2: 3.0}}) is None


def test_an_arm_that_recalls_at_once_needs_a_larger_difference_at_equal_covariate() -> None:
    values, x = (study({"a": 4.0, "b": 3.9, "c": 4.0}, 5, 0.01, 0.0, 3), study({"a": 3.0, "b": 2.0, "c": 3.0}, 5, 0.1, 0.0, 4))
    alone, beside = mixed.fit(values, "a"), mixed.fit(values, "a", x)
    of_pairs = detectable_effect(alone.df + 1) * math.sqrt(alone.df + 1)
    assert alone.detectable == pytest.approx(alone.sd * math.sqrt(2 / 5) * of_pairs, rel=1e-6)
    assert beside.detectable / beside.sd > 1.5 * alone.detectable / alone.sd


def test_a_covariate_that_no_seed_moves_gives_no_model() -> None:
    values = study({"a": 4.0, "b": 3.9, "c": 4.0}, 5, 0.01, 0.0, 3)
    for fixed in ({"a": 0.0, "b": 0.0, "c": 0.0}, {"a": 0.0, "b": 1.0, "c": 0.5}):
        assert mixed.fit(values, "a", {arm: dict.fromkeys(range(5), x) for arm, x in fixed.items()}) is None


def test_the_table_has_a_column_per_metric() -> None:
    values = study({"a": 4.0, "b": 3.9, "c": 4.0}, 5, 0.01, 0.0, 2)
    model = mixed.fit(values, "a")
    header, b, c = mixed.mixed_lines({"loss": {"": model}, "later": {"end": model}}, "")
    assert header == ["arm less a", "n", "loss"] and b[:2] == ["b", "5"] and c[:2] == ["c", "5"]
    effect = model.effects["b"]
    assert b[2] == f"**{effect.mean:+.4f} ({effect.low:+.4f} to {effect.high:+.4f})**"
    assert "*" not in c[2]  # its interval includes zero
    fewer = mixed.fit(study({"a": 4.0, "b": 3.9, "c": 4.0}, 3, 0.01, 0.0, 2), "a")
    assert mixed.mixed_lines({"loss": {"": model}, "other": {"": fewer}}, "")[1][:2] == ["b", "5 / 3"]


def test_arms_with_different_spreads_are_named_in_a_warning() -> None:
    values = study({"a": 4.0, "b": 3.9, "c": 4.0, "d": 4.1}, 5, 0.01, 0.0, 2)
    assert len(mixed.mixed_notes({"": mixed.fit(values, "a")}, "loss")) == 1
    values["d"] = {seed: 4.1 + 20 * (value - 4.1) for seed, value in values["d"].items()}
    _, warning = mixed.mixed_notes({"": mixed.fit(values, "a")}, "loss")
    assert "Bartlett" in warning and "too narrow for the arms with a large spread" in warning


def with_covariate(seeds: int) -> tuple[dict[str, dict[int, float]], dict[str, dict[int, float]]]:
    """Values that are the arm's mean, a block, half of x and noise of 0.01; x differs by arm and, by much more, by run."""
    means, rng = {"a": 4.0, "b": 3.9, "c": 4.0, "d": 4.1}, np.random.default_rng(5)
    block = rng.normal(0, 0.05, seeds)
    x = {arm: {s: 0.2 * i + rng.normal(0, 0.3) for s in range(seeds)} for i, arm in enumerate(means)}
    return {arm: {s: m + block[s] + 0.5 * x[arm][s] + rng.normal(0, 0.01) for s in x[arm]} for arm, m in means.items()}, x


def test_a_covariate_takes_its_share_out_of_the_differences_and_of_the_error() -> None:
    values, x = with_covariate(5)
    alone, model = mixed.fit(values, "a"), mixed.fit(values, "a", x)
    assert alone.sd > 0.05 > 0.02 > model.sd and model.df == alone.df - 1
    assert model.slope == pytest.approx(0.5, abs=0.05) and alone.slope is None
    for arm, truth in (("b", -0.1), ("c", 0.0), ("d", 0.1)):
        effect = model.effects[arm]
        assert effect.mean == pytest.approx(truth, abs=0.03) and effect.low < truth < effect.high
    assert model.effects["b"].high < 0 < model.effects["d"].low and alone.effects["b"].low < 0 < alone.effects["b"].high


def test_a_covariate_is_least_squares_with_one_more_column() -> None:
    """Seeds as fixed blocks, by numpy: in a study without missing runs, random blocks give nearly the same."""
    values, x = with_covariate(8)
    arms, rows, y = list(values), [], []
    for i, arm in enumerate(arms):
        for s in range(8):
            rows.append([float(i == j) for j in range(4)] + [float(s == k) for k in range(1, 8)] + [x[arm][s]])
            y.append(values[arm][s])
    beta, rest, *_ = np.linalg.lstsq(np.array(rows), np.array(y), rcond=None)
    model = mixed.fit(values, "a", x)
    assert model.slope == pytest.approx(beta[-1], abs=2e-3)
    assert model.sd == pytest.approx(math.sqrt(rest[0] / (32 - 12)), rel=0.02) and model.df == 20
    assert [model.effects[arm].mean for arm in "bcd"] == pytest.approx(list(beta[1:4] - beta[0]), abs=2e-3)


def test_runs_without_the_covariate_are_left_out() -> None:
    values, x = with_covariate(5)
    del x["b"][0], x["b"][1]
    assert mixed.fit(values, "a", x).effects["b"].n == 5 - 2
    assert mixed.fit(values, "a", x | {"a": {}}) is None


def test_what_cannot_be_fitted_is_none() -> None:
    assert mixed.fit({"a": {1: 4.0}, "b": {1: 3.9}}, "a") is None
    assert mixed.fit({"a": {1: 4.0, 2: 4.1}}, "a") is None


def test_p_values_are_those_of_the_simultaneous_intervals() -> None:
    """An interval of all arms at once without 0 has p below 5 %, and such a p is larger than that of the arm alone."""
    model = mixed.fit(study({"a": 4.0, "b": 3.99, "c": 4.0, "d": 4.01, "e": 4.0}, 5, 0.01, 0.05, 0), "a")
    for effect in model.effects.values():
        alone = 2 * stats.t.sf(abs(effect.mean) / effect.se, model.df)
        assert (effect.p < 0.05) == (not effect.low <= 0 <= effect.high)
        assert effect.p > 1.3 * alone or effect.p > 0.9
