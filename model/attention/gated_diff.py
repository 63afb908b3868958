from torch import Tensor, nn

from ..layers import RMSNorm
from .backends import attend_diff
from .base import Attention, AttentionConfig, Heads, mean_and_spread
from .diff import paired_heads
from .mask import Mask


class GatedDiffAttention(Attention):
    """(g A1 - (1 - g) A2) V, g = sigmoid(x W) per token and head, then a norm per head (Lygizou et al., arXiv 2505.24054)."""

    name = "gated_diff"
    row_sums = "any"
    undecayed = ("gate_logits",)
    colours = {"gated_diff": "#88CCEE"}

    def head_shape(self, cfg: AttentionConfig) -> Heads:
        return paired_heads(cfg)

    def make_parameters(self, cfg: AttentionConfig, layer: int) -> None:
        super().make_parameters(cfg, layer)
        self.gate_logits = nn.Linear(cfg.d_model, self.heads, bias=False)
        self.head_norm = RMSNorm(self.value_width, cfg.norm_eps)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, mask: Mask) -> Tensor:
        q, k = q.unflatten(1, (-1, 2)), k.unflatten(1, (-1, 2))  # (B, h, 2, T, d), (B, hkv, 2, S, d)
        logits = self.gate_logits(x).mT[..., None].to(self.gate_logits.weight.dtype)  # (B, h, T, 1)
        ratio = (-logits).exp()  # (1 - g) / g; a probe reads A1 - ratio A2, as the factor g scales whole rows
        return (attend_diff(q, k, v, ratio, mask, self.backend, self.dropout_now) * logits.sigmoid()).to(v.dtype)

    def after(self, y: Tensor) -> Tensor:
        return self.head_norm(y)

    def readings(self, x: Tensor) -> dict[str, Tensor]:
        return mean_and_spread("gate", self.gate_logits(x).sigmoid())
