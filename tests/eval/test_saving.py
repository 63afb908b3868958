"""Where a result goes, what is printed of it, and that it is lost in no place."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import train  # noqa: F401  # registers its schema
from configs import with_home
from configs.files import write_json
from eval import attention_noise, icl, needle, outliers, perplexity, quantization
from eval.common import command_of, mean_se, plus_minus, result_name
from eval.model_card import text_of
from eval.report import __main__ as report
from eval.report.runs import read_run
from eval.report.runs import text_of as text_of_result
from eval.report.tables import held_out
from tests.conftest import Typed
from training import checkpoint
from training.checkpoint import save

ONE = ("samples=1", "depths=[0.5]")
EVALUATIONS = {  # with keys of the results that other tools read
    attention_noise: ((*ONE, "windows=1"), "signed absolute signed_per_layer per_layer_head noise sink entropy negative"),
    icl: (("episodes=1", "shots=[2]"), "task accuracy se chance classes shots"),
    needle: ((*ONE, "lengths=[160]"), "accuracy se pairs cells context"),
    outliers: (("tokens=160",), "logits hidden per_layer sha256"),
    perplexity: (("tokens=160",), "loss se ppl bits_per_byte by_position cumulative recall sha256"),
    quantization: (("bits=[8]", "tokens=160"), "loss bits sha256"),
}


def book(path: Path, about: str = "dogs") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"A book about {about} by the sea, and about what {about} do there. " * 20)
    return path


@pytest.mark.parametrize("code", (errno.ENOSPC, errno.EIO))
def test_a_disk_that_is_full_or_fails_loses_no_result(code: int, make_run, typed: Typed, monkeypatch) -> None:
    run = make_run("a")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(code, os.strerror(code))))
    done = typed("eval.perplexity", f"run={run}", "tokens=160")
    assert done.returncode == 2 and done.stdout.startswith("perplexity  a: ") and done.stderr.count("\n") == 1
    assert os.strerror(code) in done.stderr and str(run / "eval" / "perplexity.json") in done.stderr


def test_the_home_folder_is_known_in_every_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    options = ("run=~/a", "examples='~/b'", "runs=[~/c,~/d]")
    assert with_home("prompt='~/a'") == "prompt='~/a'"
    assert [with_home(option) for option in options] == [option.replace("~", "/home/me") for option in options]


def test_the_card_and_the_report_name_the_text_of_the_shards(tmp_path: Path) -> None:
    wanted = {"name": "stdlib", "source": "stdlib", "dir": str(tmp_path)}
    assert text_of(wanted) == "stdlib (source stdlib)"
    made = {"name": "books", "source": "text", "tokenizer": {"fingerprint": "00"}, "splits": {}}
    made["request"] = {"source": "text", "tokenizer.name": "bytes"}
    run = SimpleNamespace(config={"data": wanted}, evals={"perplexity": {"results": {}}})
    write_json(tmp_path / "meta.json", made)
    assert text_of(wanted) == "books (source text)"
    assert held_out(run) == "held-out documents of books, text alone"
    assert text_of_result(run, "perplexity") == "the validation documents of books"
    (tmp_path / "meta.json").unlink()
    (tmp_path / "fineweb_train_000001.bin").touch()
    assert text_of(wanted) == f"{tmp_path.name} (source shards of another project)"


def test_a_given_text_never_replaces_another_result(make_run, call, refused, tmp_path, shards, monkeypatch) -> None:
    run, dogs, cats = make_run("a"), book(tmp_path / "1" / "book.txt"), tmp_path / "book.jsonl"
    cats.write_text(json.dumps({"text": "A book about cats by the sea \ud800. " * 40}))  # a lone surrogate
    moved = book(tmp_path / "book.txt")
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)  # root may write everywhere
        assert refused(perplexity, f"run={run}").endswith("give out=FOLDER, another place for it")
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


def test_names_of_results() -> None:
    for settings, name in (
        ({}, "needle"),
        ({"text": "books/one.v2.txt.gz"}, "needle_one"),
        ({"shards": "data/books"}, "needle_books"),
        ({"text": "x.txt", "name": "a-book"}, "needle_a-book"),
    ):
        assert result_name("needle", settings) == name and command_of(name) == "needle"


def test_every_evaluation_writes_its_result_and_its_figure(make_run, call, tmp_path) -> None:
    """One sample has no standard error: none is printed, written or drawn, and the report still reads the result."""
    assert mean_se([1.0, 3.0]) == (2.0, 1.0) and plus_minus(0.5, 0.25, "+.2f") == "+0.50 ± 0.25"
    assert plus_minus(*mean_se([2.0])) == "2.000"
    run, text = make_run("one", "d"), book(tmp_path / "t" / "tasks.txt")
    for evaluation, (options, keys) in EVALUATIONS.items():
        printed, name = call(evaluation, f"run={run}", *options), evaluation.__name__.removeprefix("eval.")
        assert all(line.startswith(f"{name}  one: ") for line in printed.splitlines())
        assert "±" not in printed and "nan" not in printed, printed
        content = json.loads((run / "eval" / f"{name}.json").read_text())
        assert {"eval", "run", "step", "config", "run_config", "machine", "version", "results"} <= content.keys()
        assert set(keys.split()) <= content["results"].keys()
        assert name == "outliers" or (run / "figures" / f"{name}.png").stat().st_size > 10_000
    results = json.loads((run / "eval" / "needle.json").read_text())["results"]
    (cell,) = results["cells"]
    assert {"length", "depth", "needles", "asked", "samples", "accuracy", "se", "answer_logprob"} <= cell.keys()
    assert results["se"] is None and cell["se"] is None
    call(needle, f"run={run}", f"text={text}", *EVALUATIONS[needle][0])
    call(report, f"runs=[{run}]", f"out={tmp_path}/report.html", "viewer=false")
    page = (tmp_path / "report.html").read_text()
    assert "± nan" not in page and "None" not in page and "± 0.0" not in page
    assert "On tasks.txt. " in page and "Outliers</h2>" in page


def test_no_result_of_numbers_that_are_not_finite(make_run, refused) -> None:
    run = make_run("big")
    model = checkpoint.load_run(run).model
    for p in model.parameters():
        p.data.mul_(1e20)  # finite weights, as a checkpoint must have, but no finite activations
    save(run, 5, model, [])
    for evaluation, (options, _) in EVALUATIONS.items():
        assert "not finite: its training diverged" in refused(evaluation, f"run={run}", *options)
    assert not list(run.glob("eval/*.json"))
