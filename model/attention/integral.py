"""Integral attention: one softmax over the mean of several logits, denoising without negative weights."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from model.attention.backends import attend, check_backend
from model.attention.mask import Mask
from model.cache import LayerCache
from model.rotary import Rope, rotate

if TYPE_CHECKING:
    from model.config import DecoderConfig


@dataclass
class IntegralConfig:
    """Options of `integral`. signals: how many query-key products of width d are averaged per map."""

    signals: int = 2


class IntegralAttention(nn.Module):
    """softmax(1/S sum_s Q_s K_s' / sqrt d) V (Kobyzev et al., Integral Transformer, arXiv 2508.18387).

    n_head / S heads, each with S signals of the baseline's width d and values of width S d, so that parameters equal the
    baseline's. Averaging logits is one product of the signals side by side, at temperature 1 / (S sqrt d).
    """

    def __init__(self, cfg: "DecoderConfig", layer: int) -> None:
        super().__init__()
        S = self.signals = cfg.integral.signals
        for name, count in (("n_head", cfg.n_head), ("n_kv_head", cfg.n_kv_head)):
            if S < 1 or count % S:
                wrong = f"model.integral.signals={S} does not divide model.{name}={count}"
                raise ValueError(f"{wrong}: use model.integral.signals=2 and an even number of heads")
        self.width, self.backend, self.dropout = cfg.head_dim, cfg.backend, cfg.attention_dropout
        check_backend(cfg.backend, S * self.width, S * self.width, cfg.attention_dropout)
        self.q = nn.Linear(cfg.d_model, cfg.n_head * self.width, bias=cfg.bias)
        self.k = nn.Linear(cfg.d_model, cfg.n_kv_head * self.width, bias=cfg.bias)
        self.v = nn.Linear(cfg.d_model, cfg.n_kv_head * self.width, bias=cfg.bias)
        self.out = nn.Linear(cfg.n_head * self.width, cfg.d_model, bias=cfg.bias)

    def _signals(self, x: Tensor, rope: Rope | None) -> Tensor:
        """(B, T, h S d) -> (B, h, T, S d): every signal is rotated by itself, then they stand side by side."""
        rotated = rotate(x.unflatten(-1, (-1, self.width)).transpose(1, 2), rope)  # (B, h S, T, d)
        return rotated.unflatten(1, (-1, self.signals)).transpose(2, 3).flatten(3)

    def forward(self, x: Tensor, rope: Rope | None, mask: Mask, cache: LayerCache | None = None) -> Tensor:
        """x (B, T, D) -> (B, T, D)."""
        q, k = self._signals(self.q(x), rope), self._signals(self.k(x), rope)
        v = self.v(x).unflatten(-1, (-1, self.signals * self.width)).transpose(1, 2)  # (B, hkv, T, S d)
        if cache is not None:
            k, v = cache.append(k, v)
        q = q * self.signals**-0.5  # the facade's own scale is 1 / sqrt(S d)
        y = attend(q, k, v, mask, self.backend, self.dropout if self.training else 0.0)
        return self.out(y.transpose(1, 2).flatten(2))

    def flops(self, context: int) -> int:
        """Forward FLOPs per token of the products with the T x T maps (q k' and its product with v)."""
        return 2 * context * (self.q.out_features + self.out.in_features)
