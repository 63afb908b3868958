"""Model folders of transformers (config.json and safetensors) as our decoders: GPT-2, Llama and DiffLlama.

Read from the files themselves, so the package transformers is not needed. Sources of the names and of what they compute:
transformers' modeling_gpt2.py, modeling_llama.py and modeling_diffllama.py (5.23).
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from model.config import DecoderConfig, decoder_config
from model.decoder import Decoder
from model.interop.layouts import import_attention

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
HUB_FILES = ["*.json", "*.safetensors"]  # nothing pickled, no code
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
SAVE_AGAIN = "load it with transformers and save it again with save_pretrained(FOLDER)"


def read_folder(folder: str | Path) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """The model in `folder`, or of that name on the Hugging Face hub, as (configuration, float32 state dict).

    `Decoder(cfg).load_state_dict(state)` computes the logits that transformers computes. GPT2LMHeadModel, LlamaForCausalLM
    and DiffLlamaForCausalLM; one file or sharded, any float type, tied or not, grouped keys, explicit head_dim. Where
    only some projections have biases the others get zeros: our decoder has them on all or on none.

    ValueError: no such folder, no weights or pickled ones, another architecture, a RoPE or activation we have not,
    tensors that are not those of the configuration.
    """
    path = local_folder(folder)
    config = _read_config(path)
    architecture = (config.get("architectures") or ["(none)"])[0]
    if architecture not in READERS:
        raise ValueError(f"{path} is a {architecture}: only {', '.join(READERS)} can be read")
    if config.get("quantization_config"):
        raise ValueError(
            f"{path} holds quantized weights: give the folder of the model in float32, bfloat16 or float16"
        )
    weights = _Weights(path, _read_weights(path))
    cfg, state = READERS[architecture](config, weights)
    weights.refuse_leftovers()
    cfg = cfg.filled()
    _check_shapes(path, cfg, state)
    return cfg, state


def local_folder(name: str | Path) -> Path:
    """`name` itself where it is a folder, else the model of that name on the hub, downloaded. ValueError otherwise."""
    path = Path(name)
    if path.is_dir():
        return path
    if path.exists() or not HUB_NAME.fullmatch(str(name)):
        raise ValueError(
            f"{name} is not a folder: give one with config.json and model.safetensors, or a name of the hub"
        )
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError:
        raise ValueError(
            f"there is no folder {name}, and models of the hub need a package: pip install huggingface_hub"
        ) from None
    try:
        return Path(snapshot_download(str(name), allow_patterns=HUB_FILES))
    except Exception as error:  # the hub's and the http library's errors have no common class
        said = " ".join(str(error).split())[:200]
        wrong = f"there is no folder {name}, and the hub did not give it ({type(error).__name__}: {said})"
        raise ValueError(f"{wrong}: correct the name, or download it and give its folder") from None


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        fix = "give the folder that save_pretrained wrote"
        if (path / "adapter_config.json").exists():
            fix = "merge the adapter into its model first (peft's merge_and_unload) and save that"
        raise ValueError(f"{path} has no config.json: {fix}")
    try:
        config = json.loads(file.read_text())
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise ValueError(f"{file} is not JSON of a model: {SAVE_AGAIN}")
    return config


def _read_weights(path: Path) -> dict[str, Tensor]:
    """All tensors of the folder as float32."""
    files = [path / WEIGHTS]
    if (path / INDEX).is_file():
        try:
            names = sorted(set(json.loads((path / INDEX).read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{path / INDEX} is damaged: {SAVE_AGAIN}") from None
        files = [path / Path(name).name for name in names]
    elif not files[0].is_file():
        pickled = [file.name for file in (*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth"))]
        wrong = f"only pickled weights ({pickled[0]}), which can run code" if pickled else f"no {WEIGHTS}"
        raise ValueError(f"{path} has {wrong}: {SAVE_AGAIN}")
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            weights |= {name: tensor.float() for name, tensor in load_file(file).items()}
        except FileNotFoundError:
            raise ValueError(f"{path} lacks {file.name}, which its index lists: copy the whole folder again") from None
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} cannot be read ({error}): copy the folder again") from None
    return weights


class _Weights:
    """The tensors of a folder, each to be taken once."""

    def __init__(self, path: Path, tensors: dict[str, Tensor]) -> None:
        self.path, self.tensors = path, tensors

    def take(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise ValueError(f"{self.path} lacks the tensor {name} that its config.json asks for: {SAVE_AGAIN}")
        return self.tensors.pop(name)

    def drop(self, pattern: str) -> None:
        """Forget tensors whose whole name fits: buffers of older versions, the copy of a tied head."""
        self.tensors = {name: tensor for name, tensor in self.tensors.items() if not re.fullmatch(pattern, name)}

    def refuse_leftovers(self) -> None:
        if self.tensors:
            some = ", ".join(sorted(self.tensors)[:3])
            raise ValueError(
                f"{self.path} holds {len(self.tensors)} tensors that its config.json does not ask for ({some}): {SAVE_AGAIN}"
            )


def _check_shapes(path: Path, cfg: DecoderConfig, state: dict[str, Tensor]) -> None:
    with torch.device("meta"):
        ours = Decoder(cfg).state_dict()
    assert ours.keys() == state.keys(), ours.keys() ^ state.keys()
    for name, tensor in state.items():
        if tensor.shape != ours[name].shape:
            wrong = f"{path} does not fit its config.json: {name} is {tuple(tensor.shape)}"
            raise ValueError(f"{wrong}, not {tuple(ours[name].shape)}: correct config.json, or {SAVE_AGAIN}")


def _refuse(config: dict[str, Any], **only: tuple) -> None:
    """ValueError unless each of these keys, where config.json has it, has one of the values that we can compute."""
    for key, values in only.items():
        if key in config and config[key] not in values:
            known = " or ".join(map(str, values))
            raise ValueError(
                f"config.json says {key}={config[key]}, and our decoder has only {known}: use another model"
            )


def _number(config: dict[str, Any], key: str, default: float | None = None) -> Any:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"config.json lacks a number for {key}: copy the model's own config.json into the folder")
    return value


# --- GPT-2 ----------------------------------------------------------------------------------------------------------

GELU = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


def _gpt2(config: dict[str, Any], weights: _Weights) -> tuple[DecoderConfig, dict[str, Tensor]]:
    _refuse(
        config, scale_attn_weights=(True,), scale_attn_by_inverse_layer_idx=(False,), add_cross_attention=(False,),
        activation_function=tuple(GELU),
    )  # fmt: skip
    width = _number(config, "n_embd", 768)
    cfg = DecoderConfig(
        layers="b", n_layer=_number(config, "n_layer", 12), n_head=_number(config, "n_head", 12), d_model=width,
        d_ff=_number(config, "n_inner", 4 * width), match="none", context=_number(config, "n_positions", 1024),
        vocab_size=_number(config, "vocab_size", 50257), norm="layernorm", bias=True, position="learned",
        norm_eps=_number(config, "layer_norm_epsilon", 1e-5), mlp=GELU[config.get("activation_function", "gelu_new")],
        tie=config.get("tie_word_embeddings", True),
    )  # fmt: skip
    weights.tensors = {name.removeprefix("transformer."): tensor for name, tensor in weights.tensors.items()}
    weights.drop(r"h\.\d+\.attn\.(masked_)?bias")  # the causal mask, once saved with the weights
    state = {"embedding.weight": weights.take("wte.weight"), "positions.weight": weights.take("wpe.weight")}
    for layer in range(cfg.n_layer):
        ours, theirs = f"blocks.{layer}.", f"h.{layer}."
        for part, name in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
            state |= {f"{ours}{part}.{kind}": weights.take(f"{theirs}{name}.{kind}") for kind in ("weight", "bias")}
        # Their projections are x W + b with W (in, out); queries, keys and values are one.
        stacked = weights.take(f"{theirs}attn.c_attn.weight").T, weights.take(f"{theirs}attn.c_attn.bias")
        for kind, rows in zip(("weight", "bias"), stacked, strict=True):
            for part, chunk in zip("qkv", rows.tensor_split(3), strict=True):
                state[f"{ours}attention.{part}.{kind}"] = chunk.contiguous()
        for part, name in (("attention.out", "attn.c_proj"), ("mlp.up", "mlp.c_fc"), ("mlp.down", "mlp.c_proj")):
            state[f"{ours}{part}.weight"] = weights.take(f"{theirs}{name}.weight").T.contiguous()
            state[f"{ours}{part}.bias"] = weights.take(f"{theirs}{name}.bias")
    state |= {f"norm.{kind}": weights.take(f"ln_f.{kind}") for kind in ("weight", "bias")}
    return cfg, state | {"head.weight": _head(cfg, weights, state)}


def _head(cfg: DecoderConfig, weights: _Weights, state: dict[str, Tensor]) -> Tensor:
    if not cfg.tie:
        return weights.take("lm_head.weight")
    weights.drop(r"lm_head\.weight")  # a copy of the embedding
    return state["embedding.weight"]


# --- Llama and DiffLlama --------------------------------------------------------------------------------------------

MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
ATTENTION = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj"}
LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def _llama(config: dict[str, Any], weights: _Weights) -> tuple[DecoderConfig, dict[str, Tensor]]:
    cfg = _llama_config(config, eps=1e-6)
    return cfg, _llama_state(cfg, config, weights, lambda source, layer: source)


def _diffllama(config: dict[str, Any], weights: _Weights) -> tuple[DecoderConfig, dict[str, Tensor]]:
    cfg = _llama_config(config, eps=1e-5)
    overrides: dict[str, Any] = {}

    def attention(source: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
        theirs = {
            key if key in LAMBDAS else ".".join((ATTENTION[key.split(".")[0]], key.split(".")[1])): tensor
            for key, tensor in source.items()
        }
        heads = {"n_head": cfg.n_head, "n_kv_head": cfg.n_kv_head, "norm_eps": cfg.norm_eps}
        found, state = import_attention(theirs, "diffllama", layer=layer, **heads)
        overrides.update(layers=found["layers"], diff=found["diff"])
        return state

    state = _llama_state(cfg, config, weights, attention, LAMBDAS)
    cfg.layers, cfg.diff = overrides["layers"], overrides["diff"]
    return cfg, state


def _llama_config(config: dict[str, Any], eps: float) -> DecoderConfig:
    _refuse(config, hidden_act=("silu", "swish"), partial_rotary_factor=(1, None), sliding_window=(None,))
    heads, width = _number(config, "num_attention_heads", 32), _number(config, "hidden_size")
    return DecoderConfig(
        layers="b", n_layer=_number(config, "num_hidden_layers"), n_head=heads, d_model=width,
        n_kv_head=_number(config, "num_key_value_heads", heads), head_dim=_number(config, "head_dim", width // heads),
        d_ff=_number(config, "intermediate_size"), match="none", vocab_size=_number(config, "vocab_size"),
        context=_number(config, "max_position_embeddings", 2048), norm="rmsnorm",
        norm_eps=_number(config, "rms_norm_eps", eps), mlp="swiglu", position="rope", rope_theta=_rope_theta(config),
        rope_layout="half", bias=bool(config.get("attention_bias") or config.get("mlp_bias")),
        tie=bool(config.get("tie_word_embeddings", False)),
    )  # fmt: skip


def _rope_theta(config: dict[str, Any]) -> float:
    """The base of RoPE; `rope_parameters` holds it since transformers 5, `rope_theta` before. Scaled RoPE is refused."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or rope.get("partial_rotary_factor", 1) != 1:
        raise ValueError(
            f"config.json asks for {kind} RoPE ({json.dumps(rope)}), and our decoder has the plain one: use a model "
            "without rope scaling"
        )
    return float(rope.get("rope_theta", _number(config, "rope_theta", 10000.0)))


def _llama_state(
    cfg: DecoderConfig, config: dict[str, Any], weights: _Weights,
    attention: Callable[[dict[str, Tensor], int], dict[str, Tensor]], vectors: tuple[str, ...] = (),
) -> dict[str, Tensor]:  # fmt: skip
    """Ours from theirs. attention: makes ours of one layer's projections (under our names) and its `vectors`."""
    weights.drop(r".*rotary_emb\.inv_freq")  # once saved with the weights
    state = {"embedding.weight": weights.take("model.embed_tokens.weight")}
    for layer in range(cfg.n_layer):
        ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        state[f"{ours}attention_norm.weight"] = weights.take(f"{theirs}input_layernorm.weight")
        state[f"{ours}mlp_norm.weight"] = weights.take(f"{theirs}post_attention_layernorm.weight")
        source = {name: weights.take(f"{theirs}self_attn.{name}") for name in vectors}
        source |= _projections(weights, f"{theirs}self_attn.", ATTENTION, cfg.bias, bool(config.get("attention_bias")))
        state |= {f"{ours}attention.{name}": tensor for name, tensor in attention(source, layer).items()}
        mlp = _projections(weights, f"{theirs}mlp.", MLP, cfg.bias, bool(config.get("mlp_bias")))
        state |= {f"{ours}mlp.{name}": tensor for name, tensor in mlp.items()}
    state["norm.weight"] = weights.take("model.norm.weight")
    return state | {"head.weight": _head(cfg, weights, state)}


def _projections(weights: _Weights, prefix: str, names: dict[str, str], bias: bool, theirs: bool) -> dict[str, Tensor]:
    """Weights, and biases where ours have them: zeros where theirs have none."""
    state = {}
    for ours, name in names.items():
        weight = state[f"{ours}.weight"] = weights.take(f"{prefix}{name}.weight")
        if bias:
            state[f"{ours}.bias"] = (
                weights.take(f"{prefix}{name}.bias") if theirs else weight.new_zeros(weight.shape[0])
            )
    return state


# --- our own exports ------------------------------------------------------------------------------------------------


def _own(config: dict[str, Any], weights: _Weights) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """What scripts/export.py writes with to=remote or to=safetensors: our configuration, our names."""
    try:
        cfg = decoder_config(config["stack"])
        with torch.device("meta"):
            names = [name for name in Decoder(cfg).state_dict() if name != "head.weight"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"config.json is not this project's ({error!r}): export the run again") from None
    state = {name: weights.take(f"decoder.{name}") for name in names}
    head = state["embedding.weight"] if cfg.tie else weights.take("decoder.head.weight")
    return cfg, state | {"head.weight": head}


READERS = {
    "GPT2LMHeadModel": _gpt2,
    "LlamaForCausalLM": _llama,
    "DiffLlamaForCausalLM": _diffllama,
    "VariantForCausalLM": _own,
}
