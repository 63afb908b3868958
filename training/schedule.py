"""Learning rate as a pure function of the step."""

import math

from training.optim import OptimConfig


def lr_factor(step: int, steps: int, cfg: OptimConfig) -> float:
    """Share of the peak learning rate at `step` (from 0) of `steps`: linear warm-up, then `cfg.schedule`."""
    if step < cfg.warmup:
        return (step + 1) / (cfg.warmup + 1)
    left = max(0.0, (steps - step) / max(1, steps - cfg.warmup))  # 1 after the warm-up, 0 at the end
    if cfg.schedule == "cosine":
        return cfg.min_lr + (1 - cfg.min_lr) * 0.5 * (1 - math.cos(math.pi * left))
    if cfg.schedule == "linear":
        return cfg.min_lr + (1 - cfg.min_lr) * left
    assert cfg.schedule == "wsd"
    falling = min(1.0, (steps - step) / max(1.0, cfg.decay * steps))  # 1 until the decay begins
    return cfg.min_lr + (1 - cfg.min_lr) * falling


def check_warmup(steps: int, cfg: OptimConfig) -> None:
    """ValueError if a wsd run of `steps` begins its decay within its warm-up: the rate would jump at the end of the warm-up."""
    if cfg.schedule == "wsd" and cfg.warmup > decay_start(steps, cfg):
        wrong = f"the warm-up of {cfg.warmup} steps ends after step {decay_start(steps, cfg)}, where the decay begins"
        raise ValueError(f"{wrong}: lower optim.warmup or optim.decay, or train for more steps")


def decay_start(steps: int, cfg: OptimConfig) -> int:
    """The step (from 0) where the decay of a wsd run of `steps` begins. Up to it, a longer run has the same learning rates."""
    return int(steps - max(1.0, cfg.decay * steps))
