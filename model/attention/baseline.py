"""Softmax attention: the baseline."""

from dataclasses import dataclass

from torch import Tensor

from .base import Attention, AttentionConfig, make_head_norm


@dataclass
class BaselineConfig:
    """Options of `baseline`.

    head_norm: an RMSNorm over each head's output, affine or plain (no weight). None is the baseline; with a norm it is the
    control for `diff`, whose heads have one.
    """

    head_norm: str = "none"  # none | affine | plain


class BaselineAttention(Attention):
    """softmax(Q K' / sqrt d) V per head, as the base class computes it."""

    name = "baseline"
    Options = BaselineConfig
    choices = {"head_norm": ("none", "affine", "plain")}
    colours = {"baseline": "#0072B2", "gpt2": "#7F7F7F"}

    def make_parameters(self, cfg: AttentionConfig, layer: int) -> None:
        super().make_parameters(cfg, layer)
        self.head_norm = make_head_norm(self.options.head_norm, self.value_width, cfg.norm_eps)

    def after(self, y: Tensor) -> Tensor:
        return self.head_norm(y)
