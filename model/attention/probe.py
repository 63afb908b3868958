"""Look at attention from outside the model: the maps of chosen query rows, for every variant, at O(T) per row."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Maps:
    """What a probe has seen: `layers[i]` is the signed attention map of layer i, (B, heads, R, S) float32.

    A softmax head's rows sum to 1, a differential head's to 1 - lambda. A layer with several attention calls
    (introspective paths) has all their heads, in order.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows  # (R,) or (B, R) absolute query positions
        self.layers: list[Tensor] = []
        self._calls: list[Tensor] = []

    def record(self, rows: Tensor) -> None:
        self._calls.append(rows.detach().float())

    def _close_layer(self, *_: object) -> None:
        self.layers.append(torch.cat(self._calls, dim=1))
        self._calls = []


active: Maps | None = None  # the backends ask here; None costs nothing


@contextmanager
def probe(model: nn.Module, rows: Tensor) -> Iterator[Maps]:
    """`with probe(model, rows) as maps: model(tokens)` fills `maps.layers`.

    rows: query positions (R,), or (B, R) for other ones in each sequence. Uncompiled models only: a compiled graph does
    not ask. Nested probes are refused.
    """
    global active
    if active is not None:
        raise ValueError("a probe is already active: leave it before starting another")
    active = Maps(rows)
    hooks = [block.attention.register_forward_hook(active._close_layer) for block in model.blocks]
    try:
        yield active
    finally:
        active = None
        for hook in hooks:
            hook.remove()


def gather_rows(q: Tensor, rows: Tensor, S: int) -> Tensor:
    """The queries (B, ..., R, d) at absolute positions `rows` out of q (B, ..., T, d), the last T of S positions."""
    index = rows.to(q.device) - (S - q.shape[-2])
    if index.dim() == 1:
        return q.index_select(-2, index)
    index = index.view(index.shape[0], *[1] * (q.dim() - 3), index.shape[1], 1)
    return q.gather(-2, index.expand(*q.shape[:-2], index.shape[-2], q.shape[-1]))
