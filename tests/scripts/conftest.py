"""A way to call scripts/ablate.py as a user does, and short timings for scripts/bench.py."""

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from eval.speed import data, timing
from scripts import ablate, bench
from tests.processes import Command
from training import jobs


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., str]:
    """call("experiment=...") -> what the command printed; the error line where it was refused."""
    monkeypatch.setattr(jobs, "subprocess", SimpleNamespace(Popen=Command, STDOUT=subprocess.STDOUT))

    def type_in(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["ablate.py", *arguments])
        try:
            ablate.main()
        except SystemExit as stopped:
            assert stopped.code == 2
            error = capsys.readouterr().err.strip()
            assert error.startswith("error: ") and "\n" not in error
            return error
        return capsys.readouterr().out

    return type_in


@pytest.fixture
def one_call_per_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(data, "SHARD_TOKENS", 20_000)
    monkeypatch.setattr(bench, "op_memory", lambda *which: 1.5)  # a process for each row; it has a test of its own


def quoted(*overrides: str) -> str:
    return "[" + ",".join(f'"{override}"' for override in overrides) + "]"
