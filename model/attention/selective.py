import torch
from torch import Tensor

from ..cache import LayerCache
from .base import Attention
from .mask import Mask


class SelectiveAttention(Attention):
    """softmax(Q K' / sqrt d - F) V, F_ts the sum over u < t of relu(score of head 1)_us.

    Leviathan et al., arXiv 2410.02703, section 3. No token masks itself or the first token of its text, which is known by
    seeing no other token. F needs the queries of all earlier tokens, so the cache keeps head 1's.
    """

    name = "selective"
    whole = True
    takes_context = False
    colours = {"selective": "#6699CC"}

    def bias(self, q: Tensor, k: Tensor, x: Tensor, mask: Mask, cache: LayerCache | None) -> Tensor:
        T, S, q, k = q.shape[-2], k.shape[-2], q[:, :1], k[:, :1]
        if cache is not None:
            q, _ = cache.append(q, q[..., :0], slot=1)  # (B, 1, S, d)
        see = mask.dense(S, S, q.device)[:, :1]  # (1 or B, 1, S, S)
        first = see.sum(-1) == 1  # (1 or B, 1, S)
        others = see & ~first[..., None, :] & ~torch.eye(S, dtype=torch.bool, device=q.device)
        with torch.autocast(q.device.type, enabled=False):
            exact = torch.promote_types(q.dtype, torch.float32)
            scores = q.to(exact) @ k.to(exact).mT * q.shape[-1] ** -0.5  # (B, 1, S, S)
        masked = scores.relu().masked_fill(~others, 0.0)
        return (masked - masked.cumsum(-2))[..., -T:, :]  # the sum without row t itself
