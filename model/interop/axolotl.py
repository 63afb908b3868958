"""axolotl's plugin for differential attention (axolotl-ai-cloud/diff-transformer, 20acfc9): its config.yml, and its models.

A model is a DiffLlama whose values lie in two halves with split_heads only. lambda_init is stored, and nothing is scaled by
1 - lambda_init.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attention.diff import VECTORS, DiffAttention, DiffConfig
from ..attention.diff import lambda_init as scheduled
from ..config import DecoderConfig
from ..conversion import Conversion
from ..decoder import Decoder
from .format import Weights, keep_lambda
from .llama import DiffLlama, Llama, new_vectors

PLUGIN = "axolotl_diff_transformer.plugin.DifferentialTransformerPlugin"
FLAGS = {"zero_init": False, "sublayer_norm": True, "split_heads": False, "mirror_weights": False}  # axolotl's defaults
TYPES = {"plugins": list, "diff_attention": bool} | dict.fromkeys(FLAGS, bool)
CONVERSIONS = {  # the first of these flags that is true: the conversion
    "split_heads": Conversion(heads="split", init="open"),
    "zero_init": Conversion(),
    "mirror_weights": Conversion(init="mirror"),
}
TRAINING = {  # a number of config.yml: the field of train.py
    "diff_attn_warmup_steps": "model.diff.lambda_warmup",
    "diff_attn_log_every": "monitor.every",
    "diff_attn_num_monitor_layers": "monitor.layers",
    "learning_rate": "optim.lr",
    "seed": "seed",
}


class Settings(NamedTuple):
    """What a config.yml says about a conversion."""

    config: dict[str, Any]  # the file
    source: str  # base_model
    how: Conversion
    training: dict[str, float]  # fields of train.py and their values


def read_settings(config: Any) -> Settings:
    """The settings of a parsed config.yml, with the flags of axolotl's command line as keys.

    ValueError: no base_model, a value of the wrong type, flags that axolotl refuses together.
    """
    if not isinstance(config, dict) or not isinstance(config.get("base_model"), str):
        raise ValueError("axolotl's config names no base_model: add base_model: FOLDER, or a name of the hub")
    for name, kind in TYPES.items():
        if not isinstance(config.get(name), kind | None):
            raise ValueError(f"axolotl's config says {name}: {config[name]}: use a {kind.__name__}")
    flags = {name: default if config.get(name) is None else config[name] for name, default in FLAGS.items()}
    if flags["zero_init"] and (flags["split_heads"] or flags["mirror_weights"]):
        raise ValueError("axolotl's config asks for zero_init beside split_heads or mirror_weights: drop one")
    default = Conversion(init="open", second="random")
    how = next((how for flag, how in CONVERSIONS.items() if flags[flag]), default)
    how = replace(how, sublayer_norm=flags["sublayer_norm"])
    if config.get("diff_attention"):
        how = Conversion(to="same")
    return Settings(config, config["base_model"], how, _training(config, how))


def written_settings(config: dict[str, Any], model: str) -> dict[str, Any]:
    """config.yml of a converted model, which lies in the folder `model`: what axolotl's converter writes back."""
    plugins = [plugin for plugin in config.get("plugins") or [] if plugin != PLUGIN]
    kept = {key: value for key, value in config.items() if key not in FLAGS}
    return kept | {"base_model": model, "plugins": [*plugins, PLUGIN], "diff_attention": True}


def _training(config: dict[str, Any], how: Conversion) -> dict[str, float]:
    fields = {}
    for key, field in TRAINING.items():
        if config.get(key) is None or (how.init == "mirror" and "warmup" in key):  # mirrored: `out` makes up for all of lambda
            continue
        try:
            value = float(config[key])  # YAML reads 1e-4 as a text
            fields[field] = int(value) if value.is_integer() else value
        except (TypeError, ValueError):
            raise ValueError(f"axolotl's config says {key}: {config[key]}: use a number") from None
    return fields


class Axolotl(DiffLlama):
    """LlamaDifferentialForCausalLM. It is read and written by axolotl's plugin, not by transformers alone."""

    architecture, model_type = "LlamaDifferentialForCausalLM", "llama-differential"
    also = "LlamaDifferentialModel"  # what axolotl's converter writes for the same class
    options = {"qk_norm": (False,), "scale_norm": (False,), "head_norm": ("affine", "plain", "none")}
    defaults, bias_keys = Llama.defaults, Llama.bias_keys
    block_names = DiffLlama.block_names | {"attention.head_norm": "self_attn.subln"}

    def our_config(self, config: dict[str, Any]) -> DecoderConfig:
        heads = "half" if config.get("split_heads") else "double"
        norm = "affine" if config.get("sublayer_norm", True) else "none"
        return replace(super().our_config(config), diff=DiffConfig(heads=heads, head_norm=norm))

    def their_config(self, cfg: DecoderConfig) -> dict[str, Any]:
        flags = {"split_heads": cfg.diff.heads == "half", "sublayer_norm": cfg.diff.head_norm != "none"}
        return super().their_config(cfg) | {"zero_init": False, "mirror_weights": False} | flags

    def refusal(self, model: Decoder) -> str | None:
        fits = model.cfg.head_dim * model.cfg.n_head == model.cfg.d_model
        return super().refusal(model) or (None if fits else "its heads do not make up its width, as axolotl assumes")

    def read(self, config: dict[str, Any], weights: Weights) -> tuple[DecoderConfig, dict[str, Tensor]]:
        layers = range(self.our_config(config).filled().n_layer)
        stored = [weights.take(f"model.layers.{layer}.self_attn.lambda_init") for layer in layers]
        cfg, state = super().read(config, weights)
        for layer in layers:
            prefix = f"blocks.{layer}.attention."
            vectors = {name: state[prefix + name] for name in VECTORS} | {"lambda_init": stored[layer]}
            keep_lambda(vectors, scheduled(layer))
            state |= {prefix + name: vector for name, vector in vectors.items()}
        return cfg, state

    def to_ours(self, state: dict[str, Tensor], cfg: DecoderConfig) -> dict[str, Tensor]:
        for layer in range(cfg.n_layer):
            out = f"blocks.{layer}.attention.out.weight"
            state[out] = state[out] / (1 - scheduled(layer))
        return super().to_ours(state, cfg)

    def absorbed(self, attention: DiffAttention, layer: int) -> dict[str, Tensor]:
        """`out`, which absorbs the scale, the head norm, and new vectors if lambda has none or is in a warm-up."""
        ours = attention.state_dict()
        norm, out = ours.get("head_norm.weight", torch.ones(attention.value_width)), ours["out.weight"] * attention.head_scale
        return {"head_norm.weight": norm, "out.weight": out} | new_vectors(attention, attention.lambda_init)

    def write(self, model: Decoder) -> tuple[dict[str, Any], dict[str, Tensor]]:
        config, tensors = super().write(model)
        for layer, block in enumerate(model.blocks):
            tensors[f"model.layers.{layer}.self_attn.lambda_init"] = torch.tensor(float(block.attention.lambda_init))
        return config, tensors
