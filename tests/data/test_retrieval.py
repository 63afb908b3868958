"""Retrieval documents: what is hidden is what a question wants, and evaluation never meets training."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from data.config import DataConfig, RetrievalMixConfig, TokenizerConfig
from data.retrieval import RetrievalSource, _in_split, cities, draw_numbers
from data.shards import write_shard
from data.stream import open_sources
from data.tokenizer import Tokenizer, build_tokenizer

FACT = re.compile(r"The magic number of (\w+) is (\d+)\.")
TEXT = "Some words stand here. Others follow, and a full stop ends them. " * 40
LENGTH = 400


def hay(tokens: np.ndarray) -> SimpleNamespace:
    """A source whose windows are all the start of these tokens."""
    return SimpleNamespace(sample=lambda index, seed: tokens[: LENGTH + 1])


@pytest.fixture(scope="module", params=("bytes", "bpe"))
def tokenizer(request: pytest.FixtureRequest, corpus: list[str]) -> Tokenizer:
    return build_tokenizer(TokenizerConfig(request.param, 1500 if request.param == "bpe" else None), corpus)


def source(tokenizer: Tokenizer, **options: int) -> RetrievalSource:
    return RetrievalSource(RetrievalMixConfig(weight=50, **options), hay(np.array(tokenizer.encode(TEXT))), tokenizer, LENGTH)


def test_cities_and_numbers_of_training_and_evaluation_are_disjoint() -> None:
    train, evaluation = set(cities("train")), set(cities("eval"))
    assert not train & evaluation and len(evaluation) >= 30 and len(train) == len(cities("train"))
    rng = np.random.default_rng(0)
    numbers = {split: {draw_numbers(rng, split, 4, 1)[0] for _ in range(4000)} for split in ("train", "eval")}
    assert not numbers["train"] & numbers["eval"]
    for position in range(4):  # no digit tells the split
        share = [sum(str(n)[position] == "7" for n in numbers[split]) / len(numbers[split]) for split in numbers]
        assert abs(share[0] - share[1]) < 0.04


def test_every_question_repeats_a_fact_of_its_document(tokenizer: Tokenizer) -> None:
    for dense in (0, 100):
        documents, again = (source(tokenizer, dense=dense, needles=3) for _ in range(2))
        repeats = 0
        for index in range(40):
            tokens = documents.sample(index, seed=5)
            assert np.array_equal(again.sample(index, seed=5), tokens)
            assert tokens.shape == (LENGTH + 1,) and tokens[0] == tokenizer.eot
            known: dict[str, str] = {}
            before = repeats
            for city, number in FACT.findall(tokenizer.decode(tokens[1:])):
                assert city in cities("train")
                repeats += city in known
                assert known.setdefault(city, number) == number
            assert 1 <= len(known) <= 3
            assert dense or repeats > before  # the last sentence is always a question
        assert repeats > 40


def test_a_document_mask_hides_no_fact(tokenizer: Tokenizer) -> None:
    tokens = np.array(tokenizer.encode(TEXT))
    tokens[::25] = tokenizer.eot
    ends = []
    for masked in (False, True):
        mixed = RetrievalSource(RetrievalMixConfig(weight=50, dense=0), hay(tokens), tokenizer, LENGTH, masked)
        ends.append([int((mixed.sample(i, 0) == tokenizer.eot).sum()) for i in range(20)])
    assert max(ends[0]) > 1 and max(ends[1]) == 1  # one at the start of every document


def test_a_mixture_has_its_share_of_documents_and_nothing_held_out(tmp_path: Path) -> None:
    """The training text is all "a", the validation text all "z": no sample of training may hold the second."""
    tokenizer = build_tokenizer(TokenizerConfig("bytes"))
    for split, letter in (("train", "a"), ("val", "z")):
        tokens = np.array(tokenizer.encode(letter * 4000))
        path = tmp_path / f"{split}_0.bin"
        write_shard(path, tokens, vocab_size=tokenizer.vocab_size, fingerprint=tokenizer.fingerprint)
    retrieval = RetrievalMixConfig(weight=20, dense=0)
    cfg = DataConfig("x", "text", dir=str(tmp_path), tokenizer=TokenizerConfig("bytes"), retrieval=retrieval)
    train, val = open_sources(cfg, tokenizer, 400)
    rows = [train.sample(i, 1) for i in range(100)]
    documents = [row for row in rows if row[0] == tokenizer.eot]
    assert len(documents) == 20 and set(val.window(0).tolist()) == {ord("z")}
    assert not any((row == ord("z")).sum() > 40 for row in rows)  # some letters of the needles' words are z
    numbers = [int(n) for row in documents for n in re.findall(r"is (\d{4})\.", tokenizer.decode(row[1:]))]
    assert numbers and all(_in_split(number, "train") for number in numbers)
