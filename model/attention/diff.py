import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from ..layers import RMSNorm, fill_normal, make_norm
from .backends import attend_diff
from .base import HEAD_NORMS, Attention, AttentionConfig, Carry, Heads
from .mask import Mask


@dataclass
class DiffConfig:
    """Options of `diff`; the defaults are the paper's."""

    heads: Annotated[str, ("half", "double")] = "half"  # n_head / 2, values twice as wide; or n_head, twice the q and k
    lambda_form: Annotated[str, ("vectors", "dual_scalar", "fixed")] = "vectors"  # timm's exp(a) - exp(b) + lambda_init
    lambda_init: float | None = None  # one constant for all layers; None: the paper's schedule over depth
    lambda_warmup: Annotated[int, "[0, inf)"] = 0  # steps over which lambda grows from 0 to its value
    head_norm: Annotated[str, HEAD_NORMS] = "affine"  # affine, plain: RMSNorms; in Python also a factory, width -> module
    qk_norm: bool = False  # an RMSNorm over each head's queries and keys
    scale_norm: bool = False  # an RMSNorm over the merged heads
    head_scale: float | None = None  # constant factor behind the norm of the heads; None: the paper's 1 - lambda_init


VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def lambda_init(layer: int) -> float:
    """0.8 - 0.6 exp(-0.3 layer), layer counted from 0 (the paper's l - 1; arXiv 2410.05258, section 2.1)."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


def paired_heads(cfg: AttentionConfig, pairs: int = 2) -> Heads:
    """Heads of two maps with a query and a key each: `pairs` baseline heads make one. ValueError: n_kv_head is no multiple."""
    if cfg.n_kv_head % pairs:  # which divides n_head
        wrong = f"heads are paired, and n_head={cfg.n_head} or n_kv_head={cfg.n_kv_head} is odd"
        raise ValueError(f"{wrong}: use even numbers, or (diff) heads=double")
    d = cfg.head_dim
    return Heads(cfg.n_head // pairs, cfg.n_kv_head // pairs, d, pairs * d, queries=2, keys=2, maps=2)


class DiffAttention(Attention):
    """(softmax(Q1 K1' / sqrt d) - lam softmax(Q2 K2' / sqrt d)) V, then a norm per head (arXiv 2410.05258, eq. 1-3).

    Query rows of component c of head i are those of baseline head 2i + c; grouped keys are paired first, then repeated. lam
    is one scalar per layer, exp(lq1.lk1) - exp(lq2.lk2) + lambda_init in float32; heads are scaled by 1 - lambda_init.
    """

    name = "diff"
    row_sums = "positive"
    Options = DiffConfig
    free_options = ("lambda_warmup",)
    colours = {"diff": "#D55E00"}

    def head_shape(self, cfg: AttentionConfig) -> Heads:
        if self.options.head_scale is None and not (self.options.lambda_init or 0) < 1:
            given = self.options.lambda_init
            raise ValueError(f"heads are scaled by 1 - lambda_init, and {given} is not below 1: use lambda_init=0.8")
        return paired_heads(cfg, 2 if self.options.heads == "half" else 1)

    def make_parameters(self, cfg: AttentionConfig, layer: int) -> None:
        super().make_parameters(cfg, layer)
        opt, eps = self.options, cfg.norm_eps
        self.lambda_init = lambda_init(layer) if opt.lambda_init is None else opt.lambda_init
        names = {"vectors": VECTORS, "dual_scalar": ("lambda_a", "lambda_b"), "fixed": ()}[opt.lambda_form]
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.empty(self.width if name in VECTORS else ())))
        # The factor of the warm-up, saved with the weights: a checkpoint from mid-warm-up evaluates as it was trained.
        self.register_buffer("lambda_mix", torch.ones(()))
        self.q_norm = RMSNorm(self.width, eps) if opt.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.width, eps) if opt.qk_norm else nn.Identity()
        self.head_norm = make_norm(opt.head_norm, self.value_width, True, eps)
        self.scale_norm = RMSNorm(self.heads * self.value_width, eps) if opt.scale_norm else nn.Identity()

    def init_own(self, generator: torch.Generator) -> None:
        self.lambda_mix.fill_(1)
        # Not zero: d lam / d lq1 is proportional to lk1, so vectors that start at zero stay zero.
        for name, p in self.named_parameters(recurse=False):
            fill_normal(p, 0.1, generator) if name in VECTORS else nn.init.zeros_(p)

    def set_lambda_init(self, depth: int) -> None:
        """Take the paper's lambda_init of layer `depth`, from 0, for example after blocks were reordered."""
        self.lambda_init = lambda_init(depth)

    @property
    def head_scale(self) -> float:
        return 1 - self.lambda_init if self.options.head_scale is None else self.options.head_scale

    def set_step(self, step: int) -> None:
        # Also without a warm-up: the weights may come from a checkpoint in the middle of a warm-up.
        warmup = self.options.lambda_warmup
        self.lambda_mix.fill_(min(1.0, (step + 1) / warmup) if warmup else 1.0)

    def lam(self) -> Tensor:
        """lambda, a scalar () in float32 or better (arXiv 2410.05258, equation 2), times the factor of the warm-up."""
        dtype = torch.promote_types(self.lambda_mix.dtype, torch.float32)
        mix = self.lambda_mix.to(dtype)
        if self.options.lambda_form == "fixed":
            return mix * self.lambda_init
        first, second = self.exponentials(dtype)
        return mix * (first - second + self.lambda_init)

    def exponentials(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self.options.lambda_form == "dual_scalar":
            return self.lambda_a.to(dtype).exp(), self.lambda_b.to(dtype).exp()
        q1, k1, q2, k2 = (getattr(self, name).to(dtype) for name in VECTORS)
        return (q1 * k1).sum().exp(), (q2 * k2).sum().exp()

    def before(self, q: Tensor, k: Tensor, v: Tensor, carry: Carry) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_norm(q), self.k_norm(k), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, mask: Mask) -> Tensor:
        q, k = q.unflatten(1, (-1, 2)), k.unflatten(1, (-1, 2))  # (B, h, 2, T, d), (B, hkv, 2, S, d)
        return attend_diff(q, k, v, self.lam(), mask, self.backend, self.dropout_now)

    def after(self, y: Tensor) -> Tensor:
        return self.head_norm(y) * self.head_scale

    def merge(self, y: Tensor) -> Tensor:
        return self.scale_norm(super().merge(y))

    def readings(self, x: Tensor) -> dict[str, Tensor]:
        values = {"lambda": self.lam(), "lambda_init": torch.full_like(self.lambda_mix, self.lambda_init)}
        if self.options.lambda_warmup:
            values["lambda_mix"] = self.lambda_mix
        if self.options.lambda_form != "fixed":
            values["lambda_first"], values["lambda_second"] = self.exponentials(self.lambda_mix.dtype)
        if self.options.lambda_form == "vectors":
            values |= {f"{name}_norm": getattr(self, name).norm() for name in VECTORS}
        return values
