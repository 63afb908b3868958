"""Tables and figures of differences with the pooled error, on made-up runs whose truth is known."""

from pathlib import Path

import pytest

from eval.report.grid import Comparison
from eval.report.pairs import Pair, pair_lines
from eval.report.pooled import Pooled, lines_of, profile
from eval.report.runs import Arm
from tests.ablation.test_results import METRICS, make_arms

PAIRS = {"subtraction": ["diff", "lambda0"], "gate": ["gated", "baseline"]}
TRUTH = {"baseline": 0.0, "diff": -0.1, "lambda0": -0.04}
EARLY_LATE = {"1-3": 0.5, "4-7": 2.0}  # of an arm's difference: what stands at the position


@pytest.fixture
def arms(tmp_path: Path) -> list[Arm]:
    """Three arms after one and two units of tokens; the difference at late positions is four times that at early ones."""
    found = make_arms(tmp_path, TRUTH, points=("short", "long"))
    first = {arm.point: [run.value("perplexity.loss") for run in arm.runs] for arm in found if arm.arm == "baseline"}
    for arm in found:
        for run, base in zip(arm.runs, first[arm.point], strict=True):
            results = run.evals["perplexity"]["results"]
            results["by_octave"] = {key: base + part * (results["loss"] - base) for key, part in EARLY_LATE.items()}
            results["by_octave"]["none"] = None
            run.train[-1]["tokens"] *= 1 + (arm.point == "long")
    return found


def columns(table: str) -> list[str]:
    return [cell.strip() for cell in table.splitlines()[0].strip("|").split("|")]


def test_every_compared_metric_has_a_column_at_equal_tokens_and_at_equal_flops(arms: list[Arm], tmp_path: Path) -> None:
    for arm in arms:
        arm.facts["flops_per_token"] = 2**0.5 if arm.arm == "diff" else 1.0
    metrics = METRICS | {"half": "perplexity.by_octave.1-3"}
    pooled = Pooled(Comparison(arms, metrics, ("valid", "half")), PAIRS, horizons=True)
    tokens, flops, parts = pooled.tables("long")
    assert columns(tokens) == ["arm less baseline-long", "n", "valid", "half"]
    assert columns(flops) == ["arm less baseline-long, equal FLOPs", "n", "valid", "half"]
    assert columns(parts) == ["part", "arms", "n", "valid", "half"]
    assert len(pooled.tables("short")) == 2  # nothing is taken beyond an arm's first point
    *by_seed, note = pooled.by_seed()
    assert [columns(table)[:4] for table in by_seed] == [["part by seed", "arms", "metric", "seed 1"]] * 2
    assert by_seed[1].count("diff-long - lambda0-long") == len(("valid", "half")) and "p, alone" in note
    mixed = pooled.as_json()["mixed"]
    assert list(mixed) == ["valid", "half", "valid, equal FLOPs", "half, equal FLOPs"]
    equal = {metric: mixed[f"{metric}, equal FLOPs"]["long"]["effects"]["diff-long"]["mean"] for metric in ("valid", "half")}
    # Half way between the baseline's loss plus the difference at both points, which lie 0.3 apart.
    assert equal["valid"] == pytest.approx(-0.1 + 0.15, abs=0.1) and equal["half"] == pytest.approx(-0.05 + 0.15, abs=0.1)
    assert equal["half"] - equal["valid"] == pytest.approx(0.05, abs=2e-3)
    assert sum("equal" in remark.lower() for remark in pooled.remarks()) == 1
    drawn = pooled.draw(tmp_path, "half", " (nats)")
    assert [path.name for path in drawn] == ["gap_half.png", "pairs_half.png"] and all(path.is_file() for path in drawn)


def test_an_arm_that_diverged_moves_no_point_of_the_figure(
    arms: list[Arm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = []
    monkeypatch.setattr("eval.report.pooled.drawn", lambda path, lines, places, *labels: ticks.append(places) or [])
    for stopped in (0, 1):
        for arm in arms[2::3] * stopped:  # the last of each point, before its first logged loss
            for run in arm.runs:
                run.train.clear()
                run.diverged = "the loss is nan at step 1"
        Pooled(Comparison(arms, METRICS), PAIRS, horizons=True).draw(tmp_path, "valid", "")
    assert ticks[0] == ticks[2] and len(ticks[0]) == 2


def test_arms_and_pairs_are_compared_at_equal_covariate(arms: list[Arm]) -> None:
    """Early losses are the loss of the reference plus half of the difference: at equal early losses nothing is left."""
    metrics = METRICS | {"early": "perplexity.by_octave.1-3"}
    pooled = Pooled(Comparison(arms, metrics, ("valid", "early")), PAIRS, horizons=False, covariate="early")
    tokens, alike, parts, parts_alike = pooled.tables("long")
    assert columns(alike) == ["arm less baseline-long, equal early", "n", "valid"]
    assert columns(parts_alike) == ["part, equal early", "arms", "n", "valid"]
    found = pooled.as_json()
    assert list(found["mixed"]) == ["valid", "early", "valid, equal early"] and "valid, equal early" in found["pairs"]
    model = pooled.at_equal["valid"]["long"]
    assert model.slope is not None and model.p_spread is None
    assert "Equal early" in " ".join(pooled.remarks()) and any("valid, equal early" in note for note in pooled.notes())
    for arm in arms:
        del arm.runs[1:]
    alone = Pooled(Comparison(arms, metrics, ("valid", "early")), PAIRS, horizons=False, covariate="early")
    assert alone.pairs_at_equal == {"valid": []} and len(alone.tables("long")) == 1


def test_the_whole_of_which_the_covariate_is_a_part_is_not_compared_twice(arms: list[Arm]) -> None:
    """A text's loss is the mean of its recalled and its other tokens: at equal recall its difference is that of the others."""
    for arm in arms:
        for seed, run in enumerate(arm.runs):
            results = run.evals["perplexity"]["results"]
            results["recall"] = {"hit": {"loss": 3 + 0.1 * seed}, "other": {"loss": results["loss"] + 0.01 * seed}}
    metrics = {"valid": "perplexity.loss", "AR-Hit": "perplexity.recall.hit.loss", "Others": "perplexity.recall.other.loss"}
    pooled = Pooled(Comparison(arms, metrics, tuple(metrics)), PAIRS, horizons=False, covariate="AR-Hit")
    assert list(pooled.at_equal) == list(pooled.pairs_at_equal) == ["Others"] and list(pooled.models) == list(metrics)


def test_a_pair_is_bold_where_its_corrected_p_is_small() -> None:
    found = {"loss": [Pair("part", "", "a", "b", {1: -0.1}, -0.1, -0.19, -0.01, 0.04, p) for p in (0.04, 0.08)]}
    texts = [pair_lines({"loss": [pair]}, "")[1][-1] for pair in found["loss"]]
    assert texts == ["**-0.1000 (-0.1900 to -0.0100)**", "-0.1000 (-0.1900 to -0.0100)"]


def test_without_horizons_nothing_is_said_of_equal_flops(arms: list[Arm]) -> None:
    pooled = Pooled(Comparison(arms, METRICS), PAIRS, horizons=False)
    assert len(pooled.tables("long")) == 2 and "FLOPs" not in " ".join(pooled.remarks())
    assert list(pooled.as_json()["mixed"]) == ["valid"]


def test_a_profile_compares_all_numbers_under_a_key(arms: list[Arm], tmp_path: Path) -> None:
    found = profile(arms, "perplexity.by_octave", PAIRS)
    table, parts = found.tables("long")
    assert columns(table) == ["arm less baseline-long", "n", *EARLY_LATE]
    for octave, part in EARLY_LATE.items():
        effects = found.models[octave]["long"].effects
        for arm in ("diff", "lambda0"):
            assert effects[f"{arm}-long"].mean == pytest.approx(part * TRUTH[arm], abs=4e-3)
        (subtraction,) = (pair for pair in found.pairs[octave] if pair.point == "long")
        assert subtraction.mean == pytest.approx(part * -0.06, abs=4e-3)
    drawn = found.draw_profile(tmp_path, "books by position", "long", " (nats)")
    assert [path.name for path in drawn] == ["profile_books_by_position.png", "profile_pairs_books_by_position.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_a_profile_uses_the_runs_that_have_its_numbers(arms: list[Arm]) -> None:
    for arm in arms:
        del arm.runs[0].evals["perplexity"]["results"]["by_octave"]  # as of a run of older code
    assert profile(arms, "perplexity.by_octave", PAIRS).models["1-3"]["long"].effects["diff-long"].n == 3
    for arm in arms:
        for run in arm.runs:
            run.evals["perplexity"]["results"].pop("by_octave", None)
    assert profile(arms, "perplexity.by_octave", PAIRS) is None
    assert profile(arms, "perplexity.loss", PAIRS) is None


def test_a_line_of_a_figure_has_the_arms_colour_or_one_of_its_own(arms: list[Arm]) -> None:
    model = profile(arms, "perplexity.by_octave", PAIRS).models["1-3"]["long"]
    e = model.effects["diff-long"]
    lines = lines_of([("diff", "#123456", 0, e), ("diff", "#123456", 1, e), ("part", None, 0, e)])
    assert lines["diff"] == ("#123456", [(0, e.mean, e.low, e.high, 4), (1, e.mean, e.low, e.high, 4)])
    assert lines["part"][0] != "#123456"
