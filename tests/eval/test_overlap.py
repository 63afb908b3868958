"""The overlap of a test text with the training text, on texts whose share is known."""

from pathlib import Path

import pytest

import eval.common
import eval.overlap
from data.config import TokenizerConfig
from data.shards import Shard, write_shard
from data.tokenizer import build_tokenizer
from eval.overlap import overlap, refuse_overlap, sequence_codes


def words(start: int, count: int) -> str:
    return " ".join(f"w{i}" for i in range(start, start + count))


def test_sequences_are_of_words_whatever_stands_between_them_in_every_script(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (sequence_codes(text.encode())[0] for text in (words(0, 30), words(0, 30).upper().replace(" ", ",\n")))
    assert len(first) == 18 and (first == second).all() and len(set(first.tolist())) == 18
    assert not len(sequence_codes(b"too short")[0])
    monkeypatch.setattr(eval.overlap, "WORDS", 1)
    for text, count in (
        ("Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему. " * 2, 2 * 13),
        ("Θέλω να σου πω μια ιστορία για τη θάλασσα, τον ήλιο και το νησί μου", 15),
        ("天地玄黄，宇宙洪荒。日月盈昃", 12),
        ("これはペンです。ABC と 123", 10),
    ):
        codes, upper = (sequence_codes(written.encode())[0] for written in (text, text.upper()))
        assert len(codes) == count and (upper == codes).all(), text


def test_what_was_trained_on_is_found_and_other_text_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = build_tokenizer(TokenizerConfig(name="bytes"))
    path, text = tmp_path / "train_000000.bin", words(0, 400)
    write_shard(path, tokenizer.encode_array(text), vocab_size=tokenizer.vocab_size, fingerprint=tokenizer.fingerprint)
    monkeypatch.setattr(eval.common, "READ_AT_ONCE", 5 * 2**6)  # the pieces end within words, too
    train = [Shard(path)]
    assert overlap(train, tokenizer, [words(100, 50)]) > 0.9  # but for those that a piece's end cuts
    assert overlap(train, tokenizer, [words(1000, 500)]) == 0.0
    monkeypatch.undo()
    assert overlap(train, tokenizer, [words(100, 50)]) == 1.0
    assert overlap(train, tokenizer, [words(0, 113), words(1000, 113)]) == 0.5
    refuse_overlap("texts.books", 0.005)  # more than one per cent is no test
    with pytest.raises(ValueError, match="texts.books: 50.0% of its different 13-word sequences occur in the training text"):
        refuse_overlap("texts.books", 0.5)
