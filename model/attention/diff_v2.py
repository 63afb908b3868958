"""Differential attention, version 2: twice the query heads over the baseline's keys and values."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from model.attention.backends import attend_diff, check_backend
from model.attention.mask import Mask
from model.cache import LayerCache
from model.rotary import Rope, rotate

if TYPE_CHECKING:
    from model.config import DecoderConfig


@dataclass
class DiffV2Config:
    """Options of `diff_v2`. lambda_bias: None is the published form without one; a number is where a bias starts.

    A negative number starts training with the subtraction all but closed: sigmoid(-4) = 0.018.
    """

    lambda_bias: float | None = None


class DiffV2Attention(nn.Module):
    """attn[2i] - sigmoid(x W)[i] attn[2i + 1] per token and head i (microsoft/unilm, Diff-Transformer-V2, January 2026).

    2 n_head query heads of width d over n_kv_head key and value heads. The two maps of a head are adjacent query heads, so
    they share one key and one value head; there is no head norm and no lambda_init.
    """

    def __init__(self, cfg: "DecoderConfig", layer: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = cfg.n_head, cfg.n_kv_head, cfg.head_dim
        self.backend, self.dropout, self.lambda_bias = cfg.backend, cfg.attention_dropout, cfg.diff_v2.lambda_bias
        check_backend(cfg.backend, self.width, self.width, cfg.attention_dropout, maps=2)
        self.q = nn.Linear(cfg.d_model, 2 * self.heads * self.width, bias=cfg.bias)
        self.k = nn.Linear(cfg.d_model, self.kv_heads * self.width, bias=cfg.bias)
        self.v = nn.Linear(cfg.d_model, self.kv_heads * self.width, bias=cfg.bias)
        self.lambda_logits = nn.Linear(cfg.d_model, self.heads, bias=self.lambda_bias is not None)
        self.out = nn.Linear(self.heads * self.width, cfg.d_model, bias=cfg.bias)

    def init_weights(self, generator: torch.Generator) -> None:
        if self.lambda_bias is not None:
            nn.init.constant_(self.lambda_logits.bias, self.lambda_bias)

    def lam(self, x: Tensor) -> Tensor:
        """lambda per token and head, (B, h, T, 1)."""
        return self.lambda_logits(x).sigmoid().transpose(1, 2).unsqueeze(-1)

    def forward(self, x: Tensor, rope: Rope | None, mask: Mask, cache: LayerCache | None = None) -> Tensor:
        """x (B, T, D) -> (B, T, D)."""
        q, k, v = (p(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = rotate(q, rope), rotate(k, rope)  # (B, 2h, T, d), (B, hkv, T, d)
        if cache is not None:
            k, v = cache.append(k, v)
        dropout = self.dropout if self.training else 0.0
        y = attend_diff(q.unflatten(1, (-1, 2)), k.unsqueeze(2), v, self.lam(x), mask, self.backend, dropout)
        return self.out(y.transpose(1, 2).flatten(2))  # (B, T, h d)

    def flops(self, context: int) -> int:
        """Forward FLOPs per token of the products with the T x T maps: each of 2h maps meets k (d) and v (d)."""
        return 2 * context * 2 * self.heads * (self.width + self.width)
