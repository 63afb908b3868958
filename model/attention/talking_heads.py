from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .base import Attention, AttentionConfig, mean_and_spread


@dataclass
class TalkingHeadsConfig:
    """Options of `talking_heads`."""

    before: bool = False  # mix the heads' scores, too, before the softmax, as the paper does


class TalkingHeadsAttention(Attention):
    """A'_i = sum_j M_ij A_j over the softmax maps A_j, M learned from the identity (Shazeer et al., arXiv 2003.02436)."""

    name = "talking_heads"
    Options = TalkingHeadsConfig
    row_sums = "any"
    undecayed = ("mixing", "scores_mixing")
    colours = {"talking_heads": "#DDAA33"}

    def make_parameters(self, cfg: AttentionConfig, layer: int) -> None:
        super().make_parameters(cfg, layer)
        # (1, h, h): not one of the matrices, whose updates Muon orthogonalizes; `undecayed` keeps it from Muon as well.
        self.mixing = nn.Parameter(torch.empty(1, self.heads, self.heads))
        self.scores_mixing = nn.Parameter(torch.empty(1, self.heads, self.heads)) if self.options.before else None

    @torch.no_grad()
    def init_own(self, generator: torch.Generator) -> None:
        for mix in (self.mixing, self.scores_mixing):
            if mix is not None:
                mix.copy_(torch.eye(self.heads)[None])

    def normalize(self, scores: Tensor, see: Tensor) -> Tensor:
        if self.scores_mixing is not None:
            hidden = scores.isneginf()
            mixed = self._mixed(self.scores_mixing, scores.masked_fill(~see, 0.0))
            scores = mixed.masked_fill(hidden, float("-inf"))
        maps = scores.softmax(-1).masked_fill(~see, 0.0)
        return self._mixed(self.mixing, maps).masked_fill(~see, 0.0)  # masks may differ between heads

    def _mixed(self, mix: Tensor, maps: Tensor) -> Tensor:
        return torch.einsum("ij,bjts->bits", mix[0].to(maps.dtype), maps)

    def flops(self, context: int) -> int:
        return super().flops(context) + 2 * context * self.heads**2 * (2 if self.options.before else 1)

    def readings(self, x: Tensor) -> dict[str, Tensor]:
        return mean_and_spread("mixing", self.mixing)
