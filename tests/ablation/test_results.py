"""Runs read, arms compared, the table and the figures: on run folders written by hand."""

import json
import random
from pathlib import Path

import pytest
import yaml

from ablation.results import draw_ablation
from eval.report.differences import by_seed
from eval.report.figures import _readable_limits
from eval.report.grid import Comparison, fit_rows
from eval.report.pooled import Pooled
from eval.report.runs import DIVERGED, Arm, give_colours, read_run
from eval.report.statistics import paired
from eval.report.tables import markdown

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


def as_json(folder: Path) -> dict:
    """What results.json has of a single run."""
    facts = {"params_off": None, "params_non_embedding": 1, "flops_per_token": 1}
    metrics = METRICS | {"last": "train.val_loss"}
    (arm,) = Comparison([Arm("a", "a", runs=[read_run(folder)], facts=facts)], metrics).as_json()
    return arm["runs"][0]


def test_a_run_is_read_whole_and_one_that_diverged_has_no_losses(tmp_path: Path) -> None:
    """A metric may name a row of a list and keys with dots; the training loss is the mean of its last tenth."""
    folder = write_run(tmp_path / "a-s3", 2.0)
    record = as_json(folder)
    assert record["seed"] == 3 and record["values"] == {"valid": 2.0, "AR-Hit": None, "spikes": 1, "last": 2.1}
    assert record["curve"] == [(640, 5.0, 2.4), (1280, 10.0, 2.2), (1920, 15.0, 2.0 + 4 / 30), (2560, 20.0, 2.1)]
    assert len(record["losses"]) == 40 and record["losses"][0] == (1, 6.0)
    assert (record["seconds"], record["tokens_per_s"], record["version"]) == (20.0, 128.0, "abc")
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
    record = as_json(write_run(tmp_path / "a-s1", 2.0, diverged=True))
    assert record["values"] == {"valid": None, "AR-Hit": None, "spikes": 1, "last": None}
    assert record["diverged"] == "the loss is nan at step 41"


def test_a_planted_difference_and_no_absent_one_is_in_the_table(tmp_path: Path) -> None:
    arms = make_arms(tmp_path, {"baseline": 0.0, "better": -0.02, "same": 0.0})
    baseline, better, same = (arm["metrics"]["valid"] for arm in Comparison(arms, METRICS).as_json())
    assert baseline["difference"] is None and baseline["sd"] > 0.02  # the seeds differ by far more than the arms
    assert better["difference"]["mean"] == pytest.approx(-0.02, abs=0.003) and better["p_holm"] < 0.01
    assert same["difference"]["low"] < 0 < same["difference"]["high"] and same["p_holm"] > 0.05
    assert better["p_holm"] == pytest.approx(2 * better["difference"]["p"])

    arms[1].runs[3].diverged = "the loss is nan at step 9"
    header, *rows = Comparison(arms[:2], METRICS).lines()
    assert "AR-Hit" not in header  # measured by nobody
    cells = dict(zip(header, rows[1], strict=True))
    assert cells["arm"] == "better" and cells["n"] == "3" and cells["diverged"] == "1" and cells["parameters"] == "100k"
    assert " ± 0." in cells["valid"] and cells["difference (valid)"].startswith("-0.0")
    assert " to -" in cells["95 % interval"] and cells["p, sign flips"] == "0.250"
    assert dict(zip(header, rows[0], strict=True))["p"] == ""
    assert markdown([header, *rows]).count("\n") == 4 and all(len(row) == len(header) for row in rows)
    text = " ".join(Comparison(arms, METRICS).notes([1, 2, 3, 4], epochs=1.5))
    assert "read more than once" in text and "Not matched" not in text
    arms[1].facts["params_off"] = 0.02
    assert "better (+2.0%)" in " ".join(Comparison(arms, METRICS).notes([1], epochs=0.5))

    arms[0].runs[2].evals.clear()
    summary = Comparison(arms, METRICS).as_json()[1]["metrics"]["valid"]  # of the seeds that both have
    assert summary["n"] == 3 and summary["difference"]["n"] == 2


def test_a_grid_compares_within_its_points_and_is_fitted(tmp_path: Path) -> None:
    arms = make_arms(tmp_path, {"baseline": 0.0, "diff": -0.02}, points=("small", "middle", "large"))
    assert [arm.reference for arm in arms] == [None, "baseline-small", None, "baseline-middle", None, "baseline-large"]
    comparison = Comparison(arms, METRICS)
    fits = comparison.fit_sizes("valid")
    assert fits["baseline"]["size_ratio"]["mean"] == pytest.approx(1.0)
    exponent, ratio = fits["diff"]["exponent"], fits["diff"]["size_ratio"]
    assert exponent["low"] < exponent["mean"] < exponent["high"] and exponent["n"] == 4
    assert ratio["high"] < 1  # a lower loss everywhere: fewer parameters for the same
    rows = fit_rows(fits)
    assert [row[0] for row in rows] == ["arm", "baseline", "diff"] and all(len(row) == len(rows[0]) for row in rows)
    paths = draw_ablation(tmp_path / "figures", Pooled(comparison, {}, horizons=False), fits)
    assert {path.name for path in paths} == {"loss.png", "difference.png", "grid_valid.png"}
    assert all(path.read_bytes().startswith(PNG) for path in paths)
    # A partial grid with one size has a table without fits.
    comparison = Comparison(arms[:2], METRICS)
    fits = comparison.fit_sizes("valid")
    assert [row[1:] for row in fit_rows(fits)[1:]] == [["0", "no fit", "", "no fit", ""]] * 2


def test_notes_name_the_longest_training_the_tested_comparisons_and_the_dtypes(tmp_path: Path) -> None:
    arms = make_arms(tmp_path, {"baseline": 0.0, "diff": -0.02, "once": 0.0}, points=("short", "long"))
    for arm in arms:
        if arm.arm == "once":
            del arm.runs[1:]  # a single seed is not tested
        for run in arm.runs if arm.point == "long" else ():
            run.val[-1]["tokens"] *= 2
    for run, dtype in zip(arms[0].runs, ("float32", *["bfloat16"] * 3), strict=True):
        run.facts["dtype"] = dtype
    first, second, *_, dtypes = Comparison(arms, METRICS).notes([1], epochs=0.5)
    assert "; up to 5.12k training tokens, 0.50 epochs" in first
    assert "the comparisons of each metric (2)." in second
    assert dtypes.startswith("Runs were trained in bfloat16 (3) and float32 (1), so")


def test_arms_are_compared_at_equal_flops(tmp_path: Path) -> None:
    """An arm that costs sqrt(2) times as much lies half way, in logarithms, between n and 2n tokens."""
    arms = make_arms(tmp_path, {"baseline": 0.0, "costly": -0.1}, points=("short", "long"))
    for arm in arms:
        arm.facts["flops_per_token"] = 2**0.5 if arm.arm == "costly" else 1.0
        for run in arm.runs if arm.point == "long" else ():
            run.train[-1]["tokens"] *= 2
    comparison = Comparison(arms, METRICS)
    values = comparison.values("valid")
    ((_, equal),) = by_seed(comparison.at_equal_flops(), "metric")
    assert "costly-short" not in equal  # before its first point: no extrapolation
    assert list(equal["baseline-long"]) == list(values["baseline-long"])
    for seed in (1, 2, 3, 4):
        half_way = (values["costly-short"][seed] + values["costly-long"][seed]) / 2
        assert equal["costly-long"][seed] == pytest.approx(half_way, abs=1e-9)
    models = Pooled(comparison, {}, horizons=True).models["valid, equal FLOPs"]
    differences = [equal["costly-long"][seed] - values["baseline-long"][seed] for seed in (1, 2, 3, 4)]
    assert list(models) == ["long"]
    assert models["long"].effects["costly-long"].mean == pytest.approx(sum(differences) / 4, abs=1e-9)


def test_arms_are_told_apart_no_dot_is_outside_and_without_a_reference_there_is_no_difference(tmp_path: Path) -> None:
    arms = [Arm(name, name, point, variant=name) for point in ("small", "large") for name in ("baseline", "diff", "gated")]
    give_colours(arms)
    assert [arm.colour for arm in arms] == ["#0072B2", "#D55E00", "#E69F00"] * 2
    assert [arm.line for arm in arms] == ["-"] * 3 + ["--"] * 3
    for arm in arms:
        arm.variant = "diff"
    give_colours(arms)
    assert len({arm.colour for arm in arms}) == 3 and arms[0].colour == "#D55E00"
    for differences, dot in (((0.0, 0.0, 0.0, 0.0, 1.0), 1), ((0.1, 0.3), 0.3)):  # far wider than the dots: two seeds
        low, high = _readable_limits([paired(differences, by_seed=dict(enumerate(differences)))])
        assert low < 0 and high > dot and (dot == 1 or high < 1)
    comparison = Comparison(make_arms(tmp_path, {"baseline": 0.0, "diff": -0.02, "gated": 0.0})[1:], METRICS)
    assert not comparison.of_metric("valid") and comparison.lines()[1][0] == "diff"
    assert Pooled(comparison, {}, horizons=False).models == {"valid": {}}
