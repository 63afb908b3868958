"""A study's texts: a result or a run of another text than the one that is now there is not taken for it."""

import json
import shutil
from pathlib import Path

import pytest

from ablation import study
from ablation.records import record_of
from ablation.study import PlannedRun, read_evaluation
from data.config import DataConfig, TokenizerConfig
from data.stream import text_digest
from eval import perplexity, texts
from eval.overlap import overlaps
from eval.report.runs import read_run, read_runs
from eval.texts import Texts
from model.config import DecoderConfig
from tests.eval.conftest import TEXT, edit
from training.run import TrainConfig


def planned(folder: Path, shards: Path, text: Path, known: Texts | None = None) -> PlannedRun:
    """The finished run in `folder`, whose only evaluation is perplexity on `text`."""
    data = DataConfig("made-up", "text", dir=str(shards), tokenizer=TokenizerConfig("bytes"))
    config = TrainConfig(model=DecoderConfig(context=160), data=data, steps=4)
    evaluation = read_evaluation(f"perplexity text={text} name=other tokens=2000")
    return PlannedRun("a", 1, folder, [], config, [evaluation], 1, texts=known or Texts())


def test_a_training_that_a_signal_has_ended_is_called_killed(tmp_path: Path) -> None:
    run = planned(tmp_path / "a", tmp_path, tmp_path / "b.txt")
    with pytest.raises(ValueError, match=r"^a: killed by SIGKILL \(exit status -9, .*repeat this command"):
        run.check(["train.py"], -9, "error: of an evaluation before\nstep 3/8")


@pytest.fixture
def read(tmp_path: Path) -> list[Path]:
    """Two texts in files of one name."""
    files = [tmp_path / folder / "test.txt" for folder in ("t1", "t2")]
    for file, text in zip(files, (TEXT, TEXT.upper()), strict=True):
        file.parent.mkdir()
        file.write_text(text * 20)
    return files


def test_a_result_on_another_text_of_the_same_name_is_not_this_text_s(make_run, shards, read, call) -> None:
    folder, (first, second) = make_run("a-s1"), read
    assert [command[1] for command in planned(folder, shards, first).left()] == ["eval.perplexity"]
    call(perplexity, f"run={folder}", f"text={first}", "name=other", "tokens=2000")
    assert not planned(folder, shards, first).left()
    assert planned(folder, shards, second).left()
    edit(folder / "eval" / "perplexity_other.json", "step", 2)
    assert planned(folder, shards, first).left()  # a result of an earlier checkpoint is made again
    edit(folder / "eval" / "perplexity_other.json", "step", 4)
    moved = first.rename(shards / "test.txt")
    assert not planned(folder, shards, moved).left()
    assert not planned(folder, shards, first).left()  # the text is no longer on this machine
    assert not planned(folder, Path("nowhere"), second).left()  # nor is the tokenizer

    record = record_of(read_run(folder))
    for text, fault in ((moved, None), (second, f"has perplexity_other of another text than {second}")):
        run = planned(folder, shards, text)
        (evaluation,) = run.evaluations
        assert run.fault(evaluation, record["evals"][evaluation.file], record["tokenizer"]) == fault


def test_a_study_tokenizes_a_text_once(make_run, shards, read, monkeypatch) -> None:
    folder, known, calls = make_run("a-s1"), Texts(), []
    real = texts.tokens_of
    monkeypatch.setattr(texts, "tokens_of", lambda *given: calls.append(1) or real(*given))
    run = planned(folder, shards, read[0], known)
    for length in (None, 16, None, 32):
        settings = {"text": str(read[0]), "shards": None, "length": length, "tokens": 2000}
        assert known.tested(run.config.data, read_run(folder).tokenizer, 160, settings)
    assert len(calls) == 1


def with_digest(folder: Path, digest: str | None) -> Path:
    """The run in `folder`, whose metrics now give this digest of its shards."""
    path = folder / "metrics.jsonl"
    first, *lines = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(json.loads(first) | {"text_digest": digest}), *lines]) + "\n")
    return folder


def test_a_study_refuses_a_run_or_a_record_of_other_shards(make_run, shards, read, monkeypatch) -> None:
    shutil.copy(shards / "val_000000.bin", shards / "train_000000.bin")
    folder = make_run("a-s1")
    monkeypatch.setattr(study, "describes", lambda *_: True)
    monkeypatch.setattr(study, "refuse_other_config", lambda *_, **__: None)
    run = planned(folder, shards, read[0])
    here = text_digest(run.config.data)
    for digest in (None, here):
        run.take_over(record_of(read_run(with_digest(folder, digest))))
    record = record_of(read_run(with_digest(folder, "f00")))
    with pytest.raises(ValueError, match=rf"{folder} was trained on other shards than those in {shards} .*name=OTHER"):
        run.take_over(record)
    planned(folder, Path("nowhere"), read[0]).take_over(record)  # the shards are not on this machine
    planned(folder, shards, read[0], Texts({"f00"})).take_over(record)  # or others are, and a table of records is made
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(ValueError, match="a-s1 was trained on other shards .*records=none"):
        run.take_over(record)


def test_runs_of_different_shards_are_not_reported_together(make_run) -> None:
    folders = [str(make_run(f"a-s{seed}", seed=seed)) for seed in (1, 2, 3)]
    assert len(read_runs(folders)) == 3
    for folder, digest in zip(folders, (None, "f00", "f00"), strict=True):
        with_digest(Path(folder), digest)
    assert len(read_runs(folders)) == 3
    with_digest(Path(folders[2]), "bad")
    with pytest.raises(ValueError, match=r"a-s2 and .*a-s3 were trained on different shards .*: report them apart"):
        read_runs(folders)


def test_shards_of_another_project_are_data_of_this_machine(shards: Path, tmp_path: Path) -> None:
    """They have no tokenizer.json. A study looks for its test texts in them, too."""
    data = DataConfig("foreign", "nanogpt", dir=str(tmp_path / "foreign"), tokenizer=TokenizerConfig("bytes"))
    assert not Texts().here(data)
    (tmp_path / "foreign").mkdir()
    assert not Texts().here(data)
    (shards / "val_000000.bin").rename(tmp_path / "foreign" / "val.bin")
    assert Texts().here(data)
    (tmp_path / "foreign" / "val.bin").rename(tmp_path / "foreign" / "x_train_0.bin")
    (tmp_path / "test.txt").write_text(TEXT * 20)
    assert overlaps(data, {"test": str(tmp_path / "test.txt")}, tmp_path / "kept.json") == {"test": 1.0}
