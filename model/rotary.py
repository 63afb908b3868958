"""Rotary position embedding (Su et al., arXiv 2104.09864) in its two published layouts."""

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from . import native


class Rope(NamedTuple):
    """The rotations of T positions."""

    cos: Tensor  # (T, d/2)
    sin: Tensor  # (T, d/2)
    interleaved: bool = False  # False (GPT-NeoX, Llama): dimension i turns with i + d/2; True (paper, GPT-J): 2i with 2i + 1


@dataclass
class RopeScaling:
    """Slower rotations, with which models go beyond the context that they were first trained on.

    linear: all frequencies are divided by factor (Chen et al., arXiv 2306.15595). llama3: those between low_freq_factor and
    high_freq_factor turns are interpolated between frequency / factor and frequency (Llama 3.1, arXiv 2407.21783).
    """

    kind: Annotated[str, ("none", "linear", "llama3")] = "none"  # of scaling
    factor: Annotated[float, "(0, inf)"] = 8.0  # divisor of the frequencies
    low_freq_factor: Annotated[float, "(0, inf)"] = 1.0  # llama3: divide frequencies of fewer turns in original_context
    high_freq_factor: Annotated[float, "(0, inf)"] = 4.0  # llama3: keep frequencies of more turns in original_context
    original_context: Annotated[int, "[1, inf)"] = 8192  # llama3: context of the first training, in tokens

    def check(self) -> None:
        """ValueError for numbers that exclude each other."""
        if not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(f"{self} is no scaling: use a high_freq_factor above low_freq_factor")

    def applied(self, frequency: Tensor) -> Tensor:
        """`frequency` (radians per token) after scaling."""
        if self.kind == "none":
            return frequency
        if self.kind == "linear":
            return frequency / self.factor
        turns = self.original_context * frequency / (2 * math.pi)
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return frequency * (kept + (1 - kept) / self.factor)


def rope_table(
    length: int, width: int, theta: float, device: torch.device | None = None, offset: int = 0,
    scaling: RopeScaling | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """cos and sin of position * theta^(-2i/d), positions offset..offset+length-1: (length, width/2) each, float32 (eq. 15)."""
    frequency = theta ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)  # (d/2,)
    frequency = scaling.applied(frequency) if scaling else frequency
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        return TABLE(frequency, length, offset)
    return _table(frequency, length, offset)


def _table(frequency: Tensor, length: int, offset: int) -> tuple[Tensor, Tensor]:
    positions = torch.arange(offset, offset + length, device=frequency.device, dtype=torch.float32)
    angle = positions[:, None] * frequency  # (T, d/2)
    return angle.cos(), angle.sin()


# For torch.compile, which would compute powers, cosines and sines again for every layer, sequence and head: on an H200, kernels
# with them took 22 of the 82 ms of a step of the baseline (docs/PERFORMANCE.md).
TABLE = native.operator(
    "table",
    "(Tensor frequency, SymInt length, SymInt offset) -> (Tensor, Tensor)",
    _table,
    lambda frequency, length, offset: tuple(frequency.new_empty(length, len(frequency)) for _ in range(2)),
    on="default",
)


def rotate(x: Tensor, rope: Rope | None) -> Tensor:
    """Rotate queries or keys x (B, H, T, d) by position, in float32 or better (autocast: in x's dtype); rope=None: x itself."""
    if rope is None:
        return x
    autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)  # float32 would change published bfloat16 runs
    dtype = x.dtype if autocast else torch.promote_types(x.dtype, torch.float32)
    cos, sin, wide = rope.cos.to(dtype), rope.sin.to(dtype), x.to(dtype)  # (T, d/2) twice
    if x.is_cuda:  # in the order of memory, (B, T, H, d), in which attention's kernels then leave their output, too
        wide, cos, sin = wide.transpose(1, 2), cos[:, None], sin[:, None]
    first, second = (wide[..., 0::2], wide[..., 1::2]) if rope.interleaved else wide.chunk(2, dim=-1)  # (B, H, T, d/2) each
    parts = first * cos - second * sin, second * cos + first * sin
    turned = (torch.stack(parts, dim=-1).flatten(-2) if rope.interleaved else torch.cat(parts, dim=-1)).to(x.dtype)
    return turned.transpose(1, 2) if x.is_cuda else turned
