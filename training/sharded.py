"""Tensors in a folder, written by all processes at once and read by any number of them: torch.distributed.checkpoint.

Each process writes what it holds into a safetensors file of its own, whose header says where in the whole tensors its
pieces belong. Nothing is pickled, unlike in that module's default format.
"""

import hashlib
import warnings
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor

SHARDS = "shard-*.safetensors"
# A single process is a normal case here. The filter is global, because a filter within a `with` block would not hold in the
# thread that writes.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def write(folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> Future:
    """Begin to write `tensors`, split over processes or not, into `folder`; they may change as soon as this returns.

    All processes call it together. group: a gloo group that nothing else uses, since it is used while training goes on; None
    for a single process. The future of the first process is done when all processes have written.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    return dcp.async_save(tensors, storage_writer=writer, process_group=group)


def shards(folder: Path) -> list[Path]:
    """The files that `write` made; none in a folder of another format."""
    return sorted(folder.glob(SHARDS))


def sizes(folder: Path) -> dict[str, Any]:
    """Name -> metadata (`size`, `properties.dtype`) of the whole tensors in the folder."""
    return HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata


def fill(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill `tensors` in place from the folder. Split tensors: all processes must call it, and each reads its part."""
    dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)))


def checksums(files: Iterable[Path]) -> dict[str, str]:
    """SHA-256 by file name."""
    found = {}
    for path in files:
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def refuse_damaged(folder: Path, expected: dict[str, str]) -> None:
    """ValueError on all processes if a file has a wrong checksum. All must call it together; each checks some files."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine = sorted(expected)[rank::size]
    there = checksums(folder / name for name in mine if (folder / name).is_file())
    damaged = [name for name in mine if there.get(name) != expected[name]]
    everybody = [damaged] * size
    if size > 1:
        dist.all_gather_object(everybody, damaged)
    if wrong := sorted(name for names in everybody for name in names):
        path = folder / wrong[0]
        raise ValueError(f"{path} is damaged (its checksum differs): delete {folder} to use the checkpoint before it")


def not_finite(tensors: dict[str, Tensor], anywhere: bool = True) -> str | None:
    """The name of a tensor with a NaN or an infinity in it, or None. anywhere: on any process; all must then call it."""
    if not tensors:
        return None
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors.values())
    finite = torch.stack([t.isfinite().all() for t in local]).int()  # the host waits for the device once
    if anywhere and dist.is_initialized():
        dist.all_reduce(finite, dist.ReduceOp.MIN)
    return None if finite.all() else list(tensors)[int((finite == 0).nonzero()[0])]


def empty_as(own: Tensor, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """An uninitialized tensor of `size`: split as `own` if `own` has this size, else whole."""
    if own.shape == size:
        return torch.empty_like(own, dtype=dtype, requires_grad=False)
    return torch.empty(size, dtype=dtype, device=own.device)
