"""Properties that hold for every input: shards, the order of samples, hold-out, retrieval documents."""

import tempfile
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("hypothesis", reason="test package hypothesis is not installed")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from data.config import RetrievalMixConfig, TokenizerConfig  # noqa: E402
from data.holdout import measure  # noqa: E402
from data.loader import Loader, Windows, permute  # noqa: E402
from data.retrieval import RetrievalSource, cities  # noqa: E402
from data.shards import Shard, TextTokens, write_shard  # noqa: E402
from data.tokenizer import build_tokenizer  # noqa: E402

settings.register_profile("suite", deadline=None, max_examples=20, suppress_health_check=list(HealthCheck), derandomize=True)
settings.load_profile("suite")
BYTES = build_tokenizer(TokenizerConfig("bytes"))
FINGERPRINT = "0123456789abcdef" * 4


@given(st.lists(st.integers(0, 200_018), max_size=300), st.integers(1, 5), st.sampled_from((65_535, 65_536, 200_019)))
def test_a_shard_holds_what_was_written(tokens, parts, vocab_size):
    written = np.array([token % vocab_size for token in tokens], dtype=np.int64)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.bin"
        crc = write_shard(path, *np.array_split(written, parts), vocab_size=vocab_size, fingerprint=FINGERPRINT)
        shard = Shard(path, vocab_size=vocab_size, fingerprint=FINGERPRINT, verify=True)
        assert shard.crc32 == crc == zlib.crc32(shard.tokens.tobytes()) and shard.read(0, 1).dtype == np.int64
        assert shard.tokens.dtype == np.dtype("<u2" if vocab_size == 65_535 else "<u4")
        assert np.array_equal(shard.read(3, 9), written[3:9]) and np.array_equal(shard.read(0, len(shard)), written)
        if len(written):
            content = bytearray(path.read_bytes())
            content[1024 + tokens[0] % (len(content) - 1024)] ^= 1
            path.write_bytes(content)
            with pytest.raises(ValueError):
                Shard(path)


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_an_order_is_a_permutation(n, seed):
    assert sorted(permute(index, n, seed) for index in range(n)) == list(range(n))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 1000), st.integers(0, 50))
def test_batches_are_the_same_for_every_world(world, micros, micro_batch, step, seed):
    batch, numbers = world * micros * micro_batch, SimpleNamespace(sample=lambda *number: np.array(number))
    whole = Loader(numbers, batch, seed)(step)
    parts = [Loader(numbers, batch, seed, rank, world, micro_batch) for rank in range(world)]
    together = np.concatenate([part(step, micro) for part in parts for micro in range(micros)])
    assert np.array_equal(together, whole) and whole[0, 0] == step * batch


@given(st.lists(st.integers(2, 60), min_size=1, max_size=5), st.integers(1, 10))
def test_windows_use_every_target_once(lengths, length):
    texts = [TextTokens(np.arange(1000 * i, 1000 * i + n)) for i, n in enumerate(lengths)]
    if (longest := max(lengths)) <= length:
        with pytest.raises(ValueError, match=rf"too short.* {longest} tokens.*needs {length + 1}: .*={longest - 1}[^\n]*$"):
            Windows(texts, length)
        return
    windows = Windows(texts, length)
    rows = [windows.window(i) for i in range(len(windows))]
    assert all((np.diff(row) == 1).all() for row in rows)  # of one text each
    targets = [target for row in rows for target in row[1:].tolist()]
    assert len(set(targets)) == len(targets) == sum((n - 1) // length for n in lengths) * length


@given(st.lists(st.text("abc \n", min_size=1, max_size=400).filter(str.strip), min_size=1, max_size=30), st.floats(0.01, 0.9))
def test_nothing_is_lost_between_training_and_validation(texts, fraction):
    try:
        documents = list(measure(texts, fraction).documents(texts))
    except ValueError as error:
        assert len(set(texts)) == 1 and "too few" in str(error)
        return
    assert "".join(document.text for document in documents) == "".join(texts)
    assert len(set(texts)) == 1 or {document.split for document in documents} == {"train", "val"}
    assert sum(document.starts for document in documents) == len(texts)


@given(st.integers(1, 8), st.integers(0, 100), st.integers(2, 9), st.integers(0, 2**32), st.integers(0, 2**40))
def test_retrieval_documents_are_whole_and_of_their_split(needles, dense, digits, seed, index):
    hay = SimpleNamespace(sample=lambda index, seed: np.full(513, ord("x")))
    source = RetrievalSource(RetrievalMixConfig(50, dense, needles, digits), hay, BYTES, 512)
    row = source.sample(index, seed)
    assert row.shape == (513,) and row[0] == BYTES.eot and row.max() <= BYTES.eot and row.min() >= 0
    assert np.array_equal(row, source.sample(index, seed))
    text = BYTES.decode(row[1:])
    assert "The magic number of" in text
    assert not any(f"of {city} is" in text for city in cities("eval"))
