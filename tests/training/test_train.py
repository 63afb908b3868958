"""train.py from the outside: one process or two, killed and resumed, given wrong input."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.conftest import ROOT, Typed, assert_one_line_error, run_command, train_arguments
from training.checkpoint import checkpoints, load_run


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metrics(run_dir) if "loss" in line}


def watched(run_dir: Path) -> list[dict]:
    """What the monitor saw, its own time aside."""
    return [line | {"monitor_s": 0} for line in metrics(run_dir) if "monitor_s" in line]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoints(run_dir)[-1] / "model.safetensors")


MIXED = ("data.retrieval.weight=30", "model.context=192", "batch_tokens=768")
WHOLE = ("model=diff", "steps=20", "model.dropout=0.1", *MIXED)


@pytest.fixture(scope="module")
def whole(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 uninterrupted steps of diff with dropout and retrieval, one process, float32."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    done = run_command(*train_arguments(shards, run_dir, *WHOLE, "eval_every=10", "monitor.every=5"))
    assert done.returncode == 0, done.stderr
    return run_dir


def test_a_run_leaves_what_was_promised(whole: Path) -> None:
    lines = metrics(whole)
    assert {"params", "params_non_embedding", "flops_per_token", "machine", "version"} <= lines[0].keys()
    last = [line for line in lines if "loss" in line][-1]
    assert {"step", "tokens", "loss", "lr", "grad_norm", "tokens_per_s", "mem_gb", "time_s"} <= last.keys()
    assert last["step"] == 20 and last["tokens"] == 20 * 768
    assert [line["step"] for line in lines if "val_loss" in line] == [10, 20]
    assert losses(whole)[20] < losses(whole)[1] - 0.2
    run = load_run(whole)
    assert run.step == 20 and run.tokenizer.name == "bytes" and run.config["model"]["layers"] == "d"
    assert not list(whole.rglob("*.pt")) and not list(whole.rglob("*.pkl"))


def test_the_same_seed_gives_the_same_losses(whole: Path, shards: Path, tmp_path: Path) -> None:
    for seed, same in ((1, True), (2, False)):
        run_dir = tmp_path / str(seed)
        arguments = train_arguments(shards, run_dir, *WHOLE, f"seed={seed}")
        assert run_command(*arguments).returncode == 0
        assert (losses(run_dir) == losses(whole)) is same


def test_a_killed_run_that_is_resumed_is_the_run_that_was_not_killed(whole: Path, shards: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = train_arguments(shards, run_dir, *WHOLE, "eval_every=10", "monitor.every=5", "checkpoint.every=5")
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True
    )
    wait_for = random.randrange(2, 9)  # of 20, so that the signal comes in time
    for line in process.stdout:
        if line.startswith("step") and int(line.split("/")[0].split()[1]) >= wait_for:
            process.send_signal(signal.SIGTERM)
            break
    rest = process.stdout.read()
    assert process.wait() == 143 and "stopped by SIGTERM" in rest, rest
    stopped_at = int(checkpoints(run_dir)[-1].name.split("_")[1])
    assert wait_for <= stopped_at < 20
    with (run_dir / "metrics.jsonl").open("a") as file:  # a kill -9 later on would leave such lines
        file.write(json.dumps({"step": stopped_at + 1, "loss": 0.0}) + '\n{"step": ')
    resumed = run_command(*arguments, "resume=true")
    assert resumed.returncode == 0, resumed.stderr
    (continued,) = (line for line in metrics(run_dir) if "continued" in line)
    assert continued["step"] == stopped_at and set(continued["continued"]) == {"machine", "version", "dtype"}
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["resume"]  # the configuration of the newest part
    assert losses(run_dir) == losses(whole)
    assert [line["val_loss"] for line in metrics(run_dir) if "val_loss" in line] == [
        line["val_loss"] for line in metrics(whole) if "val_loss" in line
    ]
    assert [line["step"] for line in watched(run_dir)] == [0, 5, 10, 15, 20] and watched(run_dir) == watched(whole)
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(run_dir)[name]), name
    assert len(checkpoints(run_dir)) == 2  # checkpoint.keep


def test_two_processes_and_accumulation_give_the_losses_of_one(shards: Path, tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    common = ("model=diff", "steps=20", "eval_tokens=192")  # three windows: the processes have two and one
    runs = {
        "one": [*train_arguments(shards, tmp_path / "one", *common)],
        "two": [*torchrun, *train_arguments(shards, tmp_path / "two", *common)],
        "two_accumulating": [*torchrun, *train_arguments(shards, tmp_path / "two_accumulating", *common, "micro_batch=2")],
    }
    for name, arguments in runs.items():
        done = run_command(*arguments)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(f"{tmp_path / name}: done after step 20") == 1  # one process speaks
    one = losses(tmp_path / "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two", "two_accumulating"]
    for name in ("two", "two_accumulating"):
        other = losses(tmp_path / name)
        assert max(abs(one[step] - other[step]) for step in range(1, 21)) < 1e-4
        for key, apart in (("grad_norm", 1e-3), ("val_loss", 1e-5)):
            found, wanted = ([line[key] for line in metrics(tmp_path / run) if key in line] for run in (name, "one"))
            assert found == pytest.approx(wanted, rel=apart), key


def test_a_sweep_makes_one_run_directory_per_arm(shards: Path, tmp_path: Path) -> None:
    arguments = [a for a in train_arguments(shards, tmp_path, "steps=2") if not a.startswith("run_dir")]
    sweep = ["model=baseline,diff,introspective", "seed=1,2", f"run_dir={tmp_path}/${{model.layers}}-${{seed}}"]
    done = run_command(arguments[0], "-m", *arguments[1:], *sweep)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b-1", "b-2", "d-1", "d-2", "i-1", "i-2"]
    assert all(losses(p) for p in tmp_path.iterdir())


def test_init_from_starts_with_the_weights_of_another_run(whole: Path, shards: Path, tmp_path: Path) -> None:
    arguments = train_arguments(shards, tmp_path / "run", "model=diff", "steps=1", f"init_from={whole}", "optim.lr=0")
    assert run_command(*arguments).returncode == 0
    assert losses(tmp_path / "run")[1] < losses(whole)[5]


def test_warm_up_masks_and_attention_dropout_train_and_are_evaluated_as_trained(shards: Path, tmp_path: Path) -> None:
    options = ("model.diff.lambda_warmup=10", "model.document_mask=true", "model.window=16")
    arguments = train_arguments(shards, tmp_path / "run", "model=diff", "steps=3", "model.attention_dropout=0.1", *options)
    done = run_command(*arguments)
    assert done.returncode == 0, done.stderr
    model = load_run(tmp_path / "run").model
    assert model.blocks[1].attention.lambda_mix.item() == pytest.approx(0.3)
    assert model.cfg.eot == 256 and model.cfg.window == 16
    tokens = torch.randint(0, 256, (1, 24))
    tokens[0, 9] = model.cfg.eot
    other = tokens.clone()
    other[0, :9] = (tokens[0, :9] + 1) % 256
    torch.testing.assert_close(model(tokens)[:, 9:], model(other)[:, 9:])


def test_a_run_is_never_overwritten_or_mixed_up(whole: Path, shards: Path, tmp_path: Path, typed: Typed) -> None:
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    same = (*WHOLE, "eval_every=10")
    cases = (
        (same, "resume=true"),
        ((*same, "resume=true", "model.n_layer=3"), "model.n_layer=2 (now 3)"),
        ((*same, "resume=true", "seed=5"), "seed=1 (now 5)"),
    )
    for overrides, says in cases:
        assert_one_line_error(typed(*train_arguments(shards, whole, *overrides)), says)
    done = typed(*train_arguments(shards, whole, *same, "resume=true"))
    assert done.returncode == 0 and "already done, 20 steps" in done.stdout
    other = typed(*train_arguments(shards, tmp_path / "x", "model=baseline", "steps=1", f"init_from={whole}"))
    assert_one_line_error(other, "another architecture: layers (d there, b here)")
    assert {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()} == before


def test_weights_of_another_tokenizer_are_refused(whole: Path, text_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bpe"
    prepared = run_command(
        "-m", "data.prepare", "data=text", f"path={text_file}", f"data.dir={folder}", "data.name=tiny",
        "data.tokenizer={name: bpe, vocab_size: 280}",
    )  # fmt: skip
    assert prepared.returncode == 0, prepared.stderr
    arguments = train_arguments(folder, tmp_path / "run", "model=diff", f"init_from={whole}")
    arguments = [a.replace("data.tokenizer.name=bytes", "data.tokenizer.name=bpe") for a in arguments]
    assert_one_line_error(run_command(*arguments), "trained with another tokenizer (bytes, 257 tokens)")
    assert not (tmp_path / "run").exists()


def test_an_indivisible_world_is_refused_once(shards: Path, tmp_path: Path) -> None:
    done = run_command(
        "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
        *train_arguments(shards, tmp_path / "run", "batch_tokens=64", "steps=2"),
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stderr.count("error: batch_tokens=64 is not a multiple of context 64 x 2 processes: use batch_tokens=128") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="torch has another OpenMP than libgomp")
@pytest.mark.parametrize(
    ("chosen", "count"), (({}, "2000"), ({"GOMP_SPINCOUNT": "300000"}, "300000"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "0"))
)
def test_libgomp_reads_how_long_waiting_threads_spin(chosen: dict[str, str], count: str) -> None:
    """The variable must be set before torch loads libgomp, which then shows what it read."""
    environment = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE", **chosen}
    done = subprocess.run([sys.executable, "-c", "import train"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(re.findall("GOMP_SPINCOUNT = '(.*)'", done.stderr)) == {count}


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_training_in_bfloat16_on_a_processor_without_it_is_named(
    dtype: str, shards: Path, tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.slow_bfloat16", lambda device: True)
    done = typed(*train_arguments(shards, tmp_path / "run", "steps=1", f"dtype={dtype}"))
    assert done.returncode == 0, done.stderr
    assert ("use dtype=auto" in done.stdout) == (dtype == "bfloat16")
    assert metrics(tmp_path / "run")[0]["dtype"] == dtype
