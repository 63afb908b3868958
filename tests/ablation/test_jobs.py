"""Jobs side by side: a signal stops all of them, and a failure lets no other job start."""

import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from ablation import jobs
from ablation.study import PlannedRun
from training.run import TrainConfig

SLEEPS = ["-c", "import time; time.sleep(60)"]


@pytest.mark.parametrize("on_thread", (True, False))
def test_a_signal_stops_a_job_that_is_just_starting(on_thread: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, started, stopped = subprocess.Popen, threading.Event(), threading.Event()

    def slow(*arguments: Any, **options: Any) -> subprocess.Popen:
        process = start(*arguments, **options)
        started.set()
        if on_thread:
            assert stopped.wait(30)
        else:
            os.kill(os.getpid(), signal.SIGTERM)
        return process

    monkeypatch.setattr(jobs.subprocess, "Popen", slow)
    codes: list[int] = []
    with jobs.Team() as team:
        thread = threading.Thread(target=lambda: codes.append(team.call(SLEEPS, dict(os.environ), tmp_path / "log")))
        if on_thread:
            thread.start()
            assert started.wait(30)
            os.kill(os.getpid(), signal.SIGTERM)  # handled at once, because this is the main thread
            stopped.set()
            thread.join()
        else:
            thread.run()
    assert team.stopping == signal.SIGTERM and codes == [-signal.SIGTERM]


def test_a_closed_terminal_asks_the_team_to_stop_unless_nohup_ignores_it() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with jobs.Team() as team:
            os.kill(os.getpid(), signal.SIGHUP)
        assert team.stopping == signal.SIGHUP and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with jobs.Team() as team:
            os.kill(os.getpid(), signal.SIGHUP)
        assert not team.stopping
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_killed_training_is_reported_by_its_signal_and_not_by_an_earlier_error(tmp_path: Path) -> None:
    run = PlannedRun("a", 1, tmp_path / "a-s1", [], TrainConfig(), [], 1)
    assert "the run has not begun" in run.reason()
    with jobs.Team() as team:
        for code in ("raise SystemExit('error: a disk is full: free some space')", "import os; os.kill(os.getpid(), 9)"):
            with pytest.raises(ValueError) as error:
                run.check(["train.py"], team.call(["-c", code], dict(os.environ), run.log), "")
            reason = str(error.value)
            assert reason.endswith("repeat this command: finished runs are kept") and "a-s1.log" in reason
            assert ("a disk is full" in reason) == ("correct that" in reason) == ("SIGKILL" not in reason)
    assert "a-s1: ended by SIGKILL, as where memory runs out (see " in reason
    assert [jobs.ending_signal(code) for code in (0, 2, 143, 255)] == [None, None, signal.SIGTERM, None]


class Step:
    """A job that only notes that it ran; `fails` raises instead."""

    work = 1.0

    def __init__(self, name: str, folder: Path, ran: list[str], fails: bool = False) -> None:
        self.name, self.log, self.ran, self.fails = name, folder / f"{name}.log", ran, fails

    def left(self) -> list[list[str]]:
        return [] if self.name in self.ran else [["-c", ""]]

    def progress(self) -> tuple[int, int]:
        return int(self.name in self.ran), 1

    def check(self, arguments: list[str], code: int, said: str) -> bool:
        if self.fails:
            raise ValueError(f"{self.name} failed")
        self.ran.append(self.name)
        return True

    def finished(self) -> str:
        return "done"


def test_after_a_failure_no_further_chain_starts(tmp_path: Path) -> None:
    ran: list[str] = []
    chains = [[Step("a", tmp_path, ran)], [Step("b", tmp_path, ran, fails=True), Step("c", tmp_path, ran)]]
    chains += [[Step("d", tmp_path, ran)], [Step("e", tmp_path, ran)]]
    with pytest.raises(ValueError, match="b failed"):
        jobs.run_jobs(chains, 1, "study", 5)
    assert ran == ["a"]
