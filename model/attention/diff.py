"""Differential attention, version 1: the difference of two softmax maps per head."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from model.attention.backends import attend_diff, check_backend
from model.attention.mask import Mask
from model.cache import LayerCache
from model.layers import RMSNorm
from model.rotary import Rope, rotate

if TYPE_CHECKING:
    from model.config import DecoderConfig


@dataclass
class DiffConfig:
    """Options of `diff`; the defaults are the paper's.

    heads: half (n_head / 2 heads with values twice as wide) or double (n_head heads with the baseline's values and twice
    its queries and keys, as converted models have). lambda_form: vectors, dual_scalar (timm's exp(a) - exp(b) + lambda_init)
    or fixed (lambda_init itself; 0 is no subtraction). lambda_init: one constant for all layers, None is the paper's
    schedule over depth. head_norm: affine, plain (no weight) or none. qk_norm: an RMSNorm over each head's queries and
    keys. scale_norm: one over the merged heads. lambda_warmup: steps over which lambda grows from 0 to its value.
    """

    heads: str = "half"  # half | double
    lambda_form: str = "vectors"  # vectors | dual_scalar | fixed
    lambda_init: float | None = None
    lambda_warmup: int = 0
    head_norm: str = "affine"  # affine | plain | none
    qk_norm: bool = False
    scale_norm: bool = False


CHOICES = {
    "heads": ("half", "double"),
    "lambda_form": ("vectors", "dual_scalar", "fixed"),
    "head_norm": ("affine", "plain", "none"),
}
VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


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
        opt, bias = cfg.diff, cfg.bias
        _check(cfg)
        pairs = 2 if opt.heads == "half" else 1  # baseline heads that make one differential head
        self.heads, self.kv_heads = cfg.n_head // pairs, cfg.n_kv_head // pairs
        self.width, self.value_width = cfg.head_dim, pairs * cfg.head_dim
        self.backend, self.dropout = cfg.backend, cfg.attention_dropout
        check_backend(cfg.backend, self.width, self.value_width, cfg.attention_dropout, maps=2)
        self.q = nn.Linear(cfg.d_model, self.heads * 2 * self.width, bias=bias)
        self.k = nn.Linear(cfg.d_model, self.kv_heads * 2 * self.width, bias=bias)
        self.v = nn.Linear(cfg.d_model, self.kv_heads * self.value_width, bias=bias)
        self.out = nn.Linear(self.heads * self.value_width, cfg.d_model, bias=bias)
        self.lambda_init = lambda_init(layer) if opt.lambda_init is None else opt.lambda_init
        self._make_lambda(opt)
        self.q_norm = RMSNorm(self.width, cfg.norm_eps) if opt.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.width, cfg.norm_eps) if opt.qk_norm else nn.Identity()
        affine = opt.head_norm == "affine"
        self.head_norm = nn.Identity() if opt.head_norm == "none" else RMSNorm(self.value_width, cfg.norm_eps, affine)
        self.scale_norm = RMSNorm(self.heads * self.value_width, cfg.norm_eps) if opt.scale_norm else nn.Identity()

    def _make_lambda(self, opt: DiffConfig) -> None:
        self.lambda_form, self.lambda_warmup = opt.lambda_form, opt.lambda_warmup
        names = {"vectors": VECTORS, "dual_scalar": ("lambda_a", "lambda_b"), "fixed": ()}[opt.lambda_form]
        for name in names:
            shape = (self.width,) if opt.lambda_form == "vectors" else ()
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        # The warm-up's state, saved with the weights: a checkpoint from the middle evaluates as it was trained.
        self.register_buffer("lambda_mix", torch.ones(()))

    def init_weights(self, generator: torch.Generator) -> None:
        # Not zero: d lam / d lq1 is proportional to lk1, so vectors that start at zero stay there.
        for name, p in self.named_parameters(recurse=False):
            nn.init.normal_(p, std=0.1, generator=generator) if name in VECTORS else nn.init.zeros_(p)

    def set_step(self, step: int) -> None:
        """Training is about to take optimizer step `step` (from 0): lambda's warm-up follows it."""
        if self.lambda_warmup:
            self.lambda_mix.fill_(min(1.0, (step + 1) / self.lambda_warmup))

    def lam(self) -> Tensor:
        """lambda, a float32 scalar (arXiv 2410.05258, equation 2)."""
        if self.lambda_form == "fixed":
            return self.lambda_mix * self.lambda_init
        if self.lambda_form == "dual_scalar":
            first, second = self.lambda_a.exp(), self.lambda_b.exp()
        else:
            first = (self.lambda_q1 * self.lambda_k1).sum().exp()
            second = (self.lambda_q2 * self.lambda_k2).sum().exp()
        return self.lambda_mix * (first - second + self.lambda_init)

    def maps(self, x: Tensor, rope: Rope | None, cache: LayerCache | None) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, h, 2, T, d), k (B, hkv, 2, S, d) and v (B, hkv, S, dv), S counting the cached tokens."""
        q, k = (p(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for p in (self.q, self.k))  # (B, 2h, T, d)
        v = self.v(x).unflatten(-1, (-1, self.value_width)).transpose(1, 2)  # (B, hkv, T, dv)
        q, k = rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope)
        if cache is not None:
            k, v = cache.append(k, v)
        return q.unflatten(1, (-1, 2)), k.unflatten(1, (-1, 2)), v

    def merge(self, y: Tensor) -> Tensor:
        """(B, T, D) from the heads y (B, h, T, dv)."""
        y = self.head_norm(y) * (1 - self.lambda_init)
        return self.out(self.scale_norm(y.transpose(1, 2).flatten(2)))

    def forward(self, x: Tensor, rope: Rope | None, mask: Mask, cache: LayerCache | None = None) -> Tensor:
        """x (B, T, D) -> (B, T, D)."""
        q, k, v = self.maps(x, rope, cache)
        dropout = self.dropout if self.training else 0.0
        return self.merge(attend_diff(q, k, v, self.lam(), mask, self.backend, dropout))

    def flops(self, context: int) -> int:
        """Forward FLOPs per token of the products with the T x T maps: each of 2h maps meets k (d) and v (dv)."""
        return 2 * context * 2 * self.heads * (self.width + self.value_width)


def _check(cfg: "DecoderConfig") -> None:
    opt = cfg.diff
    for name, allowed in CHOICES.items():
        if getattr(opt, name) not in allowed:
            raise ValueError(f"model.diff.{name}={getattr(opt, name)} is unknown: use one of {', '.join(allowed)}")
    for name, count in (("n_head", cfg.n_head), ("n_kv_head", cfg.n_kv_head)):
        if opt.heads == "half" and count % 2:
            wrong = f"diff pairs heads, so model.{name}={count} must be even"
            raise ValueError(f"{wrong}: use model.{name}={count + 1}")
    if opt.lambda_warmup < 0:
        raise ValueError(f"model.diff.lambda_warmup={opt.lambda_warmup} is negative: use 0 for none")
