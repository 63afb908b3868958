"""Loss, perplexity, bits per byte and loss by position of a run, on validation shards or any text file.

    python -m eval.perplexity run=runs/NAME [text=FILE | shards=DIR] [length=256] [tokens=1000000]

Windows of `length` tokens (default: the trained context) do not overlap; where the data have more than `tokens`,
windows are taken at even distances over all of it. Writes runs/NAME/eval/perplexity.json and
runs/NAME/figures/perplexity.png.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from configs import command
from data.loader import Windows
from data.shards import Shard
from eval.common import (
    EvalConfig,
    batches,
    colour,
    device_of,
    evaluation_tokens,
    figure,
    mean_se,
    open_run,
    progress,
    run_name,
    variant,
    write_result,
)


@dataclass
class PerplexityConfig(EvalConfig):
    """length: tokens per window, the trained context by default. tokens: at most so many are tested."""

    length: int | None = None
    tokens: int = 1_000_000


def cut_windows(parts: Sequence[Shard], length: int, limit: int) -> np.ndarray:
    """(n, length + 1) token ids: windows side by side, never across two parts, at even distances if over the limit."""
    longest = max((len(part) for part in parts), default=0)
    if longest <= length:
        raise ValueError(
            f"the text has {longest} tokens and a window needs {length + 1}: give more text"
            + (f", or length={longest - 1}" if longest > 1 else "")
        )
    if limit < length:
        raise ValueError(f"tokens={limit} is less than one window of {length}: use tokens={length} or more")
    windows = Windows(parts, length)
    chosen = np.linspace(0, len(windows) - 1, min(len(windows), limit // length)).round().astype(int)
    return np.stack([windows.window(int(index)) for index in chosen])


def token_losses(model: nn.Module, windows: Tensor) -> Tensor:
    """(B, T) cross-entropy in nats of each next token, for windows (B, T + 1)."""
    logits = model(windows[:, :-1])  # (B, T, V)
    return F.cross_entropy(logits.float().transpose(1, 2), windows[:, 1:], reduction="none")


@torch.inference_mode()
def evaluate(model: nn.Module, windows: np.ndarray, byte_lengths: np.ndarray, batch: int = 32) -> dict[str, Any]:
    """Test on windows (n, T + 1). byte_lengths (V,): UTF-8 bytes of each token, 0 for the end of a text.

    Returns loss (nats per token), se (over windows), ppl, bits_per_byte, by_position (T losses) and counts.
    """
    n, length = windows.shape[0], windows.shape[1] - 1
    by_window, by_position = [], np.zeros(length)
    with progress("perplexity", n) as bar:
        for part in batches(windows, batch, length, len(byte_lengths)):
            losses = token_losses(model, torch.from_numpy(part).to(device_of(model))).double().cpu().numpy()  # (B, T)
            by_window += losses.mean(axis=1).tolist()
            by_position += losses.sum(axis=0)
            bar.update(len(part))
    loss, se = mean_se(by_window)
    n_bytes = int(byte_lengths[windows[:, 1:]].sum())
    return {
        "loss": loss,
        "se": se,
        "ppl": math.exp(loss),
        "bits_per_byte": loss * n * length / math.log(2) / n_bytes,
        "tokens": n * length,
        "bytes": n_bytes,
        "windows": n,
        "length": length,
        "sha256": hashlib.sha256(windows.tobytes()).hexdigest(),  # same text and windows: losses can be compared
        "by_position": (by_position / n).tolist(),
    }


def position_buckets(by_position: list[float], per_octave: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Positions (counted from 1) and mean losses of log-spaced buckets."""
    length = len(by_position)
    edges = np.unique(np.round(2 ** np.arange(0, math.log2(length) + 1, 1 / per_octave)).astype(int))
    edges = np.union1d([1], np.append(edges[edges < length], length + 1))
    spans = list(zip(edges[:-1], edges[1:], strict=True))
    middles = np.array([math.sqrt(start * (stop - 1)) for start, stop in spans])
    return middles, np.array([np.mean(by_position[start - 1 : stop - 1]) for start, stop in spans])


def draw(path: Path, curves: dict[str, tuple[str, str, list[float]]]) -> None:
    """Loss by position. curves: label -> (colour, line style, mean loss at each position)."""
    with figure(path, 6.2, 3.9) as axes:
        ax = axes[0, 0]
        for label, (line_colour, style, by_position) in curves.items():
            ax.plot(*position_buckets(by_position), style, color=line_colour, label=label, marker="o", markersize=3.5)
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        ax.set(xlabel="position in the window (tokens)", ylabel="loss (nats per token)")
        ax.grid(axis="y")
        if len(curves) > 1:
            ax.legend()


@command("perplexity", PerplexityConfig)
def main(cfg: PerplexityConfig) -> None:
    run = open_run(cfg)
    length = run.model.cfg.context if cfg.length is None else cfg.length
    if length < 1:
        raise ValueError(f"length={length} must be at least 1: leave it out for the trained context")
    windows = cut_windows(evaluation_tokens(run, cfg), length, cfg.tokens)
    results = evaluate(run.model, windows, run.tokenizer.byte_lengths(), cfg.batch)
    write_result(run, cfg, "perplexity", results)
    name = run_name(cfg.run)
    curve = (colour(variant(run.config)), "-", results["by_position"])
    draw(Path(cfg.run) / "figures" / "perplexity.png", {name: curve})
    print(
        f"perplexity  {name}: loss {results['loss']:.4f} ± {results['se']:.4f}, ppl {results['ppl']:.2f}, "
        f"{results['bits_per_byte']:.4f} bits/byte ({results['tokens']:,} tokens, windows of {length})"
    )


if __name__ == "__main__":
    main()
