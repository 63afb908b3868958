"""DiffLlama as transformers has it (modeling_diffllama.py, 5.23): our `diff`, with its heads in another order.

Map c of head i is query head i + c h (ours: 2i + c), and values lie in two halves likewise. Its norm per head has no weight,
its lambda has the form of vectors and starts at the paper's schedule, and its feed-forward network has no biases.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from model.attention.diff import VECTORS, DiffConfig
from model.attention.diff import lambda_init as scheduled
from model.config import DecoderConfig
from model.decoder import Decoder
from model.interop.format import Format
from model.interop.layouts import change_rows, heads_in_halves, heads_in_pairs
from model.interop.llama import Llama


class DiffLlama(Llama):
    """DiffLlamaForCausalLM: Llama's names, and the four vectors of lambda."""

    architecture, model_type, letter = "DiffLlamaForCausalLM", "diffllama", "d"
    defaults = Llama.defaults | {"rms_norm_eps": 1e-5}
    block_names = Llama.block_names | {f"attention.{name}": f"self_attn.{name}" for name in VECTORS}

    def our_config(self, config: dict[str, Any]) -> DecoderConfig:
        return replace(super().our_config(config), diff=DiffConfig(head_norm="plain"))

    def their_config(self, cfg: DecoderConfig) -> dict[str, Any]:
        config = super().their_config(cfg) | {"attention_dropout": 0.0}  # DiffLlama refuses any other
        return {key: value for key, value in config.items() if key != "mlp_bias"}

    def refusal(self, model: Decoder) -> str | None:
        why = Format.refusal(self, model)  # transformers refuses widths that heads do not divide in Llama only
        diff = model.cfg.diff
        biases = (p for name, p in model.named_parameters() if ".mlp." in name and name.endswith(".bias"))
        if why is not None:
            return why
        if diff.heads != "half":
            return f"which has diff.heads={diff.heads} and not half"
        if diff.head_norm == "none":
            return "which has no norm over each head"
        if diff.qk_norm or diff.scale_norm:
            return "which has a norm over queries and keys or over the merged heads"
        return "whose feed-forward network has biases" if any(bias.any() for bias in biases) else None

    def to_ours(self, state: dict[str, Tensor], cfg: DecoderConfig) -> dict[str, Tensor]:
        for layer in range(cfg.n_layer):
            for part in "qkv":
                change_rows(state, f"blocks.{layer}.attention.{part}", lambda rows: heads_in_pairs(rows, cfg.head_dim))
            state[f"blocks.{layer}.attention.lambda_mix"] = torch.ones(())
        return state

    def to_theirs(self, model: Decoder) -> dict[str, Tensor]:
        """Ours in DiffLlama's order; what it has no place for goes into `out` and into the vectors of lambda.

        The columns of `out` take the weight of our head norm, and the quotient of the two factors 1 - lambda_init where
        ours is not the schedule's. Where our lambda has not the form of vectors, or is not the vectors' own (an
        unfinished warm-up), other vectors give the same lambda.
        """
        state = super().to_theirs(model)
        width = model.cfg.head_dim
        for layer, block in enumerate(model.blocks):
            attention, prefix = block.attention, f"blocks.{layer}.attention."
            for part in "qkv":
                change_rows(state, prefix + part, lambda rows: heads_in_halves(rows, width))
            factor = (1 - attention.lambda_init) / (1 - scheduled(layer))
            gain = state.get(f"{prefix}head_norm.weight", torch.ones(2 * width))
            state[f"{prefix}out.weight"] = state[f"{prefix}out.weight"] * (gain * factor).repeat(attention.heads)
            own = attention.lambda_form == "vectors" and attention.lambda_mix == 1
            if not own or abs(attention.lambda_init - scheduled(layer)) >= 1e-9:
                vectors = _vectors(attention.lam().item() - scheduled(layer), width)
                state |= {prefix + name: vector for name, vector in vectors.items()}
        return state


def _vectors(difference: float, width: int) -> dict[str, Tensor]:
    """Vectors with exp(q1.k1) - exp(q2.k2) = difference: one exponential is 1, the other larger."""
    first, second = (1 + difference, 1) if difference > 0 else (1, 1 - difference)
    vectors = {name: torch.zeros(width) for name in VECTORS}
    for c, exponential in ((1, first), (2, second)):
        vectors[f"lambda_q{c}"][0] = math.log(exponential)
        vectors[f"lambda_k{c}"][0] = 1.0
    return vectors
