import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..cache import LayerCache
from .base import Attention, AttentionConfig, mean_and_spread
from .mask import Mask


class ForgettingAttention(Attention):
    """softmax(Q K' / sqrt d + D) V, D_ts the sum of log f_u over s < u <= t, f = sigmoid(x W + b) per head.

    Lin et al., arXiv 2503.02130, equations 4 to 6. Their models have no RoPE: position=none.
    """

    name = "forgetting"
    undecayed = ("forget",)
    takes_context = False
    colours = {"forgetting": "#661100"}

    def make_parameters(self, cfg: AttentionConfig, layer: int) -> None:
        super().make_parameters(cfg, layer)
        self.forget = nn.Linear(cfg.d_model, self.heads)

    def bias(self, q: Tensor, k: Tensor, x: Tensor, mask: Mask, cache: LayerCache | None) -> Tensor:
        logits = self.forget(x)
        log_f = F.logsigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32))).mT[..., None]  # (B, h, T, 1)
        if cache is not None:
            log_f, _ = cache.append(log_f, log_f[..., :0], slot=1)  # (B, h, S, 1)
        if mask.keys is not None:
            log_f = log_f.masked_fill(~mask.keys[:, None, :, None], 0.0)  # padding forgets nothing
        total = log_f.cumsum(2)
        return (total[:, :, -x.shape[1] :] - total.mT).clamp(max=0)  # (B, h, T, S); later keys are hidden anyway

    def readings(self, x: Tensor) -> dict[str, Tensor]:
        return mean_and_spread("forget", self.forget(x).sigmoid())
