"""Fused differential attention: both softmax maps in one pass over keys and values, forward and backward.

Forward: one online softmax per map over the same blocks of K and V (FlashAttention, arXiv 2205.14135, with two running
maxima), keeping out = O1 - lam O2, O2 and the two log-sum-exps. Backward, with delta_c = rowsum(dO * O_c) and
O1 = out + lam O2:

    dP = dO V'                         once for both maps
    dV = (P1 - lam P2)' dO             once for both maps
    dS1 = P1 (dP - delta1)             dS2 = -lam P2 (dP - delta2)
    dQ_c = dS_c K_c    dK_c = dS_c' Q_c    dlam = -delta2 per row

dK and dV are summed in registers; dQ by atomic additions in float32, so the gradient of q is not bit-reproducible on a GPU
(docs/METHODS.md, section 1.1).
"""

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ...native import first_derivatives_only
from ..mask import Mask
from . import interpreted, unavailable
from .diff_triton import backward_kernel, delta_kernel, forward_kernel

HIDDEN = -(2**31)  # the id of a padded key, which no query has


def attend_diff(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, mask: Mask) -> Tensor:
    """backends.attend_diff for q, k, v in one of bfloat16, float16, float32; the queries are the last T of S positions."""
    (B, h, _, T, d), (_, hkv, C, S, _), dv = q.shape, k.shape, v.shape[-1]
    assert q.shape[2] == 2 and C in (1, 2) and h % hkv == 0 and T <= S, (q.shape, k.shape)
    assert k.shape == (B, hkv, C, S, d) and v.shape == (B, hkv, S, dv), (k.shape, v.shape)
    lam = lam.float().expand(B, h, T, 1)  # the backward of `expand` sums the gradient back to lam's own shape
    query_ids, key_ids = _ids(mask, B, T, S)
    return _forward(q, k, v, lam, query_ids, key_ids, mask.causal, mask.window)[0]


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    dtypes = {x.dtype for x in (q, k, v)}
    if len(dtypes) > 1:
        names = ", ".join(sorted(str(each).removeprefix("torch.") for each in dtypes))
        raise ValueError(f"the fused backend needs q, k and v of one dtype, not {names}: cast them, e.g. q.to(v.dtype)")
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        name = str(q.dtype).removeprefix("torch.")
        raise ValueError(f"the fused backend computes in bfloat16, float16 or float32, not {name}: use model.backend=math")
    if reason := unavailable(q.shape[-1], v.shape[-1]):
        raise ValueError(reason)
    if interpreted():
        return
    if q.device.type != "cuda":
        raise ValueError(f"the fused backend needs tensors on a CUDA GPU, not on {q.device}: use model.backend=sdpa")
    if reason := unfit(q.shape[-1], v.shape[-1], q.dtype, capability(q.device)):
        raise ValueError(reason)


def _ids(mask: Mask, B: int, T: int, S: int) -> tuple[Tensor | None, Tensor | None]:
    """Documents and padding as int32 ids of the queries (B, T) and keys (B, S): a query sees the keys with its own id."""
    if mask.documents is None and mask.keys is None:
        return None, None
    ids = (torch.zeros_like(mask.keys) if mask.documents is None else mask.documents).to(torch.int32)
    assert ids.shape == (B, S), (ids.shape, (B, S))
    key_ids = ids if mask.keys is None else ids.masked_fill(~mask.keys, HIDDEN)
    return ids[:, S - T :].contiguous(), key_ids.contiguous()


class Blocks(NamedTuple):
    """One program's tile, BM queries by BN keys, and how Triton runs it."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int
    TURNED: bool  # scores are K Q' transposed: warps lie along the keys, and no two warps compute the same product


# sm_90 (9.0: wgmma, 227 KiB of shared memory): of twenty tiles for each row, timed on an H200 (docs/results/gpu/README.md), the
# fastest that spills little. sm_80 (8.x and 12.x: mma.sync, 99 KiB on the smallest cards): not timed; by what Triton and ptxas
# report (`python -m tests.compiled_kernels`), these tiles fit, compute no product twice and spill few registers.
# Forward keeps two accumulators BM x dv, backward BN x (2 d + dv), in float32. Rows serve widths up to (d, dv).
FORWARD_16 = {
    "sm_90": {
        (64, 128): Blocks(64, 64, 4, 2, False),
        (128, 128): Blocks(128, 64, 8, 3, False),
        (128, 256): Blocks(32, 128, 8, 2, False),
    },
    "sm_80": {
        (64, 64): Blocks(128, 64, 8, 2, False),
        (64, 128): Blocks(128, 32, 8, 3, False),
        (128, 128): Blocks(128, 32, 8, 2, False),
        (128, 256): Blocks(32, 128, 8, 1, False),
    },
}
BACKWARD_16 = {
    "sm_90": {
        (64, 64): Blocks(64, 128, 8, 2, True),
        (64, 128): Blocks(32, 128, 8, 2, True),
        (128, 128): Blocks(32, 128, 8, 2, True),
        (128, 256): Blocks(32, 64, 8, 1, False),
    },
    "sm_80": {
        (64, 128): Blocks(32, 128, 8, 2, True),
        (128, 128): Blocks(16, 128, 8, 1, True),
        (128, 256): Blocks(16, 64, 8, 1, True),
    },
}
# Float32 products run without tensor cores and keep their operands in registers: chosen with Triton 3.6 for few spilled bytes
# (none for V1 with d=64 on sm_90); Triton 3.9 spills up to 5 KB.
FORWARD_32 = {(64, 128): Blocks(32, 32, 8, 1, False), (128, 256): Blocks(16, 32, 8, 1, False)}
BACKWARD_32 = {(64, 64): Blocks(32, 32, 8, 1, False), (128, 256): Blocks(16, 32, 8, 1, False)}


def table(d: int, dv: int, dtype: torch.dtype, backward: bool, card: tuple[int, int]) -> Blocks | None:
    """The tile for keys of width d and values of width dv on a card of compute capability `card`; None where none fits."""
    if card < (8, 0) or card[0] == 10:  # on 10.x Triton miscompiles two products into one sum (triton-lang/triton#10821)
        return None
    whole, half = (BACKWARD_32, BACKWARD_16) if backward else (FORWARD_32, FORWARD_16)
    rows = whole if dtype == torch.float32 else half["sm_90" if card[0] == 9 else "sm_80"]
    return next((tile for (widest, widest_v), tile in rows.items() if d <= widest and dv <= widest_v), None)


def unfit(d: int, dv: int, dtype: torch.dtype, card: tuple[int, int]) -> str | None:
    """Why no tile of forward and backward fits a card, in one line that names the backend to use; None where both fit."""
    if all(table(d, dv, dtype, backward, card) for backward in (False, True)):
        return None
    if card[0] == 10:
        return f"Triton miscompiles the fused backend for compute capability {card[0]}.{card[1]}: use model.backend=sdpa"
    what = f"d={d}, dv={dv}, {str(dtype).removeprefix('torch.')}"
    return f"no tile of the fused backend fits compute capability {card[0]}.{card[1]} at {what}: use model.backend=sdpa"


def blocks(device: torch.device, d: int, dv: int, dtype: torch.dtype, backward: bool) -> Blocks:
    """The table's tile; in the interpreter a large tile, because its time grows with the number of tiles."""
    if interpreted():
        return Blocks(64, 128, 1, 1, True) if backward else Blocks(128, 64, 1, 1, False)
    return table(d, dv, dtype, backward, capability(device))


def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _pad(width: int) -> int:
    """The block that holds a head width: a power of two, at least 16, the smallest width of a tensor-core product."""
    return max(16, 1 << (width - 1).bit_length())


def _unit(x: Tensor) -> Tensor:
    """x, copied unless its last stride is 1 and its row stride is so small that a tile's offsets fit 32 bits."""
    return x if x.stride(-1) == 1 and x.stride(-2) < 2**23 else x.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:-1]]


def _empty(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `_forward` fills. out and O2 have heads inside time, so that merging the heads copies nothing."""
    B, h, _, T, _ = q.shape
    out, second = (v.new_empty(B, T, h, v.shape[-1]).transpose(1, 2) for _ in range(2))
    return out, second, q.new_empty(B, h, 2, T, dtype=torch.float32)


def _options(q: Tensor, k: Tensor, v: Tensor, ids: Tensor | None, causal: bool, window: int | None) -> dict:
    d, dv = q.shape[-1], v.shape[-1]
    return {
        "CAUSAL": causal, "WINDOW": window is not None, "IDS": ids is not None, "SHARED": k.shape[2] == 1,
        "D": d, "DV": dv, "BD": _pad(d), "BV": _pad(dv),
    }  # fmt: skip


@torch.library.custom_op("diffattn::forward", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, O2, lse): (B, h, T, dv) twice and (B, h, 2, T) float32, base 2; lam (B, h, T, 1) float32."""
    _check(q, k, v)  # here and not in attend_diff, where torch.compile would trace it
    q, k, v = _unit(q), _unit(k), _unit(v)
    (B, h, _, T, d), S = q.shape, k.shape[3]
    out, second, lse = _empty(q, v)
    if out.numel() == 0:
        return out, second, lse
    tile = blocks(q.device, d, v.shape[-1], q.dtype, backward=False)
    with torch.cuda.device_of(q):
        forward_kernel[(triton.cdiv(T, tile.BM), h, B)](
            q, k, v, lam, query_ids, key_ids, out, second, lse, *_strides(q, k, v, lam, out),
            h // k.shape[1], T, S, S if window is None else min(window, S), d**-0.5 * math.log2(math.e),
            **_options(q, k, v, key_ids, causal, window), **tile._asdict(),
        )  # fmt: skip
    return out, second, lse


_forward.register_fake(lambda q, k, v, *rest: _empty(q, v))


@torch.library.custom_op("diffattn::backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    out: Tensor,
    second: Tensor,
    lse: Tensor,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, each like its input, and of lam (B, h, T, 1) float32."""
    grad, q, k, v = _unit(grad), _unit(q), _unit(k), _unit(v)
    assert out.stride() == second.stride()
    (B, h, _, T, d), (_, hkv, _, S, _), dv = q.shape, k.shape, v.shape[-1]
    delta = torch.empty_like(lse)  # (B, h, 2, T)
    dq = torch.zeros_like(q, dtype=torch.float32)
    if out.numel() == 0:
        return dq.to(q.dtype), torch.zeros_like(k), torch.zeros_like(v), torch.zeros_like(lam)
    dk, dvalue = torch.empty_like(k), torch.empty_like(v)
    tile = blocks(q.device, d, dv, q.dtype, backward=True)
    with torch.cuda.device_of(q):
        delta_kernel[(triton.cdiv(T, 64), h, B)](
            grad, out, second, lam, delta, *_strides(grad, out, lam), T, DV=dv, BM=64, BV=_pad(dv)
        )
        backward_kernel[(triton.cdiv(S, tile.BN), hkv, B)](
            q, k, v, lam, query_ids, key_ids, grad, lse, delta, dq, dk, dvalue,
            *_strides(q, k, v, lam, grad, dq, dk, dvalue),
            h // hkv, T, S, S if window is None else min(window, S), d**-0.5, d**-0.5 * math.log2(math.e),
            **_options(q, k, v, key_ids, causal, window), **tile._asdict(),
        )  # fmt: skip
    return dq.to(q.dtype), dk, dvalue, -delta[:, :, 1, :, None]


@_backward.register_fake
def _(grad, q, k, v, lam, query_ids, key_ids, out, second, lse, causal, window):  # noqa: ANN001, ANN202
    dq, dk, dv = (torch.empty_like(_unit(x)) for x in (q, k, v))
    return dq, dk, dv, lse.new_empty(*lse.shape[:2], lse.shape[3], 1)


def _setup_context(ctx, inputs: tuple, output: tuple) -> None:  # noqa: ANN001
    *tensors, ctx.causal, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # else torch fills gradients of these outputs with zeros in every backward pass


def _autograd(ctx, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN001
    inputs = ctx.saved_tensors
    if grad is None:  # nobody asks for a gradient through the output
        return (None,) * 8
    found = _backward(grad, *inputs, ctx.causal, ctx.window)
    return *first_derivatives_only((grad, *inputs[:4]), found), None, None, None, None


_forward.register_autograd(_autograd, setup_context=_setup_context)
