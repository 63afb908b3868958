"""How several processes train one model: whole copies (DDP), or parameters, gradients and optimizer state split (FSDP2)."""

import contextlib
import inspect
import os
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
import torch._functorch.config as partitioner
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from model import native
from model.decoder import Decoder
from training.distributed import World

KEEP_INPUTS = "ban_recompute_materialized_backward"  # torch's option to keep all inputs of matrix products, private
GRAPHS = 128  # torch.compile's limit of versions per function: a bench needs one per model, a split model one per layer
TOKENS_PER_PASS = 2**14
# Measured on two CPU cores (docs/PERFORMANCE.md): seconds that compiling takes, share of a step's time that it saves, and
# FLOP/s of an eager step.
COMPILE_SECONDS, COMPILE_SAVES, CPU_FLOPS = 60, 0.2, 1.3e11


def compiles(wish: bool | None, flops: float, world: World) -> bool:
    """`wish` if set; else true on CUDA, and on a CPU if the time that a run of `flops` saves exceeds the time to compile."""
    on_card = world.device.type == "cuda"
    problem = "" if wish is False else compile_problem("c" if on_card else "c++")
    if wish is None and not on_card:
        return flops / world.size / CPU_FLOPS * COMPILE_SAVES > COMPILE_SECONDS and not problem
    if problem:
        raise ValueError(f"{problem}, or train with compile=false")
    return wish is not False


def compile_problem(language: str) -> str:
    """Why torch.compile cannot work here, with the fix; empty if it can. language: c++, or c for Triton on a GPU."""
    # The folders in which torch and Triton look for Python's headers, and those in which the compiler does.
    folders = [sysconfig.get_path("include"), sysconfig.get_path("include", scheme="posix_prefix")]
    folders += filter(None, os.environ.get("CPATH", "").split(os.pathsep))
    headers = any(Path(folder, "Python.h").is_file() for folder in folders)
    if sys.platform != "linux" or not native.compiler(language) or not headers:
        wrong = f"torch.compile needs Linux, a compiler for {language.upper()} and Python's headers, which this machine lacks"
        return f"{wrong}: install them (Debian: g++ and python3-dev)"
    cache = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()).absolute()
    folder = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        return f"no code may be loaded from {cache} (noexec): set TMPDIR or TORCHINDUCTOR_CACHE_DIR to another folder"
    return ""


def compile_steps(model: nn.Module) -> nn.Module:
    """`model`, on its device, compiled for training steps whose inputs have one shape."""
    if next(model.parameters()).device.type == "cpu" and hasattr(partitioner, KEEP_INPUTS):
        # The backward pass computes the norms' outputs again instead of keeping them: less memory, equal speed.
        setattr(partitioner, KEEP_INPUTS, False)
    # By default torch compiles the code of a layer at most 8 times per process, then runs the code uncompiled. The higher limit
    # is for a bench, which builds all models before it calls one; the reset is for a sweep of any number of runs.
    torch.compiler.reset()
    torch._dynamo.config.recompile_limit = GRAPHS
    torch._dynamo.config.accumulated_recompile_limit = 8 * GRAPHS
    return torch.compile(model, dynamic=False)


class Parallel:
    """`model` on all processes of `world`, on their devices; `net` is what a training step calls.

    kind, shard: as parallel and shard_processes of TrainConfig. Optimizers must be built afterwards: splitting replaces the
    parameters.
    """

    def __init__(self, model: Decoder, world: World, kind: str = "ddp", shard: int | None = None, compiled: bool = False):
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
            # No buffers are sent, because all processes make equal ones. Gradients lie in the buckets from which they are sent.
            no_buffers = {"broadcast_buffers": False}
            if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:  # its name in torch 2.13
                no_buffers = {"forward_sync_buffers": False}
            self.net = DistributedDataParallel(self.net, gradient_as_bucket_view=True, **no_buffers)

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager:
        """A context for the passes of a micro batch. Only the `last` one of a step averages gradients (hsdp: across copies)."""
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
    if kind == "fsdp":
        return init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("shard",))
    shard = shard or int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    if world.size % shard:
        raise ValueError(f"shard_processes={shard} cannot divide {world.size} processes: use a divisor of {world.size}")
    shape = (world.size // shard, shard)
    return init_device_mesh(world.device.type, shape, mesh_dim_names=("replicate", "shard"))


def default_micro_batch(sequences: int, context: int, world: World) -> int:
    """All `sequences` of a process and step; on a GPU the largest divisor of them with at most TOKENS_PER_PASS tokens."""
    most = max(1, TOKENS_PER_PASS // context) if world.device.type == "cuda" else sequences
    return max(n for n in range(1, sequences + 1) if sequences % n == 0 and n <= most)
