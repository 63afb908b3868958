"""Attention variants: one file and one class each, named by a letter of the layer pattern.

A new variant is a file here with a subclass of `Attention` (base.py), its import and its line below, `configs/model/NAME.yaml`,
and its formula in `tests/reference/formulas.py`. README.md shows a complete variant.
"""

from .baseline import BaselineAttention
from .diff import DiffAttention
from .diff_v2 import DiffV2Attention
from .gated import GatedAttention
from .integral import IntegralAttention
from .introspective import IntrospectiveAttention
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
}

__all__ = ["VARIANTS", *(variant.__name__ for variant in VARIANTS.values())]
