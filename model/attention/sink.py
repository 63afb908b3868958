"""Softmax attention with a learned sink per head: a query may attend to nothing, without a subtraction."""

import torch
from torch import Tensor, nn

from .base import Attention, AttentionConfig, mean_and_spread


class SinkAttention(Attention):
    """e^s / (e^b + sum e^s) V with one learned b per head, 0 at the start.

    As in OpenAI's gpt-oss (arXiv 2508.10925), whose code leaves the start to its checkpoint. With b = 0 it is the softmax that
    adds 1 to its denominator. arXiv 2309.17453 describes the sinks that a plain softmax makes of the first token instead.
    """

    name = "sink"
    row_sums = "positive"
    colours = {"sink": "#44AA99"}

    def make_parameters(self, cfg: AttentionConfig, layer: int) -> None:
        super().make_parameters(cfg, layer)
        self.sink = nn.Parameter(torch.empty(self.heads))

    def init_own(self, generator: torch.Generator) -> None:
        nn.init.zeros_(self.sink)

    def normalize(self, scores: Tensor, see: Tensor) -> Tensor:
        sink = self.sink.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat((scores, sink), -1).softmax(-1)[..., :-1]

    def readings(self, x: Tensor) -> dict[str, Tensor]:
        return mean_and_spread("sink", self.sink)
