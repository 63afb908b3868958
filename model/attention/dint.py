import torch
from torch import Tensor

from .backends import attend_map
from .base import Carry
from .diff import DiffAttention
from .mask import Mask


class DintAttention(DiffAttention):
    """(A1 - lam A2 + lam G) V, row t of G the mean of the rows of A1 at the positions that t sees (arXiv 2501.17486).

    Cang et al. take the mean over all rows; here the map is causal. G needs every earlier row of A1, so queries are cached
    beside the keys, and all rows are computed at once, at S x S memory.
    """

    name = "dint"
    row_sums, whole = "one", True
    takes_context = False
    colours = {"dint": "#661188"}

    def before(self, q: Tensor, k: Tensor, v: Tensor, carry: Carry) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().before(q, k, v, carry)
        return q, torch.cat((k, q), 1), v  # the queries of earlier tokens come back with the keys

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, mask: Mask) -> Tensor:
        T = q.shape[-2]
        k, q = k.split((2 * self.kv_heads, 2 * self.heads), dim=1)
        q, k = q.unflatten(1, (-1, 2)), k.unflatten(1, (-1, 2))  # (B, h, 2, S, d), (B, hkv, 2, S, d)
        return attend_map(q, k, v, mask, self.normalize, "math", self.dropout_now)[..., -T:, :]

    def normalize(self, scores: Tensor, see: Tensor) -> Tensor:
        first, second = scores.softmax(-1).masked_fill(~see, 0.0).unbind(2)  # (B, h, S, S) each
        seen = see.squeeze(2).to(first.dtype)
        mean = seen / seen.sum(-1, keepdim=True).clamp(min=1) @ first
        lam = self.lam().to(first.dtype)
        return first - lam * second + lam * mean
