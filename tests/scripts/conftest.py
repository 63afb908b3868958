"""A way to call a script as a user does."""

import subprocess
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from ablation import jobs
from tests.conftest import Typed, assert_one_line_error
from tests.processes import Command

Call = Callable[..., str]


@pytest.fixture
def call(request: pytest.FixtureRequest, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> Call:
    """call("key=value") -> what the test module's SCRIPT printed; the error line where it was refused."""
    monkeypatch.setattr(jobs, "subprocess", SimpleNamespace(Popen=Command, STDOUT=subprocess.STDOUT))

    def type_in(*arguments: str) -> str:
        done = typed(request.module.SCRIPT, *arguments)
        if done.returncode:
            assert done.returncode == 2
            assert_one_line_error(done, "")
        return done.stderr.strip() if done.returncode else done.stdout

    return type_in


def quoted(*overrides: str) -> str:
    return "[" + ",".join(f'"{override}"' for override in overrides) + "]"
