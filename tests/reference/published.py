"""What published differential attention modules that do not install compute, from their state dicts: numpy float64, loops.

Written from the systems' descriptions of heads, groups and norms, and not from model/: tests/parity/ holds our modules
with the systems' weights against these. Every function takes the weights `w` by the system's names, one sequence x (T, D),
the system's `num_heads` and `num_kv_heads`, and its depth counted from 0; all are causal. Each formula is analytic in x,
so that x may be complex: derivatives come from an imaginary step, exact to rounding.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from tests.reference.formulas import diff_lambda as vector_lambda
from tests.reference.parts import rms as rms_norm
from tests.reference.parts import rope, softmax

THETA = 10000.0
rope_half = partial(rope, theta=THETA)  # Llama
rope_interleaved = partial(rope, theta=THETA, interleaved=True)  # GPT-J


def lambda_init(depth: int) -> float:
    return 0.8 - 0.6 * np.exp(-0.3 * depth)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """One head: q, k (T, d), v (T, dv) -> (T, dv)."""
    return softmax(q @ k.T / np.sqrt(q.shape[-1]), np.tri(len(q), dtype=bool)) @ v


def linear(w: dict, name: str, x: np.ndarray) -> np.ndarray:
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def heads(x: np.ndarray, count: int) -> list[np.ndarray]:
    """(T, count * d) -> count arrays (T, d): torch's view(T, count, d)."""
    return np.split(x, count, axis=-1)


def repeat_kv(xs: list[np.ndarray], times: int) -> list[np.ndarray]:
    """torch.repeat_interleave over heads."""
    return [x for x in xs for _ in range(times)]


Heads = list[np.ndarray]  # (T, d) each


def project(w: dict, x: np.ndarray, names: str, counts: tuple[int, int, int], turn: Callable) -> tuple[Heads, Heads, Heads]:
    """Heads of queries, keys and values, of which queries and keys are rotated by `turn`."""
    q, k, v = (heads(linear(w, name, x), count) for name, count in zip(names.split(), counts, strict=True))
    return [turn(each) for each in q], [turn(each) for each in k], v


def subtracted(w: dict, first: Heads, second: Heads, lam: float, norm: Callable, factor: float, out: str) -> np.ndarray:
    """What every version 1 ends with: of each head norm(first - lam second) times a factor, side by side, projected."""
    return linear(w, out, np.hstack([factor * norm(a - lam * b) for a, b in zip(first, second, strict=True)]))


def microsoft_naive(w: dict, x: np.ndarray, num_heads: int, num_kv_heads: int, depth: int) -> np.ndarray:
    """multihead_diffattn.py: 2 num_kv_heads key heads are repeated to 2 num_heads, then read as (num_heads, 2)."""
    n_rep, counts = num_heads // num_kv_heads, (2 * num_heads, 2 * num_kv_heads, num_kv_heads)
    q, k, v = project(w, x, "q_proj k_proj v_proj", counts, rope_interleaved)
    k, v = repeat_kv(k, n_rep), repeat_kv(repeat_kv(v, n_rep), 2)
    y = [attention(a, b, c) for a, b, c in zip(q, k, v, strict=True)]
    return microsoft_end(w, y[0::2], y[1::2], depth)


def microsoft_end(w: dict, first: Heads, second: Heads, depth: int) -> np.ndarray:
    norm = partial(rms_norm, weight=w["subln.weight"], eps=1e-5)
    return subtracted(w, first, second, vector_lambda(w, lambda_init(depth)), norm, 1 - lambda_init(depth), "out_proj")


def microsoft_flash_1(w: dict, x: np.ndarray, num_heads: int, num_kv_heads: int, depth: int) -> np.ndarray:
    """multihead_flashdiff_1.py: keys are read as (num_kv_heads, 2); two calls, in which query head i has key head i // n."""
    n, counts = num_heads // num_kv_heads, (2 * num_heads, 2 * num_kv_heads, num_kv_heads)
    q, k, v = project(w, x, "q_proj k_proj v_proj", counts, rope_interleaved)
    calls = [[attention(q[2 * i + c], k[c::2][i // n], v[i // n]) for i in range(num_heads)] for c in (0, 1)]
    return microsoft_end(w, *calls, depth)


def microsoft_flash_2(w: dict, x: np.ndarray, num_heads: int, num_kv_heads: int, depth: int) -> np.ndarray:
    """multihead_flashdiff_2.py: values are read as (num_kv_heads, 2, d); four calls, joined along the width."""
    n, counts = num_heads // num_kv_heads, (2 * num_heads, 2 * num_kv_heads, 2 * num_kv_heads)
    q, k, v = project(w, x, "q_proj k_proj v_proj", counts, rope_interleaved)

    def joined(c: int, i: int) -> np.ndarray:
        return np.hstack([attention(q[2 * i + c], k[2 * (i // n) + c], v[2 * (i // n) + half]) for half in (0, 1)])

    return microsoft_end(w, *([joined(c, i) for i in range(num_heads)] for c in (0, 1)), depth)


def vasqu(w: dict, x: np.ndarray, num_heads: int, num_kv_heads: int, depth: int, *, rope: bool = True) -> np.ndarray:
    """MultiheadSdpaDiff4: one call over 2h heads with every value head repeated 2n times; rel_pos is optional."""
    n, turn = num_heads // num_kv_heads, rope_interleaved if rope else (lambda each: each)
    q, k, v = project(w, x, "q_proj k_proj v_proj", (num_heads, num_kv_heads, num_kv_heads // 2), turn)
    y = [attention(a, b, c) for a, b, c in zip(q, repeat_kv(k, n), repeat_kv(v, 2 * n), strict=True)]
    return microsoft_end(w, y[0::2], y[1::2], depth)


def axolotl(
    w: dict, x: np.ndarray, num_heads: int, num_kv_heads: int, depth: int, *, split: bool, eps: float = 1e-6
) -> np.ndarray:
    """LlamaDifferentialAttention: the features of q and k are cut in two, positive and negative; lambda_init is stored and
    nothing is scaled by 1 - lambda_init. split: num_heads / 2 heads on each side, values joined from two halves."""
    n, unit = num_heads // num_kv_heads, 1 if split else 2
    counts = (unit * num_heads, unit * num_kv_heads, num_kv_heads)
    q, k, v = project(w, x, "q_proj k_proj v_proj", counts, rope_half)
    h, v = len(q) // 2, repeat_kv(v, n)
    k1, k2 = repeat_kv(k[: len(k) // 2], n), repeat_kv(k[len(k) // 2 :], n)
    if split:
        v = [np.hstack(pair) for pair in zip(v[:h], v[h:], strict=True)]
    first, second = ([attention(*each) for each in zip(*side, v, strict=True)] for side in ((q[:h], k1), (q[h:], k2)))
    norm = partial(rms_norm, weight=w["subln.weight"], eps=eps) if "subln.weight" in w else (lambda y: y)
    return subtracted(w, first, second, vector_lambda(w, w["lambda_init"]), norm, 1, "o_proj")


axolotl_split, axolotl_double = partial(axolotl, split=True), partial(axolotl, split=False)


def blog(w: dict, x: np.ndarray, num_heads: int, num_kv_heads: int, depth: int) -> np.ndarray:
    """The blog post's companion code: RoPE by complex numbers; n_kv_heads is not used; no 1 - lambda_init."""
    q, k, v = project(w, x, "wq wk wv", (2 * num_heads, 2 * num_heads, num_heads), rope_interleaved)
    y = [attention(a, b, v[m // 2]) for m, (a, b) in enumerate(zip(q, k, strict=True))]
    norm = partial(rms_norm, weight=w["sublayer_norm.weight"], eps=1e-5)
    return subtracted(w, y[0::2], y[1::2], vector_lambda(w, lambda_init(depth)), norm, 1, "out_proj")


def microsoft_v2(w: dict, x: np.ndarray, num_heads: int, num_kv_heads: int, depth: int) -> np.ndarray:
    """MultiheadFlashDiffV2: one stock call of 2 num_heads query heads; heads 0::2 minus sigmoid(lambda) times heads 1::2."""
    counts, group = (2 * num_heads, num_kv_heads, num_kv_heads), 2 * num_heads // num_kv_heads
    q, k, v = project(w, x, "q_proj k_proj v_proj", counts, rope_interleaved)
    y = [attention(each, k[m // group], v[m // group]) for m, each in enumerate(q)]
    gate = 1 / (1 + np.exp(-linear(w, "lambda_proj", x)))  # (T, num_heads)
    return linear(w, "o_proj", np.hstack([y[2 * i] - gate[:, i : i + 1] * y[2 * i + 1] for i in range(num_heads)]))


NAMES = "q_proj k_proj v_proj o_proj"
SHAPES = {  # names of the linears; widths d a head in rows of q, k and v and columns of the last; the head norm, its width
    "microsoft": ("q_proj k_proj v_proj out_proj", 2, 2, 2, 2, "subln", 2),
    "vasqu": ("q_proj k_proj v_proj out_proj", 1, 1, 1, 1, "subln", 2),
    "axolotl_split": (NAMES, 1, 1, 1, 1, "subln", 2),
    "axolotl_double": (NAMES, 2, 2, 1, 1, "subln", 1),
    "blog": ("wq wk wv out_proj", 2, 2, 2, 2, "sublayer_norm", 2),
    "microsoft_v2": (NAMES, 2, 1, 1, 1, None, 0),
}


def shapes(
    layout: str, num_heads: int, num_kv_heads: int, d: int, dim: int | None = None, *, norm: bool = True, bias: bool = False
) -> dict[str, tuple[int, ...]]:
    """The parameters that the constructor of `layout` makes; dim: width of x, where the heads do not fix it."""
    names, q, k, v, out, head_norm, width = SHAPES[layout]
    rows = (q * num_heads * d, k * num_kv_heads * d, v * num_kv_heads * d)
    dim = dim or out * num_heads * d
    made: dict[str, tuple[int, ...]] = {}
    for name, count, columns in zip(names.split(), (*rows, dim), (dim, dim, dim, out * num_heads * d), strict=True):
        made[f"{name}.weight"] = (count, columns)
        if bias:
            made[f"{name}.bias"] = (count,)
    if head_norm and norm:
        made[f"{head_norm}.weight"] = (width * d,)
    if layout.startswith("axolotl"):
        made["lambda_init"] = ()
    if layout == "microsoft_v2":
        return made | {"lambda_proj.weight": (num_heads, dim)}
    return made | {name: (d,) for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")}
