"""Softmax attention whose output is gated: the control for gains that need no subtraction."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from model.attention.baseline import Attention
from model.attention.mask import Mask
from model.cache import LayerCache
from model.rotary import Rope

if TYPE_CHECKING:
    from model.config import DecoderConfig


@dataclass
class GatedConfig:
    """Options of `gated`. gate: one per head, or one per element of each head's output."""

    gate: str = "headwise"  # headwise | elementwise


class GatedAttention(Attention):
    """Each head's output times sigmoid(x W), gates per token (Qiu et al., arXiv 2505.06708, position G1)."""

    def __init__(self, cfg: "DecoderConfig", layer: int) -> None:
        super().__init__(cfg, layer)
        gates = {"headwise": cfg.n_head, "elementwise": cfg.n_head * cfg.head_dim}
        if cfg.gated.gate not in gates:
            raise ValueError(f"model.gated.gate={cfg.gated.gate} is unknown: use one of {', '.join(gates)}")
        self.gate_logits = nn.Linear(cfg.d_model, gates[cfg.gated.gate], bias=False)

    def forward(self, x: Tensor, rope: Rope | None, mask: Mask, cache: LayerCache | None = None) -> Tensor:
        """x (B, T, D) -> (B, T, D)."""
        gate = self.gate_logits(x).sigmoid().unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, T, 1 or d)
        heads = self.heads_of(x, rope, mask, cache) * gate  # (B, H, T, d)
        return self.out(heads.transpose(1, 2).flatten(2))
