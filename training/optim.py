"""AdamW and Muon over parameter groups in which every parameter stands exactly once, their learning rates, and skipped updates.

Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon) makes one iteration for all matrices of a shape.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from training.distributed import World, local, slow_bfloat16

ADVICE = "lower optim.lr, or lengthen optim.warmup"
GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 warns of the older name


@dataclass
class OptimConfig:
    """Optimizer, learning rates and their schedule.

    schedule: after the warm-up, cosine and linear fall from the peak to min_lr * peak at the end; wsd (warmup-stable-decay)
    stays at the peak and falls linearly to min_lr * peak over the last share `decay` of the steps.
    """

    name: Annotated[str, ("adamw", "muon")] = "adamw"  # muon: for the matrices of the blocks, with adamw for the rest
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
    decays = {"decayed": cfg.weight_decay, "undecayed": 0.0, "scalars": 0.0}
    groups = [_group(split[name], cfg.lr, decay) for name, decay in decays.items() if split[name]]
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
    for optimizer, name, p in _named(optimizers):
        keys = [key for key in REMEMBERED[type(optimizer).__name__] if f"{name}/{key}" in tensors]
        optimizer.state[p] = {key: tensors[f"{name}/{key}"] for key in keys}


class Muon(torch.optim.Muon):
    """torch.optim.Muon (state, groups, update), computed for stacks of matrices, which the processes share out.

    world: the processes that hold the same matrices (DDP); None: this one alone. Where `found_inf` () is 1, which
    the Guard sets, a step leaves weights and state as they are.
    """

    def __init__(self, params: Iterable[dict], world: World | None = None, **options: Any) -> None:
        super().__init__(params, **options)
        self.rank, self.processes = (world.rank, world.size) if world else (0, 1)
        self.found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            shaped = sorted((p for p in group["params"] if p.grad is not None), key=lambda p: p.shape)
            for shape, same in groupby(shaped, key=lambda p: p.shape):
                self._update(list(same), group, max(1.0, shape[0] / shape[1]) ** 0.5)

    def _update(self, params: list[Tensor], group: dict, scale: float) -> None:
        """One step of `params`, matrices of one shape (as torch.optim.Muon with adjust_lr_fn=original)."""
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
        share = Share(params[0], len(params), self.rank, self.processes)
        weights, grads = [local(p) for p in params], [local(p.grad) for p in params]
        momenta = [local(self.state[p]["momentum_buffer"]) for p in params]
        decay = 1 - group["lr"] * group["weight_decay"]
        if self.found_inf is not None:
            skip = self.found_inf.bool()
            for grad, momentum in zip(grads, momenta, strict=True):
                torch.where(skip, momentum, grad, out=grad)  # averaged with itself, the momentum stays the same
            decay = torch.where(skip, 1.0, decay)
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        steps = torch._foreach_lerp(grads, momenta, group["momentum"]) if group["nesterov"] else momenta
        x = share.take(torch.stack([step.bfloat16() for step in steps]))  # (matrices of this process, rows, columns)
        tall = x.shape[1] > x.shape[2]  # transposed, x has the smaller Gram matrix
        x = orthogonalized(x.mT.contiguous() if tall else x, group["ns_coefficients"], group["ns_steps"], group["eps"])
        updates = share.give(x.mT if tall else x)
        if self.found_inf is not None:
            updates = updates * (1 - self.found_inf).to(updates.dtype)
        torch._foreach_mul_(weights, decay)
        torch._foreach_add_(weights, [update.to(weights[0].dtype) for update in updates], alpha=-group["lr"] * scale)


class Share:
    """Shares out `count` matrices like `p`: each process works on an equal number of whole ones, and all get the results."""

    def __init__(self, p: Tensor, count: int, rank: int, processes: int) -> None:
        self.group: dist.ProcessGroup | None = None
        self.split, self.count, self.rank, self.processes = isinstance(p, DTensor), count, rank, processes
        if self.split:
            self.group = p.device_mesh.get_group("shard")
            self.rank, self.processes = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.each = -(-count // self.processes)  # matrices of a process; zeros, which stay zero, fill the last shares
        self.rows, self.held = p.shape[0], len(local(p))
        self.most = -(-self.rows // self.processes)  # rows of a split matrix that a process holds; the last ones hold fewer

    def take(self, stack: Tensor) -> Tensor:
        """From `stack`, all matrices (count, rows held here, columns), to whole ones of this share: (each, rows, columns)."""
        if self.processes == 1:
            return stack
        filled = (0, 0, 0, self.most - self.held if self.split else 0, 0, self.each * self.processes - self.count)
        stack = F.pad(stack, filled)
        if not self.split:
            return stack[self.rank * self.each : (self.rank + 1) * self.each]
        parts = self._exchanged(stack).unflatten(0, (self.processes, self.each))  # (processes, each, most, columns)
        return parts.transpose(0, 1).flatten(1, 2)[:, : self.rows].contiguous()

    def give(self, results: Tensor) -> Tensor:
        """The inverse of `take`: from results (each, rows, columns) to all matrices (count, rows held here, columns)."""
        if self.processes == 1:
            return results
        if not self.split:
            whole = results.new_empty(self.each * self.processes, *results.shape[1:])
            GATHER(whole, results.contiguous())
            return whole[: self.count]
        parts = F.pad(results, (0, 0, 0, self.most * self.processes - self.rows)).unflatten(1, (self.processes, self.most))
        return self._exchanged(parts.transpose(0, 1).flatten(0, 1))[: self.count, : self.held]

    def _exchanged(self, parts: Tensor) -> Tensor:
        """All-to-all over the first dimension: part i goes to process i; returns the parts sent to this process, by sender."""
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=self.group)
        return received


def orthogonalized(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Newton-Schulz: each matrix of x (matrices, m, n) with singular values of about 1; products are rounded to x's dtype."""
    a, b, c = coefficients
    rounded_to, x = x.dtype, x / x.flatten(1).norm(dim=1).clamp(min=eps).view(-1, 1, 1)
    if x.dtype == torch.bfloat16 and slow_bfloat16(x.device):
        x = x.float()
    for _ in range(steps):
        gram = (x @ x.mT).to(rounded_to).to(x.dtype)
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c).to(rounded_to).to(x.dtype)
        x = torch.baddbmm(x, gram, x, beta=a).to(rounded_to).to(x.dtype)
    return x.to(rounded_to)


class Diverged(ValueError):
    """The loss, a gradient or a weight is not finite any more."""


class Guard:
    """Calls the optimizers' step(), or skips it; after `nonfinite` skipped updates in a row, the run ends (Diverged)."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], world: World, nonfinite: int) -> None:
        self.optimizers, self.limit = optimizers, nonfinite
        self.ask_host = world.device.type == "cpu"  # where reading a flag costs nothing
        self.in_a_row = 0  # non-finite updates in a row, as far as they have been read
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
                self.in_a_row = 0
                continue
            self.in_a_row += 1
            yield step, f"loss {loss:.6g}, gradient norm {norm:.6g}"
            if self.in_a_row >= self.limit:
                what = f"the loss is {loss} at step {step} (gradient norm {norm})"
                raise Diverged(f"{what}, and {self.in_a_row} updates in a row were skipped: {ADVICE}")

    def refuse_bad_end(self, step: int, val_loss: float) -> None:
        """Raise Diverged if the last update or the last validation loss was not finite: such a run is not a success."""
        loss, norm = self.last if self.in_a_row else (val_loss, math.nan)
        if self.in_a_row or not math.isfinite(val_loss):
            raise Diverged(f"the loss is {loss} at step {step} (gradient norm {norm}), the last one: {ADVICE}")
