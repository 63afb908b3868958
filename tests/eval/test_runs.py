"""python -m eval.runs: a line for each run."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from eval import perplexity, runs


def test_every_run_has_its_line(make_run, call: Callable[..., None], capsys: pytest.CaptureFixture) -> None:
    one, two = make_run("one"), make_run("deep/two", "d")
    call(perplexity, f"run={one}", "tokens=640")
    lines = (two / "metrics.jsonl").read_text().splitlines()
    (two / "metrics.jsonl").write_text("\n".join(lines[:3]) + "\n")  # two of four steps, no validation
    empty = two.with_name("empty")
    shutil.copytree(two, empty)
    (empty / "metrics.jsonl").write_text("")
    capsys.readouterr()
    call(runs, f"runs={one.parent}")
    head, *said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert head[:3] == ["run", "step", "tokens"] and [Path(line[0]).name for line in said] == ["empty", "two", "one"]
    assert said[1][1:] == ["2/4", "1.28k", "5.4000"]
    assert said[2][1:5] == ["4", "2.56k", "5.2000", "5.3000"] and said[2][-1] == "perplexity"
    assert said[0][1:] == "has no training metrics".split()
