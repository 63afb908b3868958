"""One process or many: who am I, where do I compute, and sums over everybody."""

import contextlib
import ctypes
import os
import sys
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class World:
    """This process among those that torchrun started; `size` is 1 without torchrun."""

    rank: int
    size: int
    device: torch.device

    @property
    def main(self) -> bool:
        return self.rank == 0

    def tensors(self, *arrays: np.ndarray) -> list[Tensor]:
        """The arrays as tensors on this process's device."""
        return [torch.from_numpy(array).to(self.device) for array in arrays]

    def mean(self, x: Tensor) -> Tensor:
        """Average of `x` over all processes (x itself when alone)."""
        if self.size > 1:
            dist.all_reduce(x)
            x /= self.size
        return x

    def any(self, flag: bool) -> bool:
        """Whether any process says so. All processes must ask together."""
        return bool(self.mean(torch.tensor(float(flag), device=self.device)) > 0)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def close(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()


def join_world(device: str = "auto") -> World:
    """Join torchrun's process group (nccl on GPUs, gloo on CPUs), or be alone."""
    where = pick_device(device)
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if where.type == "cpu":
        _keep_freed_memory()
    if where.type == "cuda":
        where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if where.index is None else where
        torch.cuda.set_device(where)
        torch.set_float32_matmul_precision("high")  # TF32 for what stays float32
    if size > 1:
        dist.init_process_group("nccl" if where.type == "cuda" else "gloo")
    return World(rank, size, where)


def pick_device(wish: str) -> torch.device:
    """`auto`: the GPU where there is one, else the CPU. ValueError for a GPU that torch does not see, and other names."""
    if wish == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wish.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device={wish}, but torch sees no CUDA GPU: use device=cpu or install a CUDA build of torch")
    try:
        return torch.device(wish)
    except RuntimeError:
        raise ValueError(f"device={wish} is unknown: use auto, cpu or cuda") from None


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
    """`auto`: bfloat16 autocast where the device multiplies it natively (CUDA, AVX512-BF16, AMX), else float32."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if wish != "auto":
        if wish not in dtypes:
            raise ValueError(f"dtype={wish} is unknown: use auto, float32 or bfloat16")
        return dtypes[wish]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32
