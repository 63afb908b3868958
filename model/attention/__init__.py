"""Attention variants: one file and one class each, named by a letter of the layer pattern. README.md shows how to add one."""

from .baseline import BaselineAttention
from .cog import CogAttention
from .dex import DexAttention
from .diff import DiffAttention
from .diff_v2 import DiffV2Attention
from .dint import DintAttention
from .forgetting import ForgettingAttention
from .gated import GatedAttention
from .gated_diff import GatedDiffAttention
from .grouped_diff import GroupedDiffAttention
from .integral import IntegralAttention
from .introspective import IntrospectiveAttention
from .selective import SelectiveAttention
from .shared_diff import SharedDiffAttention
from .sink import SinkAttention
from .softpick import SoftpickAttention
from .ssmax import SSMaxAttention
from .talking_heads import TalkingHeadsAttention
from .temperature import TemperatureAttention
from .value_residual import ValueResidualAttention

VARIANTS = {
    "b": BaselineAttention,
    "d": DiffAttention,
    "v": DiffV2Attention,
    "g": GatedAttention,
    "n": IntegralAttention,
    "i": IntrospectiveAttention,
    "t": TemperatureAttention,
    "r": ValueResidualAttention,
    "c": CogAttention,
    "x": DexAttention,
    "f": ForgettingAttention,
    "e": SelectiveAttention,
    "k": SinkAttention,
    "p": SoftpickAttention,
    "s": SSMaxAttention,
    "m": DintAttention,
    "a": GatedDiffAttention,
    "u": GroupedDiffAttention,
    "w": SharedDiffAttention,
    "h": TalkingHeadsAttention,
}

__all__ = ["VARIANTS", *(variant.__name__ for variant in VARIANTS.values())]
