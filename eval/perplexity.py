"""Loss, perplexity, bits per byte and loss by position of a run, on validation shards or any text file.

    python -m eval.perplexity run=runs/NAME [text=FILE | shards=DIR] [length=256] [tokens=1000000] [ngram=2] [frequent=1250]

Windows of `length` tokens (default: the trained context) do not overlap; where the data have more than `tokens`,
windows are taken at even distances over all of it. `cumulative` is the mean loss up to each position (arXiv 2410.05258,
Figure 4). `recall` splits the loss as Zoology does (arXiv 2312.04927; AR-Hit in Table 6 of 2410.05258): on the last token
of an n-gram that has occurred before in the same window, and on all others. With `frequent`, n-grams that the run's
training shards have more often than that are no hits: they may be known from training (Zoology: 1250).
Writes runs/NAME/eval/perplexity.json and runs/NAME/figures/perplexity.png.
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
from data.shards import Shard, open_split
from eval.common import (
    LOGITS_IN_MEMORY,
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
from model.cache import KVCache
from training.checkpoint import LoadedRun

CHUNK = 2**20  # training tokens counted at a time


@dataclass
class PerplexityConfig(EvalConfig):
    """length: tokens per window, the trained context by default. tokens: at most so many are tested. ngram: of recall.
    frequent: occurrences in the training shards from which on an n-gram is no hit; None: never.
    """

    length: int | None = None
    tokens: int = 1_000_000
    ngram: int = 2
    frequent: int | None = None
    name: str | None = None  # of the text: the result is written to perplexity_NAME.json


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


def token_losses(model: nn.Module, windows: Tensor, vocab_size: int) -> Tensor:
    """(B, T) cross-entropy in nats of each next token, for windows (B, T + 1).

    Where the logits of whole windows would not fit in memory, the windows are read in parts through a KV cache.
    """
    B, T = windows.shape[0], windows.shape[1] - 1
    step = T if B * T * vocab_size <= LOGITS_IN_MEMORY else max(1, min(1024, LOGITS_IN_MEMORY // (B * vocab_size)))
    cache = KVCache(T) if step < T else None
    losses = []
    for start in range(0, T, step):
        part = windows[:, start : min(start + step, T) + 1]
        logits = model(part[:, :-1], cache=cache)  # (B, step, V)
        losses.append(F.cross_entropy(logits.float().transpose(1, 2), part[:, 1:], reduction="none"))
    return torch.cat(losses, dim=1)


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    windows: np.ndarray,
    byte_lengths: np.ndarray,
    batch: int = 32,
    ngram: int = 2,
    frequent: np.ndarray | None = None,
) -> dict[str, Any]:
    """Test on windows (n, T + 1). byte_lengths (V,): UTF-8 bytes of each token, 0 for the end of a text.

    Returns loss (nats per token), se (over windows), ppl, bits_per_byte, by_position and cumulative (T losses), recall and
    counts. frequent: codes of n-grams that are no hits.
    """
    n, length = windows.shape[0], windows.shape[1] - 1
    by_position, hit_sums, hit_counts, totals = np.zeros(length), [], [], []
    with progress("perplexity", n) as bar:
        for part in batches(windows, batch, length, len(byte_lengths)):
            tokens = torch.from_numpy(part).to(device_of(model))
            losses = token_losses(model, tokens, len(byte_lengths)).double().cpu().numpy()  # (B, T)
            hits = recall_hits(part, ngram, len(byte_lengths), frequent)
            totals += losses.sum(axis=1).tolist()
            hit_sums += (losses * hits).sum(axis=1).tolist()
            hit_counts += hits.sum(axis=1).tolist()
            by_position += losses.sum(axis=0)
            bar.update(len(part))
    loss, se = mean_se(np.array(totals) / length)
    n_bytes = int(byte_lengths[windows[:, 1:]].sum())
    by_position /= n
    sums, counts = np.array(hit_sums), np.array(hit_counts)
    hit, other = ratio_se(sums, counts), ratio_se(np.array(totals) - sums, length - counts)
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
        "by_position": by_position.tolist(),
        "cumulative": (by_position.cumsum() / np.arange(1, length + 1)).tolist(),
        "recall": {"ngram": ngram, "hit": hit, "other": other},
    }


def ratio_se(sums: np.ndarray, counts: np.ndarray) -> dict[str, float | int | None]:
    """Mean loss per token over windows with sums (n,) and counts (n,) of tokens, its standard error over windows (of a
    ratio, linearised: Cochran 1977, equation 2.45), and the number of tokens; None where there are none.
    """
    tokens, n = int(counts.sum()), len(sums)
    if not tokens:
        return {"loss": None, "se": None, "tokens": 0}
    mean = float(sums.sum() / tokens)
    spread = float(((sums - mean * counts) ** 2).sum())
    return {"loss": mean, "se": math.sqrt(spread * n / max(1, n - 1)) / tokens, "tokens": tokens}


def ngram_codes(tokens: np.ndarray, n: int, vocab_size: int) -> np.ndarray:
    """One int64 for each n-gram in (..., T) ids: (..., T - n + 1)."""
    stop = tokens.shape[-1] - n + 1
    return sum(tokens[..., i : stop + i].astype(np.int64) * vocab_size ** (n - 1 - i) for i in range(n))


def recall_hits(windows: np.ndarray, n: int, vocab_size: int, frequent: np.ndarray | None = None) -> np.ndarray:
    """(B, T) bool for windows (B, T + 1): the target ends an n-gram that has ended in its window before."""
    codes = ngram_codes(windows, n, vocab_size)  # (B, T + 2 - n), the first ends at token n - 1
    hits = np.zeros((windows.shape[0], windows.shape[1] - 1), dtype=bool)
    for row, row_codes in zip(hits[:, n - 2 :], codes, strict=True):
        row[:] = True
        row[np.unique(row_codes, return_index=True)[1]] = False
        if frequent is not None:
            row &= ~np.isin(row_codes, frequent)
    return hits


def frequent_ngrams(parts: Sequence[Shard], windows: np.ndarray, n: int, vocab_size: int, most: int) -> np.ndarray:
    """Codes of those n-grams of `windows` that occur more than `most` times in the training shards `parts`."""
    wanted = np.unique(ngram_codes(windows, n, vocab_size))
    counts = np.zeros(len(wanted), dtype=np.int64)
    with progress("n-grams in training", sum(map(len, parts))) as bar:
        for part in parts:
            for start in range(0, len(part), CHUNK):
                tokens = part.read(start, min(start + CHUNK + n - 1, len(part)))
                if len(tokens) >= n:
                    codes = ngram_codes(tokens, n, vocab_size)
                    place = np.searchsorted(wanted, codes).clip(max=len(wanted) - 1)
                    counts += np.bincount(place[wanted[place] == codes], minlength=len(wanted))
                bar.update(min(CHUNK, len(part) - start))
    return wanted[counts > most]


def position_buckets(by_position: list[float], per_octave: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Positions (counted from 1) and mean losses of log-spaced buckets."""
    length = len(by_position)
    edges = np.unique(np.round(2 ** np.arange(0, math.log2(length) + 1, 1 / per_octave)).astype(int))
    edges = np.union1d([1], np.append(edges[edges < length], length + 1))
    spans = list(zip(edges[:-1], edges[1:], strict=True))
    middles = np.array([math.sqrt(start * (stop - 1)) for start, stop in spans])
    return middles, np.array([np.mean(by_position[start - 1 : stop - 1]) for start, stop in spans])


def draw(path: Path, curves: dict[str, tuple[str, str, list[float]]]) -> None:
    """Loss by position, and its mean up to the position. curves: label -> (colour, line style, mean loss at each)."""
    with figure(path, 9.6, 3.9, columns=2) as axes:
        for ax, title in zip(axes[0], ("At the position", "Mean up to the position"), strict=True):
            for label, (line_colour, style, by_position) in curves.items():
                if ax is axes[0, 0]:
                    x, y = position_buckets(by_position)
                else:
                    x = np.arange(1, len(by_position) + 1)
                    y = np.cumsum(by_position) / x
                marker = {"marker": "o", "markersize": 3.5} if ax is axes[0, 0] else {}
                ax.plot(x, y, style, color=line_colour, label=label, **marker)
            ax.set_xscale("log", base=2)
            ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
            ax.set(title=title, xlabel="position in the window (tokens)", ylabel="loss (nats per token)")
            ax.grid(axis="y")
        if len(curves) > 1:
            axes[0, 0].legend()


def frequent_in_training(run: LoadedRun, windows: np.ndarray, cfg: PerplexityConfig) -> np.ndarray | None:
    """The n-grams that cfg.frequent rules out, counted in the run's training shards."""
    if cfg.frequent is None:
        return None
    folder = Path(run.config["data"]["dir"])
    try:
        shards = open_split(folder, "train", vocab_size=run.tokenizer.vocab_size, fingerprint=run.tokenizer.fingerprint)
    except FileNotFoundError:
        wrong = f"frequent={cfg.frequent} counts n-grams in the training shards, which are not in {folder}"
        raise ValueError(f"{wrong}: prepare them again, or leave out frequent=") from None
    return frequent_ngrams(shards, windows, cfg.ngram, run.tokenizer.vocab_size, cfg.frequent)


def check_ngram(cfg: PerplexityConfig, vocab_size: int, length: int) -> None:
    """Raise ValueError for n-grams that no window has or that do not fit one int64."""
    most = min(length, int(63 / math.log2(vocab_size)))
    if not 2 <= cfg.ngram <= most:
        raise ValueError(f"ngram={cfg.ngram} is not from 2 to {most}: use ngram=2")
    if cfg.frequent is not None and cfg.frequent < 0:
        raise ValueError(f"frequent={cfg.frequent} is negative: use frequent=1250, or leave it out")


@command("perplexity", PerplexityConfig)
def main(cfg: PerplexityConfig) -> None:
    run = open_run(cfg)
    length = run.model.cfg.context if cfg.length is None else cfg.length
    if length < 1:
        raise ValueError(f"length={length} must be at least 1: leave it out for the trained context")
    check_ngram(cfg, run.tokenizer.vocab_size, length)
    windows = cut_windows(evaluation_tokens(run, cfg), length, cfg.tokens)
    frequent = frequent_in_training(run, windows, cfg)
    results = evaluate(run.model, windows, run.tokenizer.byte_lengths(), cfg.batch, cfg.ngram, frequent)
    results["recall"]["frequent"] = cfg.frequent
    write_result(run, cfg, f"perplexity_{cfg.name}" if cfg.name else "perplexity", results)
    name = run_name(cfg.run)
    curve = (colour(variant(run.config)), "-", results["by_position"])
    draw(Path(cfg.run) / "figures" / "perplexity.png", {name: curve})
    print(
        f"perplexity  {name}: loss {results['loss']:.4f} ± {results['se']:.4f}, ppl {results['ppl']:.2f}, "
        f"{results['bits_per_byte']:.4f} bits/byte ({results['tokens']:,} tokens, windows of {length})"
    )
    recall = results["recall"]
    parts = [
        f"{part} {recall[part]['loss']:.4f} ± {recall[part]['se']:.4f} ({recall[part]['tokens']:,} tokens)"
        for part in ("hit", "other")
        if recall[part]["tokens"]
    ]
    print(f"perplexity  {name}: recall of {cfg.ngram}-grams: {', '.join(parts)}")


if __name__ == "__main__":
    main()
