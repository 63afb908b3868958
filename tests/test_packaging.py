"""pyproject.toml, requirements.txt and the Makefile agree, and what is installed is complete."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]


def requirements(file: str) -> list[Requirement]:
    return [Requirement(line) for line in (ROOT / file).read_text().splitlines() if line]


def ranges(lines: list[str]) -> dict[str, Requirement]:
    return {requirement.name.lower(): requirement for requirement in map(Requirement, lines)}


def test_every_pin_lies_in_its_range() -> None:
    allowed = ranges(PYPROJECT["project"]["dependencies"] + EXTRAS["hub"] + EXTRAS["wandb"])
    for pin in requirements("requirements.txt"):
        assert str(pin.specifier).startswith("=="), f"requirements.txt does not pin {pin.name}"
        version = str(pin.specifier).removeprefix("==")
        assert allowed[pin.name.lower()].specifier.contains(version), (
            f"pyproject.toml's range of {pin.name} lacks {version}"
        )


def test_the_test_extra_has_what_the_tests_need() -> None:
    allowed = ranges(EXTRAS["test"])
    for wanted in requirements("requirements-test.txt"):
        version = re.sub(r"[^\d.].*", "", str(wanted.specifier).lstrip("=>"))
        assert allowed[wanted.name.lower()].specifier.contains(version)


def test_the_license_and_the_name_are_the_same_everywhere() -> None:
    assert PYPROJECT["project"]["name"] == "attention-noise" and PYPROJECT["project"]["license"] == "MIT"
    assert "the attention-noise contributors" in (ROOT / "LICENSE").read_text()
    assert "license: MIT" in (ROOT / "CITATION.cff").read_text()
    assert (ROOT / "README.md").read_text().startswith("# attention-noise\n")


def test_files_beside_the_code_are_package_data() -> None:
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["*"]
    packages = [name.rstrip("*") for name in PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]]
    for package in packages:
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and path.suffix not in (".py", ".pyc"):
                assert any(path.match(pattern) for pattern in patterns), (
                    f"{path.relative_to(ROOT)} would not be installed"
                )


@pytest.mark.parametrize(("index", "fetched"), (("", 0), ("https://example.org/cpu", 1)))
def test_an_index_for_torch_is_used_for_torch_alone(index: str, fetched: int, tmp_path: Path) -> None:
    command = ["make", "-n", "quickstart", f"VENV={tmp_path / 'venv'}", f"TORCH_INDEX={index}"]
    installs = [
        line for line in subprocess.check_output(command, cwd=ROOT, text=True).splitlines() if " install " in line
    ]
    assert len(installs) == 1 + fetched and "--index-url" not in installs[-1]
    assert not fetched or "--index-url https://example.org/cpu" in installs[0] and "^torch==" in installs[0]
