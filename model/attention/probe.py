"""Look at attention from outside the model, for every variant: maps of chosen query rows at O(T) per row, or all logits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn


class Maps:
    """What a probe records: `layers[i]` is the signed attention map of layer i, (B, heads, R, S) float32.

    A row of a softmax head sums to 1, a row of a differential head to 1 - lambda. If a layer calls attention several times
    (introspective paths), the heads of all calls are joined in order. With apart=True, `pairs[i]` holds the two maps of a
    differential layer as (first, second), each of that shape; otherwise, and for all other layers, `pairs[i]` is None.
    """

    def __init__(self, rows: Tensor, apart: bool = False) -> None:
        self.rows = rows  # (R,) or (B, R) absolute query positions
        self.layers: list[Tensor] = []
        self.pairs: list[tuple[Tensor, Tensor] | None] = []
        self.apart = apart
        self._calls: list[Tensor] = []
        self._pair: tuple[Tensor, Tensor] | None = None

    def record(self, rows: Tensor, pair: tuple[Tensor, ...] | None = None) -> None:
        self._calls.append(rows.detach().float())
        if self.apart and pair is not None:
            self._pair = tuple(x.detach().float() for x in pair)

    def _close_layer(self, attention: nn.Module, given: tuple, named: dict, _: object) -> None:
        x, cache = given[0], named.get("cache", given[3] if len(given) > 3 else None)
        tokens = x.shape[1] + (0 if cache is None else cache.length)
        if self._calls[0].shape[-1] % tokens:
            wrong = f"{type(attention).__name__} attends to {self._calls[0].shape[-1]} keys of {tokens} tokens"
            raise ValueError(f"{wrong}, and a probe needs one key for each token: leave it out for this attention")
        self.layers.append(torch.cat(self._calls, dim=1))
        self.pairs.append(self._pair)
        self._calls, self._pair = [], None


active: Maps | None = None  # backends record into this; None: no probe is active


@contextmanager
def probe(model: nn.Module, rows: Tensor, apart: bool = False) -> Iterator[Maps]:
    """`with probe(model, rows) as maps: model(tokens)` fills `maps.layers`.

    model: a Decoder, or one attention module. rows: query positions (R,), or (B, R) if they differ between sequences.
    apart: fill `maps.pairs`, too. Uncompiled models only: a compiled graph ignores probes. Nested probes are refused.
    """
    global active
    _refuse_nesting()
    active = Maps(rows, apart)
    hooks = [attention.register_forward_hook(active._close_layer, with_kwargs=True) for attention in _attentions(model)]
    try:
        yield active
    finally:
        active = None
        for hook in hooks:
            hook.remove()


Visit = Callable[[int, Tensor, Tensor], Tensor | None]  # (layer, logits, see) -> other logits, or None to keep them
logits_visitor: Callable[[Tensor, Tensor], Tensor] | None = None  # reference.weights calls this


@contextmanager
def visit_logits(model: nn.Module, visit: Visit) -> Iterator[None]:
    """`with visit_logits(model, visit): model(tokens)` calls `visit(layer, logits, see)` before every softmax.

    logits: q.k / sqrt(d) plus the mask's bias (ALiBi), of all heads of one attention call, (B, H, T, S), or (B, h, 2, T, S)
    for the two maps of a differential head; several key sets are concatenated in S. float32 or better, before hidden keys
    are masked. see: bool, broadcastable to the logits, True where the query sees the key. A tensor that `visit` returns
    replaces the logits. Until the context ends, all attention runs as the N x N formulas, whatever its backend: memory
    grows as T x S. Uncompiled models only; not inside a probe.
    """
    global logits_visitor
    _refuse_nesting()
    layer = 0

    def enter(index: int, *_: object) -> None:
        nonlocal layer
        layer = index

    def hand(logits: Tensor, see: Tensor) -> Tensor:
        changed = visit(layer, logits, see)
        return logits if changed is None else changed

    hooks = [attention.register_forward_pre_hook(partial(enter, i)) for i, attention in enumerate(_attentions(model))]
    logits_visitor = hand
    try:
        yield
    finally:
        logits_visitor = None
        for hook in hooks:
            hook.remove()


def _attentions(model: nn.Module) -> list[nn.Module]:
    """The attention modules of a decoder; any other module counts as one attention module."""
    return [block.attention for block in model.blocks] if hasattr(model, "blocks") else [model]


def _refuse_nesting() -> None:
    if active is not None or logits_visitor is not None:
        raise ValueError("a probe is already active: leave it before starting another")


SINK = 0.3  # a head with a larger share of its mass on the first token is a sink (epsilon of arXiv 2410.10781)


def entropy(row: Tensor) -> Tensor:
    """Entropy in nats of |row| / sum |row|: (..., S) -> (...)."""
    return torch.special.entr(row.abs() / _mass(row)[..., None]).sum(-1)


def negative_share(row: Tensor) -> Tensor:
    """Share of the absolute mass that is negative: (..., S) -> (...)."""
    return row.clamp(max=0).abs().sum(-1) / _mass(row)


def overlap(first: Tensor, second: Tensor) -> Tensor:
    """The mass that two softmax maps have in common, from 0 to 1: (..., S) -> (...)."""
    return torch.minimum(first, second).sum(-1)


def first_share(row: Tensor) -> Tensor:
    """Share of the absolute mass that lies on the first token: (..., S) -> (...)."""
    return row[..., 0].abs() / _mass(row)


def _mass(row: Tensor) -> Tensor:
    """The absolute mass, above 0: a row that sees nothing has shares of 0."""
    return row.abs().sum(-1).clamp(min=torch.finfo(row.dtype).tiny)


def gather_rows(q: Tensor, rows: Tensor, S: int) -> Tensor:
    """The queries (B, ..., R, d) at absolute positions `rows` out of q (B, ..., T, d), the last T of S positions."""
    index = rows.to(q.device) - (S - q.shape[-2])
    if index.dim() == 1:
        return q.index_select(-2, index)
    index = index.view(index.shape[0], *[1] * (q.dim() - 3), index.shape[1], 1)
    return q.gather(-2, index.expand(*q.shape[:-2], index.shape[-2], q.shape[-1]))
