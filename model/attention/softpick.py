from torch import Tensor

from .base import Attention


class SoftpickAttention(Attention):
    """relu(e^s - 1) / (sum |e^s - 1| + 1e-6) V (Zuhri et al., Softpick, arXiv 2504.20966, equation 3)."""

    name = "softpick"
    row_sums = "any"
    colours = {"softpick": "#117733"}

    def normalize(self, scores: Tensor, see: Tensor) -> Tensor:
        top = scores.amax(-1, keepdim=True).clamp(min=0)  # e^s may overflow, and e^-top with it
        lifted = (scores - top).exp() - (-top).exp()
        return lifted.relu() / (lifted.abs().masked_fill(~see, 0.0).sum(-1, keepdim=True) + 1e-6)
