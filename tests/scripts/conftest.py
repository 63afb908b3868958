"""A way to call a script as a user does, and short timings for scripts/bench.py."""

import subprocess
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from ablation import jobs
from bench import data, timing
from scripts import bench
from tests.conftest import Typed, assert_one_line_error
from tests.processes import Command


@pytest.fixture
def call(request: pytest.FixtureRequest, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """call("key=value") -> what the test module's SCRIPT printed; the error line where it was refused."""
    monkeypatch.setattr(jobs, "subprocess", SimpleNamespace(Popen=Command, STDOUT=subprocess.STDOUT))

    def type_in(*arguments: str) -> str:
        done = typed(request.module.SCRIPT, *arguments)
        if done.returncode:
            assert done.returncode == 2
            assert_one_line_error(done, "")
        return done.stderr.strip() if done.returncode else done.stdout

    return type_in


@pytest.fixture
def one_call_per_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(data, "SHARD_TOKENS", 20_000)
    monkeypatch.setattr(bench, "op_memory", lambda *which: 1.5)  # a process for each row; it has a test of its own


def quoted(*overrides: str) -> str:
    return "[" + ",".join(f'"{override}"' for override in overrides) + "]"
