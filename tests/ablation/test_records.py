"""Records of runs: they compare with the runs that they were made of, and with runs whose folders are there."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from ablation import records as recording
from ablation.experiment import OF_TRAINING
from ablation.records import POINTS, PUBLISHED, describes, differing, record_of, rounded, run_of, thinned
from ablation.study import OF_A_RUN, ROOT, read_evaluation
from eval.report.runs import read_run, refuse_other_settings
from model.config import DecoderConfig
from tests.eval.conftest import further
from training.run import TrainConfig


def test_recorded_runs_and_runs_with_folders_are_compared(make_run: Callable[..., Path]) -> None:
    """A record has neither settings that are null nor the folder of a text; another text of the same name is refused."""
    older, newer = make_run("a-s1"), make_run("a-s2", seed=2)
    for folder, books in ((older, "/there/books.txt"), (newer, "/here/books.txt")):
        further(folder, "mqar", {"shares": []}, samples=4, shards=None)
        further(folder, "perplexity_books", {"loss": 4.0, "sha256": "f00"}, text=books)
    recorded = run_of(record_of(read_run(older)))
    refuse_other_settings([recorded, read_run(newer)])
    whole = (newer / "eval" / "perplexity_books.json").read_text()
    further(newer, "perplexity_books", {"loss": 4.0, "sha256": "bad"}, text="/here/books.txt")
    with pytest.raises(ValueError, match=r"ran eval\.perplexity on different text or settings"):
        refuse_other_settings([recorded, read_run(newer)])
    (newer / "eval" / "perplexity_books.json").write_text(whole)
    further(newer, "mqar", {"shares": []}, samples=5)
    with pytest.raises(ValueError, match=r"ran eval\.mqar on different text or settings"):
        refuse_other_settings([recorded, read_run(newer)])


def test_a_record_has_every_number_that_may_judge_a_trial(make_run: Callable[..., Path]) -> None:
    folder = make_run("a-s1")
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    apart = {"loss_text": 4.0, "loss_retrieval": 2.0, "lr": 0.1, "grad_norm": 1.5, "mfu": 0.4, "mem_gb": 2.0}
    path.write_text("".join(json.dumps(line | apart if "loss" in line else line) + "\n" for line in lines))
    run = read_run(folder)
    record = run_of(json.loads(json.dumps(record_of(run))))
    for name in OF_TRAINING:
        assert record.value(f"train.{name}") == run.value(f"train.{name}") is not None, name
    with path.open("a") as file:
        for step, value in ((2, 0.5), (4, -0.25)):
            file.write(json.dumps({"step": step, "tokens": 9, "monitor_s": 0.1, "monitor/layer_1/lambda": value}) + "\n")
    assert record_of(read_run(folder))["lambda"] == {1: -0.25}
    assert not {"loss_text", "lambda"} & record_of(read_run(make_run("b-s1"))).keys()


def test_a_record_from_before_an_option_describes_the_same_run() -> None:
    """Such a record lacks what train.py fills in for the option; a record of another value is of another run."""
    config = TrainConfig(model=DecoderConfig(layers="d", vocab_size=7).filled(), seed=3)
    values = differing(asdict(config))
    assert values["model.qkv_bias"] is False
    older = {"config": {key: value for key, value in values.items() if key != "model.qkv_bias"}}
    assert describes(older, config) and describes(older | {"measures": {"eval_tokens": config.eval_tokens}}, config)
    assert not describes(older | {"measures": {"eval_tokens": 7}}, config)
    for other in ({"model.qkv_bias": True}, {"seed": 4}):
        assert not describes({"config": values | other}, config)
    config.init_from = "/here/runs/study/a-s1"
    warm = differing(asdict(config))
    assert warm["init_from"] == "study/a-s1" and describes({"config": warm}, config)
    assert not describes({"config": values}, config)
    config.init_from = "/here/runs/others/a-s1"
    assert not describes({"config": warm}, config)


def test_every_evaluation_of_a_run_can_be_named_and_its_file_is_known_before_it_runs() -> None:
    written = {path.stem for path in (ROOT / "eval").glob("*.py") if "common.write_result(" in path.read_text()}
    assert set(OF_A_RUN) == written
    texts = ("perplexity text=corpus/README.md tokens=4096", "perplexity text='My Books, 2/test.txt' name=other", "needle")
    assert [read_evaluation(text).file for text in texts] == ["perplexity_README", "perplexity_other", "needle"]


def test_a_curve_is_thinned_once_and_keeps_its_ends_and_numbers_seven_digits() -> None:
    lines = [{"step": step} for step in range(1, 121)]
    kept = thinned(lines)
    assert kept[0]["step"] == 1 and kept[-1]["step"] == 120 and POINTS // 2 < len(kept) <= POINTS + 1
    assert thinned(kept) == kept and thinned(lines[:1]) == lines[:1] and thinned([]) == []
    others = {"accuracy": 0.2763671875, "tokens": 123456789012, "text": "0.12345678901234", "none": None}
    short = {"a": [1.234568e-9, {"b": 0.1234568}]} | others
    assert rounded({"a": [1.2345678901234e-9, {"b": 0.12345678901234}]} | others) == short == rounded(short)


def test_published_records_are_compressed_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / PUBLISHED
    records = [{"run": f"a-s{seed}", "train": [{"step": seed, "loss": seed / 7}]} for seed in range(1, 40)]
    recording.write_records(path, reversed(records))
    whole = path.read_bytes()
    assert list(recording.records_of(tmp_path / "none", tmp_path).values()) == sorted(records, key=lambda one: one["run"])
    recording.write_records(path, records)
    assert path.read_bytes() == whole
    for damaged in (whole[:-9], b"\0" + whole[1:], whole[:40] + b"\xff\0\xff" + whole[43:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"records\.jsonl\.gz is damaged: copy it again"):
            recording.records_of(tmp_path / "none", tmp_path)
