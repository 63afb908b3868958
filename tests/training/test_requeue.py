"""A job of submitit that is preempted: a checkpoint first, then the queue again, then the same run goes on."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.faults.ends import until
from tests.scripts.test_ablate import SCRIPT, toy

submitit = pytest.importorskip("submitit")


class Command:
    """What hydra-submitit-launcher queues: a command line that is queued again as it is."""

    def __call__(self, arguments: list[str]) -> None:
        from scripts import ablate

        sys.argv = arguments
        ablate.main()

    def checkpoint(self, arguments: list[str]) -> Any:
        return submitit.helpers.DelayedSubmission(self, arguments)


def children(process: int) -> list[int]:
    return [int(number) for path in Path(f"/proc/{process}/task").glob("*/children") for number in path.read_text().split()]


def test_a_preempted_job_of_an_ablation_stops_its_training_first(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm signals all processes of a job: that of the ablation, which queues the job again, and that of its train.py."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in (str(ROOT), *sys.path) if path))
    monkeypatch.setenv("SUBMITIT_PREEMPT_SIGNAL", "USR1")
    arms = {"baseline": ["model=baseline"]}
    arguments = [one.replace("steps=8", "steps=80") for one in toy(shards, tmp_path, arms, "seeds=1", "only=baseline-s1")]
    executor = submitit.LocalExecutor(tmp_path / "jobs")
    executor.update_parameters(timeout_min=5)
    job = executor.submit(Command(), [SCRIPT, *arguments])  # many steps, so that the signal comes in time
    log = tmp_path / "toy" / "logs" / "baseline-s1.log"
    until(lambda: log.is_file() and "step  2/80" in log.read_text(), limit=400)
    (task,) = children(job._process.pid)
    (training,) = children(task)
    for process in (training, task):  # in the other order the ablation's SIGTERM may reach the training first
        os.kill(process, signal.SIGUSR1)
    job.result()
    assert "Requeued job" in job.stdout()
    stopped, again = log.read_text().split("$ python")[1:]
    assert "stopped by SIGUSR1" in stopped and "step  1/80" not in again and "done after step 80" in again
    assert (tmp_path / "toy" / "records" / "baseline-s1.jsonl").is_file()
