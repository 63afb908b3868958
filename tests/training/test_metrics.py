"""What a run says of itself, on machines that lack a part of it."""

import importlib
import sys

import pytest
import torch

from training import metrics

LINE = {"loss": 2.0, "lr": 1e-3, "grad_norm": 0.5, "tokens_per_s": 1200.0, "mfu": None}


def test_memory_is_measured() -> None:
    gb = metrics.memory_gb(torch.device("cpu"))
    assert 0.01 < gb < 1000 and f"mem {gb:.2f} GB" in metrics.log_line(1, 10, LINE | {"mem_gb": gb}, 5.0)


def test_windows_without_the_resource_module_trains_without_a_memory_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)  # importing it raises ImportError, as on Windows
    try:
        importlib.reload(metrics)
        assert metrics.memory_gb(torch.device("cpu")) is None
        assert "mem n/a" in metrics.log_line(1, 10, LINE | {"mem_gb": None}, 5.0)
    finally:
        monkeypatch.undo()
        importlib.reload(metrics)
