"""A decoder as a model folder of transformers: its own Llama, DiffLlama or GPT-2 where the functions are equal, or our code.

Every function here returns files and tensors; scripts/export.py writes them. Names and formulas as in huggingface.py.
"""

import math
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.attention.diff import VECTORS
from model.attention.diff import lambda_init as scheduled
from model.decoder import Decoder, layer_letter
from model.interop.huggingface import ATTENTION, MLP
from model.interop.layouts import half_from_interleaved

FORMATS = ("diffllama", "llama", "gpt2", "remote", "safetensors")
MODEL = Path(__file__).parents[1]  # the package `model`


class Export(NamedTuple):
    """What a folder is made of: config.json, the tensors of model.safetensors, further text files by name."""

    format: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    files: dict[str, str]


def export(model: Decoder, to: str | None = None, eot: int | None = None) -> Export:
    """`model` in the format `to`; None chooses the native one that computes the same function, else remote.

    diffllama, llama, gpt2: transformers' own model. remote: our modeling code in the folder, loaded with
    trust_remote_code=True, for every variant. safetensors: weights and configuration under our own names, without code.
    eot: the token that begins and ends documents. ValueError: the function has no counterpart in `to`, with the reason.
    """
    if to is not None and to not in FORMATS:
        raise ValueError(f"to={to} is unknown: use one of {', '.join(FORMATS)}")
    if to is None:
        to = next((name for name, (reason, _) in NATIVE.items() if reason(model) is None), "remote")
    if to in NATIVE:
        reason, make = NATIVE[to]
        if (why := reason(model)) is not None:
            raise ValueError(f"to={to} cannot hold this model, {why}: use to=remote")
        config, tensors = make(model)
        files = {}
    else:
        config, tensors, files = _own(model, code=to == "remote")
    config |= {"bos_token_id": eot, "eos_token_id": eot, "dtype": "float32"}
    return Export(to, config, {name: tensor.detach().float().contiguous() for name, tensor in tensors.items()}, files)


# --- what has a counterpart -----------------------------------------------------------------------------------------


def _common_reason(model: Decoder, letter: str, **needs: tuple) -> str | None:
    cfg = model.cfg
    layers = {layer_letter(cfg, layer) for layer in range(cfg.n_layer)}
    if layers != {letter}:
        return f"whose layers={cfg.layers} are not {letter} throughout"
    if cfg.window is not None:
        return f"whose queries see a window of {cfg.window} keys"
    if cfg.document_mask:
        return "whose tokens see their own document only"
    for name, allowed in needs.items():
        if getattr(cfg, name) not in allowed:
            return f"which has {name}={getattr(cfg, name)} and not {' or '.join(allowed)}"
    return None


def _llama_reason(model: Decoder) -> str | None:
    cfg = model.cfg
    why = _common_reason(model, "b", norm=("rmsnorm",), mlp=("swiglu",), position=("rope",))
    if why is None and cfg.d_model % cfg.n_head:
        return f"whose {cfg.n_head} heads do not divide its width {cfg.d_model}, which transformers refuses"
    return why


def _gpt2_reason(model: Decoder) -> str | None:
    cfg = model.cfg
    why = _common_reason(model, "b", norm=("layernorm",), mlp=tuple(ACTIVATIONS), position=("learned",))
    if why is None and (cfg.n_kv_head != cfg.n_head or cfg.head_dim * cfg.n_head != cfg.d_model):
        return "whose keys are grouped or whose heads have a width of their own"
    return why


def _diffllama_reason(model: Decoder) -> str | None:
    why = _common_reason(model, "d", norm=("rmsnorm",), mlp=("swiglu",), position=("rope",))
    if why is not None:
        return why
    diff = model.cfg.diff
    if diff.heads != "half":
        return f"which has diff.heads={diff.heads} and not half"
    if diff.head_norm == "none":
        return "which has no norm over each head"
    if diff.qk_norm or diff.scale_norm:
        return "which has a norm over queries and keys or over the merged heads"
    if model.cfg.bias and any(p.any() for name, p in model.named_parameters() if re.search(r"mlp\..*bias", name)):
        return "whose feed-forward network has biases"
    return None


# --- GPT-2 ----------------------------------------------------------------------------------------------------------

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}


def _gpt2(model: Decoder) -> tuple[dict[str, Any], dict[str, Tensor]]:
    cfg, state = model.cfg, model.state_dict()

    def bias(name: str, width: int) -> Tensor:  # transformers has all of them
        return state.get(f"{name}.bias", torch.zeros(width))

    config = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": cfg.vocab_size, "n_embd": cfg.d_model,
        "n_layer": cfg.n_layer, "n_head": cfg.n_head, "n_positions": cfg.context, "n_inner": cfg.d_ff,
        "activation_function": ACTIVATIONS[cfg.mlp], "layer_norm_epsilon": cfg.norm_eps, "embd_pdrop": cfg.dropout,
        "resid_pdrop": cfg.dropout, "attn_pdrop": cfg.attention_dropout, "tie_word_embeddings": cfg.tie,
    }  # fmt: skip
    tensors = {"wte.weight": state["embedding.weight"], "wpe.weight": state["positions.weight"]}
    for layer in range(cfg.n_layer):
        ours, theirs = f"blocks.{layer}.", f"h.{layer}."
        for part, name in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
            tensors[f"{theirs}{name}.weight"] = state[f"{ours}{part}.weight"]
            tensors[f"{theirs}{name}.bias"] = bias(f"{ours}{part}", cfg.d_model)
        parts = [f"{ours}attention.{part}" for part in "qkv"]
        tensors[f"{theirs}attn.c_attn.weight"] = torch.cat([state[f"{part}.weight"] for part in parts]).T
        tensors[f"{theirs}attn.c_attn.bias"] = torch.cat([bias(part, cfg.d_model) for part in parts])
        for part, name in (("attention.out", "attn.c_proj"), ("mlp.up", "mlp.c_fc"), ("mlp.down", "mlp.c_proj")):
            weight = state[f"{ours}{part}.weight"]
            tensors[f"{theirs}{name}.weight"] = weight.T
            tensors[f"{theirs}{name}.bias"] = bias(f"{ours}{part}", weight.shape[0])
    tensors |= {"ln_f.weight": state["norm.weight"], "ln_f.bias": bias("norm", cfg.d_model)}
    tensors = {f"transformer.{name}": tensor for name, tensor in tensors.items()}
    return config, tensors | ({} if cfg.tie else {"lm_head.weight": state["head.weight"]})


# --- Llama and DiffLlama --------------------------------------------------------------------------------------------


def _llama(model: Decoder) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config, tensors = _llama_stack(model, lambda attention, layer: attention)
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": model.cfg.bias}
    return config, tensors


def _diffllama(model: Decoder) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config, tensors = _llama_stack(model, lambda attention, layer: _diffllama_attention(model, attention, layer))
    config |= {"architectures": ["DiffLlamaForCausalLM"], "model_type": "diffllama", "attention_dropout": 0.0}
    return config, {name: tensor for name, tensor in tensors.items() if not re.search(r"mlp\..*bias", name)}


def _llama_stack(
    model: Decoder, rearranged: Callable[[dict[str, Tensor], int], dict[str, Tensor]]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What both share. rearranged: their attention's tensors (our names) from ours, whose rotations are in halves already."""
    cfg, state = model.cfg, model.state_dict()
    config = {
        "vocab_size": cfg.vocab_size, "hidden_size": cfg.d_model, "intermediate_size": cfg.d_ff,
        "num_hidden_layers": cfg.n_layer, "num_attention_heads": cfg.n_head, "num_key_value_heads": cfg.n_kv_head,
        "head_dim": cfg.head_dim, "max_position_embeddings": cfg.context, "rms_norm_eps": cfg.norm_eps,
        "hidden_act": "silu", "attention_bias": cfg.bias, "attention_dropout": cfg.attention_dropout,
        "rope_theta": cfg.rope_theta, "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta},
        "tie_word_embeddings": cfg.tie,
    }  # fmt: skip
    tensors = {"model.embed_tokens.weight": state["embedding.weight"], "model.norm.weight": state["norm.weight"]}
    for layer, block in enumerate(model.blocks):
        theirs = f"model.layers.{layer}."
        tensors[f"{theirs}input_layernorm.weight"] = block.attention_norm.weight
        tensors[f"{theirs}post_attention_layernorm.weight"] = block.mlp_norm.weight
        attention = dict(block.attention.state_dict())
        if cfg.rope_layout == "interleaved":
            for name in ("q.weight", "k.weight", "q.bias", "k.bias"):
                if name in attention:
                    attention[name] = half_from_interleaved(attention[name], cfg.head_dim)
        for name, tensor in rearranged(attention, layer).items():
            part, _, kind = name.partition(".")
            tensors[f"{theirs}self_attn.{ATTENTION[part]}.{kind}" if kind else f"{theirs}self_attn.{name}"] = tensor
        for name, tensor in block.mlp.state_dict().items():
            part, _, kind = name.partition(".")
            tensors[f"{theirs}mlp.{MLP[part]}.{kind}"] = tensor
    return config, tensors | ({} if cfg.tie else {"lm_head.weight": state["head.weight"]})


def _diffllama_attention(model: Decoder, ours: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    """One layer's tensors in DiffLlama's order: map c of head i is its query head i + c h, values lie in two halves.

    Its head norm has no weight: ours goes into the columns of `out`, as does the quotient of the two factors
    1 - lambda_init, where ours is not the schedule's. Its lambda has the form of vectors: where ours has another, or is not
    the vectors' own (an unfinished warm-up), two numbers in place of the vectors give the same lambda.
    """
    attention, width = model.blocks[layer].attention, model.cfg.head_dim
    theirs = {
        name: _halves(tensor, width) if name[0] in "qkv" and "norm" not in name else tensor
        for name, tensor in ours.items()
        if name.split(".")[0] in ("q", "k", "v", "out")
    }
    factor = (1 - attention.lambda_init) / (1 - scheduled(layer))
    gain = attention.head_norm.weight if attention.head_norm.weight is not None else torch.ones(2 * width)
    theirs["out.weight"] = theirs["out.weight"] * (gain * factor).repeat(attention.heads)
    own = attention.lambda_form == "vectors" and attention.lambda_mix == 1
    if own and abs(attention.lambda_init - scheduled(layer)) < 1e-9:
        return theirs | {name: getattr(attention, name) for name in VECTORS}
    return theirs | _vectors(attention.lam().item() - scheduled(layer), width)


def _halves(rows: Tensor, width: int) -> Tensor:
    """Heads 0, 1, 2, 3, .. in the order 0, 2, .., 1, 3, ..: the inverse of layouts._interleave_halves."""
    return rows.unflatten(0, (-1, 2, width)).transpose(0, 1).flatten(0, 2)


def _vectors(difference: float, width: int) -> dict[str, Tensor]:
    """Vectors with exp(q1.k1) - exp(q2.k2) = difference: one exponential is 1, the other larger."""
    first, second = (1 + difference, 1) if difference > 0 else (1, 1 - difference)
    vectors = {name: torch.zeros(width) for name in VECTORS}
    for c, exponential in ((1, first), (2, second)):
        vectors[f"lambda_q{c}"][0] = math.log(exponential)
        vectors[f"lambda_k{c}"][0] = 1.0
    return vectors


NATIVE = {
    "llama": (_llama_reason, _llama),
    "gpt2": (_gpt2_reason, _gpt2),
    "diffllama": (_diffllama_reason, _diffllama),
}

# --- our own code ---------------------------------------------------------------------------------------------------

OWN = "VariantForCausalLM"
KERNELS = '''"""The fused kernels of the project are not part of an exported folder."""


def unavailable(d, dv):
    return "the fused backend is not part of an exported folder: use backend=sdpa"


def attend_diff(*_):
    raise ValueError(unavailable(0, 0))
'''


def _own(model: Decoder, code: bool) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, str]]:
    """The decoder under our own names, with the code that runs it or without."""
    cfg = replace(model.cfg, backend="auto", dropout=0.0, attention_dropout=0.0)
    config = {"architectures": [OWN], "model_type": "attention_variants", "stack": asdict(cfg)}
    config["tie_word_embeddings"] = cfg.tie
    tensors = {
        f"decoder.{name}": tensor
        for name, tensor in model.state_dict().items()
        if not (cfg.tie and name == "head.weight")
    }
    if not code:
        return config, tensors, {}
    names = {"AutoConfig": "VariantConfig", "AutoModelForCausalLM": OWN}
    config["auto_map"] = {auto: f"modeling.{name}" for auto, name in names.items()}
    return config, tensors, flattened()


def flattened() -> dict[str, str]:
    """The modules that interop/remote.py needs, side by side in one folder: {"attention_diff.py": source}.

    transformers loads no subfolders, and copies only the modules whose relative imports it finds in the text, so the first
    one, modeling.py, names all.
    """
    sources: dict[str, str] = {}
    waiting = ["interop.remote"]
    while waiting:
        module = waiting.pop()
        if _flat(module) not in sources:
            text, needs = _relative(_source(module))
            sources[_flat(module)] = (
                f"# From the project's model/{module.replace('.', '/')}, imports made relative.\n{text}"
            )
            waiting += needs
    names = "".join(
        f"from .{name} import __doc__ as _  # noqa: F401\n" for name in sorted(sources) if name != "modeling"
    )
    listed = f"\n# transformers copies the modules that it finds named here.\n{names}"
    return {f"{name}.py": text + (listed if name == "modeling" else "") for name, text in sources.items()}


def _flat(module: str) -> str:
    known = {"interop.remote": "modeling", "attention.kernels.diff": "attention_kernels"}
    return known.get(module, module.replace(".", "_"))


def _source(module: str) -> str:
    if module.startswith("attention.kernels"):
        return KERNELS
    path = MODEL / module.replace(".", "/")
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")


def _relative(text: str) -> tuple[str, list[str]]:
    """`text` with `from model.a.b import c` as `from .a_b import c`, and the modules it needs."""
    needs: list[str] = []

    def rewritten(found: re.Match) -> str:
        indent, module, names = found.groups()
        inside = [f"{module}.{name.strip()}" for name in names.split(",")]
        if (MODEL / module.replace(".", "/")).is_dir() and all(_is_module(name) for name in inside):
            needs.extend(inside)
            renamed = [f"{_flat(name)} as {name.rpartition('.')[2]}" for name in inside]
            return f"{indent}from . import {', '.join(renamed)}"
        needs.append(module)
        return f"{indent}from .{_flat(module)} import {names}"

    return re.sub(r"^(\s*)from model\.([\w.]+) import (.+)$", rewritten, text, flags=re.MULTILINE), needs


def _is_module(name: str) -> bool:
    return (MODEL / name.replace(".", "/")).with_suffix(".py").is_file()
