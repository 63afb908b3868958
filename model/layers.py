"""Parts of a block that every variant shares: norms, feed-forward networks, and how weights start."""

import hashlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class RMSNorm(nn.RMSNorm):
    """x / rms(x) * weight over the last dimension, computed in float32 or better (Zhang & Sennrich, arXiv 1910.07467)."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        weight = None if self.weight is None else self.weight.to(dtype)
        return F.rms_norm(x.to(dtype), self.normalized_shape, weight, self.eps).to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """LayerNorm, computed in the precision of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class FeedForward(nn.Module):
    """swiglu: down(silu(gate x) * up x) (Shazeer, arXiv 2002.05202, equation 6). gelu, gelu_tanh: down(gelu(up x)).

    In training, the backward pass computes the input of `down` again, so this widest activation of a block is not stored.
    """

    def __init__(self, kind: str, width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.kind = kind
        self.gate = nn.Linear(width, hidden, bias=bias) if kind == "swiglu" else None
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        parts = None if self.gate is None else self.gate(x), self.up(x)
        # torch.func's gradients refuse the hooks that checkpoint sets.
        if not (self.training and torch.is_grad_enabled()) or torch._C._are_functorch_transforms_active():
            return self._down(*parts)
        return checkpoint(self._down, *parts, use_reentrant=False, preserve_rng_state=False)

    def _down(self, gate: Tensor | None, up: Tensor) -> Tensor:
        if gate is not None:
            return self.down(F.silu(gate) * up)
        return self.down(F.gelu(up, approximate="tanh" if self.kind == "gelu_tanh" else "none"))


def make_norm(kind: str | Callable[[int], nn.Module], width: int, bias: bool, eps: float) -> nn.Module:
    """LayerNorm (layernorm), RMSNorm without weight (plain) or with it (any other kind), none, or a factory's module."""
    if callable(kind):
        return kind(width)
    if kind == "layernorm":
        return LayerNorm(width, eps, bias=bias)
    return nn.Identity() if kind == "none" else RMSNorm(width, eps, kind != "plain")


def initialize(module: nn.Module, seed: int, residual: tuple[str, ...] = (), depth: int = 1) -> None:
    """Set all weights: matrices normal with std 0.02, biases 0; then call each submodule's `init_own(generator)`.

    Matrices whose names end in one of `residual` project into the residual stream of `depth` blocks: their std is
    0.02 / sqrt(2 depth), as in GPT-2. A weight depends only on the seed, its name and its shape, so variants share those that
    they both have. Norms, also those from a factory, set their weights by `reset_parameters()`.
    """
    for name, p in module.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(p)
        elif p.dim() == 2:
            std = 0.02 / (2 * depth) ** 0.5 if name.endswith(residual) else 0.02
            fill_normal(p, std, _generator(seed, name))
    for name, part in module.named_modules():
        if hasattr(part, "init_own"):
            part.init_own(_generator(seed, name))
        elif hasattr(part, "reset_parameters") and not isinstance(part, (nn.Linear, nn.Embedding)) and part is not module:
            part.reset_parameters()


@torch.no_grad()
def fill_normal(p: Tensor, std: float, generator: torch.Generator) -> None:
    """Normal numbers, drawn in float32 on the CPU, so that they are the same on every device."""
    p.copy_(torch.empty(p.shape, device="cpu").normal_(std=std, generator=generator))


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
