"""Signals to a training run: to end, or to write a checkpoint. They work even if the terminal blocks the output.

SIGTERM and SIGINT: at the next step at which all processes exchange their signals, the run writes a checkpoint and exits with
code 143 or 130. SIGHUP: the run writes a checkpoint and continues, so a lost terminal does not end training (if SIGHUP is
ignored, as under nohup, it stays ignored). SIGUSR1 and SIGUSR2, of which Slurm can send one before it takes the machine away:
as SIGTERM, with codes 138 and 140; if a launcher handles them (submitit does, to queue the job again), its handler is called
after the checkpoint. The process ends at once, without a new checkpoint, if a second signal asks it to end, or if training
makes no progress for `PATIENCE` seconds after a signal.
"""

import contextlib
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from training.distributed import World
from training.guard import Diverged

ENDING = (signal.SIGINT, signal.SIGTERM)
# Windows has none of these.
REQUEUING = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))
HANGUP = (signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()
PATIENCE = 60.0  # seconds that a step may take after a signal
LOOK_EVERY = 1.0  # seconds between two looks at the progress
AGREE_EVERY = 5.0  # seconds between two exchanges of signals by several processes: launchers kill 30 s after a signal
ECHO = 1.0  # seconds within which one request may arrive twice: from a terminal, and forwarded by a launcher

Result = TypeVar("Result")


class Interrupted(Exception):
    """A signal has ended a wait."""


def in_sweep() -> bool:
    """Whether this process trains several runs one after the other (Hydra's -m)."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def leave(number: int, handler: Any) -> NoReturn:
    """End the process after signal `number`: call the launcher's handler if it has one, then exit with 128 + `number`."""
    if number in REQUEUING and callable(handler):
        handler(number, None)
    raise SystemExit(128 + number)  # ends a sweep too


class Signals:
    """Records signals until it is left; the training loop calls `agreed` once per step to learn what all processes must do."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ending = 0  # number of the signal that asked this process to end; 0: none did
        self.saving = False  # whether a checkpoint was asked for
        self._waiting = False  # whether the main thread is in a call that may block for ever
        self._since = 0.0
        self._progress = 0.0  # when training last made progress; infinity: it may take as long as it needs
        self._agreement = math.inf, 0.0  # step and time of the last exchange of signals
        self._next = 0  # step of the next one
        self._left = threading.Event()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        self._before = {number: signal.getsignal(number) for number in (*ENDING, *REQUEUING, *HANGUP)}
        for number, handler in self._before.items():
            if number in ENDING or (number in REQUEUING and handler != signal.SIG_IGN):
                signal.signal(number, self._end)
            elif number in HANGUP and handler != signal.SIG_IGN:
                signal.signal(number, self._save)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, *_: object) -> None:
        self._left.set()
        for number, handler in self._before.items():
            # None: a handler that Python did not install, and cannot install again. After a signal the process ends, and an
            # echo of this signal may still come.
            if handler is not None and not self.ending:
                signal.signal(number, handler)
        if isinstance(error, Diverged) and self.ending in ENDING and in_sweep():  # the sweep would go on with its next run
            self.say(f"error: {error}")
            self.leave(self.ending)

    def _save(self, *_: Any) -> None:
        self.saving = True

    def _end(self, number: int, _: Any) -> None:
        if self.ending:
            # torchrun and scripts/ablate.py forward a signal that a terminal has sent to all: that is no second request.
            echo = number != self.ending or "TORCHELASTIC_RUN_ID" in os.environ
            if not echo or time.monotonic() - self._since > ECHO:
                os._exit(128 + number)
            return
        self.ending, self._since = number, time.monotonic()
        self._progress = max(self._progress, self._since)
        threading.Thread(target=self._watch, daemon=True).start()
        if self._waiting:
            raise Interrupted

    def _watch(self) -> None:
        """End the process as soon as training has made no progress for `PATIENCE` seconds."""
        while (left := self._progress + PATIENCE - time.monotonic()) > 0:
            if self._left.wait(min(left, LOOK_EVERY)):
                return
        name = signal.Signals(self.ending).name
        wrong = f"{name} came, and then for {PATIENCE:.0f} s no step ended at which all processes could stop"
        advice = "exit without a new checkpoint; resume=true continues from the last one"
        os.write(2, f"error: {wrong}: {advice}\n".encode())
        os._exit(128 + self.ending)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context for work that may take longer than a step: no limit of time ends the process."""
        before, self._progress = self._progress, math.inf
        try:
            yield
        finally:
            self._progress = time.monotonic() if before < math.inf else before

    @contextlib.contextmanager
    def _wait(self) -> Iterator[None]:
        self._waiting = True
        try:
            if self.ending:
                raise Interrupted
            yield
        finally:
            self._waiting = False

    def wait_for(self, call: Callable[..., Result], *arguments: Any) -> Result:
        """`call(*arguments)`, which may block; raises Interrupted as soon as a signal has asked to end.

        With several processes the call is not interrupted, because the other processes are already in this step.
        """
        self._progress = max(self._progress, time.monotonic())
        if self.world.size > 1:
            return call(*arguments)
        with self._wait():
            return call(*arguments)

    def agreed(self, step: int, every: int) -> tuple[int, bool]:
        """Number of the signal to end with (0: go on), and whether to save a checkpoint, the same on all processes.

        Several processes agree only at every `every`-th step, because the reduction waits for the device, or earlier where
        `every` steps take longer than `AGREE_EVERY` seconds.
        """
        now = time.monotonic()
        self._progress = max(self._progress, now)
        if self.world.size > 1:
            if step < self._next:
                return 0, False
            steps, seconds = step - self._agreement[0], now - self._agreement[1]
            pace = self.world.largest(seconds / steps if steps > 0 else math.inf)
            self._agreement, self._next = (step, now), step + max(1, min(every - step % every, int(AGREE_EVERY / pace)))
        asked, self.saving = self.saving, False  # before the reduction: a signal may come while it waits
        ending, saving = int(self.world.largest(self.ending)), bool(self.world.largest(asked))
        if ending:
            self._progress = math.inf  # the step has ended, and a checkpoint may take longer
        return ending, saving or bool(ending)

    def leave(self, number: int) -> NoReturn:
        """End the process after signal `number`."""
        leave(number, self._before[number])

    def end_sweep(self) -> None:
        """After a run that is done: leave if a signal asked to end, and a sweep would train its next run in this process.

        All processes must call it together. A launcher's signal to queue the job again does not count, because the run is done.
        """
        number = int(self.world.largest(self.ending if self.ending in ENDING else 0))
        if number and in_sweep():
            self.leave(number)

    def say(self, text: str) -> None:
        """The main process prints a line. If nobody reads the output any more (a closed or full pipe), the run goes on."""
        if not self.world.main:
            return
        try:
            if not self.ending:
                with contextlib.suppress(Interrupted), self._wait():
                    print(text, flush=True)
                    return
                text = ""  # a signal came meanwhile: the line is in the buffer, or lost
            if not select.select([], [sys.stdout], [], 0)[1]:  # after a signal, do not wait for a reader
                raise BlockingIOError
            print(text, end="\n" if text else "", flush=True)
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
