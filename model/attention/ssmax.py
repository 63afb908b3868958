import torch
from torch import Tensor

from .base import Attention
from .mask import Mask


class SSMaxAttention(Attention):
    """softmax(s log(n) Q K' / sqrt d) V for n visible keys, s learned per head (Nakanishi, arXiv 2501.19399, equation 2)."""

    name = "ssmax"
    per_head = {"sharpness": 0.43}  # the value of the paper's first figure; the paper names no start
    colours = {"ssmax": "#DDCC77"}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, mask: Mask) -> Tensor:
        T, S = q.shape[-2], k.shape[-2]
        if mask.plain:
            keys = torch.arange(S - T + 1, S + 1, device=q.device)[None, None]  # (1, 1, T)
        else:
            keys = mask.dense(T, S, q.device).sum(-1).clamp(min=1)  # (1 or B, 1 or h, T)
        sharpness = self.sharpness[:, None] * keys.to(self.sharpness.dtype).log()  # (1 or B, h, T)
        return super().attend((q * sharpness[..., None]).to(q.dtype), k, v, x, mask)
