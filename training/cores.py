"""How threads that compute on a CPU wait for each other: briefly as long as other processes use the same cores.

torch on Linux uses libgomp's OpenMP. A waiting thread spins, by default 300,000 turns (some milliseconds), and then sleeps.
This is fastest on free cores. If other processes use the same cores, a spinning thread often occupies the core that the awaited
thread needs. libgomp reads the number of turns once, when it is loaded. But it spins at most 100 turns while it has more
threads than the process may use cores (`gomp_throttled_spin_count_var` of libgomp/env.c, `do_spin` of config/linux/wait.h).
`share_cores` therefore starts further threads, which only sleep, as long as other processes use the cores. Results keep their
bits, because the number of threads that compute stays the same. Speeds: docs/PERFORMANCE.md.
"""

import ctypes
import os
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

TASKS = Path("/proc/self/task")  # of Linux: one folder for each thread of this process
MAPS = Path("/proc/self/maps")  # of Linux: the files that are loaded
CHOSEN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # if the user sets one of these variables, it stays in force
INTERVAL = 0.5  # seconds between two looks
# Number of threads that wait for a core, on average over the time for which the threads want one. With 2 threads on 2 cores:
# 0.01 on a quiet machine, at most 0.14 beside short tasks, 0.7 and more beside one process that computes without a pause.
CROWDED = 0.3
ENOUGH = 0.1  # seconds for which all threads must have wanted a core before a look counts
CALM = 5.0  # seconds without other processes before the long waits return


@cache
def share_cores() -> None:
    """Watch, from now on and for the whole process, whether other processes use its cores, and keep waits short while they do.

    Does nothing where one thread computes, where the user chose how threads wait, or where the system does not tell how long
    threads wait for a core.
    """
    threads = torch.get_num_threads()
    if threads > 1 and not any(os.environ.get(name) for name in CHOSEN) and seconds_without_core() is not None:
        threading.Thread(target=_watch, args=(threads,), name="share_cores", daemon=True).start()


def seconds_without_core() -> float | None:
    """Sum over this process's threads of the seconds for which they could run but had no core; None if Linux does not say."""
    waited = None
    with suppress(OSError):
        for task in TASKS.iterdir():
            with suppress(OSError):  # the thread has ended
                waited = (waited or 0.0) + int((task / "schedstat").read_text().split()[1]) / 1e9
    return waited


class Crowd:
    """Decides from sums of seconds whether other processes use the cores of `threads` threads."""

    def __init__(self, threads: int) -> None:
        self.threads, self.crowded = threads, False
        self._calm, self._before = 0.0, None

    def look(self, used: float, waited: float) -> bool:
        """used, waited: CPU seconds of all threads, and their seconds without a core, since the process began.

        A look counts if all threads wanted a core for ENOUGH seconds since the last look that counted.
        """
        if self._before is None:
            self._before = (used, waited)
        lost = waited - self._before[1]
        wanted = (used - self._before[0] + lost) / self.threads  # seconds for which all threads wanted a core
        if wanted >= ENOUGH:
            self._before = (used, waited)
            self._calm = 0.0 if lost > CROWDED * wanted else self._calm + wanted
            self.crowded = self._calm == 0.0 or (self.crowded and self._calm < CALM)
        return self.crowded


class Sleepers:
    """OpenMP threads that sleep. With them, libgomp has one thread more than the process may use cores."""

    def __init__(self, threads: int) -> None:
        self._count = max(1, len(os.sched_getaffinity(0)) + 1 - threads)
        self._over: threading.Event | None = None

    def keep(self, wanted: bool) -> None:
        """Start them if `wanted`, else end them; nothing where that is done already."""
        if wanted and self._over is None:
            self._over = threading.Event()
            threading.Thread(target=self._sleep, args=(self._over,), name="sleepers", daemon=True).start()
        elif not wanted and self._over is not None:
            self._over.set()
            self._over = None

    def _sleep(self, over: threading.Event) -> None:
        """libgomp gives every thread that calls it a team of its own, and ends the team when that thread ends.

        No operation of torch may run here: if the program ended meanwhile, Python would end this thread inside C++ code, which
        stops the process with an error.
        """
        for openmp in loaded_openmp():
            openmp.GOMP_parallel(ctypes.CDLL(None).free, None, self._count + 1, 0)  # each thread of the team calls free(NULL)
        over.wait()


def loaded_openmp() -> list[ctypes.CDLL]:
    """The libgomp that torch and our kernels use, as loaded in this process; more than one if their files differ."""
    mapped = {line.split(maxsplit=5)[-1] for line in MAPS.read_text(encoding="utf-8").splitlines()}  # a path may have blanks
    names = (path for path in sorted(mapped) if Path(path).name.startswith("libgomp"))
    return [ctypes.CDLL(path) for path in names if not path.endswith(" (deleted)")]


def _watch(threads: int) -> None:
    crowd, sleepers = Crowd(threads), Sleepers(threads)
    while (waited := seconds_without_core()) is not None:
        sleepers.keep(crowd.look(time.process_time(), waited))
        time.sleep(INTERVAL)
