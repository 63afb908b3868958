"""A training run's checkpoints, written by one process or by all."""

import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from configs.files import whole_folder
from model.decoder import Decoder
from training import checkpoint, sharded
from training.checkpoint import CheckpointConfig
from training.distributed import World
from training.guard import Diverged

PARTIAL = ".partial_"  # prefix of the name of a folder into which processes write their shards


class Saver:
    """Writes checkpoints of `model` and `optimizers` into `run_dir`, which all processes must see. All call it together.

    Without `cfg.sharded` the main process gathers the whole tensors and writes them while training waits. With `cfg.sharded`
    every process copies its own tensors, and writes them while training goes on.
    """

    def __init__(
        self, run_dir: Path, cfg: CheckpointConfig, model: Decoder, optimizers: list[torch.optim.Optimizer], world: World
    ) -> None:
        self.run_dir, self.cfg, self.model, self.optimizers, self.world = run_dir, cfg, model, optimizers, world
        self.group = dist.new_group(backend="gloo") if cfg.sharded and world.size > 1 else None
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.writing: Future | None = None
        self.folder = run_dir  # folder of the checkpoint begun last; before the first one the run's
        for left in run_dir.glob(f"checkpoints/{PARTIAL}*") if world.main else ():  # by processes that were killed
            shutil.rmtree(left)

    def save(self, step: int, guard: dict[str, Any] | None = None) -> None:
        """Write the checkpoint of `step`, or with `cfg.sharded` begin to write it, after the checkpoint before is written.

        guard: state of training.guard.Guard.
        """
        self.finish()
        tensors = checkpoint.all_tensors(self.model, self.optimizers)
        if bad := sharded.not_finite(tensors):  # on all processes, before the main process writes alone
            raise Diverged(f"{bad} is not finite at step {step}, so no checkpoint is written: lower optim.lr")
        if not self.cfg.sharded:
            keep, main = self.cfg.keep, self.world.main
            checkpoint.save(self.run_dir, step, self.model, self.optimizers, keep, self.cfg.at, guard, main)
            self.world.barrier()
            return
        self.folder = checkpoint.of_step(self.run_dir, step)
        partial = self.folder.with_name(f"{PARTIAL}{self.folder.name}")
        if self.world.main:
            partial.mkdir(parents=True)
        self.world.barrier()
        state = {"step": step, "model": asdict(self.model.cfg), "guard": guard or {}}
        written = sharded.write(partial, tensors, self.group)
        self.writing = self.thread.submit(self._publish, written, partial, state) if self.world.main else written

    def finish(self) -> None:
        """Wait until the checkpoint that was begun is on the disk. ValueError on all processes if a part could not be written,
        on the main process if the parts could not be put into their folder.
        """
        writing, self.writing = self.writing, None
        try:
            if writing:
                writing.result()
        except CheckpointException as error:
            rank, (reason, _) = next(iter(error.failures.items()))
            raise checkpoint.not_written(self.folder, f"process {rank}: {reason}") from error
        except OSError as error:
            raise checkpoint.not_written(self.folder, error) from error

    def _publish(self, written: Future, partial: Path, state: dict[str, Any]) -> None:
        try:
            written.result()
            checkpoint.complete(partial, state, sharded.shards(partial))
            with whole_folder(self.folder) as whole:  # a damaged checkpoint of this name is replaced
                for path in partial.iterdir():
                    os.replace(path, whole / path.name)
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # empty, or half written on a full disk
        checkpoint.flush(self.folder.parent)  # before other checkpoints are deleted
        checkpoint.prune(self.run_dir, state["step"], self.cfg.keep, self.cfg.at)
