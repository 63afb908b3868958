"""sweep=optuna: a search over overrides that minimises the validation loss (runs where hydra-optuna-sweeper is installed)."""

import importlib.util
from pathlib import Path

import pytest
import yaml

from tests.conftest import assert_one_line_error, run_command, train_arguments

INSTALLED = importlib.util.find_spec("optuna") is not None


def search(shards: Path, folder: Path, *more: str) -> list[str]:
    command, *overrides = [a for a in train_arguments(shards, folder, *more) if not a.startswith("run_dir=")]
    return [command, "-m", "sweep=optuna", f"runs={folder}", *overrides]


@pytest.mark.skipif(INSTALLED, reason="hydra-optuna-sweeper is installed")
def test_without_the_package_it_is_named(shards: Path, tmp_path: Path) -> None:
    done = run_command(*search(shards, tmp_path / "runs", "steps=2"))
    assert_one_line_error(done, "pip install hydra-optuna-sweeper")
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(not INSTALLED, reason="needs hydra-optuna-sweeper")
def test_the_best_trial_has_the_lowest_loss(shards: Path, tmp_path: Path) -> None:
    # 1e-9 learns nothing, 1e12 diverges: neither may win, and neither ends the search.
    options = ("hydra.sweeper.n_trials=5", "optim.lr=choice(1e-9,1e-2,1e12)", "hydra.sweeper.params={}")
    done = run_command(*search(shards, tmp_path, "steps=2", "model.n_layer=1", *options))
    assert done.returncode == 0 and "the loss is nan" in done.stdout, done.stderr
    best = yaml.safe_load((tmp_path / "optimization_results.yaml").read_text())
    assert best["best_params"]["optim.lr"] == 0.01
