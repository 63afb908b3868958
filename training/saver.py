"""A training run's checkpoints, written by one process or by all."""

import json
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from model.decoder import Decoder
from training import checkpoint, sharded
from training.checkpoint import CheckpointConfig, all_tensors
from training.distributed import World


class Saver:
    """Writes checkpoints of `model` and `optimizers` into `run_dir`, which all processes must see. All call it together.

    Gathered: the main process collects the whole tensors and writes them while training waits. With `cfg.sharded` every
    process copies its own tensors, and writes them while training goes on.
    """

    def __init__(
        self,
        run_dir: Path,
        cfg: CheckpointConfig,
        model: Decoder,
        optimizers: list[torch.optim.Optimizer],
        world: World,
    ) -> None:
        self.run_dir, self.cfg, self.model, self.optimizers, self.world = run_dir, cfg, model, optimizers, world
        self.group = dist.new_group(backend="gloo") if cfg.sharded and world.size > 1 else None
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.writing: Future | None = None

    def save(self, step: int) -> None:
        """Write the checkpoint of `step`, or begin to; waits for the one before."""
        self.finish()
        if not self.cfg.sharded:
            checkpoint.save(
                self.run_dir, step, self.model, self.optimizers, self.cfg.keep, self.cfg.at, self.world.main
            )
            self.world.barrier()
            return
        folder = self.run_dir / "checkpoints" / checkpoint.folder_name(step)
        partial = folder.with_name(f".partial_{folder.name}")
        if folder.exists():
            return
        if self.world.main:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self.world.barrier()
        written = sharded.write(partial, all_tensors(self.model, self.optimizers), self.group)
        self.writing = self.thread.submit(self._publish, written, partial, folder, step) if self.world.main else written

    def finish(self) -> None:
        """Wait until what was begun is on the disk. OSError where it could not be written, on all processes."""
        writing, self.writing = self.writing, None
        try:
            if writing:
                writing.result()
        except CheckpointException as error:
            rank, (reason, _) = next(iter(error.failures.items()))
            raise OSError(f"process {rank} could not write its part of a checkpoint: {reason}") from error

    def _publish(self, written: Future, partial: Path, folder: Path, step: int) -> None:
        written.result()
        files = sharded.checksums(sharded.shards(partial))
        state = {"step": step, "model": asdict(self.model.cfg), "sha256": files}
        (partial / checkpoint.STATE).write_text(json.dumps(state, indent=1))
        checkpoint.publish(partial, folder)
        checkpoint.prune(self.run_dir, self.cfg.keep, self.cfg.at)
