"""The decoder's configuration: what `model=` and `size=` fill in."""

import functools
from dataclasses import dataclass, field, is_dataclass, make_dataclass
from typing import Annotated, Any, Self, get_args, get_type_hints

from .attention import VARIANTS
from .attention.base import AttentionConfig

VariantOptions = make_dataclass(
    "VariantOptions",
    [(v.name, v.Options, field(default_factory=v.Options)) for v in VARIANTS.values() if v.Options],
    bases=(AttentionConfig,),
)
VariantOptions.__doc__ = "The options of every attention, and one group for each variant that has options."


@dataclass
class DecoderConfig(VariantOptions):
    """Shape and parts of a decoder stack.

    `match` picks the width of the feed-forward networks (FFN) such that the stack has as many parameters without embeddings, or
    FLOPs per token, as a baseline with the same n_layer, n_head, d_model and context; with "none" it is the baseline's.
    """

    layers: str = "b"  # a letter (model/attention/__init__.py) per layer, repeated over the depth: bd alternates
    n_layer: Annotated[int, "[1, 100000]"] = 4  # blocks
    d_ff: Annotated[int | None, "[1, inf)"] = None  # FFN width; None: derived by `match`
    baseline_d_ff: Annotated[int | None, "[1, inf)"] = None  # FFN width of that baseline; None: 8/3 or (gelu) 4 d_model
    match: Annotated[str, ("params", "flops", "none")] = "params"  # the quantity that is made equal to the baseline's
    context: Annotated[int, "[1, 100000000]"] = 256  # tokens of a training window
    vocab_size: Annotated[int, "[0, 100000000]"] = 0  # vocabulary size; 0: the tokenizer's, filled in by train.py
    document_mask: bool = False  # a token sees only its document; documents begin with the token `eot`
    eot: Annotated[int | None, "[0, inf)"] = None  # id of the end-of-text token; train.py fills in the tokenizer's
    norm: Annotated[str, ("rmsnorm", "layernorm")] = "rmsnorm"  # the norms of the residual stream
    norm_place: Annotated[str, ("before", "after")] = "before"  # after (OLMo 2): each sub-layer's norm is on its output
    mlp: Annotated[str, ("swiglu", "gelu", "gelu_tanh")] = "swiglu"  # gelu_tanh: GPT-2's approximation
    residual: Annotated[str, ("float32", "autocast")] = "float32"  # dtype of the residual stream; autocast moves fewer bytes
    window: Annotated[int | None, "[1, inf)"] = None  # keys that a query sees, itself included; None: all
    tie: bool = True  # use the token embedding as the output head
    dropout: Annotated[float, "[0, 1)"] = 0.0  # dropout probability of the embedding and of each sub-layer's output

    def filled(self) -> Self:
        """A checked copy with heads and biases filled in, not d_ff. ValueError names the option that corrects the error."""
        if self.document_mask and self.eot is None:
            raise ValueError("document_mask=true needs the token that begins a document: give eot=TOKEN_ID")
        return super().filled()


def decoder_config(values: Any, kind: Any = DecoderConfig, where: str = "model") -> Any:
    """The configuration whose `dataclasses.asdict` is `values`, or part of it. ValueError: unknown keys, wrong types."""
    if not isinstance(values, dict):
        raise ValueError(f"{where}={values} is not a group of options: use a checkpoint of this version")
    known = _types(kind)
    if unknown := sorted(map(str, values.keys() - known.keys())):
        fix = "the file is from another version of this code: check that version out, or remove the option"
        raise ValueError(f"{where} has no option {', '.join(unknown)}: {fix}")
    return kind(**{key: _checked(known[key], value, f"{where}.{key}") for key, value in values.items()})


_types = functools.cache(get_type_hints)


def _checked(kind: Any, value: Any, where: str) -> Any:
    if is_dataclass(kind):
        return decoder_config(value, kind, where)
    if type(value) is int and not isinstance(value, kind) and isinstance(0.0, kind):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and bool not in (kind, *get_args(kind))):
        name = getattr(kind, "__name__", kind)
        raise ValueError(f"{where}={value} is not of the type {name}: use a checkpoint of this version")
    return value
