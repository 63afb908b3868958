"""Tables and figures of differences with the pooled error, on made-up runs whose truth is known."""

from pathlib import Path

import pytest
from scipy import stats

from ablation.results import draw_ablation
from eval.report import figures
from eval.report.comparison import Comparison, profile
from eval.report.runs import Arm
from eval.report.statistics import holm, p_text, paired
from eval.report.study_tables import ABOUT, TOO_FEW, difference_table, error_notes, overview, remarks, table_by_seed, tables
from tests.ablation.test_results import METRICS, make_arms, values_of

PAIRS = {"subtraction": ["diff", "lambda0"], "gate": ["gated", "baseline"]}
TWO_PARTS = {"subtraction": ["diff", "lambda0"], "rest": ["lambda0", "baseline"]}
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
    comparison = Comparison(arms, METRICS | {"half": "perplexity.by_octave.1-3"}, ("valid", "half"), PAIRS, horizons=True)
    assert list(map(columns, tables(comparison, "long"))) == [
        ["arm less baseline-long", "n", "valid", "half"],
        ["arm less baseline-long, equal FLOPs", "n", "valid", "half"],
        ["part", "arms", "n", "valid", "half"],
    ]
    assert len(tables(comparison, "short")) == 2  # nothing is taken beyond an arm's first point
    content = comparison.models_json()
    mixed = content["mixed"]
    assert list(mixed) == [*content["pairs"], "valid, equal FLOPs", "half, equal FLOPs"]
    assert list(content["pairs"]) == ["valid", "half"]
    equal = {metric: mixed[f"{metric}, equal FLOPs"]["long"]["effects"]["diff-long"]["mean"] for metric in ("valid", "half")}
    assert equal["half"] - equal["valid"] == pytest.approx(0.05, abs=2e-3)
    effects = [one for one in comparison.effects if one.metric == "half"]
    figures.draw_gap(tmp_path / "gap.png", arms, effects, "half")
    assert (tmp_path / "gap.png").read_bytes().startswith(b"\x89PNG")


def test_arms_and_pairs_are_compared_at_equal_covariate(arms: list[Arm]) -> None:
    """Early losses are the loss of the reference plus half of the difference: at equal early losses nothing is left."""
    given = METRICS | {"early": "perplexity.by_octave.1-3"}, ("valid", "early"), PAIRS, False, "early"
    comparison = Comparison(arms, *given)
    _, alike, _, parts_alike = tables(comparison, "long")
    assert columns(alike) == ["arm less baseline-long, equal early", "n", "valid"]
    assert columns(parts_alike) == ["part, equal early", "arms", "n", "valid"]
    names = ["valid", "early", "valid, equal early"]
    assert list(comparison.models) == names and {one.metric for one in comparison.pairs} == set(names)
    model = comparison.models["valid, equal early"]["long"]
    assert model.slope is not None and model.bartlett_p is None
    assert any("valid, equal early" in note for note in error_notes(comparison))
    for arm in arms:
        del arm.runs[1:]
    alone = Comparison(arms, *given)
    assert {one.metric for one in alone.pairs} == {"valid", "early"} and len(tables(alone, "long")) == 1


def test_parts_are_compared_by_document_over_the_seeds_that_both_arms_have(arms: list[Arm]) -> None:
    for arm in arms:
        for run in arm.runs:
            results = run.evals["perplexity"]["results"]
            losses = {"1": 3.0, "2": 4.0 + 0.1 * (arm.arm == "diff"), "3": 5.0 + 0.01 * run.seed * (arm.arm == "diff")}
            results["by_document"] = losses if (arm.arm, run.seed) != ("lambda0", 4) else {}
    (one,) = Comparison(arms, METRICS, (), PAIRS).over_documents("valid")  # no arm named gated
    wanted = paired([0.0, 0.1, 0.02])
    assert (one.part, one.n, one.mean, one.low) == ("subtraction", 3, pytest.approx(wanted.mean), pytest.approx(wanted.low))
    assert Comparison(arms, METRICS, ("spikes",), PAIRS).over_documents("spikes") == []


def test_a_profile_compares_all_numbers_under_a_key_of_the_runs_that_have_them(arms: list[Arm]) -> None:
    octaves = profile(arms, "perplexity.by_octave", PAIRS)
    assert columns(tables(octaves, "long")[0]) == ["arm less baseline-long", "n", *EARLY_LATE]
    for octave, part in EARLY_LATE.items():
        effects = octaves.models[octave]["long"].effects
        for arm in ("diff", "lambda0"):
            assert effects[f"{arm}-long"].mean == pytest.approx(part * TRUTH[arm], abs=4e-3)
        (subtraction,) = (pair for pair in octaves.pairs if (pair.metric, pair.point) == (octave, "long"))
        assert subtraction.mean == pytest.approx(part * -0.06, abs=4e-3)
    for arm in arms:
        del arm.runs[0].evals["perplexity"]["results"]["by_octave"]  # as of a run of older code
    assert profile(arms, "perplexity.by_octave", PAIRS).models["1-3"]["long"].effects["diff-long"].n == 3
    assert profile(arms, "perplexity.recall", PAIRS) is profile(arms, "perplexity.loss", PAIRS) is None


def test_a_pair_has_the_mean_of_its_differences_and_the_pooled_error(arms: list[Arm]) -> None:
    pairs = Comparison(arms[:3], METRICS, parts=TWO_PARTS).pairs
    for pair, (one, other) in zip(pairs, ((1, 2), (2, 0)), strict=True):
        differences = [a - b for a, b in zip(values_of(arms[one]), values_of(arms[other]), strict=True)]
        assert (pair.arm, pair.reference, pair.point) == (arms[one].name, arms[other].name, "short")
        assert pair.by_seed == dict(zip((1, 2, 3, 4), differences, strict=True))
        assert pair.mean == pytest.approx(paired(differences).mean, abs=1e-9)  # all seeds: balanced
        assert 0.001 < pair.high - pair.low < 0.01  # 2 x 2.4 x 0.001 x sqrt(2 / 4) = 0.003; seeds spread by 0.1
        assert pair.p_alone == paired(differences).p and pair.p_holm < 0.001
    assert [pair.p_holm for pair in pairs] == holm([pair.p for pair in pairs])


def test_a_row_shows_a_part_seed_by_seed(arms: list[Arm]) -> None:
    losses = {1: values_of(arms[2])[0] - 0.1, 3: values_of(arms[2])[2] - 0.25}
    arms[1].runs = [run for run in arms[1].runs if run.seed in losses]
    for run in arms[1].runs:
        run.evals["perplexity"]["results"]["loss"] = losses[run.seed]
    comparison = Comparison(arms[:3], METRICS, parts=PAIRS)
    (pair,) = comparison.pairs
    ps = map(p_text, (pair.p, pair.p_holm, paired([-0.1, -0.25]).p, pair.p_welch, pair.p_equal))
    header, row = table_by_seed(comparison, "short").splitlines()[::2]
    assert header == "| part by seed | arms | metric | seed 1 | seed 3 | p, pooled | p, Holm | p, alone | p, Welch | p, equal |"
    assert row == f"| subtraction | diff-short - lambda0-short | valid | -0.1000 | -0.2500 | {' | '.join(ps)} |"


def test_parts_are_equivalent_within_half_of_v1s_gain(arms: list[Arm]) -> None:
    """diff less baseline is -0.1, lambda0 less baseline -0.04: inside of 0.05."""
    parts = {"inside": ["lambda0", "baseline"], "outside": ["diff", "lambda0"]}
    comparison = Comparison(arms[:3], METRICS, parts=parts)
    (inside, outside), model = comparison.pairs, comparison.models["valid"]["short"]
    assert inside.p_equal < 0.01 and outside.p_equal > 0.99
    margin = abs(model.effects["diff-short"].mean) / 2
    both_sides = [stats.t.sf((margin + side * inside.mean) / inside.se, model.df) for side in (-1, 1)]
    assert inside.p_equal == pytest.approx(max(both_sides))
    arms[1].arm = "other"
    assert Comparison(arms[:3], METRICS, parts=parts).pairs[0].p_equal is None


@pytest.mark.parametrize(("seeds", "enough"), ((2, False), (3, True)))
def test_table_and_figure_have_one_interval(seeds: int, enough: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seeds of three arms have paired intervals and nothing bold, and the table says so; three seeds have the model's."""
    comparison, drawn = Comparison(make_arms(tmp_path, TRUTH, seeds=seeds), METRICS, parts=TWO_PARTS), {}
    monkeypatch.setattr("ablation.results.draw_differences", lambda path, arms, panels: drawn.update(panels))
    draw_ablation(tmp_path / "figures", comparison, None)
    text = "\n".join(tables(comparison, ""))
    assert ("**" in text, remarks(comparison)) == (enough, [ABOUT if enough else TOO_FEW])
    for difference in drawn["valid"]:
        shown = f"({difference.low:+.4f} to {difference.high:+.4f})"
        assert shown in text if enough else shown[1:-1] in overview(comparison)


def test_the_forest_has_its_tables_paired_intervals(arms: list[Arm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, lines = Comparison(arms, METRICS, parts=TWO_PARTS).alone("valid"), []
    monkeypatch.setattr(figures, "_draw_differences", lambda ax, shown, labels: lines.extend(shown))
    figures.draw_forest(tmp_path / "forest.png", {"books": alone})
    rows = difference_table(alone, "part").splitlines()[2:]
    for (_, one, colour), row, (arm, other) in zip(lines, rows, ((4, 5), (5, 3)), strict=True):
        differences = [a - b for a, b in zip(values_of(arms[arm]), values_of(arms[other]), strict=True)]
        assert (one.mean, one.low, one.high) == tuple(paired(differences).numbers("mean", "low", "high").values())
        assert f"| **{one.mean:+.4f} ({one.low:+.4f} to {one.high:+.4f})** |" in row and colour == "#0072B2"
    assert [one.p_holm for one in alone] == holm([one.p for one in alone])


def test_the_plane_has_the_tables_means_and_intervals(arms: list[Arm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"valid": "perplexity.loss", "train": "train.val_loss"}
    comparison, dots = Comparison(arms, both, compared=list(both)), []
    monkeypatch.setattr("matplotlib.axes.Axes.errorbar", lambda ax, *place, **look: dots.append(place))
    x, y = drawn = [comparison.drawn(metric) for metric in both]
    figures.draw_plane(tmp_path / "plane.png", arms, dict(zip(both, drawn, strict=True)))
    pairs = [(a, b) for a in x for b in y if a.arm == b.arm]
    expected = [(a.mean, b.mean, *([[d.mean - d.low], [d.high - d.mean]] for d in (b, a))) for a, b in pairs]
    assert dots == sorted(expected) and dots


def test_one_seed_gives_a_difference_without_a_claim_and_a_pair_without_both_arms_is_named(arms: list[Arm]) -> None:
    absent = "Without a row, for lack of an arm or of a number for a common seed: gate (gated - baseline)."
    assert remarks(Comparison(arms, METRICS, parts=PAIRS)) == [ABOUT, absent]
    for arm in arms:
        del arm.runs[1:]
    comparison = Comparison(arms, METRICS, parts=PAIRS)
    (pair, _) = comparison.pairs
    assert (pair.part, pair.point, pair.n) == ("subtraction", "short", 1)
    assert pair.low is pair.p is pair.p_holm is pair.p_alone is pair.p_welch is None
    (table,) = tables(comparison, "short")
    assert table.splitlines()[2] == f"| subtraction | diff-short - lambda0-short | 1 | {pair.mean:+.4f} |"
    assert table_by_seed(comparison, "short") is None and comparison.models_json()["mixed"] == {"valid": {}}
