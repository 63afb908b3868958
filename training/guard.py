"""Updates that must not happen: a loss or gradient norm that is no number, or, where asked, far from the last ones.

Such an update is skipped and said. On a GPU it is skipped without asking the host, who reads the reasons later.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from training.distributed import World

WINDOW = 64  # updates that an outlier is told from
STUCK = 3  # so many outliers in a row are the new normal: they enter the window


class Diverged(ValueError):
    """The loss is no finite number any more."""


class Skipped(NamedTuple):
    """An update that was skipped: of which step (from 1), and the loss and gradient norm that it had."""

    step: int
    loss: float
    norm: float

    def line(self, batch: int) -> dict[str, Any]:
        """Of metrics.jsonl: why, and the first and last number of the `batch` samples of the step."""
        why = f"loss {self.loss:.6g}, gradient norm {self.norm:.6g}"
        return {"step": self.step, "skipped": why, "samples": [(self.step - 1) * batch, self.step * batch - 1]}

    def text(self, steps: int, batch: int) -> str:
        """Of the terminal."""
        line = self.line(batch)
        first, last = line["samples"]
        return f"step {self.step}/{steps} | update skipped: {line['skipped']} | samples {first} to {last}"


class Guard:
    """Steps the optimizers, unless loss or gradient norm forbid it; ends the run after `nonfinite` bad ones in a row.

    outlier_z: skip as well where loss or norm lie more than so many standard deviations above their mean over the last
    `WINDOW` updates, themselves included (None: never). Outliers stay out of that window, but for every third in a row.
    The rule is llm.c's (llmc/outlier_detector.h, karpathy/llm.c at 19c83f9); non-finite values never enter the window.
    """

    def __init__(
        self, optimizers: list[torch.optim.Optimizer], world: World, nonfinite: int, outlier_z: float | None
    ) -> None:
        self.optimizers, self.world, self.limit, self.outlier_z = optimizers, world, nonfinite, outlier_z
        self.ask_host = world.device.type == "cpu"  # where asking costs nothing
        self.row = 0  # non-finite updates in a row, as far as they have been read
        self.unread: list[tuple[int, Tensor]] = []  # (step, [loss, norm, skipped]) on the device
        self.window = torch.zeros(2, WINDOW, dtype=torch.float64, device=world.device)  # of loss and norm
        self.seen = torch.zeros(2, dtype=torch.int64, device=world.device)  # values that entered each
        self.outliers = torch.zeros(2, dtype=torch.int64, device=world.device)  # in a row

    @torch.no_grad()
    def update(self, step: int, loss: Tensor, norm: Tensor) -> None:
        """Update the weights for `step` (from 1) with this loss, the mean over all processes, and this gradient norm."""
        values = torch.stack([loss.detach().double(), norm.detach().double()])
        skip = ~values.isfinite().all()
        if self.outlier_z is not None:
            skip = skip | self._outlier(values)
        self.unread.append((step, torch.cat([values, skip.double()[None]])))
        if self.ask_host:
            if not skip:
                for optimizer in self.optimizers:
                    optimizer.step()
        else:
            for optimizer in self.optimizers:
                step_unless(skip, optimizer)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _outlier(self, values: Tensor) -> Tensor:
        """Whether loss or norm (2,) is an outlier of its window; then the window takes what it is to remember."""
        here = torch.arange(WINDOW, device=values.device) == (self.seen % WINDOW)[:, None]  # (2, WINDOW)
        window = torch.where(here, values[:, None], self.window)
        z = (values - window.mean(1)) / window.std(1, correction=0)  # of equal values: 0 / 0, which is no outlier
        finite, full = values.isfinite(), self.seen >= WINDOW
        outlier = finite & full & (z > self.outlier_z)
        self.outliers = torch.where(outlier, self.outliers + 1, torch.where(finite, 0, self.outliers))
        keep = finite & (~outlier | (self.outliers >= STUCK))
        self.window = torch.where(keep[:, None], window, self.window)
        self.seen = self.seen + keep
        return outlier.any()

    def read(self) -> list[Skipped]:
        """What was skipped since the last call. Diverged after `nonfinite` non-finite updates in a row."""
        if not self.unread:
            return []
        steps, rows = zip(*self.unread, strict=True)
        self.unread, skipped = [], []
        for step, (loss, norm, skip) in zip(steps, torch.stack(rows).tolist(), strict=True):
            self.row = 0 if math.isfinite(loss) and math.isfinite(norm) else self.row + 1
            if skip:
                skipped.append(Skipped(step, loss, norm))
            if self.row >= self.limit:
                what = f"the loss is {loss} at step {step} (gradient norm {norm})"
                raise Diverged(f"{what}, and {self.row} updates in a row were skipped: {ADVICE}")
        return skipped

    def refuse_bad_end(self, step: int, val_loss: float) -> None:
        """Diverged where the last update was skipped as no number, or the last model gives none: that is no success."""
        if self.row or not math.isfinite(val_loss):
            loss = val_loss if not self.row else math.nan
            raise Diverged(f"the loss is {loss} at step {step}, the last one: {ADVICE}")

    def state(self) -> dict[str, Any]:
        """What the next updates depend on, as plain numbers for a checkpoint."""
        names = ("window", "seen", "outliers") if self.outlier_z is not None else ()
        return {"row": self.row} | {name: getattr(self, name).tolist() for name in names}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of `state`; an older checkpoint without one leaves a new guard as it is."""
        self.row = state.get("row", 0)
        for name in ("window", "seen", "outliers"):
            if name in state and self.outlier_z is not None:
                now = getattr(self, name)
                setattr(self, name, torch.tensor(state[name], dtype=now.dtype, device=now.device).reshape(now.shape))


ADVICE = "lower optim.lr, or lengthen optim.warmup"


def step_unless(skip: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()` where the device's flag `skip` () is false; else neither weights nor state change.

    Fused AdamW takes the flag itself, as it does from torch.amp.GradScaler. Another optimizer steps on cleaned gradients,
    and its weights and state are put back.
    """
    if optimizer.defaults.get("fused"):
        optimizer.found_inf = skip.float()
        optimizer.step()
        return
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    before = [(p, p.detach().clone(), {k: v.clone() for k, v in optimizer.state[p].items()}) for p in params]
    optimizer.step()
    for p, weights, state in before:
        p.copy_(torch.where(skip, weights, p))
        for key, value in optimizer.state[p].items():
            value.copy_(torch.where(skip, state.get(key, torch.zeros_like(value)), value))
