"""Look at attention from outside the model, for every variant: maps of chosen query rows at O(T) per row, or all logits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn


class Maps:
    """What a probe records: `layers[i]` is the signed attention map of layer i, (B, heads, R, S) float32, of all its calls.

    `pairs[i]`: the two maps of a differential layer, (first, second), with apart=True; None without it, and of other layers.
    """

    def __init__(self, rows: Tensor, apart: bool) -> None:
        self.rows, self.apart = rows, apart  # rows: (R,) or (B, R) absolute query positions
        self.layers: list[Tensor] = []
        self.pairs: list[tuple[Tensor, Tensor] | None] = []
        # The attention that runs now, and the tokens that it sees, cached ones included.
        self._attention, self._tokens = nn.Module(), 0
        self._calls: list[Tensor] = []
        self._pair: tuple[Tensor, Tensor] | None = None

    def record(self, rows: Tensor, pair: tuple[Tensor, ...] | None = None) -> None:
        if self._calls and not getattr(self._attention, "joins_calls", False):
            wrong = f"{type(self._attention).__name__} attends several times in one layer"
            raise ValueError(f"{wrong}: set joins_calls=True if the heads of all calls stand side by side, or {WITHOUT}")
        self._calls.append(rows.detach().float())
        if self.apart and pair is not None:
            self._pair = tuple(x.detach().float() for x in pair)

    def check_keys(self, S: int) -> None:
        """ValueError unless the S keys are those of S tokens: otherwise the chosen rows would be those of other queries."""
        if self._tokens != S:
            raise ValueError(f"attention to {S} keys of {self._tokens} tokens cannot be probed: {WITHOUT}")

    def _open_layer(self, attention: nn.Module, given: tuple, named: dict) -> None:
        x, cache = given[0] if given else named["x"], named.get("cache", given[3] if len(given) > 3 else None)
        cached = 0 if cache is None else cache.length
        self._attention, self._tokens = attention, cached + x.shape[1]
        if self.rows.numel() and (self.rows.min() < cached or self.rows.max() >= self._tokens):
            wrong = f"rows {int(self.rows.min())} to {int(self.rows.max())} of a probe are not in this pass"
            raise ValueError(f"{wrong}: give rows from {cached} to {self._tokens - 1}")

    def _close_layer(self, attention: nn.Module, *_: object) -> None:
        if not self._calls:
            wrong = f"{type(attention).__name__} does not attend through model/attention/backends.py"
            raise ValueError(f"{wrong}, so a probe sees no maps: call an operation of that file, or {WITHOUT}")
        self.layers.append(torch.cat(self._calls, dim=1))
        self.pairs.append(self._pair)
        self._calls, self._pair = [], None


WITHOUT = "do not probe this attention (in training: monitor.every=0)"
active: Maps | None = None  # backends record into this; None: no probe is active
logits_visitor: Callable[[Tensor, Tensor], Tensor | None] | None = None  # reference.weights calls this


@contextmanager
def probe(model: nn.Module, rows: Tensor, apart: bool = False) -> Iterator[Maps]:
    """`with probe(model, rows) as maps: model(tokens)` fills `maps.layers`; a second pass appends its layers.

    model: a Decoder, or one attention module, not compiled. rows: query positions (R,), or (B, R) if they differ between
    sequences, counted with cached tokens, of tokens of this pass alone. apart: fill `maps.pairs`, too.
    """
    global active
    layers = _attentions(model)
    active = Maps(rows, apart)
    hooks = [attention.register_forward_pre_hook(active._open_layer, with_kwargs=True) for attention in layers]
    hooks += [attention.register_forward_hook(active._close_layer) for attention in layers]
    try:
        yield active
    finally:
        active = None
        for hook in hooks:
            hook.remove()


@contextmanager
def visit_logits(model: nn.Module, visit: Callable[[int, Tensor, Tensor], Tensor | None]) -> Iterator[None]:
    """`with visit_logits(model, visit): model(tokens)` calls `visit(layer, logits, see)` before every softmax.

    logits: q.k / sqrt(d) plus the mask's bias, of one attention call, (B, H, T, S), or (B, h, 2, T, S) for the two maps of a
    differential head, before hidden keys are masked. see: True where the query sees the key. A tensor that `visit` returns
    replaces the logits. All attention runs as the N x N formulas. Uncompiled models only; not inside a probe.
    """
    global logits_visitor

    def enter(layer: int, *_: object) -> None:
        global logits_visitor
        logits_visitor = partial(visit, layer)

    hooks = [attention.register_forward_pre_hook(partial(enter, i)) for i, attention in enumerate(_attentions(model))]
    enter(0)
    try:
        yield
    finally:
        logits_visitor = None
        for hook in hooks:
            hook.remove()


def _attentions(model: nn.Module) -> list[nn.Module]:
    """The attention modules of a decoder; any other module counts as one attention module. ValueError inside a probe."""
    if active is not None or logits_visitor is not None:
        raise ValueError("a probe is already active: leave it before starting another")
    return [block.attention for block in model.blocks] if hasattr(model, "blocks") else [model]


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
