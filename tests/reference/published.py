"""What the published differential attention modules compute, each from its state dict: numpy float64, with loops.

Written from the systems' descriptions of heads, groups and norms, and not from model/: tests/parity/ holds our modules
with the systems' weights against these. Every function takes the weights `w` by the system's names, one sequence x (T, D),
the system's `num_heads` and `num_kv_heads`, and its depth counted from 0; all are causal. Each formula is analytic in x,
so that x may be complex: derivatives come from an imaginary step, exact to rounding.
"""

from functools import partial

import numpy as np

from tests.reference.formulas import rope

THETA = 10000.0
rope_half = partial(rope, theta=THETA)  # Llama
rope_interleaved = partial(rope, theta=THETA, interleaved=True)  # GPT-J


def lambda_init(depth: int) -> float:
    return 0.8 - 0.6 * np.exp(-0.3 * depth)


def causal_softmax(scores: np.ndarray) -> np.ndarray:
    """Row t over its first t + 1 columns; the shift by the (real) maximum cancels."""
    out = np.zeros_like(scores)
    for t in range(len(scores)):
        e = np.exp(scores[t, : t + 1] - scores[t, : t + 1].real.max())
        out[t, : t + 1] = e / e.sum()
    return out


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """One head: q, k (T, d), v (T, dv) -> (T, dv)."""
    return causal_softmax(q @ k.T / np.sqrt(q.shape[-1])) @ v


def rms_norm(x: np.ndarray, weight: np.ndarray | float, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def linear(w: dict, name: str, x: np.ndarray) -> np.ndarray:
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def heads(x: np.ndarray, count: int) -> list[np.ndarray]:
    """(T, count * d) -> count arrays (T, d): torch's view(T, count, d)."""
    return np.split(x, count, axis=-1)


def repeat_kv(xs: list[np.ndarray], times: int) -> list[np.ndarray]:
    """torch.repeat_interleave over heads."""
    return [x for x in xs for _ in range(times)]


def vector_lambda(w: dict, init: float) -> float:
    return np.exp((w["lambda_q1"] * w["lambda_k1"]).sum()) - np.exp((w["lambda_q2"] * w["lambda_k2"]).sum()) + init


def microsoft_naive(w: dict, x: np.ndarray, num_heads: int, num_kv_heads: int, depth: int) -> np.ndarray:
    """multihead_diffattn.py: 2 num_kv_heads key heads are repeated to 2 num_heads, then read as (num_heads, 2)."""
    n_rep = num_heads // num_kv_heads
    q = [rope_interleaved(each) for each in heads(linear(w, "q_proj", x), 2 * num_heads)]
    k = [rope_interleaved(each) for each in heads(linear(w, "k_proj", x), 2 * num_kv_heads)]
    k, v = repeat_kv(k, n_rep), repeat_kv(heads(linear(w, "v_proj", x), num_kv_heads), n_rep)
    maps = [causal_softmax(a @ b.T / np.sqrt(a.shape[-1])) for a, b in zip(q, k, strict=True)]
    lam, out = vector_lambda(w, lambda_init(depth)), []
    for i in range(num_heads):
        y = (maps[2 * i] - lam * maps[2 * i + 1]) @ v[i]
        out.append(rms_norm(y, w["subln.weight"], 1e-5) * (1 - lambda_init(depth)))
    return linear(w, "out_proj", np.hstack(out))


def microsoft_flash_1(w: dict, x: np.ndarray, num_heads: int, num_kv_heads: int, depth: int) -> np.ndarray:
    """multihead_flashdiff_1.py: keys are read as (num_kv_heads, 2); two calls, in which query head i has key head i // n."""
    q = [rope_interleaved(each) for each in heads(linear(w, "q_proj", x), 2 * num_heads)]
    k = [rope_interleaved(each) for each in heads(linear(w, "k_proj", x), 2 * num_kv_heads)]
    v = heads(linear(w, "v_proj", x), num_kv_heads)
    q1, q2, k1, k2 = q[0::2], q[1::2], k[0::2], k[1::2]
    lam, out = vector_lambda(w, lambda_init(depth)), []
    for i in range(num_heads):
        j = i // (num_heads // num_kv_heads)
        y = attention(q1[i], k1[j], v[j]) - lam * attention(q2[i], k2[j], v[j])
        out.append(rms_norm(y, w["subln.weight"], 1e-5) * (1 - lambda_init(depth)))
    return linear(w, "out_proj", np.hstack(out))


def microsoft_flash_2(w: dict, x: np.ndarray, num_heads: int, num_kv_heads: int, depth: int) -> np.ndarray:
    """multihead_flashdiff_2.py: values are read as (num_kv_heads, 2, d); four calls, joined along the width."""
    q = [rope_interleaved(each) for each in heads(linear(w, "q_proj", x), 2 * num_heads)]
    k = [rope_interleaved(each) for each in heads(linear(w, "k_proj", x), 2 * num_kv_heads)]
    v = heads(linear(w, "v_proj", x), 2 * num_kv_heads)
    lam, out = vector_lambda(w, lambda_init(depth)), []
    for i in range(num_heads):
        j = i // (num_heads // num_kv_heads)
        both = []
        for c in (0, 1):
            halves = [attention(q[2 * i + c], k[2 * j + c], v[2 * j + half]) for half in (0, 1)]
            both.append(np.hstack(halves))
        y = rms_norm(both[0] - lam * both[1], w["subln.weight"], 1e-5)
        out.append(y * (1 - lambda_init(depth)))
    return linear(w, "out_proj", np.hstack(out))


def vasqu(w: dict, x: np.ndarray, num_heads: int, num_kv_heads: int, depth: int, *, rope: bool = True) -> np.ndarray:
    """MultiheadSdpaDiff4: one call over 2h heads with every value head repeated 2n times; rel_pos is optional."""
    h, kv = num_heads // 2, num_kv_heads // 2
    turn = rope_interleaved if rope else (lambda each: each)
    q = [turn(each) for each in heads(linear(w, "q_proj", x), 2 * h)]
    k = [turn(each) for each in heads(linear(w, "k_proj", x), 2 * kv)]
    k, v = repeat_kv(k, h // kv), repeat_kv(heads(linear(w, "v_proj", x), kv), 2 * (h // kv))
    y = [attention(a, b, c) for a, b, c in zip(q, k, v, strict=True)]
    lam = vector_lambda(w, lambda_init(depth))
    out = [rms_norm(a - lam * b, w["subln.weight"], 1e-5) for a, b in zip(y[0::2], y[1::2], strict=True)]
    return linear(w, "out_proj", np.hstack(out) * (1 - lambda_init(depth)))


def timm(w: dict, x: np.ndarray, num_heads: int, num_kv_heads: int, depth: int) -> np.ndarray:
    """timm.layers.DiffAttention with is_causal: qk norms and the norm before proj have RmsNorm's eps, 1e-6."""
    assert num_kv_heads == num_heads
    q, k, v = np.split(linear(w, "qkv", x), 3, axis=-1)
    q, k, v = heads(q, 2 * num_heads), heads(k, 2 * num_heads), heads(v, num_heads)
    if "q_norm.weight" in w:
        q = [rms_norm(each, w["q_norm.weight"], 1e-6) for each in q]
        k = [rms_norm(each, w["k_norm.weight"], 1e-6) for each in k]
    if "lambda_a" in w:
        lam = np.exp(w["lambda_a"]) - np.exp(w["lambda_b"]) + lambda_init(depth)
    else:
        lam = vector_lambda(w, lambda_init(depth))
    out = []
    for i in range(num_heads):
        y = attention(q[2 * i], k[2 * i], v[i]) - lam * attention(q[2 * i + 1], k[2 * i + 1], v[i])
        out.append(rms_norm(y, w["sub_norm.weight"], 1e-5) * (1 - lambda_init(depth)))
    y = np.hstack(out)
    return linear(w, "proj", rms_norm(y, w["norm.weight"], 1e-6) if "norm.weight" in w else y)


def diffllama(w: dict, x: np.ndarray, num_heads: int, num_kv_heads: int, depth: int, *, eps: float = 1e-5) -> np.ndarray:
    """DiffLlamaAttention: the values of the first and of the second half of the heads, each repeated twice over the heads
    and then n times; two calls of all heads; heads i and i + h are subtracted."""
    n_rep = num_heads // num_kv_heads
    q = [rope_half(each) for each in heads(linear(w, "q_proj", x), num_heads)]
    k = repeat_kv([rope_half(each) for each in heads(linear(w, "k_proj", x), num_kv_heads)], n_rep)
    v = heads(linear(w, "v_proj", x), num_kv_heads)
    left, right = v[: num_kv_heads // 2] * 2, v[num_kv_heads // 2 :] * 2
    left, right = repeat_kv(left, n_rep), repeat_kv(right, n_rep)
    y = [np.hstack((attention(q[m], k[m], left[m]), attention(q[m], k[m], right[m]))) for m in range(num_heads)]
    lam, h = vector_lambda(w, lambda_init(depth)), num_heads // 2
    out = [(1 - lambda_init(depth)) * rms_norm(y[i] - lam * y[i + h], 1.0, eps) for i in range(h)]
    return linear(w, "o_proj", np.hstack(out))


def axolotl(
    w: dict, x: np.ndarray, num_heads: int, num_kv_heads: int, depth: int, *, split: bool, eps: float = 1e-6
) -> np.ndarray:
    """LlamaDifferentialAttention: the features of q and k are cut in two, positive and negative; lambda_init is stored and
    nothing is scaled by 1 - lambda_init. split: num_heads / 2 heads on each side, values joined from two halves."""
    n_rep = num_heads // num_kv_heads
    h, kv = (num_heads // 2, num_kv_heads // 2) if split else (num_heads, num_kv_heads)
    q1, q2 = (heads(part, h) for part in np.split(linear(w, "q_proj", x), 2, axis=-1))
    k1, k2 = (heads(part, kv) for part in np.split(linear(w, "k_proj", x), 2, axis=-1))
    k1, k2, v = repeat_kv(k1, n_rep), repeat_kv(k2, n_rep), heads(linear(w, "v_proj", x), num_kv_heads)
    v = repeat_kv(v, n_rep)
    if split:
        v = [np.hstack(pair) for pair in zip(v[: len(v) // 2], v[len(v) // 2 :], strict=True)]
    lam, out = vector_lambda(w, w["lambda_init"]), []
    for i in range(h):
        first = attention(rope_half(q1[i]), rope_half(k1[i]), v[i])
        y = first - lam * attention(rope_half(q2[i]), rope_half(k2[i]), v[i])
        out.append(rms_norm(y, w["subln.weight"], eps) if "subln.weight" in w else y)
    return linear(w, "o_proj", np.hstack(out))


axolotl_split, axolotl_double = partial(axolotl, split=True), partial(axolotl, split=False)


def blog(w: dict, x: np.ndarray, num_heads: int, num_kv_heads: int, depth: int) -> np.ndarray:
    """The blog post's companion code: RoPE by complex numbers; n_kv_heads is not used; no 1 - lambda_init."""
    q, k = heads(linear(w, "wq", x), 2 * num_heads), heads(linear(w, "wk", x), 2 * num_heads)
    q, k, v = [rope_interleaved(a) for a in q], [rope_interleaved(a) for a in k], heads(linear(w, "wv", x), num_heads)
    lam, out = vector_lambda(w, lambda_init(depth)), []
    for i in range(num_heads):
        maps = [causal_softmax((q[m] / np.sqrt(q[m].shape[-1])) @ k[m].T) for m in (2 * i, 2 * i + 1)]
        out.append(rms_norm((maps[0] - lam * maps[1]) @ v[i], w["sublayer_norm.weight"], 1e-5))
    return linear(w, "out_proj", np.hstack(out))


def microsoft_v2(w: dict, x: np.ndarray, num_heads: int, num_kv_heads: int, depth: int) -> np.ndarray:
    """MultiheadFlashDiffV2: one stock call of 2 num_heads query heads; heads 0::2 minus sigmoid(lambda) times heads 1::2."""
    q = [rope_interleaved(each) for each in heads(linear(w, "q_proj", x), 2 * num_heads)]
    k = [rope_interleaved(each) for each in heads(linear(w, "k_proj", x), num_kv_heads)]
    v, group = heads(linear(w, "v_proj", x), num_kv_heads), 2 * num_heads // num_kv_heads
    y = [attention(q[m], k[m // group], v[m // group]) for m in range(2 * num_heads)]
    gate = 1 / (1 + np.exp(-linear(w, "lambda_proj", x)))  # (T, num_heads)
    out = [y[2 * i] - gate[:, i : i + 1] * y[2 * i + 1] for i in range(num_heads)]
    return linear(w, "o_proj", np.hstack(out))


LINEARS = {
    "microsoft": "q_proj k_proj v_proj out_proj",
    "vasqu": "q_proj k_proj v_proj out_proj",
    "timm": "q k v proj",
    "blog": "wq wk wv out_proj",
}
HEAD_NORM = {"timm": "sub_norm", "blog": "sublayer_norm", "diffllama": None, "microsoft_v2": None}


def shapes(
    layout: str, num_heads: int, num_kv_heads: int, d: int, dim: int | None = None, **options: bool
) -> dict[str, tuple[int, ...]]:
    """The parameters that the constructor of `layout` makes; dim: width of x, where the heads do not fix it.

    options: norm (true unless given), bias, proj_bias, dual, qk_norm, scale_norm.
    """
    assert options.keys() <= {"norm", "bias", "proj_bias", "dual", "qk_norm", "scale_norm"}
    h, kv, bias = num_heads, num_kv_heads, options.get("bias", False)
    units = {  # rows of q, k, v and columns of the output projection, in widths d
        "vasqu": (h, kv, kv, h),
        "diffllama": (h, kv, kv, h),
        "axolotl_split": (h, kv, kv, h),
        "axolotl_double": (2 * h, 2 * kv, kv, h),
        "microsoft_v2": (2 * h, kv, kv, h),
    }.get(layout, (2 * h, 2 * kv, 2 * kv, 2 * h))
    q, k, v, out = (count * d for count in units)
    dim = dim or out
    made: dict[str, tuple[int, ...]] = {}
    names = LINEARS.get(layout, "q_proj k_proj v_proj o_proj").split()
    for name, rows, columns in zip(names, (q, k, v, dim), (dim, dim, dim, out), strict=True):
        made[f"{name}.weight"] = (rows, columns)
        if options.get("proj_bias") if name == "proj" else bias:
            made[f"{name}.bias"] = (rows,)
    if layout == "timm":
        fused = {"qkv.weight": (q + k + v, dim), **({"qkv.bias": (q + k + v,)} if bias else {})}
        made = {key: shape for key, shape in made.items() if key[0] not in "qkv"} | fused
        made |= {"q_norm.weight": (d,), "k_norm.weight": (d,)} if options.get("qk_norm") else {}
        made |= {"norm.weight": (out,)} if options.get("scale_norm") else {}
    if head_norm := HEAD_NORM.get(layout, "subln") if options.get("norm", True) else None:
        made[f"{head_norm}.weight"] = (d if layout == "axolotl_double" else 2 * d,)
    if layout.startswith("axolotl"):
        made["lambda_init"] = ()
    if layout == "microsoft_v2":
        return made | {"lambda_proj.weight": (num_heads, dim)}
    if options.get("dual"):
        return made | {"lambda_a": (), "lambda_b": ()}
    return made | {name: (d,) for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")}


def introspective(w: dict, x: np.ndarray, num_heads: int, num_kv_heads: int, cumulative: bool, paths: int = 3) -> np.ndarray:
    """introspective_attn.py and introspective_flashdiff_1.py (cumulative), or introspective_flashdiff_2.py, repaired.

    Weights by our names, one sequence x (T, D). Kept: path i's keys are concatenated along the sequence with what earlier
    paths stored, which is their keys (flash 2) or their concatenated ones (cumulative, so that the first path's stand
    twice before the third); whole heads; RMSNorm of each path; LayerNorm over sigmoid(w); RMSNorm(sum + alpha x); then W_o.
    Repaired, as none of the three runs: LayerNorm over all paths at once, causality s <= t within every block of T keys, and
    each block rotated once, by its positions.
    """
    T, group = len(x), num_heads // num_kv_heads
    gates = 1 / (1 + np.exp(-w["w"]))
    weights = (gates - gates.mean()) / np.sqrt(gates.var() + 1e-5)
    stored: list[tuple[list, list]] = []
    mixed = w["alpha"] * x
    for i in range(paths):
        q = [rope_half(each) for each in heads(linear(w, f"q.{i}", x), num_heads)]
        own_k = repeat_kv([rope_half(each) for each in heads(linear(w, f"k.{i}", x), num_kv_heads)], group)
        own_v = repeat_kv(heads(linear(w, f"v.{i}", x), num_kv_heads), group)
        k = [np.concatenate([key, *(keys[h] for keys, _ in stored)]) for h, key in enumerate(own_k)]
        v = [np.concatenate([value, *(values[h] for _, values in stored)]) for h, value in enumerate(own_v)]
        merged = []
        for h in range(num_heads):
            scores = q[h] @ k[h].T / np.sqrt(q[h].shape[-1])
            e = np.exp(scores - scores.max()) * (np.arange(len(k[h])) % T <= np.arange(T)[:, None])
            merged.append(e / e.sum(-1, keepdims=True) @ v[h])
        stored.append((k, v) if cumulative else (own_k, own_v))
        mixed = mixed + weights[i] * rms_norm(np.hstack(merged), w[f"path_norms.{i}.weight"], 1e-5)
    return rms_norm(mixed, w["norm.weight"], 1e-5) @ w["out.weight"].T
