"""python -m tests.training.processes PLAN.json RESULTS.json: groups of gloo processes, forked from one that imported torch.

A plan is a list of [processes, jobs]; a job is [function of this file, arguments]. The results of each group's first process,
or the error that ended it, are written as JSON. Starting Python once for all groups is what keeps these tests short.
"""

import errno
import json
import os
import socket
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # once for all groups: optimizers import it
import torch.multiprocessing as mp
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from configs.composing import compose_job
from model.config import DecoderConfig
from model.decoder import Decoder
from train import train as run_training
from training import checkpoint
from training.checkpoint import CheckpointConfig, Saver
from training.distributed import World, join_world, local
from training.optim import Guard, OptimConfig, build_optimizers, state_tensors
from training.parallel import Parallel
from training.run import check_config

SMALL = DecoderConfig(layers="ib", n_layer=2, n_head=4, d_model=32, context=16, vocab_size=37)


def train(world: World, *overrides: str) -> float:
    """A training run in this group; the value is the last validation loss."""
    cfg = OmegaConf.to_object(compose_job("train", list(overrides)))
    check_config(cfg, world)
    with ExitStack() as cleanup:
        return run_training(cfg, world, cleanup)


def train_until(world: World, step: int, *overrides: str) -> None:
    """A training run that ends as soon as the checkpoint of `step` is on the disk."""
    save = Saver.save

    def save_and_end(saver: Saver, now: int, guard: Guard | None = None) -> None:
        save(saver, now, guard)
        if now == step:
            saver.finish()
            raise SystemExit

    Saver.save = save_and_end
    try:
        train(world, *overrides)
    finally:
        Saver.save = save


def small(world: World, kind: str, shard: int | None, optim: str) -> tuple[Parallel, list[torch.optim.Optimizer]]:
    parallel = Parallel(Decoder(SMALL, seed=3), world, kind, shard)
    return parallel, build_optimizers(parallel.model, OptimConfig(name=optim), world)


def steps(parallel: Parallel, optimizers: list[torch.optim.Optimizer], count: int) -> None:
    """Optimizer steps on the same tokens."""
    tokens = torch.arange(32).reshape(2, 16) % SMALL.vocab_size
    for _ in range(count):
        parallel.net(tokens, tokens).backward()
        parallel.clip_grad_norm(1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def same_update(world: World, kind: str, shard: int | None) -> bool:
    """Whether two steps of Muon with the same gradients give whole matrices and split ones the same bits."""
    updated = []
    for layout in (("ddp", None), (kind, shard)):
        parallel, (muon, _) = small(world, *layout, "muon")
        generator = torch.Generator().manual_seed(0)
        for _ in range(2):
            for p in parallel.model.parameters():
                grad = torch.randn(p.shape, generator=generator)
                split = isinstance(p, DTensor)
                p.grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None) if split else grad
            muon.step()
        updated.append([p.full_tensor() if isinstance(p, DTensor) else p for p in parallel.model.parameters()])
    return all(map(torch.equal, *updated))


def skip(world: World, kind: str, shard: int | None, optim: str) -> list[bool]:
    """Whether an update that the device skips, and the next one, which it takes, leave all weights and state as they were."""
    parallel, optimizers = small(world, kind, shard, optim)
    steps(parallel, optimizers, 1)
    guard, unchanged = Guard(optimizers, world, nonfinite=10), []
    guard.ask_host = False
    tokens = torch.arange(32).reshape(2, 16) % SMALL.vocab_size
    for factor in (float("nan"), 1.0):
        tensors = checkpoint.own_weights(parallel.model) | state_tensors(optimizers)
        held = {name: local(tensor) for name, tensor in tensors.items()}
        before = {name: tensor.clone() for name, tensor in held.items()}
        loss = parallel.net(tokens, tokens) * factor
        loss.backward()
        guard.step_optimizers(2, loss, parallel.clip_grad_norm(0.0))
        unchanged.append(all(torch.equal(before[name], tensor) for name, tensor in held.items()))
    return unchanged


def write(world: World, kind: str, shard: int | None, optim: str, folder: str) -> None:
    """The same state as whole tensors, as a checkpoint, and as one that is written while training goes on."""
    parallel, optimizers = small(world, kind, shard, optim)
    steps(parallel, optimizers, 2)
    tensors = checkpoint.own_weights(parallel.model) | state_tensors(optimizers)
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t.clone() for name, t in tensors.items()}
    for how in ("waiting", "background"):
        Path(folder, how).mkdir(parents=True, exist_ok=True)
        saver = Saver(Path(folder, how), CheckpointConfig(background=how == "background"), parallel.model, optimizers, world)
        saver.save(2)
    steps(parallel, optimizers, 1)
    saver.finish()
    if world.main:
        save_file(whole, Path(folder, "whole.safetensors"))


def reread(world: World, kind: str, shard: int | None, optim: str, folder: str, copy: str) -> None:
    """What these processes read of a checkpoint, written again into `copy`."""
    parallel, optimizers = small(world, kind, shard, optim)
    step = checkpoint.load(Path(folder), parallel.model, optimizers)
    Path(copy).mkdir(parents=True, exist_ok=True)
    Saver(Path(copy), CheckpointConfig(), parallel.model, optimizers, world).save(step)


def full(world: World, folder: str) -> None:
    """A checkpoint for which the second process has no room."""

    def no_room(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    Path(folder).mkdir(parents=True, exist_ok=True)
    parallel, optimizers = small(world, "fsdp", None, "adamw")
    checkpoint.save_file, save_file = checkpoint.save_file if world.rank != 1 else no_room, checkpoint.save_file
    try:
        Saver(Path(folder), CheckpointConfig(), parallel.model, optimizers, world).save(1)
    finally:
        checkpoint.save_file = save_file


def main(plan: Path, results: Path) -> None:
    values = []
    for size, jobs in json.loads(plan.read_text()):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        of_group = results.with_suffix(f".{len(values)}")
        mp.start_processes(_member, (size, port, jobs, of_group), nprocs=size, start_method="fork")
        values.append(json.loads(of_group.read_text()))
    results.write_text(json.dumps(values))


def _member(rank: int, size: int, port: int, jobs: list, results: Path) -> None:
    torch.set_num_threads(1)
    rendezvous = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in rendezvous.items()} | {"MASTER_ADDR": "127.0.0.1"}
    world = join_world("cpu")
    values: list[Any] = []
    for name, arguments in jobs:
        try:
            values.append(globals()[name](world, *arguments))
        except (ValueError, SystemExit) as error:
            values.append(f"{type(error).__name__}: {error}")
        except BaseException:
            traceback.print_exc()
            raise
    if world.main:
        results.write_text(json.dumps(values))
    world.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
