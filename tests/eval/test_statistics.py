"""The comparison of arms: against published tables."""

import math

import pytest
from scipy import stats

from eval.report import statistics
from eval.report.statistics import detectable_effect, geometric_interval, holm, paired, power, power_law, size_ratio, spikes

# Student's own example (Biometrika 6, 1908, p. 20; R's `sleep`): additional hours of sleep, drug 2 less drug 1.
SLEEP = (1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4)


def test_students_sleep_data_and_scipy() -> None:
    result = paired(SLEEP)
    assert result.mean == pytest.approx(1.58) and result.sd == pytest.approx(1.229995, abs=1e-6)
    assert result.p == pytest.approx(0.002833, abs=5e-7)  # t = 4.0621, df = 9, as R's t.test prints it
    assert (result.low, result.high) == (pytest.approx(0.7001142, abs=1e-6), pytest.approx(2.4598858, abs=1e-6))
    how = {"permutation_type": "samples", "n_resamples": math.inf}
    for d in (SLEEP[:2], SLEEP[:5], SLEEP):
        one, student = paired(d), stats.ttest_1samp(d, 0)
        flips = stats.permutation_test((d, [0.0] * len(d)), lambda a, b: sum(a) - sum(b), **how)
        assert one.p_permutation == pytest.approx(flips.pvalue, rel=1e-9)
        assert one.p == pytest.approx(student.pvalue, rel=1e-9) and one.resolved == (one.p < 0.05)
        assert (one.low, one.high) == pytest.approx(tuple(student.confidence_interval()), rel=1e-9)


def test_power_matches_published_tables_and_holms_correction_is_exact() -> None:
    # G*Power 3.1, difference between two dependent means, two-sided, alpha 0.05
    assert power(0.5, 34) == pytest.approx(0.8077775, abs=1e-5)
    assert power(1.0, 10) == pytest.approx(0.8031, abs=1e-4)
    assert power(0.0, 4) == pytest.approx(0.05, abs=1e-6)
    for n in (2, 3, 5, 20):
        assert power(detectable_effect(n), n) == pytest.approx(0.8, abs=1e-6)
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


def test_what_a_few_seeds_cannot_say() -> None:
    single = paired([0.4])
    assert (single.n, single.mean) == (1, 0.4)
    assert single.sd is single.low is single.high is single.p is single.p_permutation is single.detectable is None
    assert statistics.mean_sd([2.0]) == (2.0, None)
    same = paired([0.0, 0.0, 0.0])
    assert same.p == 1.0 and same.p_permutation == 1.0 and (same.low, same.high) == (0.0, 0.0)
    for equal in ([0.25, 0.25], [0.1, 0.3 - 0.2, 0.5 - 0.4]):  # the last two differ by rounding alone
        one = paired(equal)
        assert one.constant and one.resolved and one.p is one.low is one.high is one.detectable is None
        assert one.p_permutation == 2 / 2 ** len(equal)


def test_inverse_ratios_have_the_inverse_interval() -> None:
    ratios, inverse = geometric_interval([1.6, 1.7, 2.2]), geometric_interval([1 / 1.6, 1 / 1.7, 1 / 2.2])
    assert ratios["n"] == 3 and ratios["mean"] == pytest.approx((1.6 * 1.7 * 2.2) ** (1 / 3))
    assert (1 / ratios["low"], 1 / ratios["high"]) == pytest.approx((inverse["high"], inverse["low"]))
    assert geometric_interval([2.0]) == {"n": 1, "mean": pytest.approx(2.0), "low": None, "high": None}


def test_power_laws_are_recovered() -> None:
    sizes = [1e5, 4e5, 1e6, 2e6]
    baseline, other = ([a * n**-0.08 for n in sizes] for a in (12.0, 12.0 * 0.62**0.08))
    fits = [power_law(sizes, losses) for losses in (baseline, other)]
    assert fits[0] == (pytest.approx(12.0), pytest.approx(0.08))
    assert size_ratio(*fits, size=5e5) == pytest.approx(0.62)
    assert math.isnan(size_ratio(fits[0], (3.0, -0.01), size=5e5))
    assert size_ratio((3.0, 0.05), (4.0, 1e-5), size=5e5) == math.inf  # no float has so many parameters


def test_spikes_are_counted_against_the_running_median() -> None:
    calm = [8.0 * 0.99**i + 0.05 * (-1) ** i for i in range(200)]
    assert spikes(calm) == 0 == spikes([9.0, 1.0, 9.0])  # the last has no history to judge by
    jumped = list(calm)
    jumped[60] += 1.5  # 0.6 and more above the median of what came before, which is of a higher loss
    jumped[120:123] = [loss + 2.0 for loss in jumped[120:123]]
    assert [spikes(jumped, window=10, **over) for over in ({}, {"over": 1.6}, {"over": 2.5})] == [4, 3, 0]
