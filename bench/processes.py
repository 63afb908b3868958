"""Works of a benchmark in separate processes, each with its own environment and memory; and processes that only compute."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from typing import Any

from bench.timing import attempt
from configs import environment_variables

BUSY = "x = 3\nwhile True:\n    x = x * x % 1000003"


def in_own_process(work: Callable, *arguments: Any) -> Any:
    """What `work(*arguments)` returns in a new process; RuntimeError where that process dies."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


class Elsewhere:
    """A work that `build(*arguments)` makes in a separate process. A call runs the work there once.

    environment: added to that of the process from its start, because libraries read it when they are loaded.
    """

    def __init__(self, environment: dict[str, str], build: Callable, *arguments: Any) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        try:
            with environment_variables(**environment):
                self._pool.submit(_begin, build, arguments).result()
        except BaseException:
            self.close()
            raise

    def ask(self, function: Callable, *arguments: Any) -> Any:
        """Call `function(work, *arguments)` in the process, and return its result."""
        return self._pool.submit(_with_work, function, *arguments).result()

    def __call__(self) -> None:
        self.ask(_once)

    def close(self) -> None:
        """End the process."""
        self._pool.shutdown()


@contextmanager
def elsewhere(builds: list[tuple[Any, ...]], environments: list[dict[str, str]] | None = None) -> Iterator[list[Any]]:
    """A context with an `Elsewhere` for each (build, *arguments), or a string with the reason if that failed."""
    with ExitStack() as stack:
        works = []
        for build, own in zip(builds, environments or [{}] * len(builds), strict=True):
            work = attempt(lambda build=build, own=own: Elsewhere(own, *build))
            if isinstance(work, Elsewhere):
                stack.callback(work.close)
            works.append(work)
        yield works


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """A context in which `count` other processes compute without a pause."""
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


# ---------------------------------------- in the other process

_work: list[Callable] = []  # the one work of this process


def _begin(build: Callable, arguments: tuple) -> None:
    _work[:] = [build(*arguments)]


def _with_work(function: Callable, *arguments: Any) -> Any:
    return function(_work[0], *arguments)


def _once(work: Callable) -> None:
    work()
