"""Where the time of a training step goes, and what joining a layer's matrices would take out of it."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from eval.speed.models import VOCABULARY, BenchConfig, autocast, model_config, variants
from eval.speed.timing import Row, attempt, time_in_turn
from eval.speed.training import MEASURE, TrainingStep
from model.decoder import matched
from training.distributed import World

# A part of a step and the operations that belong to it, with all that they call; the first part that claims one has it.
PARTS = {
    "attention": ("scaled_dot_product", "blocked", "flex_attention"),
    "head and loss": ("LinearCrossEntropy",),
    "optimizer": ("Optimizer.step", "clip_grad", "_fused_adamw"),
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"),
    "casts and copies": ("aten::copy_", "aten::cat", "aten::_to_copy"),
}
REST = "element by element"


def shares(cfg: BenchConfig, world: World) -> list[Row]:
    """Training steps, and the share of each part (%) by torch's profiler, over as many steps as there are rounds.

    Shares are of the time that the profiler attributes to operations; it slows many small ones down most.
    """
    batch = cfg.batch or (8 if world.device.type == "cpu" else 64)
    rows = [Row({"model": name}, batch * cfg.model.context) for name in variants(cfg)]
    steps = [attempt(partial(TrainingStep, cfg, name, batch, world)) for name in variants(cfg)]
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
    """The part that an operation belongs to: the outermost caller's, else its own."""
    callers = [event]
    while callers[-1].cpu_parent is not None:
        callers.append(callers[-1].cpu_parent)
    for caller in reversed(callers):
        for part, names in PARTS.items():
            if any(name in caller.name for name in names):
                return part
    return REST


# ---------------------------------------- joined matrices


def products(cfg: BenchConfig, world: World) -> list[Row]:
    """Queries, keys and values of the size as three products and as one; gate and up of SwiGLU as two and as one.

    Forward and backward pass over one batch, gradients of inputs and weights included.
    """
    batch = cfg.batch or (8 if world.device.type == "cpu" else 64)
    tokens, model, rows = batch * cfg.model.context, matched(model_config(cfg, "baseline", vocab_size=VOCABULARY)), []
    for name, outputs in {"q/k/v": [model.d_model] * 3, "gate/up": [model.d_ff] * 2}.items():
        ways = (outputs, [sum(outputs)])
        pair = [Row({"matrices": name, "products": len(way)}, tokens) for way in ways]
        time_in_turn(MEASURE, pair, [layer(cfg, world, tokens, way) for way in ways], cfg.rounds, world.device)
        rows += pair
    return rows


def layer(cfg: BenchConfig, world: World, tokens: int, outputs: list[int]) -> Callable[[], None]:
    """Calling it multiplies the tokens with one matrix for each of `outputs`, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, cfg.model.d_model, generator=generator).to(world.device).requires_grad_()
    weights = [torch.randn(n, cfg.model.d_model, generator=generator).to(world.device) for n in outputs]
    inputs = (x, *(weight.requires_grad_() for weight in weights))

    def work() -> None:
        with autocast(cfg, world):
            found = [F.linear(x, weight) for weight in weights]
        torch.autograd.grad(found, inputs, [torch.ones_like(y) for y in found])

    return work
