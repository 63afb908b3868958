"""Llama's relatives, as transformers 5.23 has them: Mistral, Qwen2, Qwen3, OLMo 2 and Phi-3. Each states its differences."""

from typing import Any

from ..config import DecoderConfig
from .folder import number
from .llama import Llama


class Mistral(Llama):
    """MistralForCausalLM: Llama without biases, with a window in the first versions."""

    architecture, model_type = "MistralForCausalLM", "mistral"
    settings = Llama.settings | {"sliding_window": "window"}
    defaults = Llama.defaults | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": None}
    bias_keys = {}
    absent = {"sliding_window": 4096}


class Qwen2(Llama):
    """Qwen2ForCausalLM: biases of queries, keys and values alone; the upper layers may have a window."""

    architecture, model_type = "Qwen2ForCausalLM", "qwen2"
    settings = Llama.settings | {"sliding_window": "window"}
    defaults = Llama.defaults | {"max_position_embeddings": 32768, "sliding_window": None}
    bias_keys = {}
    always_biased = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

    def our_config(self, config: dict[str, Any]) -> DecoderConfig:
        """ValueError where some layers have a window and others do not."""
        layers = number(config, "num_hidden_layers", {})
        window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
        full = number(config, "max_window_layers", {"max_window_layers": 28}) if window else layers  # that many lower layers
        kinds = config.get("layer_types") or ["full_attention"] * (full > 0) + ["sliding_attention"] * (full < layers)
        if set(map(str, kinds)) not in ({"full_attention"}, {"sliding_attention"}):
            known = "our decoder has full_attention or sliding_attention in all layers"
            raise ValueError(f"config.json has layers of {' and '.join(sorted(set(kinds)))}; {known}: use another model")
        return super().our_config(config | {"sliding_window": window if "sliding_attention" in kinds else None})

    def their_config(self, cfg: DecoderConfig) -> dict[str, Any]:
        kind = "full_attention" if cfg.window is None else "sliding_attention"
        return super().their_config(cfg) | {
            "use_sliding_window": cfg.window is not None, "max_window_layers": 0, "layer_types": [kind] * cfg.n_layer,
        }  # fmt: skip


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
