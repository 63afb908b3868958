"""Many commands side by side: each job on its GPU or its share of the cores, with progress, until all is done."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch

from configs.provenance import ROOT
from training.metrics import clock
from training.signals import ENDING, HANGUP, REQUEUING, leave

REPORT_EVERY = 60  # seconds between two lines of progress


class Job(Protocol):
    """Commands that run one after the other, as ablation.study.PlannedRun. work: its cost relative to other jobs."""

    name: str
    log: Path
    work: float

    def left(self) -> list[list[str]]: ...
    def progress(self) -> tuple[int, int]: ...
    def check(self, arguments: list[str], code: int, output: str) -> bool: ...
    def finished(self) -> str: ...


class Team:
    """The processes that run now; a signal to this process stops them, and train.py then leaves a checkpoint.

    SIGINT and SIGTERM do so, a closed terminal (SIGHUP), if nohup does not ignore it, and SIGUSR1 and SIGUSR2 if a launcher
    handles them.
    """

    def __init__(self) -> None:
        self.stopping = 0  # number of the signal that stopped the team; 0: none
        self._running: set[subprocess.Popen] = set()
        self._lock = threading.Lock()

    def call(self, arguments: list[str], env: dict[str, str], log: Path) -> int:
        """Run python with these arguments and append its output to `log`; returns the exit status."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            print(f"$ python {' '.join(arguments)}", file=file, flush=True)
            with self._lock:
                if self.stopping:
                    return 0
                process = subprocess.Popen([sys.executable, *arguments], env=env, stdout=file, stderr=subprocess.STDOUT)
                self._running.add(process)
                if self.stopping:  # the signal came while the process was being started, and `_stop` did not see it
                    process.terminate()
            code = process.wait()
            with self._lock:
                self._running.discard(process)
            if number := ending_signal(code):
                why = ", as where memory runs out" if number == signal.SIGKILL else ""
                print(f"error: ended by {number.name}{why}", file=file)
            return code

    def carry_out(self, job: Job, env: dict[str, str]) -> None:
        """Run the commands of a job that are still to run; ValueError, which says why, if one fails."""
        for arguments in job.left():
            if self.stopping:
                return
            start = job.log.stat().st_size if job.log.is_file() else 0
            code = self.call(arguments, env, job.log)
            if self.stopping or not job.check(arguments, code, job.log.read_bytes()[start:].decode(errors="replace")):
                return

    def __enter__(self) -> "Team":
        self._before = {number: signal.getsignal(number) for number in (*ENDING, *REQUEUING, *HANGUP)}
        for number, handler in self._before.items():
            if number in ENDING or callable(handler) or (number in HANGUP and handler != signal.SIG_IGN):
                signal.signal(number, self._stop)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, _: Any) -> None:
        self.stopping = number
        for process in list(self._running):
            process.terminate()

    def leave(self) -> NoReturn:
        """End this process after a signal, when all others have ended; a launcher's handler queues the job again first."""
        leave(self.stopping, self._before[self.stopping])


def ending_signal(code: int) -> signal.Signals | None:
    """The signal that ended a process with this exit status: by itself (-9), or by a checkpoint and 128 + its number (143)."""
    number = -code if code < 0 else code - 128
    return signal.Signals(number) if number in set(signal.Signals) else None


def run_jobs(chains: Sequence[Sequence[Job]], jobs: int | None, name: str, total: int) -> None:
    """Run chains of jobs, `jobs` chains at a time (None: one per GPU, one on a CPU); the jobs of a chain one by one.

    After a failure no further chain starts; the chains that run finish, and then the first failure is raised. A signal
    stops all jobs, and then ends this process.
    """
    gpus = visible_gpus()
    jobs = jobs if jobs is not None else max(1, len(gpus))
    progress = Progress(name, [job for chain in chains for job in chain], total)
    failures: list[Exception] = []
    chains_left = iter(chains)  # from which every worker takes the next
    with Team() as team, ThreadPoolExecutor(jobs) as pool:

        def work(slot: int) -> None:
            for chain in chains_left:
                try:
                    for job in () if failures or team.stopping else chain:
                        team.carry_out(job, environment(slot, jobs, gpus))
                        if not team.stopping:
                            progress.finished(job)
                except Exception as failure:
                    failures.append(failure)

        workers = {pool.submit(work, slot) for slot in range(jobs)}
        while workers:
            workers = wait(workers, timeout=1).not_done
            progress.tick()
    if team.stopping:
        print(f"{name}: stopped; repeat the command to continue", flush=True)
        team.leave()
    if failures:
        raise failures[0]


def visible_gpus() -> list[str]:
    """CUDA devices this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not torch.cuda.is_available():
        return []
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def environment(slot: int, jobs: int, gpus: list[str]) -> dict[str, str]:
    """The environment of one job: its GPU, or its share of the cores (else threads of several jobs spin on the same cores)."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    env.pop("HYDRA_FULL_ERROR", None)  # set by the entry point of this process, for this process
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    elif jobs > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // jobs)))
    return env


class Progress:
    """Prints jobs done, steps of the running jobs, and the time left, estimated from the work still to do."""

    def __init__(self, name: str, left: Sequence[Job], total: int) -> None:
        self.name, self.left, self.total = name, left, total
        self.done = total - len(left)
        self.began = self.last = time.monotonic()
        self.before = self._spent()

    def _spent(self) -> float:
        return sum(job.work * min(1.0, done / steps) for job in self.left for done, steps in [job.progress()])

    def finished(self, job: Job) -> None:
        self.done += 1
        self._print(f"{job.name} {job.finished()}")

    def tick(self) -> None:
        if time.monotonic() - self.last >= REPORT_EVERY:
            busy = [(job.name, *job.progress()) for job in self.left if job.progress()[0] and job.left()]
            self._print(", ".join(f"{name} {done}/{steps}" for name, done, steps in busy) or "starting")

    def _print(self, what: str) -> None:
        self.last = time.monotonic()
        elapsed, spent = self.last - self.began, self._spent()
        gained, missing = spent - self.before, sum(job.work for job in self.left) - spent
        eta = clock(elapsed * missing / gained) if gained > 0 else "?"
        print(f"{self.name}: {self.done} of {self.total} runs | {what} | elapsed {clock(elapsed)}, eta {eta}", flush=True)
