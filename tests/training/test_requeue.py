"""A job of submitit that is preempted: a checkpoint first, then the queue again, then the same run goes on."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.faults.ends import slow, until
from tests.scripts.test_ablate import SCRIPT, toy

submitit = pytest.importorskip("submitit")


class Command:
    """What hydra-submitit-launcher queues: a command line that is queued again as it is."""

    def __call__(self, arguments: list[str]) -> None:
        import train
        from scripts import ablate

        slow()
        sys.argv = arguments
        (train if arguments[0] == "train.py" else ablate).main()

    def checkpoint(self, arguments: list[str]) -> Any:
        return submitit.helpers.DelayedSubmission(self, arguments)


@pytest.fixture(autouse=True)
def _preempted_by_usr1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in (str(ROOT), *sys.path) if path))
    monkeypatch.setenv("SUBMITIT_PREEMPT_SIGNAL", "USR1")


def queued(folder: Path, arguments: list[str]) -> Any:
    executor = submitit.LocalExecutor(folder)
    executor.update_parameters(timeout_min=5)
    return executor.submit(Command(), arguments)


def children(process: int) -> list[int]:
    return [int(number) for number in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def test_a_preempted_job_of_an_ablation_stops_its_training_first(shards: Path, tmp_path: Path) -> None:
    """Slurm signals all processes of a job: the ablation's own, which queues the job again, and that of its train.py."""
    arms = {"baseline": ["model=baseline"]}
    arguments = [one.replace("steps=16", "steps=200") for one in toy(shards, tmp_path, arms, "seeds=1", "only=baseline-s1")]
    job = queued(tmp_path / "jobs", [SCRIPT, *arguments])  # many steps, so that the signal comes in time
    log = tmp_path / "toy" / "logs" / "baseline-s1.log"
    until(lambda: log.is_file() and "step   2/200" in log.read_text(), limit=150)
    (task,) = children(job._process.pid)
    (training,) = children(task)
    for process in (training, task):  # in the other order the ablation's own SIGTERM may reach the training first
        os.kill(process, signal.SIGUSR1)
    job.result()
    assert "Requeued job" in job.stdout()
    stopped, again = log.read_text().split("$ python")[1:]
    assert "stopped by SIGUSR1" in stopped and "step   1/200" not in again and "done after step 200" in again
    assert (tmp_path / "toy" / "records" / "baseline-s1.jsonl").is_file()
