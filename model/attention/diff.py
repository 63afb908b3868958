"""Differential attention, version 1: the difference of two softmax maps per head."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from model.attention.backends import attend_diff
from model.attention.mask import Mask
from model.cache import LayerCache
from model.layers import RMSNorm
from model.rotary import Rope, rotate

if TYPE_CHECKING:
    from model.config import DecoderConfig


@dataclass
class DiffConfig:
    """Options of `diff`. lambda_init: a constant for all layers; None is the paper's schedule over depth."""

    lambda_init: float | None = None


def lambda_init(layer: int) -> float:
    """0.8 - 0.6 exp(-0.3 layer), layer counted from 0 (the paper's l - 1; arXiv 2410.05258, section 2.1)."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


class DiffAttention(nn.Module):
    """(softmax(Q1 K1' / sqrt d) - lam softmax(Q2 K2' / sqrt d)) V, then a norm per head (arXiv 2410.05258, eq. 1-3).

    h = n_head / 2 heads: each has two maps of the baseline's width d and one value of width 2d. Query rows of component c
    of head i are those of baseline head 2i + c; grouped keys are paired first, then repeated. lam is one scalar per layer,
    exp(lq1.lk1) - exp(lq2.lk2) + lambda_init in float32; the normed heads are scaled by the constant 1 - lambda_init.
    """

    def __init__(self, cfg: "DecoderConfig", layer: int) -> None:
        super().__init__()
        for name, count in (("n_head", cfg.n_head), ("n_kv_head", cfg.n_kv_head)):
            if count % 2:
                raise ValueError(
                    f"diff pairs heads, so model.{name}={count} must be even: use model.{name}={count + 1}"
                )
        self.heads, self.kv_heads, self.width = cfg.n_head // 2, cfg.n_kv_head // 2, cfg.head_dim
        self.backend = cfg.backend
        self.q = nn.Linear(cfg.d_model, self.heads * 2 * self.width, bias=cfg.bias)
        self.k = nn.Linear(cfg.d_model, self.kv_heads * 2 * self.width, bias=cfg.bias)
        self.v = nn.Linear(cfg.d_model, self.kv_heads * 2 * self.width, bias=cfg.bias)
        self.out = nn.Linear(self.heads * 2 * self.width, cfg.d_model, bias=cfg.bias)
        self.lambda_init = lambda_init(layer) if cfg.diff.lambda_init is None else cfg.diff.lambda_init
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            self.register_parameter(name, nn.Parameter(torch.empty(self.width)))
        self.head_norm = RMSNorm(2 * self.width)

    def init_weights(self, generator: torch.Generator) -> None:
        # Not zero: d lam / d lq1 is proportional to lk1, so vectors that start at zero stay there.
        for vector in (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2):
            nn.init.normal_(vector, std=0.1, generator=generator)

    def lam(self) -> Tensor:
        """lambda, a float32 scalar (arXiv 2410.05258, equation 2)."""
        first = (self.lambda_q1 * self.lambda_k1).sum().exp()
        second = (self.lambda_q2 * self.lambda_k2).sum().exp()
        return first - second + self.lambda_init

    def forward(self, x: Tensor, rope: Rope | None, mask: Mask, cache: LayerCache | None = None) -> Tensor:
        """x (B, T, D) -> (B, T, D)."""
        q, k = (p(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for p in (self.q, self.k))  # (B, 2h, T, d)
        v = self.v(x).unflatten(-1, (-1, 2 * self.width)).transpose(1, 2)  # (B, hkv, T, 2d)
        q, k = rotate(q, rope), rotate(k, rope)
        if cache is not None:
            k, v = cache.append(k, v)
        q, k = q.unflatten(1, (-1, 2)), k.unflatten(1, (-1, 2))  # (B, h, 2, T, d), (B, hkv, 2, S, d)
        y = attend_diff(q, k, v, self.lam(), mask, self.backend)  # (B, h, T, 2d)
        y = self.head_norm(y) * (1 - self.lambda_init)
        return self.out(y.transpose(1, 2).flatten(2))

    def flops(self, context: int) -> int:
        """Forward FLOPs per token of the products with the T x T maps: each of 2h maps meets k (d) and v (2d)."""
        return 2 * context * 2 * self.heads * (self.width + 2 * self.width)
