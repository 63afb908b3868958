"""The variants' formulas once more, in numpy float64 with a loop per head, written from the papers and not from model/.

Each takes the weights of a whole attention module by name, its input x (B, T, D), and who sees whom (T, S) or (B, T, S).
Head layout, rotary layout and norms are spelled out here so that a change of convention in model/ is noticed.
"""

import numpy as np

EPS = 1e-5


def softmax(scores: np.ndarray, see: np.ndarray) -> np.ndarray:
    out = np.zeros_like(scores)
    for t in range(scores.shape[0]):
        cols = np.flatnonzero(see[t])
        if len(cols):
            e = np.exp(scores[t, cols] - scores[t, cols].max())
            out[t, cols] = e / e.sum()
    return out


def rope(x: np.ndarray, theta: float) -> np.ndarray:
    """x (T, d), position = row; (x_i, x_{i+d/2}) is turned by t theta^(-2i/d)."""
    T, d = x.shape
    out = x.copy()
    for i in range(d // 2):
        angle = np.arange(T) * theta ** (-2.0 * i / d)
        a, b = x[:, i], x[:, i + d // 2]
        out[:, i] = a * np.cos(angle) - b * np.sin(angle)
        out[:, i + d // 2] = b * np.cos(angle) + a * np.sin(angle)
    return out


def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def head(x: np.ndarray, weight: np.ndarray, i: int, width: int) -> np.ndarray:
    """Rows i*width .. of a projection: (T, width)."""
    return x @ weight[i * width : (i + 1) * width].T


def rows(see: np.ndarray, b: int) -> np.ndarray:
    return see if see.ndim == 2 else see[b]


def baseline(
    w: dict, x: np.ndarray, see: np.ndarray, *, heads: int, kv_heads: int, theta: float, gated: bool = False
) -> np.ndarray:
    d = w["q.weight"].shape[0] // heads
    out = []
    for b in range(len(x)):
        merged = []
        for i in range(heads):
            j = i * kv_heads // heads
            q = rope(head(x[b], w["q.weight"], i, d), theta)
            k = rope(head(x[b], w["k.weight"], j, d), theta)
            a = softmax(q @ k.T / np.sqrt(d), rows(see, b))
            y = a @ head(x[b], w["v.weight"], j, d)
            if gated:  # arXiv 2505.06708: one sigmoid gate per token and head, on the head's output
                y = y / (1 + np.exp(-x[b] @ w["gate_logits.weight"][i]))[:, None]
            merged.append(y)
        out.append(np.concatenate(merged, -1) @ w["out.weight"].T)
    return np.stack(out)


def diff(w: dict, x: np.ndarray, see: np.ndarray, *, heads: int, kv_heads: int, theta: float, layer: int) -> np.ndarray:
    """arXiv 2410.05258, equations 1-3; `heads` counts baseline heads, h = heads / 2 differential ones."""
    h, kv = heads // 2, kv_heads // 2
    d = w["q.weight"].shape[0] // heads
    lam_init = 0.8 - 0.6 * np.exp(-0.3 * ((layer + 1) - 1))  # the paper counts layers from 1
    lam = np.exp(w["lambda_q1"] @ w["lambda_k1"]) - np.exp(w["lambda_q2"] @ w["lambda_k2"]) + lam_init
    out = []
    for b in range(len(x)):
        merged = []
        for i in range(h):
            j = i * kv // h
            maps = []
            for c in (0, 1):
                q = rope(head(x[b], w["q.weight"], 2 * i + c, d), theta)
                k = rope(head(x[b], w["k.weight"], 2 * j + c, d), theta)
                maps.append(softmax(q @ k.T / np.sqrt(d), rows(see, b)))
            y = (maps[0] - lam * maps[1]) @ head(x[b], w["v.weight"], j, 2 * d)
            merged.append((1 - lam_init) * rms(y, w["head_norm.weight"]))
        out.append(np.concatenate(merged, -1) @ w["out.weight"].T)
    return np.stack(out)


def path_weights(w: dict, x: np.ndarray, kind: str, paths: int) -> np.ndarray:
    """lambda (P,), or (T, P) for softmax_input, of one sequence x (T, D)."""
    if kind == "softmax_input":
        logits = x @ w["path_logits.weight"].T
        e = np.exp(logits - logits.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)
    s = 1 / (1 + np.exp(-w["w"]))
    if kind == "sigmoid":
        return s
    eps = 1e-5 if kind == "literal" else 1e-2
    norm = (s - s.mean()) / np.sqrt(((s - s.mean()) ** 2).mean() + eps)
    return norm if kind == "literal" else w["path_gain"] * norm + w["path_bias"]


def introspective(
    w: dict, x: np.ndarray, see: np.ndarray, *, mode: str, paths: int, heads: int, kv_heads: int, width: int,
    memory: str, path_weight: str, theta: float,
) -> np.ndarray:  # fmt: skip
    """docs/METHODS.md, introspective attention; `heads`, `kv_heads` per path, values of width D / heads."""
    D = x.shape[-1]
    dv, group = D // heads, heads // kv_heads
    out = []
    for b in range(len(x)):
        earlier: list[dict] = []
        rotated: list[tuple[list, list]] = []
        mixed = w["alpha"] * x[b]
        lam = path_weights(w, x[b], path_weight, paths)
        for p in range(paths):
            q = [head(x[b], w[f"q.{p}.weight"], i, width) for i in range(heads)]
            k = [head(x[b], w[f"k.{p}.weight"], j, width) for j in range(kv_heads)]
            v = [head(x[b], w[f"v.{p}.weight"], j, dv) for j in range(kv_heads)]
            own = {"k": list(k), "v": list(v)}
            if mode == "feature" and p:
                for j in range(kv_heads):
                    m = np.concatenate([e[part][j] for e in earlier for part in memory], -1)
                    k[j] = k[j] + m @ w[f"memory_k.{p - 1}"][j]
                    v[j] = v[j] + m @ w[f"memory_v.{p - 1}"][j]
            rotated.append(([rope(each, theta) for each in k], v))
            sets = rotated if mode == "sequence" else rotated[-1:]
            merged = []
            for i in range(heads):
                j = i // group
                keys = np.concatenate([ks[j] for ks, _ in sets])
                values = np.concatenate([vs[j] for _, vs in sets])
                visible = np.tile(rows(see, b), (1, len(sets)))
                merged.append(softmax(rope(q[i], theta) @ keys.T / np.sqrt(width), visible) @ values)
            a = rms(np.concatenate(merged, -1), w[f"path_norms.{p}.weight"])
            own["a"] = [a[:, j * group * dv : (j + 1) * group * dv] for j in range(kv_heads)]
            earlier.append(own)
            mixed = mixed + lam[..., p, None] * a
        out.append(rms(mixed, w["norm.weight"]) @ w["out.weight"].T)
    return np.stack(out)
