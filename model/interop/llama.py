"""Llama as transformers has it (modeling_llama.py, 5.23): the baseline with RMSNorm, SwiGLU and RoPE."""

import json
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..config import DecoderConfig
from ..decoder import Decoder
from .folder import Weights, allow_only, number
from .format import Format
from .layouts import LLAMA, change_rows, half_from_interleaved


class Llama(Format):
    """LlamaForCausalLM. It rotates in halves; attention and feed-forward network have biases independently."""

    architecture, model_type = "LlamaForCausalLM", "llama"
    parts = {"norm": ("rmsnorm",), "mlp": ("swiglu",), "position": ("rope",)}
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
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    } | {f"attention.{ours}": f"self_attn.{theirs}" for theirs, ours in LLAMA.items()}

    def our_config(self, config: dict[str, Any]) -> DecoderConfig:
        allow_only(config, hidden_act=("silu", "swish"), partial_rotary_factor=(1, None), sliding_window=(None,))
        return replace(
            super().our_config(config), rope_theta=_rope_theta(config), rope_layout="half", bias=bool(self.biased(config)),
            tie=bool(config.get("tie_word_embeddings", False)),
        )  # fmt: skip

    def their_config(self, cfg: DecoderConfig) -> dict[str, Any]:
        return super().their_config(cfg) | {
            "hidden_act": "silu", "attention_bias": cfg.bias, "mlp_bias": cfg.bias,
            "attention_dropout": cfg.attention_dropout, "rope_theta": cfg.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta},
        }  # fmt: skip

    def refusal(self, model: Decoder) -> str | None:
        heads, width = model.cfg.n_head, model.cfg.d_model
        why = f"whose {heads} heads do not divide its width {width}, which transformers refuses"
        return super().refusal(model) or (why if width % heads else None)

    def biased(self, config: dict[str, Any]) -> tuple[str, ...]:
        parts = {"attention_bias": ".self_attn.", "mlp_bias": ".mlp."}
        return tuple(part for key, part in parts.items() if config.get(key))

    def clean(self, weights: Weights) -> None:
        weights.drop(r".*rotary_emb\.inv_freq")  # which older versions saved with the weights

    def to_theirs(self, model: Decoder) -> dict[str, Tensor]:
        state = dict(model.state_dict())
        if model.cfg.rope_layout == "interleaved":
            for layer in range(model.cfg.n_layer):
                for part in "qk":
                    name = f"blocks.{layer}.attention.{part}"
                    change_rows(state, name, lambda rows: half_from_interleaved(rows, model.cfg.head_dim))
        return state


def _rope_theta(config: dict[str, Any]) -> float:
    """The base of RoPE; `rope_parameters` holds it since transformers 5, `rope_theta` before. Scaled RoPE is refused."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or rope.get("partial_rotary_factor", 1) != 1:
        raise ValueError(
            f"config.json asks for {kind} RoPE ({json.dumps(rope)}), and our decoder has the plain one: use a model "
            "without rope scaling"
        )
    return float(rope.get("rope_theta", number(config, "rope_theta", {"rope_theta": 10000.0})))
