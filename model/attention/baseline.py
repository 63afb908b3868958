from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from ..layers import make_norm
from .base import HEAD_NORMS, Attention, AttentionConfig, Carry, split


@dataclass
class BaselineConfig:
    """Options of `baseline`. In Python, both norms may be a factory: width -> module."""

    head_norm: Annotated[str, HEAD_NORMS] = "none"  # as `diff` has one, for which it is a control
    qk_norm: Annotated[str, ("none", "head", "all")] = "none"  # an RMSNorm before RoPE, over each head or over all (OLMo 2)


class BaselineAttention(Attention):
    """softmax(Q K' / sqrt d) V per head, as the base class computes it."""

    name = "baseline"
    Options = BaselineConfig
    colours = {"baseline": "#0072B2", "gpt2": "#7F7F7F"}

    def make_parameters(self, cfg: AttentionConfig, layer: int) -> None:
        super().make_parameters(cfg, layer)
        kind = self.options.qk_norm
        heads, kv_heads = (self.heads, self.kv_heads) if kind == "all" else (1, 1)  # that share a norm
        self.q_norm = make_norm(kind, heads * self.width, True, cfg.norm_eps)
        self.k_norm = make_norm(kind, kv_heads * self.width, True, cfg.norm_eps)
        self.head_norm = make_norm(self.options.head_norm, self.value_width, True, cfg.norm_eps)

    def before(self, q: Tensor, k: Tensor, v: Tensor, carry: Carry) -> tuple[Tensor, Tensor, Tensor]:
        if self.options.qk_norm != "all":
            return self.q_norm(q), self.k_norm(k), v
        return split(self.q_norm(self.merge(q)), self.width), split(self.k_norm(self.merge(k)), self.width), v

    def after(self, y: Tensor) -> Tensor:
        return self.head_norm(y)
