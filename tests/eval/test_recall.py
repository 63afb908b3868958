"""eval/recall.py against slow loops, and its counts kept beside the shards."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data.shards import Shard, write_shard
from eval import recall

V = 8


def slow_hits(windows: np.ndarray, n: int, frequent: tuple = ()) -> np.ndarray:
    hits = np.zeros((len(windows), windows.shape[1] - 1), dtype=bool)
    for row, window in zip(hits, windows.tolist(), strict=True):
        seen = set()
        for end in range(n - 1, len(window)):
            ngram = tuple(window[end - n + 1 : end + 1])
            row[end - 1] = ngram in seen and ngram not in frequent
            seen.add(ngram)
    return hits


@pytest.mark.parametrize("n", (2, 3, 5))
def test_recall_hits_end_an_ngram_seen_before(n):
    assert recall.recall_hits(np.array([[1, 2, 3, 1, 2, 2, 2]]), 2, V).tolist() == [[0, 0, 0, 1, 0, 1]]
    windows = np.random.default_rng(n).integers(0, 3, (6, 60))
    windows[0, :] = 1
    found = recall.recall_hits(windows, n, 4)
    assert np.array_equal(found, slow_hits(windows, n)) and 0 < found.mean() < 1


@pytest.fixture
def shards(tmp_path: Path) -> list[Shard]:
    """Training shards of 3,000, 1 and 500 tokens."""
    paths = [tmp_path / f"train_{i:06}.bin" for i in range(3)]
    for i, (path, size) in enumerate(zip(paths, (3000, 1, 500), strict=True)):
        tokens = np.random.default_rng(i).integers(0, 4, size)
        write_shard(path, tokens, vocab_size=V, fingerprint="00" * 32)
    return [Shard(path) for path in paths]


@pytest.mark.parametrize("chunk", (2**22, 13))
def test_counts_are_those_of_a_loop_whatever_the_chunks(shards, chunk, monkeypatch):
    monkeypatch.setattr(recall, "CHUNK", chunk)
    counts = Counter()
    for shard in shards:
        counts.update(recall.ngram_codes(shard.tokens, 3, V).tolist())
    wanted = np.arange(V**3)
    assert recall.ngram_counts(shards, wanted, 3, V).tolist() == [counts[code] for code in wanted.tolist()]
    wide = 2**20  # its codes need more than 32 bits
    codes = recall.ngram_codes(np.array([1, 2, 3]), 3, wide)
    found = recall.ngram_counts(shards, codes, 3, wide)
    assert found.tolist() == [counts[recall.ngram_codes(np.array([1, 2, 3]), 3, V)[0]]]


def test_frequent_ngrams_are_those_of_hits(shards, tmp_path):
    windows = np.random.default_rng(1).integers(0, 4, (5, 40))
    counts = Counter()
    for shard in shards:
        tokens = shard.tokens.tolist()
        counts.update(zip(tokens, tokens[1:], tokens[2:], strict=False))
    most = sorted(counts.values())[len(counts) // 2]
    frequent = recall.frequent_ngrams(tmp_path, shards, windows, 3, V, most)
    expected = slow_hits(windows, 3, tuple(ngram for ngram, count in counts.items() if count > most))
    hits = recall.recall_hits(windows, 3, V)
    found = hits & ~recall.ends_one_of(frequent, windows, 3, V)
    assert np.array_equal(found, expected) and 0 < found.sum() < hits.sum()


def test_counts_are_kept_beside_the_shards(shards, tmp_path, monkeypatch):
    windows = np.random.default_rng(1).integers(0, 4, (5, 40))
    once = recall.frequent_ngrams(tmp_path, shards, windows, 2, V, 200)
    (kept,) = tmp_path.glob("ngram_counts_*.npy")
    for damaged in (kept.read_bytes()[:-9], b""):  # a damaged file is counted anew
        kept.write_bytes(damaged)
        assert np.array_equal(recall.frequent_ngrams(tmp_path, shards, windows, 2, V, 200), once)
    with monkeypatch.context() as patch:
        patch.setattr(recall, "ngram_counts", None)  # not called again, whatever the threshold
        assert np.array_equal(recall.frequent_ngrams(tmp_path, shards, windows, 2, V, 200), once)
        assert len(recall.frequent_ngrams(tmp_path, shards, windows, 2, V, 0)) > len(once) > 0
    for other in ((shards, windows[:4], 2), (shards, windows, 3), (shards[:1], windows, 2)):
        recall.frequent_ngrams(tmp_path, *other, V, 200)
    assert len(list(tmp_path.glob("ngram_counts_*.npy"))) == 4  # windows, n and shards each have their own
