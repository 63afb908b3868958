"""Llama as transformers has it (modeling_llama.py, 5.23): the baseline with RMSNorm, SwiGLU and RoPE."""

import json
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor

from ..config import DecoderConfig
from ..decoder import Decoder
from ..rotary import RopeScaling
from .folder import allow_only, number
from .format import Format
from .rows import change_rows, half_from_interleaved

LLAMA = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "out"}


class Llama(Format):
    """LlamaForCausalLM. Its RoPE rotates in halves; attention and feed-forward network each may have biases."""

    architecture, model_type = "LlamaForCausalLM", "llama"
    parts = {"norm": ("rmsnorm",), "norm_place": ("before",), "mlp": ("swiglu",), "position": ("rope",)}
    options = {"head_norm": ("none",), "qk_norm": ("none",)}
    settings = {
        "vocab_size": "vocab_size", "hidden_size": "d_model", "intermediate_size": "d_ff",
        "num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "num_key_value_heads": "n_kv_head",
        "head_dim": "head_dim", "max_position_embeddings": "context", "rms_norm_eps": "norm_eps",
    }  # fmt: skip
    defaults = {
        "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    }  # fmt: skip
    names = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    blocks = "model.layers.{}."
    block_names = {
        "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
    } | {f"attention.{ours}": f"self_attn.{foreign}" for foreign, ours in LLAMA.items()}  # fmt: skip
    bias_keys = {"attention_bias": (".self_attn.",), "mlp_bias": (".mlp.",)}
    scalings: tuple[str, ...] = ("none", "linear", "llama3")  # kinds of RoPE
    absent: dict[str, Any] = {}  # values of keys that config.json leaves out
    outdated = r".*rotary_emb\.inv_freq"

    def our_config(self, config: dict[str, Any]) -> DecoderConfig:
        config = self.absent | config
        if "window" not in self.settings.values():
            allow_only(config, sliding_window=(None,))
        allow_only(config, hidden_act=("silu", "swish"), partial_rotary_factor=(1, None))
        theta, scaling = _rope(config, self.scalings)
        biased = self.biased(config)
        modules = {"bias": ".mlp.gate_proj", "qkv_bias": ".self_attn.q_proj", "projection_bias": ".self_attn.o_proj"}
        biases = {field: any(part in module for part in biased) for field, module in modules.items()}
        return replace(
            super().our_config(config), rope_theta=theta, rope_scaling=scaling, rope_layout="half", **biases,
            tie=bool(config.get("tie_word_embeddings", False)),
        )  # fmt: skip

    def their_config(self, cfg: DecoderConfig) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_theta": cfg.rope_theta, "rope_parameters": _rope_keys(cfg)}
        if cfg.rope_scaling.kind != "none":
            rope["rope_scaling"] = _rope_keys(cfg)  # the key that transformers before 5 reads
        biases = {"attention_bias": bool(cfg.qkv_bias or cfg.projection_bias), "mlp_bias": cfg.bias}
        biases = {key: biases[key] for key in self.bias_keys}
        rest = {"hidden_act": "silu", "attention_dropout": cfg.attention_dropout}
        return super().their_config(cfg) | biases | rope | rest

    def refusal(self, model: Decoder) -> str | None:
        cfg = model.cfg
        if (why := super().refusal(model)) is not None:
            return why
        if cfg.rope_scaling.kind not in self.scalings:
            return f"it has rope_scaling.kind={cfg.rope_scaling.kind}; the format allows {' or '.join(self.scalings)}"
        return f"its {cfg.n_head} heads do not divide its width {cfg.d_model}" if cfg.d_model % cfg.n_head else None

    def to_theirs(self, model: Decoder) -> dict[str, Tensor]:
        state = dict(model.state_dict())
        if model.cfg.rope_layout == "interleaved":
            parts = ("q", "k", "q_norm", "k_norm")
            change_rows(state, parts, lambda rows: half_from_interleaved(rows, model.cfg.head_dim))
        return state


SCALING_KEYS = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_context",
    },
}  # fmt: skip


def _rope(config: dict[str, Any], kinds: tuple[str, ...]) -> tuple[float, RopeScaling]:
    """The base of RoPE and its scaling. As transformers 5: `rope_scaling` if it is there, else `rope_parameters`."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"config.json says {rope} of its RoPE, not a mapping: copy the model's config.json")
    kind = str(rope.get("rope_type", rope.get("type", "default"))).replace("default", "none")
    if kind not in kinds or rope.get("partial_rotary_factor", 1) != 1:
        known = f"kinds {', '.join(kinds)}, over the whole width of a head"
        raise ValueError(f"config.json has {kind} RoPE ({json.dumps(rope)}); our decoder has {known}: use another model")
    theta = number({"rope_theta": config.get("rope_theta")} | rope, "rope_theta", {"rope_theta": 10000.0})
    values = {"original_max_position_embeddings": config.get("max_position_embeddings")} | rope
    keys = SCALING_KEYS.get(kind, {})
    return float(theta), RopeScaling(kind, **{ours: number(values, foreign, {}) for foreign, ours in keys.items()})


def _rope_keys(cfg: DecoderConfig) -> dict[str, Any]:
    scaling, kind = asdict(cfg.rope_scaling), cfg.rope_scaling.kind
    keys = {foreign: scaling[ours] for foreign, ours in SCALING_KEYS.get(kind, {}).items()}
    return {"rope_type": "default" if kind == "none" else kind, "rope_theta": cfg.rope_theta} | keys
