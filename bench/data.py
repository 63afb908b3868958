"""The benches of data: text to token ids, shards to batches, and how long training waits for a batch."""

import itertools
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median

import numpy as np

from bench.models import VOCABULARY, BenchConfig
from bench.timing import Row, attempt, seconds_of, time_in_turn
from bench.training import TrainingStep
from data.config import DataConfig, RetrievalMixConfig, TokenizerConfig
from data.loader import Loader, Prefetcher, Source, Windows
from data.prepare import Preparation
from data.retrieval import RetrievalSource
from data.shards import Shard, write_shard
from data.sources import open_corpus
from data.tokenizer import Tokenizer, build_tokenizer, pieces
from training.distributed import World

SHARD_TOKENS = 4_000_000
TEXT = "\n\n".join(topics[name] for name in sorted(topics))  # 0.7 MB of English that is installed with Python
COPIES = 10  # of the text, 7 MB in all, so that the fixed time of a preparation hardly counts


def loader(cfg: BenchConfig, world: World) -> list[Row]:
    """Reading of batches of 64 sequences, shuffled as in training, without the prefetching thread; and, with that thread, how
    long a training step of the baseline (8 sequences) waits for its batch.
    """
    ids, length, batch = build_tokenizer(TokenizerConfig("bytes")), cfg.model.context, cfg.batch or 64
    tokens = np.resize(ids.encode_array(TEXT), SHARD_TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        sources: dict[str, Source] = {}
        for name, vocabulary in {"text, uint16": ids.vocab_size, "text, uint32": 100_000}.items():
            path = Path(folder) / f"{vocabulary}.bin"
            write_shard(path, tokens, vocab_size=vocabulary, fingerprint=ids.fingerprint)
            sources[name] = Windows([Shard(path)], length)
        sources["retrieval documents"] = RetrievalSource(RetrievalMixConfig(), sources["text, uint16"], ids, length)
        rows = [Row({"source": name, "length": length}, batch * length) for name in sources]
        steps = itertools.count()
        loaders = [Loader(source, batch, 1) for source in sources.values()]
        works = [lambda load=load: load(next(steps)) for load in loaders]
        time_in_turn("tokens/s", rows, works, cfg.rounds, world.device)
        step = TrainingStep(cfg, "baseline", cfg.batch or 8, world)
        for row, source in zip(rows, sources.values(), strict=True):
            row.facts = waits(step, source, cfg.rounds)
    return rows


def waits(step: TrainingStep, source: Source, rounds: int) -> dict[str, float]:
    """How long a step waits for its batch, which is read during the step before: ms, and % of the step."""
    load, waited, taken = Prefetcher(Loader(source, len(step.rows), seed=1)), [], []
    for number in range(rounds + 1):
        waited.append(seconds_of(partial(load, number), 1, step.rows.device))
        taken.append(waited[-1] + seconds_of(step, 1, step.rows.device))
    load.close()
    # without the first batch, which is not read before the step needs it
    return {"wait (ms)": 1e3 * median(waited[1:]), "of a step (%)": 100 * sum(waited[1:]) / sum(taken[1:])}


def tokenizer(cfg: BenchConfig, world: World) -> list[Row]:
    """Bytes, a bpe vocabulary of 4096 trained on the text itself, and gpt2 if tiktoken has its file or can download it.

    data.prepare tokenizes on one thread; its main thread reads and writes at the same time.
    """
    rows, size = [], len(TEXT.encode())
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "text.txt").write_text(TEXT * COPIES)
        for wanted in (TokenizerConfig("bytes"), TokenizerConfig("bpe", VOCABULARY), TokenizerConfig("gpt2")):
            built = attempt(partial(build_tokenizer, wanted, [TEXT]))
            missing = isinstance(built, str)
            ways = {"-": built} if missing else ways_to_tokenize(built, TEXT * COPIES, Path(folder))
            facts = {} if missing else {"vocabulary": built.vocab_size, "bytes/token": size / len(built.encode_array(TEXT))}
            group = [Row({"tokenizer": wanted.name, "by": name}, size * COPIES / 1e6, facts=facts) for name in ways]
            time_in_turn("MB/s", group, list(ways.values()), cfg.rounds, world.device)
            rows += group
    return rows


def ways_to_tokenize(tokenizer: Tokenizer, text: str, folder: Path) -> dict[str, Callable]:
    """Name of a program -> a call that tokenizes `text`, which is in the file text.txt of `folder`."""
    numbers = itertools.count()

    def prepared() -> None:
        cfg = DataConfig(name="text", source="text", path=str(folder / "text.txt"), workers=1)
        preparation = Preparation(cfg, folder / f"{tokenizer.name}_{next(numbers)}", request={})
        preparation.tokenizer = tokenizer  # else a bpe would be trained in every call
        preparation.run(open_corpus(cfg))

    return {
        "tiktoken alone": partial(tokenizer.encoding.encode_ordinary, text),
        "our tokenizer": lambda: [tokenizer.encode_array(piece) for piece in pieces(text)],
        "data.prepare": prepared,
    }
