"""The formulas over blocks of query rows, for causal attention on CPUs: keys that the mask hides are never multiplied.

At lengths where a block's scores fit the cache, torch's matrix products and softmax beat its flash kernel, and a difference
of maps is subtracted before its one product with the values (docs/LOG.md, 2026-11-20). Shapes as in reference.py; the
queries are all T positions. Memory: half the scores, T^2 / 2 per map, are kept for the backward.
"""

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention: q, k (B, H, T, d), v (B, H, T, dv) -> (B, H, T, dv)."""
    rows = [_maps(q, k, start, stop).to(v.dtype) @ v[..., :stop, :] for start, stop in _blocks(q.shape[-2])]
    return torch.cat(rows, dim=-2)


def attend_diff(q: Tensor, k: Tensor, v: Tensor, lam: Tensor) -> Tensor:
    """Causal difference of two maps: q, k (B, h, 2, T, d), v (B, h, T, dv), lam (..., T or 1, 1) or () -> (B, h, T, dv)."""
    rows = []
    for start, stop in _blocks(q.shape[-2]):
        first, second = _maps(q, k, start, stop).unbind(2)  # (B, h, stop - start, stop) each
        lam_rows = lam[..., start:stop, :] if lam.dim() > 1 and lam.shape[-2] > 1 else lam
        rows.append((first - lam_rows * second).to(v.dtype) @ v[..., :stop, :])
    return torch.cat(rows, dim=-2)


def _blocks(T: int) -> list[tuple[int, int]]:
    """[start, stop) of the blocks: 64 rows, 128 where there are many."""
    size = 64 if T <= 256 else 128
    return [(start, min(start + size, T)) for start in range(0, T, size)]


def _maps(q: Tensor, k: Tensor, start: int, stop: int) -> Tensor:
    """Softmax rows start..stop over the keys up to stop: (..., stop - start, stop), float32 or better."""
    scores = (q[..., start:stop, :] * q.shape[-1] ** -0.5) @ k[..., :stop, :].mT
    future = torch.ones(stop - start, stop - start, dtype=torch.bool, device=q.device).triu(1)
    scores[..., start:].masked_fill_(future, float("-inf"))
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
