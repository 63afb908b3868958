from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from ..rotary import Rope, rotate
from .base import Attention, AttentionConfig, Heads, check_divisor
from .mask import Mask


@dataclass
class IntegralConfig:
    """Options of `integral`."""

    signals: Annotated[int, "[1, 1000]"] = 2  # how many query-key products of width d are averaged per map


class IntegralAttention(Attention):
    """softmax(1/S sum_s Q_s K_s' / sqrt d) V (Kobyzev et al., Integral Transformer, arXiv 2508.18387).

    n_head / S heads; the averaged logits are one product of the concatenated signals, times 1 / (S sqrt d).
    """

    name = "integral"
    Options = IntegralConfig

    def head_shape(self, cfg: AttentionConfig) -> Heads:
        S, d = self.options.signals, cfg.head_dim
        check_divisor("signals", S, "n_kv_head", cfg.n_kv_head)
        return Heads(cfg.n_head // S, cfg.n_kv_head // S, d, S * d, queries=S, keys=S)

    def turn(self, x: Tensor, rope: Rope | None) -> Tensor:
        """(B, h S, T, d) -> (B, h, T, S d): every signal is rotated by itself, then signals are concatenated."""
        return rotate(x, rope).unflatten(1, (-1, self.options.signals)).transpose(2, 3).flatten(3)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, mask: Mask) -> Tensor:
        return super().attend(q * self.options.signals**-0.5, k, v, x, mask)  # which scales by 1 / sqrt(S d)
