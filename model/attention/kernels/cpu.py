"""Causal attention on CPUs by one C++ kernel (cpu.cpp): softmax attention, unions of key sets, differences of two maps.

It computes in float32 or better, also for bfloat16, and stores no maps. Its results do not depend on the number of threads.

The letters of shapes are explained in cpu.cpp.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from ... import native
from ..sdpa import in_line

SOURCE = Path(__file__).with_suffix(".cpp")
KINDS = {torch.bfloat16: "attend_bfloat16", torch.float32: "attend_float32", torch.float64: "attend_float64"}


def attend(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """backends.attend_union: q (B, H, T, d), each of keys (B, Hkv, T, d), of values (B, Hkv, T, dv) -> (B, H, T, dv)."""
    q = q.unflatten(1, (keys[0].shape[1], -1)).unsqueeze(1)  # (B, 1, Hkv, G, T, d)
    k, v = (x[0].unsqueeze(3) if len(x) == 1 else torch.stack(x, 3) for x in (keys, values))  # (B, Hkv, T, n, d)
    return _Kernel.apply(q, k.unsqueeze(1), v, None).flatten(1, 2)


def attend_diff(q: Tensor, k: Tensor, v: Tensor, lam: Tensor) -> Tensor:
    """backends.attend_diff: q (B, h, 2, T, d), k (B, hkv, 2 or 1, T, d), v (B, hkv, T, dv), lam (..., T or 1, 1) or ()."""
    B, h, _, T, _ = q.shape
    q = q.unflatten(1, (k.shape[1], -1)).movedim(3, 1)  # (B, 2, hkv, G, T, d)
    k = k.movedim(2, 1).unsqueeze(4)  # (B, 2 or 1, hkv, T, 1, d)
    lam = lam.to(torch.promote_types(q.dtype, torch.float32)).expand(B, h, T, 1).unflatten(1, (v.shape[1], -1))
    return _Kernel.apply(q, k, v.unsqueeze(3), lam).flatten(1, 2)


@native.constant
def missing() -> str | None:
    """Why the kernel cannot be used here, in one line; None if it can. The first call on a machine compiles it."""
    if reason := native.failure(SOURCE):
        fix = "install g++, or use model.backend=sdpa (in Python: backend='sdpa')"
        return f"the cpu backend needs a C++ compiler with OpenMP ({reason}): {fix}"
    return None


class _View(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("strides", ctypes.c_int64 * 5)]


class _Call(ctypes.Structure):
    """`struct Call` of cpu.cpp: the same fields in the same order."""

    SIZES = ("B", "M", "C", "K", "G", "T", "n", "d", "dv", "threads")
    TENSORS = ("q", "k", "v", "lam", "out", "grad_out", "grad_q", "grad_k", "grad_v", "grad_lam")
    _fields_ = [(name, ctypes.c_int64) for name in SIZES] + [(name, _View) for name in TENSORS]


def _call(q: Tensor, k: Tensor, v: Tensor, lam: Tensor | None, **others: Tensor | None) -> None:
    """Run the kernel: forward if `others` has out; backward if it has grad_out and the gradients to fill."""
    B, M, K, G, T, d = q.shape
    C, n = k.shape[1], k.shape[4]
    if k.shape != (B, C, K, T, n, d) or v.shape[:-1] != (B, K, T, n) or C not in (1, M) or not q.dtype == k.dtype == v.dtype:
        shapes = ", ".join(f"{name} {x.dtype} {tuple(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise ValueError(f"queries, keys and values do not fit each other in shape or dtype ({shapes})")
    call = _Call(B, M, C, K, G, T, n, d, v.shape[-1], torch.get_num_threads())
    tensors = {"q": in_line(q), "k": in_line(k), "v": in_line(v), "lam": lam, **others}
    for name, x in tensors.items():
        if x is not None:
            view = getattr(call, name)
            view.data, view.strides[: x.dim() - 1] = x.data_ptr(), x.stride()[:-1]
    getattr(native.library(SOURCE), KINDS[q.dtype])(ctypes.byref(call), "grad_out" in others)


def _forward(q: Tensor, k: Tensor, v: Tensor, lam: Tensor | None) -> Tensor:
    """q (B, M, K, G, T, d), k (B, C, K, T, n, d), v (B, K, T, n, dv), lam (B, K, G, T, 1) for M = 2 -> (B, K, G, T, dv)."""
    out = _output(q, k, v, lam)
    _call(q, k, v, lam, out=out)
    return out


def _output(q: Tensor, k: Tensor, v: Tensor, lam: Tensor | None) -> Tensor:
    """An empty output with the memory layout (B, T, K, G, dv), so that merging the heads copies nothing."""
    B, _, K, G, T, _ = q.shape
    return v.new_empty(B, T, K, G, v.shape[-1]).permute(0, 2, 3, 1, 4)


def _backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lam: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and lam (empty if lam is None), from the gradient of the output."""
    dq, dk, dv, dlam = found = _gradients(grad, q, k, v, lam)
    _call(q, k, v, lam, grad_out=in_line(grad), grad_q=dq, grad_k=dk, grad_v=dv, grad_lam=None if lam is None else dlam)
    return found


def _gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lam: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty gradients with positions before heads in memory, as in the projections that make q, k and v."""
    B, M, K, G, T, d = q.shape
    C, n, dv = k.shape[1], k.shape[4], v.shape[-1]
    return (
        q.new_empty(B, T, K, G, M, d).permute(0, 4, 2, 3, 1, 5),
        k.new_empty(B, T, n, K, C, d).permute(0, 4, 3, 1, 2, 5),
        v.new_empty(B, T, n, K, dv).permute(0, 3, 1, 2, 4),
        q.new_empty(0) if lam is None else lam.new_empty(lam.shape),
    )


FORWARD = native.operator("attend", "(Tensor q, Tensor k, Tensor v, Tensor? lam) -> Tensor", _forward, _output)
BACKWARD = native.operator(
    "attend_backward",
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? lam) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _gradients,
)


class _Kernel(torch.autograd.Function):
    """The operator and its gradients, for torch.func too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, lam: Tensor | None) -> Tensor:
        return FORWARD(q, k, v, lam)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: Tensor) -> None:  # noqa: ANN001
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN001
        inputs = ctx.saved_tensors  # read once: activation checkpointing refuses to make them for a second read
        *grads, dlam = native.first_derivatives_only((grad, *inputs), BACKWARD(grad, *inputs))
        return *grads, None if inputs[3] is None else dlam
