"""One process or many: its rank, its device and dtype, and reductions over all processes."""

import contextlib
import ctypes
import gc
import itertools
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from configs.provenance import cpu_name
from training.cores import share_cores

TIMEOUT = timedelta(minutes=10)  # until a process that does not answer counts as lost
PATIENCE = 3.0  # seconds that a process with an error waits for the main process to report the same error
_runs = itertools.count()  # numbers the runs of this process: a sweep has several


@dataclass(frozen=True)
class World:
    """This process among those that torchrun started; `size` is 1 without torchrun."""

    rank: int
    size: int
    device: torch.device
    store: dist.Store | None = None  # key-value store of all processes, while the launcher that hosts it lives

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

    def mean(self, x: Tensor) -> Tensor:
        """Average of `x` over all processes (x itself when alone)."""
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

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def close(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """A context for the work of all processes. If several processes fail with the same error, only the main one prints it.

        The other processes then end here, with exit code 2. ConnectionError if a process is lost.
        """
        try:
            yield
        except (ValueError, OSError) as error:
            if self._main_says(str(error)):
                sys.stdout.flush()
                os._exit(2)  # as in one_line_errors (configs/__init__.py)
            raise
        except RuntimeError as error:
            if self.size > 1 and (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise ConnectionError(
                    "another process has ended: see its own error (printed above by its rank), or a timeout of 10 minutes"
                ) from None
            raise

    def _main_says(self, text: str) -> bool:
        """Whether this is not the main process, and the main process has the same error within a few seconds."""
        if self.store is None:
            return False
        with contextlib.suppress(dist.DistError, RuntimeError):
            if self.main:
                self.store.set("error", text)
            else:
                self.store.wait(["error"], timedelta(seconds=PATIENCE))
                return self.store.get("error").decode() == text
        return False


def join_world(device: str = "auto") -> World:
    """Join torchrun's process group (nccl on GPUs, gloo on CPUs); without torchrun, a world of one process."""
    where = pick_device(device)
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    _refuse_shared_gpus(where)
    if where.type == "cpu":
        _keep_freed_memory()
        share_cores()
    if where.type == "cuda":
        where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if where.index is None else where
        torch.cuda.set_device(where)
        gc.collect()  # an earlier run of a sweep may have left its model, its cache and its peak
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(where)
        torch.set_float32_matmul_precision("high")  # TF32 for what stays float32
    if size == 1:
        return World(rank, size, where)
    # torchrun keeps one store over its restarts, and over the runs of a sweep. Each attempt and each run has its own prefix in
    # the store, so that no process can read what the processes of an earlier attempt or run have written.
    store, _, _ = next(dist.rendezvous("env://", timeout=TIMEOUT))
    store = dist.PrefixStore(f"attempt_{restarts()}_run_{next(_runs)}", store)
    backend = "nccl" if where.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    return World(rank, size, where, store)


def _refuse_shared_gpus(device: torch.device) -> None:
    """ValueError if several processes of this machine would use one GPU, which nccl cannot."""
    processes, count = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if device.type != "cuda" or processes == 1:
        return
    if device.index is not None:
        raise ValueError(f"device={device} is one GPU for {processes} processes: use device=cuda")
    if int(os.environ.get("LOCAL_RANK", 0)) >= count:
        raise ValueError(f"{processes} processes, but torch sees {count} GPUs: use torchrun --nproc_per_node={count}")


def restarts() -> int:
    """How often torchrun (--max-restarts) or Slurm (requeue) has started this run's processes again."""
    return sum(int(os.environ.get(name, 0)) for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def pick_device(wish: str) -> torch.device:
    """`auto`: the GPU where there is one, else the CPU. ValueError: unknown name, or torch does not see the GPU."""
    if wish == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", wish):
        raise ValueError(f"device={wish} is unknown: use auto, cpu or cuda")
    count = torch.cuda.device_count()
    if wish != "cpu" and not count:
        raise ValueError(f"device={wish}, but torch sees no CUDA GPU: use device=cpu or install a CUDA build of torch")
    if int(wish.partition(":")[2] or 0) >= max(1, count):
        raise ValueError(f"device={wish}, but torch sees {count} CUDA GPUs: use device=cuda:{count - 1} or less")
    return torch.device(wish)


def _keep_freed_memory() -> None:
    """Tell glibc not to hand large freed blocks back to the kernel.

    By default every step's activations are unmapped and mapped again; the page faults took a quarter of a CPU step.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            libc = ctypes.CDLL("libc.so.6")
            m_trim_threshold, m_mmap_threshold = -1, -3
            libc.mallopt(m_trim_threshold, 2**31 - 1)
            libc.mallopt(m_mmap_threshold, 2**30)


def pick_dtype(wish: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 autocast where the device multiplies bfloat16 faster than float32, else float32.

    On CPUs this needs AMX or an AMD processor with AVX512-BF16. Intel's AVX512-BF16 is slower than its float32 (measured on an
    Emerald Rapids whose virtual machine hides AMX: docs/PERFORMANCE.md).
    """
    if wish in ("float32", "bfloat16"):
        return getattr(torch, wish)
    if wish != "auto":
        raise ValueError(f"dtype={wish} is unknown: use auto, float32 or bfloat16")
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    fast = torch.cpu._is_amx_tile_supported() or (torch.cpu._is_avx512_bf16_supported() and "AMD" in cpu_name())
    return torch.bfloat16 if fast else torch.float32


def slow_bfloat16(device: torch.device) -> bool:
    """Whether torch multiplies bfloat16 number by number there, as on processors without AVX512: dozens of times the time.

    oneDNN says whether it has a product of bfloat16 matrices for this processor.
    """
    if device.type != "cpu":
        return False
    return not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())
