"""Attention variants: one file and one class each, named by a letter of the layer pattern.

A new variant is a file here, a line below, and `configs/model/NAME.yaml`. Its class takes (cfg, layer), and has
`forward(x, rope, mask, cache)` and `flops(context)`; the parameters that are not matrices or norms are set in
`init_weights(generator)`. README.md shows a whole one.
"""

from model.attention.baseline import Attention
from model.attention.diff import DiffAttention
from model.attention.diff_v2 import DiffV2Attention
from model.attention.gated import GatedAttention
from model.attention.integral import IntegralAttention
from model.attention.introspective import Introspective

VARIANTS = {
    "b": Attention,
    "d": DiffAttention,
    "v": DiffV2Attention,
    "g": GatedAttention,
    "n": IntegralAttention,
    "i": Introspective,
}
