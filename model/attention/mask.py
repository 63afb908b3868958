"""Who may see whom: one small object that every backend reads."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
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
    made: dict = field(default_factory=dict, init=False, repr=False)  # what backends make of it, once for all layers

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"a window of {self.window} shows a query nothing: use window=1 or more, or None")
        if self.keys is not None and (self.keys.dim() != 2 or self.keys.dtype != torch.bool):
            wrong = f"mask keys are {self.keys.dtype} {tuple(self.keys.shape)}"
            raise ValueError(f"{wrong}: give bool (B, S), True where a key may be seen, as in keys=tokens != pad")
        if self.documents is not None and (self.documents.dim() != 2 or self.documents.is_floating_point()):
            wrong = f"mask documents are {self.documents.dtype} {tuple(self.documents.shape)}"
            raise ValueError(f"{wrong}: give integers (B, S), as in documents=(tokens == eot).cumsum(1)")

    def check(self, B: int, S: int) -> None:
        """ValueError unless the mask fits a batch of B sequences with S keys each."""
        for name, ids in (("documents", self.documents), ("keys", self.keys)):
            if ids is not None and ids.shape != (B, S):
                wrong = f"mask {name} have the shape {tuple(ids.shape)}, but there are {B} sequences of {S} keys"
                raise ValueError(f"{wrong}: give one entry per key, cached ones included")

    @property
    def plain(self) -> bool:
        """Nothing but the causal rule."""
        return self.causal and self.window is None and self.documents is None and self.keys is None

    @property
    def sees_everything(self) -> bool:
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
