"""Kneser-Ney n-grams against the formula written down with dictionaries."""

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ablation import ngrams
from ablation.ngrams import NgramsConfig, cached, kneser_ney, mix, probabilities, rows_of
from data.loader import Loader, Windows
from data.shards import open_split

V, WINDOWS = 5, np.random.default_rng(0).integers(0, 5, (6, 12))


def formula(train: np.ndarray, context: tuple[int, ...], word: int, order: int) -> float:
    """Chen and Goodman 1999, equations 24 to 27, one discount: the highest order counts, lower ones count what precedes."""

    def grams(k: int) -> Counter:
        return Counter(tuple(row[i : i + k]) for row in train.tolist() for i in range(len(row) - k + 1))

    counts, value = {order: grams(order)}, 1 / V
    for k in range(order - 1, 0, -1):
        counts[k] = Counter(gram[1:] for gram in counts[k + 1])
    for k in range(1, min(order, len(context) + 1) + 1):
        ends = Counter(counts[k].values())
        discount = ends[1] / max(ends[1] + 2 * ends[2], 1)
        before = context[len(context) - k + 1 :]
        seen = {gram[-1]: count for gram, count in counts[k].items() if gram[:-1] == before}
        if seen:
            value = (max(seen.get(word, 0) - discount, 0) + discount * len(seen) * value) / sum(seen.values())
    return value


@pytest.mark.parametrize("order", [2, 3, 5])
def test_probabilities_are_the_formulas(order: int) -> None:
    train, test = WINDOWS[:4], WINDOWS[4:]
    values = probabilities(kneser_ney(train, order, V), test, V)
    for row, window in zip(values, test.tolist(), strict=True):
        wanted = [formula(train, tuple(window[:t]), window[t], order) for t in range(1, len(window))]
        np.testing.assert_allclose(row, wanted, rtol=1e-12)
    every = np.array([[1, 2, 0, 1, 2, word] for word in range(V)])
    assert probabilities(kneser_ney(train, order, V), every, V)[:, -1].sum() == pytest.approx(1)


def test_the_cache_holds_the_windows_bigrams_so_far() -> None:
    share, known = cached(np.array([[1, 2, 1, 2, 1, 3]]))
    assert share.tolist() == [[0, 0, 1, 1, 0]] and known.tolist() == [[False, False, True, True, True]]
    assert mix(np.full((1, 5), 0.2), (share, known), 0.5).tolist() == [[0.2, 0.2, 0.6, 0.6, 0.1]]


def test_it_counts_the_windows_that_a_run_reads(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(shards / "val_000000.bin", shards / "train_000000.bin")
    counted = []
    monkeypatch.setattr(ngrams, "kneser_ney", lambda windows, *more: counted.append(windows) or kneser_ney(windows, *more))
    cfg = NgramsConfig(shards=str(shards), orders=[2], context=16, test_tokens=512, seed=3)
    (row,) = rows_of(cfg, [16 * 8])
    loader = Loader(Windows(open_split(shards, "train"), 16), batch=4, seed=3)
    np.testing.assert_array_equal(counted[0], np.concatenate([loader(0), loader(1)]))
    assert row["tokens"] == 128 and row["cache_hit"] <= row["hit"]
