"""GPT-2 as transformers has it (modeling_gpt2.py, 5.23): the baseline with LayerNorm, learned positions and GELU."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..config import DecoderConfig
from ..decoder import Decoder
from .format import Format, Weights, allow_only

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


class GPT2(Format):
    """GPT2LMHeadModel. Its projections compute x W + b with W (in, out); queries, keys and values are one projection."""

    architecture, model_type = "GPT2LMHeadModel", "gpt2"
    parts = {"norm": ("layernorm",), "norm_place": ("before",), "mlp": ("gelu", "gelu_tanh"), "position": ("learned",)}
    options = {"head_norm": ("none",), "qk_norm": ("none",)}
    settings = {
        "vocab_size": "vocab_size", "n_embd": "d_model", "n_layer": "n_layer", "n_head": "n_head",
        "n_positions": "context", "n_inner": "d_ff", "layer_norm_epsilon": "norm_eps",
    }  # fmt: skip
    defaults = {
        "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "n_inner": None,
        "layer_norm_epsilon": 1e-5,
    }  # fmt: skip
    names = {"embedding": "transformer.wte", "positions": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head"}
    blocks = "transformer.h.{}."
    block_names = {
        "attention_norm": "ln_1", "attention.q attention.k attention.v": "attn.c_attn", "attention.out": "attn.c_proj",
        "mlp_norm": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
    }  # fmt: skip
    transposed = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    always_biased = ("transformer.h.", "transformer.ln_f")  # all but the embeddings and the head
    outdated = r"transformer\.h\.\d+\.attn\.(masked_)?bias"  # the causal mask

    def our_config(self, config: dict[str, Any]) -> DecoderConfig:
        allow_only(config, scale_attn_weights=(True,), scale_attn_by_inverse_layer_idx=(False,), add_cross_attention=(False,))
        allow_only(config, activation_function=tuple(ACTIVATIONS))
        cfg, mlp = super().our_config(config), ACTIVATIONS[config.get("activation_function", "gelu_new")]
        return replace(cfg, d_ff=cfg.d_ff or 4 * cfg.d_model, mlp=mlp, bias=True, tie=config.get("tie_word_embeddings", True))

    def their_config(self, cfg: DecoderConfig) -> dict[str, Any]:
        activation = next(foreign for foreign, ours in ACTIVATIONS.items() if ours == cfg.mlp)
        dropout = {"embd_pdrop": cfg.dropout, "resid_pdrop": cfg.dropout, "attn_pdrop": cfg.attention_dropout}
        return super().their_config(cfg) | dropout | {"activation_function": activation}

    def refusal(self, model: Decoder) -> str | None:
        cfg = model.cfg
        fits = cfg.n_kv_head == cfg.n_head and cfg.head_dim * cfg.n_head == cfg.d_model
        return super().refusal(model) or (None if fits else "its keys are grouped, or its heads do not make up its width")

    def read(self, config: dict[str, Any], weights: Weights) -> tuple[DecoderConfig, dict[str, Tensor]]:
        known = ("transformer.", "lm_head.")  # older versions left the first one out
        weights.tensors = {k if k.startswith(known) else f"transformer.{k}": tensor for k, tensor in weights.tensors.items()}
        return super().read(config, weights)
