"""Attention variants: one file and one class each, named by a letter of the layer pattern.

A new variant is a file here with a subclass of `Attention` (base.py), its import and its line below, `configs/model/NAME.yaml`,
and its formula in `tests/reference/formulas.py`. README.md shows a whole one.
"""

from model.attention.baseline import BaselineAttention
from model.attention.diff import DiffAttention
from model.attention.diff_v2 import DiffV2Attention
from model.attention.gated import GatedAttention
from model.attention.integral import IntegralAttention
from model.attention.introspective import Introspective
from model.attention.temperature import TemperatureAttention
from model.attention.value_residual import ValueResidualAttention

VARIANTS = {
    "b": BaselineAttention,
    "d": DiffAttention,
    "v": DiffV2Attention,
    "g": GatedAttention,
    "n": IntegralAttention,
    "i": Introspective,
    "t": TemperatureAttention,
    "r": ValueResidualAttention,
}
