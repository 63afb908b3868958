from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from .base import Attention, AttentionConfig
from .diff import lambda_init

START = 0.1  # of lambda's learned part; the paper: about 0, at which W has no gradient


@dataclass
class DexConfig:
    """Options of `dex`."""

    anneal: Annotated[int, "[0, inf)"] = 0  # steps T in which lambda goes from 0 by way of V1's lambda_init to what is learned


class DexAttention(Attention):
    """O - lam O W per head, O the softmax head's output, W one (d, d) matrix per layer (Kong et al., 2505.16333, eq. 3-5).

    lam(t) = (1 - a) a lambda_init + a l with a = min(1, t / T), l learned. The paper changes some heads of a trained model;
    here all heads change, from the start. Probes read the softmax maps.
    """

    name = "dex"
    Options = DexConfig
    free_options = ("anneal",)
    colours = {"dex": "#AA4466"}

    def make_parameters(self, cfg: AttentionConfig, layer: int) -> None:
        super().make_parameters(cfg, layer)
        self.lambda_init = lambda_init(layer)
        self.lambda_learned = nn.Parameter(torch.empty(()))
        self.register_buffer("annealed", torch.ones(()))  # a, saved: a checkpoint from mid-annealing evaluates as trained
        self.noise = nn.Linear(self.value_width, self.value_width, bias=False)

    @torch.no_grad()
    def init_own(self, generator: torch.Generator) -> None:
        self.annealed.fill_(1)
        self.lambda_learned.fill_(START)

    def set_step(self, step: int) -> None:
        self.annealed.fill_(min(1.0, step / self.options.anneal) if self.options.anneal else 1.0)

    def lam(self) -> Tensor:
        return (1 - self.annealed) * self.annealed * self.lambda_init + self.annealed * self.lambda_learned

    def after(self, y: Tensor) -> Tensor:
        return (y - self.lam() * self.noise(y)).to(y.dtype)

    def flops(self, context: int) -> int:
        return super().flops(context) + 2 * (self.heads - 1) * self.value_width**2  # one head's product counts as a matrix's

    def readings(self, x: Tensor) -> dict[str, Tensor]:
        return {"lambda": self.lam()}
