"""Softmax attention over values that are mixed with those of the first layer."""

from torch import Tensor

from .base import Attention, Carry


class ValueResidualAttention(Attention):
    """softmax(Q K' / sqrt d) V'_n with V'_n = (V_n + V_1) / 2 in layer n > 1, and V'_1 = V_1.

    The identity form of ResFormer, V'_n = l1 V_1 + l2 V_n with l1 = l2 = 1/2 (Zhou et al., Value Residual Learning, arXiv
    2410.17897). V_1 are the values of the first layer of this variant in the stack, before any cache.
    """

    name = "value_residual"
    colours = {"value_residual": "#882255"}

    def before(self, q: Tensor, k: Tensor, v: Tensor, carry: Carry) -> tuple[Tensor, Tensor, Tensor]:
        if self.name not in carry:
            carry[self.name] = v
            return q, k, v
        return q, k, (v + carry[self.name]) / 2
