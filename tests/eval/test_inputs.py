"""A given text has a result of its own in every evaluation, and never replaces the result of another text."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from eval import attention_noise, needle, outliers, perplexity, quantization
from eval.common import command_of, result_name
from eval.report import __main__ as report
from eval.report.runs import read_run, text_of

FEW = ("samples=1", "depths=[0]")
EVALUATIONS = (
    (needle, (*FEW, "lengths=[160]")),
    (attention_noise, FEW),
    (outliers, ("tokens=320",)),
    (perplexity, ("tokens=320",)),
    (quantization, (*FEW, "tokens=320", "bits=[4]")),
)


def book(path: Path, about: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"A book about {about} by the sea, and about what {about} do there. " * 20)
    return path


@pytest.mark.parametrize(("module", "few"), EVALUATIONS)
def test_a_given_text_never_replaces_another_result(
    module: ModuleType, few: tuple[str, ...], make_run, call, refused, tmp_path, shards
) -> None:
    name, run = module.__name__.removeprefix("eval."), make_run("a")
    dogs, cats, moved = (
        book(tmp_path / place / "book.txt", about) for place, about in (("here", "dogs"), ("there", "cats"), ("moved", "dogs"))
    )
    call(module, f"run={run}", *few)
    own = (run / "eval" / f"{name}.json").read_bytes()
    call(module, f"run={run}", f"text={dogs}", *few)
    assert f"{name}_book.json is of another text" in refused(module, f"run={run}", f"text={cats}", *few)
    call(module, f"run={run}", f"text={cats}", "name=cats", *few)
    call(module, f"run={run}", f"text={moved}", *few)  # the same text at another place
    call(module, f"run={run}", f"shards={shards}", *few)
    assert (run / "eval" / f"{name}.json").read_bytes() == own
    found = {part: {path.stem for path in (run / part).iterdir()} for part in ("eval", "figures")}
    names = {name, *(f"{name}_{text}" for text in ("book", "cats", "shards"))}
    heads = {each.replace("noise", "heads") for each in names} if module is attention_noise else set()
    assert found == {"eval": names, "figures": names | heads}
    content = json.loads((run / "eval" / f"{name}_book.json").read_text())
    assert content["config"]["text"] == str(moved) and content["results"]["text"] == "book.txt"
    assert text_of(read_run(run), f"{name}_book") == "book.txt"


def test_a_style_of_needles_and_a_text_of_its_name_are_told_apart(make_run, call, refused, tmp_path) -> None:
    run, text, few = make_run("a"), book(tmp_path / "t" / "passkey.txt", "dogs"), (*FEW, "lengths=[160]")
    assert result_name("needle", {"style": "passkey", "text": "books/one.txt"}) == "needle_passkey_one"
    call(needle, f"run={run}", f"text={text}", *few)
    wrong = refused(needle, f"run={run}", "style=passkey", *few)
    assert "needle_passkey.json is of another text" in wrong and "name=NAME" in wrong


def test_results_on_further_texts_have_sections(make_run, call, tmp_path) -> None:
    run, text = make_run("a"), book(tmp_path / "t" / "tasks.txt", "dogs")
    for module, few in EVALUATIONS:
        call(module, f"run={run}", f"text={text}", *few)
    call(report, f"runs=[{run}]", f"out={tmp_path / 'r.html'}", "viewer=false")
    page = (tmp_path / "r.html").read_text()
    for module, _ in EVALUATIONS:
        name = module.__name__.removeprefix("eval.")
        assert command_of(f"{name}_tasks") == name and f"<code>python -m {module.__name__}</code>" in page
    assert page.count("On tasks.txt. ") == 5 and "Activation outliers: tasks</h2>" in page
    assert command_of("icl_tasks") == "icl"  # not the module of this name
