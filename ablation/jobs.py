"""Many runs side by side: each on its GPU or its share of the cores, until all are done."""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import torch

from ablation.study import PlannedRun
from configs.provenance import ROOT
from training.signals import ENDING, HANGUP, REQUEUING, leave


class Pool:
    """The processes that run now; a signal to this process stops them, and train.py then leaves a checkpoint."""

    def __init__(self) -> None:
        self.stopping = 0  # number of the signal that stopped the pool; 0: none
        self._running: set[subprocess.Popen] = set()

    def call(self, arguments: list[str], env: dict[str, str], log: Path) -> int:
        """Run python with these arguments and append its output to `log`; returns the exit status."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            print(f"$ python {' '.join(arguments)}", file=file, flush=True)
            process = subprocess.Popen([sys.executable, *arguments], env=env, stdout=file, stderr=subprocess.STDOUT)
            self._running.add(process)
            if self.stopping:  # the signal came while the process was being started, and `_stop` did not see it
                process.terminate()
            code = process.wait()
            self._running.discard(process)
            return code

    def carry_out(self, run: PlannedRun, env: dict[str, str]) -> None:
        """Run the commands that are left of a run; ValueError, which says why, if one fails."""
        for arguments in run.left():
            if self.stopping:
                return
            start = run.log.stat().st_size if run.log.is_file() else 0
            code = self.call(arguments, env, run.log)
            if self.stopping or not run.check(arguments, code, run.log.read_bytes()[start:].decode(errors="replace")):
                return

    def __enter__(self) -> "Pool":
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


def run_jobs(chains: Sequence[Sequence[PlannedRun]], jobs: int | None, name: str, total: int) -> None:
    """Run chains (a long run, then its branches), `jobs` at a time. After a failure, raised at the end, no run starts."""
    gpus = visible_gpus()
    jobs = jobs if jobs is not None else max(1, len(gpus))
    numbers = itertools.count(total - sum(map(len, chains)) + 1)  # of the runs, as they end
    failures: list[Exception] = []
    chains_left = iter(chains)  # from which every worker takes the next
    with Pool() as pool:

        def work(slot: int) -> None:
            for chain in chains_left:
                try:
                    for run in chain:
                        if failures or pool.stopping:
                            return
                        pool.carry_out(run, environment(slot, jobs, gpus))
                        if not pool.stopping:
                            print(f"{name}: {next(numbers)} of {total} runs | {run.name} {run.finished()}", flush=True)
                except Exception as failure:
                    failures.append(failure)

        with ThreadPoolExecutor(jobs) as threads:
            list(threads.map(work, range(jobs)))
    if pool.stopping:
        print(f"{name}: stopped; repeat the command to continue", flush=True)
        pool.leave()
    if failures:
        raise failures[0]


def visible_gpus() -> list[str]:
    """CUDA devices this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not torch.cuda.is_available():
        return []
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def environment(slot: int, jobs: int, gpus: list[str]) -> dict[str, str]:
    """The environment of one run: its GPU, or its share of the cores."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    env.pop("HYDRA_FULL_ERROR", None)  # set by the entry point of this process, for this process
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    elif jobs > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // jobs)))
    return env
