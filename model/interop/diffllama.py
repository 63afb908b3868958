"""DiffLlama as transformers has it (modeling_diffllama.py, 5.23): our `diff`, with its heads in another order.

Map c of head i is query head i + c h (ours: 2i + c), and values lie in two halves likewise. Its norm per head has no weight,
its lambda has the form of vectors and starts at the paper's schedule, and its feed-forward network has no biases.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..attention.diff import VECTORS, DiffAttention
from ..attention.diff import lambda_init as scheduled
from ..config import DecoderConfig
from ..decoder import Decoder
from .format import Format
from .llama import Llama
from .rows import change_rows, heads_in_halves, heads_in_pairs


class DiffLlama(Llama):
    """DiffLlamaForCausalLM: Llama's names, and the four vectors of lambda."""

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
        """Our tensors in DiffLlama's order. `out` takes up the weight of our head norm; vectors, any other lambda."""
        state, width = super().to_theirs(model), model.cfg.head_dim
        change_rows(state, ("q", "k", "v"), lambda rows: heads_in_halves(rows, width))
        for layer, block in enumerate(model.blocks):
            attention, prefix = block.attention, f"blocks.{layer}.attention."
            factor = attention.head_scale / (1 - scheduled(layer))
            gain = state.get(f"{prefix}head_norm.weight", torch.ones(2 * width))
            state[f"{prefix}out.weight"] = state[f"{prefix}out.weight"] * (gain * factor).repeat(attention.heads)
            state |= {prefix + name: vector for name, vector in new_vectors(attention, scheduled(layer)).items()}
        return state


def new_vectors(attention: DiffAttention, start: float) -> dict[str, Tensor]:
    """Vectors with exp(q1.k1) - exp(q2.k2) + start = lambda, one exponential being 1; none if those of the attention fit."""
    finished = attention.lambda_form == "vectors" and attention.lambda_mix == 1
    if finished and abs(attention.lambda_init - start) < 1e-9:
        return {}
    difference = attention.lam().item() - start
    vectors = {name: torch.zeros(attention.width) for name in VECTORS}
    vectors["lambda_k1"][0] = vectors["lambda_k2"][0] = 1.0
    vectors["lambda_q1" if difference > 0 else "lambda_q2"][0] = math.log(1 + abs(difference))
    return vectors
