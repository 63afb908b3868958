"""train.py from the outside: one process or two, killed and resumed, given wrong input."""

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from tests.conftest import ROOT, Typed, assert_one_line_error, run_command, train_arguments
from tests.faults.runs import ending
from tests.training import processes
from training.checkpoint import checkpoints, load_run
from training.distributed import World
from training.parallel import Parallel

ALONE = World(0, 1, torch.device("cpu"))


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metrics(run_dir) if "loss" in line}


def trained(shards: Path, run_dir: Path, *overrides: str) -> Path:
    """A run that this process trains."""
    processes.train(ALONE, *train_arguments(shards, run_dir, *overrides)[1:])
    return run_dir


MIXED = ("data.retrieval.weight=30", "model.context=192", "batch_tokens=768")
WHOLE = ("model=diff", "steps=8", "model.dropout=0.1", *MIXED, "eval_every=4", "monitor.every=3")


@pytest.fixture(scope="module")
def whole(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 uninterrupted steps of diff with dropout and retrieval, float32."""
    return trained(shards, tmp_path_factory.mktemp("whole") / "run", *WHOLE)


def test_a_run_leaves_what_was_promised(whole: Path, shards: Path, tmp_path: Path) -> None:
    lines = metrics(whole)
    assert {"params", "params_non_embedding", "flops_per_token", "machine", "version"} <= lines[0].keys()
    last = [line for line in lines if "loss" in line][-1]
    assert {"step", "tokens", "loss", "lr", "grad_norm", "tokens_per_s", "mem_gb", "time_s"} <= last.keys()
    assert last["step"] == 8 and last["tokens"] == 8 * 768
    assert [line["step"] for line in lines if "val_loss" in line] == [4, 8]
    assert losses(whole)[8] < losses(whole)[1] - 0.1
    run = load_run(whole)
    assert run.step == 8 and run.tokenizer.name == "bytes" and run.config["model"]["layers"] == "d"
    assert not list(whole.rglob("*.pt")) and not list(whole.rglob("*.pkl"))
    masks = ("model.diff.lambda_warmup=10", "model.document_mask=true", "model.window=16", "model.attention_dropout=0.1")
    other = trained(shards, tmp_path / "other", *WHOLE, "steps=1", "seed=2", *masks)
    assert losses(other)[1] != losses(whole)[1]
    model = load_run(other).model  # is evaluated as trained
    assert model.blocks[1].attention.lambda_mix.item() == pytest.approx(0.1)
    assert model.cfg.eot == 256 and model.cfg.window == 16
    tokens = torch.randint(0, 256, (1, 24))
    tokens[0, 9] = model.cfg.eot
    changed = torch.cat(((tokens[:, :9] + 1) % 256, tokens[:, 9:]), 1)
    torch.testing.assert_close(model(tokens)[:, 9:], model(changed)[:, 9:])


def test_a_killed_run_that_is_resumed_is_the_run_that_was_not_killed(whole: Path, shards: Path, tmp_path: Path) -> None:
    """In other processes, which also give the losses of the run in this process."""
    run_dir = tmp_path / "run"
    arguments = train_arguments(shards, run_dir, *WHOLE, "checkpoint.every=3")
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True
    )
    wait_for = random.randrange(2, 5)  # of 8, so that the signal comes in time
    for line in process.stdout:
        if line.startswith("step") and int(line.split("/")[0].split()[1]) >= wait_for:
            process.send_signal(signal.SIGTERM)
            break
    rest = process.stdout.read()
    assert process.wait() == 143 and "stopped by SIGTERM" in rest, rest
    stopped_at = int(checkpoints(run_dir)[-1].name.split("_")[1])
    assert wait_for <= stopped_at < 8
    with (run_dir / "metrics.jsonl").open("a") as file:  # a kill -9 later on would leave such lines
        file.write(json.dumps({"step": stopped_at + 1, "loss": 0.0}) + '\n{"step": ')
    resumed = run_command(*arguments, "resume=true")
    assert resumed.returncode == 0, resumed.stderr
    (continued,) = (line for line in metrics(run_dir) if "continued" in line)
    assert continued["step"] == stopped_at and set(continued["continued"]) == {"machine", "version", "dtype"}
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["resume"]  # the configuration of the newest part
    assert [line["step"] for line in metrics(run_dir) if "monitor_s" in line] == [0, 3, 6, 8]
    assert ending(run_dir) == ending(whole)
    assert len(checkpoints(run_dir)) == 2  # checkpoint.keep


def test_two_processes_and_accumulation_give_the_losses_of_one(shards: Path, tmp_path: Path) -> None:
    """And they join again for every run of a sweep."""
    common = ("model=diff", "model.n_layer=1", "steps=3", "eval_tokens=192", "monitor.every=0")  # three windows: two and one
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command, *overrides = train_arguments(shards, tmp_path / "two-${seed}", *common, "micro_batch=2", "seed=2,1")
    done = run_command(*torchrun, command, "-m", *overrides)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": done after step 3") == 2  # one process speaks
    one, two = trained(shards, tmp_path / "one", *common), tmp_path / "two-1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two-1", "two-2"]
    assert losses(two) == pytest.approx(losses(one), abs=1e-4)
    for key, tolerance in (("grad_norm", 1e-3), ("val_loss", 1e-5)):
        values = [[line[key] for line in metrics(run) if key in line] for run in (two, one)]
        assert values[0] == pytest.approx(values[1], rel=tolerance), key


def test_a_run_is_never_overwritten_or_mixed_up(whole: Path, shards: Path, tmp_path: Path, typed: Typed) -> None:
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    for overrides, says in (
        ((), "resume=true"),
        (("resume=true", "model.n_layer=3"), "model.n_layer=2 (now 3)"),
        (("resume=true", "steps=20"), "(now 20), with which its learning rates so far would be others"),
    ):
        assert_one_line_error(typed(*train_arguments(shards, whole, *WHOLE, *overrides)), says)
    done = typed(*train_arguments(shards, whole, *WHOLE, "resume=true"))
    assert done.returncode == 0 and "already done, 8 steps" in done.stdout
    other = typed(*train_arguments(shards, tmp_path / "x", "model=baseline", "steps=1", f"init_from={whole}"))
    assert_one_line_error(other, "another architecture: layers (d there, b here)")
    assert {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()} == before


def test_a_run_that_fails_before_its_first_step_leaves_nothing_and_a_deleted_one_says_so(
    shards: Path, tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory")

    def validate(*_: object) -> float:
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        return 1.0

    arguments = train_arguments(shards, tmp_path / "run", "steps=2", "model.n_layer=1")
    for place in ("train.Parallel.micro_batch", "training.run.text_digest"):
        with monkeypatch.context() as patch:
            patch.setattr(place, no_memory)
            assert_one_line_error(typed(*arguments), "too little free memory: use a smaller micro_batch=")
        assert not list(tmp_path.iterdir())
    monkeypatch.setattr("train.validation_loss", validate)
    assert_one_line_error(typed(*arguments), "metrics.jsonl was deleted while the run was trained")
    assert not (tmp_path / "run").exists()


def test_a_skipped_update_is_said_and_recorded(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    clip, factors = Parallel.clip_grad_norm, iter((1.0, float("nan"), 1.0, 1.0))
    monkeypatch.setattr(Parallel, "clip_grad_norm", lambda *given: clip(*given) * next(factors))
    run = trained(shards, tmp_path / "run", "steps=4", "model.n_layer=1")
    (line,) = [line for line in metrics(run) if "skipped" in line]
    assert line["step"] == 2 and line["skipped"].endswith("gradient norm nan")
    assert "step 2/4 | update skipped: loss " in capsys.readouterr().out and not list(factors)


@pytest.mark.skipif(importlib.util.find_spec("optuna") is not None, reason="hydra-optuna-sweeper is installed")
def test_without_the_package_of_a_search_it_is_named(shards: Path, tmp_path: Path) -> None:
    command, *overrides = train_arguments(shards, tmp_path / "runs", "steps=2")
    assert_one_line_error(run_command(command, "-m", "sweep=optuna", *overrides), "pip install hydra-optuna-sweeper")
    assert not (tmp_path / "runs").exists()
