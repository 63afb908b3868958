"""Softmax attention whose heads are gated: the control for gains that need no subtraction."""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from model.attention.baseline import Attention
from model.attention.mask import Mask
from model.cache import LayerCache
from model.rotary import Rope

if TYPE_CHECKING:
    from model.config import DecoderConfig


class GatedAttention(Attention):
    """Each head's output times sigmoid(x W), one gate per token and head (Qiu et al., arXiv 2505.06708, G1 headwise)."""

    def __init__(self, cfg: "DecoderConfig", layer: int) -> None:
        super().__init__(cfg, layer)
        self.gate_logits = nn.Linear(cfg.d_model, cfg.n_head, bias=False)

    def forward(self, x: Tensor, rope: Rope | None, mask: Mask, cache: LayerCache | None = None) -> Tensor:
        """x (B, T, D) -> (B, T, D)."""
        gate = self.gate_logits(x).sigmoid().transpose(1, 2)[..., None]  # (B, H, T, 1)
        heads = self.heads_of(x, rope, mask, cache) * gate  # (B, H, T, d)
        return self.out(heads.transpose(1, 2).flatten(2))
