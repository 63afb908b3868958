"""Work of a benchmark in a process of its own, whose memory can be measured and whose setup is another trainer's."""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import get_context
from typing import Any

from bench.timing import attempt

CONTEXT = get_context("spawn")


class RemoteWork:
    """A work that `build(*arguments)` makes in a new process. A call runs the work there once.

    RuntimeError where the process dies, for example for lack of memory.
    """

    def __init__(self, build: Callable, *arguments: Any) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=CONTEXT)
        try:
            self._pool.submit(_build, build, arguments).result()
        except BaseException:
            self.close()
            raise

    def ask(self, function: Callable, *arguments: Any) -> Any:
        """Call `function(work, *arguments)` in the process, and return its result."""
        return self._pool.submit(_with_work, function, *arguments).result()

    def __call__(self) -> None:
        self.ask(_run)

    def close(self) -> None:
        """End the process."""
        self._pool.shutdown()


@contextmanager
def remote_works(*builds: tuple[Any, ...]) -> Iterator[list[RemoteWork | str]]:
    """A context with a `RemoteWork` for each (build, *arguments), or a string with the reason if that failed."""
    with ExitStack() as stack:
        works = [attempt(partial(RemoteWork, *build)) for build in builds]
        for work in works:
            if isinstance(work, RemoteWork):
                stack.callback(work.close)
        yield works


# ---------------------------------------- in the other process

_work: list[Callable] = []  # the one work of this process


def _build(build: Callable, arguments: tuple) -> None:
    _work[:] = [build(*arguments)]


def _with_work(function: Callable, *arguments: Any) -> Any:
    return function(_work[0], *arguments)


def _run(work: Callable) -> None:
    work()  # its result stays in the process
