import torch
from torch import Tensor

from .base import Attention


class SinkAttention(Attention):
    """e^s / (e^b + sum e^s) V with one learned b per head, as in OpenAI's gpt-oss (arXiv 2508.10925), 0 at the start."""

    name = "sink"
    row_sums = "positive"
    per_head = {"sink": 0.0}
    colours = {"sink": "#44AA99"}

    def normalize(self, scores: Tensor, see: Tensor) -> Tensor:
        sink = self.sink.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
