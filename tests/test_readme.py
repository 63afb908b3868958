"""README.md and docs/ say what is so: tables are the reports', the example is the code, links, options and commands exist."""

import ast
import importlib
import json
import re
import shlex
from pathlib import Path

import pytest

from configs.composing import compose_job
from tests.scripts.test_ablate_config import EXPERIMENTS
from tests.test_help import COMMANDS

ROOT = Path(__file__).parent.parent
DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/results/*/README.md"))
}
CI_BLOCK = r"<!-- ci -->\n```bash\n(.*?)```"


def test_the_pages_are_short_and_the_first_screen_has_what_a_stranger_needs() -> None:
    """22,000 words in README.md and docs/*.md, of them so many in the long ones; a bar of a table is no word."""
    first = "\n".join(DOCUMENTS["README.md"].splitlines()[:15])
    assert len(DOCUMENTS["README.md"].split()) <= 1200
    assert all(part in first for part in ("?", "make quickstart", "make test", "<img "))
    pages = {name: text for name, text in DOCUMENTS.items() if name.count("/") < 2 and name != "CONTRIBUTING.md"}
    words = {name: sum(any(map(str.isalnum, word)) for word in text.split()) for name, text in pages.items()}
    assert len(words) > 10 and sum(words.values()) <= 22_000, words
    for name, most in {"METHODS": 7500, "PERFORMANCE": 2500, "LOG": 3500}.items():
        assert words[f"docs/{name}.md"] <= most
    for name in (name for name in DOCUMENTS if name.startswith("docs/results/") or name == "docs/RESULTS.md"):
        text = DOCUMENTS[name]
        assert len(text.split()) <= (3500 if name == "docs/RESULTS.md" else 600), name
        prose = re.sub(r"```.*?```|<!-- .*?<!-- end -->|^\|.*?$|<p>.*?</p>", "", text, flags=re.DOTALL | re.MULTILINE)
        for paragraph in re.split(r"\n\n|\n- ", prose):
            assert len(paragraph.split()) <= 100, f"{name}: {paragraph[:60]}"
        for line in (line for line in text.splitlines() if line.startswith("|")):
            assert all(len(cell.split()) <= 40 for cell in line.split("|")), f"{name}: {line[:60]}"


def test_the_tables_are_those_under_results() -> None:
    assert sum("<!-- rows of" in text for text in DOCUMENTS.values()) > 10
    for document, text in DOCUMENTS.items():
        for name, table in re.findall(r"<!-- ([\w/]+) table -->\n(.*?)<!-- end -->", text, flags=re.DOTALL):
            folder = ROOT / "docs" / "results" / name
            tables = ("report.md", "table.md", "lambdas.md", "ngrams.md", "survival.md", "two_maps.md")
            places = (*(folder / table for table in tables), folder.with_suffix(".md"))
            (file,) = (place for place in places if place.is_file())
            assert table == file.read_text(), f"{document} has another {name} table than {file.relative_to(ROOT)}"
        for name, rows in re.findall(r"<!-- rows of ([\w.]+) -->\n(.*?)<!-- end -->", text, flags=re.DOTALL):
            file = (ROOT / document).parent / name
            assert set(rows.splitlines()) <= set(file.read_text().splitlines()), f"{document} has rows that {name} lacks"


def test_the_counts_of_solved_runs_are_those_of_the_results() -> None:
    arms = json.loads((ROOT / "docs" / "results" / "noise" / "results.json").read_text())["results"]["arms"]
    shown = "baseline gated diff diff_lambda_0 diff_no_head_norm diff_v2 introspective".split()  # the table's columns
    page = "docs/results/noise/README.md"
    rows = re.findall(r"^\| (\d+) %[^|]*((?:\| \d+ of \d+ [^|]*)+)\|$", DOCUMENTS[page], flags=re.MULTILINE)
    assert [share for share, _ in rows] == ["0", "50", "80", "90"]
    for share, cells in rows:
        runs = {arm["arm"]: arm["runs"] for arm in arms if arm["point"] == f"at{share}"}
        solved = {arm: sum(run["values"][f"tested at {share} %"] > 0.99 for run in of) for arm, of in runs.items()}
        counts = [f"{solved[arm]} of {len(runs[arm])}" for arm in shown]
        assert re.findall(r"\| (\d+ of \d+)", cells) == counts, f"{page}, trained with {share} % of distractors"


def test_the_example_of_a_variant_is_the_code() -> None:
    example = re.search(r"<!-- variant -->\n```python\n(.*?)```", DOCUMENTS["README.md"], flags=re.DOTALL).group(1)
    name = re.search(r"class (\w+)\(\w*Attention\)", example).group(1)

    def bare(source: str) -> str | None:
        """The class `name` without docstrings; None where `source` has no such class."""
        tree = next((n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name), None)
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
                node.body = node.body[1:]
        return ast.unparse(tree) if tree else None

    code = [bare(path.read_text()) for path in (ROOT / "model" / "attention").glob("*.py")]
    assert bare(example) in code


def test_every_experiment_and_option_is_named_and_pages_have_commands_that_ci_runs() -> None:
    """A user's own file, and a new variant, need no line in a document."""
    table = DOCUMENTS["docs/ablations.md"].partition("| experiment | arms |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(EXPERIMENTS)
    for group in ("size", "data", "optim"):
        row = re.search(rf"`{group}=` (.*)", DOCUMENTS["docs/training.md"]).group(1)
        for path in (ROOT / "configs" / group).glob("*.yaml"):
            assert re.search(rf"\b{path.stem}\b", row), f"docs/training.md's list of {group}= lacks {path.stem}"
    for page in ("training", "data", "evaluation", "ablations", "interop"):
        assert re.search(CI_BLOCK, DOCUMENTS[f"docs/{page}.md"], flags=re.DOTALL)
    assert "docs/*.md" in (ROOT / ".ci" / "readme").read_text()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_somewhere(document: str) -> None:
    folder = (ROOT / document).parent
    for link in re.findall(r"(?:\]\(|src=\")([^)\"]+?)[)\"]", re.sub(r"```.*?```", "", DOCUMENTS[document], flags=re.DOTALL)):
        file, _, anchor = link.partition("#")
        if not link.startswith("http"):
            target = (folder / file).resolve() if file else ROOT / document
            assert target.exists(), f"{document} links to {link}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", target.read_text(), flags=re.MULTILINE)
                anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
                assert anchor in anchors, f"{document} links to {link}, a heading that {target.name} lacks"


def written_commands() -> dict[str, str]:
    """Every command of ours in a bash block or between backticks -> the first document that has it."""
    written: dict[str, str] = {}
    for document, text in DOCUMENTS.items():
        blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
        lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
        lines += re.findall(r"`((?:python|torchrun) [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        for line in lines:
            # Commands that end in ... are beginnings; optuna is not installed here.
            if re.search(r"(train\.py|-m (eval|data)\.|scripts/)", line) and "..." not in line and "sweep=optuna" not in line:
                written.setdefault(re.sub(r"\s+(#.*)?$", "", line), document)
    return written


@pytest.mark.parametrize("line", written_commands())
def test_every_written_command_is_one_that_the_code_takes(line: str) -> None:
    """The overrides compose; nothing is run."""
    words = shlex.split(line, comments=True)  # of a pipe the last command
    words = words[len(words) - words[::-1].index("|") :] if "|" in words else words
    start = next(
        i for i, word in enumerate(words) if word == "train.py" or re.match(r"scripts/\w+\.py|(eval|data|ablation)\.\w+$", word)
    )
    module = words[start].removesuffix(".py").replace("/", ".")
    name = module.rpartition(".")[2]  # of the command; a package's stands in its __main__.py
    where = next(where for where, command, _ in COMMANDS if command == name)
    overrides = [word for word in words[start + 1 :] if not word.startswith("-") and word != "job"]
    if "-m" in words[start + 1 :]:
        overrides = [re.sub(r"^([\w.]+=[^\[,]+),.*", r"\1", word) for word in overrides]  # the first of a sweep
    loaded = importlib.import_module(where)
    if name == "sample":
        overrides = [loaded.as_typed(word) for word in overrides]
    if overrides:  # without one, a command may lack what it needs
        compose_job(name, overrides)


def test_every_test_named_in_the_feature_matrix_exists() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", DOCUMENTS["docs/ORIGINS.md"])
    assert len(named) > 20
    for file, test in named:
        (path,) = (ROOT / "tests").rglob(file)
        assert f"def {test}(" in path.read_text(), f"docs/ORIGINS.md names {file}::{test}"
