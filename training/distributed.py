"""One process or many: its rank, its device and dtype, and reductions over all processes."""

import contextlib
import ctypes
import gc
import itertools
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from configs.provenance import cpu_name

TIMEOUT = timedelta(minutes=10)  # until a process that does not answer counts as lost
PATIENCE = 5.0  # seconds after a timeout in which every waiting process reports that it waits, so that the lost one is known
_runs = itertools.count()  # numbers the runs of this process: a sweep has several


@dataclass(frozen=True)
class World:
    """This process among those of torchrun; `size` is 1 without torchrun."""

    rank: int
    size: int
    device: torch.device
    store: dist.Store | None = None  # torchrun's store of keys and values, by which processes meet

    @property
    def main(self) -> bool:
        return self.rank == 0

    def tensors(self, *arrays: np.ndarray) -> list[Tensor]:
        """The arrays as tensors on this process's device; a GPU copies them while it computes."""
        tensors = map(torch.from_numpy, arrays)
        if self.device.type != "cuda":
            return [x.to(self.device) for x in tensors]
        # From a tensor with gaps, such as a view of longer rows, torch would copy without pinned memory.
        return [x.contiguous().pin_memory().to(self.device, non_blocking=True) for x in tensors]

    def autocast(self, wish: str) -> torch.autocast:
        """The context in which models compute with dtype=`wish`; its `fast_dtype` is the dtype."""
        dtype = pick_dtype(wish, self.device)
        return torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)

    def mean(self, x: Tensor) -> Tensor:
        """The average of `x` over all processes, which must call `mean` together. With several processes `x` is overwritten."""
        if self.size > 1:
            dist.all_reduce(x)
            x /= self.size
        return x

    def largest(self, number: float) -> float:
        """The largest `number` of all processes; all processes must call it together."""
        if self.size == 1:
            return float(number)
        x = torch.tensor(float(number), dtype=torch.float64, device=self.device)  # exact for any step
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return x.item()

    def close(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """A context for the work of all processes. ConnectionError: a process is lost."""
        try:
            yield
        except Exception as error:
            failed = isinstance(error, RuntimeError)
            if failed and self.size > 1 and (isinstance(error, dist.DistError) or "gloo" in str(error)):
                if self.store and "imed out" in str(error):
                    wrong = f"no answer in time from {self.silent()}"
                    raise ConnectionError(f"{wrong}: see what it or its machine does, then use resume=true") from None
                raise ConnectionError("another process has ended: see the error that its rank has printed above") from None
            if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # the last line that torchrun prints
                Path(report).write_text(json.dumps({"message": f"error: {error}", "timestamp": int(time.time())}))
            raise

    def silent(self) -> str:
        """After a timeout, in words: the ranks that do not report by the store, within PATIENCE seconds, that they waited."""
        try:
            self.store.set(f"waited_{self.rank}", "")
            time.sleep(PATIENCE)
            ranks = [str(rank) for rank in range(self.size) if not self.store.check([f"waited_{rank}"])]
        except dist.DistError:
            return "the machine that holds the store"
        return f"rank {', '.join(ranks)}" if ranks else "the network between the ranks"


def join_world(device: str = "auto") -> World:
    """Join torchrun's process group (nccl on GPUs, gloo on CPUs); without torchrun, a world of one process."""
    where = pick_device(device)
    rank, size, store = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), None
    if not 0 <= rank < size:
        raise ValueError(f"RANK={rank} is not below WORLD_SIZE={size}: unset both, or start the processes with torchrun")
    if where.type == "cpu":
        _keep_freed_memory()
    else:
        processes, count = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
        if processes > (count if where.index is None else 1):  # nccl cannot share a GPU
            wrong = f"{processes} processes would share the GPUs of device={where}"
            raise ValueError(f"{wrong}: use device=cuda and torchrun --nproc_per_node={count} or less")
        where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if where.index is None else where
        torch.cuda.set_device(where)
        gc.collect()  # an earlier run of a sweep may have left its model, its cache and its peak
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(where)
        torch.set_float32_matmul_precision("high")  # TF32 for what stays float32
    if size > 1:
        try:
            store, _, _ = next(dist.rendezvous("env://", timeout=TIMEOUT))
            # torchrun keeps one store over its restarts, and over the runs of a sweep.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
            store = dist.PrefixStore(f"attempt_{attempt}_run_{next(_runs)}", store)
            backend = "nccl" if where.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        except dist.DistError as error:
            why = str(error).splitlines()[0]
            raise ConnectionError(f"not all of WORLD_SIZE={size} processes came ({why}): start all, or unset RANK") from None
    return World(rank, size, where, store)


def pick_device(wish: str) -> torch.device:
    """`auto`: the GPU where there is one, else the CPU."""
    if wish == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", wish):
        raise ValueError(f"device={wish} is unknown: use auto, cpu or cuda")
    count = torch.cuda.device_count()
    if wish != "cpu" and int(wish.partition(":")[2] or 0) >= count:
        raise ValueError(f"device={wish}, but torch sees {count} CUDA GPUs: use another one, or device=cpu")
    return torch.device(wish)


def _keep_freed_memory() -> None:
    """Tell glibc to keep large freed blocks: else each step maps its activations anew, a quarter of the time of a CPU step."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_trim_threshold, 2**31 - 1)
        libc.mallopt(m_mmap_threshold, 2**30)


def pick_dtype(wish: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 where it is fast: GPUs that compute in it, CPUs with AMX, AMD CPUs with AVX512-BF16; else float32."""
    if wish != "auto":
        return getattr(torch, wish)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    fast = torch.cpu._is_amx_tile_supported() or (torch.cpu._is_avx512_bf16_supported() and "AMD" in cpu_name())
    return torch.bfloat16 if fast else torch.float32


def slow_bfloat16(device: torch.device) -> bool:
    """Whether this is a CPU for which oneDNN has no product of bfloat16 matrices: they take dozens of times the time."""
    able = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return device.type == "cpu" and not able


def local(tensor: Tensor) -> Tensor:
    """This process's piece of a split tensor (DTensor); any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
