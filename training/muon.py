"""Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon), with one iteration for all matrices of a shape."""

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from training.distributed import World, slow_bfloat16

GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 warns of the older name


class Muon(torch.optim.Muon):
    """torch.optim.Muon with the same update, computed for a few stacks of matrices instead of one matrix after the other.

    State, groups and learning rates are those of torch.optim.Muon. Under DDP, where all processes hold the same matrices, each
    process iterates on its share of a stack, and then all processes gather the updates. Split matrices (FSDP) use the step of
    torch.optim.Muon. world: the processes; None: this process alone.

    If all matrices are whole, a step obeys `found_inf` (), which training.guard.step_unless sets as torch.amp.GradScaler does:
    where it is 1, neither weights nor state change.
    """

    def __init__(self, params: Iterable[dict], world: World | None = None, **options: Any) -> None:
        super().__init__(params, **options)
        self.rank, self.processes = (world.rank, world.size) if world else (0, 1)
        self.found_inf: Tensor | None = None
        self._step_supports_amp_scaling = not self._split()

    def _split(self) -> bool:
        return any(isinstance(p, DTensor) for group in self.param_groups for p in group["params"])

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        if closure or self._split():
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
        grads, sums = [p.grad for p in params], [self.state[p]["momentum_buffer"] for p in params]
        decay = 1 - group["lr"] * group["weight_decay"]
        if self.found_inf is not None:
            skip = self.found_inf.bool()
            for grad, mean in zip(grads, sums, strict=True):
                torch.where(skip, mean, grad, out=grad)  # such a gradient leaves the mean as it is
            decay = torch.where(skip, 1.0, decay)
        torch._foreach_lerp_(sums, grads, 1 - group["momentum"])
        steps = torch._foreach_lerp(grads, sums, group["momentum"]) if group["nesterov"] else sums
        turned = params[0].shape[0] > params[0].shape[1]
        stack = torch.stack([(step.mT if turned else step).bfloat16() for step in steps])  # (matrices, m, n), m <= n
        updates = self._shared_out(stack, group["ns_coefficients"], group["ns_steps"], group["eps"])
        if self.found_inf is not None:
            updates = updates * (1 - self.found_inf).to(updates.dtype)
        updates = [(x.mT if turned else x).to(p.dtype) for x, p in zip(updates.unbind(), params, strict=True)]
        torch._foreach_mul_(params, decay)
        torch._foreach_add_(params, updates, alpha=-group["lr"] * scale)

    def _shared_out(self, stack: Tensor, *options: Any) -> Tensor:
        """`orthogonalized` of the stack; each process computes an equal number of its matrices."""
        if self.processes == 1:
            return orthogonalized(stack, *options)
        each = -(-len(stack) // self.processes)
        whole = F.pad(stack, (0, 0, 0, 0, 0, each * self.processes - len(stack)))  # zero matrices stay zero
        own = orthogonalized(whole[self.rank * each : (self.rank + 1) * each], *options).contiguous()
        GATHER(whole, own)
        return whole[: len(stack)]


def orthogonalized(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Newton-Schulz: each matrix of x (matrices, m, n) with the same singular vectors, but singular values of about 1.

    Every product is rounded to the dtype of x, bfloat16, also where a processor computes it in float32 (`products_in`).
    """
    a, b, c = coefficients
    rounded_to, x = x.dtype, x / x.flatten(1).norm(dim=1).clamp(min=eps).view(-1, 1, 1)
    x = x.to(products_in(x))
    for _ in range(steps):
        gram = (x @ x.mT).to(rounded_to).to(x.dtype)
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c).to(rounded_to).to(x.dtype)
        x = torch.baddbmm(x, gram, x, beta=a).to(rounded_to).to(x.dtype)
    return x.to(rounded_to)


def products_in(x: Tensor) -> torch.dtype:
    """The dtype in which matrix products of x are fast: float32 for bfloat16 on a processor that cannot multiply bfloat16."""
    return torch.float32 if x.dtype == torch.bfloat16 and slow_bfloat16(x.device) else x.dtype
