"""Signals to a training run: to end, or to write a checkpoint. They work even if the terminal blocks the output.

SIGTERM and SIGINT: at the next step at which all processes exchange their signals, the run writes a checkpoint and exits with
code 143 or 130. SIGHUP: the run writes a checkpoint and continues, so a lost terminal does not end training (if SIGHUP is
ignored, as under nohup, it stays ignored). SIGUSR1 and SIGUSR2: if a launcher handles them (submitit does, to queue the job
again), the run writes a checkpoint and then calls the launcher's handler. The process ends at once, without a new checkpoint,
if a second signal asks it to end, or if the step does not end within `PATIENCE` seconds.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

from training.distributed import World

ENDING = (signal.SIGINT, signal.SIGTERM)
REQUEUING = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))
PATIENCE = 60.0  # seconds from a signal to the end of the step
ECHO = 1.0  # seconds within which one request may arrive twice: from a terminal, and forwarded by a launcher

Result = TypeVar("Result")


class Interrupted(Exception):
    """A signal has ended a wait."""


class Signals:
    """Records signals; the training loop calls `agreed` once per step to learn what all processes must do."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ending = 0  # number of the signal that asked this process to end; 0: none did
        self.saving = False  # whether a checkpoint was asked for
        self._waiting = False  # whether the main thread is in a call that may block for ever
        self._since = 0.0
        self._watchdog: threading.Timer | None = None
        self._before = {number: signal.getsignal(number) for number in REQUEUING}
        for number in (*ENDING, *(number for number, handler in self._before.items() if callable(handler))):
            signal.signal(number, self._end)
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._save)

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
        self._watchdog = threading.Timer(PATIENCE, self._give_up)
        self._watchdog.daemon = True
        self._watchdog.start()
        if self._waiting:
            raise Interrupted

    def _give_up(self) -> None:
        name = signal.Signals(self.ending).name
        wrong = f"{name} came, but the current step did not end within {PATIENCE:.0f} s"
        os.write(2, f"error: {wrong}: this process ends without a new checkpoint\n".encode())
        os._exit(128 + self.ending)

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
        if self.world.size > 1:
            return call(*arguments)
        with self._wait():
            return call(*arguments)

    def agreed(self, step: int, every: int) -> tuple[int, bool]:
        """Number of the signal to end with (0: go on), and whether to save a checkpoint, the same on all processes.

        Several processes agree only at every `every`-th step, because the reduction waits for the device.
        """
        if self.world.size > 1 and step % every:
            return 0, False
        ending, saving = int(self.world.largest(self.ending)), bool(self.world.largest(self.saving))
        self.saving = False
        if ending and self._watchdog:
            self._watchdog.cancel()  # the step has ended, and a checkpoint may take longer
        return ending, saving or bool(ending)

    def leave(self, number: int) -> NoReturn:
        """End the process after signal `number`: call the launcher's handler if there is one, then exit with 128 + `number`."""
        if callable(handler := self._before.get(number)):
            handler(number, None)
        raise SystemExit(128 + number)  # ends a sweep too

    def say(self, text: str) -> None:
        """Print a line; if no process reads the output any more (a closed or full pipe), the run goes on without output."""
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
