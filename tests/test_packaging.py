"""pyproject.toml, requirements.txt and the Makefile agree; what is installed is attention_noise, whole and alone."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]


def requirements(file: str) -> list[Requirement]:
    return [Requirement(line) for line in (ROOT / file).read_text().splitlines() if line]


def ranges(lines: list[str]) -> dict[str, Requirement]:
    return {requirement.name.lower(): requirement for requirement in map(Requirement, lines)}


def test_every_pin_lies_in_its_range() -> None:
    allowed = ranges(PYPROJECT["project"]["dependencies"] + EXTRAS["train"] + EXTRAS["hub"] + EXTRAS["wandb"])
    for pin in requirements("requirements.txt"):
        assert str(pin.specifier).startswith("=="), f"requirements.txt does not pin {pin.name}"
        version = str(pin.specifier).removeprefix("==")
        assert allowed[pin.name.lower()].specifier.contains(version), f"pyproject.toml's range of {pin.name} lacks {version}"
    for wanted in requirements("requirements-test.txt"):
        version = re.sub(r"[^\d.].*", "", str(wanted.specifier).lstrip("=>"))
        assert ranges(EXTRAS["test"])[wanted.name.lower()].specifier.contains(version)


def test_the_license_and_the_name_are_the_same_everywhere() -> None:
    assert PYPROJECT["project"]["name"] == "attention-noise" and PYPROJECT["project"]["license"] == "MIT"
    assert "the attention-noise contributors" in (ROOT / "LICENSE").read_text()
    assert "license: MIT" in (ROOT / "CITATION.cff").read_text()
    assert (ROOT / "README.md").read_text().startswith("# attention-noise\n")


USE = """
import sys, torch, attention_noise
from attention_noise import BaselineAttention, Decoder, DecoderConfig, DiffAttention, IntrospectiveAttention, Mask
from attention_noise.interop import huggingface
from attention_noise.conversion import Conversion
assert attention_noise.__file__.startswith(sys.argv[1]), attention_noise.__file__
m = DiffAttention(d_model=64, n_head=8, n_kv_head=4, layer=3)
assert m(torch.randn(2, 5, 64), mask=Mask(causal=False)).shape == (2, 5, 64)
logits = Decoder(DecoderConfig(layers="bdvgnitr", n_layer=8, vocab_size=9))(torch.zeros(1, 4, dtype=torch.long))
assert logits.shape == (1, 4, 9)
ours = {"configs", "data", "eval", "model", "scripts", "tests", "train", "training"}
assert not ours & {name.split(".")[0] for name in sys.modules}, "the package imports the repository"
"""


def python(folder: Path, *arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wheel_installs_the_package_and_nothing_else(tmp_path: Path) -> None:
    """An editable install is the checkout. By the hooks that pip calls: pip itself would write into this environment."""
    source = tmp_path / "source"  # a build leaves files beside the source
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "model", source / "model", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("data", "training"):  # which are not to be installed
        (source / name).mkdir()
        (source / name / "__init__.py").touch()
    python(source, "-c", "import setuptools.build_meta as b; b.build_wheel('../wheel'); b.build_editable('../editable')")
    for kind in ("wheel", "editable"):
        (wheel,) = (tmp_path / kind).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tmp_path / kind / "site")

    site = tmp_path / "wheel" / "site"
    assert {path.name for path in site.iterdir() if path.suffix != ".dist-info"} == {"attention_noise"}
    files = {path.relative_to(ROOT / "model") for path in (ROOT / "model").rglob("*.py")}
    packed = {path.relative_to(site / "attention_noise") for path in site.rglob("*.py")}
    assert packed == files, "pyproject.toml's list of packages lacks a folder of model/"
    python(tmp_path, "-c", f"import sys; sys.path.insert(0, {str(site)!r})\n{USE}", str(site))

    site = tmp_path / "editable" / "site"
    assert not {"data", "model", "training"} & {path.name for path in site.iterdir()}
    place = f"importlib.util.find_spec('attention_noise').origin == {str(source / 'model' / '__init__.py')!r}"
    python(tmp_path, "-c", f"import importlib.util, site; site.addsitedir({str(site)!r}); assert {place}")


def test_an_index_for_torch_is_used_for_torch_alone_and_the_quickstart_names_its_folders_by_model(tmp_path: Path) -> None:
    for index, fetched in (("", 0), ("https://example.org/cpu", 1)):
        command = f"make -n quickstart VENV={tmp_path / 'venv'} TORCH_INDEX={index} RUNS=x/y MODELS=diff,gated".split()
        planned = subprocess.check_output(command, cwd=ROOT, text=True)
        installs = [line for line in planned.splitlines() if " install " in line]
        assert len(installs) == 1 + fetched and "--index-url" not in installs[-1]
        assert not fetched or "--index-url https://example.org/cpu" in installs[0] and "^torch==" in installs[0]
        assert all(f"experiment=quickstart model={model} run_dir=x/y/{model} " in planned for model in ("diff", "gated"))
