"""Several processes that train one model: DDP, FSDP2 and hybrid sharding on gloo, and the checkpoints that they exchange."""

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as partitioner
from safetensors.torch import load_file

from model.decoder import Decoder
from tests.conftest import run_command, train_arguments
from tests.training.processes import SMALL
from tests.training.test_train import losses, metrics
from tests.variants import config
from training import checkpoint, parallel, run
from training.checkpoint import CheckpointConfig, Saver, checkpoints, load_run
from training.distributed import World
from training.optim import OptimConfig, build_optimizers, state_tensors
from training.parallel import KEEP_INPUTS, Parallel, compile_steps, default_micro_batch

WATCHED = (
    "model=introspective", "model.context=128", "micro_batch=1", "eval_every=4", "monitor.every=4",
    "needle_every=4", "needle_samples=4",
)  # fmt: skip
# Text and retrieval documents: a further forward pass gives their losses, between a step's backward pass and its update.
MIXED = ("data.retrieval.weight=50", "model.context=192", "batch_tokens=768")
SKIPPED = (("ddp", "muon"), ("fsdp", "adamw"), ("fsdp", "muon"))
FOUR = World(0, 4, torch.device("cpu"))


def test_an_impossible_layout_is_refused_and_a_gpu_takes_part_of_a_step_at_once() -> None:
    for sequences, most, want in ((64, 64, 64), (64, 63, 32), (12, 5, 4), (7, 6, 1), (8, 0.5, 1)):
        context = int(parallel.TOKENS_PER_PASS / most)
        assert default_micro_batch(sequences, context, World(0, 1, torch.device("cuda"))) == want
        assert default_micro_batch(sequences, context, FOUR) == sequences
    with pytest.raises(ValueError, match="use a divisor of 4$"):
        Parallel(Decoder(SMALL), FOUR, "hsdp", 3)


def test_processes_that_were_started_differently_do_not_train(monkeypatch: pytest.MonkeyPatch, shards: Path) -> None:
    def gather(everybody: list, settings: dict) -> None:
        everybody[:] = [settings, settings | {"optim.lr": 0.5}]

    monkeypatch.setattr(run.dist, "all_gather_object", gather)
    cfg = run.TrainConfig()
    cfg.data.dir = str(shards)
    with pytest.raises(ValueError, match=r"^optim.lr is 0.5 on rank 1, but 0.001 on rank 0: start all processes with the same"):
        run.refuse_unequal_processes(cfg, World(0, 2, torch.device("cpu")))


def test_a_compiled_step_on_a_cpu_keeps_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """compile_steps sets torch's option, and the option has its effect; this backend divides the passes as inductor does."""
    plain, kept = torch.compile, []
    monkeypatch.setattr(partitioner, KEEP_INPUTS, True)
    monkeypatch.setattr(torch, "compile", lambda *model, **how: plain(*model, backend="aot_eager_decomp_partition", **how))
    for compiled in (torch.compile, compile_steps):
        torch._dynamo.reset()
        model = Decoder(config("baseline", vocab_size=32, n_layer=1))
        loss = compiled(model)(*torch.zeros(2, 2, 8, dtype=torch.long))
        kept.append(sum(x.nbytes for x in loss.grad_fn.saved_tensors))
    assert kept[1] < kept[0]


@pytest.mark.parametrize("how", ("a sweep", "a bench"))
def test_every_model_of_a_process_is_compiled(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch stops at 8, here at 2: a sweep builds a model and calls it, then the next; a bench builds all, then calls each."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: list) -> Callable:
        graphs.append(number)
        return graph.forward

    plain, tokens = torch.compile, torch.zeros(2, 1, 4, dtype=torch.long)
    monkeypatch.setattr(torch, "compile", lambda *model, **how: plain(*model, backend=backend, **how))
    models = (Decoder(config("baseline", vocab_size=32, n_layer=1, d_model=32 + 16 * run)) for run in range(4))
    with torch._dynamo.config.patch(recompile_limit=2):  # what compile_steps sets ends here
        if how == "a sweep":
            monkeypatch.setattr(parallel, "GRAPHS", 2)
        nets = map(compile_steps, models)
        for number, net in enumerate(list(nets) if how == "a bench" else nets):  # noqa: B007  # the backend reads it
            net(*tokens)
    assert graphs == list(range(4))


@pytest.fixture(scope="module")
def group(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of all runs below, and what the jobs gave by name. Groups of 1, 2 and 4 processes, one after the other."""
    folder = tmp_path_factory.mktemp("parallel")

    def run(name: str, *overrides: str) -> list[str]:
        return [*train_arguments(shards, folder / name, "model=diff", "model.n_layer=1", "steps=4", *overrides)[1:]]

    def chain(*overrides: str) -> list[str]:
        return run("chain", "checkpoint.every=1", "resume=true", *overrides)

    hybrid = ("parallel=hsdp", "shard_processes=2", "micro_batch=1", "checkpoint.background=true")
    plan = [
        [1, {"one": ["train", run("one")], "chain 1": ["train_until", [1, *chain()]]}],
        [2, {
            **{kind: ["train", run(kind, *WATCHED, f"parallel={kind}")] for kind in ("ddp", "fsdp")},
            **{f"skip {kind} {optim}": ["skip", [kind, None, optim]] for kind, optim in SKIPPED},
            "ddp mixed": ["train", run("ddp_mixed", *MIXED)],
            "chain 2": ["train_until", [2, *chain("parallel=fsdp")]],
        }],
        [4, {
            "hsdp mixed": ["train", run("hsdp_mixed", *MIXED, "parallel=hsdp", "shard_processes=2")],
            "chain 4": ["train_until", [3, *chain(*hybrid, "activation_checkpointing=true")]],
            "same fsdp": ["same_update", ["fsdp", None]],
            "same hsdp": ["same_update", ["hsdp", 2]],
            "write": ["write", ["fsdp", None, "muon", str(folder)]],
            "full": ["full", [str(folder / "full")]],
        }],
        [2, {
            f"reread {kind}": ["reread", [kind, None, "muon", str(newest(folder / "waiting", 2)), str(folder / kind / "copy")]]
            for kind in ("fsdp", "ddp")
        }],
        [1, {"chain end": ["train", chain()]}],
    ]  # fmt: skip
    files = folder / "plan.json", folder / "results.json"
    files[0].write_text(json.dumps([[size, list(jobs.values())] for size, jobs in plan]))
    done = run_command("-m", "tests.training.processes", *map(str, files), timeout=600)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    results = json.loads(files[1].read_text())
    return folder, {
        name: value for (_, jobs), given in zip(plan, results, strict=True) for name, value in zip(jobs, given, strict=True)
    }


def newest(run: Path, step: int) -> Path:
    return run / "checkpoints" / checkpoint.folder_name(step)


def apart(folder: Path, a: str, b: str) -> float:
    """The largest difference of the losses of two runs."""
    one, other = losses(folder / a), losses(folder / b)
    assert set(one) == set(other) and len(one) > 3
    return max(abs(one[step] - other[step]) for step in one)


def test_a_split_model_trains_as_a_whole_one_and_processes_take_over_from_fewer_and_more(group: tuple) -> None:
    folder, results = group
    assert apart(folder, "ddp", "fsdp") < 1e-5 and apart(folder, "ddp_mixed", "hsdp_mixed") < 1e-5
    assert apart(folder, "one", "chain") < 1e-4
    split, whole = metrics(folder / "fsdp")[1:], metrics(folder / "ddp")[1:]  # what is watched is the same
    assert [line.keys() for line in split] == [line.keys() for line in whole]
    for line, other in zip(split, whole, strict=True):
        for key in line:
            if key in ("val_loss", "needle_acc", "grad_norm") or key.startswith("monitor/"):
                assert line[key] == pytest.approx(other[key], rel=1e-4, abs=1e-5), key
    assert any("needle_acc" in line for line in split) and any("monitor/mean/alpha" in line for line in split)
    assert results["same fsdp"] is results["same hsdp"] is True  # Muon gives split matrices the bits of whole ones
    for kind, optim in SKIPPED:  # an update that the device skips leaves no trace
        assert results[f"skip {kind} {optim}"] == [True, False]


def read_by_one(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors that a single process reads of a checkpoint of step 2."""
    model = Decoder(SMALL, seed=1)
    optimizers = build_optimizers(model, OptimConfig(name="muon"))
    assert checkpoint.load(folder, model, optimizers) == 2
    return checkpoint.own_weights(model) | state_tensors(optimizers)


def same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(tensor, others[name]) for name, tensor in some.items())


def test_a_checkpoint_of_four_is_read_by_one_and_two(group: tuple) -> None:
    folder, _ = group
    whole, written = load_file(folder / "whole.safetensors"), newest(folder / "waiting", 2)
    assert len(list(written.glob("model-part*"))) == len(list(written.glob("optimizer-part*"))) == 4
    for path in written.glob("*.safetensors"):
        assert path.read_bytes() == (newest(folder / "background", 2) / path.name).read_bytes(), path
    copies = [newest(folder / kind / "copy", 2) for kind in ("fsdp", "ddp")]
    for copy in (written, *copies):
        assert same(read_by_one(copy), whole), copy
    files = [load_file(copies[1] / f"{kind}.safetensors") for kind in ("model", "optimizer")]  # by one process, of ddp
    assert same(files[0] | files[1], whole) and len(list(copies[1].iterdir())) == 3


def test_a_checkpoint_of_four_is_evaluated_and_checked_and_without_room_nothing_is_left(group: tuple) -> None:
    folder, results = group
    assert load_run(folder / "chain", step=3).step == 3 and checkpoint.read_state(newest(folder / "chain", 3))["guard"]
    damaged = newest(folder / "background", 2)
    file = damaged / "model-part3.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match="part3.*is damaged"):
        checkpoint.load(damaged, Decoder(SMALL))
    assert re.search("could not be written .process 1: .*No space left on device.: correct that, then", results["full"])
    assert not list((folder / "full" / "checkpoints").iterdir())


def test_checkpoints_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, alone = Decoder(SMALL, seed=2), World(0, 1, torch.device("cpu"))
    cfg = CheckpointConfig(keep=1, background=True)
    writer = Saver(tmp_path, cfg, model, build_optimizers(model, OptimConfig()), alone)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flush, there = checkpoint.flush, []

    def seen(path: Path) -> None:
        there.append((path, len(checkpoints(tmp_path))))
        flush(path)

    monkeypatch.setattr(checkpoint, "flush", seen)
    for step in (1, 2):
        writer.save(step)
        for p in model.parameters():
            p.data.add_(1)  # training goes on while the files are written
    writer.finish()
    counts = [count for path, count in there if path == tmp_path / "checkpoints"]
    assert counts == [1, 2]  # the second is on the disk before the first is deleted
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [checkpoint.folder_name(2)]
    other = Decoder(SMALL)
    assert checkpoint.load(newest(tmp_path, 2), other) == 2
    assert all(torch.equal(p, before[name] + 1) for name, p in other.named_parameters())

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "save_file", fail)
    writer.save(3)
    with pytest.raises(ValueError, match="could not be written .*No space left on device.*kept: correct that, then use"):
        writer.finish()
    assert list((tmp_path / "checkpoints").iterdir()) == [newest(tmp_path, 2)]  # nothing half written is left


def forward_and_backward(model: Decoder, recompute: bool) -> tuple[list[torch.Tensor], int]:
    """The loss and all gradients of a training step, and the bytes that its forward pass keeps for the backward pass."""
    tokens = torch.arange(64).reshape(2, 32) % model.cfg.vocab_size
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model.gradient_checkpointing = recompute
    model.zero_grad()
    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(tokens, tokens)
        total = sum(kept.values())  # while all are alive, so that no address stands for two
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())], total


@pytest.mark.parametrize("variant", ("diff", "value_residual", "introspective"))
def test_blocks_that_are_computed_again_give_the_same_bits_and_keep_only_their_inputs(variant: str) -> None:
    model = Decoder(config(variant, dropout=0.1)).train()
    once, again = (forward_and_backward(model, recompute)[0] for recompute in (False, True))
    assert all(map(torch.equal, once, again))
    if variant == "diff":
        kept = {}
        for recompute in (False, True):
            models = [Decoder(config("baseline", n_layer=depth)).train() for depth in (2, 3)]
            shallow, deep = (forward_and_backward(one, recompute)[1] for one in models)
            kept[recompute] = deep - shallow  # of one block
        assert kept[True] == 4 * 64 * config("baseline").d_model < kept[False] / 10  # float32, of 64 tokens
