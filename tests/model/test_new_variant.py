"""What README promises of a new attention variant: with a source file, its two lines, a config and a formula, all is there."""

import shutil
import string
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from model.attention import VARIANTS
from tests.conftest import ROOT, train_arguments
from tests.test_layers import file_imports

SOURCE = '''"""Attention by squared scores, whose heads are scaled."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .base import Attention, AttentionConfig


@dataclass
class ScaledConfig:
    """Options of `scaled`. start: where the scales start."""

    start: float = 1.0


class ScaledAttention(Attention):
    """s^2 / (1 + sum s^2) V of each head, times one learned number and times the sigmoid of another per token."""

    name = "scaled"
    Options = ScaledConfig
    undecayed = ("openness",)
    colours = {"scaled": "#332288"}
    row_sums = "any"

    def make_parameters(self, cfg: AttentionConfig, layer: int) -> None:
        super().make_parameters(cfg, layer)
        self.scale = nn.Parameter(torch.empty(self.heads))
        self.openness = nn.Linear(cfg.d_model, self.heads, bias=False)

    def init_own(self, generator: torch.Generator) -> None:
        nn.init.constant_(self.scale, self.options.start)

    def normalize(self, scores: Tensor, see: Tensor) -> Tensor:
        squares = scores.masked_fill(~see, 0.0).square()
        return squares / (1 + squares.sum(-1, keepdim=True))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, mask: object) -> Tensor:
        return super().attend(q, k, v, x, mask) * self.openness(x).sigmoid().mT[..., None]

    def after(self, y: Tensor) -> Tensor:
        return y * self.scale[:, None, None]

    def readings(self, x: Tensor) -> dict[str, Tensor]:
        return {"scale": self.scale.mean()}
'''
FORMULA = """

def scaled(w: dict, x: np.ndarray, see: np.ndarray, cfg: Any, layer: int, first: tuple) -> np.ndarray:
    def opened(b: int, i: int, y: np.ndarray) -> np.ndarray:
        return y * w["scale"][i] * sigmoid(x[b] @ w["openness.weight"][i])[:, None]

    return attention(w, x, see, cfg, output=opened, row=lambda s, i: s**2 / (1 + (s**2).sum()))
"""
LETTER = max(set(string.ascii_letters) - VARIANTS.keys())
IMPORT, LINE = "from .scaled import ScaledAttention\n", f'    "{LETTER}": ScaledAttention,\n'
TESTS = [
    f"tests/{name}.py" for name in ("model/test_variants", "model/test_modules", "model/test_probe", "training/test_monitor")
]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the code, to which a new variant is added, with a map of its kind and parameters."""
    folder = tmp_path_factory.mktemp("variant") / "repo"
    ignore = shutil.ignore_patterns(".*", "__pycache__", "runs", "shards", "docs", "wandb")
    shutil.copytree(ROOT, folder, ignore=ignore)
    (folder / "model/attention/scaled.py").write_text(SOURCE)
    (folder / "configs/model/scaled.yaml").write_text(f"layers: {LETTER}\n")
    with (folder / "tests/reference/formulas.py").open("a") as file:
        file.write(FORMULA)
    names = folder / "model/attention/__init__.py"
    text = names.read_text().replace("\nVARIANTS = {\n", f"{IMPORT}\nVARIANTS = {{\n{LINE}")
    assert IMPORT in text and LINE in text
    names.write_text(text)
    return folder


def python(house: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-B", *arguments], cwd=house, capture_output=True, text=True, timeout=500)


def test_it_passes_the_tests_of_all_variants(house: Path) -> None:
    done = python(house, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "-k", "scaled", *TESTS)
    assert done.returncode == 0 and int(done.stdout.split(" passed")[0].split()[-1]) > 15, done.stdout[-2000:]


def test_it_trains_and_has_options_and_readings(house: Path, shards: Path, tmp_path: Path) -> None:
    arguments = train_arguments(shards, tmp_path / "run", "model=scaled", "model.scaled.start=0.5", "steps=2")
    done = python(house, *arguments)
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert config["model"]["scaled"] == {"start": 0.5}
    assert '"monitor/mean/scale": 0.5' in (tmp_path / "run/metrics.jsonl").read_text()


@pytest.mark.parametrize("name", [variant.name for variant in VARIANTS.values()])
def test_every_variant_has_the_promised_files_and_is_named_nowhere_else(name: str) -> None:
    """A file, a config; the rest of model/ and training/ imports it from nowhere but its line."""
    letters = {variant.name: letter for letter, variant in VARIANTS.items()}
    assert yaml.safe_load((ROOT / f"configs/model/{name}.yaml").read_text())["layers"] == letters[name]
    assert VARIANTS[letters[name]].__module__ == f"model.attention.{name}"
    source = ROOT / f"model/attention/{name}.py"
    users = [path for folder in ("model", "training") for path in (ROOT / folder).rglob("*.py") if source in file_imports(path)]
    conversions = {path for path in users if path.parent.name == "interop" or path.name == "conversion.py"}
    followers = {ROOT / f"model/attention/{other}.py" for other in letters}  # variants that build on this one
    assert set(users) - conversions - followers == {ROOT / "model/attention/__init__.py"}
