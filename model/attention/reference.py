"""The N x N formulas, plain and slow, in float32 or better: what every other backend must agree with.

Shapes as in backends.py, key/value heads already repeated to the number of query heads.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from . import probe

Normalize = Callable[[Tensor, Tensor], Tensor]  # (scores, see) -> a map's weights: `Attention.normalize`


def softmax(scores: Tensor, see: Tensor) -> Tensor:
    return scores.softmax(-1)


def weights(q: Tensor, k: Tensor, see: Tensor, bias: Tensor | None = None, normalize: Normalize = softmax) -> Tensor:
    """normalize(q k' / sqrt(d) + bias) over the keys that `see` allows, (..., T, S); rows that see no key are zero."""
    if q.dim() == 5:  # all maps of a head share its mask
        see, bias = see.unsqueeze(2), None if bias is None else bias.unsqueeze(2)
    with torch.autocast(q.device.type, enabled=False):
        scores = (_exact(q) @ _exact(k).mT) * q.shape[-1] ** -0.5
        scores = scores if bias is None else scores + bias
        if probe.logits_visitor is not None and (changed := probe.logits_visitor(scores, see)) is not None:
            scores = changed
        blind = ~see.any(-1, keepdim=True)
        # A row that sees no key gets all keys and is zeroed afterwards: softmax over no key is NaN, with a NaN gradient.
        maps = normalize(scores.masked_fill(~(see | blind), float("-inf")), see)
        return maps.masked_fill(blind if maps.dim() == scores.dim() else blind.squeeze(2), 0.0)


def attend(q: Tensor, k: Tensor, v: Tensor, see: Tensor, dropout: float = 0.0, bias: Tensor | None = None) -> Tensor:
    """Softmax attention: q (B, H, T, d), k (B, H, S, d), v (B, H, S, dv), see (1 or B, 1 or H, T, S) -> (B, H, T, dv)."""
    return times_values(F.dropout(weights(q, k, see, bias), dropout), v)


def attend_diff(
    q: Tensor, k: Tensor, v: Tensor, lam: Tensor, see: Tensor, dropout: float = 0.0, bias: Tensor | None = None
) -> Tensor:
    """Difference of two maps: q, k (B, h, 2, T or S, d), v (B, h, S, dv), lam (..., T or 1, 1) or () -> (B, h, T, dv)."""
    first, second = F.dropout(weights(q, k, see, bias), dropout).unbind(2)  # (B, h, T, S) each
    return times_values(first - lam * second, v)


def times_values(maps: Tensor, v: Tensor) -> Tensor:
    """maps (..., T, S) v (..., S, dv), in the values' dtype."""
    with torch.autocast(v.device.type, enabled=False):
        return (maps @ _exact(v)).to(v.dtype)


def _exact(x: Tensor) -> Tensor:
    """In float32 or better: half precision rounds only inputs and outputs; TF32, where allowed, products."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
