"""Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon), with one iteration for all matrices of a shape."""

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from training.distributed import World, local, slow_bfloat16

GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 warns of the older name


class Muon(torch.optim.Muon):
    """torch.optim.Muon (state, groups, update), computed for stacks of matrices, which the processes share out.

    world: the processes that hold the same matrices (DDP); None: this one alone. Where `found_inf` () is 1, which
    training.guard sets, a step leaves weights and state as they are.
    """

    _step_supports_amp_scaling = True

    def __init__(self, params: Iterable[dict], world: World | None = None, **options: Any) -> None:
        super().__init__(params, **options)
        self.rank, self.processes = (world.rank, world.size) if world else (0, 1)
        self.found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        if closure:
            return super().step(closure)
        for group in self.param_groups:
            shaped = sorted((p for p in group["params"] if p.grad is not None), key=lambda p: p.shape)
            for shape, same in groupby(shaped, key=lambda p: p.shape):
                self._update(list(same), group, max(1.0, shape[0] / shape[1]) ** 0.5)
        return None

    def _update(self, params: list[Tensor], group: dict, scale: float) -> None:
        """One step of `params`, matrices of one shape (as torch.optim.Muon with adjust_lr_fn=original)."""
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
        share = Share(params[0], len(params), self.rank, self.processes)
        held, grads = [local(p) for p in params], [local(p.grad) for p in params]
        sums = [local(self.state[p]["momentum_buffer"]) for p in params]
        decay = 1 - group["lr"] * group["weight_decay"]
        if self.found_inf is not None:
            skip = self.found_inf.bool()
            for grad, mean in zip(grads, sums, strict=True):
                torch.where(skip, mean, grad, out=grad)  # such a gradient leaves the mean as it is
            decay = torch.where(skip, 1.0, decay)
        torch._foreach_lerp_(sums, grads, 1 - group["momentum"])
        steps = torch._foreach_lerp(grads, sums, group["momentum"]) if group["nesterov"] else sums
        x = share.take(torch.stack([step.bfloat16() for step in steps]))  # (matrices of this process, rows, columns)
        turned = x.shape[1] > x.shape[2]
        x = orthogonalized(x.mT.contiguous() if turned else x, group["ns_coefficients"], group["ns_steps"], group["eps"])
        updates = share.give(x.mT if turned else x)
        if self.found_inf is not None:
            updates = updates * (1 - self.found_inf).to(updates.dtype)
        torch._foreach_mul_(held, decay)
        torch._foreach_add_(held, [update.to(held[0].dtype) for update in updates], alpha=-group["lr"] * scale)


class Share:
    """Gives each process an equal number of `count` matrices like `p` to work on, and all of them the results."""

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
        """The matrices of this process's share (each, rows, columns), of all `stack` (count, rows that it holds, columns)."""
        if self.processes == 1:
            return stack
        filled = (0, 0, 0, self.most - self.held if self.split else 0, 0, self.each * self.processes - self.count)
        stack = F.pad(stack, filled)
        if not self.split:
            return stack[self.rank * self.each : (self.rank + 1) * self.each]
        parts = self._exchanged(stack).unflatten(0, (self.processes, self.each))  # (processes, each, most, columns)
        return parts.transpose(0, 1).flatten(1, 2)[:, : self.rows].contiguous()

    def give(self, results: Tensor) -> Tensor:
        """The inverse: what this process holds of the results of all processes (count, rows that it holds, columns)."""
        if self.processes == 1:
            return results
        if not self.split:
            whole = results.new_empty(self.each * self.processes, *results.shape[1:])
            GATHER(whole, results.contiguous())
            return whole[: self.count]
        parts = F.pad(results, (0, 0, 0, self.most * self.processes - self.rows)).unflatten(1, (self.processes, self.most))
        return self._exchanged(parts.transpose(0, 1).flatten(0, 1))[: self.count, : self.held]

    def _exchanged(self, parts: Tensor) -> Tensor:
        """Equal parts of the first dimension: part i goes to process i, and the result has those for this process in order."""
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
