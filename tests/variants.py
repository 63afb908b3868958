"""The variants that every model test runs over: small decoder configurations by name."""

import torch

from model.attention.introspective import IntrospectiveConfig
from model.config import DecoderConfig
from model.decoder import Decoder


def _introspective(**options: object) -> dict:
    return {"layers": "i", "introspective": IntrospectiveConfig(**options)}


VARIANTS: dict[str, dict] = {
    "baseline": {"layers": "b"},
    "gpt2": {"layers": "b", "norm": "layernorm", "mlp": "gelu", "position": "learned", "match": "none"},
    "diff": {"layers": "d"},
    "gated": {"layers": "g"},
    "hybrid": {"layers": "bd"},
    "introspective": _introspective(),
    "introspective_kva": _introspective(memory="kva", path_weight="softmax_input"),
    "introspective_all_heads": _introspective(heads=8, memory="kv", path_weight="sigmoid"),
    "introspective_narrow_values": {
        "match": "none",
        **_introspective(mode="sequence", heads=16, path_weight="sigmoid"),
    },
    "introspective_sequence": _introspective(mode="sequence", path_weight="literal"),
}


def config(name: str, **changes: object) -> DecoderConfig:
    """A small configuration of the variant; changes override it."""
    shape = {"n_layer": 2, "n_head": 8, "d_model": 64, "context": 32, "vocab_size": 50}
    return DecoderConfig(**{**shape, **VARIANTS[name], **changes})


def randomized(name: str, seed: int = 0, **changes: object) -> Decoder:
    """A float64 decoder in which no parameter has its initial value: nothing is hidden by a zero or a one."""
    model = Decoder(config(name, **changes), seed=seed).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.2)
    return model
