"""python -m tests.training.processes PLAN.json RESULTS.json: groups of gloo processes, forked from one that imported torch.

A plan is a list of [processes, jobs]; a job is [function of this file, arguments]. The results of each group's first process,
or the error that ended it, are written as JSON. Starting Python once for all groups is what keeps these tests short.
"""

import json
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from omegaconf import OmegaConf

from configs.composing import compose_job
from train import train as run_training
from training.distributed import World, join_world


def train(world: World, *overrides: str) -> float:
    """A training run in this group; the value is the last validation loss."""
    return run_training(OmegaConf.to_object(compose_job("train", list(overrides))), world)


def main(plan: Path, results: Path) -> None:
    found = []
    for size, jobs in json.loads(plan.read_text()):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        own = results.with_suffix(f".{len(found)}")
        mp.start_processes(_member, (size, port, jobs, own), nprocs=size, start_method="fork")
        found.append(json.loads(own.read_text()))
    results.write_text(json.dumps(found))


def _member(rank: int, size: int, port: int, jobs: list, results: Path) -> None:
    torch.set_num_threads(1)
    rendezvous = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in rendezvous.items()} | {"MASTER_ADDR": "127.0.0.1"}
    world = join_world("cpu")
    found: list[Any] = []
    for name, arguments in jobs:
        try:
            found.append(globals()[name](world, *arguments))
        except (ValueError, SystemExit) as error:
            found.append(f"{type(error).__name__}: {error}")
        except BaseException:
            traceback.print_exc()
            raise
    if world.main:
        results.write_text(json.dumps(found))
    world.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
