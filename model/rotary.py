"""Rotary position embedding (Su et al., arXiv 2104.09864) in its two published layouts."""

from typing import NamedTuple

import torch
from torch import Tensor


class Rope(NamedTuple):
    """The rotations of T positions.

    interleaved False is the half-split layout of GPT-NeoX and Llama: dimension i turns with dimension i + d/2.
    True is the layout of the paper and GPT-J: dimension 2i turns with 2i + 1.
    """

    cos: Tensor  # (T, d/2)
    sin: Tensor  # (T, d/2)
    interleaved: bool = False


def rope_table(
    length: int, width: int, theta: float, device: torch.device | None = None, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i/d), positions offset..offset+length-1: (length, width/2) each, float32 (eq. 15)."""
    frequency = theta ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)  # (d/2,)
    positions = torch.arange(offset, offset + length, device=device, dtype=torch.float32)
    angle = positions[:, None] * frequency  # (T, d/2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rope: Rope | None) -> Tensor:
    """Rotate queries or keys x (B, H, T, d) by their positions, in float32 or better; None leaves them.

    Under autocast in autocast's own precision, as all runs so far were trained.
    """
    if rope is None:
        return x
    autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    dtype = x.dtype if autocast else torch.promote_types(x.dtype, torch.float32)
    cos, sin, wide = rope.cos.to(dtype), rope.sin.to(dtype), x.to(dtype)  # (T, d/2) twice
    if rope.interleaved:
        even, odd = wide[..., 0::2], wide[..., 1::2]  # (B, H, T, d/2) each
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)
    left, right = wide.chunk(2, dim=-1)  # (B, H, T, d/2) each
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)
