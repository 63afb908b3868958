"""Attention whose weights have the signs of their scores: negative weights from one map."""

from torch import Tensor

from .base import Attention


class CogAttention(Attention):
    """sign(s) e^|s| / sum e^|s| V (Lv et al., More Expressive Attention with Negative Weights, arXiv 2411.07176).

    The paper keeps the softmax in its first and last layers: `model.layers=bccb` does so in a stack of four.
    """

    name = "cog"
    row_sums, signed = "any", True
    colours = {"cog": "#AA4499"}

    def normalize(self, scores: Tensor, see: Tensor) -> Tensor:
        return scores.sign() * scores.abs().masked_fill(scores.isneginf(), float("-inf")).softmax(-1)
