"""scripts/publish.py: numbers, tables and figures go under docs/results/, and the table into the documents."""

import sys
from pathlib import Path

import pytest

from scripts import publish


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["publish.py", *arguments])
    publish.main()


def test_what_was_written_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    source, root = tmp_path / "study", tmp_path / "repository"
    (source / "figures").mkdir(parents=True)
    (root / "docs").mkdir(parents=True)
    monkeypatch.setattr(publish, "ROOT", root)
    (root / "README.md").write_text("before\n<!-- study table -->\n| old |\n<!-- end -->\nafter\n")
    (root / "docs" / "RESULTS.md").write_text("no table here\n")
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, f"of={source}")
    assert stopped.value.code == 2 and "run eval.report or scripts/ablate.py" in capsys.readouterr().err
    for name, content in (("results.json", "{}"), ("table.md", "| new |\n"), ("figures/loss.png", "PNG")):
        (source / name).write_text(content)
    run(monkeypatch, f"of={source}")
    assert {path.name for path in (root / "docs" / "results" / "study").iterdir()} == {
        "results.json",
        "table.md",
        "loss.png",
    }
    assert (root / "README.md").read_text() == "before\n<!-- study table -->\n| new |\n<!-- end -->\nafter\n"
    assert "its table is in README.md" in capsys.readouterr().out
    run(monkeypatch, f"of={source}", "name=other")
    assert "no document has a line <!-- other table -->" in capsys.readouterr().out


def test_a_bench_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    source, page = tmp_path / "train.json", tmp_path / "docs" / "PERFORMANCE.md"
    page.parent.mkdir()
    monkeypatch.setattr(publish, "ROOT", tmp_path)
    page.write_text("before\n<!-- bench/steps table -->\n<!-- end -->\nafter\n")
    source.write_text("{}")
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, f"of={source}")
    assert stopped.value.code == 2 and "give one that scripts/bench.py wrote" in capsys.readouterr().err
    source.with_suffix(".md").write_text("| new |\n")
    run(monkeypatch, f"of={source}", "name=steps")
    assert "its table is in docs/PERFORMANCE.md" in capsys.readouterr().out
    assert page.read_text() == "before\n<!-- bench/steps table -->\n| new |\n<!-- end -->\nafter\n"
    assert {path.name for path in (tmp_path / "docs" / "results" / "bench").iterdir()} == {"steps.json", "steps.md"}
