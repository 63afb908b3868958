"""A job of submitit that is preempted: a checkpoint first, then the queue again, then the same run goes on."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, Typed, train_arguments
from tests.faults.ends import slow, started, until
from tests.faults.runs import ending

submitit = pytest.importorskip("submitit")


class Training:
    """What hydra-submitit-launcher queues: a command line that is queued again as it is."""

    def __call__(self, arguments: list[str]) -> None:
        import train

        slow()
        sys.argv = arguments
        train.main()

    def checkpoint(self, arguments: list[str]) -> Any:
        return submitit.helpers.DelayedSubmission(self, arguments)


def test_a_preempted_job_is_queued_again_and_goes_on(
    shards: Path, tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in (str(ROOT), *sys.path) if path))
    monkeypatch.setenv("SUBMITIT_PREEMPT_SIGNAL", "USR1")

    def command(name: str) -> list[str]:
        return train_arguments(shards, tmp_path / name, "steps=16", "checkpoint.every=0", "resume=true")

    assert typed(*command("whole")).returncode == 0
    executor = submitit.LocalExecutor(tmp_path / "jobs")
    executor.update_parameters(timeout_min=2)
    job = executor.submit(Training(), command("queued"))
    until(started(tmp_path / "queued"))
    controller = job._process.pid
    task = Path(f"/proc/{controller}/task/{controller}/children").read_text()
    os.kill(int(task), signal.SIGUSR1)  # as Slurm does before it takes the machine away
    job.result()
    assert "Requeued job" in job.stdout()
    left = [path.name for path in sorted((tmp_path / "queued" / "checkpoints").iterdir())]
    assert len(left) == 2 and left[0] < left[1] == "step_00000016"  # the first is that of the signal
    assert ending(tmp_path / "queued") == ending(tmp_path / "whole")
