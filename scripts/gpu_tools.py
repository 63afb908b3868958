"""What the stages of gpu.py share: random inputs, and the time and memory of a call."""

import importlib.util
import math
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from model.attention.mask import Mask

Row = dict[str, Any]
Rows = Iterator[tuple[str, Callable[[], Row]]]
ON_CARD = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_CARD else "cpu")
HALF = torch.bfloat16 if ON_CARD else torch.float32
DOCUMENTS = 8  # in a sequence
ROUNDS = 5


def milliseconds(work: Callable[[], Any], least: float = 0.2) -> float:
    """Median over rounds that last `least` seconds together, of the time of one call; after two calls to warm up.

    A round queues its calls and waits for the device once, so the time that the host needs for a call counts only where the
    host is slower than the device.
    """
    seconds_of(work, 1)
    once = seconds_of(work, 1)
    rounds, repeats = (ROUNDS, max(1, math.ceil(least / ROUNDS / once))) if ON_CARD else (1, 1)
    return 1e3 * median(seconds_of(work, repeats) for _ in range(rounds))


def seconds_of(work: Callable[[], Any], repeats: int) -> float:
    """Seconds per call, as in bench/timing.py, which needs more packages than gpu.py may."""
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize()
    return (time.perf_counter() - start) / repeats


def synchronize() -> None:
    if ON_CARD:
        torch.cuda.synchronize()


def kernel_compiler() -> str | None:
    """Triton's version and that of the ptxas which it calls for this card: a kernel's code depends on both. None: no Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    import triton
    from triton.backends.nvidia.compiler import get_ptxas

    major, minor = torch.cuda.get_device_capability() if ON_CARD else (9, 0)
    return f"triton {triton.__version__}, ptxas {get_ptxas(10 * major + minor).version}"


def relative_errors(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[float]:
    """||got - wanted|| / ||wanted|| of each pair, computed in float64."""
    return [((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(got, wanted, strict=True)]


def tolerance(dtype: torch.dtype) -> float:
    """Most relative error of a result of the fused kernel that is right."""
    return {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]


def draw(version: str, B: int, h: int, T: int, d: int, group: int = 1, dtype: torch.dtype = HALF) -> list[Tensor]:
    """Random q, k, v, lam for a version of differential or plain attention with the same maps; in memory time before heads."""
    generator = torch.Generator(DEVICE).manual_seed(T + d + group)
    keys, dv, hkv = (2 if version == "V1" else 1), (2 * d if version == "V1" else d), h // group

    def normal(*shape: int) -> Tensor:
        x = torch.randn(B, T, *shape, generator=generator, device=DEVICE).to(dtype)
        return x.movedim(1, -2).requires_grad_()

    lam = torch.rand(B, h, T, 1, generator=generator, device=DEVICE)
    return [normal(h, 2, d), normal(hkv, keys, d), normal(hkv, dv), lam.requires_grad_()]


def mask_of(name: str, B: int, T: int) -> Mask:
    """The mask `name`: causal, window (an eighth of the text) or documents."""
    positions = torch.arange(T, device=DEVICE).expand(B, T)
    window = max(1, T // 8) if name == "window" else None
    return Mask(window=window, documents=positions * DOCUMENTS // T if name == "documents" else None)


def forward_backward(call: Callable[[], Tensor], inputs: list[Tensor]) -> Row:
    """Milliseconds of forward alone and with backward, and the peak memory (MB) of both without the inputs."""
    with torch.no_grad():
        forward = milliseconds(call)
    grad = torch.randn_like(call())

    def both() -> None:
        torch.autograd.grad(call(), inputs, grad)

    row = {"forward_ms": forward, "forward_backward_ms": milliseconds(both)}
    if ON_CARD:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        both()
        row["memory_mb"] = (torch.cuda.max_memory_allocated() - before) / 1e6
    return row
