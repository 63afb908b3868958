from torch import Tensor

from .base import Attention, Carry


class ValueResidualAttention(Attention):
    """softmax(Q K' / sqrt d) V'_n with V'_n = (V_n + V_1) / 2 in layer n > 1, and V'_1 = V_1.

    The identity form of ResFormer (Zhou et al., arXiv 2410.17897). V_1: values of the first layer of this variant in a stack.
    """

    name = "value_residual"
    colours = {"value_residual": "#882255"}

    def before(self, q: Tensor, k: Tensor, v: Tensor, carry: Carry) -> tuple[Tensor, Tensor, Tensor]:
        if self.name not in carry:
            carry[self.name] = v
            return q, k, v
        return q, k, (v + carry[self.name]) / 2
