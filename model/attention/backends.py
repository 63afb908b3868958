"""Four attention operations, each of which a chosen backend computes. Variants call this file and never a kernel.

Operations: `attend` (softmax attention), `attend_diff` (the difference of two maps), `attend_union` (one softmax over several
key sets), `attend_map` (a map that a variant makes from the scores itself). Shapes: q (B, H, T, d), k (B, Hkv, S, d),
v (B, Hkv, S, dv), H a multiple of Hkv, dv free. Backends (auto: what `choose` picks; docs/METHODS.md):

- math: the N x N formulas of reference.py, for any shape and device.
- sdpa: torch's fused scaled_dot_product_attention (SDPA) by one of the next three routes, chosen by device and widths.
- one_call: both maps of a difference as 2h heads of one SDPA call; all widths are zero-padded to the widest.
- two_calls: one SDPA call for each map, padded on a CPU alone; one call for both where they share their keys (V2).
- four_calls: one SDPA call for each map and each half of the values, as in the differential paper's flash code.
- cpu: our C++ kernel (kernels/cpu.py), for the causal mask over as many keys as queries, without dropout, not in float16.
- flex: torch's FlexAttention (flex.py). On CUDA; on a CPU without gradients.
- fused: our Triton kernel for `attend_diff` (kernels/diff.py). On CUDA.

sdpa computes what cpu and fused cannot; flex, and fused for differences of maps, refuse masks that `needs_dense`. `attend_map`
runs the formulas.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..native import constant
from . import flex, probe, reference
from .kernels import cpu, unavailable
from .mask import EVERYTHING, Mask
from .sdpa import Union, card, dense, flash_takes, halves, in_line, one_query, padded, repeat, sdpa, widen

BACKENDS = ("auto", "math", "sdpa", "one_call", "two_calls", "four_calls", "cpu", "flex", "fused")
ROUTES = ("one_call", "two_calls", "four_calls")
ROWS = 256  # queries of which `attend_map` holds the weights at once
WIDEST_CUDNN = 128  # head width up to which cuDNN takes values of another width than the keys
NEW_CUDNN = 91501  # 9.15.1


def choose(capability: tuple[int, int] | None, dtype: torch.dtype, d: int, dv: int, mask: Mask, T: int, S: int) -> str:
    """The backend that `auto` takes on a card of this CUDA compute capability (None: a CPU), without dropout.

    The cuDNN kernel, which torch tries first on 9.x and 10.x if cuDNN is newer than 9.15.0 (PyTorch's sdp_utils.cpp), takes
    dv != d up to a width of 128 if both are multiples of 8; flash attention needs dv = d; a dense mask costs T x S memory and
    skips no blocks, so windows, documents and padding go to FlexAttention. Timed in docs/results/gpu.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    if capability is None:
        return "cpu" if mask.plain and T == S and dtype in cpu.KINDS and not cpu.missing() else "one_call"
    masked = mask.limited and not mask.needs_dense
    if masked and T == S and T % flex.BLOCK == 0 and min(d, dv) >= flex.NARROWEST and max(d, dv) <= flex.WIDEST:
        return "flex"
    cudnn = capability[0] in (9, 10) and max(d, dv) <= WIDEST_CUDNN and d % 8 == 0 and dv % 8 == 0 and not old_cudnn()
    if dv == d or not half or cudnn:
        return "two_calls"
    return "four_calls" if dv == 2 * d else "one_call"  # halves of 2d need no padding


@constant
def old_cudnn() -> bool:
    return (torch.backends.cudnn.version() or NEW_CUDNN) < NEW_CUDNN


def _chosen(backend: str, x: Tensor, d: int, dv: int, mask: Mask, T: int, S: int, dropout: float) -> str:
    """`backend`, or the choice in place of auto and sdpa. x: any tensor of the call, for device and dtype."""
    if probe.logits_visitor is not None:
        return "math"
    on_cpu = x.device.type == "cpu"
    if backend not in ("auto", "sdpa", "cpu") or (backend == "cpu" and on_cpu):
        if backend == "flex" and mask.needs_dense:
            _refuse_dense_masks(backend)
        return backend
    # With dropout, each half of the values would get another dropout mask, and the cpu kernel has no dropout.
    if dropout or (backend == "sdpa" and on_cpu):
        return "one_call"
    # Some masks ask for flex. A named sdpa never becomes flex, so it is chosen as if there were no mask.
    considered = mask if backend == "auto" else EVERYTHING
    return choose(None if on_cpu else card(), x.dtype, d, dv, considered, T, S)


def prepare_block_mask(x: Tensor, d: int, dv: int, mask: Mask, backend: str, dropout: float = 0.0, sets: int = 1) -> None:
    """Make the block mask that `mask` keeps for all layers: torch.compile cannot make it inside activation checkpointing."""
    B, T = x.shape[:2]
    if T > 1 and _chosen(backend, x, d, dv, mask, T, T, dropout) == "flex":
        flex.block_mask(mask, B, T, T, sets, x.device)


def check_backend(backend: str, d: int, dv: int, dropout: float, maps: int = 1, dense: bool = False) -> None:
    """ValueError unless `backend` can serve these heads and `maps` per head, as far as this is known without a device."""
    if dense and (backend == "flex" or (backend == "fused" and maps == 2)):
        _refuse_dense_masks(backend)
    if dropout and backend in ("flex", "fused", "four_calls"):
        raise ValueError(f"backend={backend} has no attention dropout: use backend=sdpa or attention_dropout=0")
    why = unavailable(d, dv) if backend == "fused" and maps == 2 else cpu.missing() if backend == "cpu" else None
    if why:
        raise ValueError(why)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, backend: str = "auto", dropout: float = 0.0) -> Tensor:
    """softmax(q k' / sqrt(d)) v: (B, H, T, d) -> (B, H, T, dv). dropout: of the map's weights."""
    return attend_union(q, [k], [v], mask, backend, dropout)


def attend_diff(
    q: Tensor, k: Tensor, v: Tensor, lam: Tensor, mask: Mask, backend: str = "auto", dropout: float = 0.0
) -> Tensor:
    """(softmax(q1 k1' / sqrt(d)) - lam softmax(q2 k2' / sqrt(d))) v, the difference of two maps per head.

    q (B, h, 2, T, d); k (B, hkv, 2, S, d), or (B, hkv, 1, S, d) where both maps share their keys; v (B, hkv, S, dv);
    lam broadcasts to (B, h, T, 1). Returns (B, h, T, dv). Differential Transformer, arXiv 2410.05258, equation 1.
    """
    h, T = q.shape[1], q.shape[-2]
    mask.check(q, k)
    decoding = T == 1 and not mask.needs_dense  # one query, which reads the keys in place
    named, backend = backend, _chosen(backend, q, q.shape[-1], v.shape[-1], mask, T, k.shape[-2], dropout)
    if probe.active is not None:
        first, second = _probe_rows(q, repeat(k, h).expand(-1, -1, 2, -1, -1), mask).unbind(2)  # (B, h, R, S) each
        by_row = lam.dim() > 1 and lam.shape[-2] > 1  # lam depends on the token
        lam_rows = probe.gather_rows(lam, probe.active.rows, k.shape[-2]) if by_row else lam
        probe.active.record(first - lam_rows * second, (first, second))
    if backend == "fused":
        if mask.needs_dense:
            _refuse_dense_masks(backend)
        if k.shape[-2] < T:
            raise ValueError("backend=fused needs at least as many keys as queries: use backend=sdpa")
        from .kernels.diff import attend_diff as fused

        return fused(q, k, v, lam, mask)
    if backend == "math":
        k, v = repeat(k, h).expand(-1, -1, 2, -1, -1), repeat(v, h)  # (B, h, 2, S, d), (B, h, S, dv)
        see, bias = dense(mask, q, k)
        return reference.attend_diff(q, k, v, lam, see, dropout, bias)
    if decoding and k.shape[2] == 1:
        first, second = one_query(q, k.squeeze(2), v, mask, dropout).unbind(2)  # (B, h, 1, dv) each
    elif decoding and q.device.type != "cpu":
        first, second = (one_query(q[:, :, c], k[:, :, c], v, mask, dropout) for c in (0, 1))
    elif decoding and named in ("auto", "cpu") and not dropout:
        return _last_row(q, k, v, lam, None if mask.plain else mask.dense(T, k.shape[-2], q.device))
    elif backend == "flex":
        first, second = (flex.attend(q[:, :, c], k[:, :, c % k.shape[2]], v, mask) for c in (0, 1))
    elif _in_kernel(backend, q, k, v, mask, dropout):
        return cpu.attend_diff(q, k, v, lam)
    elif backend == "two_calls" and k.shape[2] == 1:  # one call, in which the two maps are query heads that share their keys
        first, second = sdpa(q.flatten(1, 2), k.squeeze(2), v, mask, dropout=dropout).unflatten(1, (h, 2)).unbind(2)
    elif backend in ("two_calls", "four_calls"):
        call = sdpa if backend == "two_calls" else halves
        first, second = (call(q[:, :, c], k[:, :, c % k.shape[2]], v, mask, dropout=dropout) for c in (0, 1))
    else:
        first, second = _both_maps(q, k, v, mask, dropout)
    return _subtract(first, lam, second)


def _both_maps(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> tuple[Tensor, Tensor]:
    """The two maps' outputs (B, h, T, dv) from one call over 2h heads: on a CPU, SDPA's fast kernel takes no dv > d."""
    h = q.shape[1]
    k, v = repeat(k, h).expand(-1, -1, 2, -1, -1), repeat(v, h)  # (B, h, 2, S, d), (B, h, S, dv)
    both = padded(q.flatten(1, 2), k.flatten(1, 2), v.repeat_interleave(2, dim=1), mask, dropout)  # (B, 2h, T, dv)
    return both.unflatten(1, (h, 2)).unbind(2)


def attend_union(
    q: Tensor, keys: list[Tensor], values: list[Tensor], mask: Mask, backend: str = "auto", dropout: float = 0.0
) -> Tensor:
    """One softmax over the union of several key sets, each at positions 0..S-1 under one mask: (B, H, T, dv).

    keys[j] (B, Hkv, S, d) and values[j] (B, Hkv, S, dv). A probe sees the mass summed over the sets.
    """
    n, T, S = len(keys), q.shape[-2], keys[0].shape[-2]
    mask.check(q, keys[0])
    backend = _chosen(backend, q, q.shape[-1], values[0].shape[-1], mask, T, S, dropout)
    if probe.active is not None:
        rows = _probe_rows(q, repeat(_joined(keys), q.shape[1]), mask, sets=n)  # (B, H, R, n S)
        probe.active.record(rows.unflatten(-1, (n, S)).sum(-2))
    if backend != "math" and T == 1 and not mask.needs_dense and (n == 1 or q.device.type != "cpu"):
        return one_query(q, _joined(keys), _joined(values), mask, dropout, sets=n)
    if backend == "flex":
        return flex.attend(q, _joined(keys), _joined(values), mask, sets=n)
    if _in_kernel(backend, q, keys[0], values[0], mask, dropout):
        return cpu.attend(q, keys, values)
    if backend != "math" and n == 1:
        call = {"one_call": padded, "four_calls": halves}.get(backend, sdpa)
        return call(q, keys[0], values[0], mask, dropout=dropout)
    keys, values = [repeat(k, q.shape[1]) for k in keys], [repeat(v, q.shape[1]) for v in values]
    width = values[0].shape[-1]
    widest = -(-max(q.shape[-1], width) // 8) * 8  # CUDA's flash kernel wants multiples of 8
    if backend != "math" and mask.plain and T == S > 0 and not dropout and flash_takes(q, widest):
        wide = [in_line(widen(x, widest)) for x in (q, *keys, *values)]
        return Union.apply(q.shape[-1] ** -0.5, *wide)[0][..., :width]
    see, bias = dense(mask, q, keys[0], sets=n)
    k, v = _joined(keys), _joined(values)  # (B, H, n S, d), (B, H, n S, dv)
    if backend == "math":
        return reference.attend(q, k, v, see, dropout, bias)
    return sdpa(q, k, v, mask, (see, bias), dropout)


def attend_map(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, normalize: reference.Normalize, backend: str = "auto", dropout: float = 0.0
) -> Tensor:
    """A v, whose weights A = normalize(q k' / sqrt(d) + bias, see) are those of `Attention.normalize`: (B, h, T, dv).

    q (B, h, T, d) and k (B, hkv, S, d), or q (B, h, m, T, d) and k (B, hkv, m, S, d) where `normalize` combines m maps per
    head. With backend=math all rows are computed at once; else ROWS at a time, and again in the backward pass.
    """
    h, T, S = q.shape[1], q.shape[-2], k.shape[-2]
    mask.check(q, k)
    if not S:
        return v.new_zeros(len(q), h, T, v.shape[-1])  # a maximum over no keys is an error
    k = repeat(k, h)

    def weights(q: Tensor, k: Tensor, at: Tensor) -> Tensor:
        return reference.weights(q, k, mask.allowed(at, S), mask.added(at, S), normalize)

    def of_rows(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        return reference.times_values(F.dropout(weights(q, k, at), dropout), repeat(v, h))

    positions = torch.arange(S - T, S, device=q.device)
    # torch.func's gradients refuse the hooks that checkpoint sets.
    whole = backend == "math" or T <= ROWS or probe.logits_visitor is not None or torch._C._are_functorch_transforms_active()
    if probe.active is not None:
        probe.active.check_keys(S)
        if whole:
            probe.active.record(probe.gather_rows(weights(q, k, positions), probe.active.rows, S))
        else:
            probe.active.record(_probe_rows(q, k, mask, normalize=normalize))
    if whole:
        return of_rows(q, k, v, positions)
    parts = zip(q.split(ROWS, -2), positions.split(ROWS), strict=True)
    return torch.cat([checkpoint(of_rows, rows, k, v, at, use_reentrant=False) for rows, at in parts], -2)


def _joined(sets: list[Tensor]) -> Tensor:
    return sets[0] if len(sets) == 1 else torch.cat(sets, dim=-2)


def _in_kernel(backend: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> bool:
    """Whether `backend` is cpu, and the C++ kernel computes this call. Of tensors of several dtypes SDPA takes care."""
    plain = mask.plain and not dropout and q.shape[-2] == k.shape[-2] > 0
    typed = q.dtype == k.dtype == v.dtype and q.dtype in cpu.KINDS
    return backend == "cpu" and q.device.type == "cpu" and plain and typed


def _refuse_dense_masks(backend: str) -> None:
    raise ValueError(
        f"backend={backend} takes softmax maps alone, no masks with `see` or `bias` and no ALiBi: use backend=sdpa"
    )


def _last_row(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, see: Tensor | None) -> Tensor:
    """`attend_diff` for T = 1 and k (B, hkv, 2, S, d), in float32 or better; see (1 or B, 1, 1, S): None for every key."""
    (B, h), (hkv, d), dtype = q.shape[:2], (k.shape[1], k.shape[-1]), v.dtype
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
        rows = q.reshape(B, hkv, h // hkv, 2, d).transpose(2, 3)  # (B, hkv, 2, h / hkv, d)
        scores = rows * d**-0.5 @ k.mT  # (B, hkv, 2, h / hkv, S)
        if see is not None:
            blind = ~see.any(-1, keepdim=True)  # as in reference.weights
            scores = scores.masked_fill(~(see | blind).unsqueeze(2), float("-inf"))
        first, second = scores.softmax(-1).unbind(2)  # (B, hkv, h / hkv, S) each
        lam = lam.expand(B, h, 1, 1).reshape(B, hkv, h // hkv, 1) if lam.dim() else lam
        out = (first - lam * second) @ v  # (B, hkv, h / hkv, dv)
        return (out if see is None else out.masked_fill(blind, 0.0)).reshape(B, h, 1, v.shape[-1]).to(dtype)


def _subtract(first: Tensor, lam: Tensor, second: Tensor) -> Tensor:
    """first - lam second, lam not rounded to the maps' precision."""
    return (first - (lam if lam.dim() else lam.view(1, 1)) * second).to(first.dtype)


def _probe_rows(q: Tensor, k: Tensor, mask: Mask, sets: int = 1, normalize: reference.Normalize = reference.softmax) -> Tensor:
    """The maps of the active probe's rows, (B, H, R, S) or (B, h, 2, R, S); `sets` key sets stand side by side in k."""
    rows, S = probe.active.rows.to(q.device), k.shape[-2] // sets
    probe.active.check_keys(S)
    see, bias = (x if x is None else x.repeat(1, 1, 1, sets) for x in (mask.allowed(rows, S), mask.added(rows, S)))
    return reference.weights(probe.gather_rows(q, rows, S).float(), k.float(), see, bias, normalize)
