"""Who may import whom: the layers of the house (configs is under all of them). And how long a file or a function may be."""

import ast
from pathlib import Path

import pytest

from model.attention import VARIANTS

ROOT = Path(__file__).parent.parent
LINES, FUNCTION_LINES = 450, 60
OURS = {"model", "data", "training", "eval", "ablation", "bench", "scripts", "configs", "train", "tests"}
MAY_IMPORT = {
    "configs": {"configs"},
    "model": {"model"},
    "data": {"data", "configs"},
    "training": {"training", "model", "data", "configs"},
    "eval": {"eval", "model", "data", "training", "configs"},
    "ablation": {"ablation", "eval", "model", "data", "training", "configs"},
    "bench": {"bench", "eval", "model", "data", "training", "configs"},
}


def imports(path: Path) -> set[str]:
    """Modules that a file imports, `from a import b` counting as a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = module_of(node, path)
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


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
    allowed = MAY_IMPORT[package]
    for path in files:
        for module in imports(path):
            if module.split(".")[0] in OURS:
                assert module.split(".")[0] in allowed, (
                    f"{path.relative_to(ROOT)} imports {module}; {package}/ may import {sorted(allowed)}"
                )


def test_variants_know_the_facade_and_no_kernels() -> None:
    for variant in VARIANTS.values():
        path = ROOT / f"{variant.__module__.replace('.', '/')}.py"
        for module in imports(path):
            assert "kernels" not in module and module != "model.attention.reference", f"{path.name} imports {module}"


def file_imports(path: Path) -> set[Path]:
    """The files of the project that a file imports anywhere in it, under TYPE_CHECKING and in functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        if isinstance(node, ast.ImportFrom):
            # `from package import module` is an import of that module, everything else one of the named file.
            module = module_of(node, path)
            names = [f"{module}.{name}" if is_module(f"{module}.{name}") else module for name in names]
        for name in names:
            target = ROOT / name.replace(".", "/")
            found |= {file for file in (target.with_suffix(".py"), target / "__init__.py") if file.is_file()}
    return found


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


@pytest.mark.parametrize("package", ("configs", "model", "data", "training", "eval", "scripts"))
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
    files = [path for end in ("py", "yaml", "cpp", "h") for path in ROOT.rglob(f"*.{end}") if is_ours(path)]
    assert files
    assert {str(path.relative_to(ROOT)) for path in files if len(path.read_text().splitlines()) > LINES} == set()
    long = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())) if path.suffix == ".py" else ():
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= FUNCTION_LINES:
                long.add(f"{path.relative_to(ROOT)}: {node.name}")
    assert long == {"train.py: train"}  # the training loop, which is read from top to bottom


def is_ours(path: Path) -> bool:
    return path.relative_to(ROOT).parts[0].removesuffix(".py") in OURS
