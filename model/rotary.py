"""Rotary position embedding, half-split layout: dimension i is rotated with dimension i + d/2."""

import torch
from torch import Tensor

Rope = tuple[Tensor, Tensor]  # cos, sin: (T, d/2)


def rope_table(length: int, width: int, theta: float, device: torch.device | None = None) -> Rope:
    """cos and sin of position * theta^(-2i/d), (length, width/2) each, float32 (Su et al., arXiv 2104.09864, eq. 15)."""
    frequency = theta ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)  # (d/2,)
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequency  # (T, d/2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rope: Rope | None) -> Tensor:
    """Rotate queries or keys x (B, H, T, d) by their positions; None leaves them (learned positions)."""
    if rope is None:
        return x
    cos, sin = (table.to(x.dtype) for table in rope)  # (T, d/2)
    left, right = x.chunk(2, dim=-1)  # (B, H, T, d/2) each
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
