"""Tables and figures of differences with the pooled error, on made-up runs whose truth is known."""

from pathlib import Path

import pytest
from scipy import stats

from ablation.results import draw_ablation
from eval.report import figures
from eval.report.grid import Comparison
from eval.report.pooled import ABOUT, TOO_FEW, Pooled, parts_table, profile
from eval.report.runs import Arm
from eval.report.statistics import holm, p_text, paired
from tests.ablation.test_results import METRICS, make_arms

PAIRS = {"subtraction": ["diff", "lambda0"], "gate": ["gated", "baseline"]}
TRUTH = {"baseline": 0.0, "diff": -0.1, "lambda0": -0.04}
EARLY_LATE = {"1-3": 0.5, "4-7": 2.0}  # of an arm's difference: what stands at the position


@pytest.fixture
def arms(tmp_path: Path) -> list[Arm]:
    """Three arms after one and two units of tokens; the difference at late positions is four times that at early ones."""
    made = make_arms(tmp_path, TRUTH, points=("short", "long"))
    first = {arm.point: values_of(arm) for arm in made if arm.arm == "baseline"}
    for arm in made:
        for run, base in zip(arm.runs, first[arm.point], strict=True):
            results = run.evals["perplexity"]["results"]
            results["by_octave"] = {key: base + part * (results["loss"] - base) for key, part in EARLY_LATE.items()}
            results["by_octave"]["none"] = None
            run.train[-1]["tokens"] *= 1 + (arm.point == "long")
    return made


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
    by_seed = pooled.by_seed()
    assert [columns(table)[:4] for table in by_seed] == [["part by seed", "arms", "metric", "seed 1"]] * 2
    assert by_seed[1].count("diff-long - lambda0-long") == len(("valid", "half"))
    mixed = pooled.as_json()["mixed"]
    assert list(mixed) == ["valid", "half", "valid, equal FLOPs", "half, equal FLOPs"]
    equal = {metric: mixed[f"{metric}, equal FLOPs"]["long"]["effects"]["diff-long"]["mean"] for metric in ("valid", "half")}
    # Half way between the baseline's loss plus the difference at both points, which lie 0.3 apart.
    assert equal["valid"] == pytest.approx(-0.1 + 0.15, abs=0.1) and equal["half"] == pytest.approx(-0.05 + 0.15, abs=0.1)
    assert equal["half"] - equal["valid"] == pytest.approx(0.05, abs=2e-3)
    (drawn,) = pooled.draw(tmp_path, "half", " (nats)")
    assert drawn.name == "gap_half.png" and drawn.read_bytes().startswith(b"\x89PNG")


def test_arms_and_pairs_are_compared_at_equal_covariate(arms: list[Arm]) -> None:
    """Early losses are the loss of the reference plus half of the difference: at equal early losses nothing is left."""
    metrics = METRICS | {"early": "perplexity.by_octave.1-3"}
    pooled = Pooled(Comparison(arms, metrics, ("valid", "early")), PAIRS, horizons=False, covariate="early")
    _, alike, _, parts_alike = pooled.tables("long")
    assert columns(alike) == ["arm less baseline-long, equal early", "n", "valid"]
    assert columns(parts_alike) == ["part, equal early", "arms", "n", "valid"]
    content = pooled.as_json()
    assert list(content["mixed"]) == ["valid", "early", "valid, equal early"] and "valid, equal early" in content["pairs"]
    model = pooled.models["valid, equal early"]["long"]
    assert model.slope is not None and model.bartlett_p is None
    assert any("valid, equal early" in note for note in pooled.notes())
    for arm in arms:
        del arm.runs[1:]
    alone = Pooled(Comparison(arms, metrics, ("valid", "early")), PAIRS, horizons=False, covariate="early")
    assert alone.pairs["valid, equal early"] == [] and len(alone.tables("long")) == 1


def test_the_whole_of_which_the_covariate_is_a_part_is_not_compared_twice(arms: list[Arm]) -> None:
    """A text's loss is the mean of its recalled and its other tokens: at equal recall its difference is that of the others."""
    for arm in arms:
        for seed, run in enumerate(arm.runs):
            results = run.evals["perplexity"]["results"]
            results["recall"] = {"hit": {"loss": 3 + 0.1 * seed}, "other": {"loss": results["loss"] + 0.01 * seed}}
    metrics = {"valid": "perplexity.loss", "AR-Hit": "perplexity.recall.hit.loss", "Others": "perplexity.recall.other.loss"}
    pooled = Pooled(Comparison(arms, metrics, tuple(metrics)), PAIRS, horizons=False, covariate="AR-Hit")
    assert list(pooled.models) == list(pooled.pairs) == [*metrics, "Others, equal AR-Hit"]


def test_a_profile_compares_all_numbers_under_a_key_of_the_runs_that_have_them(arms: list[Arm]) -> None:
    octaves = profile(arms, "perplexity.by_octave", PAIRS)
    table, _ = octaves.tables("long")
    assert columns(table) == ["arm less baseline-long", "n", *EARLY_LATE]
    for octave, part in EARLY_LATE.items():
        effects = octaves.models[octave]["long"].effects
        for arm in ("diff", "lambda0"):
            assert effects[f"{arm}-long"].mean == pytest.approx(part * TRUTH[arm], abs=4e-3)
        (subtraction,) = (pair for pair in octaves.pairs[octave] if pair.point == "long")
        assert subtraction.mean == pytest.approx(part * -0.06, abs=4e-3)
    for arm in arms:
        del arm.runs[0].evals["perplexity"]["results"]["by_octave"]  # as of a run of older code
    assert profile(arms, "perplexity.by_octave", PAIRS).models["1-3"]["long"].effects["diff-long"].n == 3
    for arm in arms:
        for run in arm.runs:
            run.evals["perplexity"]["results"].pop("by_octave", None)
    assert profile(arms, "perplexity.by_octave", PAIRS) is None
    assert profile(arms, "perplexity.loss", PAIRS) is None


def values_of(arm: Arm) -> list[float]:
    return [run.value("perplexity.loss") for run in arm.runs]


def set_values(arm: Arm, values: dict[int, float]) -> None:
    """Give the arm's runs these losses, and no others: seed -> loss."""
    arm.runs = [run for run in arm.runs if run.seed in values]
    for run in arm.runs:
        run.evals["perplexity"]["results"]["loss"] = values[run.seed]


def pairs_of(arms: list[Arm], parts: dict[str, list[str]] = PAIRS) -> Pooled:
    return Pooled(Comparison(arms, METRICS), parts, horizons=False)


def test_a_pair_has_the_mean_of_its_differences_and_the_pooled_error(arms: list[Arm]) -> None:
    parts = {"subtraction": ["diff", "lambda0"], "rest": ["lambda0", "baseline"]}
    pooled = pairs_of(arms[:3], parts)
    for pair, (one, other) in zip(pooled.pairs["valid"], ((1, 2), (2, 0)), strict=True):
        differences = [a - b for a, b in zip(values_of(arms[one]), values_of(arms[other]), strict=True)]
        assert (pair.arm, pair.reference, pair.point) == (arms[one].name, arms[other].name, "short")
        assert pair.by_seed == dict(zip((1, 2, 3, 4), differences, strict=True))
        assert pair.mean == pytest.approx(paired(differences).mean, abs=1e-9)  # all seeds: balanced
        assert 0.001 < pair.high - pair.low < 0.01  # 2 x 2.4 x 0.001 x sqrt(2 / 4) = 0.003; seeds spread by 0.1
        assert pair.p_alone == paired(differences).p and pair.p_holm < 0.001
    assert [pair.p_holm for pair in pooled.pairs["valid"]] == holm([pair.p for pair in pooled.pairs["valid"]])


def test_a_row_shows_a_part_seed_by_seed(arms: list[Arm]) -> None:
    lambda0 = values_of(arms[2])
    set_values(arms[1], {1: lambda0[0] - 0.1, 3: lambda0[2] - 0.25})
    pooled = pairs_of(arms[:3])
    (pair,) = pooled.pairs["valid"]
    ps = map(p_text, (pair.p, pair.p_holm, paired([-0.1, -0.25]).p, pair.p_equal))
    assert pooled.by_seed()[0].splitlines()[::2] == [
        "| part by seed | arms | metric | seed 1 | seed 3 | p, pooled | p, Holm | p, alone | p, equal |",
        f"| subtraction | diff-short - lambda0-short | valid | -0.1000 | -0.2500 | {' | '.join(ps)} |",
    ]


def test_parts_are_equivalent_within_half_of_v1s_gain(arms: list[Arm]) -> None:
    """diff less baseline is -0.1, lambda0 less baseline -0.04: inside of 0.05."""
    parts = {"inside": ["lambda0", "baseline"], "outside": ["diff", "lambda0"]}
    inside, outside = pairs_of(arms[:3], parts).pairs["valid"]
    assert inside.p_equal < 0.01 and outside.p_equal > 0.99
    model = pairs_of(arms[:3], parts).models["valid"]["short"]
    margin = abs(model.effects["diff-short"].mean) / 2
    both_sides = [stats.t.sf((margin + side * inside.mean) / inside.se, model.df) for side in (-1, 1)]
    assert inside.p_equal == pytest.approx(max(both_sides))
    arms[1].arm = "other"
    assert pairs_of(arms[:3], parts).pairs["valid"][0].p_equal is None


@pytest.mark.parametrize(("seeds", "enough"), ((2, False), (3, True)))
def test_table_and_figure_have_one_interval(seeds: int, enough: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seeds of three arms have paired intervals and nothing bold, and the table says so; three seeds have the model's."""
    comparison, drawn = Comparison(make_arms(tmp_path, TRUTH, seeds=seeds), METRICS), {}
    pooled = Pooled(comparison, {"subtraction": PAIRS["subtraction"]}, horizons=False)
    monkeypatch.setattr("ablation.results.draw_differences", lambda path, arms, panels: drawn.update(panels))
    draw_ablation(tmp_path / "figures", pooled, None)
    tables = "\n".join(pooled.tables(""))
    assert ("**" in tables, pooled.remarks()) == (enough, [ABOUT if enough else TOO_FEW])
    for difference in drawn["valid"]:
        shown = f"({difference.low:+.4f} to {difference.high:+.4f})"
        assert shown in tables if enough else shown[1:-1] in " ".join(map(" ".join, comparison.lines()))


def test_the_forest_has_the_paired_intervals_of_its_table(
    arms: list[Arm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {"subtraction": ["diff", "lambda0"], "rest": ["lambda0", "baseline"]}
    alone, lines = pairs_of(arms, parts).alone("valid"), []
    monkeypatch.setattr(figures, "_draw_differences", lambda ax, shown, labels: lines.extend(shown))
    figures.draw_forest(tmp_path / "forest.png", {"books": alone})
    rows = parts_table(alone, "part")[1:]
    for (_, one, colour), row, (arm, other) in zip(lines, rows, ((4, 5), (5, 3)), strict=True):
        differences = [a - b for a, b in zip(values_of(arms[arm]), values_of(arms[other]), strict=True)]
        assert (one.mean, one.low, one.high) == tuple(paired(differences).numbers("mean", "low", "high").values())
        assert row[-1] == f"**{one.mean:+.4f} ({one.low:+.4f} to {one.high:+.4f})**" and colour == "#0072B2"
    assert [one.p_holm for one in alone] == holm([one.p for one in alone])


def test_a_pair_without_both_arms_is_named(arms: list[Arm]) -> None:
    absent = "Without a row, because an arm is missing or has no number for a common seed: gate (gated - baseline)."
    assert pairs_of(arms).remarks() == [ABOUT, absent] and pairs_of(arms, {}).remarks() == [ABOUT]


def test_one_seed_gives_a_difference_without_a_claim(arms: list[Arm]) -> None:
    for arm in arms:
        del arm.runs[1:]
    pooled = pairs_of(arms)
    (pair, _) = pooled.pairs["valid"]
    assert (pair.part, pair.point, pair.n) == ("subtraction", "short", 1)
    assert pair.low is pair.p is pair.p_holm is pair.p_alone is pair.p_welch is None
    (table,) = pooled.tables("short")
    assert table.splitlines()[2] == f"| subtraction | diff-short - lambda0-short | 1 | {pair.mean:+.4f} |"
    assert pooled.by_seed() == [] and pooled.as_json()["mixed"] == {"valid": {}}
