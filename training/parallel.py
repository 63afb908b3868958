"""How several processes train one model: whole copies (DDP), or parameters, gradients and optimizer state split (FSDP2).

The engines are torch's own: DistributedDataParallel, and `fully_shard` on each block and on the root (Zhao et al., PyTorch
FSDP, arXiv 2304.11277). What they leave to their caller is here: scalars, the gradient norm, accumulation.
"""

import contextlib
import inspect
import os

import torch
import torch._functorch.config as partitioner
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from model.attention.base import check_choice
from model.decoder import Decoder
from training.distributed import World

KINDS = ("ddp", "fsdp", "hsdp")
KEEP_INPUTS = "ban_recompute_materialized_backward"  # torch's option to keep all inputs of matrix products, private
GRAPHS = 128  # most compiled versions of one piece of code: one for each model of a bench, or layer of a split model


def compile_steps(model: nn.Module) -> nn.Module:
    """`model`, on its device, compiled for training steps whose inputs have one shape.

    On a CPU the compiled backward pass computes the norms' outputs again instead of keeping them, which saves memory at about
    the same speed (docs/PERFORMANCE.md). torch keeps them by default, because they are inputs of matrix products.
    """
    if next(model.parameters()).device.type == "cpu" and hasattr(partitioner, KEEP_INPUTS):
        setattr(partitioner, KEEP_INPUTS, False)
    # All models share the code of their layers, and torch by itself compiles a piece of code at most 8 times per process, then
    # runs it uncompiled. A bench builds its models before it calls the first; a sweep's runs need the reset, however many.
    torch.compiler.reset()
    torch._dynamo.config.recompile_limit = GRAPHS
    torch._dynamo.config.accumulated_recompile_limit = 8 * GRAPHS
    return torch.compile(model, dynamic=False)


class Parallel:
    """`model` on all processes of `world`, on their devices; `net` is what a training step calls.

    kind: ddp (every process holds a whole copy), fsdp (parameters, gradients and optimizer state are split over all
    processes) or hsdp (each group of `shard` processes holds one copy, split over the group; None: the processes of one
    machine). A single process holds the whole model for every kind. Optimizers must be built afterwards: splitting replaces
    the parameters. compiled: compile `net`, not `model`. ValueError for an unknown kind, an impossible number of processes, or
    a `shard` without hsdp.
    """

    def __init__(self, model: Decoder, world: World, kind: str = "ddp", shard: int | None = None, compiled: bool = False):
        check_choice("parallel", kind, KINDS)
        if shard is not None and kind != "hsdp":
            raise ValueError(f"shard_processes={shard} is for parallel=hsdp only: leave it out, or use parallel=hsdp")
        self.model, self.world, self.kind = model, world, kind
        # If sharded, all processes must take part in every forward pass and every gathering.
        self.sharded = kind != "ddp" and world.size > 1
        if self.sharded:
            self.mesh = make_mesh(world, kind, shard)
            scalars = {p for p in model.parameters() if not p.dim()}  # they have no dimension to split
            for part in (*model.blocks, model):
                fully_shard(part, mesh=self.mesh, ignored_params=scalars)
        model.to(world.device)
        self.net: nn.Module = compile_steps(model) if compiled else model
        if world.size > 1 and not self.sharded:
            self.net = _ddp(self.net)

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager:
        """A context for the passes of a micro batch: gradients are averaged in the `last` micro batch of a step only.

        In the micro batches before, fsdp keeps unsharded gradients; hsdp keeps split gradients, which it has reduced over the
        processes of a copy, but not yet over the copies.
        """
        if not self.sharded:
            return contextlib.nullcontext() if last or self.world.size == 1 else self.net.no_sync()
        if self.kind == "fsdp":
            self.model.set_requires_gradient_sync(last)
        else:
            self.model.set_requires_all_reduce(last)
        return contextlib.nullcontext()

    def clip_grad_norm(self, limit: float) -> Tensor:
        """Scale the gradients to a global norm of at most `limit` (0: no limit); returns the norm before scaling."""
        if not self.sharded:
            return nn.utils.clip_grad_norm_(self.model.parameters(), limit or float("inf"))
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        split = [grad.to_local() for grad in grads if isinstance(grad, DTensor)]
        scalars = [grad for grad in grads if not isinstance(grad, DTensor)]
        if scalars:
            mean = self.world.mean(torch.stack(scalars))  # FSDP does not average the gradients of scalars
            torch._foreach_copy_(scalars, list(mean))
        square = nn.utils.get_total_norm(split).square()
        dist.all_reduce(square, group=self.mesh.get_group("shard"))
        norm = (square + sum(grad.square() for grad in scalars)).sqrt()
        if limit:
            torch._foreach_mul_([*split, *scalars], (limit / (norm + 1e-6)).clamp(max=1.0))  # as clip_grad_norm_
        return norm


def make_mesh(world: World, kind: str, shard: int | None) -> DeviceMesh:
    """The device mesh: (processes,) named `shard` for fsdp; (copies, shard) named `replicate` and `shard` for hsdp."""
    if kind == "fsdp":
        return init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("shard",))
    shard = shard or int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    if world.size % shard:
        raise ValueError(f"shard_processes={shard} cannot divide {world.size} processes: use a divisor of {world.size}")
    shape = (world.size // shard, shard)
    return init_device_mesh(world.device.type, shape, mesh_dim_names=("replicate", "shard"))


def _ddp(net: nn.Module) -> DistributedDataParallel:
    """DDP that does not send buffers at every step, because all processes make equal buffers.

    Gradients lie in the communication buckets, from which they are sent, not in a second copy. With several micro batches per
    step they have a copy of their own until the last one.
    """
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:  # torch 2.13
        return DistributedDataParallel(net, forward_sync_buffers=False, gradient_as_bucket_view=True)
    return DistributedDataParallel(net, broadcast_buffers=False, gradient_as_bucket_view=True)
