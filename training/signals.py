"""Signals to a training run.

SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 end it with a checkpoint and exit code 128 + number; a launcher's handler of SIGUSR1 or
SIGUSR2 (submitit's, which queues the job again) is called in between. SIGHUP only asks for a checkpoint, so a lost terminal
does not end training. A second signal ends the process at once.
"""

import os
import select
import signal
import time
from typing import Any, NoReturn

from configs.composing import in_sweep
from training.distributed import World
from training.optim import Diverged

ENDING = (signal.SIGINT, signal.SIGTERM)
REQUEUING = (signal.SIGUSR1, signal.SIGUSR2)
HANGUP = (signal.SIGHUP,)
ECHO = 1.0  # seconds within which one request may arrive twice: from a terminal, and forwarded by a launcher


def leave(number: int, handler: Any) -> NoReturn:
    """End the process after signal `number`: call the launcher's handler if it has one, then exit with 128 + `number`."""
    if number in REQUEUING and callable(handler):
        handler(number, None)
    raise SystemExit(128 + number)  # ends a sweep too


class Signals:
    """Records signals inside `with`; the training loop calls `agreed` once per step to learn what all processes must do."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ending, self.came_at = 0, 0.0  # the signal that is to end this process (0: none), and when it came
        self.save_requested = False

    def __enter__(self) -> "Signals":
        self.handlers = {number: signal.getsignal(number) for number in (*ENDING, *REQUEUING, *HANGUP)}  # to restore
        for number, handler in self.handlers.items():
            if number in ENDING or handler != signal.SIG_IGN:
                signal.signal(number, self._save if number in HANGUP else self._end)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, *_: object) -> None:
        for number, handler in self.handlers.items():
            if handler is not None and not self.ending:  # None: not of Python; after a signal its echo may still come
                signal.signal(number, handler)
        # A sweep would begin its next run after a signal, so end it. A signal to requeue does not count: this run is done.
        goes_on = in_sweep() and (error is None or isinstance(error, Diverged))
        if goes_on and (number := int(self.world.largest(self.ending if self.ending in ENDING else 0))):
            if error:
                self.say(f"error: {error}")
            self.leave(number)

    def _save(self, *_: Any) -> None:
        self.save_requested = True

    def _end(self, number: int, _: Any) -> None:
        # torchrun and scripts/ablate.py forward a signal that a terminal has sent to all: that is no second request.
        echo = number != self.ending or "TORCHELASTIC_RUN_ID" in os.environ
        if self.ending and not (echo and time.monotonic() - self.came_at <= ECHO):
            os._exit(128 + number)
        if not self.ending:
            self.ending, self.came_at = number, time.monotonic()

    def agreed(self, step: int, every: int) -> tuple[int, bool]:
        """The signal to end with (0: go on), and whether to save a checkpoint, the same on all processes."""
        if self.world.size > 1 and step % every:  # the reduction waits for the device
            return 0, False
        save, self.save_requested = self.save_requested, False  # before the reduction: a signal may come while it waits
        ending, save = int(self.world.largest(self.ending)), bool(self.world.largest(save))
        return ending, save or bool(ending)

    def leave(self, number: int) -> NoReturn:
        leave(number, self.handlers[number])

    def say(self, text: str) -> None:
        """The main process prints a line, until a signal comes; a reader that has left does not stop the run."""
        if not self.world.main:
            return
        try:
            while not select.select([], [1], [], 1.0)[1]:  # a print into a full pipe would block
                if self.ending:
                    return
            print(text, flush=True)
        except OSError:  # a closed pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
