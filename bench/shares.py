"""Where the time of a training step goes, and choices that could make the step faster."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from bench.models import VOCABULARY, BenchConfig, autocast, batch_size, model_config
from bench.timing import Row, time_in_turn
from bench.training import MEASURE, TrainingStep, training_steps
from model.config import DecoderConfig
from model.decoder import matched
from model.layers import make_norm
from training.distributed import World, pick_dtype

# Part of an uncompiled step -> operations that belong to it, with all operations that they call. The first match wins.
PARTS = {
    "attention": ("scaled_dot_product", "kernels_cpu", "flex_attention", "diffattn"),
    "head and loss": ("LinearCrossEntropy",),
    "optimizer": ("Optimizer.step", "clip_grad", "_fused_adamw"),
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"),
    "casts and copies": ("aten::copy_", "aten::cat", "aten::_to_copy"),
}
REST = "element by element"


def shares(cfg: BenchConfig, world: World) -> list[Row]:
    """Training steps, and the share of each part (%) by torch's profiler, over `rounds` steps. They are not compiled
    unless compile=true is given.

    A compiled step joins operations of several parts, for example those of the loss, and they count as the rest.
    Shares are of the time that the profiler attributes to operations. The profiler slows many small operations down most.
    """
    cfg = replace(cfg, compile=bool(cfg.compile))
    rows, steps = training_steps(cfg, world, batch_size(cfg, world) * cfg.model.context)
    time_in_turn(MEASURE, rows, steps, cfg.rounds, world.device)
    for row, step in zip(rows, steps, strict=True):
        if row.seconds:
            row.facts = profiled(step, cfg.rounds, world)
    return rows


def profiled(step: TrainingStep, rounds: int, world: World) -> dict[str, float]:
    """Percent of each part, in the order of PARTS and the rest last."""
    on_cuda = world.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]) as found:
        for _ in range(rounds):
            step()
    times = dict.fromkeys((*PARTS, REST), 0.0)
    for event in found.events():
        if event.device_type == DeviceType.CPU:
            times[part_of(event)] += event.self_device_time_total if on_cuda else event.self_cpu_time_total
    whole = sum(times.values())
    return {f"{part} (%)": 100 * time / whole for part, time in times.items()}


def part_of(event: FunctionEvent) -> str:
    """The part of the operation's outermost caller that is in PARTS, else the part of the operation itself."""
    callers = [event]
    while callers[-1].cpu_parent is not None:
        callers.append(callers[-1].cpu_parent)
    for caller in reversed(callers):
        for part, names in PARTS.items():
            if any(name in caller.name for name in names):
                return part
    return REST


# ---------------------------------------- choices


def choices(cfg: BenchConfig, world: World) -> list[Row]:
    """Two ways to do the same work: forward and backward over one batch of size=, with the gradients of all inputs.

    Queries, keys and values as three matrix products or one; gate and up of SwiGLU as two or one; an addition to the
    residual stream and its norm in float32 or in the autocast dtype.
    """
    batch = batch_size(cfg, world)
    tokens, model = batch * cfg.model.context, matched(model_config(cfg, "baseline", vocab_size=VOCABULARY))
    linear, residual = partial(layer, cfg, world, tokens), partial(addition, model, world, tokens)
    narrow = pick_dtype(cfg.dtype, world.device)
    pairs = {
        "q/k/v": {"3 products": linear([model.d_model] * 3), "1 product": linear([model.d_model * 3])},
        "gate/up": {"2 products": linear([model.d_ff] * 2), "1 product": linear([model.d_ff * 2])},
        "residual": {str(dtype).removeprefix("torch."): residual(dtype) for dtype in (torch.float32, narrow)},
    }
    rows = []
    for choice, ways in pairs.items():
        pair = [Row({"choice": choice, "way": way}, tokens) for way in ways]
        time_in_turn(MEASURE, pair, list(ways.values()), cfg.rounds, world.device)
        rows += pair
    return rows


def layer(cfg: BenchConfig, world: World, tokens: int, outputs: list[int]) -> Callable[[], None]:
    """A work that multiplies the tokens with one matrix for each width in `outputs`, and computes the gradients."""
    x, *weights = (random(world, n, cfg.model.d_model) for n in (tokens, *outputs))

    def work() -> None:
        with autocast(cfg, world):
            found = [F.linear(x, weight) for weight in weights]
        torch.autograd.grad(found, (x, *weights), [torch.ones_like(y) for y in found])

    return work


def addition(model: DecoderConfig, world: World, tokens: int, dtype: torch.dtype) -> Callable[[], None]:
    """Calling it adds two tensors of type `dtype`, the residual stream and the output of a layer, and norms the sum."""
    norm = make_norm(model.norm, model.d_model, model.bias, model.norm_eps).to(world.device)
    x, y = (random(world, tokens, model.d_model, dtype) for _ in range(2))

    def work() -> None:
        total = x + y
        found = norm(total)
        torch.autograd.grad((total, found), (x, y, *norm.parameters()), (x, found))

    return work


def random(world: World, rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers (rows, width) that require a gradient, the same every time."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
    return x.to(world.device, dtype).requires_grad_()
