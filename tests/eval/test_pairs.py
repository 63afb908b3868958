"""Pairs of arms that differ in one part: against the paired test, and on made-up studies whose truth is known."""

from pathlib import Path

import pytest

from eval.report.figures import draw_gap
from eval.report.pairs import PAIR_NOTE, Pair, compare_pairs, pair_lines, pair_notes, seed_lines
from eval.report.pooled import lines_of
from eval.report.runs import Arm
from eval.report.statistics import holm, p_text, paired
from tests.eval.test_mixed import study

PAIRS = {"subtraction": ["diff", "lambda0"], "norm": ["diff", "no_norm"]}


def arms_at(*points: str) -> list[Arm]:
    names = ("baseline", "diff", "lambda0", "no_norm")
    return [Arm(f"{name}-{point}", name, point, None, "", []) for point in points for name in names]


def made_up(seeds: int) -> dict[str, dict[int, float]]:
    truth = {"baseline-a": 4.0, "diff-a": 3.9, "lambda0-a": 3.9, "no_norm-a": 4.05}
    return study(truth, seeds, 0.01, 0.2, 3)


def test_a_pair_has_the_mean_of_its_differences_and_the_pooled_error() -> None:
    values = made_up(5)
    subtraction, norm = compare_pairs(arms_at("a"), values, PAIRS)
    for pair, other in ((subtraction, "lambda0-a"), (norm, "no_norm-a")):
        differences = {seed: values["diff-a"][seed] - values[other][seed] for seed in range(5)}
        assert (pair.arm, pair.other, pair.point) == ("diff-a", other, "a") and pair.differences == differences
        assert pair.mean == pytest.approx(paired(list(differences.values())).mean, abs=1e-9)  # all seeds: balanced
        assert 0.01 < pair.high - pair.low < 0.05  # 2 x 2.18 x 0.01 x sqrt(2 / 5) = 0.028; seeds spread by 0.2
    assert subtraction.low < 0 < subtraction.high and norm.high < -0.1
    assert [subtraction.p_holm, norm.p_holm] == holm([subtraction.p, norm.p]) and norm.p_holm < 0.001


def test_two_arms_alone_have_the_paired_t_test() -> None:
    values = {"diff-a": {1: 3.9, 2: 4.05, 3: 4.18}, "lambda0-a": {1: 4.0, 2: 4.1, 3: 4.3}, "baseline-a": {}, "no_norm-a": {}}
    (pair,) = compare_pairs(arms_at("a"), values, PAIRS)
    alone = paired([-0.1, -0.05, -0.12])
    assert (pair.mean, pair.p) == (pytest.approx(alone.mean), pytest.approx(alone.p, rel=1e-2))
    assert (pair.low, pair.high) == (pytest.approx(alone.low, abs=1e-3), pytest.approx(alone.high, abs=1e-3))


def test_the_p_of_the_differences_alone_takes_nothing_from_other_arms() -> None:
    """One arm spreads a hundred times as much as the others: the pooled error grows, the others' differences do not."""
    values = made_up(4)
    values["no_norm-a"] = {seed: 4 + (seed - 1.5) for seed in range(4)}
    subtraction, norm = compare_pairs(arms_at("a"), values, PAIRS)
    for pair in (subtraction, norm):
        assert pair.p_alone == paired(list(pair.differences.values())).p
    values["diff-a"] = {seed: values["lambda0-a"][seed] - 0.02 - seed / 1000 for seed in range(4)}
    (subtraction, _) = compare_pairs(arms_at("a"), values, PAIRS)
    assert subtraction.p_alone < 0.001 and subtraction.p > 0.5


def test_a_row_shows_a_part_seed_by_seed() -> None:
    values = made_up(3) | {"no_norm-a": {1: 4.0, 7: 5.0}, "diff-a": {0: 3.9, 1: 3.9, 2: 3.8, 7: 4.75}}
    found = compare_pairs(arms_at("a"), values, PAIRS)
    header, first, second, third = seed_lines({"books": found, "hit": found[:1]}, "a")
    assert header == [
        "part by seed",
        "arms",
        "metric",
        *(f"seed {n}" for n in (0, 1, 2, 7)),
        "p, pooled",
        "p, Holm",
        "p, alone",
    ]
    assert [row[:3] for row in (first, second, third)] == [
        ["subtraction", "diff-a - lambda0-a", "books"],
        ["subtraction", "diff-a - lambda0-a", "hit"],
        ["norm", "diff-a - no_norm-a", "books"],
    ]
    differences = [f"{values['diff-a'][seed] - values['lambda0-a'][seed]:+.4f}" for seed in range(3)]
    assert first[3:7] == [*differences, ""] and third[3:7] == ["", "-0.1000", "", "-0.2500"]
    assert third[7:] == [p_text(found[1].p), p_text(found[1].p_holm), p_text(paired([-0.1, -0.25]).p)]


def test_a_pair_without_both_arms_is_named() -> None:
    found = compare_pairs(arms_at("a"), made_up(2), PAIRS | {"gate": ["gated", "baseline"]})
    assert {pair.name for pair in found} == {"subtraction", "norm"}
    assert pair_notes(found, PAIRS) == [PAIR_NOTE] and pair_notes([], {}) == []
    (_, missing) = pair_notes(found, PAIRS | {"gate": ["gated", "baseline"]})
    assert missing == "Without a row, because an arm is missing or has no number for a common seed: gate (gated - baseline)."


def test_a_part_that_the_first_metric_lacks_is_in_the_table() -> None:
    """An arm may lack one metric, such as the tokens until a level that it never reaches."""
    pair = Pair("part", "", "b", "a", {1: 0.1, 2: 0.2}, 0.15)
    lines = pair_lines({"lacking": [], "loss": [pair]}, "")
    assert [line[0] for line in lines[1:]] == ["part"] and lines[1][-2] == "" and lines[1][-1].startswith("+0.15")


def test_one_seed_gives_a_difference_without_a_claim(tmp_path: Path) -> None:
    values = made_up(1) | {f"{name}-b": {} for name in ("baseline", "diff", "lambda0", "no_norm")}
    found = compare_pairs(arms_at("a", "b"), values, PAIRS)
    assert [(pair.name, pair.point, pair.p, pair.p_holm, pair.p_alone) for pair in found] == [
        ("subtraction", "a", None, None, None), ("norm", "a", None, None, None),
    ]  # fmt: skip
    header, *rows = pair_lines({"books": found, "hit": found[1:]}, "a")
    assert header == ["part", "arms", "n", "books", "hit"]
    assert [row[:3] for row in rows] == [["subtraction", "diff-a - lambda0-a", "1"], ["norm", "diff-a - no_norm-a", "1"]]
    assert rows[0][3:] == [f"{found[0].mean:+.4f}", ""] and rows[1][3:] == [f"{found[1].mean:+.4f}"] * 2
    lines = lines_of((pair.name, None, 0, pair) for pair in found)
    assert {name: gap for name, (_, gap) in lines.items()} == {p.name: [(0, p.mean, None, None, 1)] for p in found}
    three = compare_pairs(arms_at("a"), made_up(3), PAIRS)
    lines |= lines_of((f"{pair.name} of three seeds", None, 1, pair) for pair in three)
    draw_gap(tmp_path / "pairs.png", lines, {0: "2.6", 1: "5.2"}, "tokens", "books")
    assert (tmp_path / "pairs.png").read_bytes().startswith(b"\x89PNG")
