"""Associative recall: targets that repeat an n-gram of their own window, and how often the training text has that n-gram.

Targets are split as in Zoology (arXiv 2312.04927, section 3). A target is a hit if it ends an n-gram that has occurred
before in its window. The model can recall a hit from the window, but where the n-gram is frequent in training, the
model may also know the target from training.
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


def recall_hits(windows: np.ndarray, n: int, vocab_size: int) -> np.ndarray:
    """(B, T) bool for windows (B, T + 1): the target ends an n-gram that has occurred in its window before."""
    hits = np.zeros((windows.shape[0], windows.shape[1] - 1), dtype=bool)
    hits[:, n - 2 :] = True  # the first n-gram ends at token n - 1
    for row, codes in zip(hits[:, n - 2 :], ngram_codes(windows, n, vocab_size), strict=True):
        row[np.unique(codes, return_index=True)[1]] = False
    return hits


def ends_one_of(ngrams: np.ndarray, windows: np.ndarray, n: int, vocab_size: int) -> np.ndarray:
    """(B, T) bool for windows (B, T + 1): the target ends an n-gram whose code is one of `ngrams`."""
    ends = np.isin(ngram_codes(windows, n, vocab_size), ngrams)
    return np.pad(ends, ((0, 0), (n - 2, 0)))


def frequent_ngrams(
    folder: Path, shards: Sequence[Shard], windows: np.ndarray, n: int, vocab_size: int, most: int
) -> np.ndarray:
    """Codes of the n-grams of hits in `windows` that occur more than `most` times in the training shards of `folder`.

    The counts are saved beside the shards and used again for the same windows.
    """
    hits = recall_hits(windows, n, vocab_size)[:, n - 2 :]
    wanted = np.unique(ngram_codes(windows, n, vocab_size)[hits])
    counted = [[shard.path.name, len(shard), shard.crc32] for shard in shards]
    key = json.dumps([hashlib.sha256(windows.tobytes()).hexdigest(), n, vocab_size, counted])
    path = folder / f"ngram_counts_{hashlib.sha256(key.encode()).hexdigest()[:16]}.npy"
    with contextlib.suppress(OSError, ValueError, EOFError):  # the file does not exist yet, or it is damaged
        return wanted[np.load(path) > most]
    counts = ngram_counts(shards, wanted, n, vocab_size)
    with contextlib.suppress(OSError):  # the folder cannot be written
        content = io.BytesIO()
        np.save(content, counts)
        write_atomic(path, content.getvalue())
    return wanted[counts > most]


def ngram_counts(shards: Sequence[Shard], wanted: np.ndarray, n: int, vocab_size: int) -> np.ndarray:
    """How often the shards have each n-gram of the codes `wanted`: (len(wanted),) int64."""
    counts = np.zeros(len(wanted), dtype=np.int64)
    narrow = np.uint32 if vocab_size**n <= 2**32 else np.int64  # sorts several times faster
    wanted = wanted.astype(narrow)
    with progress("n-grams in training", sum(map(len, shards))) as bar:
        for shard in shards:
            for start in range(0, len(shard), CHUNK):
                tokens = shard.read(start, min(start + CHUNK + n - 1, len(shard)))
                if len(tokens) >= n:
                    codes = np.sort(ngram_codes(tokens, n, vocab_size).astype(narrow))
                    counts += np.searchsorted(codes, wanted, "right") - np.searchsorted(codes, wanted, "left")
                bar.update(min(CHUNK, len(shard) - start))
    return counts
