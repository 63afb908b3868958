"""sweep=optuna, a search over overrides, names the package that it needs."""

import importlib.util
from pathlib import Path

import pytest

from tests.conftest import assert_one_line_error, run_command, train_arguments


@pytest.mark.skipif(importlib.util.find_spec("optuna") is not None, reason="hydra-optuna-sweeper is installed")
def test_without_the_package_it_is_named(shards: Path, tmp_path: Path) -> None:
    command, *overrides = train_arguments(shards, tmp_path / "runs", "steps=2")
    assert_one_line_error(run_command(command, "-m", "sweep=optuna", *overrides), "pip install hydra-optuna-sweeper")
    assert not (tmp_path / "runs").exists()
