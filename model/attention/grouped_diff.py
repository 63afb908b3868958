from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from .backends import attend_diff
from .base import AttentionConfig, Heads, check_divisor
from .diff import DiffAttention, DiffConfig
from .mask import Mask


@dataclass
class GroupedDiffConfig(DiffConfig):
    """Options of `grouped_diff`: those of `diff`, whose heads are always double, and the ratio of signal to noise heads."""

    heads: Annotated[str, ("double",)] = "double"
    ratio: Annotated[int, "[1, inf)"] = 2  # signal heads per noise head


class GroupedDiffAttention(DiffAttention):
    """`diff` with heads=double, in which `ratio` heads share one noise map, Q2 and K2 (Lim et al., arXiv 2510.06949)."""

    name = "grouped_diff"
    Options = GroupedDiffConfig
    colours = {"grouped_diff": "#CC6677"}

    def head_shape(self, cfg: AttentionConfig) -> Heads:
        check_divisor("ratio", self.options.ratio, "n_kv_head", cfg.n_kv_head)
        return super().head_shape(cfg)

    def make_projections(self, cfg: AttentionConfig) -> None:
        super().make_projections(cfg)
        ratio, d = self.options.ratio, self.width
        self.q = nn.Linear(cfg.d_model, (self.heads + self.heads // ratio) * d, bias=cfg.qkv_bias)
        self.k = nn.Linear(cfg.d_model, (self.kv_heads + self.kv_heads // ratio) * d, bias=cfg.qkv_bias)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, mask: Mask) -> Tensor:
        q, k = self._pairs(q, self.heads), self._pairs(k, self.kv_heads)
        return attend_diff(q, k, v, self.lam(), mask, self.backend, self.dropout_now)

    def _pairs(self, x: Tensor, signals: int) -> Tensor:
        """Signal heads, each beside its noise head: (B, signals, 2, T, d)."""
        noise = x[:, signals:].repeat_interleave(self.options.ratio, dim=1)
        return torch.stack((x[:, :signals], noise), dim=2)
