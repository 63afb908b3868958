"""scripts/publish.py: numbers, tables and figures go under docs/results/, and the table into the documents."""

from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import publish

SCRIPT = "scripts/publish.py"


def test_what_was_written_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable) -> None:
    source, root = tmp_path / "study", tmp_path / "repository"
    (source / "figures").mkdir(parents=True)
    (root / "docs").mkdir(parents=True)
    monkeypatch.setattr(publish, "ROOT", root)
    (root / "README.md").write_text("before\n<!-- study table -->\n| old |\n<!-- end -->\nafter\n")
    (root / "docs" / "RESULTS.md").write_text("no table here\n")
    assert "run eval.report or scripts/ablate.py" in call(f"of={source}")
    for name, content in (("results.json", "{}"), ("table.md", "| new |\n"), ("figures/loss.png", "PNG")):
        (source / name).write_text(content)
    assert "its table is in README.md" in call(f"of={source}")
    published = {path.name for path in (root / "docs" / "results" / "study").iterdir()}
    assert published == {"results.json", "table.md", "loss.png"}
    assert (root / "README.md").read_text() == "before\n<!-- study table -->\n| new |\n<!-- end -->\nafter\n"
    assert "no document has a line <!-- other table -->" in call(f"of={source}", "name=other")


def test_a_bench_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable) -> None:
    source, page = tmp_path / "train.json", tmp_path / "docs" / "PERFORMANCE.md"
    page.parent.mkdir()
    monkeypatch.setattr(publish, "ROOT", tmp_path)
    page.write_text("before\n<!-- bench/steps table -->\n<!-- end -->\nafter\n")
    source.write_text("{}")
    assert "give one that scripts/bench.py wrote" in call(f"of={source}")
    source.with_suffix(".md").write_text("| new |\n")
    assert "its table is in docs/PERFORMANCE.md" in call(f"of={source}", "name=steps")
    assert page.read_text() == "before\n<!-- bench/steps table -->\n| new |\n<!-- end -->\nafter\n"
    assert {path.name for path in (tmp_path / "docs" / "results" / "bench").iterdir()} == {"steps.json", "steps.md"}
