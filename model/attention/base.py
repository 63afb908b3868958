"""What all attention variants share. A variant is a subclass of `Attention` in another file, which overrides the steps of
`Attention.mix` in which it differs, and whose class attributes describe it.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cache import LayerCache
from ..layers import initialize
from ..ranges import check_ranges
from ..rotary import Rope, RopeScaling, rope_table, rotate
from . import probe
from .backends import BACKENDS, attend, attend_map, check_backend, prepare_block_mask
from .mask import Mask, alibi_slopes
from .reference import softmax

HEAD_NORMS = ("affine", "plain", "layernorm", "none")  # of each head's output

Carry = dict[str, Tensor]  # what a layer leaves, by name, for later layers of the same forward pass
Ropes = tuple[Rope | None, Rope | None]  # the rotations of the queries, and those of the keys


@dataclass
class AttentionConfig:
    """The options that all variants have."""

    d_model: Annotated[int, "[1, inf)"] = 256  # width of the residual stream
    n_head: Annotated[int, "[1, inf)"] = 8  # heads of the baseline; a variant derives another number
    n_kv_head: Annotated[int | None, "[1, inf)"] = None  # key and value heads of the baseline; None: n_head
    head_dim: Annotated[int | None, "[1, inf)"] = None  # width of a head; None: d_model / n_head
    bias: bool = False  # biases in linear layers and LayerNorms (those of heads always have one)
    qkv_bias: bool | None = None  # biases of the query, key and value projections; None: as `bias`
    projection_bias: bool | None = None  # bias of the attention's output projection; None: as `bias`
    norm_eps: Annotated[float, "[0, 1)"] = 1e-5  # added under the square root of every norm
    attention_dropout: Annotated[float, "[0, 1)"] = 0.0  # dropout probability of the attention weights
    projection_dropout: Annotated[float, "[0, 1)"] = 0.0  # dropout probability after the attention's output projection
    position: Annotated[str, ("rope", "alibi", "learned", "none")] = "rope"  # learned: the decoder adds them to the tokens'
    rope_theta: Annotated[float, "(0, inf)"] = 10000.0  # base of the rotary frequencies
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)  # slower rotations, for a longer context
    rope_layout: Annotated[str, ("half", "interleaved")] = "half"  # Llama, GPT-NeoX; or GPT-J, the published differential code
    backend: Annotated[str, BACKENDS] = "auto"  # auto, math, sdpa, one_call, two_calls, four_calls, cpu, flex, fused

    def filled(self) -> Self:
        """A checked copy with the heads and biases filled in. ValueError names the option that corrects the error."""
        check_ranges(self)
        self.rope_scaling.check()
        if self.head_dim is None:
            check_divisor("n_head", self.n_head, "d_model", self.d_model)
        n_kv_head, head_dim = self.n_kv_head or self.n_head, self.head_dim or self.d_model // self.n_head
        check_divisor("n_kv_head", n_kv_head, "n_head", self.n_head)
        if self.position == "rope" and head_dim % 2:
            raise ValueError(f"RoPE needs an even head width, not {head_dim}: change n_head or head_dim")
        qkv_bias = self.bias if self.qkv_bias is None else self.qkv_bias
        projection_bias = self.bias if self.projection_bias is None else self.projection_bias
        return replace(self, n_kv_head=n_kv_head, head_dim=head_dim, qkv_bias=qkv_bias, projection_bias=projection_bias)


class Heads(NamedTuple):
    """Number and shape of an attention's heads. A differential head has two queries and two maps, in V1 also two keys."""

    heads: int
    kv_heads: int
    width: int  # width of a query and of a key
    value_width: int
    queries: int = 1  # queries per head
    keys: int = 1  # keys per key/value head
    maps: int = 1  # softmax maps per head


class Attention(nn.Module):
    """Multi-head softmax attention (Vaswani et al., arXiv 1706.03762) with grouped key/value heads.

    `DiffAttention(d_model=512, n_head=16, layer=3)` builds one module: keywords set fields of AttentionConfig and of the
    variant's `Options`. A decoder passes `cfg` instead, with the variant's options in the field called like the variant
    (cfg.diff). layer: from 0. With seed=None, or on the device meta, the caller sets the weights (`reset_parameters`).
    """

    name: ClassVar[str]  # NAME of configs/model/NAME.yaml, and name of the variant's option group in DecoderConfig
    Options: ClassVar[type | None] = None  # dataclass of the variant's options
    free_options: ClassVar[tuple[str, ...]] = ()  # options that may change when training starts from trained weights
    per_head: ClassVar[dict[str, float]] = {}  # name of a learned number per head -> its first value
    undecayed: ClassVar[tuple[str, ...]] = ()  # names without weight decay; vectors and scalars never have it
    row_sums: ClassVar[str] = "one"  # one, positive (while lambda is below 1), or any: no divisor (METHODS, 7.3)
    whole: ClassVar[bool] = False  # whether rows of its map depend on earlier rows, so that all are computed at once
    joins_calls: ClassVar[bool] = False  # calls operations of backends.py several times; to a probe all calls' maps are heads
    takes_context: bool = True  # whether it can be cross attention (context=)
    colours: ClassVar[dict[str, str]] = {}  # name of a file in configs/model -> its colour in figures

    def __init__(
        self,
        cfg: AttentionConfig | None = None,
        layer: int = 0,
        seed: int | None = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__()
        cfg, self.options = self._settings(cfg, keywords)
        self.shape = self.head_shape(cfg)
        self.heads, self.kv_heads, self.width, self.value_width = self.shape[:4]
        self.backend, self.dropout, self.projection_dropout = cfg.backend, cfg.attention_dropout, cfg.projection_dropout
        self.cfg = cfg
        self.slopes = alibi_slopes(self.heads) if cfg.position == "alibi" else None
        kind = type(self)
        self.makes_map = kind.bias is not Attention.bias or kind.normalize is not Attention.normalize
        self.needs_dense = self.makes_map or self.slopes is not None  # no kernel that skips blocks takes its scores
        check_backend(cfg.backend, self.width, self.value_width, cfg.attention_dropout, self.shape.maps, self.needs_dense)
        with nullcontext() if device is None else torch.device(device):
            self.make_parameters(cfg, layer)
            for name in self.per_head:
                self.register_parameter(name, nn.Parameter(torch.empty(self.heads)))
        if dtype is not None:
            self.to(dtype)
        if seed is not None and not self.out.weight.is_meta:
            self.reset_parameters(seed)

    @classmethod
    def _settings(cls, cfg: AttentionConfig | None, keywords: dict) -> tuple[AttentionConfig, Any]:
        """The filled configuration and the variant's options, both with the keywords' changes."""
        cfg = AttentionConfig() if cfg is None else cfg
        if not isinstance(cfg, AttentionConfig):
            raise ValueError(f"{cfg!r} is not a configuration: use {cls.__name__}(d_model=..., n_head=...)")
        options = getattr(cfg, cls.name, None) or (cls.Options and cls.Options())
        shared, special = ({f.name for f in fields(kind)} if kind else set() for kind in (cfg, options))
        if unknown := keywords.keys() - shared - special:
            known = ", ".join(sorted(shared | special))
            raise ValueError(f"{cls.__name__} has no option {', '.join(sorted(unknown))}: use {known}")
        if options is not None:
            options = replace(options, **{key: keywords[key] for key in keywords.keys() & special})
            check_ranges(options)
        return replace(cfg, **{key: keywords[key] for key in keywords.keys() - special}).filled(), options

    def reset_parameters(self, seed: int = 0) -> None:
        initialize(self, seed)

    # ---------------------------------------- what it is made of

    def head_shape(self, cfg: AttentionConfig) -> Heads:
        """Number and widths of the heads for a `cfg` made by `filled`. ValueError if the variant's options exclude it."""
        return Heads(cfg.n_head, cfg.n_kv_head, cfg.head_dim, cfg.head_dim)

    def make_parameters(self, cfg: AttentionConfig, layer: int) -> None:
        """Make parameters and submodules. Sums over them (gradient norm) follow their order: another one changes last bits."""
        self.make_projections(cfg)
        self.make_out(cfg)

    def make_projections(self, cfg: AttentionConfig) -> None:
        """Projections of the input to the queries, keys and values of all heads."""
        self.q = nn.Linear(cfg.d_model, self.heads * self.shape.queries * self.width, bias=cfg.qkv_bias)
        self.k = nn.Linear(cfg.d_model, self.kv_heads * self.shape.keys * self.width, bias=cfg.qkv_bias)
        self.v = nn.Linear(cfg.d_model, self.kv_heads * self.value_width, bias=cfg.qkv_bias)

    def make_out(self, cfg: AttentionConfig) -> None:
        """The projection of the merged heads into the residual stream."""
        self.out = nn.Linear(self.heads * self.value_width, cfg.d_model, bias=cfg.projection_bias)

    def init_own(self, generator: torch.Generator) -> None:
        """Set the initial values of parameters that are neither matrices, biases nor norms."""
        for name, start in self.per_head.items():
            nn.init.constant_(getattr(self, name), start)

    # ---------------------------------------- what it computes

    def forward(
        self,
        x: Tensor,
        rope: Rope | None = None,
        mask: Mask | Tensor | None = None,
        cache: LayerCache | None = None,
        carry: Carry | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        """Attention of x (B, T, D) to itself, or to `context`; returns (B, T, D).

        rope: rotations of the T positions; with None the module computes them. mask: a Mask, or a tensor that broadcasts to
        (B, H, T, S): bool, True where a key is visible, or numbers to add to the scores; with None the mask is causal, and with
        a context there is no mask. cache: keys and values of earlier tokens; x then holds the last T of S positions. carry:
        tensors that earlier layers of this pass hand on. context (B, S, D): cross attention, keys at positions from 0 on.
        """
        if x.dim() != 3:
            raise ValueError(f"the input is {tuple(x.shape)}, not (B, T, D): give x[None] for a single sequence")
        if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[0] == x.shape[0] == x.shape[1] > 1:
            wrong = f"a mask {tuple(mask.shape)} for {x.shape[0]} sequences of as many tokens may be (B, S) or (T, S)"
            raise ValueError(f"{wrong}: give Mask(keys=mask) for padding, or mask[None] for the rows of the queries")
        source, mask = x if context is None else context, self._mask(mask, context, cache)
        ropes = self._ropes(x, source, rope, cache)
        y = self.out(self.mix(x, source, ropes, mask, cache, {} if carry is None else carry))
        return F.dropout(y, self.projection_dropout, self.training) if self.projection_dropout else y

    def prepare(self, x: Tensor, mask: Mask) -> None:
        """Make the block mask that `mask` keeps for all layers, if a kernel needs one; x (B, T, D): the input of any layer."""
        width = self.width * self.shape.queries // self.shape.maps  # that of a map's product of queries and keys
        if not self.needs_dense:
            for sets in self.key_sets:
                prepare_block_mask(x, width, self.value_width, mask, self.backend, self.dropout_now, sets)

    @property
    def key_sets(self) -> tuple[int, ...]:
        return (1,)  # of each call of a backends.py operation, the number of its key sets

    def mix(self, x: Tensor, source: Tensor, ropes: Ropes, mask: Mask, cache: LayerCache | None, carry: Carry) -> Tensor:
        """Merged heads (B, T, h value_width), before the output projection; queries from x, keys and values from `source`."""
        q, k, v = self.before(*self.project(x, source), carry)
        q, k = self.turn(q, ropes[0]), self.turn(k, ropes[1])
        if cache is not None:
            k, v = cache.append(k, v)
        if (bias := self.bias(q, k, x, mask, cache)) is not None:
            mask = replace(mask, bias=bias if mask.bias is None else mask.bias + bias)
        return self.merge(self.after(self.attend(q, k, v, x, mask)))

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, h queries, T, width) of x, keys (B, hkv keys, S, width), values (B, hkv, S, value_width) of source."""
        k, v = split(self.k(source), self.width), split(self.v(source), self.value_width)
        return split(self.q(x), self.width), k, v

    def before(self, q: Tensor, k: Tensor, v: Tensor, carry: Carry) -> tuple[Tensor, Tensor, Tensor]:
        """Change queries, keys and values, shaped as `project` returns them, before RoPE and the cache."""
        return q, k, v

    def turn(self, x: Tensor, rope: Rope | None) -> Tensor:
        return rotate(x, rope)

    def bias(self, q: Tensor, k: Tensor, x: Tensor, mask: Mask, cache: LayerCache | None) -> Tensor | None:
        """Numbers to add to the scaled scores q k' / sqrt(d), (B, 1 or h, T, S), or None; keys include the cached ones.

        What it needs of earlier tokens it keeps with `cache.append(a, b, slot=1)`, a and b (B, H, T, any width).
        """
        return None

    def normalize(self, scores: Tensor, see: Tensor) -> Tensor:
        """A map's weights (B, h, T, S) from its scores q k' / sqrt(d) + bias, of the same shape, in float32 or better.

        scores: -inf where `see` hides a key, except in rows that see no key, whose weights are set to 0 afterwards. T may be a
        part of the queries, unless the variant sets `whole`. With m maps per head, scores are (B, h, m, T, S).
        """
        return softmax(scores, see)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, mask: Mask) -> Tensor:
        """The maps' products with the values, (B, h, T, value_width), by operations of backends.py, which probes read."""
        if self.makes_map:
            return attend_map(q, k, v, mask, self.normalize, "math" if self.whole else self.backend, self.dropout_now)
        return attend(q, k, v, mask, self.backend, self.dropout_now)

    def after(self, y: Tensor) -> Tensor:
        """Change the heads' outputs y (B, h, T, value_width)."""
        return y

    def merge(self, y: Tensor) -> Tensor:
        return y.transpose(1, 2).flatten(2)  # (B, T, h value_width)

    def _mask(self, mask: Mask | Tensor | None, context: Tensor | None, cache: LayerCache | None) -> Mask:
        if mask is None:
            # A new Mask in every pass: it keeps that pass's tensors, and torch.export would leave empty ones in a shared Mask.
            mask = Mask(causal=context is None)
        elif isinstance(mask, Tensor):  # as in torch's SDPA: without the causal rule
            mask = Mask(causal=False, **{"see" if mask.dtype == torch.bool else "bias": mask})
        if self.whole and cache is not None and not (mask.see is mask.bias is None):
            raise ValueError(f"{self.name} computes all rows of a mask with see= or bias= again: leave out cache=")
        if context is None:
            return mask if self.slopes is None else replace(mask, slopes=self.slopes)
        if not self.takes_context or probe.active is not None:
            who = self.name if probe.active is None else "a probe"
            raise ValueError(f"{who} takes no context, whose tokens have no queries: leave out context=")
        if cache is not None or self.slopes is not None:
            raise ValueError("cross attention (context=) has no cache and no ALiBi: leave out cache=, use position='none'")
        if mask.causal or mask.window is not None or mask.documents is not None:
            raise ValueError("cross attention (context=) has no order and no documents: use mask=Mask(causal=False, keys=...)")
        return mask

    def _ropes(self, x: Tensor, source: Tensor, rope: Rope | None, cache: LayerCache | None) -> Ropes:
        if self.cfg.position != "rope" or (rope is not None and source is x):
            return rope, rope
        if rope is not None:
            raise ValueError("in cross attention (context=) the module itself makes the rotations: leave out rope=")
        start = 0 if cache is None else cache.length
        return tuple(rope_of(self.cfg, each.shape[1], each.device, start) for each in (x, source))

    @property
    def dropout_now(self) -> float:
        return self.dropout if self.training else 0.0

    def flops(self, context: int) -> int:
        """Forward FLOPs per token of the products with the T x T maps: queries with keys, maps with values."""
        keys = context * sum(self.key_sets)
        return 2 * keys * self.heads * (self.shape.queries * self.width + self.shape.maps * self.value_width)

    # ---------------------------------------- how it is trained and watched

    def set_step(self, step: int) -> None:
        """Called before optimizer step `step`, counted from 0. Override it for values that follow the step (a warm-up)."""

    def readings(self, x: Tensor) -> dict[str, Tensor]:
        """Scalars that the monitor logs, by name, for the layer's input x (B, T, D): for example lambda or a gate's mean."""
        values = [mean_and_spread(name, getattr(self, name)) for name in self.per_head]
        return {key: value for each in values for key, value in each.items()}


def rope_of(cfg: AttentionConfig, length: int, device: torch.device, start: int) -> Rope:
    """The rotations of `length` positions from `start` on."""
    table = rope_table(length, cfg.head_dim, cfg.rope_theta, device, start, cfg.rope_scaling)
    return Rope(*table, interleaved=cfg.rope_layout == "interleaved")


def split(x: Tensor, width: int) -> Tensor:
    """(B, T, heads width) -> (B, heads, T, width)."""
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


def mean_and_spread(name: str, values: Tensor) -> dict[str, Tensor]:
    """`values` as the two readings `name` and `name_std`."""
    return {name: values.mean(), f"{name}_std": values.std(correction=0)}


def check_divisor(name: str, value: int, whole: str, number: int) -> None:
    """ValueError with the nearest divisor unless the `value` of the option `name` divides `number`, the value of `whole`."""
    if number % value:
        nearest = min((n for n in range(1, number + 1) if number % n == 0), key=lambda n: abs(n - value))
        raise ValueError(f"{name}={value} does not divide {whole}={number}: use {name}={nearest}")
