"""Softmax attention: the baseline."""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from model.attention.backends import attend, check_backend
from model.attention.mask import Mask
from model.cache import LayerCache
from model.rotary import Rope, rotate

if TYPE_CHECKING:
    from model.config import DecoderConfig


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al., arXiv 1706.03762) with grouped key/value heads and RoPE."""

    def __init__(self, cfg: "DecoderConfig", layer: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = cfg.n_head, cfg.n_kv_head, cfg.head_dim
        self.backend, self.dropout = cfg.backend, cfg.attention_dropout
        check_backend(cfg.backend, self.width, self.width, cfg.attention_dropout)
        self.q = nn.Linear(cfg.d_model, self.heads * self.width, bias=cfg.bias)
        self.k = nn.Linear(cfg.d_model, self.kv_heads * self.width, bias=cfg.bias)
        self.v = nn.Linear(cfg.d_model, self.kv_heads * self.width, bias=cfg.bias)
        self.out = nn.Linear(self.heads * self.width, cfg.d_model, bias=cfg.bias)

    def forward(self, x: Tensor, rope: Rope | None, mask: Mask, cache: LayerCache | None = None) -> Tensor:
        """x (B, T, D) -> (B, T, D)."""
        return self.out(self.heads_of(x, rope, mask, cache).transpose(1, 2).flatten(2))

    def heads_of(self, x: Tensor, rope: Rope | None, mask: Mask, cache: LayerCache | None) -> Tensor:
        """The heads' outputs (B, H, T, d), before they are merged."""
        q, k, v = (p(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = rotate(q, rope), rotate(k, rope)  # (B, H, T, d), (B, Hkv, T, d)
        if cache is not None:
            k, v = cache.append(k, v)
        return attend(q, k, v, mask, self.backend, self.dropout if self.training else 0.0)

    def flops(self, context: int) -> int:
        """Forward FLOPs per token of the products with the T x T maps (q k' and its product with v)."""
        return 2 * context * self.heads * (self.width + self.width)
