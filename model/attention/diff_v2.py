from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .backends import attend_diff
from .base import Attention, AttentionConfig, Heads, mean_and_spread
from .mask import Mask


@dataclass
class DiffV2Config:
    """Options of `diff_v2`."""

    lambda_bias: float | None = None  # start of a bias of lambda's logits: -4 subtracts little; None, as published: no bias


class DiffV2Attention(Attention):
    """attn[2i] - sigmoid(x W)[i] attn[2i + 1] per token and head i (microsoft/unilm, Diff-Transformer-V2, January 2026).

    2 n_head query heads; the two maps of a head are adjacent ones, which share one key and one value head. No head norm.
    """

    name = "diff_v2"
    row_sums = "positive"
    Options = DiffV2Config
    undecayed = ("lambda_logits",)
    colours = {"diff_v2": "#CC79A7"}

    def head_shape(self, cfg: AttentionConfig) -> Heads:
        return Heads(cfg.n_head, cfg.n_kv_head, cfg.head_dim, cfg.head_dim, queries=2, maps=2)

    def make_parameters(self, cfg: AttentionConfig, layer: int) -> None:
        self.make_projections(cfg)
        self.lambda_logits = nn.Linear(cfg.d_model, self.heads, bias=self.options.lambda_bias is not None)
        self.make_out(cfg)

    def init_own(self, generator: torch.Generator) -> None:
        if self.options.lambda_bias is not None:
            nn.init.constant_(self.lambda_logits.bias, self.options.lambda_bias)

    def lam(self, x: Tensor) -> Tensor:
        """lambda per token and head, (B, h, T, 1)."""
        return self.lambda_logits(x).sigmoid().transpose(1, 2).unsqueeze(-1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, mask: Mask) -> Tensor:
        q, k = q.unflatten(1, (-1, 2)), k.unsqueeze(2)  # (B, h, 2, T, d), (B, hkv, 1, S, d)
        return attend_diff(q, k, v, self.lam(x), mask, self.backend, self.dropout_now)

    def readings(self, x: Tensor) -> dict[str, Tensor]:
        return mean_and_spread("lambda", self.lam(x))
