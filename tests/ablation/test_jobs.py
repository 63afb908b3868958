"""Runs side by side: a signal stops all of them, and a failure lets no other start."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ablation import jobs


def test_a_signal_stops_a_job_that_is_just_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen
    monkeypatch.setattr(jobs.subprocess, "Popen", lambda *a, **o: (start(*a, **o), os.kill(os.getpid(), signal.SIGTERM))[0])
    with jobs.Pool() as pool:
        code = pool.call(["-c", "import time; time.sleep(60)"], dict(os.environ), tmp_path / "log")
    assert pool.stopping == signal.SIGTERM and code == -signal.SIGTERM
    before = signal.getsignal(signal.SIGHUP)
    for handler, stops in ((signal.SIG_DFL, signal.SIGHUP), (signal.SIG_IGN, 0)):  # nohup ignores a closed terminal
        signal.signal(signal.SIGHUP, handler)
        with jobs.Pool() as pool:
            os.kill(os.getpid(), signal.SIGHUP)
        assert pool.stopping == stops and signal.getsignal(signal.SIGHUP) == handler
    signal.signal(signal.SIGHUP, before)


class Step:
    """A run that only notes that it ran; `fails` raises instead."""

    def __init__(self, name: str, folder: Path, ran: list[str], fails: bool = False) -> None:
        self.name, self.log, self.ran, self.fails = name, folder / f"{name}.log", ran, fails
        self.log.touch()

    def left(self) -> list[list[str]]:
        return [] if self.name in self.ran else [["-c", ""]]

    def check(self, arguments: list[str], code: int, output: str) -> bool:
        if self.fails:
            raise ValueError(f"{self.name} failed")
        self.ran.append(self.name)
        self.printed = output
        return True

    def finished(self) -> str:
        return "done"


def test_what_an_earlier_attempt_printed_is_not_its_own(tmp_path: Path) -> None:
    step = Step("a", tmp_path, [])
    step.log.write_text("error: of yesterday\n")
    with jobs.Pool() as pool:
        pool.carry_out(step, dict(os.environ))
    assert step.printed == "$ python -c \n"


def test_after_a_failure_no_other_run_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs.Pool, "call", lambda *_: 0)
    ran: list[str] = []
    a, b, c, d = (Step(name, tmp_path, ran, fails=name == "b") for name in "abcd")
    a.check = lambda *_: time.sleep(1) or True  # b fails meanwhile
    with pytest.raises(ValueError, match="b failed"):
        jobs.run_jobs([[a, c], [b], [d]], 2, "study", 4)
    assert not ran
