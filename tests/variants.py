"""Small decoder configurations by name, which every model test runs over: each variant as it is, and options worth a test."""

from typing import Any

import torch

from model.attention import VARIANTS as CLASSES
from model.attention.baseline import BaselineConfig
from model.attention.diff import DiffConfig
from model.attention.diff_v2 import DiffV2Config
from model.attention.gated import GatedConfig
from model.attention.introspective import IntrospectiveConfig
from model.attention.kernels import cpu
from model.attention.talking_heads import TalkingHeadsConfig
from model.config import DecoderConfig
from model.decoder import Decoder

NATIVE = () if cpu.missing() else ("cpu",)
"""The C++ kernel's backend, where a compiler can make it."""


def _introspective(**options: object) -> dict:
    return {"layers": "i", "introspective": IntrospectiveConfig(**options)}


def _diff(**options: object) -> dict:
    return {"layers": "d", "diff": DiffConfig(**options)}


VARIANTS: dict[str, dict] = {
    **{variant.name: {"layers": letter} for letter, variant in CLASSES.items()},
    "baseline_normed": {"layers": "b", "baseline": BaselineConfig(head_norm="affine")},
    "baseline_plain_norm": {"layers": "b", "baseline": BaselineConfig(head_norm="plain")},
    "gpt2": {"layers": "b", "norm": "layernorm", "mlp": "gelu", "position": "learned", "match": "none"},
    "interleaved": {"layers": "b", "rope_layout": "interleaved", "bias": True},
    "diff_biased": {"layers": "d", "rope_layout": "interleaved", "bias": True},
    "diff_double": _diff(heads="double", lambda_form="dual_scalar", head_norm="none", qk_norm=True),
    "diff_plain": _diff(lambda_form="fixed", lambda_init=0.5, head_norm="plain", scale_norm=True),
    "diff_own_scale": _diff(lambda_form="fixed", lambda_init=0.8, head_scale=1.0),
    "diff_v2_biased": {"layers": "v", "diff_v2": DiffV2Config(lambda_bias=-4.0), "rope_layout": "interleaved"},
    "gated_elementwise": {"layers": "g", "gated": GatedConfig(gate="elementwise")},
    "gated_qk_norm": {"layers": "g", "gated": GatedConfig(qk_norm="head")},
    "hybrid": {"layers": "bd"},
    "talking_heads_before": {"layers": "h", "talking_heads": TalkingHeadsConfig(before=True)},
    "value_residual_later": {"layers": "br", "n_layer": 4},
    "introspective_kva": _introspective(memory="kva", path_weight="softmax_input"),
    "introspective_all_heads": _introspective(heads=8, memory="kv", path_weight="sigmoid"),
    "introspective_narrow_values": {"match": "none", **_introspective(mode="sequence", heads=16, path_weight="sigmoid")},
    "introspective_sequence": _introspective(mode="sequence", path_weight="literal"),
    "introspective_earlier_paths": _introspective(mode="sequence", own_path=False, alpha=False, path_weight="sigmoid"),
    "introspective_two_paths": _introspective(paths=2, alpha=False, memory="kva", path_weight="softmax_input"),
    "introspective_one_path": _introspective(paths=1, path_weight="sigmoid"),
}


def config(name: str, **changes: object) -> DecoderConfig:
    """A small configuration of the variant; changes override it."""
    shape = {"n_layer": 2, "n_head": 8, "d_model": 64, "context": 32, "vocab_size": 50}
    return DecoderConfig(**{**shape, **VARIANTS[name], **changes})


def stirred(module: Any, scale: float, seed: int) -> Any:
    """The module, in which no parameter has its initial value any more: nothing is hidden by a zero or a one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * scale)
    return module


def randomized(name: str, seed: int = 0, **changes: object) -> Decoder:
    """A float64 decoder in which no parameter has its initial value."""
    return stirred(Decoder(config(name, **changes), seed=seed).double(), 0.2, seed)
