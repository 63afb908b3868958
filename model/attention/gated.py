"""Softmax attention whose output is gated: a control, which shows how much a gate gains without a subtraction."""

from dataclasses import dataclass

from torch import Tensor, nn

from .base import Attention, AttentionConfig, mean_and_spread
from .mask import Mask


@dataclass
class GatedConfig:
    """Options of `gated`. gate: one gate per head, or one gate per element of each head's output."""

    gate: str = "headwise"  # headwise | elementwise


class GatedAttention(Attention):
    """Each head's output times sigmoid(x W), gates per token (Qiu et al., arXiv 2505.06708, position G1)."""

    name = "gated"
    Options = GatedConfig
    choices = {"gate": ("headwise", "elementwise")}
    undecayed = ("gate_logits",)
    colours = {"gated": "#E69F00"}

    def make_parameters(self, cfg: AttentionConfig, layer: int) -> None:
        super().make_parameters(cfg, layer)
        per_head = 1 if self.options.gate == "headwise" else self.value_width
        self.gate_logits = nn.Linear(cfg.d_model, self.heads * per_head, bias=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, mask: Mask) -> Tensor:
        gate = self.gate_logits(x).sigmoid().unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, T, 1 or d)
        return super().attend(q, k, v, x, mask) * gate

    def readings(self, x: Tensor) -> dict[str, Tensor]:
        return mean_and_spread("gate", self.gate_logits(x).sigmoid())
