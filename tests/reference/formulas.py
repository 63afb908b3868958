"""The variants' formulas once more, in numpy float64 with a loop per head, written from the papers and not from model/.

A variant's formula is the function of its name: (w, x, see, cfg, layer, first) -> (B, T, D). w: the weights of a whole
attention module by name. x (B, T, D): its input. see: who sees whom, (T, S) or (B, T, S). cfg: a filled DecoderConfig. layer:
from 0. first: (w, x) of layer 0 of the same stack, which has the same variant. Head layout, rotary layout and norms are
spelled out here so that a change of convention in model/ is noticed.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.reference import parts
from tests.reference.parts import added, exponentials, head, head_norm, joined, normed, positions, rope, seen, sigmoid, softmax


def logits(w: dict, x: np.ndarray, cfg: Any, i: int, j: int) -> np.ndarray:
    """Scaled, rotated products of query head i and key head j of one sequence x (T, D): (T, T)."""
    d = cfg.head_dim
    q, k = (rope(normed(w, name, head(w, name, x, n, d)), **positions(cfg)) for name, n in (("q", i), ("k", j)))
    return q @ k.T / np.sqrt(d)


def attention(w: dict, x: np.ndarray, see: np.ndarray, cfg: Any, **changes: Callable) -> np.ndarray:
    """Softmax attention (arXiv 1706.03762) with up to four changes.

    values(b, j): the values (T, d) of key head j of sequence b. change(b, i, scores): what becomes of the scores (T, S) of
    head i. output(b, i, y): what becomes of its output y (T, d). row: as in `softmax`.
    """
    d = cfg.head_dim

    def one(b: int, i: int) -> np.ndarray:
        j = i * cfg.n_kv_head // cfg.n_head
        v, scores = changes["values"](b, j) if "values" in changes else head(w, "v", x[b], j, d), logits(w, x[b], cfg, i, j)
        scores = changes["change"](b, i, scores) if "change" in changes else scores
        y = softmax(scores, seen(see, b, i), b, i, changes.get("row", exponentials)) @ v
        return changes["output"](b, i, y) if "output" in changes else y

    return joined(w, x, cfg.n_head, one)


def softpick(w: dict, x: np.ndarray, see: np.ndarray, cfg: Any, layer: int, first: tuple) -> np.ndarray:
    """arXiv 2504.20966: what a key adds to 1 counts, and only where it is above 0."""

    def lifted(scores: np.ndarray, i: int) -> np.ndarray:
        above = np.exp(scores) - 1
        return np.maximum(above, 0) / (np.abs(above).sum() + 1e-6)

    return attention(w, x, see, cfg, row=lifted)


def sink(w: dict, x: np.ndarray, see: np.ndarray, cfg: Any, layer: int, first: tuple) -> np.ndarray:
    """gpt-oss: one more key of score b, whose value is zero."""
    return attention(w, x, see, cfg, row=lambda s, i: np.exp(s) / (np.exp(w["sink"][i]) + np.exp(s).sum()))


def cog(w: dict, x: np.ndarray, see: np.ndarray, cfg: Any, layer: int, first: tuple) -> np.ndarray:
    """arXiv 2411.07176: weights by the absolute scores, with the scores' signs."""
    return attention(w, x, see, cfg, row=lambda s, i: np.sign(s) * exponentials(np.abs(s)))


def ssmax(w: dict, x: np.ndarray, see: np.ndarray, cfg: Any, layer: int, first: tuple) -> np.ndarray:
    """arXiv 2501.19399: n^(s score) in place of e^score, n the number of keys seen."""

    def sharper(b: int, i: int, scores: np.ndarray) -> np.ndarray:
        return scores * w["sharpness"][i] * np.log(np.maximum(seen(see, b, i).sum(-1, keepdims=True), 1))

    return attention(w, x, see, cfg, change=sharper)


def forgetting(w: dict, x: np.ndarray, see: np.ndarray, cfg: Any, layer: int, first: tuple) -> np.ndarray:
    """arXiv 2503.02130: the product of the gates f of tokens s + 1 .. t multiplies e^score."""

    def decayed(b: int, i: int, scores: np.ndarray) -> np.ndarray:
        f = sigmoid(x[b] @ w["forget.weight"][i] + w["forget.bias"][i])
        T = len(scores)
        return scores + np.array([[np.log(f[s + 1 : t + 1]).sum() for s in range(T)] for t in range(T)])

    return attention(w, x, see, cfg, change=decayed)


def selective(w: dict, x: np.ndarray, see: np.ndarray, cfg: Any, layer: int, first: tuple) -> np.ndarray:
    """arXiv 2410.02703: what earlier tokens u gave key s by head 1 is subtracted, but for u = s and a text's first token."""

    def masked(b: int, i: int, scores: np.ndarray) -> np.ndarray:
        T, sees, F, first_head = len(scores), seen(see, b, 0), np.zeros_like(scores), logits(w, x[b], cfg, 0, 0)
        for t in range(T):
            for s in range(T):
                users = [u for u in range(t) if u != s and sees[u, s] and sees[s].sum() != 1]
                F[t, s] = sum(max(first_head[u, s], 0) for u in users)
        return scores - F

    return attention(w, x, see, cfg, change=masked)


def talking_heads(w: dict, x: np.ndarray, see: np.ndarray, cfg: Any, layer: int, first: tuple) -> np.ndarray:
    """arXiv 2003.02436: sums of the heads' maps, and of their scores before the softmax, too."""
    d, H = cfg.head_dim, cfg.n_head

    def one(b: int, i: int) -> np.ndarray:
        j, visible = i * cfg.n_kv_head // H, [seen(see, b, n) for n in range(H)]
        bias = [parts.extra[b % parts.extra.shape[0], n % parts.extra.shape[1]] for n in range(H)]
        scores = [logits(w, x[b], cfg, n, n * cfg.n_kv_head // H) + bias[n] for n in range(H)]
        if cfg.talking_heads.before:
            mix = w["scores_mixing"][0]
            scores = [sum(mix[n, m] * np.where(visible[m], scores[m], 0) for m in range(H)) for n in range(H)]
        with added(0):
            maps = [softmax(scores[n], visible[n]) for n in range(H)]
        mixed = sum(w["mixing"][0][i, n] * maps[n] for n in range(H))
        return np.where(visible[i], mixed, 0) @ head(w, "v", x[b], j, d)

    return joined(w, x, H, one)


def baseline(w: dict, x: np.ndarray, see: np.ndarray, cfg: Any, layer: int, first: tuple) -> np.ndarray:
    return attention(w, x, see, cfg, output=lambda b, i, y: head_norm(w, cfg.baseline.head_norm, y))


def gated(w: dict, x: np.ndarray, see: np.ndarray, cfg: Any, layer: int, first: tuple) -> np.ndarray:
    """arXiv 2505.06708: a sigmoid gate per token, and per head or per element of the head's output."""

    def gate(b: int, i: int, y: np.ndarray) -> np.ndarray:
        gates, d = sigmoid(x[b] @ w["gate_logits.weight"].T), y.shape[-1]
        return y * (gates[:, i, None] if cfg.gated.gate == "headwise" else gates[:, i * d : (i + 1) * d])

    return attention(w, x, see, cfg, output=gate)


def dex(w: dict, x: np.ndarray, see: np.ndarray, cfg: Any, layer: int, first: tuple) -> np.ndarray:
    """arXiv 2505.16333, figure 9: O - lambda f(O), one f for all heads of a layer."""
    return attention(w, x, see, cfg, output=lambda b, i, y: y - w["lambda_learned"] * (y @ w["noise.weight"].T))


def temperature(w: dict, x: np.ndarray, see: np.ndarray, cfg: Any, layer: int, first: tuple) -> np.ndarray:
    return attention(w, x, see, cfg, change=lambda b, i, scores: scores / np.exp(w["log_temperature"][i]))


def value_residual(w: dict, x: np.ndarray, see: np.ndarray, cfg: Any, layer: int, first: tuple) -> np.ndarray:
    """arXiv 2410.17897: V'_n = l1 V_1 + l2 V_n, in the identity form l1 = l2 = 1/2; the first layer keeps V_1."""

    def values(b: int, j: int) -> np.ndarray:
        v = head(w, "v", x[b], j, cfg.head_dim)
        return 0.5 * head(first[0], "v", first[1][b], j, cfg.head_dim) + 0.5 * v if layer else v

    return attention(w, x, see, cfg, values=values)


def diff_lambda(w: dict, lam_init: float) -> float:
    """The three forms: four vectors (the paper), two scalars (timm), nothing learned."""
    if "lambda_q1" in w:
        return np.exp(w["lambda_q1"] @ w["lambda_k1"]) - np.exp(w["lambda_q2"] @ w["lambda_k2"]) + lam_init
    if "lambda_a" in w:
        return np.exp(w["lambda_a"]) - np.exp(w["lambda_b"]) + lam_init
    return lam_init


def diff(w: dict, x: np.ndarray, see: np.ndarray, cfg: Any, layer: int, first: tuple, **changes: Any) -> np.ndarray:
    """arXiv 2410.05258, equations 1-3: h = n_head / 2 differential heads, or n_head with heads=double.

    Followers change it: options, in place of V1's; vectors(name, b, i, c): the queries or keys (T, d) of map c of head i;
    combine(b, i, maps, lam): the map.
    """
    opt, d = changes.get("options", cfg.diff), cfg.head_dim
    doubled = opt.heads == "double"
    h, kv, dv = (cfg.n_head, cfg.n_kv_head, d) if doubled else (cfg.n_head // 2, cfg.n_kv_head // 2, 2 * d)
    depth = layer + 1  # the paper counts layers from 1
    lam_init = 0.8 - 0.6 * np.exp(-0.3 * (depth - 1)) if opt.lambda_init is None else opt.lambda_init
    lam = diff_lambda(w, lam_init)
    vectors = changes.get("vectors", lambda name, b, i, c: head(w, name, x[b], 2 * i + c, d))
    combine = changes.get("combine", lambda b, i, maps, lam: maps[0] - lam * maps[1])

    def one(b: int, i: int) -> np.ndarray:
        j, maps = i * kv // h, []
        for c in (0, 1):
            q, k = normed(w, "q", vectors("q", b, i, c)), normed(w, "k", vectors("k", b, j, c))
            scores = rope(q, **positions(cfg)) @ rope(k, **positions(cfg)).T
            maps.append(softmax(scores / np.sqrt(d), seen(see, b, i), b, i))
        y = combine(b, i, maps, lam) @ head(w, "v", x[b], j, dv)
        return (1 - lam_init if opt.head_scale is None else opt.head_scale) * head_norm(w, opt.head_norm, y)

    return joined(w, x, h, one)


def grouped_diff(w: dict, x: np.ndarray, see: np.ndarray, cfg: Any, layer: int, first: tuple) -> np.ndarray:
    """arXiv 2510.06949: signal heads first, then the noise heads, of which each serves `ratio` signal heads."""
    heads = {"q": cfg.n_head, "k": cfg.n_kv_head}

    def vectors(name: str, b: int, i: int, c: int) -> np.ndarray:
        return head(w, name, x[b], heads[name] + i // cfg.grouped_diff.ratio if c else i, cfg.head_dim)

    return diff(w, x, see, cfg, layer, first, options=cfg.grouped_diff, vectors=vectors)


def shared_diff(w: dict, x: np.ndarray, see: np.ndarray, cfg: Any, layer: int, first: tuple) -> np.ndarray:
    """arXiv 2501.17900: one projection for both maps, and one of low rank for each."""
    d, rank = cfg.head_dim, cfg.shared_diff.rank

    def vectors(name: str, b: int, i: int, c: int) -> np.ndarray:
        low = x[b] @ w[f"{name}_down.weight"][c * rank : (c + 1) * rank].T
        return head(w, name, x[b], i, d) + low @ w[f"{name}_up.{c}.weight"][i * d : (i + 1) * d].T

    return diff(w, x, see, cfg, layer, first, options=cfg.shared_diff, vectors=vectors)


def dint(w: dict, x: np.ndarray, see: np.ndarray, cfg: Any, layer: int, first: tuple) -> np.ndarray:
    """arXiv 2501.17486, with a causal mean: over the rows of the first map at the positions that a query sees."""

    def combine(b: int, i: int, maps: list[np.ndarray], lam: float) -> np.ndarray:
        sees, out = seen(see, b, i), maps[0] - lam * maps[1]
        for t in range(len(out)):
            if sees[t].any():
                out[t] += lam * maps[0][sees[t]].mean(0)
        return out

    return diff(w, x, see, cfg, layer, first, options=cfg.dint, combine=combine)


def gated_diff(w: dict, x: np.ndarray, see: np.ndarray, cfg: Any, layer: int, first: tuple) -> np.ndarray:
    """arXiv 2505.24054: the gate of a token and head weighs one map, what is left of 1 the other."""
    h, kv = cfg.n_head // 2, cfg.n_kv_head // 2

    def one(b: int, i: int) -> np.ndarray:
        j = i * kv // h
        maps = [softmax(logits(w, x[b], cfg, 2 * i + c, 2 * j + c), seen(see, b, i), b, i) for c in (0, 1)]
        g = sigmoid(head(w, "gate_logits", x[b], i, 1))
        return head_norm(w, "affine", (g * maps[0] - (1 - g) * maps[1]) @ head(w, "v", x[b], j, 2 * cfg.head_dim))

    return joined(w, x, h, one)


def diff_v2(w: dict, x: np.ndarray, see: np.ndarray, cfg: Any, layer: int, first: tuple) -> np.ndarray:
    """microsoft/unilm Diff-Transformer-V2: query heads 2i and 2i+1 over the key and value head of output head i."""

    def one(b: int, i: int) -> np.ndarray:
        j = i * cfg.n_kv_head // cfg.n_head
        maps = (softmax(logits(w, x[b], cfg, 2 * i + c, j), seen(see, b, i), b, i) for c in (0, 1))
        first, second = (each @ head(w, "v", x[b], j, cfg.head_dim) for each in maps)
        return first - sigmoid(head(w, "lambda_logits", x[b], i, 1)) * second

    return joined(w, x, cfg.n_head, one)


def integral(w: dict, x: np.ndarray, see: np.ndarray, cfg: Any, layer: int, first: tuple) -> np.ndarray:
    """arXiv 2508.18387: logits of `signals` query-key pairs are averaged before one softmax."""
    signals = cfg.integral.signals
    h, kv = cfg.n_head // signals, cfg.n_kv_head // signals

    def one(b: int, i: int) -> np.ndarray:
        j = i * kv // h
        mean = np.mean([logits(w, x[b], cfg, signals * i + s, signals * j + s) for s in range(signals)], 0)
        return softmax(mean, seen(see, b, i), b, i) @ head(w, "v", x[b], j, signals * cfg.head_dim)

    return joined(w, x, h, one)


def path_weights(w: dict, x: np.ndarray, kind: str, paths: int) -> np.ndarray:
    """lambda (P,), or (T, P) for softmax_input, of one sequence x (T, D)."""
    if kind == "softmax_input":
        logits = x @ w["path_logits.weight"].T
        e = np.exp(logits - logits.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)
    s = sigmoid(w["w"])
    if kind == "sigmoid":
        return s
    eps = 1e-5 if kind == "literal" else 1e-2
    norm = (s - s.mean()) / np.sqrt(((s - s.mean()) ** 2).mean() + eps)
    return norm if kind == "literal" else w["path_gain"] * norm + w["path_bias"]


def introspective(w: dict, x: np.ndarray, see: np.ndarray, cfg: Any, layer: int, first: tuple) -> np.ndarray:
    """docs/METHODS.md, introspective attention; heads per path, values of width D / heads."""
    opt, width, turned = cfg.introspective, cfg.head_dim, positions(cfg)
    mode, paths, memory = opt.mode, opt.paths, opt.memory
    heads = {None: cfg.n_head // 2, 0: cfg.n_head}.get(opt.heads, opt.heads)
    kv_heads = max(1, heads * cfg.n_kv_head // cfg.n_head)
    D = x.shape[-1]
    dv, group = D // heads, heads // kv_heads
    out = []
    for b in range(len(x)):
        earlier: list[dict] = []
        rotated: list[tuple[list, list]] = []
        mixed = w["alpha"] * x[b] if "alpha" in w else 0 * x[b]
        lam = path_weights(w, x[b], opt.path_weight, paths)
        for p in range(paths):
            q = [head(w, f"q.{p}", x[b], i, width) for i in range(heads)]
            kept = {}
            if f"k.{p}.weight" in w:
                k = [head(w, f"k.{p}", x[b], j, width) for j in range(kv_heads)]
                v = [head(w, f"v.{p}", x[b], j, dv) for j in range(kv_heads)]
                kept = {"k": list(k), "v": list(v)}
            if mode == "feature" and p:
                for j in range(kv_heads):
                    m = np.concatenate([e[part][j] for e in earlier for part in memory], -1)
                    from_k, from_v = m @ w[f"memory_k.{p - 1}"][j], m @ w[f"memory_v.{p - 1}"][j]
                    k[j], v[j] = (k[j] + from_k, v[j] + from_v) if opt.own_path else (from_k, from_v)
                if not opt.own_path:  # the memory holds the keys and values that the path has
                    kept = {"k": list(k), "v": list(v)}
            if kept:
                rotated.append(([rope(each, **turned) for each in k], v))
            sets = rotated[-1:]
            if mode == "sequence":
                sets = rotated[: p + 1 if opt.own_path or p == 0 else p]
                if opt.repeated:  # path j < p stands in the lists of all paths between them: 2^(p - 1 - j) times
                    sets = [rotated[j] for j in range(p) for _ in range(2 ** (p - 1 - j))] + [rotated[p]]
            merged = []
            for i in range(heads):
                j = i // group
                keys = np.concatenate([ks[j] for ks, _ in sets])
                values = np.concatenate([vs[j] for _, vs in sets])
                visible = np.concatenate([seen(see, b, i)] * len(sets), -1)
                scores = rope(q[i], **turned) @ keys.T / np.sqrt(width)
                merged.append(softmax(scores, visible, b, i) @ values)
            a = head_norm(w, opt.path_norm, np.concatenate(merged, -1), f"path_norms.{p}")
            kept["a"] = [a[:, j * group * dv : (j + 1) * group * dv] for j in range(kv_heads)]
            earlier.append(kept)
            mixed = mixed + lam[..., p, None] * a
        out.append(head_norm(w, opt.path_norm, mixed, "norm") @ w["out.weight"].T + w.get("out.bias", 0))
    return np.stack(out)
