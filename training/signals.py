"""Signals that ask a training run to end."""

import signal
from typing import Any

from training.distributed import World


class StopSignal:
    """SIGTERM and SIGINT ask the loop to leave at the next step that all processes look at."""

    def __init__(self) -> None:
        self.name = ""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, _: Any) -> None:
        self.name = signal.Signals(number).name

    def asked(self, world: World, step: int, every: int) -> bool:
        """Whether to stop now. Several processes agree at every `every`-th step only: agreeing waits for the device."""
        if world.size == 1:
            return bool(self.name)
        return step % every == 0 and world.any(bool(self.name))
