"""The README says what is so: its table is the report's, its example is the code, its configs exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("document", ("README.md", "docs/RESULTS.md"))
def test_the_tables_are_those_under_results(document: str) -> None:
    blocks = re.findall(r"<!-- (\w+) table -->\n(.*?)<!-- end -->", (ROOT / document).read_text(), flags=re.DOTALL)
    assert blocks
    for name, table in blocks:
        folder = ROOT / "docs" / "results" / name
        (file,) = (folder / file for file in ("report.md", "table.md") if (folder / file).is_file())
        assert table == file.read_text()


def test_the_example_is_the_code() -> None:
    example = re.search(r"```python\n(class GatedAttention.*?)```", README, flags=re.S).group(1)
    code = (ROOT / "model" / "attention" / "gated.py").read_text()

    def bare(source: str) -> str:
        classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
        tree = next(node for node in classes if node.name == "GatedAttention")
        for node in ast.walk(tree):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
                node.body = node.body[1:]
        return ast.unparse(tree)

    assert bare(example) == bare(code)


@pytest.mark.parametrize("group", ("model", "size", "data", "optim"))
def test_every_option_of_a_group_is_named(group: str) -> None:
    row = re.search(rf"`{group}=` (.*)", README).group(1)
    for path in (ROOT / "configs" / group).glob("*.yaml"):
        assert re.search(rf"\b{path.stem}\b", row), f"README's list of {group}= lacks {path.stem}"


def test_every_linked_file_exists() -> None:
    for document in ("README.md", "docs/METHODS.md", "docs/RESULTS.md", "docs/LOG.md"):
        folder = (ROOT / document).parent
        for link in re.findall(r"(?:\]\(|src=\")([^)#\"]+?)[)\"]", (ROOT / document).read_text()):
            assert link.startswith("http") or (folder / link).exists(), f"{document} links to {link}"


def test_every_test_named_in_the_feature_matrix_exists() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", (ROOT / "docs" / "METHODS.md").read_text())
    assert len(named) > 20
    for file, test in named:
        (path,) = (ROOT / "tests").rglob(file)
        assert f"def {test}(" in path.read_text(), f"docs/METHODS.md names {file}::{test}"
