"""The attention bench: a variant's attention module on a backend, and its calls of model/attention/backends.py."""

import itertools
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from bench import timing
from bench.models import BenchConfig, mixed, model_config, random_tokens, variants
from bench.timing import Row, attempt, peak_growth, time_in_turn
from model.attention import backends
from model.attention.backends import BACKENDS, ROUTES
from model.decoder import Decoder
from training.distributed import World


def attention(cfg: BenchConfig, world: World) -> list[Row]:
    """Every variant on every backend. The routes of SDPA for a difference of maps run only for variants with a difference."""
    rows = []
    chosen = cfg.variants or [variant for variant in variants(cfg) if not mixed(cfg, variant)]
    for length in cfg.lengths or ([512] if world.device.type == "cpu" else [2048, 4096, 8192, 16384]):
        arms = []
        for variant, backend in itertools.product(chosen, cfg.backends or BACKENDS):
            arm = attempt(partial(AttentionArm, cfg, variant, backend, length, world))  # or why there is none
            if backend not in ROUTES or isinstance(arm, str) or arm.differential:
                arms.append((Row({"length": length, "variant": variant, "backend": backend}), arm))
        group = [row for row, _ in arms]
        for measure in AttentionArm.MEASURES:
            works = [arm if isinstance(arm, str) else partial(arm.run, measure) for _, arm in arms]
            time_in_turn(measure, group, works, cfg.rounds, world.device)
        for row, arm in arms:
            memory = partial(op_memory, cfg, row.labels["variant"], row.labels["backend"], length, world)
            row.facts = {"memory (MB)": None if isinstance(arm, str) else attempt(memory)}
        rows += group
    return rows


class AttentionArm:
    """A variant's attention module on random input, and its calls of the facade, model/attention/backends.py: 8 sequences and a
    baseline with 8 heads of width 32 on a CPU; 4 sequences, 16 heads of width 64 on CUDA.
    """

    MEASURES = ("op forward", "op forward+backward", "module forward", "module forward+backward")

    def __init__(self, cfg: BenchConfig, variant: str, backend: str, length: int, world: World) -> None:
        if backend == "fused" and world.device.type != "cuda":
            raise ValueError("the fused kernel needs a CUDA GPU")  # Triton's interpreter tells nothing about its time
        if mixed(cfg, variant):
            raise ValueError("its layers are of several variants: see their rows")
        self.device, self.autocast = world.device, world.autocast(cfg.dtype)
        on_cpu = world.device.type == "cpu"
        heads, width = cfg.heads or (8 if on_cpu else 16), cfg.width or (32 if on_cpu else 64)
        shape = {"n_layer": 1, "n_head": heads, "head_dim": width, "d_model": heads * width, "context": length}
        small = {"d_ff": 8, "vocab_size": 256, "backend": backend}  # only attention is timed
        model, generator = Decoder(model_config(cfg, variant, **shape, **small)), torch.Generator().manual_seed(0)
        self.module = model.blocks[0].attention
        for p in self.module.parameters():
            if p.dim() == 2:  # for scores of order 1: initial weights give flat maps, which hide errors
                torch.nn.init.normal_(p, std=p.shape[1] ** -0.5, generator=generator)
        model.to(world.device)
        tokens = random_tokens(cfg.batch or (8 if on_cpu else 4), length, 256, world)
        self.calls: list[partial] = []  # of the facade, in one forward pass
        given: list[Any] = []  # the module's arguments in that pass

        def recorded(function: Callable) -> Callable:
            def call(*args: Any, **options: Any) -> Tensor:
                positional, named = tree_map_only(Tensor, leaf, (args, options))
                self.calls.append(partial(function, *positional, **named))
                return function(*args, **options)

            return call

        hook = self.module.register_forward_pre_hook(lambda _, args: given.extend(args))
        with hook, facade(recorded), self.autocast, torch.no_grad():
            model(tokens)
        self.x, self.rest = leaf(given[0]), given[1:]
        parts = tree_leaves([(call.args, call.keywords) for call in self.calls])
        self.inputs = [x for x in parts if isinstance(x, Tensor) and x.requires_grad]  # of the calls
        self.differential = any(call.func is backends.attend_diff for call in self.calls)
        self.gradients: dict[str, list[Tensor]] = {}  # measure -> gradients of the outputs, made at the first backward

    def run(self, measure: str) -> None:
        """Run the pass that `measure` names once."""
        level, passes = measure.split()
        with torch.set_grad_enabled(passes != "forward"), self.autocast:
            outputs = [call() for call in self.calls] if level == "op" else [self.module(self.x, *self.rest)]
        if passes == "forward":
            return
        if measure not in self.gradients:
            self.gradients[measure] = [torch.randn_like(y) for y in outputs]
        inputs = self.inputs if level == "op" else [self.x, *self.module.parameters()]
        torch.autograd.grad(outputs, inputs, self.gradients[measure], allow_unused=True)


def op_memory(cfg: BenchConfig, variant: str, backend: str, length: int, world: World) -> float | None:
    """Peak memory in MB of the op's forward and backward pass, without the inputs; on a CPU measured in a separate process."""
    arm = (cfg, variant, backend, length, world)
    if world.device.type == "cuda":
        return memory_here(*arm)
    # One thread, because the buffers of other threads would be counted.
    with ProcessPoolExecutor(1, timing.PROCESSES, torch.set_num_threads, (1,)) as pool:
        return pool.submit(memory_here, *arm).result()


def memory_here(*arm: Any) -> float | None:
    made = AttentionArm(*arm)
    return peak_growth(partial(made.run, "op forward+backward"), made.device)


@contextmanager
def facade(replace: Callable[[Callable], Callable]) -> Iterator[None]:
    """A context in which a variant that calls a `function` of the facade calls `replace(function)` instead."""
    functions = {name: getattr(backends, name) for name in ("attend", "attend_diff", "attend_union", "attend_map")}
    files = [m for name, m in sys.modules.items() if name.startswith("model.attention.") and m is not backends]
    uses = [(m, name, f) for m in files for name, f in functions.items() if getattr(m, name, None) is f]
    with ExitStack() as stack:
        for file, name, function in uses:
            stack.enter_context(patch.object(file, name, replace(function)))
        yield


def leaf(x: Tensor) -> Tensor:
    """A floating-point tensor as a leaf (same strides) that requires a gradient; any other tensor itself."""
    return x.detach().requires_grad_() if x.is_floating_point() else x
