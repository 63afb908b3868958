from dataclasses import dataclass
from typing import Annotated

from torch import Tensor, nn

from ..layers import make_norm
from .base import Attention, AttentionConfig, Carry, mean_and_spread
from .mask import Mask


@dataclass
class GatedConfig:
    """Options of `gated`."""

    gate: Annotated[str, ("headwise", "elementwise")] = "headwise"  # one gate per head, or per element of its output
    qk_norm: Annotated[str, ("none", "head")] = "none"  # an RMSNorm over each head before RoPE (Qwen3-Next), or a factory


class GatedAttention(Attention):
    """Each head's output times sigmoid(x W), gates per token (Qiu et al., arXiv 2505.06708, position G1)."""

    name = "gated"
    Options = GatedConfig
    undecayed = ("gate_logits",)
    colours = {"gated": "#E69F00"}

    def make_parameters(self, cfg: AttentionConfig, layer: int) -> None:
        super().make_parameters(cfg, layer)
        per_head = 1 if self.options.gate == "headwise" else self.value_width
        self.gate_logits = nn.Linear(cfg.d_model, self.heads * per_head, bias=False)
        self.q_norm = make_norm(self.options.qk_norm, self.width, True, cfg.norm_eps)
        self.k_norm = make_norm(self.options.qk_norm, self.width, True, cfg.norm_eps)

    def before(self, q: Tensor, k: Tensor, v: Tensor, carry: Carry) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_norm(q), self.k_norm(k), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, mask: Mask) -> Tensor:
        gate = self.gate_logits(x).sigmoid().unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, T, 1 or d)
        return super().attend(q, k, v, x, mask) * gate

    def readings(self, x: Tensor) -> dict[str, Tensor]:
        return mean_and_spread("gate", self.gate_logits(x).sigmoid())
