"""A way to call scripts/ablate.py as a user does."""

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from scripts import ablate
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


def quoted(*overrides: str) -> str:
    return "[" + ",".join(f'"{override}"' for override in overrides) + "]"
