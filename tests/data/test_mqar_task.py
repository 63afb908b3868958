"""Associative recall: the share of distractors is exact, splits are disjoint, questions have answers, marks are right."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.config import DataConfig
from data.loader import UNSCORED, inputs_and_targets
from data.mqar import Mqar, MqarConfig, mqar_tokenizer
from data.stream import open_sources, open_tokenizer
from data.tokenizer import load_tokenizer

LENGTH = 176
SHARES = (0.0, 0.5, 0.8, 0.9, 0.95)


@pytest.mark.parametrize("kind", ["noise", "pairs"])
@pytest.mark.parametrize("share", (0.0, 0.8, 0.95))
def test_a_row_is_what_it_says(kind: str, share: float) -> None:
    cfg = MqarConfig(distractors=share, kind=kind)
    task = Mqar(cfg, LENGTH)
    for index in range(20):
        sample = task.draw("train", index, 1)
        tokens, told, questions = sample.tokens, sample.told, sample.questions
        assert tokens.shape == (LENGTH + 1,) and tokens[0] == task.blank
        # exactly this share of what is told, which is all there is before the first question could stand
        told_tokens = 2 * task.told_slots
        assert len(sample.distractors) == round(share * told_tokens)
        positions = np.sort(np.concatenate((sample.distractors, told, told + 1)))
        assert np.array_equal(positions, np.arange(1, 1 + told_tokens))
        # each key is told once, then comes once more, later, with the same value
        assert np.array_equal(tokens[told], tokens[questions]) and np.array_equal(tokens[told + 1], tokens[questions + 1])
        assert len(set(tokens[told])) == len(set(tokens[told + 1])) == cfg.pairs and questions.min() > told.max()
        assert (tokens[told] < cfg.keys).all()
        assert ((tokens[told + 1] >= cfg.keys) & (tokens[told + 1] < cfg.keys + cfg.values)).all()
        others = tokens[sample.distractors]
        assert not set(others) & set(tokens[told])  # what a question wants was told only there
        if kind == "noise":
            assert ((others >= cfg.keys + cfg.values) & (others < task.blank)).all()
        else:
            keys, values = others.reshape(-1, 2).T
            assert (keys < cfg.keys).all() and ((values >= cfg.keys) & (values < cfg.keys + cfg.values)).all()


def test_rows_are_a_pure_function_and_splits_share_none_and_only_answers_are_scored() -> None:
    task = Mqar(MqarConfig(distractors=0.5), 32)

    def rows(draw: Callable[[int], np.ndarray]) -> set[bytes]:
        return {draw(i).tobytes() for i in range(100)}

    train, other = rows(lambda i: task.sample(i, 1)), rows(lambda i: task.sample(i, 2))
    val, test = rows(task.window), rows(lambda i: task.draw("eval", i, 0).marked())
    assert len(train) == len(val) == len(test) == 100
    assert not train & other and not train & val and not train & test and not val & test
    assert np.array_equal(Mqar(task.cfg, 32).sample(5, 1), task.sample(5, 1))
    sample = task.draw("train", 3, 7)
    inputs, targets = inputs_and_targets(task.sample(3, 7))
    assert np.array_equal(inputs, sample.tokens[:-1])
    assert np.array_equal(np.flatnonzero(targets != UNSCORED), np.sort(sample.questions))  # the key predicts its value
    assert np.array_equal(targets[sample.questions], sample.tokens[sample.told + 1])


@pytest.mark.parametrize("share", SHARES)
def test_a_question_sees_no_filler(share: float) -> None:
    """And every distance between a pair and its question occurs, up to that of the first slot and the last question."""
    cfg = MqarConfig(distractors=share)
    task, slots = Mqar(cfg, LENGTH), round(cfg.pairs / (1 - share))
    samples = [task.draw("train", i, 1) for i in range(500)]
    for sample in samples[:50]:
        assert (sample.tokens[1 : sample.questions.max() + 2] != task.blank).all()
        assert (sample.tokens[sample.questions.max() + 2 :] == task.blank).all()
    distances = {int(d) for sample in samples for d in sample.questions - sample.told}
    assert distances == set(range(2, 2 * (slots + cfg.pairs), 2))


def test_it_is_a_source_of_training_and_needs_no_files(tmp_path: Path) -> None:
    tokenizer = mqar_tokenizer(MqarConfig(keys=12, values=3, noise=2))
    assert tokenizer.vocab_size == 18 and tokenizer.eot == 17
    assert tokenizer.encode(" k1 k11 v0 n1 k1") == [1, 11, 12, 16, 1]
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint
    cfg = DataConfig(name="mqar", source="mqar")
    source, val = open_sources(cfg, open_tokenizer(cfg), LENGTH)
    assert source.sample(0, 1).shape == val.window(0).shape == (LENGTH + 1,)
