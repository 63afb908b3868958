from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from data.loader import Loader, Mixture, Prefetcher, Windows, hash_seed, permute
from data.shards import Shard, write_shard

LENGTH = 8


@pytest.fixture(scope="module")
def windows(tmp_path_factory) -> Windows:
    """Two shards of consecutive numbers, so a window shows where it is from. 37 windows."""
    folder = tmp_path_factory.mktemp("shards")
    for number, (start, count) in enumerate([(0, 203), (1000, 100)]):
        tokens = np.arange(start, start + count)
        write_shard(folder / f"{number}.bin", tokens, vocab_size=2000, fingerprint="0" * 64)
    return Windows([Shard(folder / "0.bin"), Shard(folder / "1.bin")], LENGTH)


def test_permute_shuffles():
    n = 4_000
    assert len({hash_seed(0, 0), hash_seed(0, 1), hash_seed(1, 0), hash_seed(0), hash_seed(1), hash_seed(0, 0, 0)}) == 6
    order, other = (np.array([permute(i, n, seed) for i in range(n)]) for seed in (1, 2))
    assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 0.06
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.06
    assert (order == other).sum() < 20
    first = Counter(permute(0, 5, seed) for seed in range(5000))  # every place is about equally likely
    assert all(850 < count < 1150 for count in first.values())


def test_epochs_are_without_replacement_and_reshuffled(windows):
    epochs = [[int(windows.sample(e * 37 + i, seed=5)[0]) for i in range(37)] for e in range(3)]
    assert all(len(set(epoch)) == 37 for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
    assert epochs[0] != [int(windows.sample(i, seed=6)[0]) for i in range(37)]


def test_prefetcher_gives_the_same_batches_in_any_order(windows):
    plain = Loader(windows, 4, 1, micro_batch=2)
    ahead = Prefetcher(Loader(windows, 4, 1, micro_batch=2))
    for step, micro in [(0, 0), (0, 1), (1, 0), (1, 1), (9, 1), (9, 0), (0, 0)]:
        assert np.array_equal(ahead(step, micro), plain(step, micro))
    ahead.close()


def test_mixture_proportions_are_exact(windows):
    def labelled(label: int) -> SimpleNamespace:
        return SimpleNamespace(sample=lambda index, seed: (label, index))

    for weights in ([100], [50, 50], [33, 33, 34], [1, 99], [0, 100], [7, 13, 80]):
        mixture = Mixture([(labelled(i), weight) for i, weight in enumerate(weights)])
        drawn = [mixture.sample(i, 0) for i in range(300)]
        assert [Counter(label for label, _ in drawn[:100])[i] for i in range(len(weights))] == weights
        for i, weight in enumerate(weights):
            assert [index for label, index in drawn if label == i] == list(range(3 * weight))  # no gaps, no repeats
        for start in range(200):  # evenly spread: no stretch of 20 is far from its share
            counts = Counter(label for label, _ in drawn[start : start + 20])
            assert all(abs(counts[i] - weight / 5) <= 2 for i, weight in enumerate(weights))
    equal = Mixture([(windows, 50), (windows, 50)])
    drawn = np.array([equal.sample(i, 0)[0] for i in range(60)])
    assert (drawn[0::2] == drawn[1::2]).sum() < 10  # they do not walk in step
