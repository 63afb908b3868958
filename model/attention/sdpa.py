"""What torch's scaled_dot_product_attention (SDPA) and its flash operators need: widths, groups, masks, several key sets."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..native import constant, first_derivatives_only
from .mask import EVERYTHING, Mask

SHORT = 512  # keys up to which a CPU's float32 flash kernel, with the conversion, is faster than its bfloat16 kernel
WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # SDPA without cuDNN
Dense = tuple[Tensor, Tensor | None]  # a mask: what is seen, and what is added to the scores
WIDEST_FLASH = 256  # head width up to which CUDA's flash kernel takes a call, on cards from 8.0 on


@constant
def card() -> tuple[int, int] | None:
    """The CUDA compute capability of this machine's card, None without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, rules: Dense | None = None, dropout: float = 0.0, scale: float | None = None
) -> Tensor:
    """torch's SDPA: (B, H, T, dv). rules: (see, bias) in place of `dense(mask, q, k)`. scale: of scores, None: 1 / sqrt(d)."""
    T, S, width, scale = q.shape[-2], k.shape[-2], v.shape[-1], scale or q.shape[-1] ** -0.5
    if q.device.type == "cpu":
        if q.dtype == torch.bfloat16 and S <= SHORT:
            with torch.autocast("cpu", enabled=False):
                return sdpa(q.float(), k.float(), v.float(), mask, rules, dropout, scale).to(q.dtype)
        q, k, v = (widen(x, max(q.shape[-1], width)) for x in (q, k, v))
    # A single query has the last position and sees every key.
    unmasked = rules is None and not mask.limited and (not mask.causal or T == S or T == 1)
    options = {"scale": scale, "dropout_p": dropout}
    if unmasked and q.device.type != "cpu" and q.dtype != torch.float32:
        options["enable_gqa"] = k.shape[1] != q.shape[1]
    else:
        k, v = repeat(k, q.shape[1]), repeat(v, q.shape[1])
    if unmasked:
        if mask.causal and T > 1:  # not is_causal=T > 1: with a symbolic T that is a SymBool, which torch refuses
            options["is_causal"] = True
        return F.scaled_dot_product_attention(q, k, v, **options)[..., :width]
    see, bias = rules or dense(mask, q, k)
    see = spread(see, q)
    blind = ~see.any(-1, keepdim=True)  # as in reference.weights
    rule = see | blind
    if bias is not None:
        rule = spread(bias, q).to(q.dtype).masked_fill(~rule, float("-inf"))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=rule, **options)[..., :width]
    return out.masked_fill(blind, 0.0)


def padded(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float = 0.0) -> Tensor:
    """`sdpa` with all widths zero-padded to the widest: CUDA's flash kernel takes one width only."""
    wide = (widen(x, max(q.shape[-1], v.shape[-1])) for x in (q, k, v))
    return sdpa(*wide, mask, dropout=dropout, scale=q.shape[-1] ** -0.5)[..., : v.shape[-1]]


def halves(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float = 0.0) -> Tensor:
    """`sdpa` once for each half of the values' width."""
    return torch.cat([sdpa(q, k, part, mask, dropout=dropout) for part in v.chunk(2, -1)], -1)


def one_query(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float, sets: int = 1) -> Tensor:
    """`attend` for T = 1: query heads that share keys are rows of one call, which copies no cache. k holds `sets` key sets."""
    rows = q.flatten(1, -2).unflatten(1, (k.shape[1], -1))  # (B, Hkv, rows, d)
    # see: (1 or B, 1, 1, S)
    see = None if mask.plain else mask.dense(1, k.shape[-2] // sets, q.device).repeat(1, 1, 1, sets)
    # cuDNN would make a plan for every number of keys, that is for every new token.
    with sdpa_kernel(WITHOUT_PLANS) if q.is_cuda else nullcontext():
        return sdpa(rows, k, v, EVERYTHING, None if see is None else (see, None), dropout).reshape(*q.shape[:-1], v.shape[-1])


def dense(mask: Mask, q: Tensor, k: Tensor, sets: int = 1) -> Dense:
    """What q sees of `sets` key sets like k side by side, and the bias to add: (1 or B, 1 or heads, T, sets S) each."""
    T, S = q.shape[-2], k.shape[-2]
    see, bias = mask.dense(T, S, q.device), mask.added(torch.arange(S - T, S, device=q.device), S)
    if sets > 1:
        see, bias = see.repeat(1, 1, 1, sets), None if bias is None else bias.repeat(1, 1, 1, sets)
    return see, bias


def spread(x: Tensor, q: Tensor) -> Tensor:
    """A mask's dense form for the maps of q (B, maps, T, d), of which adjacent ones belong to one head."""
    return x if x.shape[1] in (1, q.shape[1]) else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def repeat(x: Tensor, heads: int) -> Tensor:
    """Grouped-query attention: repeat each key/value head (dimension 1) for the queries of its group."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def widen(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] >= width else F.pad(x, (0, width - x.shape[-1]))


def in_line(x: Tensor) -> Tensor:
    """x with a last stride of 1, as the flash operators need: on a CPU another one gives wrong results without an error."""
    return x if x.stride(-1) == 1 else x.contiguous()


class Union(torch.autograd.Function):
    """Causal attention over several key sets as a log-sum-exp merge of one flash call per set, with exact gradients."""

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
        grad = in_line(grad)
        q, *sets, out, lse = ctx.saved_tensors
        keys, values = sets[: len(sets) // 2], sets[len(sets) // 2 :]
        # The probabilities of set j are exp(q k_j' - lse), so its backward takes the merged output and lse.
        grads = [_flash_backward(grad, q, k, v, out, lse, ctx.scale) for k, v in zip(keys, values, strict=True)]
        dq, dk, dv = zip(*grads, strict=True)
        return None, *first_derivatives_only((grad, q, *sets), (sum(dq), *dk, *dv))


def flash_takes(q: Tensor, width: int) -> bool:
    """Whether `_flash`, which has none of SDPA's checks, takes q at this width."""
    if q.device.type == "cpu":
        return True
    major, minor = card() or (0, 0)
    here = 10 * major + minor  # torch 2.11 compiles no comparison of two tuples
    # Flash's backward pass takes widths from 200 to 224 only on cards with the shared memory of an A100 or H100.
    if 192 < width <= 224 and (86 <= here <= 89 or major == 12):
        return False
    return q.dtype in (torch.bfloat16, torch.float16) and width <= WIDEST_FLASH and here >= 80


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)[:2]


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    aten = torch.ops.aten
    if q.device.type == "cpu":
        lse = lse.transpose(1, 2).contiguous().transpose(1, 2)  # the layout the forward op returns
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, True, scale=scale)
    seed = torch.zeros((), dtype=torch.uint64, device=q.device)  # the seed of a dropout of 0
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[-2], k.shape[-2], 0.0, True, seed, seed, scale=scale
    )
