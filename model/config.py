"""The decoder's configuration: what `model=` and `size=` fill in."""

from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from model.attention.diff import DiffConfig
from model.attention.diff_v2 import DiffV2Config
from model.attention.gated import GatedConfig
from model.attention.integral import IntegralConfig
from model.attention.introspective import IntrospectiveConfig


@dataclass
class DecoderConfig:
    """Shape and parts of a decoder stack.

    `layers` has one letter per layer and is tiled over the depth: "d" is differential throughout, "bbdd" with
    n_layer=4 has a baseline lower half (letters: model/attention/__init__.py). `match` derives the width of the FFN so
    that the stack meets the baseline's non-embedding parameters, or its FLOPs per token, at the same n_layer, n_head,
    d_model and context; "none" keeps the baseline's own FFN width. d_ff, where given, wins over `match`; baseline_d_ff
    only changes the baseline that is matched.
    """

    layers: str = "b"  # a letter per layer, tiled over the depth: bd alternates
    n_layer: int = 4  # blocks
    n_head: int = 8  # heads of the baseline; a variant derives its own number
    n_kv_head: int | None = None  # key and value heads of the baseline; None: n_head
    d_model: int = 256  # width of the residual stream
    head_dim: int | None = None  # width of a head; None: d_model / n_head
    d_ff: int | None = None  # width of the feed-forward networks; None: derived by `match`
    baseline_d_ff: int | None = None  # of the matched baseline; None: 8/3 d_model (swiglu) or 4 d_model (gelu)
    match: str = "params"  # params | flops | none: what the stack has as much of as the baseline
    context: int = 256  # tokens of a training window
    vocab_size: int = 0  # 0: the tokenizer's, filled in by train.py
    document_mask: bool = False  # a token sees only its own document; documents begin with the token `eot`
    eot: int | None = None  # end-of-text token, the tokenizer's, filled in by train.py
    norm: str = "rmsnorm"  # rmsnorm | layernorm
    norm_eps: float = 1e-5  # added inside the root of every norm
    mlp: str = "swiglu"  # swiglu | gelu | gelu_tanh (GPT-2's own approximation)
    position: str = "rope"  # rope | learned | none
    rope_theta: float = 10000.0  # base of the rotary frequencies
    rope_layout: str = "half"  # half (Llama, GPT-NeoX) | interleaved (GPT-J, the published differential code)
    window: int | None = None  # sliding window: a query sees the last `window` keys, itself included; None: all
    bias: bool = False  # biases in linear layers and LayerNorms
    tie: bool = True  # output head = token embedding
    dropout: float = 0.0  # of the embedding and of what each sub-layer adds
    attention_dropout: float = 0.0  # of the attention maps
    backend: str = "auto"  # auto | math | sdpa | blocked | flex | fused, see model/attention/backends.py
    diff: DiffConfig = field(default_factory=DiffConfig)
    diff_v2: DiffV2Config = field(default_factory=DiffV2Config)
    gated: GatedConfig = field(default_factory=GatedConfig)
    integral: IntegralConfig = field(default_factory=IntegralConfig)
    introspective: IntrospectiveConfig = field(default_factory=IntrospectiveConfig)

    def filled(self) -> "DecoderConfig":
        """A copy with the heads filled in (not yet d_ff), checked. ValueError names the override that mends it."""
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"model.{name}={getattr(self, name)} is unknown: use one of {', '.join(allowed)}")
        if min(self.n_layer, self.n_head, self.d_model, self.context) < 1:
            raise ValueError("a model size is not positive: n_layer, n_head, d_model and context must be at least 1")
        if self.head_dim is None and self.d_model % self.n_head:
            wrong = f"model.n_head={self.n_head} does not divide model.d_model={self.d_model}"
            raise ValueError(
                f"{wrong}: use model.n_head={_nearest_divisor(self.d_model, self.n_head)} or give model.head_dim"
            )
        head_dim = self.head_dim or self.d_model // self.n_head
        n_kv_head = self.n_kv_head or self.n_head
        if self.n_head % n_kv_head:
            wrong = f"model.n_kv_head={n_kv_head} does not divide model.n_head={self.n_head}"
            raise ValueError(f"{wrong}: use model.n_kv_head={_nearest_divisor(self.n_head, n_kv_head)}")
        if self.document_mask and self.eot is None:
            raise ValueError("model.document_mask=true needs the token that begins a document: give model.eot=TOKEN_ID")
        if self.position == "rope" and head_dim % 2:
            raise ValueError(f"RoPE needs an even head width, not {head_dim}: change model.n_head or model.head_dim")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"model.{name}={getattr(self, name)} is not a probability below 1: use model.{name}=0.1"
                )
        if self.window is not None and self.window < 1:
            raise ValueError(f"model.window={self.window} shows a query nothing: use 1 or more, or null for no window")
        return replace(self, n_kv_head=n_kv_head, head_dim=head_dim)


def decoder_config(values: dict[str, Any]) -> DecoderConfig:
    """The configuration of which `values` are `dataclasses.asdict`. TypeError for keys that it has not."""
    groups = {
        option.name: option.default_factory for option in fields(DecoderConfig) if is_dataclass(option.default_factory)
    }
    return DecoderConfig(**{key: groups[key](**value) if key in groups else value for key, value in values.items()})


CHOICES = {
    "match": ("params", "flops", "none"),
    "norm": ("rmsnorm", "layernorm"),
    "mlp": ("swiglu", "gelu", "gelu_tanh"),
    "position": ("rope", "learned", "none"),
    "rope_layout": ("half", "interleaved"),
    "backend": ("auto", "math", "sdpa", "blocked", "flex", "fused"),
}


def _nearest_divisor(number: int, wish: int) -> int:
    return min((n for n in range(1, number + 1) if number % n == 0), key=lambda n: abs(n - wish))
