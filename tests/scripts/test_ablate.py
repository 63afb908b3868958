"""The ablation engine: its configurations, and toy experiments trained, interrupted, repeated and compared."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from configs import CONFIG_DIR
from model.decoder import Decoder
from scripts import ablate
from scripts.ablate import AblateConfig, Run, plan
from tests.conftest import ROOT, TINY

EXPERIMENTS = sorted(path.stem for path in (CONFIG_DIR / "ablation" / "experiment").glob("*.yaml"))
TIERS = sorted(path.stem for path in (CONFIG_DIR / "ablation" / "tier").glob("*.yaml"))


def quoted(*overrides: str) -> str:
    return "[" + ",".join(f'"{override}"' for override in overrides) + "]"


def composed(shards: Path, *overrides: str) -> AblateConfig:
    data = f"train={quoted(f'data.dir={shards}')}"
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        return OmegaConf.to_object(compose("ablate", [data, *overrides]))


def test_the_experiments_promised_are_there() -> None:
    promised = "main ablation_v1 ablation_v2 introspective scaling lr_stability hybrid head_count".split()
    assert sorted(promised) == EXPERIMENTS and TIERS == ["cpu", "gpu"]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_loads_and_its_arms_match(experiment: str, tier: str, shards: Path, tmp_path: Path) -> None:
    cfg = composed(shards, f"experiment={experiment}", f"tier={tier}", "seeds=1")
    arms, runs = plan(cfg, tmp_path)  # refuses arms off by more than 0.5 % where `matched` is claimed
    assert cfg.matched and len(runs) == len(arms) == len(cfg.arms) * max(1, len(cfg.grid))
    for arm in arms:
        if arm.reference:
            (reference,) = (other for other in arms if other.name == arm.reference)
            assert reference.point == arm.point and reference.arm == next(iter(cfg.arms))
            assert arm.facts["params_non_embedding"] == pytest.approx(
                reference.facts["params_non_embedding"], rel=0.005
            )
            ours, theirs = (named(runs, f"{name}-s1").config.model for name in (arm.name, reference.name))
            assert asdict(ours) != asdict(theirs)
    if experiment in ("main", "ablation_v1"):
        params = arms[0].facts["params_non_embedding"]
        assert params == pytest.approx({"cpu": 1.05e6, "gpu": 29.4e6}[tier], rel=0.01)
        assert (arms[0].facts["heads"], arms[0].facts["d"]) == ("16", {"cpu": "16", "gpu": "48"}[tier])


def named(runs: list[Run], name: str) -> Run:
    return next(run for run in runs if run.name == name)


@pytest.mark.parametrize("experiment", ("main", "ablation_v1", "ablation_v2", "introspective", "hybrid"))
def test_every_arm_computes_a_loss_and_gradients(experiment: str, shards: Path, tmp_path: Path) -> None:
    tokens = torch.randint(0, 257, (1, 9), generator=torch.Generator().manual_seed(0))
    for run in plan(composed(shards, f"experiment={experiment}", "seeds=1"), tmp_path)[1]:
        loss = Decoder(run.config.model, seed=1)(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        assert loss.item() == pytest.approx(5.55, abs=0.3), run.name  # ln 257


def test_table_6_has_its_shapes(shards: Path, tmp_path: Path) -> None:
    arms = {arm.name: arm for arm in plan(composed(shards, "experiment=ablation_v1", "seeds=1"), tmp_path)[0]}
    shapes = {name: (arm.facts["heads"], arm.facts["d"], arm.facts["head_norm"]) for name, arm in arms.items()}
    assert shapes["baseline"] == ("16", "16", "no") and shapes["half_heads"] == ("8", "32", "no")
    assert shapes["diff"] == ("8", "16", "yes") and shapes["no_head_norm"] == ("8", "16", "no")


def test_the_last_of_several_overrides_stands() -> None:
    assert ablate.merged(["steps=5", "+a.b=1"], ["a.b=2"], ["steps=7", "seed=1"]) == ["a.b=2", "steps=7", "seed=1"]


def test_jobs_share_cores_and_take_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "OMP_NUM_THREADS" not in ablate.environment(0, 1, [])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert ablate.environment(0, 3, [])["OMP_NUM_THREADS"] == "2"
    assert [ablate.environment(slot, 3, ["0", "3"])["CUDA_VISIBLE_DEVICES"] for slot in range(3)] == ["0", "3", "0"]


# Toy experiments, through the command


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
        "experiment=main", "~arms", f"+arms={{{listed}}}", f"runs={runs}", "name=toy", f"train={quoted(*train)}",
        "evaluations=[]", "~metrics", "+metrics={valid:train.val_loss}", *more,
    ]  # fmt: skip


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., str]:
    """call("experiment=...") -> what the command printed; the error line where it was refused."""

    def type_in(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["ablate.py", *arguments])
        try:
            ablate.main()
        except SystemExit as stopped:
            assert stopped.code == 2
            error = capsys.readouterr().err.strip()
            assert error.startswith("error: ") and "\n" not in error
            return error
        return capsys.readouterr().out

    return type_in


def test_a_crippled_arm_is_found_and_a_twin_is_not(shards: Path, tmp_path: Path, call: Callable[..., str]) -> None:
    arms = {
        "baseline": ["model=baseline"],
        "crippled": ["model=baseline", "optim.lr=0"],
        "twin": ["model=baseline", "model.diff.lambda_init=0.3"],  # an option that a baseline does not read
    }
    arguments = toy(shards, tmp_path, arms, "seeds=2", "jobs=2")
    printed = call(*arguments)
    assert "toy: 6 of 6 runs" in printed and "eta" in printed
    content = json.loads((tmp_path / "toy" / "results.json").read_text())
    assert content["seeds"] == [1, 2] and content["config"]["seeds"] == 2 and {"machine", "version"} <= content.keys()
    baseline, crippled, twin = content["results"]["arms"]
    found = crippled["metrics"]["valid"]
    assert found["difference"]["n"] == 2 and found["difference"]["low"] > 0.2 and found["p_holm"] < 0.05
    assert twin["metrics"]["valid"]["difference"] | {"mean": 0.0, "p": 1.0} == twin["metrics"]["valid"]["difference"]
    assert len(baseline["runs"][0]["losses"]) == 16 and len(baseline["runs"][0]["curve"]) == 2
    assert "| crippled |" in (tmp_path / "toy" / "table.md").read_text()
    assert (tmp_path / "toy" / "figures" / "difference.png").is_file()

    # Repeated: nothing is trained again. One run damaged, one seed more: those alone.
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "toy").rglob("state.json")}
    assert "6 of them finished" in call(*arguments)
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
    call(*[a.replace("tokens=512", "tokens=256") for a in arguments])
    assert log.read_text().count("$ python") == 4
    assert json.loads((run / "eval" / "perplexity.json").read_text())["results"]["tokens"] == 256


def test_a_diverged_run_is_counted_and_not_repeated(shards: Path, tmp_path: Path, call: Callable[..., str]) -> None:
    arms = {"baseline": ["model=baseline", "optim.lr=1e30", "optim.clip=0"]}
    arguments = toy(shards, tmp_path, arms, "seeds=1")
    assert "baseline-s1 diverged" in call(*arguments)
    content = json.loads((tmp_path / "toy" / "results.json").read_text())
    (arm,) = content["results"]["arms"]
    assert arm["metrics"]["valid"]["n"] == 0 and "the loss is nan at step" in arm["runs"][0]["diverged"]
    assert "1 of them finished" in call(*arguments)


def test_a_failed_run_is_named_and_the_others_are_kept(shards: Path, tmp_path: Path, call: Callable[..., str]) -> None:
    broken = tmp_path / "shards"
    shutil.copytree(shards, broken)
    (broken / "val_000000.bin").unlink()
    arguments = toy(broken, tmp_path, {"baseline": ["model=baseline"]}, "seeds=1")
    error = call(*arguments)
    assert "val_000000.bin" in error and "baseline-s1.log" in error and "then repeat this command" in error
    assert not (tmp_path / "toy" / "results.json").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    (
        (("seeds=0",), "use seeds=3"),
        (("seeds=[1,1]",), "use seeds=3"),
        (("seeds=[1,x]",), "use seeds=3"),
        (("jobs=0",), "use jobs=1"),
        (("evaluations=[perplexty]",), "use attention_noise"),
        (("evaluations=[perplexity,perplexity]",), "list each one once"),
        (('evaluations=["perplexity tokns=5"]',), "did you mean 'tokens'"),
        (('+arms.odd=["model=nope"]',), "arm odd"),
        (('+arms.odd=["model.n_hed=3"]',), "did you mean 'model.n_head'"),
        (('+arms.odd=["model.d_ff=999"]',), "matched=false"),
        (("+arms={'a b':[]}",), "letters, digits"),
        (("only=nobody-s1",), "use one of baseline-s1, gated-s1"),
        (("launcher=joblib",), "needs the package 'hydra-joblib-launcher': pip install hydra-joblib-launcher"),
        (("tier=tpu",), "cpu gpu"),
        (("seed=3",), "seed"),
    ),
)
def test_wrong_input(
    arguments: tuple[str, ...],
    says: str,
    shards: Path,
    tmp_path: Path,
    call: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "hydra_plugins.hydra_joblib_launcher", None)  # as if not installed
    data = f"train={quoted(f'data.dir={shards}')}"
    assert says in call("experiment=main", data, f"runs={tmp_path}", *arguments)
    assert not list(tmp_path.rglob("checkpoints"))
