"""Batches are a pure function of (seed, step), so checkpoints do not need to save the state of a loader.

Row r of step s has the number `s * batch + r`, whatever the world size or micro batch. A `Source` turns a number into tokens;
it marks a token x that the loss must leave out as ~x.
"""

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Protocol

import numpy as np

from data.shards import Shard

ROUNDS = 6  # of the Feistel network in permute: another number changes the order of the data of every run
MASK32 = 0xFFFFFFFF
UNSCORED = -100  # the target that torch's cross-entropy leaves out


class Source(Protocol):
    """An endless stream of samples, each of which is decided by its number `index` and a seed."""

    def sample(self, index: int, seed: int) -> np.ndarray: ...  # (length+1,) int64, unscored tokens marked


def inputs_and_targets(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A source's rows (..., T + 1) as inputs and targets (..., T): a target that is marked as unscored is -100."""
    marked = rows < 0
    tokens, scored = np.where(marked, ~rows, rows), np.where(marked, UNSCORED, rows)
    return tokens[..., :-1], scored[..., 1:]


def hash_seed(*values: int) -> int:
    """A 64-bit hash of integers (splitmix64, chained). It makes independent seeds out of related numbers."""
    state = 0
    for value in values:
        state = (state + 0x9E3779B97F4A7C15 + value) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state


@lru_cache(maxsize=64)
def _round_keys(seed: int) -> tuple[int, ...]:
    return tuple(hash_seed(seed, i) & MASK32 for i in range(ROUNDS))


def _feistel(x: int, half: int, keys: tuple[int, ...]) -> int:
    low = (1 << half) - 1
    left, right = x >> half, x & low
    for key in keys:
        h = (right ^ key) & MASK32  # lowbias32 (github.com/skeeto/hash-prospector)
        h = ((h ^ (h >> 16)) * 0x7FEB352D) & MASK32
        h = ((h ^ (h >> 15)) * 0x846CA68B) & MASK32
        h = h ^ (h >> 16)
        left, right = right, left ^ (h & low)
    return (left << half) | right


def permute(index: int, n: int, seed: int) -> int:
    """The number at position `index` of a shuffled range(n), in O(1) memory: a Feistel network on a power of four that is n or
    more, repeated until the value is below n (Black and Rogaway 2002, "Ciphers with arbitrary finite domains").
    """
    assert 0 < n <= 2**62 and 0 <= index < n
    half = max(3, ((n - 1).bit_length() + 1) // 2)  # smaller networks are visibly biased
    keys = _round_keys(seed)
    value = _feistel(index, half, keys)
    while value >= n:
        value = _feistel(value, half, keys)
    return value


class Windows:
    """Fixed windows of `length`+1 tokens, `length` apart (so every target is used once), never across two shards."""

    def __init__(self, shards: Sequence[Shard], length: int) -> None:
        self.shards = list(shards)
        self.length = length
        self._starts = [0, *itertools.accumulate(max(0, (len(shard) - 1) // length) for shard in self.shards)]
        if not len(self):
            longest = max((len(shard) for shard in self.shards), default=0)
            wrong = f"the text is too short: its longest shard has {longest} tokens, one window needs {length + 1}"
            fix = f"use model.context={max(longest - 1, 1)} or less, or prepare more text (of validation: data.val_fraction)"
            raise ValueError(f"{wrong}: {fix}")

    def __len__(self) -> int:
        return self._starts[-1]

    def window(self, index: int) -> np.ndarray:
        """Window `index` in the order of the text, (length+1,) int64."""
        which = bisect_right(self._starts, index) - 1
        start = (index - self._starts[which]) * self.length
        return self.shards[which].read(start, start + self.length + 1)

    def sample(self, index: int, seed: int) -> np.ndarray:
        """Sample `index` of an endless shuffled stream, (length+1,) int64."""
        epoch, position = divmod(index, len(self))
        return self.window(permute(position, len(self), hash_seed(seed, epoch)))


class Mixture:
    """A mixture of `parts` (source, weight in percents): of any 100 consecutive samples, exactly `weight` come from each."""

    def __init__(self, parts: Sequence[tuple[Source, int]]) -> None:
        self.sources, self.weights = zip(*parts, strict=True)
        assert sum(self.weights) == 100, self.weights
        self._turn: list[int] = []  # for each of 100 slots: the source (the one furthest behind its share)
        for slot in range(1, 101):
            behind = [weight * slot - 100 * self._turn.count(i) for i, weight in enumerate(self.weights)]
            self._turn.append(behind.index(max(behind)))
        self._before = [self._turn[:slot].count(which) for slot, which in enumerate(self._turn)]  # slots it has had before

    def source_of(self, index: int) -> int:
        """The number of the source that sample `index` comes from."""
        return self._turn[index % 100]

    def sample(self, index: int, seed: int) -> np.ndarray:
        block, slot = divmod(index, 100)
        which = self._turn[slot]
        number = block * self.weights[which] + self._before[slot]
        return self.sources[which].sample(number, hash_seed(seed, which))  # another seed: equal sources differ in order


class Loader:
    """Batches by step number: `loader(step, micro)` is (micro_batch, T + 1) int64 rows, the `micro`th of `micros` parts of
    this rank's contiguous share of the `batch` samples. So the batch is the same for every world size and micro batch.
    """

    def __init__(
        self, source: Source, batch: int, seed: int, rank: int = 0, world: int = 1, micro_batch: int | None = None
    ) -> None:
        assert batch % world == 0
        self.source, self.batch, self.seed, self.rank = source, batch, seed, rank
        self.per_rank = batch // world
        self.micro_batch = micro_batch or self.per_rank
        if self.per_rank % self.micro_batch:
            fitting = next(n for n in range(min(self.micro_batch, self.per_rank), 0, -1) if self.per_rank % n == 0)
            wrong = f"{self.per_rank} samples per process do not divide into micro batches of {self.micro_batch}"
            raise ValueError(f"{wrong}: use micro_batch={fitting}")
        self.micros = self.per_rank // self.micro_batch

    def samples(self, step: int, micro: int = 0) -> range:
        """The global numbers of the samples that `self(step, micro)` returns."""
        first = step * self.batch + self.rank * self.per_rank + micro * self.micro_batch
        return range(first, first + self.micro_batch)

    def __call__(self, step: int, micro: int = 0) -> np.ndarray:
        return np.stack([self.source.sample(index, self.seed) for index in self.samples(step, micro)])


class Prefetcher:
    """Wraps a loader: a thread reads the next batch while the current batch is used. The batches are the same.

    The main thread reads no training text itself, so it can handle signals even while the file system hangs.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader, self.micros, self.samples = loader, loader.micros, loader.samples
        self._thread = ThreadPoolExecutor(1, "prefetch")
        self._ahead: dict[tuple[int, int], Future] = {}

    def __call__(self, step: int, micro: int = 0) -> np.ndarray:
        rows = (self._ahead.get((step, micro)) or self._thread.submit(self.loader, step, micro)).result()
        following = (step, micro + 1) if micro + 1 < self.micros else (step + 1, 0)
        self._ahead = {following: self._thread.submit(self.loader, *following)}
        return rows

    def close(self) -> None:
        """End the thread after its current read."""
        self._thread.shutdown(wait=False, cancel_futures=True)
