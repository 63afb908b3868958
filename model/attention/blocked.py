"""Causal attention on CPUs: the formulas over blocks of query rows, without products for hidden keys.

At lengths where a block's scores fit the cache, torch's matrix products and softmax are faster than its flash kernel, and
need no zero-padding of widths (docs/PERFORMANCE.md). One function computes softmax attention, attention over the union of
several key sets, and the difference of two maps. Its backward computes each block's maps again: memory is that of one block.

Scores and softmax are computed in float32 or better. For inputs in half precision, the factors of the other products are
rounded to half precision, as in a flash kernel. The function is a torch operator, so that torch.compile calls it and does not
unroll its loops.

Letters: B sequences, M maps (2: their difference), C maps with keys of their own (M or 1), K key/value heads, G query heads of
each, T positions with n keys each, widths d and dv; b of the B sequences and R of the T query rows at a time.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

CACHE = 2**21  # scores that are worked on at a time: 8 MB; less is slower on two threads, which share each operation
PACKAGE = __name__.replace(".", "_")  # operator namespace: this file may be imported under two names (model/interop)


def attend(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """One softmax over the union of n key sets: q (B, H, T, d), each of keys (B, Hkv, T, d), of values (B, Hkv, T, dv).

    Returns (B, H, T, dv).
    """
    q = _grouped(q, keys[0].shape[1]).unsqueeze(1)  # (B, 1, Hkv, G, T, d)
    k, v = (x[0].unsqueeze(3) if len(x) == 1 else torch.stack(x, 3) for x in (keys, values))  # (B, Hkv, T, n, d)
    return _Blocked.apply(q, k.unsqueeze(1), v, None).flatten(1, 2)


def attend_diff(q: Tensor, k: Tensor, v: Tensor, lam: Tensor) -> Tensor:
    """Difference of two maps: q (B, h, 2, T, d), k (B, hkv, 2 or 1, T, d), v (B, hkv, T, dv), lam (..., T or 1, 1) or ().

    Returns (B, h, T, dv).
    """
    B, h, _, T, _ = q.shape
    q = _grouped(q, k.shape[1]).movedim(3, 1)  # (B, 2, hkv, G, T, d)
    k = k.movedim(2, 1).unsqueeze(4)  # (B, 2 or 1, hkv, T, 1, d)
    lam = lam.to(torch.promote_types(lam.dtype, torch.float32)).expand(B, h, T, 1).reshape(B, v.shape[1], -1, T, 1)
    return _Blocked.apply(q, k, v.unsqueeze(3), lam).flatten(1, 2)


def _grouped(q: Tensor, kv_heads: int) -> Tensor:
    """(B, H, ...) -> (B, Hkv, G, ...): the G query heads of each key/value head."""
    return q.unflatten(1, (kv_heads, -1))


def last_row(q: Tensor, k: Tensor, v: Tensor, lam: Tensor) -> Tensor:
    """One query that sees every key, as in decoding: q (B, h, 2, 1, d), k (B, hkv, 2, S, d), v (B, hkv, S, dv).

    Returns (B, h, 1, dv), computed in float32 or better. Query heads that share keys are rows of one product with these keys,
    which are not repeated.
    """
    (B, h), (hkv, d), dtype = q.shape[:2], (k.shape[1], k.shape[-1]), v.dtype
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
        rows = q.reshape(B, hkv, h // hkv, 2, d).transpose(2, 3)  # (B, hkv, 2, h / hkv, d)
        first, second = (rows * d**-0.5 @ k.mT).softmax(-1).unbind(2)  # (B, hkv, h / hkv, S) each
        lam = lam.expand(B, h, 1, 1).reshape(B, hkv, -1, 1) if lam.dim() else lam
        return ((first - lam * second) @ v).reshape(B, h, 1, -1).to(dtype)


# ---------------------------------------- the operator


def _forward(q: Tensor, k: Tensor, v: Tensor, lam: Tensor | None) -> Tensor:
    """q (B, M, K, G, T, d), k (B, C, K, T, n, d), v (B, K, T, n, dv), lam (B, K, G, T, 1) for M = 2 -> (B, K, G, T, dv)."""
    out = _output(q, k, v, lam)
    with torch.autocast(q.device.type, enabled=False):
        for part in _parts(q, k, v, lam):
            for rows in _blocks(q, k):
                maps = part.maps(rows)
                part.of(out)[..., rows, :] = part.apart(part.joined(maps, rows) @ part.v[:, : maps[0].shape[-1]])
    return out


def _output(q: Tensor, k: Tensor, v: Tensor, lam: Tensor | None) -> Tensor:
    """An empty output with the memory layout (B, T, K, G, dv), so that merging the heads copies nothing."""
    B, _, K, G, T, _ = q.shape
    return v.new_empty(B, T, K, G, v.shape[-1]).permute(0, 2, 3, 1, 4)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lam: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and lam (empty if lam is None), from the gradient dO of the output.

    P is a map and W is the matrix that multiplies the values. dW = dO V', dV = W' dO, dS = P (dW - rowsum(P dW)), dQ = dS K
    and dK = dS' Q; dQ and dK of the second map are multiplied by -lam, and dlam = -rowsum(P2 dW).
    """
    dq, dk, dv, dlam = _gradients(grad, q, k, v, lam)
    with torch.autocast(q.device.type, enabled=False):
        for part in _parts(q, k, v, lam):
            sums_k, sums_v = [torch.zeros_like(x) for x in part.k], torch.zeros_like(part.v, dtype=part.k[0].dtype)
            for rows in _blocks(q, k):
                maps = part.maps(rows)
                seen, do = maps[0].shape[-1], _flat(part.of(grad).flatten(0, 1), rows)  # do (b K, G R, dv)
                sums_v[:, :seen] += part.joined(maps, rows).mT @ do
                dw = do @ part.v[:, :seen].mT  # (b K, G R, seen)
                for m, p in enumerate(maps):
                    p, factor, key = p.to(dw.dtype), part.scale, m % len(part.k)
                    if m:
                        factor = -part.scale * _flat(part.lam, rows)  # (b K, G R, 1)
                        part.of(dlam)[..., rows, :] = part.apart(-(p * dw).sum(-1, True, dtype=dlam.dtype))
                    ds = torch.ops.aten._softmax_backward_data(dw, p, -1, dw.dtype)
                    sums_k[key][:, :seen] += ds.mT @ (_flat(part.q[m], rows) * factor).to(ds.dtype)
                    part.of(dq)[:, m, ..., rows, :] = part.apart(ds @ part.k[key][:, :seen].to(ds.dtype) * factor)
            part.of(dv).copy_(sums_v.view(part.of(dv).shape))
            for c, total in enumerate(sums_k):
                part.of(dk)[:, c] = total.view(part.of(dk)[:, c].shape)
    return dq, dk, dv, dlam


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lam: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty gradients with positions before heads in memory, as in the projections that make q, k and v."""
    B, M, K, G, T, d = q.shape
    C, n, dv = k.shape[1], k.shape[4], v.shape[-1]
    return (
        q.new_empty(B, T, K, G, M, d).permute(0, 4, 2, 3, 1, 5),
        k.new_empty(B, T, n, K, C, d).permute(0, 4, 3, 1, 2, 5),
        v.new_empty(B, T, n, K, dv).permute(0, 3, 1, 2, 4),
        q.new_empty(0) if lam is None else torch.empty_like(lam),
    )


def _parts(q: Tensor, k: Tensor, v: Tensor, lam: Tensor | None) -> Iterator["_Part"]:
    """The sequences of the batch, as many at a time as the cache has room for."""
    B, M, K, G, T, _ = q.shape
    b = max(1, CACHE // (M * K * G * T * k.shape[4] * _height(T)))
    return (_Part(q, k, v, lam, slice(start, min(start + b, B))) for start in range(0, B, b))


def _blocks(q: Tensor, k: Tensor) -> Iterator[slice]:
    """The query rows, `_height` rows at a time."""
    T, height = q.shape[-2], _height(q.shape[-2])
    return (slice(start, min(start + height, T)) for start in range(0, T, height))


def _height(T: int) -> int:
    return 64 if T <= 256 else 128


class _Part:
    """Some sequences, with their heads in the same dimension: q[m] (b K, G, T, d), k[c] (b K, T n, d), v (b K, T n, dv).

    q and k are in float32 or better, the precision of the scores.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, lam: Tensor | None, which: slice) -> None:
        self.which, self.n, self.groups, self.kv_heads = which, k.shape[4], q.shape[3], q.shape[2]
        wide = torch.promote_types(q.dtype, torch.float32)
        self.scale = q.shape[-1] ** -0.5
        self.q = [x.to(wide).flatten(0, 1) for x in self.of(q).unbind(1)]
        self.k = [x.to(wide).flatten(0, 1).flatten(1, 2) for x in self.of(k).unbind(1)]
        self.v = self.of(v).flatten(0, 1).flatten(1, 2)
        self.lam = None if lam is None else self.of(lam).flatten(0, 1)
        side = min(_height(q.shape[-2]), q.shape[-2])
        self.future = torch.full((side, side), float("-inf"), dtype=wide, device=q.device).triu(1)
        self.future = self.future.repeat_interleave(self.n, 1)  # (R, R n)

    def of(self, x: Tensor) -> Tensor:
        """These sequences of a tensor (B, ...)."""
        return x[self.which]

    def apart(self, x: Tensor) -> Tensor:
        """(b K, G R, width) -> (b, K, G, R, width)."""
        return x.unflatten(1, (self.groups, -1)).unflatten(0, (-1, self.kv_heads))

    def maps(self, rows: slice) -> list[Tensor]:
        """The weights of each map in some rows, (b K, G R, stop n), for the keys up to the last row's position."""
        height, seen = rows.stop - rows.start, rows.stop * self.n
        future, found = self.future[:height, : height * self.n], []
        for m, q in enumerate(self.q):
            scores = (_flat(q, rows) * self.scale) @ self.k[m % len(self.k)][:, :seen].mT
            scores.unflatten(1, (self.groups, height))[..., rows.start * self.n :] += future
            found.append(scores.softmax(-1))
        return found

    def joined(self, maps: list[Tensor], rows: slice) -> Tensor:
        """The matrix that multiplies the values: the map, or the difference of the two maps."""
        return (maps[0] if len(maps) == 1 else maps[0] - _flat(self.lam, rows) * maps[1]).to(self.v.dtype)


def _flat(x: Tensor, rows: slice) -> Tensor:
    """(b K, G, T, width) -> (b K, G R, width)."""
    return x[:, :, rows].flatten(1, 2)


def _over_samples(operator: Callable) -> Callable:
    """For torch.vmap: the samples become sequences of the batch."""

    def run(info, dims: tuple, *inputs: Tensor | None) -> tuple:  # noqa: ANN001
        size = info.batch_size
        merged = [
            x if x is None else (x.expand(size, *x.shape) if at is None else x.movedim(at, 0)).flatten(0, 1)
            for x, at in zip(inputs, dims, strict=True)
        ]
        found = operator(*merged)
        if isinstance(found, Tensor):
            return found.unflatten(0, (size, -1)), 0
        return tuple(x.reshape(size, -1, *x.shape[1:]) if x.numel() else x.expand(size, 0) for x in found), (0,) * 4

    return run


def _operator(name: str, signature: str, run: Callable, empty: Callable) -> Callable:
    """Define a torch operator, which torch.compile and torch.export call without looking inside."""
    full = f"{PACKAGE}::{name}"
    torch.library.define(full, signature)
    torch.library.impl(full, "cpu", run)
    torch.library.register_fake(full, empty)
    found = getattr(getattr(torch.ops, PACKAGE), name).default
    torch.library.register_vmap(full, _over_samples(found))
    return found


FORWARD = _operator("blocked", "(Tensor q, Tensor k, Tensor v, Tensor? lam) -> Tensor", _forward, _output)
BACKWARD = _operator(
    "blocked_backward",
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? lam) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _gradients,
)


class _Blocked(torch.autograd.Function):
    """The operator and its gradients, for torch.func too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, lam: Tensor | None) -> Tensor:
        return FORWARD(q, k, v, lam)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: Tensor) -> None:  # noqa: ANN001
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN001
        inputs = ctx.saved_tensors  # read once: activation checkpointing refuses to make them for a second read
        *grads, dlam = BACKWARD(grad, *inputs)
        return *grads, None if inputs[3] is None else dlam
