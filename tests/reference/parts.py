"""What the formulas are made of: softmax, rotations, norms, projections to heads, who sees whom. Numpy, float64."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

EPS = 1e-5
extra: np.ndarray = np.zeros((1, 1, 1, 1))


@contextmanager
def added(bias: Any) -> Iterator[None]:
    """Inside, `bias`, broadcastable to (B, H, T, S), is added to the scores of every formula."""
    global extra
    before = extra
    extra = np.asarray(bias, dtype=float).reshape((1,) * (4 - np.ndim(bias)) + np.shape(bias))
    try:
        yield
    finally:
        extra = before


def exponentials(scores: np.ndarray, i: int = 0) -> np.ndarray:
    e = np.exp(scores - scores.max())
    return e / e.sum()


def softmax(scores: np.ndarray, see: np.ndarray, b: int = 0, i: int = 0, row: Callable = exponentials) -> np.ndarray:
    """Row by row, of head i of sequence b. A row that sees nothing is zero. Several key sets stand side by side.

    row: the weights of the keys that a query of head i sees, by their scores, where the map is no softmax.
    """
    more = extra[b % extra.shape[0], i % extra.shape[1]]
    scores = scores + np.tile(more, (1, scores.shape[1] // more.shape[1]))
    out = np.zeros_like(scores)
    for t in range(scores.shape[0]):
        cols = np.flatnonzero(see[t])
        if len(cols):
            out[t, cols] = row(scores[t, cols], i)
    return out


def rope(x: np.ndarray, theta: float | None, interleaved: bool = False) -> np.ndarray:
    """x (T, d), position = row; pair i is turned by t theta^(-2i/d). Pairs are (i, i+d/2), or (2i, 2i+1) interleaved."""
    if theta is None:
        return x
    T, d = x.shape
    out = x.copy()
    for i in range(d // 2):
        m, n = (2 * i, 2 * i + 1) if interleaved else (i, i + d // 2)
        angle = np.arange(T) * theta ** (-2.0 * i / d)
        a, b = x[:, m], x[:, n]
        out[:, m] = a * np.cos(angle) - b * np.sin(angle)
        out[:, n] = b * np.cos(angle) + a * np.sin(angle)
    return out


def rms(x: np.ndarray, weight: np.ndarray | float = 1.0, eps: float = EPS) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def head(w: dict, name: str, x: np.ndarray, i: int, width: int) -> np.ndarray:
    """Rows i*width .. of a projection: (T, width)."""
    span = slice(i * width, (i + 1) * width)
    return x @ w[f"{name}.weight"][span].T + (w[f"{name}.bias"][span] if f"{name}.bias" in w else 0)


def normed(w: dict, name: str, y: np.ndarray) -> np.ndarray:
    """Queries or keys of a head (T, d), normed where the module has a norm for them (Qwen3)."""
    return rms(y, w[f"{name}_norm.weight"]) if f"{name}_norm.weight" in w else y


def project_out(w: dict, merged: list[np.ndarray]) -> np.ndarray:
    y = np.concatenate(merged, -1)
    y = rms(y, w["scale_norm.weight"]) if "scale_norm.weight" in w else y
    return y @ w["out.weight"].T + w.get("out.bias", 0)


def joined(w: dict, x: np.ndarray, heads: int, head_of: Callable) -> np.ndarray:
    """The projection of all heads, of which head_of(b, i) is the output of head i of sequence b."""
    return np.stack([project_out(w, [head_of(b, i) for i in range(heads)]) for b in range(len(x))])


def seen(see: np.ndarray, b: int, i: int) -> np.ndarray:
    """Who sees whom in head i of sequence b, (T, S); see may be (T, S), (B, T, S) or (B, H, T, S)."""
    of_sequence = see if see.ndim == 2 else see[b]
    return of_sequence[i % len(of_sequence)] if of_sequence.ndim == 3 else of_sequence


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def positions(cfg: Any) -> dict:
    """The arguments of `rope`."""
    return {"theta": cfg.rope_theta if cfg.position == "rope" else None, "interleaved": cfg.rope_layout == "interleaved"}


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | float) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return rms(centred, weight) + bias


def head_norm(w: dict, kind: str, y: np.ndarray, name: str = "head_norm") -> np.ndarray:
    """layernorm, none, plain (without a weight), or rms with one."""
    if kind == "layernorm":
        return layer_norm(y, w[f"{name}.weight"], w.get(f"{name}.bias", 0))
    return y if kind == "none" else rms(y, 1.0 if kind == "plain" else w[f"{name}.weight"])
