"""torch's FlexAttention with block masks kept in the `Mask` for all layers. It is imported late, because the import is slow."""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from .mask import Mask

BLOCK = 128  # FlexAttention skips blocks of this many queries and keys
SHAPES = 4096  # shapes for which an eager FlexAttention is compiled
LARGE = 2**26  # query-key pairs from which a block mask is compiled, too: eager, it takes about 10 bytes a pair
NARROWEST = 16  # narrowest heads for which torch compiles FlexAttention for CUDA
WIDEST = 128  # torch chooses tiles by the keys' width alone, and those of wider values may not fit (by its source; not tried)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, sets: int = 1) -> Tensor:
    """softmax(q k' / sqrt(d)) v, key and value heads shared inside the kernel; `sets` key sets stand side by side in k and v.

    q (B, H, T, d), k (B, Hkv, sets S, d), v (B, Hkv, sets S, dv) -> (B, H, T, dv). The mask has no `see`, bias or slopes.
    """
    from torch.nn.attention.flex_attention import flex_attention

    if q.device.type == "cpu":
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            raise ValueError("backend=flex has no backward on a CPU: use backend=sdpa")
        q, k, v = q.detach(), k.detach(), v.detach()  # flex_attention refuses requires_grad even under no_grad
    elif min(q.shape[-1], v.shape[-1]) < NARROWEST:
        raise ValueError(f"backend=flex takes heads from width {NARROWEST} on, on CUDA: use backend=sdpa")
    T, S = q.shape[-2], k.shape[-2] // sets
    blocks = block_mask(mask, q.shape[0], T, S, sets, q.device)
    eager = q.device.type != "cpu" and not torch.compiler.is_compiling()
    kernel = _compiled(flex_attention) if eager else flex_attention
    return kernel(q, k, v, block_mask=blocks, scale=q.shape[-1] ** -0.5, enable_gqa=q.shape[1] != k.shape[1])


def block_mask(mask: Mask, B: int, T: int, S: int, sets: int, device: torch.device) -> object:
    """The block mask that `mask` keeps, made once for all layers of a pass."""
    key = (T, S, sets, device)
    if key not in mask.block_masks:
        # A mask may be kept for many passes, and every decoded token has another S.
        for old in [old for old in mask.block_masks if old[:2] != (T, S)]:
            del mask.block_masks[old]
        mask.block_masks[key] = _blocks(mask, B, T, S, sets, device)
    return mask.block_masks[key]


def _blocks(mask: Mask, B: int, T: int, S: int, sets: int, device: torch.device) -> object:
    """FlexAttention's BlockMask; position s of set j is the key j S + s."""
    from torch.nn.attention.flex_attention import create_block_mask

    B = None if mask.documents is None and mask.keys is None else B
    large = (B or 1) * T * S * sets >= LARGE and not torch.compiler.is_compiling()
    make = _compiled(create_block_mask) if large else create_block_mask
    return make(lambda b, h, i, j: mask.visible(b, i + (S - T), j % S), B, None, T, S * sets, device=device)


@lru_cache
def _compiled(function: Callable) -> Callable:
    """Compiled for each shape: at torch's limit of 8 shapes FlexAttention would silently compute T x S maps instead."""
    many_shapes = torch._dynamo.config.patch(recompile_limit=SHAPES, accumulated_recompile_limit=SHAPES)
    return many_shapes(torch.compile(function, dynamic=False))
