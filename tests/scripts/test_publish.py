"""scripts/publish.py: numbers, tables and figures go under docs/results/, and the table into the documents."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ablation.lambdas import rows_of
from ablation.records import POINTS, PUBLISHED, records_of
from ablation.results import Results
from configs.files import read_json_lines
from scripts import publish
from tests.conftest import ROOT, Typed
from tests.scripts.conftest import Call

SCRIPT = "scripts/publish.py"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository without documents."""
    folder = tmp_path / "repository"
    (folder / "docs" / "results" / "study").mkdir(parents=True)
    monkeypatch.setattr(publish, "ROOT", folder)
    return folder


def test_what_was_written_and_a_bench_are_published(root: Path, tmp_path: Path, call: Call) -> None:
    source, target = tmp_path / "study", root / "docs" / "results" / "study"
    (source / "figures").mkdir(parents=True)
    (root / "README.md").write_text("before\n<!-- study table -->\n| old |\n<!-- end -->\nafter\n")
    (root / "docs" / "RESULTS.md").write_text('no table here <img src="results/study/loss.png">\n')
    (target / "README.md").write_text("![](gap.png)\n")
    for name in ("results.json", "table.md", "figures/loss.png", "figures/gap.png", "figures/grid.png"):
        (source / name).write_text({"results.json": "{}", "table.md": "| new |\n"}.get(name, "PNG"))
    assert "2 figures of 3, as pages show; its table is in README.md" in call(f"of={source}")
    assert {path.name for path in target.iterdir()} == {"README.md", "results.json", "table.md", "loss.png", "gap.png"}
    assert (root / "README.md").read_text() == "before\n<!-- study table -->\n| new |\n<!-- end -->\nafter\n"
    assert "add the lines <!-- other table --> and <!-- end -->" in call(f"of={source}", "name=other")
    (root / "README.md").write_text(open_ended := "<!-- study table -->\n| old |\nprose\n<!-- other table -->\n<!-- end -->\n")
    assert "the place of the table study has no end: add a line <!-- end --> after it" in call(f"of={source}")
    assert (root / "README.md").read_text() == open_ended

    source, page, bench = tmp_path / "train.json", root / "docs" / "PERFORMANCE.md", root / "docs" / "results" / "bench"
    page.write_text("before\n<!-- bench/steps table -->\n<!-- end -->\nafter\n")
    source.write_text(json.dumps({"bench": "train", "config": {"peer": "/home/me/nanoGPT", "model": {"layers": "b"}}}))
    assert "give one that scripts/bench.py wrote" in call(f"of={source}")
    source.with_suffix(".md").write_text("| new |\n")
    assert "its table is in docs/PERFORMANCE.md" in call(f"of={source}", "name=steps")
    assert page.read_text() == "before\n<!-- bench/steps table -->\n| new |\n<!-- end -->\nafter\n"
    assert {path.name for path in bench.iterdir()} == {"steps.json", "steps.md"}
    published = json.loads((bench / "steps.json").read_text())
    assert published == {"bench": "train", "config": {"peer": "nanoGPT", "model": {"layers": "b"}}}


def test_curves_and_digits_are_published_once(root: Path, tmp_path: Path, call: Call) -> None:
    """Records have them; without records a run keeps some points of its curve."""
    source, published = tmp_path / "study", root / "docs" / "results" / "study"
    (source / "records").mkdir(parents=True)
    record = {"run": "a-s1", "train": [{"step": 1, "loss": 2.0}], "evals": {}}
    (source / "records" / "a-s1.jsonl").write_text(json.dumps(record) + "\n")
    losses = [[step, 9 - step / 100] for step in range(1, 401)]
    run = {"seed": 1, "run": "a-s1", "values": {"loss": 2.00000012345678}, "curve": [[1, 2.0]], "losses": losses}
    config, results = {"texts": {"books": "/home/me/b.jsonl"}}, {"arms": [{"name": "a", "runs": [run]}]}
    content = {"eval": "ablation", "config": config, "results": results}
    (source / "results.json").write_text(json.dumps(content))
    (source / "table.md").write_text("| new |\n")
    call(f"of={source}")
    assert list(read_json_lines(published / PUBLISHED)) == [record]
    short = json.loads((published / "results.json").read_text())
    assert short["results"]["arms"][0]["runs"] == [{"seed": 1, "run": "a-s1", "values": {"loss": 2.0}}]
    assert short["config"] == {"texts": {"books": "b.jsonl"}}
    (kept,) = publish.without_curves(content, recorded=False)["results"]["arms"][0]["runs"]
    assert kept["curve"] == [[1, 2.0]] and len(kept["losses"]) <= POINTS + 1
    assert [kept["losses"][0], kept["losses"][-1]] == [losses[0], losses[-1]]
    report = {"eval": "report", "runs": [{"config": {"run_dir": "/home/me/a"}}], "results": [{"name": "loss", "cells": [1.0]}]}
    assert publish.without_curves(report, recorded=False) == report | {"runs": [{"config": {"run_dir": "a"}}]}


def numbers(content: Any) -> Iterator[float]:
    """All numbers in a JSON object, in their order, but for the p values of two or three runs: those magnify the eighth digit
    of a loss, which records lack.
    """
    if isinstance(content, dict):
        content = [value for key, value in content.items() if key not in ("p", "p_holm", "p_alone")]
    if isinstance(content, list):
        for value in content:
            yield from numbers(value)
    elif isinstance(content, (int, float)):
        yield content


STUDIES = "main main_42m answer main_controls main_lr main_paths scaling noise emergence mqar mqar_wide".split()


@pytest.mark.parametrize("study", STUDIES)
def test_published_numbers_follow_from_published_records(study: str, tmp_path: Path, monkeypatch, typed: Typed) -> None:
    """The command of a study's page, which trains nothing, gives the published differences and intervals."""
    monkeypatch.setattr(Results, "draw", lambda self, folder: [])  # no figure is compared
    page = (ROOT / "docs" / "results" / study / "README.md").read_text()
    command = re.search(r"^python (scripts/ablate.py experiment=.* run=false(?:.*\\\n)*.*)$", page, re.MULTILINE)[1]
    typed(*shlex.split(command.replace("\\\n", "")), f"runs={tmp_path}")
    made, kept = tmp_path / study, ROOT / "docs" / "results" / study
    again, published = (json.loads((folder / "results.json").read_text())["results"] for folder in (made, kept))
    assert ("partial" in again["title"]) == ("partial" in published["title"])
    assert [arm["name"] for arm in again["arms"]] == [arm["name"] for arm in published["arms"]]
    for arm, expected in zip(again["arms"], published["arms"], strict=True):
        wanted = list(numbers(expected["metrics"]))  # seven digits
        assert list(numbers(arm["metrics"])) == pytest.approx(wanted, rel=5e-7, abs=5e-5)
    for part in ("mixed", "pairs", "profiles"):
        assert list(numbers(again[part])) == pytest.approx(list(numbers(published[part])), rel=1e-3, abs=1e-3)
    fewest = {"answer": 300, "scaling": 60, "main_lr": 200, "mqar": 140, "mqar_wide": 70}.get(study, 400)
    assert len(list(numbers(published["mixed"]))) >= fewest


@pytest.mark.parametrize("study", ("main", "noise", "scaling"))
def test_published_lambdas_follow_from_published_records(study: str, tmp_path: Path) -> None:
    results = ROOT / "docs" / "results"
    arms = json.loads((results / study / "results.json").read_text())["results"]["arms"]
    published = json.loads((results / f"{study}_lambdas" / "lambdas.json").read_text())["results"]["rows"]
    again = {(row["arm"], row["layer"]): row for row in rows_of(arms, tmp_path, records_of(tmp_path, results / study))}
    assert again.keys() == {(row["arm"], row["layer"]) for row in published}
    for row in published:
        other = again[row["arm"], row["layer"]]
        assert list(other["lambda"]) == list(row["lambda"])
        assert list(numbers(other)) == pytest.approx(list(numbers(row)), rel=1e-5)
