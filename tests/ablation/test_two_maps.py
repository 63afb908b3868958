"""The two maps during training: readings at kept checkpoints, from training to the table."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ablation import two_maps
from ablation.two_maps import TwoMapsConfig, over_runs, table
from eval.mqar import MqarEvalConfig, evaluate
from tests.training import processes
from tests.training.test_train import ALONE
from training.checkpoint import load_run

TASK = ("data=mqar", "data.mqar.keys=16", "data.mqar.values=8", "data.mqar.noise=8", "data.mqar.pairs=2")
SHAPE = ("size=nano", "model.n_layer=2", "model.n_head=4", "model.d_model=32", "model.context=88", "batch_tokens=176")
REST = ("steps=4", "optim.warmup=1", "eval_tokens=176", "monitor.every=0", "log_every=2", "device=cpu", "dtype=float32")


def write(folder: Path, name: str, *runs: str) -> None:
    """The results.json of a study with one arm."""
    arm = {"name": name, "arm": name, "point": "", "variant": name, "runs": [{"run": run} for run in runs]}
    (folder / "results.json").write_text(json.dumps({"eval": "ablation", "results": {"arms": [arm]}}))


def test_numbers_are_means_with_the_spread_over_runs() -> None:
    readings = [{"step": 4, "accuracy": x, "correlation_by_layer": [0.0]} for x in (0.2, 0.6)]
    row = over_runs(readings)
    assert row == {"step": 4, "n": 2, "accuracy": {"mean": pytest.approx(0.4), "sd": pytest.approx(0.08**0.5)}}
    assert over_runs(readings[:1])["accuracy"] == {"mean": 0.2, "sd": None}
    text = table("x", TwoMapsConfig(), [{"arm": "diff", "steps": [row]}])
    assert "| diff | 4 | 2 | 0.400 ± 0.283 | n/a | n/a | n/a | n/a |" in text and "at 80 % of distractors" in text


def test_every_kept_checkpoint_is_read(tmp_path: Path, call: Callable[..., None], refused: Callable[..., str]) -> None:
    for seed in (1, 2):
        keep = ("checkpoint.every=2", "checkpoint.keep=0", f"seed={seed}", f"run_dir={tmp_path / f'diff-s{seed}'}")
        processes.train(ALONE, "model=diff", *TASK, *SHAPE, *REST, *keep)
    write(tmp_path, "diff", "diff-s1", "diff-s2")
    call(two_maps, f"ablation={tmp_path}", f"out={tmp_path / 'out'}", "samples=4", "share=0.5")
    content = json.loads((tmp_path / "out" / "two_maps.json").read_text())
    (diff,) = content["results"]["arms"]
    assert content["eval"] == "two_maps" and [row["step"] for row in diff["steps"]] == [2, 4]
    assert diff["steps"][1]["n"] == 2 and (tmp_path / "out" / "figures" / "two_maps.png").is_file()
    # the last reading is that of eval.mqar at the same share
    settings = MqarEvalConfig(run=str(tmp_path / "diff-s2"), shares=[0.5], samples=4)
    measured, last = evaluate(load_run(tmp_path / "diff-s2"), settings), diff["runs"]["diff-s2"][-1]
    assert last["accuracy"] == measured["shares"][0]["accuracy"] and len(last["correlation_by_layer"]) == 2
    assert last["map_2"] == pytest.approx(measured["attention"][0]["map_2"]["distractors"])
    assert last["correlation"] == pytest.approx(measured["attention"][0]["correlation"])
    # runs whose checkpoints differ, runs that are gone, and a study without two maps
    (tmp_path / "diff-s1" / "checkpoints" / "step_00000002").rename(tmp_path / "elsewhere")
    assert "checkpoints of the steps [2, 4]" in refused(two_maps, f"ablation={tmp_path}", "samples=1")
    write(tmp_path, "diff", "diff-s3")
    assert "of []: repeat the ablation with name=OTHER records=none" in refused(two_maps, f"ablation={tmp_path}")
    write(tmp_path, "baseline")
    assert "has no finished run of a differential arm" in refused(two_maps, f"ablation={tmp_path}")
