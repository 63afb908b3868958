"""Who may see whom: one small object that every backend reads."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mask:
    """Visibility of S keys to the queries at their last T positions (T < S when earlier keys come from a cache).

    causal: query t sees keys s <= t. window: and only the last `window` of them, itself included (s > t - window).
    documents (B, S): only keys of the query's own document. keys (B, S) bool: False marks padding no query sees.
    A query that sees no key gets zeros, forward and backward.
    """

    causal: bool = True
    window: int | None = None
    documents: Tensor | None = None
    keys: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Nothing but the causal rule."""
        return self.causal and self.window is None and self.documents is None and self.keys is None

    @property
    def empty(self) -> bool:
        """Everything sees everything."""
        return not self.causal and self.window is None and self.documents is None and self.keys is None

    def allowed(self, positions: Tensor, S: int) -> Tensor:
        """Which of S keys the queries at `positions` (R,) or (B, R) see: bool (1 or B, 1, R, S)."""
        t = positions[..., :, None]  # (R, 1) or (B, R, 1)
        s = torch.arange(S, device=positions.device)  # (S,)
        see = (s <= t) if self.causal else torch.ones_like(s <= t)
        if self.window is not None:
            see = see & ((s - t).abs() < self.window)
        see = see if see.dim() == 3 else see[None]  # (1 or B, R, S)
        if self.documents is not None:
            rows = positions.expand(self.documents.shape[0], -1)  # (B, R)
            see = see & (self.documents.gather(1, rows)[:, :, None] == self.documents[:, None, :])
        if self.keys is not None:
            see = see & self.keys[:, None, :]
        return see[:, None]  # (1 or B, 1, R, S)

    def dense(self, T: int, S: int, device: torch.device) -> Tensor:
        """`allowed` for the last T of S positions: bool (1 or B, 1, T, S)."""
        return self.allowed(torch.arange(S - T, S, device=device), S)


CAUSAL = Mask()
