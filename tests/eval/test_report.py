"""eval/report.py on run folders: what the page holds, and which runs it refuses to compare."""

import json
import re
from pathlib import Path

import pytest
import yaml

from eval import attention_noise, needle, perplexity, report
from eval.comparison import read_run, si, table
from eval.page import smooth


@pytest.fixture
def evaluated(make_run, call):
    """evaluated(name, layers) -> a run with all three evaluations."""

    def make(name: str, layers: str = "b", **more: object) -> Path:
        run = make_run(name, layers, **more)
        call(perplexity, f"run={run}", "tokens=640")
        call(needle, f"run={run}", "samples=2", "depths=[0,1]", "lengths=[160]")
        call(attention_noise, f"run={run}", "samples=2", "depths=[0,0.5]")
        return run

    return make


def edit(path: Path, key: str, value: object) -> None:
    """Change `a.b` of a YAML or JSON file."""
    content = yaml.safe_load(path.read_text())
    *parents, last = key.split(".")
    inner = content
    for parent in parents:
        inner = inner[parent]
    inner[last] = value
    path.write_text(json.dumps(content))  # JSON is YAML


def test_the_page_is_whole_and_self_contained(evaluated, call, capsys, tmp_path):
    runs, out = [evaluated("one", "b"), evaluated("two", "d")], tmp_path / "pages" / "report.html"
    capsys.readouterr()
    call(report, f"runs=[{runs[0]},{runs[1]}]", f"out={out}")
    page = out.read_text()
    assert "<h1>Baseline and diff: loss" in page and "<table>" in page
    sources = re.findall(r'src="([^"]{1,30})', page)
    assert len(sources) == 2 + 1 + 2 + 2 + 2 + 1 and all(s.startswith("data:image/png;base64,") for s in sources)
    assert not re.search(r'(src|href)="(https?:)?//|@import|<script|url\(', page)
    assert 'href="' in page and "docs/METHODS.md" in page and "prefers-color-scheme: dark" in page
    assert "not measured" not in page
    assert len(list((out.parent / "figures").glob("*.png"))) == len(sources)
    content = json.loads(out.with_suffix(".json").read_text())
    assert [run["variant"] for run in content["runs"]] == ["baseline", "diff"]
    assert {"machine", "version", "results"} <= content.keys()
    printed = capsys.readouterr().out
    assert "needle accuracy, N=1" in printed and str(out) in printed and "note" not in printed


def test_table_holds_the_numbers(evaluated):
    run = read_run(evaluated("one"))
    cells = {row.name: row.cells[0] for row in table([run])}
    assert cells["parameters in total"].text == "20k" and cells["tokens"].value == 2560
    assert cells["training loss, last tenth"].value == pytest.approx(5.2)
    assert cells["validation loss, end of training"].value == 5.3
    measured = json.loads((run.folder / "eval" / "perplexity.json").read_text())["results"]
    assert cells["bits per byte"].value == measured["bits_per_byte"]
    assert cells["test loss (nats per token)"].text == f"{measured['loss']:.3f} ± {measured['se']:.3f}"


def test_what_is_not_measured_or_not_finished_is_said(evaluated, make_run, call, capsys, tmp_path):
    whole, part = evaluated("whole"), make_run("part", "d")
    call(perplexity, f"run={part}", "tokens=640")
    edit(part / "config.yaml", "steps", 9)
    capsys.readouterr()
    call(report, f"runs=[{whole},{part}]", f"out={tmp_path / 'r.html'}")
    printed = capsys.readouterr().out
    assert "part is half finished, at step 4 of 9" in printed
    assert "part has no needle, attention_noise: run python -m eval.needle" in printed
    assert (tmp_path / "r.html").read_text().count('<td class="missing">not measured</td>') == 5


def test_seeds_of_one_variant_share_its_colour_but_not_its_line(evaluated):
    from eval.comparison import read_runs

    first, second = read_runs([str(evaluated("s1", seed=1)), str(evaluated("s2", seed=2))])
    assert first.colour == second.colour and first.line != second.line


def test_runs_that_cannot_be_compared_are_refused(evaluated, make_run, refused, tmp_path):
    one, two = evaluated("one"), evaluated("two", "d")
    both, out = f"runs=[{one},{two}]", tmp_path / "r.html"

    def reason() -> str:
        return refused(report, both, f"out={out}")

    original = (two / "tokenizer.json").read_text()
    edit(two / "tokenizer.json", "fingerprint", "f" * 64)
    assert "different tokenizers" in reason()
    (two / "tokenizer.json").write_text(original)
    edit(two / "config.yaml", "data.name", "another")
    assert "different data" in reason()
    edit(two / "config.yaml", "data.name", "made-up")
    edit(two / "eval" / "perplexity.json", "results.sha256", "0")
    assert "eval.perplexity on different text" in reason()
    (two / "eval" / "perplexity.json").unlink()
    edit(two / "eval" / "needle.json", "config.samples", 7)
    assert "eval.needle on different" in reason()
    (two / "eval" / "needle.json").write_text("{")
    assert "damaged" in reason()
    assert not out.exists() and not (tmp_path / "figures").exists()


def test_wrong_input_is_one_line(make_run, refused, tmp_path):
    run = make_run("fresh")
    assert "python train.py" in refused(report, f"runs=[{tmp_path}]")
    assert "python -m eval.perplexity" in refused(report, f"runs=[{run}]")
    (run / "metrics.jsonl").write_text('{"step": 0, "params": 1}\n{"step": 1, "lo')
    assert "no training metrics" in refused(report, f"runs=[{run}]")
    assert "runs=[runs/A,runs/B]" in refused(report, "runs=[]")
    assert "twice" in refused(report, f"runs=[{run},{run}]")
    assert "out=report.html" in refused(report, f"runs=[{run}]", "out=report.pdf")


def test_small_helpers():
    assert [si(x) for x in (1_234_567, 999, 2.5e9, 17_000)] == ["1.23M", "999", "2.5G", "17k"]
    assert smooth([0.0, 3.0, 6.0, 9.0], 3).tolist() == pytest.approx([1.5, 3.0, 6.0, 7.5])
