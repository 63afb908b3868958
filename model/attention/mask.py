"""Which keys a query sees: one small object that every backend reads."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .probe import gather_rows


@dataclass(frozen=True, eq=False)
class Mask:
    """Which of S keys the queries at their last T positions see (T < S if earlier keys come from a cache).

    A query sees a key if every rule allows it. causal: query t sees keys s <= t. window: only keys with |s - t| < window.
    documents (B, S): only keys of the query's document; its numbers fit 32 bits. keys (B, S) bool: False marks padding,
    which no query sees. see: another rule, bool, broadcastable to (B, H, T, S), True where a query may see a key. bias: numbers
    of that shape, which are added to the scaled scores; -inf hides a key. slopes: one number per head, for ALiBi's bias
    -slope |t - s|. A query that sees no key has a zero output and a zero gradient. All maps of one head share the mask.
    """

    causal: bool = True
    window: int | None = None
    documents: Tensor | None = None
    keys: Tensor | None = None
    see: Tensor | None = None
    bias: Tensor | None = None
    slopes: tuple[float, ...] | None = None
    block_masks: dict = field(default_factory=dict, init=False, repr=False)  # those of flex.block_mask, shared by all layers

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"a window of {self.window} hides all keys: use window=1 or more, or None")
        if self.keys is not None and (self.keys.dim() != 2 or self.keys.dtype != torch.bool):
            raise ValueError("the keys of a mask are bool (B, S), True where a key may be seen: use keys=tokens != pad")
        if self.documents is not None and (self.documents.dim() != 2 or self.documents.is_floating_point()):
            raise ValueError("the documents of a mask are integers (B, S): use documents=(tokens == eot).cumsum(1)")
        if self.see is not None and self.see.dtype != torch.bool:
            raise ValueError(f"a mask's `see` must be bool, not {self.see.dtype}: give numbers to be added as `bias`")
        if self.bias is not None and not self.bias.is_floating_point():
            raise ValueError(f"a mask is bool, True where a key may be seen, or floats to be added: not {self.bias.dtype}")

    def check(self, q: Tensor, k: Tensor) -> None:
        """ValueError unless the mask fits queries (B, H, ..., T, d) and keys (B, ..., S, d)."""
        B, H, T, S = *q.shape[:2], q.shape[-2], k.shape[-2]
        for name, ids in (("documents", self.documents), ("keys", self.keys)):
            if ids is not None and ids.shape != (B, S):
                wrong = f"the {name} of a mask are {tuple(ids.shape)}, not {(B, S)}"
                raise ValueError(f"{wrong}: give one entry per key, cached ones included")
        for name, free in (("see", self.see), ("bias", self.bias)):
            sizes = (1,) if free is None else free.shape[::-1]
            if len(sizes) > 4 or any(n not in (1, m) for n, m in zip(sizes, (S, T, H, B), strict=False)):
                wrong = f"a mask's `{name}` {tuple(free.shape)} does not broadcast to {(B, H, T, S)}"
                raise ValueError(f"{wrong}: give (T, S) or (B, 1 or H, T, S), or keys (B, S) as Mask(keys=...)")
        assert self.slopes is None or len(self.slopes) == H

    @property
    def plain(self) -> bool:
        """Whether the causal rule is the only rule."""
        return self.causal and not self.limited

    @property
    def limited(self) -> bool:
        """Whether there are other rules than the causal one."""
        return self.needs_dense or any(rule is not None for rule in (self.window, self.documents, self.keys))

    @property
    def needs_dense(self) -> bool:
        """Whether scores need a dense T x S rule, which flex refuses, and fused for differences of maps."""
        return any(rule is not None for rule in (self.see, self.bias, self.slopes))

    def allowed(self, positions: Tensor, S: int) -> Tensor:
        """Which of S keys the queries at `positions` (R,) or (B, R) see: bool (1 or B, 1 or H, R, S)."""
        ids = self.keys if self.documents is None else self.documents
        b = torch.arange(1 if ids is None else len(ids), device=positions.device)[:, None, None]  # (1 or B, 1, 1)
        t = torch.atleast_2d(positions)[..., None]  # (1 or B, R, 1)
        see = self.visible(b, t, torch.arange(S, device=positions.device))[:, None]  # (1 or B, 1, R, S)
        if self.see is not None:
            see = see & _rows(self.see, positions, S)
        if self.bias is not None:
            see = see & (_rows(self.bias, positions, S) > float("-inf"))
        return see

    def visible(self, b: Tensor, t: Tensor, s: Tensor) -> Tensor:
        """Whether query t of sequence b sees key s by the rules other than `see` and `bias`; indices that broadcast."""
        see = s <= t if self.causal else (s <= t) | True  # all True, in the shape of both
        if self.window is not None:
            see = see & ((s - t).abs() < self.window)
        if self.documents is not None:
            see = see & (self.documents[b, t] == self.documents[b, s])
        if self.keys is not None:
            see = see & self.keys[b, s]
        return see

    def added(self, positions: Tensor, S: int) -> Tensor | None:
        """Bias and slopes to add to the scores of queries at `positions`: finite (1 or B, 1 or H, R, S), or None."""
        parts = []
        if self.bias is not None:
            rows = _rows(self.bias, positions, S)
            parts.append(rows.masked_fill(rows == float("-inf"), 0.0))  # `allowed` hides these keys
        if self.slopes is not None:
            t, s = torch.atleast_2d(positions)[:, None, :, None], torch.arange(S, device=positions.device)  # (1 or B, 1, R, 1)
            slopes = torch.tensor(self.slopes, device=positions.device)[:, None, None]  # (H, 1, 1)
            parts.append(-slopes * (t - s).abs())
        return sum(parts) if parts else None

    def dense(self, T: int, S: int, device: torch.device) -> Tensor:
        """`allowed` for the last T of S positions: bool (1 or B, 1 or H, T, S)."""
        return self.allowed(torch.arange(S - T, S, device=device), S)


def _rows(x: Tensor, positions: Tensor, S: int) -> Tensor:
    """Rows (1 or B, 1 or H, 1 or R, S) of x, broadcastable to (B, H, T, S), for the queries at `positions` (R,) or (B, R)."""
    x = x[(None,) * (4 - x.dim())].expand(-1, -1, -1, S)
    if x.shape[-2] == 1:
        return x
    return gather_rows(x if positions.dim() == 1 else x.expand(len(positions), -1, -1, -1), positions, S)


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """2^(-8 i / n) for head i = 1 .. n, n a power of two (Press et al., arXiv 2108.12409, section 3), or as in their code."""
    whole = 2 ** (heads.bit_length() - 1)
    slopes = [2 ** (-8 * i / whole) for i in range(1, whole + 1)]
    return tuple(slopes + [2 ** (-4 * i / whole) for i in range(1, 2 * (heads - whole), 2)])


CAUSAL, EVERYTHING = Mask(), Mask(causal=False)
