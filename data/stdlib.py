"""English text of the Python installation, about 2 MB, which needs no download."""

import ast
import inspect
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SKIPPED = set("test tests idlelib idle_test site-packages dist-packages lib2to3 turtledemo __pycache__".split())


def stdlib_texts() -> list[str]:
    """The language reference in pydoc_data, a document per topic, and the docstrings of the standard library, a document
    per module. Sources are parsed, never imported; the text depends only on the Python version.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in root.rglob("*.py") if SKIPPED.isdisjoint(path.relative_to(root).parts))
    texts: list[str] = []
    seen: set[str] = set()
    for path in paths:
        source = path.read_bytes()
        topics = path.parent.name == "pydoc_data"
        texts += _topics(source) if topics else [_docstrings(source, root, path, seen)]
    return texts


def _topics(source: bytes) -> list[str]:
    """Values of the `topics` dictionary in pydoc_data/topics.py, without those that mostly repeat a longer one."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "topics":
            return _without_excerpts([clean(text) for _, text in sorted(ast.literal_eval(node.value).items())])
    return []


def _without_excerpts(texts: list[str]) -> list[str]:
    """`if` is a section of `compound`, for example, and both splits would hold it."""
    seen: set[str] = set()
    kept = set()
    for text in sorted(texts, key=lambda text: (-len(text), text)):
        paragraphs = [paragraph.strip() for paragraph in text.split("\n\n")]
        if sum(len(p) for p in paragraphs if p in seen) < len(text) / 4:
            kept.add(text)
        seen.update(paragraphs)
    return [text for text in dict.fromkeys(texts) if text in kept]


def _docstrings(source: bytes, root: Path, path: Path, seen: set[str]) -> str:
    """One document: the docstrings of a module in the order of its source, each under its signature."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a template, for example
        return ""
    name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    parts = []
    for title, node in _definitions(tree, name):
        text = clean(ast.get_docstring(node) or "")
        if text and text not in seen:
            seen.add(text)
            parts.append(f"{title}\n\n{text}")
    return "\n\n".join(parts)


def _definitions(node: ast.AST, name: str) -> Iterator[tuple[str, ast.AST]]:
    """(title, node) of a module, its classes and functions, nested ones after the one that holds them."""
    yield name + (f"({ast.unparse(node.args)})" if hasattr(node, "args") else ""), node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _definitions(child, f"{name}.{child.name}")


def clean(text: str) -> str:
    """Common indentation, trailing blanks, ruled lines (`====`) and runs of empty lines removed."""
    text = inspect.cleandoc(text.replace("\x08", "").replace("\x0c", ""))
    text = "\n".join(line.rstrip() for line in text.split("\n") if not re.fullmatch(r"\s*([*=~^#+\-_])\1{3,}\s*", line))
    return re.sub(r"\n{3,}", "\n\n", text).strip()
