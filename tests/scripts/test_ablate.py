"""The ablation engine: toy experiments trained, compared, repeated, interrupted and broken."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.conftest import ROOT, TINY
from tests.scripts.conftest import quoted


def toy(shards: Path, runs: Path, arms: dict[str, list[str]], *more: str) -> list[str]:
    """Arguments of a toy experiment: 16 steps of two small layers, judged by train.py's own validation loss."""
    train = (
        *TINY,
        f"data.dir={shards}",
        "model.head_dim=8",
        "steps=16",
        "eval_every=8",
        "eval_tokens=2048",
        "optim=adamw",
        "optim.lr=1e-2",
        "checkpoint.every=4",
    )
    listed = ",".join(f"{name}:{quoted(*overrides)}" for name, overrides in arms.items())
    return [
        "experiment=retrieval", "~arms", "~common", f"+arms={{{listed}}}", f"runs={runs}", "name=toy",
        f"train={quoted(*train)}", "evaluations=[]", "~metrics", "+metrics={valid:train.val_loss}", *more,
    ]  # fmt: skip


def test_a_crippled_arm_is_found_a_twin_is_not_a_diverged_one_is_counted(
    shards: Path, tmp_path: Path, call: Callable[..., str]
) -> None:
    arms = {
        "baseline": ["model=baseline"],
        "crippled": ["model=baseline", "optim.lr=0"],
        "diverging": ["model=baseline", "optim.lr=1e30", "optim.clip=0"],
        "twin": ["model=baseline", "model.diff.lambda_init=0.3"],  # an option that a baseline does not read
    }
    arguments = toy(shards, tmp_path, arms, "seeds=2", "jobs=2")
    printed = call(*arguments)
    assert "toy: 8 of 8 runs" in printed and "eta" in printed
    content = json.loads((tmp_path / "toy" / "results.json").read_text())
    assert content["seeds"] == [1, 2] and content["config"]["seeds"] == 2 and {"machine", "version"} <= content.keys()
    baseline, crippled, diverging, twin = content["results"]["arms"]
    found = crippled["metrics"]["valid"]
    assert found["difference"]["n"] == 2 and found["difference"]["low"] > 0.2 and found["p_holm"] < 0.05
    assert twin["metrics"]["valid"]["difference"] | {"mean": 0.0, "p": 1.0} == twin["metrics"]["valid"]["difference"]
    assert "diverging-s2 diverged" in printed and diverging["metrics"]["valid"]["n"] == 0
    assert "the loss is nan at step" in diverging["runs"][0]["diverged"]
    assert len(baseline["runs"][0]["losses"]) == 16 and len(baseline["runs"][0]["curve"]) == 2
    assert "| crippled |" in (tmp_path / "toy" / "table.md").read_text()
    assert (tmp_path / "toy" / "figures" / "difference.png").is_file()

    # Repeated: nothing is trained again, not even what diverged.
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "toy").rglob("state.json")}
    assert "8 of them finished" in call(*arguments)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "toy").rglob("state.json")} == stamps
    wrong = call(*[a.replace("optim.lr=1e-2", "optim.lr=2e-2") for a in arguments])
    assert "baseline-s1 was started with optim.lr=0.01 (now 0.02)" in wrong and wrong.endswith(
        "start anew with name=OTHER"
    )


def test_interrupted_it_goes_on_and_ends_the_same(shards: Path, tmp_path: Path, call: Callable[..., str]) -> None:
    arguments = toy(
        shards, tmp_path, {"baseline": ["model=baseline"]}, "seeds=1", 'evaluations=["perplexity tokens=512"]'
    )
    log = tmp_path / "toy" / "logs" / "baseline-s1.log"
    process = subprocess.Popen(
        [sys.executable, "scripts/ablate.py", *arguments],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    until = time.monotonic() + 120
    while not (log.is_file() and "step  2/16" in log.read_text()) and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert "stopped; the same command goes on" in process.communicate()[0] and process.returncode == 0
    run = tmp_path / "toy" / "baseline-s1"
    assert list((run / "checkpoints").glob("step_*")) and not (run / "eval").exists()
    call(*arguments)
    assert "stopped by SIGTERM" in log.read_text() and log.read_text().count("$ python") == 3  # train, train, evaluate
    assert json.loads((run / "eval" / "perplexity.json").read_text())["results"]["tokens"] == 512
    # The evaluation's settings change: it alone is repeated.
    call(*[a.replace("perplexity tokens=512", "perplexity tokens=256") for a in arguments])
    assert log.read_text().count("$ python") == 4
    assert json.loads((run / "eval" / "perplexity.json").read_text())["results"]["tokens"] == 256


def test_a_failed_run_is_named_and_the_others_are_kept(shards: Path, tmp_path: Path, call: Callable[..., str]) -> None:
    broken = tmp_path / "shards"
    shutil.copytree(shards, broken)
    (broken / "val_000000.bin").unlink()
    arguments = toy(broken, tmp_path, {"baseline": ["model=baseline"]}, "seeds=1")
    error = call(*arguments)
    assert "val_000000.bin" in error and "baseline-s1.log" in error and "then repeat this command" in error
    assert not (tmp_path / "toy" / "results.json").exists()
