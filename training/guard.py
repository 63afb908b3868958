"""Skips updates whose loss or gradient norm is not finite or, if `outlier_z` is set, far above the last ones.

A skipped update is logged. On a GPU the device skips it without waiting for the host, which reads the reasons later.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from training.distributed import World

WINDOW = 64  # updates that an outlier is compared with
STUCK = 3  # this many outliers in a row are the new normal: the last one and all that follow enter the window
WINDOW_STATE = ("window", "seen", "outliers")
ADVICE = "lower optim.lr, or lengthen optim.warmup"


class Diverged(ValueError):
    """The loss, a gradient or a weight is not finite any more."""


class Guard:
    """Calls the optimizers' step(), and skips the call if the loss or the gradient norm is not finite or an outlier.

    nonfinite: after so many non-finite updates in a row, the run ends (Diverged). outlier_z: a loss or norm is an outlier if it
    lies more than `outlier_z` standard deviations above its mean over the last `WINDOW` updates, this one included; None: none
    are. The rule is llm.c's (llmc/outlier_detector.h, karpathy/llm.c at 19c83f9); non-finite values never enter the window.
    """

    def __init__(self, optimizers: list[torch.optim.Optimizer], world: World, nonfinite: int, outlier_z: float | None) -> None:
        self.optimizers, self.limit, self.outlier_z = optimizers, nonfinite, outlier_z
        self.ask_host = world.device.type == "cpu"  # where reading a flag costs nothing
        self.row = 0  # non-finite updates in a row, as far as they have been read
        self.last = math.nan, math.nan  # loss and norm of the last update that has been read
        self.unread: list[tuple[int, Tensor]] = []  # (step, [loss, norm, skipped]) on the device
        self.window = torch.zeros(2, WINDOW, dtype=torch.float64, device=world.device)  # of loss and norm
        self.seen = torch.zeros(2, dtype=torch.int64, device=world.device)  # values that entered each window
        self.outliers = torch.zeros(2, dtype=torch.int64, device=world.device)  # in a row

    @torch.no_grad()
    def step_optimizers(self, step: int, loss: Tensor, norm: Tensor) -> None:
        """Update the weights for `step` (from 1) with this loss, the mean over all processes, and this gradient norm."""
        values = torch.stack([loss.detach().double(), norm.detach().double()])
        skip = ~values.isfinite().all()
        if self.outlier_z is not None:
            skip = skip | self._outlier(values)
        self.unread.append((step, torch.cat([values, skip.double()[None]])))
        for optimizer in self.optimizers:
            if not self.ask_host:
                optimizer.found_inf = skip.float()  # fused AdamW and Muon obey it, as with torch.amp.GradScaler
            if not self.ask_host or not skip:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def _outlier(self, values: Tensor) -> Tensor:
        """Whether loss or norm (2,) is an outlier of its window; afterwards each accepted value enters its window."""
        here = torch.arange(WINDOW, device=values.device) == (self.seen % WINDOW)[:, None]  # (2, WINDOW)
        window = torch.where(here, values[:, None], self.window)
        z = (values - window.mean(1)) / window.std(1, correction=0)  # equal values give 0 / 0, which is no outlier
        finite, full = values.isfinite(), self.seen >= WINDOW
        outlier = finite & full & (z > self.outlier_z)
        self.outliers = torch.where(outlier, self.outliers + 1, torch.where(finite, 0, self.outliers))
        keep = finite & (~outlier | (self.outliers >= STUCK))
        self.window = torch.where(keep[:, None], window, self.window)
        self.seen = self.seen + keep
        return outlier.any()

    def skipped_updates(self) -> Iterator[tuple[int, str]]:
        """The updates skipped since the last call: step (from 1), and why. Diverged after `nonfinite` bad ones in a row."""
        unread, self.unread = self.unread, []
        rows = torch.stack([values for _, values in unread]).tolist() if unread else []  # waits for the device once
        for (step, _), (loss, norm, skip) in zip(unread, rows, strict=True):
            self.row = 0 if math.isfinite(loss) and math.isfinite(norm) else self.row + 1
            self.last = loss, norm
            if skip:
                yield step, f"loss {loss:.6g}, gradient norm {norm:.6g}"
            if self.row >= self.limit:
                what = f"the loss is {loss} at step {step} (gradient norm {norm})"
                raise Diverged(f"{what}, and {self.row} updates in a row were skipped: {ADVICE}")

    def refuse_bad_end(self, step: int, val_loss: float) -> None:
        """Raise Diverged if the last update or the last validation loss was not finite: such a run is not a success."""
        if self.row:
            loss, norm = self.last
            raise Diverged(f"the loss is {loss} at step {step} (gradient norm {norm}), the last one: {ADVICE}")
        if not math.isfinite(val_loss):
            raise Diverged(f"the loss is {val_loss} at step {step}, the last one: {ADVICE}")

    def state(self) -> dict[str, Any]:
        """What the next updates depend on, as plain numbers for a checkpoint."""
        names = WINDOW_STATE if self.outlier_z is not None else ()
        return {"row": self.row} | {name: getattr(self, name).tolist() for name in names}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of `state`, which may be empty (in an older checkpoint)."""
        self.row = state.get("row", 0)
        for name in WINDOW_STATE:
            if name in state and self.outlier_z is not None:
                setattr(self, name, torch.tensor(state[name]).to(getattr(self, name)))
