"""The facade: variants hand over queries, keys, values and a mask; a named backend computes.

Three operations, each with every backend: `attend` (softmax attention), `attend_diff` (the difference of two maps), and
`attend_union` (one softmax over several key sets). Heads come before time: q is (B, H, T, d), k (B, Hkv, S, d),
v (B, Hkv, S, dv) with H a multiple of Hkv and dv free. Backends:

- math: the N x N formulas of reference.py, any shape and device.
- sdpa: torch's fused scaled_dot_product_attention.
- blocked: the formula of `attend_diff` over blocks of query rows, for the causal mask on CPUs (blocked.py). Plain softmax
  attention and other masks go to sdpa.
- flex: torch's FlexAttention, which skips blocks that windows and documents hide. CUDA; on a CPU forward only.
- fused: our Triton kernel for `attend_diff`, both maps in one pass (kernels/diff.py). CUDA. Plain softmax attention is
  fused in sdpa already and goes there.
- auto: sdpa, except that on a CPU differences of maps go to blocked up to 1,024 keys, where it was faster, forward and
  backward together (docs/LOG.md, 2026-11-20). On CUDA sdpa dispatches to flash attention; flex and fused wait for a
  measurement on a GPU before they are chosen for anybody.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from . import blocked, probe, reference
from .kernels import unavailable
from .mask import EVERYTHING, Mask

# Keys up to which a CPU is faster with its float32 flash kernel than with its bfloat16 one, in spite of the conversion,
# and up to which it is faster without, for differences of maps (docs/LOG.md, 2026-11-20).
SHORT, SHORT_DIFF = 512, 1024


def check_backend(backend: str, d: int, dv: int, dropout: float, maps: int = 1, bias: bool = False) -> None:
    """ValueError unless `backend` can serve heads of width d with values of width dv; maps: 2 for a difference of maps.

    bias: whether numbers are added to the scores, as ALiBi does.
    """
    if bias and (backend == "flex" or (backend == "fused" and maps == 2)):
        _refuse_free_masks(backend)
    if dropout and backend in ("flex", "fused"):
        raise ValueError(
            f"backend={backend} has no attention dropout: use model.backend=sdpa or model.attention_dropout=0"
        )
    if backend == "fused" and maps == 2 and (why := unavailable(d, dv)):
        raise ValueError(why)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, backend: str = "auto", dropout: float = 0.0) -> Tensor:
    """softmax(q k' / sqrt(d)) v: (B, H, T, d) -> (B, H, T, dv). dropout: of the map's weights."""
    mask.check(q, k)
    backend = _backend(backend)
    if probe.active is not None:
        probe.active.record(_probe_rows(q, _repeat(k, q.shape[1]), mask))
    if backend == "flex":
        return _flex(q, k, v, mask)
    if backend != "math" and q.shape[-2] == 1 and not mask.free:
        return _one_query(q, k, v, mask, dropout)
    k, v = _repeat(k, q.shape[1]), _repeat(v, q.shape[1])
    if backend == "math":
        return reference.attend(q, k, v, _see(mask, q, k), dropout, _bias(mask, q, k))
    return _sdpa(q, k, v, mask, dropout=dropout)


def attend_diff(
    q: Tensor, k: Tensor, v: Tensor, lam: Tensor, mask: Mask, backend: str = "auto", dropout: float = 0.0
) -> Tensor:
    """(softmax(q1 k1' / sqrt(d)) - lam softmax(q2 k2' / sqrt(d))) v, the difference of two maps per head.

    q (B, h, 2, T, d); k (B, hkv, 2, S, d), or (B, hkv, 1, S, d) where both maps share their keys; v (B, hkv, S, dv);
    lam broadcasts to (B, h, T, 1). dropout falls on each map by itself. Returns (B, h, T, dv). Differential Transformer,
    arXiv 2410.05258, equation 1.
    """
    h = q.shape[1]
    mask.check(q, k)
    backend = _backend(backend)
    if probe.active is not None:
        first, second = _probe_rows(q, _repeat(k, h).expand(-1, -1, 2, -1, -1), mask).unbind(2)  # (B, h, R, S) each
        probe.active.record(first - _lambda_rows(lam, k.shape[-2]) * second)
    if backend == "fused":
        from .kernels.diff import attend_diff as fused

        if mask.free:
            _refuse_free_masks(backend)
        return fused(q, k, v, lam, mask)
    if backend == "flex":
        first, second = (_flex(q[:, :, c], k[:, :, c if k.shape[2] == 2 else 0], v, mask) for c in (0, 1))
        return _subtract(first, lam, second)
    T, S = q.shape[-2], k.shape[-2]
    if backend != "math" and T == 1 and k.shape[2] == 1 and not mask.free:
        first, second = _one_query(q, k.squeeze(2), v, mask, dropout).unbind(2)  # (B, h, 1, dv) each
        return _subtract(first, lam, second)
    on_cpu = q.device.type == "cpu" and mask.plain and not dropout
    if backend in ("auto", "blocked") and on_cpu and T == 1:
        return blocked.last_row(q, k, v, lam)
    k, v = _repeat(k, h).expand(-1, -1, 2, -1, -1), _repeat(v, h)  # (B, h, 2, S, d), (B, h, S, dv)
    if backend == "math":
        return reference.attend_diff(q, k, v, lam, _see(mask, q, k), dropout, _bias(mask, q, k))
    if (backend == "blocked" or (backend == "auto" and S <= SHORT_DIFF)) and on_cpu and T == S > 0:
        return blocked.attend_diff(q, k, v, lam)
    # One call over 2h heads, q and k zero-padded to the width of v: two calls with dv > d leave SDPA's fast CPU kernel.
    both = _sdpa(
        q.flatten(1, 2), k.flatten(1, 2), v.repeat_interleave(2, dim=1), mask, dropout=dropout
    )  # (B, 2h, T, dv)
    first, second = both.unflatten(1, (h, 2)).unbind(2)
    return _subtract(first, lam, second)


def attend_union(
    q: Tensor, keys: list[Tensor], values: list[Tensor], mask: Mask, backend: str = "auto", dropout: float = 0.0
) -> Tensor:
    """One softmax over the union of several key sets, each with its own positions 0..S-1: (B, H, T, dv).

    keys[j] (B, Hkv, S, d) and values[j] (B, Hkv, S, dv) all have the same shape; query t sees position s of every set by
    the same mask. A probe sees the mass summed over the sets.
    """
    n, T, S = len(keys), q.shape[-2], keys[0].shape[-2]
    if n == 1:
        return attend(q, keys[0], values[0], mask, backend, dropout)
    mask.check(q, keys[0])
    backend = _backend(backend)
    if probe.active is not None:
        rows = _probe_rows(q, _repeat(torch.cat(keys, dim=-2), q.shape[1]), mask, sets=n)  # (B, H, R, n S)
        probe.active.record(rows.unflatten(-1, (n, S)).sum(-2))
    if backend == "flex":
        return _flex(q, torch.cat(keys, dim=-2), torch.cat(values, dim=-2), mask, sets=n)
    keys, values = [_repeat(k, q.shape[1]) for k in keys], [_repeat(v, q.shape[1]) for v in values]
    if backend == "math":
        return reference.attend_union(q, keys, values, _see(mask, q, keys[0]), dropout, _bias(mask, q, keys[0]))
    half = q.dtype in (torch.bfloat16, torch.float16)
    if mask.plain and T == S > 0 and not dropout and (q.device.type == "cpu" or half):
        width = values[0].shape[-1]
        widest = -(-max(q.shape[-1], width) // 8) * 8  # CUDA's flash kernel wants multiples of 8
        padded = [_in_line(_widen(x, widest)) for x in (q, *keys, *values)]
        return _Union.apply(q.shape[-1] ** -0.5, *padded)[0][..., :width]
    see, bias = _see(mask, q, keys[0]).repeat(1, 1, 1, n), _bias(mask, q, keys[0])
    bias = None if bias is None else bias.repeat(1, 1, 1, n)
    return _sdpa(q, torch.cat(keys, dim=-2), torch.cat(values, dim=-2), mask, see, dropout, bias)


def _backend(backend: str) -> str:
    """`backend`, or the one that has logits to show where an evaluation asks for them."""
    return backend if probe.logits_visitor is None else "math"


def _refuse_free_masks(backend: str) -> None:
    raise ValueError(f"backend={backend} has no masks of any shape and no bias (ALiBi): use model.backend=sdpa")


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    see: Tensor | None = None,
    dropout: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:
    """torch's fused kernel, all widths zero-padded to the widest; `see` and `bias` stand for the mask's own dense form."""
    T, S, scale, width = q.shape[-2], k.shape[-2], q.shape[-1] ** -0.5, v.shape[-1]
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and S <= SHORT:
        with torch.autocast("cpu", enabled=False):
            return _sdpa(q.float(), k.float(), v.float(), mask, see, dropout, bias).to(q.dtype)
    widest = max(q.shape[-1], width)
    q, k, v = _widen(q, widest), _widen(k, widest), _widen(v, widest)
    options = {"scale": scale, "dropout_p": dropout}
    if see is None and (mask.sees_everything or (mask.plain and T in (S, 1))):  # one query at the end sees every key
        if mask.causal and T > 1:  # a branch: as an expression, a symbolic length makes a SymBool, which torch refuses
            options["is_causal"] = True
        return F.scaled_dot_product_attention(q, k, v, **options)[..., :width]
    if see is None:
        see, bias = _see(mask, q, k), _bias(mask, q, k)  # (1 or B, 1 or heads, T, S)
    see = _spread(see, q)
    blind = ~see.any(-1, keepdim=True)  # as in reference.weights
    shown = see | blind
    if bias is not None:
        shown = _spread(bias, q).to(q.dtype).masked_fill(~shown, float("-inf"))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=shown, **options)[..., :width]
    return out.masked_fill(blind, 0.0)


def _one_query(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> Tensor:
    """`attend` for T = 1, as in decoding: q (B, ..., 1, d), keys and values shared by the query heads of a group.

    These see the same, so they are rows of one call, which reads the keys and values where they lie: repeated for every
    query head, the whole cache would be copied at each token.
    """
    rows = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])  # (B, Hkv, rows, d)
    see = None if mask.plain else _see(mask, q, k)  # (1 or B, 1, 1, S)
    return _sdpa(rows, k, v, EVERYTHING, see, dropout).reshape(*q.shape[:-1], -1)


def _subtract(first: Tensor, lam: Tensor, second: Tensor) -> Tensor:
    """first - lam second, lam (..., T or 1, 1) or () not rounded to the maps' precision."""
    return (first - (lam if lam.dim() else lam.view(1, 1)) * second).to(first.dtype)


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: Mask, sets: int = 1) -> Tensor:
    """FlexAttention, key and value heads shared inside the kernel; `sets` key sets stand side by side in k and v."""
    from torch.nn.attention.flex_attention import flex_attention

    if mask.free:
        _refuse_free_masks("flex")
    if q.device.type == "cpu":
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            raise ValueError("backend=flex has no backward on a CPU: use model.backend=sdpa")
        q, k, v = q.detach(), k.detach(), v.detach()  # it refuses leaves that want a gradient even where none is kept
    T, S = q.shape[-2], k.shape[-2] // sets
    if mask.documents is None and mask.keys is None:
        blocks = _static_blocks(mask.causal, mask.window, T, S, sets, q.device)
    else:
        blocks = _blocks(mask, q.shape[0], T, S, sets, q.device)
    kernel = flex_attention if q.device.type == "cpu" else _compiled_flex()
    out = kernel(q, k, v, block_mask=blocks, scale=q.shape[-1] ** -0.5, enable_gqa=q.shape[1] != k.shape[1])
    if mask.keys is None:
        return out
    return out.masked_fill(~_see(mask, q, k[..., :S, :]).any(-1, keepdim=True), 0.0)  # rows that see nothing


@lru_cache(maxsize=64)
def _static_blocks(causal: bool, window: int | None, T: int, S: int, sets: int, device: torch.device) -> object:
    return _blocks(Mask(causal, window), None, T, S, sets, device)


def _blocks(mask: Mask, B: int | None, T: int, S: int, sets: int, device: torch.device) -> object:
    """FlexAttention's BlockMask for the last T of S positions: a set's position s is key index j S + s."""
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        t, s = i + (S - T), j % S
        see = s <= t if mask.causal else s == s
        if mask.window is not None:
            see = see & ((s - t).abs() < mask.window)
        if mask.documents is not None:
            see = see & (mask.documents[b, t] == mask.documents[b, s])
        if mask.keys is not None:
            see = see & mask.keys[b, s]
        return see

    return create_block_mask(visible, B, None, T, S * sets, device=device)


@lru_cache(maxsize=1)
def _compiled_flex() -> object:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _see(mask: Mask, q: Tensor, k: Tensor) -> Tensor:
    return mask.dense(q.shape[-2], k.shape[-2], q.device)


def _bias(mask: Mask, q: Tensor, k: Tensor) -> Tensor | None:
    T, S = q.shape[-2], k.shape[-2]
    return mask.added(torch.arange(S - T, S, device=q.device), S) if mask.free else None


def _spread(x: Tensor, q: Tensor) -> Tensor:
    """A mask's dense form for the maps of q (B, maps, T, d): adjacent maps, of one head, share its rows."""
    return x if x.shape[1] in (1, q.shape[1]) else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _probe_rows(q: Tensor, k: Tensor, mask: Mask, sets: int = 1) -> Tensor:
    """The maps of the active probe's rows, (B, H, R, S) or (B, h, 2, R, S); `sets` key sets stand side by side in k."""
    rows, S = probe.active.rows.to(q.device), k.shape[-2] // sets
    see, bias = (x if x is None else x.repeat(1, 1, 1, sets) for x in (mask.allowed(rows, S), mask.added(rows, S)))
    see, bias = (x if x is None or q.dim() == 4 else x.unsqueeze(2) for x in (see, bias))
    return reference.weights(probe.gather_rows(q, rows, S).float(), k.float(), see, bias)


def _lambda_rows(lam: Tensor, S: int) -> Tensor:
    """lam at the probe's rows: as it is where it does not depend on the token."""
    return lam if lam.dim() < 2 or lam.shape[-2] == 1 else probe.gather_rows(lam, probe.active.rows, S)


def _repeat(x: Tensor, heads: int) -> Tensor:
    """Grouped-query attention: repeat each key/value head (dimension 1) for the queries of its group."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _widen(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] >= width else F.pad(x, (0, width - x.shape[-1]))


def _in_line(x: Tensor) -> Tensor:
    """The flash operators take a last stride of 1 for granted: others are silently wrong on a CPU."""
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
        return None, sum(dq), *dk, *dv


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
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, True, scale=scale
        )
    seed = torch.zeros((), dtype=torch.uint64, device=q.device)  # of the dropout that there is none of
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[-2], k.shape[-2], 0.0, True, seed, seed, scale=scale
    )
