"""Differential attention on the device: the Triton programs behind diff.py, and nothing of torch.

Blocks are BM queries by BN keys. Positions count keys: query m stands at m + S - T. Rows and keys past the end read as
zeros. "No window" arrives as window = S, which is the same thing. Base-2 exponentials throughout: `log_scale` is
log2(e) / sqrt(d) and lse the base-2 log-sum-exp, +inf for a row that sees nothing, so that exp2(s - lse) is its zero map.
"""

import triton
import triton.language as tl

from . import interpreted

INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def _tile(ptr, start, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Addresses (ROWS, BLOCK) of a matrix with unit column stride, from row `start` on.

    Only row `start` is addressed in 64 bits: a head's sequence can span more than 2^31 elements where heads are interleaved
    with time. A tile cannot (`_unit` in diff.py copies such tensors), so its offsets have 32 bits and take half the registers.
    """
    return ptr + tl.cast(start, tl.int64) * stride + (tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, BLOCK)[None, :])


@triton.jit
def _inside(start, limit, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    return (start + tl.arange(0, ROWS) < limit)[:, None] & (tl.arange(0, BLOCK) < WIDTH)[None, :]


@triton.jit
def _load(ptr, start, stride, limit, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The tile (ROWS, BLOCK) from row `start` on; zeros past `limit` rows and WIDTH columns."""
    at = _tile(ptr, start, stride, ROWS, BLOCK)
    if WIDTH != BLOCK:
        tile = tl.load(at, mask=_inside(start, limit, WIDTH, ROWS, BLOCK), other=0.0)
    else:
        tile = tl.load(at, mask=(start + tl.arange(0, ROWS) < limit)[:, None], other=0.0)
    if INTERPRETED:  # its tl.dot would multiply the bit patterns of bfloat16
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _store(ptr, start, stride, limit, tile, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    at = _tile(ptr, start, stride, ROWS, BLOCK)
    tl.store(at, tile.to(ptr.dtype.element_ty), mask=_inside(start, limit, WIDTH, ROWS, BLOCK))


@triton.jit
def _add(ptr, start, stride, limit, tile, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    at = _tile(ptr, start, stride, ROWS, BLOCK)
    tl.atomic_add(at, tile, mask=_inside(start, limit, WIDTH, ROWS, BLOCK), sem="relaxed")


@triton.jit
def _visible(positions, keys, S, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Who sees whom by position; `positions` and `keys` are laid out to broadcast to the tile, either way round."""
    see = keys < S
    if CAUSAL:
        see = see & (keys <= positions)
    if WINDOW:
        see = see & (positions - keys < window)
        if not CAUSAL:
            see = see & (keys - positions < window)
    return see


@triton.jit
def _products(a, b, TURNED: tl.constexpr):
    """a b' (BM, BN); TURNED: computed as (b a')', so that the tensor cores lay the warps out along the rows of b."""
    if TURNED:
        return tl.trans(tl.dot(b, tl.trans(a), input_precision="ieee"))
    return tl.dot(a, tl.trans(b), input_precision="ieee")


@triton.jit
def _softmax_step(scores, top, total):
    """One block of the online softmax: (exp2(scores - new top), factor of what was summed before, new top, new total)."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf is NaN: a row that has seen nothing so far
    p = tl.exp2(scores - base[:, None])
    fade = tl.exp2(top - base)
    return p, fade, new_top, total * fade + tl.sum(p, 1)


@triton.jit
def _finish(o, top, total):
    """(o / total, base-2 log-sum-exp); zeros and +inf where nothing was seen."""
    blind = total == 0.0
    total = tl.where(blind, 1.0, total)
    return o / total[:, None], tl.where(blind, float("inf"), top + tl.log2(total))


@triton.jit(do_not_specialize=["T", "S", "window", "lam_b", "lam_h"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, lam_ptr, query_ids_ptr, key_ids_ptr, out_ptr, second_ptr, lse_ptr,
    q_b, q_h, q_c, q_t, k_b, k_h, k_c, k_s, v_b, v_h, v_s, lam_b, lam_h, lam_t, out_b, out_h, out_t,
    group, T, S, window, log_scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, IDS: tl.constexpr, SHARED: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head: out = O1 - lam O2, second = O2, lse (B, h, 2, T). Grid (blocks, h, B)."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the last queries see most: start them first
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    q_ptr += b * q_b + h * q_h
    k_ptr += b * k_b + h // group * k_h
    v_ptr += b * v_b + h // group * v_h
    start = block * BM
    rows = start + tl.arange(0, BM)
    positions = rows + (S - T)
    q1 = _load(q_ptr, start, q_t, T, D, BM, BD)  # (BM, BD)
    q2 = _load(q_ptr + q_c, start, q_t, T, D, BM, BD)
    query_ids = rows
    if IDS:
        key_ids_ptr += b * S
        query_ids = tl.load(query_ids_ptr + b * T + rows, mask=rows < T, other=0)

    o1 = tl.full([BM, BV], 0.0, dtype=tl.float32)
    o2 = tl.full([BM, BV], 0.0, dtype=tl.float32)
    top1 = tl.full([BM], float("-inf"), dtype=tl.float32)
    top2 = tl.full([BM], float("-inf"), dtype=tl.float32)
    total1 = tl.full([BM], 0.0, dtype=tl.float32)
    total2 = tl.full([BM], 0.0, dtype=tl.float32)

    # Keys lo..hi are seen by some query of the block, those of the blocks in whole_lo..whole_hi by every one.
    first = start + (S - T)
    last = tl.minimum(first + BM, S) - 1
    lo = tl.maximum(first - window + 1, 0) // BN * BN
    hi = tl.minimum(last + (1 if CAUSAL else window), S)
    whole_lo = tl.minimum((tl.maximum(last - window + 1, 0) + BN - 1) // BN * BN, hi)
    whole_hi = tl.maximum(tl.minimum(first + (1 if CAUSAL else window), S) // BN * BN, whole_lo)
    for key in range(lo, hi, BN):
        keys = key + tl.arange(0, BN)
        k1 = _load(k_ptr, key, k_s, S, D, BN, BD)  # (BN, BD)
        k2 = k1 if SHARED else _load(k_ptr + k_c, key, k_s, S, D, BN, BD)
        s1 = _products(q1, k1, TURNED) * log_scale  # (BM, BN)
        s2 = _products(q2, k2, TURNED) * log_scale
        if IDS or (key < whole_lo) | (key >= whole_hi):
            see = _visible(positions[:, None], keys[None, :], S, window, CAUSAL, WINDOW)
            if IDS:
                key_ids = tl.load(key_ids_ptr + keys, mask=keys < S, other=0)
                see = see & (query_ids[:, None] == key_ids[None, :])
            s1 = tl.where(see, s1, float("-inf"))
            s2 = tl.where(see, s2, float("-inf"))
        p1, fade1, top1, total1 = _softmax_step(s1, top1, total1)
        p2, fade2, top2, total2 = _softmax_step(s2, top2, total2)
        v = _load(v_ptr, key, v_s, S, DV, BN, BV)  # (BN, BV)
        p1 = p1.to(v_ptr.dtype.element_ty).to(v.dtype)
        p2 = p2.to(v_ptr.dtype.element_ty).to(v.dtype)
        o1 = tl.dot(p1, v, o1 * fade1[:, None], input_precision="ieee")
        o2 = tl.dot(p2, v, o2 * fade2[:, None], input_precision="ieee")
    o1, lse1 = _finish(o1, top1, total1)
    o2, lse2 = _finish(o2, top2, total2)
    lam = tl.load(lam_ptr + b * lam_b + h * lam_h + rows.to(tl.int64) * lam_t, mask=rows < T, other=0.0)
    offset = b * out_b + h * out_h
    _store(out_ptr + offset, start, out_t, T, o1 - lam[:, None] * o2, DV, BM, BV)
    _store(second_ptr + offset, start, out_t, T, o2, DV, BM, BV)
    lse_ptr += (b * tl.num_programs(1) + h) * 2 * T
    tl.store(lse_ptr + rows, lse1, mask=rows < T)
    tl.store(lse_ptr + T + rows, lse2, mask=rows < T)


@triton.jit(do_not_specialize=["T", "lam_b", "lam_h"])
def delta_kernel(
    grad_ptr, out_ptr, second_ptr, lam_ptr, delta_ptr,
    grad_b, grad_h, grad_t, out_b, out_h, out_t, lam_b, lam_h, lam_t,
    T, DV: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """delta_c = rowsum(dO * O_c), (B, h, 2, T), with O1 = out + lam O2. Grid (blocks, h, B)."""
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    start = tl.program_id(0) * BM
    rows = start + tl.arange(0, BM)
    grad = _load(grad_ptr + b * grad_b + h * grad_h, start, grad_t, T, DV, BM, BV).to(tl.float32)
    out = _load(out_ptr + b * out_b + h * out_h, start, out_t, T, DV, BM, BV).to(tl.float32)
    second = _load(second_ptr + b * out_b + h * out_h, start, out_t, T, DV, BM, BV).to(tl.float32)
    lam = tl.load(lam_ptr + b * lam_b + h * lam_h + rows.to(tl.int64) * lam_t, mask=rows < T, other=0.0)
    delta2 = tl.sum(grad * second, 1)
    delta_ptr += (b * tl.num_programs(1) + h) * 2 * T
    tl.store(delta_ptr + rows, tl.sum(grad * out, 1) + lam * delta2, mask=rows < T)
    tl.store(delta_ptr + T + rows, delta2, mask=rows < T)


@triton.jit(do_not_specialize=["T", "S", "window", "lam_b", "lam_h"])
def backward_kernel(
    q_ptr, k_ptr, v_ptr, lam_ptr, query_ids_ptr, key_ids_ptr, grad_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr,
    q_b, q_h, q_c, q_t, k_b, k_h, k_c, k_s, v_b, v_h, v_s, lam_b, lam_h, lam_t, grad_b, grad_h, grad_t,
    dq_b, dq_h, dq_c, dq_t, dk_b, dk_h, dk_c, dk_s, dv_b, dv_h, dv_s,
    group, T, S, window, scale, log_scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, IDS: tl.constexpr, SHARED: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """One block of keys of one key/value head, all query heads of its group. Grid (blocks, hkv, B)."""
    hkv, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    start = tl.program_id(0) * BN
    keys = start + tl.arange(0, BN)
    k_ptr += b * k_b + hkv * k_h
    k1 = _load(k_ptr, start, k_s, S, D, BN, BD)  # (BN, BD)
    k2 = k1 if SHARED else _load(k_ptr + k_c, start, k_s, S, D, BN, BD)
    v = _load(v_ptr + b * v_b + hkv * v_h, start, v_s, S, DV, BN, BV)  # (BN, BV)
    key_ids = keys
    if IDS:
        query_ids_ptr += b * T
        key_ids = tl.load(key_ids_ptr + b * S + keys, mask=keys < S, other=0)
    dk1 = tl.full([BN, BD], 0.0, dtype=tl.float32)
    dk2 = tl.full([BN, BD], 0.0, dtype=tl.float32)
    dv = tl.full([BN, BV], 0.0, dtype=tl.float32)

    # Queries lo..hi see some key of the block; those of the blocks in whole_lo..whole_hi see every one.
    first = start - (S - T)
    last = first + BN - 1
    reach = 0 if CAUSAL else window - 1
    lo = tl.maximum(first - reach, 0) // BM * BM
    hi = tl.minimum(tl.maximum(last + window, 0), T)
    whole_lo = tl.minimum((tl.maximum(last - reach, 0) + BM - 1) // BM * BM, hi)
    whole_lo = tl.where(last < T, whole_lo, hi)  # keys past the end are hidden from all
    # A last block cut short by T is whole: its missing rows have no map.
    whole_hi = tl.where(first + window >= T, T, tl.maximum(first + window, 0) // BM * BM)
    whole_hi = tl.maximum(whole_hi, whole_lo) if WINDOW else hi
    for member in range(group):
        h = hkv * group + member
        row = (b * tl.num_programs(1) * group + h) * 2 * T
        q_at, grad_at, lam_at = q_ptr + b * q_b + h * q_h, grad_ptr + b * grad_b + h * grad_h, lam_ptr + b * lam_b + h * lam_h
        dq_at, lse_at, delta_at = dq_ptr + b * dq_b + h * dq_h, lse_ptr + row, delta_ptr + row
        for query in range(lo, hi, BM):
            rows = query + tl.arange(0, BM)
            q1 = _load(q_at, query, q_t, T, D, BM, BD)  # (BM, BD)
            q2 = _load(q_at + q_c, query, q_t, T, D, BM, BD)
            # Rows past the end have lse = inf: their map is zero, and so is all they add.
            lse1 = tl.load(lse_at + rows, mask=rows < T, other=float("inf"))
            lse2 = tl.load(lse_at + T + rows, mask=rows < T, other=float("inf"))
            p1 = tl.exp2(_products(q1, k1, TURNED) * log_scale - lse1[:, None])  # (BM, BN)
            p2 = tl.exp2(_products(q2, k2, TURNED) * log_scale - lse2[:, None])
            if IDS or (query < whole_lo) | (query >= whole_hi):
                see = _visible((rows + (S - T))[:, None], keys[None, :], S, window, CAUSAL, WINDOW)
                if IDS:
                    query_ids = tl.load(query_ids_ptr + rows, mask=rows < T, other=0)
                    see = see & (query_ids[:, None] == key_ids[None, :])
                p1 = tl.where(see, p1, 0.0)
                p2 = tl.where(see, p2, 0.0)
            lam = tl.load(lam_at + rows.to(tl.int64) * lam_t, mask=rows < T, other=0.0)
            p2 = p2 * lam[:, None]
            grad = _load(grad_at, query, grad_t, T, DV, BM, BV)  # (BM, BV)
            difference = (p1 - p2).to(grad_ptr.dtype.element_ty).to(grad.dtype)
            dv = tl.dot(tl.trans(difference), grad, dv, input_precision="ieee")  # once for both maps
            dp = _products(grad, v, TURNED)  # (BM, BN), once for both maps
            delta1 = tl.load(delta_at + rows, mask=rows < T, other=0.0)
            delta2 = tl.load(delta_at + T + rows, mask=rows < T, other=0.0)
            ds1 = (p1 * (dp - delta1[:, None])).to(q_ptr.dtype.element_ty).to(q1.dtype)
            ds2 = (p2 * (delta2[:, None] - dp)).to(q_ptr.dtype.element_ty).to(q1.dtype)
            dk1 = tl.dot(tl.trans(ds1), q1, dk1, input_precision="ieee")
            if SHARED:
                dk1 = tl.dot(tl.trans(ds2), q2, dk1, input_precision="ieee")
            else:
                dk2 = tl.dot(tl.trans(ds2), q2, dk2, input_precision="ieee")
            dq1 = tl.dot(ds1, k1, input_precision="ieee") * scale  # (BM, BD)
            _add(dq_at, query, dq_t, T, dq1, D, BM, BD)
            dq2 = tl.dot(ds2, k2, input_precision="ieee") * scale
            _add(dq_at + dq_c, query, dq_t, T, dq2, D, BM, BD)

    dk_ptr += b * dk_b + hkv * dk_h
    _store(dk_ptr, start, dk_s, S, dk1 * scale, D, BN, BD)
    if not SHARED:
        _store(dk_ptr + dk_c, start, dk_s, S, dk2 * scale, D, BN, BD)
    _store(dv_ptr + b * dv_b + hkv * dv_h, start, dv_s, S, dv, DV, BN, BV)
