"""AdamW and Muon over parameter groups in which every parameter stands exactly once, and their learning rates."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from training.distributed import World
from training.muon import Muon


@dataclass
class OptimConfig:
    """Optimizer, learning rates and their schedule.

    schedule: after the warm-up, cosine and linear fall from the peak to min_lr * peak at the end; wsd (warmup-stable-decay)
    stays at the peak and falls linearly to min_lr * peak over the last share `decay` of the steps.
    """

    name: Annotated[str, ("adamw", "muon")] = (
        "adamw"  # adamw: for all parameters; muon: for the matrices of the blocks, with adamw for the rest
    )
    lr: Annotated[float, "[0, inf)"] = 1e-3  # peak learning rate of AdamW
    muon_lr: Annotated[float, "[0, inf)"] = 0.02  # peak learning rate of Muon
    beta1: Annotated[float, "[0, 1)"] = 0.9  # AdamW: decay rate of the mean gradient
    beta2: Annotated[float, "[0, 1)"] = 0.95  # AdamW: decay rate of the mean squared gradient
    momentum: Annotated[float, "[0, 1)"] = 0.95  # Muon: momentum
    eps: Annotated[float, "[0, inf)"] = 1e-8  # AdamW: added to the denominator
    weight_decay: Annotated[float, "[0, inf)"] = 0.1  # decoupled weight decay, multiplied by the learning rate
    clip: Annotated[float, "[0, inf)"] = 1.0  # largest global gradient norm; 0: no limit
    schedule: Annotated[str, ("cosine", "linear", "wsd")] = "cosine"  # of the learning rate
    warmup: Annotated[int, "[0, inf)"] = 100  # steps over which learning rates rise to their peaks
    decay: Annotated[float, "[0, 1]"] = 0.2  # wsd: last share of the steps, over which learning rates fall
    min_lr: Annotated[float, "[0, 1]"] = 0.1  # learning rate at the end, as a share of the peak


def build_optimizers(model: nn.Module, cfg: OptimConfig, world: World | None = None) -> list[torch.optim.Optimizer]:
    """The optimizers of `model`; each group carries its parameters' names and its `peak_lr`. world: shares Muon's work."""
    split: dict[str, list[tuple[str, Tensor]]] = {"muon": [], "decayed": [], "undecayed": [], "scalars": []}
    modules = model.named_modules()
    undecayed = tuple(f"{path}.{part}.".lstrip(".") for path, m in modules for part in getattr(m, "undecayed", ()))
    for name, p in model.named_parameters():
        split[_group_of(name, p, undecayed, cfg.name == "muon")].append((name, p))
    optimizers: list[torch.optim.Optimizer] = []
    if split["muon"]:
        group = _group(split["muon"], cfg.muon_lr, cfg.weight_decay)
        optimizers.append(Muon([group], world, momentum=cfg.momentum))
    adamw = [_group(split["decayed"], cfg.lr, cfg.weight_decay)]
    adamw += [_group(split[name], cfg.lr, 0.0) for name in ("undecayed", "scalars")]
    groups = [group for group in adamw if group["params"]]
    optimizers.append(torch.optim.AdamW(groups, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, fused=True))
    return optimizers


def _group_of(name: str, p: Tensor, undecayed: tuple[str, ...], muon: bool) -> str:
    if not p.dim():
        return "scalars"  # a separate group, because no kernel takes split tensors and scalars together
    if p.dim() == 1 or f"{name}.".startswith(undecayed):
        return "undecayed"
    return "muon" if muon and p.dim() == 2 and name.startswith("blocks.") else "decayed"


def _group(members: list[tuple[str, Tensor]], lr: float, weight_decay: float) -> dict:
    names, params = [name for name, _ in members], [p for _, p in members]
    return {"params": params, "names": names, "lr": lr, "peak_lr": lr, "weight_decay": weight_decay}


def set_lr(optimizers: list[torch.optim.Optimizer], step: int, steps: int, cfg: OptimConfig) -> float:
    """Give every group its learning rate at `step` (from 0) of `steps`; returns AdamW's, the one that is logged."""
    factor = lr_factor(step, steps, cfg)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
    return optimizers[-1].param_groups[0]["lr"]


def lr_factor(step: int, steps: int, cfg: OptimConfig) -> float:
    """Share of the peak learning rate at `step` (from 0) of `steps`: linear warm-up, then `cfg.schedule`."""
    if step < cfg.warmup:
        return (step + 1) / (cfg.warmup + 1)
    left = max(0.0, (steps - step) / max(1, steps - cfg.warmup))  # 1 after the warm-up, 0 at the end
    shape = {
        "cosine": 0.5 * (1 - math.cos(math.pi * left)),
        "linear": left,
        "wsd": min(1.0, (steps - step) / max(1.0, cfg.decay * steps)),  # 1 until the decay begins
    }[cfg.schedule]
    return cfg.min_lr + (1 - cfg.min_lr) * shape


def check_warmup(steps: int, cfg: OptimConfig) -> None:
    """ValueError if a wsd run of `steps` begins its decay within its warm-up: the rate would jump at the end of the warm-up."""
    if cfg.schedule == "wsd" and cfg.warmup > decay_start(steps, cfg):
        wrong = f"the warm-up of {cfg.warmup} steps ends after step {decay_start(steps, cfg)}, where the decay begins"
        raise ValueError(f"{wrong}: lower optim.warmup or optim.decay, or train for more steps")


def decay_start(steps: int, cfg: OptimConfig) -> int:
    """The step (from 0) where the decay of a wsd run of `steps` begins; up to it, a longer run has the same rates."""
    return int(steps - max(1.0, cfg.decay * steps))


def _named(optimizers: list[torch.optim.Optimizer]) -> Iterator[tuple[torch.optim.Optimizer, str, Tensor]]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name, p in zip(group["names"], group["params"], strict=True):
                yield optimizer, name, p


def state_tensors(optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """All optimizer state as tensors named PARAMETER/KEY."""
    return {f"{name}/{key}": value for optimizer, name, p in _named(optimizers) for key, value in optimizer.state[p].items()}


# The state that each optimizer keeps per parameter: True if shaped like the parameter, False for a single number.
REMEMBERED = {"AdamW": {"step": False, "exp_avg": True, "exp_avg_sq": True}, "Muon": {"momentum_buffer": True}}


def state_shapes(optimizers: list[torch.optim.Optimizer]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Names of `state_tensors` -> shape and type, of optimizers that have stepped at least once."""
    shapes = {}
    for optimizer, name, p in _named(optimizers):
        for key, like_parameter in REMEMBERED[type(optimizer).__name__].items():
            shapes[f"{name}/{key}"] = (p.shape, p.dtype) if like_parameter else (torch.Size(), torch.float32)
    return shapes


def load_state(optimizers: list[torch.optim.Optimizer], tensors: dict[str, Tensor]) -> None:
    """The inverse of `state_tensors`, for optimizers over the same parameters (the caller has compared `state_shapes`)."""
    of: dict[str, dict[str, Tensor]] = {}
    for path, tensor in tensors.items():
        name, key = path.rsplit("/", 1)
        of.setdefault(name, {})[key] = tensor
    for optimizer, name, p in _named(optimizers):
        optimizer.state[p] = of.get(name, {})
