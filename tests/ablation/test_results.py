"""Runs read, arms compared, the table and the figures: on run folders written by hand."""

import json
import math
import random
from pathlib import Path

import pytest
import yaml

from ablation.results import draw_ablation
from eval.report.comparison import Comparison, at_equal_flops, fit_sizes
from eval.report.differences import by_seed
from eval.report.figures import _readable_limits
from eval.report.runs import DIVERGED, Arm, give_colours, read_run
from eval.report.statistics import paired
from eval.report.study_tables import fit_table, notes, overview

METRICS = {"valid": "perplexity.loss", "AR-Hit": "perplexity.recall.hit.loss", "spikes": "train.spikes"}
PNG = b"\x89PNG"


def write_run(folder: Path, loss: float, diverged: bool = False) -> Path:
    """What train.py and eval.perplexity leave of a run of 40 steps."""
    (folder / "eval").mkdir(parents=True)
    config = {"model": {"layers": "b"}, "seed": int(folder.name.rsplit("-s", 1)[1]), "steps": 40, "data": {"name": "made-up"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [{"step": 0, "tokens": 0, "machine": {"cpu": "made-up"}, "version": "abc"}]
    for step in range(1, 41):
        spike = 3.0 if step == 30 else 0.0
        line = {"step": step, "tokens": 64 * step, "time_s": 0.5 * step}
        lines.append(line | {"loss": loss + 4 / step + spike, "tokens_per_s": 128.0})
        if step % 10 == 0:
            lines.append(line | {"val_loss": loss + 4 / step})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4')
    if diverged:
        (folder / DIVERGED).write_text('{"error": "the loss is nan at step 41"}')
    else:
        (folder / "eval" / "perplexity.json").write_text(json.dumps({"results": {"loss": loss, "ppl": 3.0}}))
    return folder


def make_arms(tmp_path: Path, differences: dict[str, float], points: tuple[str, ...] = ("",), seeds: int = 4) -> list[Arm]:
    """Arms whose loss is the first one's plus the difference, with noise that seeds share (0.1) and do not (0.001)."""
    draw, arms = random.Random(0), []
    for i, point in enumerate(points):
        shared = [4.0 - 0.3 * i + draw.gauss(0, 0.1) for _ in range(seeds)]
        for name, difference in differences.items():
            first = next(iter(differences))
            full, reference = (f"{part}-{point}" if point else part for part in (name, first))
            size = 100_000 * 4**i
            facts = {"heads": "16", "d": "8", "head_norm": "no"}
            facts |= {"params_non_embedding": size, "params": size, "flops_per_token": 6 * size}
            arm = Arm(full, name, point, None if name == first else reference, name, [], facts | {"params_off": 0.0})
            for seed, base in enumerate(shared, 1):
                folder = write_run(tmp_path / f"{full}-s{seed}", base + difference + draw.gauss(0, 0.001))
                arm.runs.append(read_run(folder))
            arms.append(arm)
    return arms


def values_of(arm: Arm) -> list[float]:
    return [run.value("perplexity.loss") for run in arm.runs]


def test_a_run_is_read_whole_and_one_that_diverged_has_no_losses(tmp_path: Path) -> None:
    """A metric may name a row of a list and keys with dots; the training loss is the mean of its last tenth."""
    folder, other = write_run(tmp_path / "a-s3", 2.0), write_run(tmp_path / "a-s1", 2.0, diverged=True)
    arm = Arm("a", "a", runs=[read_run(folder), read_run(other)], facts={"params_non_embedding": 1, "flops_per_token": 1})
    record, diverged = Comparison([arm], METRICS | {"last": "train.val_loss"}).arms_json()[0]["runs"]
    assert record["seed"] == 3 and record["values"] == {"valid": 2.0, "AR-Hit": None, "spikes": 1, "last": 2.1}
    assert record["curve"] == [(640, 5.0, 2.4), (1280, 10.0, 2.2), (1920, 15.0, 2.0 + 4 / 30), (2560, 20.0, 2.1)]
    assert len(record["losses"]) == 40 and record["losses"][0] == (1, 6.0)
    assert (record["seconds"], record["tokens_per_s"], record["version"]) == (20.0, 128.0, "abc")
    assert diverged["values"] == {"valid": None, "AR-Hit": None, "spikes": 1, "last": None}
    assert diverged["diverged"] == "the loss is nan at step 41"
    noise = {"absolute": {"depths": {"0.5": {"noise": 0.3}}}, "windows": [0.1, {"at": 0.25, "loss": 1.5}], "signed": {}}
    bits = {"bits": [{"bits": 8, "loss_change": 0.1}, {"bits": 4, "loss_change": 0.4}]}
    for name, results in (("attention_noise", noise), ("quantization", bits)):
        (folder / "eval" / f"{name}.json").write_text(json.dumps({"results": results}))
    run = read_run(folder)
    for path, value in (
        ("quantization.bits.8.loss_change", 0.1), ("quantization.bits.4.loss_change", 0.4),
        ("quantization.bits.2.loss_change", None), ("attention_noise.absolute.depths.0.5.noise", 0.3),
        ("attention_noise.absolute.depths.0.25.noise", None), ("attention_noise.windows.0.25.loss", 1.5),
    ):  # fmt: skip
        assert run.value(path) == value, path
    assert run.value("train.loss") == pytest.approx(2.0 + sum(1 / step for step in range(37, 41)))


def test_a_planted_difference_is_found_and_an_absent_one_is_not(tmp_path: Path) -> None:
    """And arms without a finished reference have none."""
    arms = make_arms(tmp_path, {"baseline": 0.0, "better": -0.02, "same": 0.0})
    baseline, better, same = (arm["metrics"]["valid"] for arm in Comparison(arms, METRICS).arms_json())
    assert baseline["difference"] is None and baseline["sd"] > 0.02  # the seeds differ by far more than the arms
    assert better["difference"]["mean"] == pytest.approx(-0.02, abs=0.003) and better["p_holm"] < 0.01
    assert same["difference"]["low"] < 0 < same["difference"]["high"] and same["p_holm"] > 0.05
    assert better["p_holm"] == pytest.approx(2 * better["difference"]["p"])
    arms[1].runs[0].evals.clear()
    arms[0].runs[3].evals.clear()
    summary = Comparison(arms, METRICS).arms_json()[1]["metrics"]["valid"]  # of the seeds that both have
    assert summary["n"] == 3 and summary["difference"]["n"] == 2
    comparison = Comparison(arms[1:], METRICS)
    assert comparison.differences == {} and comparison.models == {"valid": {}}
    assert overview(comparison).splitlines()[2].startswith("| better |")


def test_the_table(tmp_path: Path) -> None:
    arms = make_arms(tmp_path, {"baseline": 0.0, "diff": -0.02})
    arms[1].runs[3].diverged = "the loss is nan at step 9"
    comparison = Comparison(arms, METRICS)
    header, _, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in overview(comparison).splitlines()]
    assert "AR-Hit" not in header  # measured by nobody
    cells = dict(zip(header, rows[1], strict=True))
    assert cells["arm"] == "diff" and cells["n"] == "3" and cells["diverged"] == "1" and cells["parameters"] == "100k"
    assert cells["valid"].startswith("3.9") and " ± 0." in cells["valid"]
    assert cells["difference (valid)"].startswith("-0.0")
    assert " to -" in cells["95 % interval"] and cells["p, sign flips"] == "0.250"
    assert dict(zip(header, rows[0], strict=True))["p"] == ""
    text = " ".join(notes(comparison, [1, 2, 3, 4], epochs=1.5))
    assert "1.50 epochs of the prepared text" in text and "Not matched" not in text
    arms[1].facts["params_off"] = 0.02
    arms[0].runs[0].val[-1]["tokens"] *= 2
    for run, dtype in zip(arms[0].runs, ("float32", *["bfloat16"] * 3), strict=True):
        run.facts["dtype"] = dtype
    first, unmatched, dtypes = notes(comparison, [1], epochs=0.5)
    assert "; up to 5.12k training tokens, 0.50 epochs" in first and "diff (+2.0%)" in unmatched
    assert dtypes.startswith("Runs were trained in a dtype that is not recorded (4) and bfloat16 (3) and float32 (1), so")


def test_a_grid_compares_within_its_points_and_is_fitted(tmp_path: Path) -> None:
    arms = make_arms(tmp_path, {"baseline": 0.0, "diff": -0.02}, points=("small", "middle", "large"))
    assert [arm.reference for arm in arms] == [None, "baseline-small", None, "baseline-middle", None, "baseline-large"]
    comparison = Comparison(arms, METRICS)
    fits = fit_sizes(comparison, "valid")
    assert fits["baseline"]["size_ratio"]["mean"] == pytest.approx(1.0)
    exponent, ratio = fits["diff"]["exponent"], fits["diff"]["size_ratio"]
    assert exponent["low"] < exponent["mean"] < exponent["high"] and exponent["n"] == 4
    assert ratio["high"] < 1  # a lower loss everywhere: fewer parameters for the same
    assert [row.split(" | ")[0] for row in fit_table(fits).splitlines()[2:]] == ["| baseline", "| diff"]
    paths = draw_ablation(tmp_path / "figures", comparison, fits)
    assert {path.name for path in paths} == {"loss.png", "difference.png", "grid_valid.png"}
    assert all(path.read_bytes().startswith(PNG) for path in paths)
    # A partial grid with one size has a table without fits.
    fits = fit_sizes(Comparison(arms[:2], METRICS), "valid")
    assert fit_table(fits).count("| 0 | no fit |  | no fit |  |") == 2


def test_arms_are_compared_at_equal_flops(tmp_path: Path) -> None:
    """An arm that costs sqrt(2) times as much lies half way, in logarithms, between n and 2n tokens."""
    arms = make_arms(tmp_path, {"baseline": 0.0, "costly": -0.1}, points=("short", "long"))
    for arm in arms:
        arm.facts["flops_per_token"] = 2**0.5 if arm.arm == "costly" else 1.0
        for run in arm.runs:
            run.train[-1]["tokens"] *= 1 + (arm.point == "long")
    comparison = Comparison(arms, METRICS, horizons=True)
    ((_, equal),) = by_seed(at_equal_flops(arms, comparison.table[comparison.table["metric"] == "valid"]), "metric")
    assert "costly-short" not in equal  # before its first point: no extrapolation
    baseline, costly, longer = (values_of(arms[i]) for i in (2, 1, 3))
    assert list(equal["baseline-long"]) == baseline
    half_way = [(one + other) / 2 for one, other in zip(costly, longer, strict=True)]
    assert list(equal["costly-long"]) == pytest.approx(half_way, abs=1e-9)
    models = comparison.models["valid, equal FLOPs"]
    assert list(models) == ["long"]
    mean = sum(equal["costly-long"] - equal["baseline-long"]) / 4
    assert models["long"].effects["costly-long"].mean == pytest.approx(mean, abs=1e-9)


def test_an_arm_that_diverged_has_no_value_at_equal_flops(tmp_path: Path) -> None:
    lengths = {"short": 1.0, "middle": 2.0, "long": 4.0}
    arms = make_arms(tmp_path, {"baseline": 0.0, "cheap": -0.1}, points=tuple(lengths))
    for arm in arms:
        arm.facts["flops_per_token"] = 0.8 if arm.arm == "cheap" else 1.0
        ended = arm.name == "cheap-long"  # before 2.0, so 1 / 0.8 times as many tokens are between other points
        for run in arm.runs:
            run.train[-1]["tokens"] *= 1.5 if ended else lengths[arm.point]
            run.diverged = "the loss is nan" if ended else None
    equal = at_equal_flops(arms, Comparison(arms, {"valid": "perplexity.loss"}).table)
    assert "cheap-long" not in set(equal["arm"]) and set(equal["seed"][equal["arm"] == "cheap-short"]) == {1, 2, 3, 4}


def test_no_dot_is_outside_the_figure() -> None:
    # The interval of two seeds is far wider than the dots.
    for differences, least, most in (((0.0, 0.0, 0.0, 0.0, 1.0), 1, math.inf), ((0.1, 0.3), 0.3, 1)):
        low, high = _readable_limits([paired(differences, by_seed=dict(enumerate(differences)))])
        assert low < 0 and least < high < most


def test_arms_are_told_apart(tmp_path: Path) -> None:
    arms = [Arm(name, name, point, variant=name) for point in ("small", "large") for name in ("baseline", "diff", "gated")]
    give_colours(arms)
    assert [arm.colour for arm in arms] == ["#0072B2", "#D55E00", "#E69F00"] * 2
    assert [arm.line for arm in arms] == ["-"] * 3 + ["--"] * 3
    for arm in arms:
        arm.variant = "diff"
    give_colours(arms)
    assert len({arm.colour for arm in arms}) == 3 and arms[0].colour == "#D55E00"
