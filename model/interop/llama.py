"""Llama (the baseline with RMSNorm, SwiGLU and RoPE) and its relatives, as transformers 5.23 has them."""

import json
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..attention.diff import VECTORS, DiffAttention
from ..attention.diff import lambda_init as scheduled
from ..config import DecoderConfig
from ..decoder import Decoder
from ..rotary import RopeScaling
from .format import Format, allow_only, change_rows, half_from_interleaved, heads_in_halves, heads_in_pairs, number

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
        kind = cfg.rope_scaling.kind
        parameters = {"rope_type": "default" if kind == "none" else kind, "rope_theta": cfg.rope_theta}
        parameters |= {foreign: getattr(cfg.rope_scaling, ours) for foreign, ours in SCALING_KEYS.get(kind, {}).items()}
        rope = {"rope_theta": cfg.rope_theta, "rope_parameters": parameters}
        if kind != "none":
            rope["rope_scaling"] = parameters  # the key that transformers before 5 reads
        biases = {"attention_bias": bool(cfg.qkv_bias or cfg.projection_bias), "mlp_bias": cfg.bias}
        biases = {key: biases[key] for key in self.bias_keys}
        rest = {"hidden_act": "silu", "attention_dropout": cfg.attention_dropout}
        return super().their_config(cfg) | biases | rope | rest

    def refusal(self, model: Decoder) -> str | None:
        wrong = f"its {model.cfg.n_head} heads do not divide its width {model.cfg.d_model}"
        return super().refusal(model) or (wrong if model.cfg.d_model % model.cfg.n_head else None)

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


class Mistral(Llama):
    """MistralForCausalLM: Llama without biases, with a window in the first versions."""

    architecture, model_type = "MistralForCausalLM", "mistral"
    settings = Llama.settings | {"sliding_window": "window"}
    defaults = Llama.defaults | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": None}
    bias_keys = {}
    absent = {"sliding_window": 4096}


class Qwen2(Llama):
    """Qwen2ForCausalLM: biases of queries, keys and values alone, and no window, as in all published models."""

    architecture, model_type = "Qwen2ForCausalLM", "qwen2"
    defaults = Llama.defaults | {"max_position_embeddings": 32768}
    bias_keys = {}
    always_biased = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

    def our_config(self, config: dict[str, Any]) -> DecoderConfig:
        allow_only(config, use_sliding_window=(False, None))
        for kind in set(map(str, config.get("layer_types") or ())):
            allow_only({"layer_types": kind}, layer_types=("full_attention",))
        return super().our_config(config | {"sliding_window": None})


class Qwen3(Qwen2):
    """Qwen3ForCausalLM: a norm over each head's queries and keys, and biases on all of its projections or on none."""

    architecture, model_type = "Qwen3ForCausalLM", "qwen3"
    options = Llama.options | {"qk_norm": ("head",)}
    defaults = Qwen2.defaults | {"head_dim": 128}
    block_names = Llama.block_names | {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
    bias_keys = {"attention_bias": (".self_attn.",)}
    always_biased = ()


class Olmo2(Llama):
    """Olmo2ForCausalLM: the norms follow the sub-layers, and one norm spans the queries (keys) of all heads."""

    architecture, model_type = "Olmo2ForCausalLM", "olmo2"
    parts = Llama.parts | {"norm_place": ("after",)}
    options = Llama.options | {"qk_norm": ("all",)}
    defaults = Llama.defaults | {"rms_norm_eps": 1e-5}
    block_names = Qwen3.block_names | {"attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}
    bias_keys = {"attention_bias": (".self_attn.",)}


FUSED = {"attention.q attention.k attention.v": "self_attn.qkv_proj", "mlp.gate mlp.up": "mlp.gate_up_proj"}


class Phi3(Mistral):
    """Phi3ForCausalLM: queries, keys and values are one projection, and so are gate and up; no scaled RoPE."""

    architecture, model_type = "Phi3ForCausalLM", "phi3"
    defaults = Llama.defaults | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "sliding_window": None}
    block_names = FUSED | {ours: foreign for ours, foreign in Llama.block_names.items() if ours not in " ".join(FUSED).split()}
    scalings, absent = ("none",), {}

    def their_config(self, cfg: DecoderConfig) -> dict[str, Any]:
        return super().their_config(cfg) | {"original_max_position_embeddings": cfg.context, "pad_token_id": None}


class DiffLlama(Llama):
    """DiffLlamaForCausalLM: our `diff`. Map c of head i is query head i + c h (ours: 2i + c); values lie in halves likewise.

    Its norm per head has no weight, its lambda has the form of vectors and starts at the paper's schedule.
    """

    architecture, model_type, letter = "DiffLlamaForCausalLM", "diffllama", "d"
    defaults = Llama.defaults | {"rms_norm_eps": 1e-5}
    block_names = Llama.block_names | {f"attention.{name}": f"self_attn.{name}" for name in VECTORS}
    options = {"head_norm": ("plain", "affine"), "heads": ("half",), "qk_norm": (False,), "scale_norm": (False,)}
    bias_keys = {"attention_bias": (".self_attn.",)}

    def their_config(self, cfg: DecoderConfig) -> dict[str, Any]:
        return super().their_config(cfg) | {"attention_dropout": 0.0}  # DiffLlama refuses any other value

    def refusal(self, model: Decoder) -> str | None:
        return Format.refusal(self, model)  # without Llama's: the heads of a DiffLlama need not divide its width

    def halves(self, cfg: DecoderConfig) -> tuple[str, ...]:
        """The projections whose heads lie in two halves."""
        return ("q", "k", "v") if cfg.diff.heads == "half" else ("q", "k")

    def to_ours(self, state: dict[str, Tensor], cfg: DecoderConfig) -> dict[str, Tensor]:
        change_rows(state, self.halves(cfg), lambda rows: heads_in_pairs(rows, cfg.head_dim))
        return state | {f"blocks.{layer}.attention.lambda_mix": torch.ones(()) for layer in range(cfg.n_layer)}

    def to_theirs(self, model: Decoder) -> dict[str, Tensor]:
        state, cfg = super().to_theirs(model), model.cfg
        change_rows(state, self.halves(cfg), lambda rows: heads_in_halves(rows, cfg.head_dim))
        for layer, block in enumerate(model.blocks):
            changed = self.absorbed(block.attention, layer)
            state |= {f"blocks.{layer}.attention.{name}": tensor for name, tensor in changed.items()}
        return state

    def absorbed(self, attention: DiffAttention, layer: int) -> dict[str, Tensor]:
        """`out`, which absorbs our head norm's weight and scale, and new vectors for any other lambda."""
        ours, factor = attention.state_dict(), attention.head_scale / (1 - scheduled(layer))
        gain = ours.get("head_norm.weight", torch.ones(attention.value_width)) * factor
        return {"out.weight": ours["out.weight"] * gain.repeat(attention.heads)} | new_vectors(attention, scheduled(layer))


def new_vectors(attention: DiffAttention, start: float) -> dict[str, Tensor]:
    """Vectors with exp(q1.k1) - exp(q2.k2) + start = lambda, one exponential being 1; none if those of the attention fit."""
    finished = attention.options.lambda_form == "vectors" and attention.lambda_mix == 1
    if finished and abs(attention.lambda_init - start) < 1e-9:
        return {}
    difference = attention.lam().item() - start
    vectors = {name: torch.zeros(attention.width) for name in VECTORS}
    vectors["lambda_k1"][0] = vectors["lambda_k2"][0] = 1.0
    vectors["lambda_q1" if difference > 0 else "lambda_q2"][0] = math.log(1 + abs(difference))
    return vectors
