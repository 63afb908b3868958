"""Skips updates whose loss or gradient norm is not finite; on a GPU without waiting for the host, which reads why later."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from training.distributed import World

ADVICE = "lower optim.lr, or lengthen optim.warmup"


class Diverged(ValueError):
    """The loss, a gradient or a weight is not finite any more."""


class Guard:
    """Calls the optimizers' step(), or skips it; after `nonfinite` skipped updates in a row, the run ends (Diverged)."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], world: World, nonfinite: int) -> None:
        self.optimizers, self.limit = optimizers, nonfinite
        self.ask_host = world.device.type == "cpu"  # where reading a flag costs nothing
        self.row = 0  # non-finite updates in a row, as far as they have been read
        self.last = math.nan, math.nan  # loss and norm of the last update that has been read
        self.unread: list[tuple[int, Tensor]] = []  # (step, [loss, norm]) on the device

    @torch.no_grad()
    def step_optimizers(self, step: int, loss: Tensor, norm: Tensor) -> None:
        """Update the weights for `step` (from 1) with this loss, the mean over all processes, and this gradient norm."""
        values = torch.stack([loss.detach().double(), norm.detach().double()])
        skip = ~values.isfinite().all()
        self.unread.append((step, values))
        for optimizer in self.optimizers:
            if not self.ask_host:
                optimizer.found_inf = skip.float()  # fused AdamW and Muon obey it, as with torch.amp.GradScaler
            if not self.ask_host or not skip:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def skipped_updates(self) -> Iterator[tuple[int, str]]:
        """The updates skipped since the last call: step (from 1), and why. Diverged after `nonfinite` of them in a row."""
        unread, self.unread = self.unread, []
        rows = torch.stack([values for _, values in unread]).tolist() if unread else []  # waits for the device once
        for (step, _), (loss, norm) in zip(unread, rows, strict=True):
            self.last = loss, norm
            if math.isfinite(loss) and math.isfinite(norm):
                self.row = 0
                continue
            self.row += 1
            yield step, f"loss {loss:.6g}, gradient norm {norm:.6g}"
            if self.row >= self.limit:
                what = f"the loss is {loss} at step {step} (gradient norm {norm})"
                raise Diverged(f"{what}, and {self.row} updates in a row were skipped: {ADVICE}")

    def refuse_bad_end(self, step: int, val_loss: float) -> None:
        """Raise Diverged if the last update or the last validation loss was not finite: such a run is not a success."""
        loss, norm = self.last if self.row else (val_loss, math.nan)
        if self.row or not math.isfinite(val_loss):
            raise Diverged(f"the loss is {loss} at step {step} (gradient norm {norm}), the last one: {ADVICE}")

    def state(self) -> dict[str, Any]:
        """What the next updates depend on, for a checkpoint."""
        return {"row": self.row}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of `state`; a checkpoint that was written without a guard has none."""
        self.row = state.get("row", 0)
