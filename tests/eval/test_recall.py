"""eval/recall.py against slow loops, and its counts kept beside the shards."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data.shards import Shard, write_shard
from eval import recall

V = 8


def slow_hits(windows: np.ndarray, frequent: tuple = ()) -> np.ndarray:
    hits = np.zeros((len(windows), windows.shape[1] - 1), dtype=bool)
    for row, window in zip(hits, windows.tolist(), strict=True):
        seen = set()
        for end in range(1, len(window)):
            bigram = tuple(window[end - 1 : end + 1])
            row[end - 1] = bigram in seen and bigram not in frequent
            seen.add(bigram)
    return hits


def test_recall_hits_end_a_bigram_seen_before():
    assert recall.recall_hits(np.array([[1, 2, 3, 1, 2, 2, 2]]), V).tolist() == [[0, 0, 0, 1, 0, 1]]
    windows = np.random.default_rng(1).integers(0, 6, (6, 60))
    windows[0, :] = 1
    hits = recall.recall_hits(windows, V)
    assert np.array_equal(hits, slow_hits(windows)) and 0 < hits.mean() < 1


@pytest.fixture
def shards(tmp_path: Path) -> list[Shard]:
    """Training shards of 3,000, 1 and 500 tokens."""
    for i, size in enumerate((3000, 1, 500)):
        tokens = np.random.default_rng(i).integers(0, 4, size)
        write_shard(tmp_path / f"train_{i:06}.bin", tokens, vocab_size=V, fingerprint="00" * 32)
    return [Shard(tmp_path / f"train_{i:06}.bin") for i in range(3)]


@pytest.mark.parametrize("chunk", (2**22, 13))
@pytest.mark.parametrize("vocab_size", (V, 2**20))  # whose codes need more than 32 bits
def test_counts_are_those_of_a_loop_whatever_the_chunks(shards, chunk, vocab_size, monkeypatch):
    monkeypatch.setattr(recall, "CHUNK", chunk)
    counts = Counter(pair for shard in shards for pair in itertools.pairwise(shard.tokens.tolist()))
    codes = {first * vocab_size + second: (first, second) for first in range(V) for second in range(V)}
    counted = recall.bigram_counts(shards, np.array(sorted(codes)), vocab_size)
    assert counted.tolist() == [counts[codes[code]] for code in sorted(codes)]


def test_frequent_bigrams_are_those_of_hits_and_their_counts_are_kept(shards, tmp_path, monkeypatch):
    windows = np.random.default_rng(1).integers(0, 4, (5, 40))
    counts = Counter(pair for shard in shards for pair in itertools.pairwise(shard.tokens.tolist()))
    most = sorted(counts.values())[len(counts) // 2]
    frequent = recall.frequent_bigrams(tmp_path, shards, windows, V, most)
    rare = recall.recall_hits(windows, V) & ~np.isin(recall.ngram_codes(windows, 2, V), frequent)
    assert np.array_equal(rare, slow_hits(windows, tuple(pair for pair, count in counts.items() if count > most)))
    (kept,) = tmp_path.glob("ngram_counts_*.npy")
    for damaged in (kept.read_bytes()[:-9], b""):  # a damaged file is counted anew
        kept.write_bytes(damaged)
        assert np.array_equal(recall.frequent_bigrams(tmp_path, shards, windows, V, most), frequent)
    with monkeypatch.context() as patch:
        patch.setattr(recall, "bigram_counts", None)  # not called again, whatever the threshold
        assert len(recall.frequent_bigrams(tmp_path, shards, windows, V, 0)) > len(frequent) > 0
    for other in ((shards, windows[:4]), (shards[:1], windows)):
        recall.frequent_bigrams(tmp_path, *other, V, most)
    assert len(list(tmp_path.glob("ngram_counts_*.npy"))) == 3  # one for each choice of windows and shards
