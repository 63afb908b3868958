"""Parts of a block that every variant shares: norms and feed-forward networks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in float32 or better (Zhang & Sennrich, arXiv 1910.07467).

    affine False leaves the weight out.
    """

    def __init__(self, width: int, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.ones(width)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        weight = None if self.weight is None else self.weight.to(dtype)
        return F.rms_norm(x.to(dtype), (self.width,), weight, self.eps).to(x.dtype)


class LayerNorm(nn.Module):
    """LayerNorm with an optional bias, as GPT-2 has it."""

    def __init__(self, width: int, bias: bool, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.bias, self.eps).to(x.dtype)


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x) (Shazeer, arXiv 2002.05202, equation 6)."""

    def __init__(self, width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=bias)
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class GeluMLP(nn.Module):
    """down(gelu(up x)), nanoGPT's feed-forward network."""

    approximate = "none"

    def __init__(self, width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


class GeluTanhMLP(GeluMLP):
    """With the tanh approximation of GELU that GPT-2's weights were trained with (openai/gpt-2, model.py)."""

    approximate = "tanh"


MLPS = {"swiglu": SwiGLU, "gelu": GeluMLP, "gelu_tanh": GeluTanhMLP}


def make_norm(kind: str, width: int, bias: bool, eps: float) -> nn.Module:
    """The norm named by `DecoderConfig.norm`."""
    return RMSNorm(width, eps) if kind == "rmsnorm" else LayerNorm(width, bias, eps)
