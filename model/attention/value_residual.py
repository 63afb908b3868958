from torch import Tensor

from .base import Attention, Carry


class ValueResidualAttention(Attention):
    """Softmax attention to (V_n + V_1) / 2, V_1 of the variant's first layer (ResFormer, Zhou et al., arXiv 2410.17897)."""

    name = "value_residual"
    colours = {"value_residual": "#882255"}

    def before(self, q: Tensor, k: Tensor, v: Tensor, carry: Carry) -> tuple[Tensor, Tensor, Tensor]:
        if self.name not in carry:
            carry[self.name] = v
            return q, k, v
        return q, k, (v + carry[self.name]) / 2
