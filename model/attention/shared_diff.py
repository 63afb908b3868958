from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from .base import AttentionConfig, split
from .diff import DiffAttention, DiffConfig


@dataclass
class SharedDiffConfig(DiffConfig):
    """Options of `shared_diff`: those of `diff`, and the rank in which the two maps' queries and keys differ."""

    rank: Annotated[int, "[1, inf)"] = 8


class SharedDiffAttention(DiffAttention):
    """V1 with Q_c = X (W + A_c B_c) for its maps c = 1, 2, K alike, W shared (Cang et al., arXiv 2501.17900)."""

    name = "shared_diff"
    Options = SharedDiffConfig
    colours = {"shared_diff": "#AA7744"}

    def make_projections(self, cfg: AttentionConfig) -> None:
        super().make_projections(cfg)
        rank = self.options.rank
        for name, heads in (("q", self.heads), ("k", self.kv_heads)):
            self.register_module(name, nn.Linear(cfg.d_model, heads * self.width, bias=cfg.qkv_bias))
            self.register_module(f"{name}_down", nn.Linear(cfg.d_model, 2 * rank, bias=False))
            self.register_module(f"{name}_up", nn.ModuleList(nn.Linear(rank, heads * self.width, bias=False) for _ in "12"))

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._both("q", x), self._both("k", source), split(self.v(source), self.value_width)

    def _both(self, name: str, x: Tensor) -> Tensor:
        """(B, 2 heads, T, d), the two maps of a head adjacent."""
        shared, parts = getattr(self, name)(x), getattr(self, f"{name}_down")(x).chunk(2, -1)
        both = [split(shared + up(part), self.width) for up, part in zip(getattr(self, f"{name}_up"), parts, strict=True)]
        return torch.stack(both, 2).flatten(1, 2)
