"""Softmax attention whose maps get sharper as more keys are seen."""

import torch
from torch import Tensor, nn

from .base import Attention, AttentionConfig, mean_and_spread
from .mask import Mask


class SSMaxAttention(Attention):
    """softmax(s log(n) Q K' / sqrt d) V, n the number of keys that a query sees (Nakanishi, arXiv 2501.19399, equation 2).

    One learned s per head. It starts at 0.43, the value of the paper's first figure; the paper does not name its own start.
    """

    name = "ssmax"
    colours = {"ssmax": "#DDCC77"}

    def make_parameters(self, cfg: AttentionConfig, layer: int) -> None:
        super().make_parameters(cfg, layer)
        self.sharpness = nn.Parameter(torch.empty(self.heads))

    def init_own(self, generator: torch.Generator) -> None:
        nn.init.constant_(self.sharpness, 0.43)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, mask: Mask) -> Tensor:
        T, S = q.shape[-2], k.shape[-2]
        if mask.plain:
            keys = torch.arange(S - T + 1, S + 1, device=q.device)[None, None]  # (1, 1, T)
        else:
            keys = mask.dense(T, S, q.device).sum(-1).clamp(min=1)  # (1 or B, 1 or h, T)
        sharpness = self.sharpness[:, None] * keys.to(self.sharpness.dtype).log()  # (1 or B, h, T)
        return super().attend((q * sharpness[..., None]).to(q.dtype), k, v, x, mask)

    def readings(self, x: Tensor) -> dict[str, Tensor]:
        return mean_and_spread("sharpness", self.sharpness)
