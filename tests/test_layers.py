"""Who may import whom: the layers of the house (configs is under all of them). And how long a file or a function may be."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from model.attention import VARIANTS

ROOT = Path(__file__).parent.parent
LINES, FUNCTION_LINES, PARAMETERS = 400, 50, 7
OURS = ("model", "data", "training", "eval", "ablation", "bench", "scripts", "configs", "train", "tests")
FILES = [ROOT / "train.py"]
FILES += [path for name in OURS for end in ("py", "yaml", "cpp", "h") for path in (ROOT / name).rglob(f"*.{end}")]
MAY_IMPORT = {
    "configs": {"configs"},
    "model": {"model"},
    "data": {"data", "configs"},
    "training": {"training", "model", "data", "configs"},
    "eval": {"eval", "model", "data", "training", "configs"},
    "ablation": {"ablation", "eval", "model", "data", "training", "configs"},
    "bench": {"bench", "eval", "model", "data", "training", "configs"},
}
# Over a limit today: take a line out when its file has changed.
LONG = {
    "train.py: train",  # the training loop, which is read from top to bottom
    "model/attention/backends.py: _chosen",
    "model/attention/kernels/diff_triton.py: backward_kernel",
    "model/attention/kernels/diff_triton.py: forward_kernel",
    "model/decoder.py: stream",
    "tests/model/test_kernels.py: draw",
}


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a file."""
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Modules that a file imports anywhere, under TYPE_CHECKING and in functions too, and the names taken from each."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield module_of(node, path), [alias.name for alias in node.names]


def module_of(node: ast.ImportFrom, path: Path) -> str:
    """The module that an import in the file `path` names: relative in model/, which is installed under another name."""
    inside = path.relative_to(ROOT).parts[0] == "model"
    assert node.level or not inside or node.module.split(".")[0] != "model", f"{path}: import model relatively"
    assert not node.level or inside, f"{path}: relative import"
    package = path.relative_to(ROOT).parent.parts
    return ".".join([*package[: len(package) + 1 - node.level], *filter(None, [node.module])]) if node.level else node.module


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_layer_imports_only_what_is_below_it(package: str) -> None:
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        layers = {module.split(".")[0] for module, _ in imports(path)} & {*OURS}
        assert layers <= MAY_IMPORT[package], f"{path.relative_to(ROOT)} imports {layers - MAY_IMPORT[package]}"
    for variant in VARIANTS.values() if package == "model" else ():  # they know the facade and no kernels
        for module, names in imports(ROOT / f"{variant.__module__.replace('.', '/')}.py"):
            assert not {"kernels", "reference"} & {*module.split("."), *names}, f"{variant.__name__}: {module} {names}"


def file_of(name: str) -> Path | None:
    """The project's file of a module."""
    path = ROOT / name.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def file_imports(path: Path) -> set[Path]:
    """The project's files that a file imports: `from package import module` is an import of that module alone."""
    files = {file_of(f"{module}.{name}") or file_of(module) for module, names in imports(path) for name in names}
    return (files | {file_of(module) for module, names in imports(path) if not names}) - {None}


@pytest.mark.parametrize("package", ("configs", "model", "data", "training", "eval", "ablation", "bench", "scripts"))
def test_no_file_imports_itself_by_way_of_others(package: str) -> None:
    graph = {path: file_imports(path) for path in (ROOT / package).rglob("*.py")}
    done: set[Path] = set()

    def visit(path: Path, way: list[Path]) -> None:
        circle = [str(step.relative_to(ROOT)) for step in way[way.index(path) :]] if path in way else []
        assert not circle, f"import circle: {' -> '.join(circle)}"
        for target in graph.get(path, ()) if path not in done else ():
            visit(target, [*way, path])
        done.add(path)

    for path in graph:
        visit(path, [])


def test_no_file_and_no_function_is_long() -> None:
    assert len(FILES) > 100
    long = {str(path.relative_to(ROOT)) for path in FILES if len(path.read_text().splitlines()) > LINES}
    for path in (path for path in FILES if path.suffix == ".py"):
        kernel = path.parent.name == "kernels"  # takes every pointer, stride and size
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef):
                names = {arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)} - {"self", "cls"}
                if node.end_lineno - node.lineno >= FUNCTION_LINES or (len(names) > PARAMETERS and not kernel):
                    long.add(f"{path.relative_to(ROOT)}: {node.name}")
    assert long <= LONG, long - LONG


def test_the_house_stays_small() -> None:
    """Lines of Python, of the other ways to take noise out of attention apart, and words that name nothing."""
    family = "cog dex dint forgetting gated_diff grouped_diff selective shared_diff sink softpick ssmax talking_heads".split()
    texts = {path: path.read_text() for path in FILES if path.suffix == ".py" and path.stem not in family}
    tests = {path for path in texts if (ROOT / "tests") in path.parents}
    lines = [sum(text.count("\n") for path, text in texts.items() if (path in tests) == want) for want in (False, True)]
    assert lines[0] <= 17_280 and lines[1] <= 15_460, lines
    assert sum(len(re.findall(r"\b(?:found|own|asked|theirs|said)\b", text)) for text in texts.values()) <= 150
