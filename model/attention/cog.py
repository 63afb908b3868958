from torch import Tensor

from .base import Attention


class CogAttention(Attention):
    """sign(s) e^|s| / sum e^|s| V (Lv et al., arXiv 2411.07176, who keep the softmax in the first and last layers)."""

    name = "cog"
    row_sums = "any"
    colours = {"cog": "#AA4499"}

    def normalize(self, scores: Tensor, see: Tensor) -> Tensor:
        return scores.sign() * scores.abs().masked_fill(scores.isneginf(), float("-inf")).softmax(-1)
