"""What all attention variants share: options, projections to heads, RoPE, KV cache, dropout, merging, FLOPs, initial values.

A variant is a subclass of `Attention` in a file of its own. It says what it is in class attributes, and overrides the steps
of `Attention.forward` in which it differs.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from ..cache import LayerCache
from ..layers import RMSNorm, initialize
from ..rotary import Rope, rotate
from .backends import attend, check_backend
from .mask import CAUSAL, Mask

BACKENDS = ("auto", "math", "sdpa", "blocked", "flex", "fused")

Carry = dict[str, Tensor]
"""What the layers of one forward pass hand to later layers, by name. The decoder makes an empty one for every pass."""


@dataclass
class AttentionConfig:
    """What every attention takes, whatever its variant."""

    d_model: int = 256  # width of the residual stream
    n_head: int = 8  # heads of the baseline; a variant derives its own number
    n_kv_head: int | None = None  # key and value heads of the baseline; None: n_head
    head_dim: int | None = None  # width of a head; None: d_model / n_head
    bias: bool = False  # biases in linear layers and LayerNorms
    norm_eps: float = 1e-5  # added inside the root of every norm
    attention_dropout: float = 0.0  # of the attention maps
    backend: str = "auto"  # auto | math | sdpa | blocked | flex | fused, see model/attention/backends.py

    def filled(self) -> Self:
        """A copy with n_kv_head and head_dim filled in, checked. ValueError names the override that mends it."""
        check_choice("model.backend", self.backend, BACKENDS)
        if min(self.n_head, self.d_model) < 1:
            raise ValueError("a model size is not positive: n_head and d_model must be at least 1")
        if self.head_dim is None and self.d_model % self.n_head:
            wrong = f"model.n_head={self.n_head} does not divide model.d_model={self.d_model}"
            raise ValueError(
                f"{wrong}: use model.n_head={_nearest_divisor(self.d_model, self.n_head)} or give model.head_dim"
            )
        n_kv_head = self.n_kv_head or self.n_head
        if self.n_head % n_kv_head:
            wrong = f"model.n_kv_head={n_kv_head} does not divide model.n_head={self.n_head}"
            raise ValueError(f"{wrong}: use model.n_kv_head={_nearest_divisor(self.n_head, n_kv_head)}")
        check_probability("model.attention_dropout", self.attention_dropout)
        return replace(self, n_kv_head=n_kv_head, head_dim=self.head_dim or self.d_model // self.n_head)


class Heads(NamedTuple):
    """How many heads an attention has, and what one head is made of."""

    heads: int
    kv_heads: int
    width: int  # of one query and one key
    value_width: int
    queries: int = 1  # of one head
    keys: int = 1  # of one key/value head
    maps: int = 1  # softmax maps of one head


class Attention(nn.Module):
    """Multi-head softmax attention (Vaswani et al., arXiv 1706.03762) with grouped key/value heads and RoPE.

    cfg: the options of every attention; a DecoderConfig brings the variant's own options in the group `name`. layer: counted
    from 0. options: the variant's own, where `cfg` is a plain AttentionConfig or others are wanted. seed: of the initial
    weights; None leaves them to the caller. ValueError for options that cannot be; it names the override that mends it.
    """

    name: ClassVar[str]  # of configs/model/NAME.yaml, and of the option group in DecoderConfig
    Options: ClassVar[type | None] = None  # dataclass of the variant's own options
    choices: ClassVar[dict[str, tuple[str, ...]]] = {}  # option -> its allowed values
    free_options: ClassVar[tuple[str, ...]] = ()  # options that trained weights do not depend on
    undecayed: ClassVar[tuple[str, ...]] = ()  # submodules without weight decay; vectors and scalars never have it
    colours: ClassVar[dict[str, str]] = {}  # name of a configs/model file -> colour in figures

    def __init__(self, cfg: AttentionConfig, layer: int = 0, options: Any = None, seed: int | None = 0) -> None:
        super().__init__()
        cfg = cfg.filled()
        self.options = options or getattr(cfg, self.name, None) or (self.Options and self.Options())
        for option, allowed in self.choices.items():
            check_choice(f"model.{self.name}.{option}", getattr(self.options, option), allowed)
        self.shape = self.head_shape(cfg)
        self.heads, self.kv_heads, self.width, self.value_width = self.shape[:4]
        self.backend, self.dropout = cfg.backend, cfg.attention_dropout
        check_backend(cfg.backend, self.width, self.value_width, cfg.attention_dropout, self.shape.maps)
        self.make_parameters(cfg, layer)
        if seed is not None and not self.out.weight.is_meta:
            initialize(self, seed)

    # ---------------------------------------- what it is made of

    def head_shape(self, cfg: AttentionConfig) -> Heads:
        """The heads, from a filled `cfg`. ValueError for options that do not fit it."""
        return Heads(cfg.n_head, cfg.n_kv_head, cfg.head_dim, cfg.head_dim)

    def make_parameters(self, cfg: AttentionConfig, layer: int) -> None:
        """Make parameters and submodules. Their order decides that of sums over all of them, as the gradient norm."""
        self.make_projections(cfg)
        self.make_out(cfg)

    def make_projections(self, cfg: AttentionConfig) -> None:
        """Projections of the input to the queries, keys and values of all heads."""
        _, _, width, value_width, queries, keys, _ = self.shape
        self.q = nn.Linear(cfg.d_model, self.heads * queries * width, bias=cfg.bias)
        self.k = nn.Linear(cfg.d_model, self.kv_heads * keys * width, bias=cfg.bias)
        self.v = nn.Linear(cfg.d_model, self.kv_heads * value_width, bias=cfg.bias)

    def make_out(self, cfg: AttentionConfig) -> None:
        """The projection of the merged heads into the residual stream."""
        self.out = nn.Linear(self.heads * self.value_width, cfg.d_model, bias=cfg.bias)

    def init_own(self, generator: torch.Generator) -> None:
        """Set the initial values of parameters that are neither matrices, biases nor norms."""

    # ---------------------------------------- what it computes

    def forward(
        self,
        x: Tensor,
        rope: Rope | None = None,
        mask: Mask = CAUSAL,
        cache: LayerCache | None = None,
        carry: Carry | None = None,
    ) -> Tensor:
        """x (B, T, D) -> (B, T, D). rope: rotations of the T positions. carry: what earlier layers of this pass left."""
        return self.out(self.merge(self.heads_of(x, rope, mask, cache, carry)))

    def heads_of(
        self, x: Tensor, rope: Rope | None, mask: Mask, cache: LayerCache | None, carry: Carry | None
    ) -> Tensor:
        """The heads' outputs (B, h, T, value_width), before they are merged."""
        q, k, v = self.before(*self.project(x), {} if carry is None else carry)
        q, k = self.turn(q, rope), self.turn(k, rope)
        if cache is not None:
            k, v = cache.append(k, v)
        return self.after(self.attend(q, k, v, x, mask))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, h queries, T, width), keys (B, hkv keys, T, width) and values (B, hkv, T, value_width) of x (B, T, D)."""
        return split(self.q(x), self.width), split(self.k(x), self.width), split(self.v(x), self.value_width)

    def before(self, q: Tensor, k: Tensor, v: Tensor, carry: Carry) -> tuple[Tensor, Tensor, Tensor]:
        """Change queries, keys and values, shaped as `project` returns them, before RoPE and the cache."""
        return q, k, v

    def turn(self, x: Tensor, rope: Rope | None) -> Tensor:
        """Queries or keys rotated by their positions."""
        return rotate(x, rope)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, mask: Mask) -> Tensor:
        """The maps' products with the values, (B, h, T, value_width); keys and values include the cached ones."""
        return attend(q, k, v, mask, self.backend, self.dropout_now)

    def after(self, y: Tensor) -> Tensor:
        """Change the heads' outputs y (B, h, T, value_width)."""
        return y

    def merge(self, y: Tensor) -> Tensor:
        """(B, T, h value_width) from (B, h, T, value_width)."""
        return y.transpose(1, 2).flatten(2)

    @property
    def dropout_now(self) -> float:
        """The dropout of the maps: none outside of training."""
        return self.dropout if self.training else 0.0

    def flops(self, context: int) -> int:
        """Forward FLOPs per token of the products with the T x T maps: queries with keys, maps with values."""
        return 2 * context * self.heads * (self.shape.queries * self.width + self.shape.maps * self.value_width)

    # ---------------------------------------- how it is trained and watched

    def optimizer_group(self, name: str, p: Tensor) -> str:
        """How parameter `name` of this module is trained: undecayed, decayed, or muon (decayed, where there is no Muon)."""
        if p.dim() < 2 or name.split(".")[0] in self.undecayed:
            return "undecayed"
        return "muon" if p.dim() == 2 else "decayed"

    def set_step(self, step: int) -> None:
        """Training is about to take optimizer step `step`, counted from 0: a warm-up follows it."""

    def readings(self, x: Tensor) -> dict[str, Tensor]:
        """What the monitor may read besides the maps, as scalars by name, at the input x (B, T, D)."""
        return {}


def split(x: Tensor, width: int) -> Tensor:
    """(B, T, heads width) -> (B, heads, T, width)."""
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


def make_head_norm(kind: str, width: int, eps: float) -> nn.Module:
    """An RMSNorm over each head's output: affine, plain (no weight), or none."""
    return nn.Identity() if kind == "none" else RMSNorm(width, eps, affine=kind == "affine")


def mean_and_spread(name: str, values: Tensor) -> dict[str, Tensor]:
    """`values` as the two readings `name` and `name_std`."""
    return {name: values.mean(), f"{name}_std": values.std(correction=0)}


def check_choice(key: str, value: str, allowed: tuple[str, ...]) -> None:
    """ValueError unless `value` of the configuration's `key` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{key}={value} is unknown: use one of {', '.join(allowed)}")


def check_probability(key: str, value: float) -> None:
    """ValueError unless 0 <= value < 1."""
    if not 0 <= value < 1:
        raise ValueError(f"{key}={value} is not a probability below 1: use {key}=0.1")


def _nearest_divisor(number: int, wish: int) -> int:
    return min((n for n in range(1, number + 1) if number % n == 0), key=lambda n: abs(n - wish))
