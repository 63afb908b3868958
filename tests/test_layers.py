"""Who may import whom: the layers of the house (configs is under all of them)."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = {"model", "data", "training", "eval", "scripts", "configs", "train", "tests"}
MAY_IMPORT = {
    "configs": {"configs"},
    "model": {"model"},
    "data": {"data", "configs"},
    "training": {"training", "model", "data", "configs"},
    "eval": {"eval", "model", "data", "training", "configs"},
}


def imports(path: Path) -> set[str]:
    """Modules that a file imports, `from a import b` counting as a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
    return found


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_layer_imports_only_what_is_below_it(package: str) -> None:
    files = list((ROOT / package).rglob("*.py"))
    assert files
    allowed = MAY_IMPORT[package]
    for path in files:
        for module in imports(path):
            if module.split(".")[0] in OURS:
                ok = module.split(".")[0] in allowed or module in allowed
                assert ok, f"{path.relative_to(ROOT)} imports {module}; {package}/ may import {sorted(allowed)}"


def test_variants_know_the_facade_and_no_kernels() -> None:
    for path in (ROOT / "model" / "attention").glob("*.py"):
        if path.stem in ("baseline", "diff", "gated", "introspective"):
            for module in imports(path):
                assert "kernels" not in module and module != "model.attention.reference", (
                    f"{path.name} imports {module}"
                )
