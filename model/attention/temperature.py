"""Softmax attention whose heads learn how sharp their maps are."""

import torch
from torch import Tensor, nn

from .base import Attention, AttentionConfig, Carry, mean_and_spread


class TemperatureAttention(Attention):
    """softmax(Q K' / (t sqrt d)) V with one learned temperature t per head, 1 at the start.

    t = exp(log_temperature) stays positive whatever the optimizer does.
    """

    name = "temperature"
    colours = {"temperature": "#999933"}

    def make_parameters(self, cfg: AttentionConfig, layer: int) -> None:
        super().make_parameters(cfg, layer)
        self.log_temperature = nn.Parameter(torch.empty(self.heads))

    def init_own(self, generator: torch.Generator) -> None:
        nn.init.zeros_(self.log_temperature)

    def before(self, q: Tensor, k: Tensor, v: Tensor, carry: Carry) -> tuple[Tensor, Tensor, Tensor]:
        sharpness = (-self.log_temperature).exp()[:, None, None]  # (H, 1, 1)
        return (q * sharpness).to(q.dtype), k, v

    def readings(self, x: Tensor) -> dict[str, Tensor]:
        return mean_and_spread("temperature", self.log_temperature.exp())
