"""Jobs side by side: a signal stops all of them."""

import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from training import jobs

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
