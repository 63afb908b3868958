"""Writes checkpoints, whole or not at all, by one process or by many, while training waits or goes on."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from configs.files import json_text, remove, replace_folder
from model.decoder import Decoder
from training import checkpoint
from training.checkpoint import CheckpointConfig, Tensors, checkpoints, folder_name, of_step
from training.distributed import World
from training.guard import Diverged
from training.optim import state_tensors

Pieces = tuple[Tensors, dict[str, str] | None]  # what a process writes into a file, and the file's header


class Saver:
    """Writes checkpoints into `run_dir`/checkpoints, named when they are whole. All processes call its methods together."""

    def __init__(
        self, run_dir: Path, cfg: CheckpointConfig, model: Decoder, optimizers: list[torch.optim.Optimizer], world: World
    ) -> None:
        self.run_dir, self.cfg, self.model, self.optimizers, self.world = run_dir, cfg, model, optimizers, world
        # Training uses the other group while files are written.
        self.group = dist.new_group(backend="gloo") if world.size > 1 else None
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.writing: Future | None = None

    def save(self, step: int, guard: dict[str, Any] | None = None) -> None:
        """Write the checkpoint of `step`, or with `cfg.background` begin to; then delete old ones. guard: state of a Guard."""
        self.finish()
        tensors = {"model": checkpoint.own_weights(self.model), "optimizer": state_tensors(self.optimizers)}
        if bad := checkpoint.not_finite(tensors["model"] | tensors["optimizer"]):
            raise Diverged(f"{bad} is not finite at step {step}, so no checkpoint is written: lower optim.lr")
        state = {"step": step, "model": asdict(self.model.cfg), "guard": guard or {}}
        part = f"-part{self.world.rank + 1}" if any(isinstance(p, DTensor) for p in self.model.parameters()) else ""
        files = {
            f"{kind}{part}.safetensors": pieces(named, self.world.main, copy=self.cfg.background)
            for kind, named in tensors.items()
        }
        if self.cfg.background:
            self.writing = self.thread.submit(self._write, step, files, state)
        else:
            self._write(step, files, state)

    def finish(self) -> None:
        """Wait until the checkpoint that was begun is on the disk."""
        writing, self.writing = self.writing, None
        if writing:
            writing.result()

    def _write(self, step: int, files: dict[str, Pieces], state: dict[str, Any]) -> None:
        folder = of_step(self.run_dir, step)
        partial = folder.with_name(f".{folder.name}.part")

        def begin() -> None:
            folder.parent.mkdir(exist_ok=True)  # without parents: the run's folder may have been moved away
            partial.mkdir()

        def write() -> None:
            for name, (tensors, header) in files.items():
                if tensors:
                    write_tensors(partial / name, tensors, header)

        def publish() -> None:
            complete(partial, state)
            replace_folder(folder, partial)
            flush(folder.parent)  # before other checkpoints are deleted
            self._prune(step)

        try:
            self._together(folder, begin, main=True)
            self._together(folder, write)
            self._together(folder, publish, main=True)
        finally:
            if self.world.main:
                shutil.rmtree(partial, ignore_errors=True)  # half written on a full disk

    def _together(self, folder: Path, work: Callable[[], None], main: bool = False) -> None:
        """Do `work` on all processes (main: on the main one); ValueError on all if a file cannot be written."""
        reason = ""
        try:
            if self.world.main or not main:
                work()
        except (OSError, SafetensorError) as error:
            reason = f"process {self.world.rank}: {error}" if self.group else str(error)
        reasons = [reason] * self.world.size
        if self.group:
            dist.all_gather_object(reasons, reason, self.group)
        if reason := next(filter(None, reasons), ""):
            kept = "; the checkpoint before it is kept" if checkpoints(self.run_dir) else ""
            raise ValueError(f"{folder} could not be written ({reason}){kept}: correct that, then use resume=true")

    def _prune(self, step: int) -> None:
        """Among the checkpoints up to `step`, delete all but the newest `cfg.keep` (0: all) and those of the steps `cfg.at`."""
        # Later ones are damaged, because the run was resumed from an earlier step, which replaces them.
        written = [folder for folder in checkpoints(self.run_dir) if folder.name <= folder_name(step)]
        for old in written[: -self.cfg.keep] if self.cfg.keep else []:
            if old.name not in map(folder_name, self.cfg.at):
                try:
                    # A checkpoint disappears at once: an evaluation that reads it never sees a part of it.
                    remove(old.rename(old.with_name(f".{old.name}.old.part")))
                except OSError as error:  # a file that another program holds open: the next start tries again
                    print(f"{old}: an old checkpoint could not be deleted ({error}); training goes on", flush=True)


def save(run_dir: Path, step: int, model: Decoder, optimizers: list[torch.optim.Optimizer]) -> Path:
    """Make `run_dir` where it is not there, write a checkpoint from a single process and return its folder. See `Saver`."""
    run_dir.mkdir(parents=True, exist_ok=True)
    Saver(run_dir, CheckpointConfig(keep=0), model, optimizers, World(0, 1, torch.device("cpu"))).save(step)
    return of_step(run_dir, step)


def write_tensors(path: Path, tensors: Tensors, header: dict[str, str] | None) -> None:
    """A safetensors file with the rights of any new file; save_file lets only its owner read it."""
    path.touch()
    rights = path.stat().st_mode
    save_file(tensors, path, header)
    path.chmod(rights)


def pieces(tensors: Tensors, main: bool, copy: bool) -> Pieces:
    """What this process writes of `tensors`, in main memory: its piece of each split one and, if `main`, the others."""
    kept, begins, split = {}, {}, False
    for name, tensor in tensors.items():
        mine, begin = main, [0] * tensor.dim()
        if isinstance(tensor, DTensor):
            places = zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
            mine = all(rank == 0 for rank, place in places if place.is_replicate())  # hsdp has several copies
            begin, tensor, split = list(tensor.__create_chunk_list__()[0].offsets), tensor.to_local(), True
            mine &= tensor.numel() > 0  # a tensor may have fewer rows than there are processes
        if mine:
            kept[name], begins[name] = tensor.detach().to("cpu", copy=copy).contiguous(), {"saved_offsets": begin}
    return kept, {"DCP_SHARDING_INFO": json.dumps(begins)} if split else None


def complete(partial: Path, state: dict[str, Any]) -> None:
    """Write the state file, and wait until the whole folder is on the disk."""
    state = state | {"sha256": {path.name: checkpoint.sha256(path) for path in sorted(partial.iterdir())}}
    (partial / checkpoint.STATE).write_text(json_text(state | {"checksum": checkpoint.state_checksum(state)}, indent=1))
    for path in (*partial.iterdir(), partial):
        flush(path)


def flush(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):  # CIFS and others sync no folders
            raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(handle)
