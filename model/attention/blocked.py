"""Causal differences of maps on CPUs: the formula over blocks of query rows, keys that the mask hides never multiplied.

At lengths where a block's scores fit the cache, torch's matrix products and softmax are as fast as its flash kernel, and the
maps are subtracted before their one product with the values, where two flash calls have a product each
(docs/LOG.md, 2026-11-20). Memory: half the scores, T^2 / 2 per map, are kept for the backward.
"""

import torch
from torch import Tensor


def attend_diff(q: Tensor, k: Tensor, v: Tensor, lam: Tensor) -> Tensor:
    """Causal difference of two maps: q, k (B, h, 2, T, d), v (B, h, T, dv), lam (..., T or 1, 1) or () -> (B, h, T, dv).

    Computed in float32 or better: half precision would round the scores, which no fused kernel does.
    """
    T, dtype = q.shape[-2], v.dtype
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
        size = 64 if T <= 256 else 128
        blocks = [(start, min(start + size, T)) for start in range(0, T, size)]
        return torch.cat([_rows(q, k, v, lam, start, stop) for start, stop in blocks], dim=-2).to(dtype)


def last_row(q: Tensor, k: Tensor, v: Tensor, lam: Tensor) -> Tensor:
    """One query that sees every key, as in decoding: q (B, h, 2, 1, d), k (B, hkv, 2, S, d), v (B, hkv, S, dv).

    Returns (B, h, 1, dv), computed as above. Heads that share keys are rows of one product with them, where they lie.
    """
    (B, h), (hkv, d), dtype = q.shape[:2], (k.shape[1], k.shape[-1]), v.dtype
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
        rows = q.reshape(B, hkv, h // hkv, 2, d).transpose(2, 3)  # (B, hkv, 2, h / hkv, d)
        first, second = (rows * d**-0.5 @ k.mT).softmax(-1).unbind(2)  # (B, hkv, h / hkv, S) each
        lam = lam.expand(B, h, 1, 1).reshape(B, hkv, -1, 1) if lam.dim() else lam
        return ((first - lam * second) @ v).reshape(B, h, 1, -1).to(dtype)


def _rows(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, start: int, stop: int) -> Tensor:
    """Query rows start..stop, which see the keys up to their own: (B, h, stop - start, dv)."""
    scores = (q[..., start:stop, :] * q.shape[-1] ** -0.5) @ k[..., :stop, :].mT  # (B, h, 2, stop - start, stop)
    future = torch.ones(stop - start, stop - start, dtype=torch.bool, device=q.device).triu(1)
    scores[..., start:].masked_fill_(future, float("-inf"))
    first, second = scores.softmax(-1).unbind(2)
    lam = lam[..., start:stop, :] if lam.dim() > 1 and lam.shape[-2] > 1 else lam
    return (first - lam * second) @ v[..., :stop, :]
