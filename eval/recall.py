"""Associative recall: targets that repeat a bigram of their window, and how often the training text has that bigram.

As in Zoology (arXiv 2312.04927, section 3): a target is a hit if it ends a bigram that has occurred before in its window. Where
the bigram is frequent in training, the model may also know the target from training.
"""

import contextlib
import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from configs.files import write_atomic
from data.shards import Shard
from eval.common import progress

CHUNK = 2**22  # training tokens counted at a time


def ngram_codes(tokens: np.ndarray, n: int, vocab_size: int) -> np.ndarray:
    """One int64 for each n-gram in (..., T) ids: (..., T - n + 1)."""
    stop = tokens.shape[-1] - n + 1
    return sum(tokens[..., i : stop + i].astype(np.int64) * vocab_size ** (n - 1 - i) for i in range(n))


def recall_hits(windows: np.ndarray, vocab_size: int) -> np.ndarray:
    """(B, T) bool for windows (B, T + 1): the target ends a bigram that has occurred in its window before."""
    hits = np.ones((windows.shape[0], windows.shape[1] - 1), dtype=bool)
    for row, codes in zip(hits, ngram_codes(windows, 2, vocab_size), strict=True):
        row[np.unique(codes, return_index=True)[1]] = False
    return hits


def frequent_bigrams(folder: Path, shards: Sequence[Shard], windows: np.ndarray, vocab_size: int, threshold: int) -> np.ndarray:
    """Codes of bigrams of hits in `windows` that the shards have more than `threshold` times; counts are kept in `folder`."""
    wanted = np.unique(ngram_codes(windows, 2, vocab_size)[recall_hits(windows, vocab_size)])
    counted = [[shard.path.name, len(shard), shard.crc32] for shard in shards]
    key = json.dumps([hashlib.sha256(windows.tobytes()).hexdigest(), 2, vocab_size, counted])
    path = folder / f"ngram_counts_{hashlib.sha256(key.encode()).hexdigest()[:16]}.npy"
    with contextlib.suppress(OSError, ValueError, EOFError):  # the file does not exist yet, or it is damaged
        return wanted[np.load(path) > threshold]
    counts = bigram_counts(shards, wanted, vocab_size)
    with contextlib.suppress(OSError):  # the folder cannot be written
        content = io.BytesIO()
        np.save(content, counts)
        write_atomic(path, content.getvalue())
    return wanted[counts > threshold]


def bigram_counts(shards: Sequence[Shard], wanted: np.ndarray, vocab_size: int) -> np.ndarray:
    """How often the shards have each bigram of the codes `wanted`: (len(wanted),) int64."""
    counts = np.zeros(len(wanted), dtype=np.int64)
    narrow = np.uint32 if vocab_size**2 <= 2**32 else np.int64  # sorts several times faster
    wanted = wanted.astype(narrow)
    with progress("bigrams in training", sum(map(len, shards))) as bar:
        for shard in shards:
            for start in range(0, len(shard), CHUNK):
                tokens = shard.read(start, start + CHUNK + 1)
                codes = np.sort(ngram_codes(tokens, 2, vocab_size).astype(narrow))
                counts += np.searchsorted(codes, wanted, "right") - np.searchsorted(codes, wanted, "left")
                bar.update(min(CHUNK, len(shard) - start))
    return counts
