"""The bench of training: a step of train.py, and beside it one of nanoGPT."""

import contextlib
import importlib.util
import io
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from bench import timing
from bench.models import BenchConfig, model_config, random_tokens, variants
from bench.timing import Row, attempt, median_interval, paired_ratios, peak_growth, time_in_turn
from model.decoder import Decoder
from training.distributed import World, join_world, pick_dtype
from training.metrics import memory_gb, peak_flops
from training.optim import build_optimizers
from training.parallel import compile_steps

MEASURE = "tokens/s"


class TrainingStep:
    """Calling it takes one optimizer step, as train.py takes it."""

    def __init__(self, cfg: BenchConfig, variant: str, batch: int, world: World) -> None:
        self.model = Decoder(model_config(cfg, variant)).to(world.device)
        self.optimizers = build_optimizers(self.model, cfg.optim)
        self._prepare(cfg, random_tokens(batch, cfg.model.context + 1, self.model.cfg.vocab_size, world), world)

    def _prepare(self, cfg: BenchConfig, rows: Tensor, world: World) -> None:
        self.rows, self.autocast, self.clip = rows, world.autocast(cfg.dtype), cfg.optim.clip or float("inf")
        self.inputs, self.targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        compiled = cfg.compile if cfg.compile is not None else world.device.type == "cuda"
        self.net = self.compiled() if compiled else self.model

    def compiled(self) -> nn.Module:
        """The model as its trainer compiles it."""
        return compile_steps(self.model)

    def loss(self) -> Tensor:
        return self.net(self.inputs, self.targets)

    def __call__(self) -> None:
        with self.autocast:
            loss = self.loss()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def facts(self, device: torch.device) -> dict[str, float | None]:
        """Parameters, tied ones once; in MB the state that stays plus the most that a step adds, and this process's peak."""
        peak, growth = memory_gb(device), peak_growth(self, device)  # in this order: peak_growth resets the peak
        kept = [x for o in self.optimizers for state in o.state.values() for x in state.values() if isinstance(x, Tensor)]
        state = sum(x.nbytes for x in [*self.model.parameters(), *kept]) / 1e6
        memory = {"memory (MB)": None if growth is None else state + growth, "process (MB)": peak and 1e3 * peak}
        return {"parameters": sum(p.numel() for p in self.model.parameters())} | memory


class NanoGPTStep(TrainingStep):
    """Calling it takes one optimizer step of nanoGPT, as its train.py takes it, in the shape of our stack gpt2."""

    def __init__(self, cfg: BenchConfig, batch: int, world: World) -> None:
        gpt2, module = model_config(cfg, "gpt2"), nanogpt(cfg.peer)
        shape = {"n_layer": gpt2.n_layer, "n_head": gpt2.n_head, "n_embd": gpt2.d_model, "block_size": gpt2.context}
        betas = (cfg.optim.beta1, cfg.optim.beta2)
        with contextlib.redirect_stdout(io.StringIO()):  # nanoGPT prints its number of parameters
            config = module.GPTConfig(**shape, vocab_size=gpt2.vocab_size, dropout=0.0, bias=gpt2.bias)
            self.model = module.GPT(config).to(world.device)
            optim = self.model.configure_optimizers(cfg.optim.weight_decay, cfg.optim.lr, betas, world.device.type)
        self.optimizers = [optim]
        self._prepare(cfg, random_tokens(batch, gpt2.context + 1, gpt2.vocab_size, world), world)

    def compiled(self) -> nn.Module:
        return torch.compile(self.model)

    def loss(self) -> Tensor:
        return self.net(self.inputs, self.targets)[1]


def nanogpt(folder: str) -> ModuleType:
    """The module model.py of a nanoGPT checkout. ValueError, with what to type, for any other folder."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(folder) / "model.py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        assert hasattr(module.GPT, "configure_optimizers") and hasattr(module, "GPTConfig")
    except Exception:  # the file is not ours and may raise anything
        fix = "git clone https://github.com/karpathy/nanoGPT and give that folder as peer="
        raise ValueError(f"peer={folder} is not a nanoGPT checkout, whose model.py has GPT and GPTConfig: {fix}") from None
    return module


_step: list[TrainingStep] = []  # in a process of its own: its step


def _build(build: Callable, *arguments: Any) -> None:
    _step[:] = [build(*arguments)]


def _ask(function: Callable, *arguments: Any) -> Any:
    answer = function(_step[0], *arguments)
    if torch.cuda.is_initialized():  # the process that reads the clock cannot wait for the GPU work of this one
        torch.cuda.synchronize()
    return answer


def remote_step(processes: contextlib.ExitStack, *build: Any) -> Callable:
    """A step that `build`, a function and its arguments, makes in a new process; a call runs it, or a given function, there."""
    pool = processes.enter_context(ProcessPoolExecutor(1, mp_context=timing.PROCESSES))
    pool.submit(_build, *build).result()
    return lambda function=TrainingStep.__call__, *arguments: pool.submit(_ask, function, *arguments).result()


def our_step(cfg: BenchConfig, batch: int) -> TrainingStep:
    """A step of the stack gpt2 in a process that is set up as train.py sets up its process."""
    return TrainingStep(cfg, "gpt2", batch, join_world(cfg.device))


def nanogpt_step(cfg: BenchConfig, batch: int) -> NanoGPTStep:
    """A step in a process that is set up as nanoGPT's train.py does it: TF32 on a GPU, torch's defaults otherwise."""
    if cfg.device != "cpu":
        torch.set_float32_matmul_precision("high")
    return NanoGPTStep(cfg, batch, World(0, 1, torch.device(cfg.device)))


def train(cfg: BenchConfig, world: World) -> list[Row]:
    """Training steps on random tokens: 8 sequences on a CPU, 64 on CUDA, with the context of size=."""
    batch = cfg.batch or (8 if world.device.type == "cpu" else 64)
    if cfg.peer is not None:
        return against_nanogpt(replace(cfg, device=str(world.device)), batch, world)
    peak, tokens = peak_flops(world.device), batch * cfg.model.context
    shape = {"layers": cfg.model.n_layer, "width": cfg.model.d_model}
    rows = [Row({"model": name, **shape}, tokens) for name in variants(cfg)]
    steps = [attempt(partial(TrainingStep, cfg, name, batch, world)) for name in variants(cfg)]
    time_in_turn(MEASURE, rows, steps, cfg.rounds, world.device)
    for row, step in zip(rows, steps, strict=True):
        if seconds := row.seconds.get(MEASURE):
            flops = step.model.flops_per_token()["total"]
            row.facts = {"parameters": step.model.num_params(), "MFLOPs/token": flops / 1e6}
            row.facts["mfu"] = flops * tokens / median(seconds) / peak if peak else None
    return rows


def against_nanogpt(cfg: BenchConfig, batch: int, world: World) -> list[Row]:
    """nanoGPT and the stack gpt2 in every mode that `dtype` and `compile` leave open, each in another process, in turn.

    The table's ratio is to nanoGPT's first row, eager float32, its default on a CPU. low, high: a 95 % interval of the median.
    """
    nanogpt(cfg.peer)  # a wrong folder is refused before any process starts
    auto = str(pick_dtype("auto", world.device)).removeprefix("torch.")
    dtypes = dict.fromkeys(("float32", auto)) if cfg.dtype == "auto" else (cfg.dtype,)
    compiled = (False, True) if cfg.compile is None else (cfg.compile,)
    rows, builds = [], []
    for mode in [replace(cfg, dtype=dtype, compile=whether) for whether in compiled for dtype in dtypes]:
        how = {"mode": "compiled" if mode.compile else "eager", "dtype": mode.dtype}
        rows += [Row({"code": code} | how, batch * cfg.model.context) for code in ("nanoGPT", "gpt2")]
        builds += [(nanogpt_step, mode, batch), (our_step, mode, batch)]
    with contextlib.ExitStack() as processes:
        steps = [attempt(partial(remote_step, processes, *build)) for build in builds]
        time_in_turn(MEASURE, rows, steps, cfg.rounds, world.device)
        for row, step in zip(rows, steps, strict=True):
            if row.seconds:
                row.facts = step(TrainingStep.facts, world.device)
    fastest = min((row for row in rows[::2] if row.seconds), key=lambda row: median(row.seconds[MEASURE]), default=None)
    for its, ours in zip(rows[::2], rows[1::2], strict=True):
        if its.seconds and ours.seconds:
            ratios = paired_ratios(ours, its, MEASURE)
            ours.facts["speed / nanoGPT, same mode"] = median(ratios)
            ours.facts["low"], ours.facts["high"] = median_interval(ratios)
            ours.facts["speed / nanoGPT, fastest mode"] = median(paired_ratios(ours, fastest, MEASURE))
            if its.facts["memory (MB)"] and ours.facts["memory (MB)"]:
                ours.facts["memory / nanoGPT"] = ours.facts["memory (MB)"] / its.facts["memory (MB)"]
    return rows
