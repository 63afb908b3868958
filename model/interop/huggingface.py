"""Read model folders of transformers (config.json and safetensors) as decoders, and write decoders as such folders.

Keys and tensors are read and written by their names, so the package transformers is not needed.
"""

from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ..config import DecoderConfig
from ..decoder import Decoder
from .axolotl import Axolotl
from .format import Format, Weights, local_folder, read_config
from .gpt2 import GPT2
from .llama import DiffLlama, Llama, Mistral, Olmo2, Phi3, Qwen2, Qwen3
from .remote import Remote, flattened

FORMATS: dict[str, Format] = {
    "diffllama": DiffLlama(), "llama": Llama(), "gpt2": GPT2(), "mistral": Mistral(), "qwen2": Qwen2(), "qwen3": Qwen3(),
    "olmo2": Olmo2(), "phi3": Phi3(), "remote": Remote(), "axolotl": Axolotl(),
}  # fmt: skip


class Export(NamedTuple):
    """What a folder is made of: config.json, the tensors of model.safetensors, further text files by name."""

    format: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    files: dict[str, str]


def read_folder(folder: str | Path) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """The model in `folder`, or of that name on the Hugging Face hub, as (configuration, float32 state dict).

    ValueError: no such folder, or weights and a function that are not those of one of FORMATS.
    """
    path = local_folder(folder)
    config = read_config(path)
    readers = {name: form for form in FORMATS.values() for name in (form.architecture, form.also) if name}
    names = config.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else "(none)"
    if architecture not in readers:
        raise ValueError(f"{path} is a {architecture}: only {', '.join(readers)} can be read")
    return readers[architecture].read(config, Weights(path))


def export(model: Decoder, to: str | None = None, eot: int | None = None) -> Export:
    """`model`, on the CPU, in the format `to`. None: a model of transformers that computes the same function, else remote.

    eot: the token that begins and ends documents. ValueError: the function has no counterpart in `to`, with the reason.
    """
    if to is None:
        to = next(name for name, form in FORMATS.items() if form.refusal(model) is None)
    if to not in FORMATS:
        raise ValueError(f"to={to} is unknown: use one of {', '.join(FORMATS)}")
    if (why := FORMATS[to].refusal(model)) is not None:
        raise ValueError(f"to={to} cannot express this model ({why}): use to=remote")
    config, tensors = FORMATS[to].write(model)
    config |= {"bos_token_id": eot, "eos_token_id": eot, "dtype": "float32"}
    tensors = {name: tensor.detach().float().contiguous() for name, tensor in tensors.items()}
    return Export(to, config, tensors, flattened() if to == "remote" else {})
