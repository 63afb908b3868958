"""Three attention operations, each of which a chosen backend computes. Variants call this file and never a kernel.

Operations: `attend` (softmax attention), `attend_diff` (the difference of two maps), `attend_union` (one softmax over several
key sets). Shapes: q (B, H, T, d), k (B, Hkv, S, d), v (B, Hkv, S, dv), H a multiple of Hkv, dv free. Backends:

- math: the N x N formulas of reference.py, for any shape and device.
- sdpa: torch's fused scaled_dot_product_attention (SDPA). A difference of maps, and on CUDA every call, takes one of the next
  three routes, by device and widths.
- one_call: both maps as 2h heads of one SDPA call; all widths are zero-padded to the widest.
- two_calls: one SDPA call for each map, without padding; one call for both where they share their keys (V2).
- four_calls: one SDPA call for each map and each half of the values, as the differential paper's own flash code does where a
  kernel takes one width only (microsoft/unilm, Diff-Transformer).
- cpu: our C++ kernel on CPUs (kernels/cpu.py), for the causal mask over as many keys as queries, without dropout, not in
  float16. torch's SDPA computes all other calls, but for one query of two maps with keys of their own (V1), for which a few
  matrix products are faster.
- flex: torch's FlexAttention, which skips blocks that windows and documents hide (flex.py). On CUDA; on a CPU without
  gradients.
- fused: our Triton kernel for `attend_diff`, both maps in one pass (kernels/diff.py). On CUDA.
- auto: the backend that `choose` picks for the device, the widths and the mask.

For one map, one_call is one call with padded widths, two_calls one call without padding, four_calls one call for each half of
the values. fused computes only differences of maps, sdpa everything else. flex and fused refuse masks with `see`, `bias` or
slopes. For one query (decoding), every backend but math, and but fused for differences, reads the keys in place by SDPA (on a
CPU: V1 by a few matrix products), unless the mask has `see`, `bias` or slopes.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..first_derivative import once
from . import flex, probe, reference
from .kernels import cpu, unavailable
from .mask import EVERYTHING, Mask

BACKENDS = ("auto", "math", "sdpa", "one_call", "two_calls", "four_calls", "cpu", "flex", "fused")
ROUTES = ("one_call", "two_calls", "four_calls")
# SHORT: number of keys up to which a CPU's float32 flash kernel is faster than its bfloat16 kernel, in spite of the conversion
# (docs/LOG.md).
SHORT = 512
WIDEST_CUDNN = 128  # head width up to which cuDNN takes values of another width than the keys
NEW_CUDNN = 91501  # 9.15.1
WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # SDPA without cuDNN
WIDEST_FLASH = 256  # head width up to which CUDA's flash kernel takes a call, on cards from 8.0 on


def choose(card: tuple[int, int] | None, dtype: torch.dtype, d: int, dv: int, mask: Mask, T: int, S: int) -> str:
    """The backend that `auto` takes on CUDA compute capability `card` (None: a CPU), without dropout.

    All kernels are exact, and the choice follows their known limits. The cuDNN kernel, which torch tries first on 9.x and 10.x
    if cuDNN is newer than 9.15.0 (PyTorch's aten/src/ATen/native/transformers/cuda/sdp_utils.cpp), takes dv != d up to a width
    of 128 if both are multiples of 8; flash attention needs dv = d and pads both to a multiple of 8 itself; a dense mask costs
    T x S memory and skips no blocks, so windows, documents and padding go to FlexAttention. On an H200 the routes chosen so
    were within 1 % of the fastest from 8,192 tokens on; with 1,024 and 2,048 tokens `fused` was faster as a call alone, but not
    within a compiled model (docs/results/gpu/README.md).
    """
    half = dtype in (torch.bfloat16, torch.float16)
    if card is None:
        return "cpu" if mask.plain and T == S and dtype in cpu.KINDS and not cpu.missing() else "one_call"
    masked = not (mask.plain or mask.sees_everything or mask.needs_dense)
    if masked and T == S and T % flex.BLOCK == 0 and min(d, dv) >= flex.NARROWEST and max(d, dv) <= flex.WIDEST:
        return "flex"
    cudnn = card[0] in (9, 10) and max(d, dv) <= WIDEST_CUDNN and d % 8 == 0 and dv % 8 == 0 and not old_cudnn()
    if dv == d or not half or cudnn:
        return "two_calls"
    return "four_calls" if dv == 2 * d else "one_call"  # halves of 2d need no padding


def card() -> tuple[int, int] | None:
    """The CUDA compute capability of this machine's card, None without one; a constant for torch.compile."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def old_cudnn() -> bool:
    """Whether this machine's cuDNN is one whose attention torch does not try first; a constant for torch.compile."""
    return (torch.backends.cudnn.version() or NEW_CUDNN) < NEW_CUDNN


# As torch.compiler.assume_constant_result does; a call of that function would import torch._dynamo, which would add a second
# to the start of every command.
card._dynamo_marked_constant = old_cudnn._dynamo_marked_constant = True


def _chosen(backend: str, x: Tensor, d: int, dv: int, mask: Mask, T: int, S: int, dropout: float) -> str:
    """`backend`, or the choice in place of auto and sdpa; math if an evaluation visits the logits, which only math computes.

    x: any tensor of the call, for device and dtype.
    """
    if probe.logits_visitor is not None:
        return "math"
    on_cpu = x.device.type == "cpu"
    if backend not in ("auto", "sdpa", "cpu") or (backend == "cpu" and on_cpu):
        if backend == "flex" and mask.needs_dense:
            _refuse_dense_masks(backend)
        return backend
    # With dropout, each half of the values would get a dropout mask of its own, and the cpu kernel has no dropout.
    if dropout or (backend == "sdpa" and on_cpu):
        return "one_call"
    # Some masks ask for flex. A named sdpa never becomes flex, so it is chosen as if there were no mask.
    seen = mask if backend == "auto" else EVERYTHING
    where = None if on_cpu else card()
    return choose(where, x.dtype, d, dv, seen, T, S)


def prepare(x: Tensor, d: int, dv: int, mask: Mask, backend: str, dropout: float = 0.0, sets: int = 1) -> None:
    """Make what `mask` keeps for all layers, for self-attention of x (B, T, D) by these heads and `sets` key sets.

    Without this call the first layer makes it, which torch.compile does not allow inside of activation checkpointing.
    """
    B, T = x.shape[:2]
    if T > 1 and _chosen(backend, x, d, dv, mask, T, T, dropout) == "flex":
        flex.block_mask(mask, B, T, T, sets, x.device)


def check_backend(backend: str, d: int, dv: int, dropout: float, maps: int = 1, alibi: bool = False) -> None:
    """ValueError unless `backend` can serve heads of width d with values of width dv, as far as this is known without a device.

    maps: 2 for a difference of maps.
    """
    if alibi and (backend == "flex" or (backend == "fused" and maps == 2)):
        _refuse_dense_masks(backend)
    if dropout and backend in ("flex", "fused", "four_calls"):
        raise ValueError(f"backend={backend} has no attention dropout: use model.backend=sdpa or model.attention_dropout=0")
    if backend == "fused" and maps == 2 and (why := unavailable(d, dv)):
        raise ValueError(why)
    if backend == "cpu" and (why := cpu.missing()):
        raise ValueError(why)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, backend: str = "auto", dropout: float = 0.0) -> Tensor:
    """softmax(q k' / sqrt(d)) v: (B, H, T, d) -> (B, H, T, dv). dropout: of the map's weights."""
    return attend_union(q, [k], [v], mask, backend, dropout)


def attend_diff(
    q: Tensor, k: Tensor, v: Tensor, lam: Tensor, mask: Mask, backend: str = "auto", dropout: float = 0.0
) -> Tensor:
    """(softmax(q1 k1' / sqrt(d)) - lam softmax(q2 k2' / sqrt(d))) v, the difference of two maps per head.

    q (B, h, 2, T, d); k (B, hkv, 2, S, d), or (B, hkv, 1, S, d) where both maps share their keys; v (B, hkv, S, dv);
    lam broadcasts to (B, h, T, 1). dropout: of each map, independently. Returns (B, h, T, dv). Differential Transformer,
    arXiv 2410.05258, equation 1.
    """
    h, T = q.shape[1], q.shape[-2]
    mask.check(q, k)
    last = backend in ("auto", "cpu") and q.device.type == "cpu" and T == 1 and not (dropout or mask.needs_dense)
    backend = _chosen(backend, q, q.shape[-1], v.shape[-1], mask, T, k.shape[-2], dropout)
    if probe.active is not None:
        first, second = _probe_rows(q, _repeat(k, h).expand(-1, -1, 2, -1, -1), mask).unbind(2)  # (B, h, R, S) each
        by_row = lam.dim() > 1 and lam.shape[-2] > 1  # lam depends on the token
        lam_rows = probe.gather_rows(lam, probe.active.rows, k.shape[-2]) if by_row else lam
        probe.active.record(first - lam_rows * second, (first, second))
    if backend == "fused":
        if mask.needs_dense:
            _refuse_dense_masks(backend)
        if k.shape[-2] < T:
            raise ValueError("backend=fused needs at least as many keys as queries: use model.backend=sdpa")
        from .kernels.diff import attend_diff as fused

        return fused(q, k, v, lam, mask)
    if backend == "math":
        k, v = _repeat(k, h).expand(-1, -1, 2, -1, -1), _repeat(v, h)  # (B, h, 2, S, d), (B, h, S, dv)
        see, bias = _dense(mask, q, k)
        return reference.attend_diff(q, k, v, lam, see, dropout, bias)
    if T == 1 and k.shape[2] == 1 and not mask.needs_dense:
        first, second = _one_query(q, k.squeeze(2), v, mask, dropout).unbind(2)  # (B, h, 1, dv) each
    elif last:
        return _last_row(q, k, v, lam, None if mask.plain else mask.dense(T, k.shape[-2], q.device))
    elif T == 1 and not mask.needs_dense and q.device.type != "cpu":
        first, second = (_one_query(q[:, :, c], k[:, :, c], v, mask, dropout) for c in (0, 1))
    elif backend == "flex":
        first, second = (flex.attend(q[:, :, c], k[:, :, c % k.shape[2]], v, mask) for c in (0, 1))
    elif _in_kernel(backend, q, k, v, mask, dropout):
        return cpu.attend_diff(q, k, v, lam)
    elif backend == "two_calls" and k.shape[2] == 1:  # one call, in which the two maps are query heads that share their keys
        first, second = _sdpa(q.flatten(1, 2), k.squeeze(2), v, mask, dropout=dropout).unflatten(1, (h, 2)).unbind(2)
    elif backend in ("two_calls", "four_calls"):
        call = _sdpa if backend == "two_calls" else _halves
        first, second = (call(q[:, :, c], k[:, :, c % k.shape[2]], v, mask, dropout=dropout) for c in (0, 1))
    else:
        first, second = _both_maps(q, k, v, mask, dropout)
    return _subtract(first, lam, second)


def _both_maps(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> tuple[Tensor, Tensor]:
    """The two maps' outputs (B, h, T, dv) from one call over 2h heads, all widths zero-padded to the widest.

    On a CPU two calls with dv > d would not use SDPA's fast kernel.
    """
    h = q.shape[1]
    k, v = _repeat(k, h).expand(-1, -1, 2, -1, -1), _repeat(v, h)  # (B, h, 2, S, d), (B, h, S, dv)
    both = _padded(q.flatten(1, 2), k.flatten(1, 2), v.repeat_interleave(2, dim=1), mask, dropout)  # (B, 2h, T, dv)
    return both.unflatten(1, (h, 2)).unbind(2)


def attend_union(
    q: Tensor, keys: list[Tensor], values: list[Tensor], mask: Mask, backend: str = "auto", dropout: float = 0.0
) -> Tensor:
    """One softmax over the union of several key sets, each with its own positions 0..S-1: (B, H, T, dv).

    keys[j] (B, Hkv, S, d) and values[j] (B, Hkv, S, dv) all have the same shape; query t sees position s of every set by
    the same mask. A probe sees the mass summed over the sets.
    """
    n, T, S = len(keys), q.shape[-2], keys[0].shape[-2]
    mask.check(q, keys[0])
    backend = _chosen(backend, q, q.shape[-1], values[0].shape[-1], mask, T, S, dropout)
    if probe.active is not None:
        rows = _probe_rows(q, _repeat(_joined(keys), q.shape[1]), mask, sets=n)  # (B, H, R, n S)
        probe.active.record(rows.unflatten(-1, (n, S)).sum(-2))
    if backend != "math" and T == 1 and not mask.needs_dense and (n == 1 or q.device.type != "cpu"):
        return _one_query(q, _joined(keys), _joined(values), mask, dropout, sets=n)
    if backend == "flex":
        return flex.attend(q, _joined(keys), _joined(values), mask, sets=n)
    if _in_kernel(backend, q, keys[0], values[0], mask, dropout):
        return cpu.attend(q, keys, values)
    if backend != "math" and n == 1:
        call = {"one_call": _padded, "four_calls": _halves}.get(backend, _sdpa)
        return call(q, keys[0], values[0], mask, dropout=dropout)
    keys, values = [_repeat(k, q.shape[1]) for k in keys], [_repeat(v, q.shape[1]) for v in values]
    width = values[0].shape[-1]
    widest = -(-max(q.shape[-1], width) // 8) * 8  # CUDA's flash kernel wants multiples of 8
    if backend != "math" and mask.plain and T == S > 0 and not dropout and _flash_takes(q, widest):
        padded = [_in_line(_widen(x, widest)) for x in (q, *keys, *values)]
        return _Union.apply(q.shape[-1] ** -0.5, *padded)[0][..., :width]
    see, bias = _dense(mask, q, keys[0], sets=n)
    k, v = _joined(keys), _joined(values)  # (B, H, n S, d), (B, H, n S, dv)
    if backend == "math":
        return reference.attend(q, k, v, see, dropout, bias)
    return _sdpa(q, k, v, mask, see, dropout, bias=bias)


def _joined(sets: list[Tensor]) -> Tensor:
    """Keys or values (B, H, S, d) of n sets side by side: (B, H, n S, d)."""
    return sets[0] if len(sets) == 1 else torch.cat(sets, dim=-2)


def _in_kernel(backend: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> bool:
    """Whether `backend` is cpu, and the C++ kernel computes this call. Of tensors of several dtypes SDPA takes care."""
    plain = mask.plain and not dropout and q.shape[-2] == k.shape[-2] > 0
    typed = q.dtype == k.dtype == v.dtype and q.dtype in cpu.KINDS
    return backend == "cpu" and q.device.type == "cpu" and plain and typed


def _refuse_dense_masks(backend: str) -> None:
    wrong = f"backend={backend} takes causal, window, document and padding masks, and no other masks or bias (ALiBi)"
    raise ValueError(f"{wrong}: use model.backend=sdpa (in Python: backend='sdpa')")


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    see: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """torch's fused kernel; `see` and `bias` replace the mask's own dense form, `scale` replaces 1 / sqrt(d).

    CPU: all widths are zero-padded to the widest, and keys are repeated for the queries of a group. CUDA: widths stay as they
    are, and the flash and cuDNN kernels share keys inside the kernel; the memory-efficient kernel cannot share them.
    """
    T, S, width, scale = q.shape[-2], k.shape[-2], v.shape[-1], scale or q.shape[-1] ** -0.5
    if q.device.type == "cpu":
        if q.dtype == torch.bfloat16 and S <= SHORT:
            with torch.autocast("cpu", enabled=False):
                return _sdpa(q.float(), k.float(), v.float(), mask, see, dropout, scale, bias).to(q.dtype)
        q, k, v = (_widen(x, max(q.shape[-1], width)) for x in (q, k, v))
    # A single query has the last position and sees every key.
    unmasked = see is None and (mask.sees_everything or (mask.plain and (T == S or T == 1)))
    options = {"scale": scale, "dropout_p": dropout}
    if unmasked and q.device.type != "cpu" and q.dtype != torch.float32:
        options["enable_gqa"] = k.shape[1] != q.shape[1]
    else:
        k, v = _repeat(k, q.shape[1]), _repeat(v, q.shape[1])
    if unmasked:
        if mask.causal and T > 1:  # not is_causal=T > 1: with a symbolic T that is a SymBool, which torch refuses
            options["is_causal"] = True
        return F.scaled_dot_product_attention(q, k, v, **options)[..., :width]
    if see is None:
        see, bias = _dense(mask, q, k)
    see = _spread(see, q)
    blind = ~see.any(-1, keepdim=True)  # as in reference.weights
    shown = see | blind
    if bias is not None:
        shown = _spread(bias, q).to(q.dtype).masked_fill(~shown, float("-inf"))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=shown, **options)[..., :width]
    return out.masked_fill(blind, 0.0)


def _padded(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float = 0.0) -> Tensor:
    """`_sdpa` with all widths zero-padded to the widest: CUDA's flash kernel takes one width only."""
    scale, width, widest = q.shape[-1] ** -0.5, v.shape[-1], max(q.shape[-1], v.shape[-1])
    q, k, v = (_widen(x, widest) for x in (q, k, v))
    return _sdpa(q, k, v, mask, dropout=dropout, scale=scale)[..., :width]


def _halves(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float = 0.0) -> Tensor:
    """`_sdpa` once for each half of the values' width."""
    return torch.cat([_sdpa(q, k, part, mask, dropout=dropout) for part in v.chunk(2, -1)], -1)


def _one_query(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float, sets: int = 1) -> Tensor:
    """`attend` for T = 1, as in decoding: q (B, ..., 1, d), keys and values shared by the query heads of a group.

    `sets` key sets stand side by side in k and v. Query heads that share keys are rows of one call, which
    reads keys and values in place: repeating them for every query head would copy the whole cache at each token.
    """
    rows = q.flatten(1, -2).unflatten(1, (k.shape[1], -1))  # (B, Hkv, rows, d)
    # see: (1 or B, 1, 1, S)
    see = None if mask.plain else mask.dense(1, k.shape[-2] // sets, q.device).repeat(1, 1, 1, sets)
    # cuDNN would make a plan for every number of keys, that is for every new token.
    with sdpa_kernel(WITHOUT_PLANS) if q.is_cuda else nullcontext():
        return _sdpa(rows, k, v, EVERYTHING, see, dropout).reshape(*q.shape[:-1], v.shape[-1])


def _last_row(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, see: Tensor | None) -> Tensor:
    """`attend_diff` for T = 1 and maps with keys of their own: q (B, h, 2, 1, d), k (B, hkv, 2, S, d), v (B, hkv, S, dv).

    see (1 or B, 1, 1, S): None if the query sees every key. Returns (B, h, 1, dv), computed in float32 or better. As in
    `_one_query`, query heads that share keys are rows of one call.
    """
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
    """first - lam second, lam (..., T or 1, 1) or () not rounded to the maps' precision."""
    return (first - (lam if lam.dim() else lam.view(1, 1)) * second).to(first.dtype)


def _dense(mask: Mask, q: Tensor, k: Tensor, sets: int = 1) -> tuple[Tensor, Tensor | None]:
    """What q sees of `sets` key sets like k side by side, and the bias to add: (1 or B, 1 or heads, T, sets S) each."""
    T, S = q.shape[-2], k.shape[-2]
    see, bias = mask.dense(T, S, q.device), mask.added(torch.arange(S - T, S, device=q.device), S)
    if sets > 1:
        see, bias = see.repeat(1, 1, 1, sets), None if bias is None else bias.repeat(1, 1, 1, sets)
    return see, bias


def _spread(x: Tensor, q: Tensor) -> Tensor:
    """A mask's dense form for the maps of q (B, maps, T, d): adjacent maps belong to one head and share its mask."""
    return x if x.shape[1] in (1, q.shape[1]) else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _probe_rows(q: Tensor, k: Tensor, mask: Mask, sets: int = 1) -> Tensor:
    """The maps of the active probe's rows, (B, H, R, S) or (B, h, 2, R, S); `sets` key sets stand side by side in k."""
    rows, S = probe.active.rows.to(q.device), k.shape[-2] // sets
    probe.active.check_keys(S)
    see, bias = (x if x is None else x.repeat(1, 1, 1, sets) for x in (mask.allowed(rows, S), mask.added(rows, S)))
    see, bias = (x if x is None or q.dim() == 4 else x.unsqueeze(2) for x in (see, bias))
    return reference.weights(probe.gather_rows(q, rows, S).float(), k.float(), see, bias)


def _repeat(x: Tensor, heads: int) -> Tensor:
    """Grouped-query attention: repeat each key/value head (dimension 1) for the queries of its group."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _widen(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] >= width else F.pad(x, (0, width - x.shape[-1]))


def _in_line(x: Tensor) -> Tensor:
    """The flash operators assume a last stride of 1: on a CPU another stride gives wrong results without an error."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _Union(torch.autograd.Function):
    """Causal attention over several key sets as a log-sum-exp merge of one flash call per set.

    With lse the log-sum-exp over all sets and out the merged output, the probabilities of set j are
    exp(q k_j' - lse), so each set's flash backward, given the merged out and lse, returns the exact gradient.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(scale: float, q: Tensor, *sets: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = sets[: len(sets) // 2], sets[len(sets) // 2 :]
        parts = [_flash(q, k, v, scale) for k, v in zip(keys, values, strict=True)]
        lses = torch.stack([lse for _, lse in parts])  # (n, B, H, T) float32
        lse = lses.logsumexp(0)
        shares = (lses - lse).exp().unsqueeze(-1)  # (n, B, H, T, 1)
        return sum(share * part for share, (part, _) in zip(shares, parts, strict=True)).to(q.dtype), lse

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN001
        ctx.scale, *tensors = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN001
        grad = _in_line(grad)
        q, *sets, out, lse = ctx.saved_tensors
        keys, values = sets[: len(sets) // 2], sets[len(sets) // 2 :]
        grads = [_flash_backward(grad, q, k, v, out, lse, ctx.scale) for k, v in zip(keys, values, strict=True)]
        dq, dk, dv = zip(*grads, strict=True)
        return None, *once((grad, q, *sets), (sum(dq), *dk, *dv))


def _flash_takes(q: Tensor, width: int) -> bool:
    """Whether `_flash` takes q at this width; on CUDA it has none of the checks that SDPA makes before it calls flash."""
    if q.device.type == "cpu":
        return True
    here = card() or (0, 0)
    # Flash's backward pass takes widths from 200 to 224 only on cards with the shared memory of an A100 or H100.
    if 192 < width <= 224 and ((8, 6) <= here <= (8, 9) or here[0] == 12):
        return False
    return q.dtype in (torch.bfloat16, torch.float16) and width <= WIDEST_FLASH and here >= (8, 0)


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal flash attention and the log-sum-exp (B, H, T) of its rows."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)[:2]


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, given an output and a log-sum-exp that may come from more keys than these."""
    aten = torch.ops.aten
    if q.device.type == "cpu":
        lse = lse.transpose(1, 2).contiguous().transpose(1, 2)  # the layout the forward op returns
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, True, scale=scale)
    seed = torch.zeros((), dtype=torch.uint64, device=q.device)  # the seed of a dropout of 0
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[-2], k.shape[-2], 0.0, True, seed, seed, scale=scale
    )
