"""Where a result goes, what is printed of it, and that it is lost in no place."""

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import train  # noqa: F401  # registers its schema
from configs import with_home
from configs.files import write_json
from eval import attention_noise, common, icl, needle, outliers, perplexity, quantization
from eval.common import claim_result, command_of, mean_se, plus_minus, result_name, say
from eval.model_card import text_of, training_command
from eval.needle import NeedleConfig
from eval.report import __main__ as report
from eval.report.runs import read_run
from eval.report.runs import text_of as text_of_result
from eval.report.tables import held_out
from training import checkpoint
from training.saver import save

ONE = ("samples=1", "depths=[0.5]")
EVALUATIONS = {
    attention_noise: (*ONE, "windows=1"),
    icl: ("episodes=1", "shots=[2]", "orders=2"),
    needle: (*ONE, "lengths=[160]"),
    outliers: ("tokens=160",),
    perplexity: ("tokens=160",),
    quantization: (*ONE, "bits=[8]", "tokens=160"),
}


def book(path: Path, about: str = "dogs") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"A book about {about} by the sea, and about what {about} do there. " * 20)
    return path


@pytest.mark.parametrize("evaluation", EVALUATIONS, ids=lambda module: module.__name__)
def test_a_full_disk_loses_no_result(
    evaluation: ModuleType, make_run: Callable[..., Path], call: Callable, capsys: pytest.CaptureFixture, monkeypatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    run = make_run("a")
    monkeypatch.setattr(common, "write_json", full)
    with pytest.raises(SystemExit) as stopped:
        call(evaluation, f"run={run}", *EVALUATIONS[evaluation])
    printed = capsys.readouterr()
    assert stopped.value.code == 2 and printed.out.startswith(f"{evaluation.__name__.removeprefix('eval.')}  a: ")
    assert "No space left on device" in printed.err and printed.err.strip().endswith("give out=FOLDER")


def test_a_read_only_folder_is_refused_before_the_evaluation_begins(make_run, call, refused, tmp_path, monkeypatch) -> None:
    run, out = make_run("a"), tmp_path / "elsewhere" / "a"
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not Path(path).is_relative_to(run) and access(path, mode))
    with monkeypatch.context() as patch:
        patch.setattr(perplexity, "evaluate", None)
        assert f"cannot be written into {run}: give out=FOLDER" in refused(perplexity, f"run={run}")
    call(perplexity, f"run={run}", "tokens=160", f"out={out}")
    assert {path.name for path in out.rglob("*.*")} == {"perplexity.json", "perplexity.png"} and not (run / "eval").exists()


def test_a_terminal_of_ascii_and_a_reader_that_has_left_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        say("0.5 ± 0.1")
    assert terminal.buffer.getvalue() == b"0.5 ? 0.1\n"
    read, write = os.pipe()
    os.close(read)
    with monkeypatch.context() as patch, os.fdopen(write, "w") as pipe:
        patch.setattr(sys, "stdout", pipe)
        say("the first line")
        say("and another")


def test_the_home_folder_is_known_in_every_path(make_run, call, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run = make_run("a")
    book(tmp_path / "book.txt")
    call(perplexity, "run='~/runs/a'", "text='~/book.txt'", "tokens=160", "out='~/out'")
    assert (tmp_path / "out" / "eval" / "perplexity_book.json").is_file() and not (run / "eval").exists()
    options = ("run=~/a", "examples='~/b'", "runs=[~/c,~/d]")
    assert [with_home(option) for option in options] == [option.replace("~", str(tmp_path)) for option in options]


def test_the_card_and_the_report_name_the_text_of_the_shards(tmp_path: Path) -> None:
    asked = {"name": "stdlib", "source": "stdlib", "dir": str(tmp_path)}
    assert text_of(asked) == "stdlib (source stdlib)"
    made = {"name": "books", "source": "text", "tokenizer": {"fingerprint": "00"}, "splits": {}}
    made["request"] = {"source": "text", "tokenizer.name": "bytes"}
    run = SimpleNamespace(config={"data": asked}, evals={"perplexity": {"results": {}}})
    write_json(tmp_path / "meta.json", made)
    assert text_of(asked) == "books (source text)"
    assert held_out(run) == "held-out documents of books, text alone"
    assert text_of_result(run, "perplexity") == "the validation documents of books"
    assert "data.tokenizer.name=bytes" in training_command({"model": {}, "data": asked | {"tokenizer": {"name": "gpt2"}}})
    (tmp_path / "meta.json").unlink()
    (tmp_path / "fineweb_train_000001.bin").touch()
    assert text_of(asked) == f"{tmp_path.name} (source shards of another project)"


def test_a_given_text_never_replaces_another_result(make_run, call, refused, tmp_path, shards) -> None:
    run = make_run("a")
    dogs, cats, moved = (
        book(tmp_path / "1" / "book.txt"),
        book(tmp_path / "2" / "book.txt", "cats"),
        book(tmp_path / "book.txt"),
    )
    call(perplexity, f"run={run}", "tokens=320")
    call(perplexity, f"run={run}", f"text={dogs}", "tokens=320")
    assert "perplexity_book.json is of another text" in refused(perplexity, f"run={run}", f"text={cats}")
    call(perplexity, f"run={run}", f"text={cats}", "name=cats", "tokens=320")
    call(perplexity, f"run={run}", f"text={moved}", "tokens=320")  # the same text at another place
    call(perplexity, f"run={run}", f"shards={shards}", "tokens=320")
    for part in ("eval", "figures"):
        assert {path.stem.removeprefix("perplexity") for path in (run / part).iterdir()} == {"", "_book", "_cats", "_shards"}
    content = json.loads((run / "eval" / "perplexity_book.json").read_text())
    assert content["config"]["text"] == str(moved) and content["results"]["text"] == "book.txt"
    assert text_of_result(read_run(run), "perplexity_book") == "book.txt"


@pytest.mark.parametrize(
    ("settings", "name"),
    (
        ({}, "needle"),
        ({"style": "lwm"}, "needle_lwm"),
        ({"style": "passkey", "text": "books/one.v2.txt.gz"}, "needle_passkey_one"),
        ({"shards": "two books"}, "needle_two-books"),
        ({"text": "books/*.txt"}, "needle_text"),
        ({"text": "x.txt", "name": "a-book"}, "needle_a-book"),
    ),
)
def test_names_of_results(settings: dict[str, str], name: str) -> None:
    assert result_name("needle", settings) == name and command_of(name) == "needle"


def test_a_digest_is_that_of_the_content(tmp_path: Path) -> None:
    cfg = NeedleConfig(run=str(tmp_path), text="x.txt")
    first, second = (claim_result("needle", cfg, [part])[1] for part in (b"a", b"b"))
    assert first["text"] == "x.txt" and len(first["input_sha256"]) == 64 and first != second
    assert claim_result("needle", NeedleConfig(run=str(tmp_path))) == ("needle", {})


def test_the_error_of_a_mean_needs_two_values(make_run, call, capsys, tmp_path) -> None:
    """One sample has no standard error: none is printed, written or drawn, and the report still reads the result."""
    assert mean_se([1.0, 3.0]) == (2.0, 1.0) and plus_minus(0.5, 0.25, "+.2f") == "+0.50 ± 0.25"
    assert plus_minus(*mean_se([2.0])) == "2.000"
    run, text = make_run("one"), book(tmp_path / "t" / "tasks.txt")
    for evaluation, options in EVALUATIONS.items():
        call(evaluation, f"run={run}", *options)
        printed = capsys.readouterr().out
        assert "±" not in printed and "nan" not in printed, printed
    results = json.loads((run / "eval" / "needle.json").read_text())["results"]
    assert results["se"] is None and results["cells"][0]["se"] is None
    call(needle, f"run={run}", f"text={text}", *EVALUATIONS[needle])
    call(report, f"runs=[{run}]", f"out={tmp_path}/report.html", "viewer=false")
    page = (tmp_path / "report.html").read_text()
    assert "± nan" not in page and "None" not in page and "± 0.0" not in page
    assert "On tasks.txt. " in page and "Outliers</h2>" in page


@pytest.mark.parametrize("evaluation", EVALUATIONS, ids=lambda module: module.__name__)
def test_no_result_of_numbers_that_are_not_finite(evaluation: ModuleType, make_run, refused) -> None:
    run = make_run("big")
    model = checkpoint.load_run(run).model
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1e20)  # finite weights, as a checkpoint must have, but no finite activations
    save(run, 5, model, [])
    assert "not finite: its training diverged" in refused(evaluation, f"run={run}", *EVALUATIONS[evaluation])
    assert not list(run.glob("eval/*.json"))
