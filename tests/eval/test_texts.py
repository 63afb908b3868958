"""A study's texts: a result or a run of another text than the one that is now there is not taken for it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from data.config import DataConfig, TokenizerConfig
from eval import perplexity, texts
from eval.records import record_of
from eval.report.runs import read_run
from eval.study import PlannedRun, evaluation_command, refuse_other_results
from eval.texts import Texts
from model.config import DecoderConfig
from tests.eval.conftest import TEXT
from training.run import TrainConfig


def planned(folder: Path, shards: Path, text: Path, found: Texts | None = None) -> PlannedRun:
    """The finished run in `folder`, whose only evaluation is perplexity on `text`."""
    data = DataConfig("made-up", "text", dir=str(shards), tokenizer=TokenizerConfig("bytes"))
    config = TrainConfig(model=DecoderConfig(context=160), data=data, steps=4)
    command = evaluation_command(f"perplexity text={text} name=other tokens=2000")
    return PlannedRun("a", 1, folder, [], config, [command], 1, texts=found or Texts())


@pytest.fixture
def read(tmp_path: Path) -> list[Path]:
    """Two texts in files of one name."""
    files = [tmp_path / folder / "test.txt" for folder in ("t1", "t2")]
    for file, text in zip(files, (TEXT, TEXT.upper()), strict=True):
        file.parent.mkdir()
        file.write_text(text * 20)
    return files


def test_a_result_on_another_text_of_the_same_name_is_not_this_text_s(
    make_run: Callable[..., Path], shards: Path, read: list[Path], call: Callable[..., None]
) -> None:
    folder, (first, second) = make_run("a-s1"), read
    assert [command[1] for command in planned(folder, shards, first).left()] == ["eval.perplexity"]
    call(perplexity, f"run={folder}", f"text={first}", "name=other", "tokens=2000")
    assert not planned(folder, shards, first).left()
    assert planned(folder, shards, second).left()
    moved = first.rename(shards / "test.txt")
    assert not planned(folder, shards, moved).left()
    assert not planned(folder, shards, first).left()  # the text is no longer on this machine
    assert not planned(folder, Path("nowhere"), second).left()  # nor is the tokenizer

    runs = [planned(folder, shards, text) for text in (moved, second)]
    for run in runs:
        run.record = record_of(read_run(folder))
    refuse_other_results(runs[0])
    with pytest.raises(ValueError, match=r"has perplexity_other of another text than .*t2/test\.txt: .*name=OTHER"):
        refuse_other_results(runs[1])


def test_a_study_tokenizes_a_text_once(
    make_run: Callable[..., Path], shards: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, found, calls = make_run("a-s1"), Texts(), []
    real = texts.evaluation_tokens
    monkeypatch.setattr(texts, "evaluation_tokens", lambda *given: calls.append(1) or real(*given))
    run = planned(folder, shards, read[0], found)
    for length in (None, 16, None, 32):
        settings = {"text": str(read[0]), "shards": None, "length": length, "tokens": 2000}
        assert found.tested(run.config.data, run.tokenizer, 160, settings)
    assert len(calls) == 1
