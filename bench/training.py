"""The benches of training: a step of train.py, compared with nanoGPT's, beside other processes, and with growing shapes."""

import contextlib
import importlib.util
import io
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from types import ModuleType

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import record_function

from bench.models import VOCABULARY, BenchConfig, autocast, batch_size, model_config, random_tokens, variants
from bench.processes import busy_processes, elsewhere
from bench.timing import Row, attempt, median_interval, paired_ratios, peak_growth, peak_of_process, time_in_turn
from model.decoder import Decoder
from training.distributed import World, join_world, pick_dtype
from training.metrics import peak_flops
from training.optim import build_optimizers
from training.parallel import compile_steps

MEASURE = "tokens/s"
NANOGPT = "nanoGPT"
# Shapes of what="growth": (n_layer, d_model) with heads of 32, from 1M to 31M parameters without the embedding.
SIZES = ((5, 128), (4, 256), (6, 384), (10, 512))
CONTEXTS = (256, 512, 1024, 2048, 4096)
GROWN = ("baseline", "diff")
GROWTH_TOKENS = 4096  # tokens of a step, or one sequence of a longer context
# How the threads of libgomp, torch's OpenMP on Linux, wait for each other (what="busy"). GOMP_SPINCOUNT in the environment of a
# bench would change the first row.
WAITS = {
    "as train.py": {"GOMP_SPINCOUNT": "2000"},
    "libgomp's own": {"GOMP_SPINCOUNT": "300000"},  # its default, libgomp/env.c
    "no spinning": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"},
    "one thread": {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
}


class TrainingStep:
    """Calling it takes one optimizer step, as train.py takes it."""

    def __init__(self, cfg: BenchConfig, variant: str, batch: int, world: World) -> None:
        vocabulary = cfg.model.vocab_size or VOCABULARY
        self.model = Decoder(model_config(cfg, variant, vocab_size=vocabulary)).to(world.device)
        self.optimizers = build_optimizers(self.model, cfg.optim)
        self._prepare(cfg, random_tokens(batch, cfg.model.context + 1, vocabulary, world), world)

    def _prepare(self, cfg: BenchConfig, rows: Tensor, world: World) -> None:
        self.rows, self.autocast, self.clip = rows, autocast(cfg, world), cfg.optim.clip or float("inf")
        self.inputs, self.targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        compiled = cfg.compile if cfg.compile is not None else world.device.type == "cuda"
        self.net = self.compiled() if compiled else self.model

    def compiled(self) -> nn.Module:
        """The model as its trainer compiles it."""
        return compile_steps(self.model)

    def loss(self) -> Tensor:
        """The mean cross-entropy of the batch."""
        return self.net(self.inputs, self.targets)

    def __call__(self) -> None:
        with self.autocast:
            loss = self.loss()
        loss.backward()
        with record_function("clip_grad"):  # its operations have no common caller in a profile
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def parameters(self, embedding: bool = True) -> int:
        """Number of the model's parameters; tied parameters count once."""
        return sum(p.numel() for p in self.model.parameters()) if embedding else self.model.num_params()

    def state_mb(self) -> float:
        """Memory in MB that stays between steps: parameters and the optimizers' state."""
        held = list(self.model.parameters())
        held += [x for o in self.optimizers for own in o.state.values() for x in own.values() if isinstance(x, Tensor)]
        return sum(x.nbytes for x in held) / 1e6


class NanoGPTStep(TrainingStep):
    """Calling it takes one optimizer step of nanoGPT, as its train.py takes it, in the shape of our stack gpt2."""

    def __init__(self, cfg: BenchConfig, batch: int, world: World) -> None:
        vocabulary = cfg.model.vocab_size or VOCABULARY
        own, theirs = model_config(cfg, "gpt2", vocab_size=vocabulary), nanogpt(cfg.peer)
        shape = {"n_layer": own.n_layer, "n_head": own.n_head, "n_embd": own.d_model, "block_size": own.context}
        betas = (cfg.optim.beta1, cfg.optim.beta2)
        with contextlib.redirect_stdout(io.StringIO()):  # nanoGPT prints its number of parameters
            config = theirs.GPTConfig(**shape, vocab_size=vocabulary, dropout=0.0, bias=own.bias)
            self.model = theirs.GPT(config).to(world.device)
            optim = self.model.configure_optimizers(cfg.optim.weight_decay, cfg.optim.lr, betas, world.device.type)
        self.optimizers = [optim]
        self._prepare(cfg, random_tokens(batch, own.context + 1, vocabulary, world), world)

    def compiled(self) -> nn.Module:
        return torch.compile(self.model)

    def loss(self) -> Tensor:
        return self.net(self.inputs, self.targets)[1]


def nanogpt(folder: str | None) -> ModuleType:
    """The module model.py of a nanoGPT checkout. ValueError, with what to type, for any other folder."""
    path = Path(folder or "") / "model.py"
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    fix = "git clone https://github.com/karpathy/nanoGPT and give that folder as peer="
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert all(hasattr(module.GPT, name) for name in ("forward", "configure_optimizers"))
        assert hasattr(module, "GPTConfig")
    except Exception as error:  # the file is not ours and may raise anything
        why = f" ({type(error).__name__}: {error})".split("\n")[0] if path.is_file() and str(error) else ""
        raise ValueError(f"peer={folder} is not a nanoGPT checkout, whose model.py has GPT and GPTConfig{why}: {fix}") from None
    return module


def our_step(cfg: BenchConfig, variant: str, batch: int) -> TrainingStep:
    """A step in a process of its own, which is set up as train.py sets up its process."""
    return TrainingStep(cfg, variant, batch, join_world(cfg.device))


def nanogpt_step(cfg: BenchConfig, batch: int) -> NanoGPTStep:
    """A step in a process of its own, set up as nanoGPT's train.py does it: TF32 on a GPU, torch's defaults otherwise."""
    if cfg.device != "cpu":
        torch.set_float32_matmul_precision("high")
    return NanoGPTStep(cfg, batch, World(0, 1, torch.device(cfg.device)))


# ---------------------------------------- the benches


def training_steps(
    cfg: BenchConfig, world: World, tokens: int | None = None, **about: str | int
) -> tuple[list[Row], list[TrainingStep | str]]:
    """A row and a training step of each variant; instead of a step that is not available, the reason why.

    tokens: of a step, for speeds instead of seconds. about: more labels of every row.
    """
    names, batch = variants(cfg), batch_size(cfg, world)
    rows = [Row({"model": name, **about}, tokens) for name in names]
    return rows, [attempt(partial(TrainingStep, cfg, name, batch, world)) for name in names]


def train(cfg: BenchConfig, world: World) -> list[Row]:
    """Training steps on random tokens: 8 sequences on a CPU, 64 on CUDA, with the context of size=.

    With peer=, the stack gpt2 is compared with nanoGPT.
    """
    batch = batch_size(cfg, world)
    if cfg.peer is not None:
        return against_nanogpt(replace(cfg, device=str(world.device)), batch, world)
    tokens, peak = batch * cfg.model.context, peak_flops(world.device)
    rows, steps = training_steps(cfg, world, tokens, layers=cfg.model.n_layer, width=cfg.model.d_model)
    time_in_turn(MEASURE, rows, steps, cfg.rounds, world.device)
    for row, step in zip(rows, steps, strict=True):
        if seconds := row.seconds.get(MEASURE):
            flops = step.model.flops_per_token()["total"]
            row.facts = {"parameters": step.model.num_params(), "MFLOPs/token": flops / 1e6}
            row.facts["mfu"] = flops * tokens / median(seconds) / peak if peak else None
    return rows


def against_nanogpt(cfg: BenchConfig, batch: int, world: World) -> list[Row]:
    """nanoGPT and the stack gpt2 in every mode that `dtype` and `compile` leave open, each in a process of its own, in turn.

    The table's ratio is to nanoGPT's first row, eager float32, its own mode on a CPU. Other columns: the ratio to nanoGPT in
    the same mode, with the 95 % interval of the median; the ratio to nanoGPT's fastest mode; and the memory of a step: the
    memory that stays (parameters, optimizer) plus the most that the step adds.
    """
    nanogpt(cfg.peer)  # a wrong folder is refused before any process starts
    auto = str(pick_dtype("auto", world.device)).removeprefix("torch.")
    dtypes = dict.fromkeys(("float32", auto)) if cfg.dtype == "auto" else (cfg.dtype,)
    compiled = (False, True) if cfg.compile is None else (cfg.compile,)
    modes = [replace(cfg, dtype=dtype, compile=whether) for whether in compiled for dtype in dtypes]
    rows, builds = [], []
    for mode in modes:
        how = {"mode": "compiled" if mode.compile else "eager", "dtype": mode.dtype}
        rows += [Row({"code": code} | how, batch * cfg.model.context) for code in (NANOGPT, "gpt2")]
        builds += [(nanogpt_step, mode, batch), (our_step, mode, "gpt2", batch)]
    with elsewhere(builds) as works:
        time_in_turn(MEASURE, rows, works, cfg.rounds, world.device)
        for row, work in zip(rows, works, strict=True):
            if row.seconds:
                row.facts = {"parameters": work.ask(TrainingStep.parameters)} | work.ask(step_memory, world.device)
    theirs = [row for row in rows[::2] if row.seconds]
    for its, ours in zip(rows[::2], rows[1::2], strict=True):
        if its.seconds and ours.seconds:
            compare(ours, its, min(theirs, key=lambda row: median(row.seconds[MEASURE])))
    return rows


def compare(ours: Row, its: Row, fastest: Row) -> None:
    """Add to our row's facts its speed over nanoGPT's in the same mode (`its`) and in the `fastest` mode; also for memory."""
    ratios = paired_ratios(ours, its, MEASURE)
    ours.facts["speed / nanoGPT, same mode"] = median(ratios)
    ours.facts["low"], ours.facts["high"] = median_interval(ratios)
    ours.facts["speed / nanoGPT, fastest mode"] = median(paired_ratios(ours, fastest, MEASURE))
    if (mine := ours.facts["memory (MB)"]) and (theirs := its.facts["memory (MB)"]):
        ours.facts["memory / nanoGPT"] = mine / theirs


def step_memory(step: TrainingStep, device: torch.device) -> dict[str, float | None]:
    """In MB: the state that stays plus the most that a step adds; and the peak memory of this process with all libraries."""
    peak, growth = peak_of_process(device), peak_growth(step, device)  # in this order: peak_growth resets the peak
    return {"memory (MB)": None if growth is None else step.state_mb() + growth, "process (MB)": peak}


def busy(cfg: BenchConfig, world: World) -> list[Row]:
    """Training steps beside 0, 1 and 3 processes that compute without a pause, by how the step's threads wait.

    `speed / fastest without neighbours` is the speed beside them divided by the fastest speed beside 0 processes.
    """
    batch, variant = cfg.batch or 8, (cfg.variants or ["baseline"])[0]
    cfg, tokens, rows = replace(cfg, device=str(world.device)), batch * cfg.model.context, []
    with elsewhere([(our_step, cfg, variant, batch)] * len(WAITS), list(WAITS.values())) as works:
        for count in cfg.neighbours:
            group = [Row({"busy": count, "model": variant, "threads": name}, tokens) for name in WAITS]
            with busy_processes(count):
                time_in_turn(MEASURE, group, works, cfg.rounds, world.device)
            rows += group
    quiet = [median(row.seconds[MEASURE]) for row in rows if row.seconds and row.labels["busy"] == 0]
    for row in rows:
        if row.seconds and quiet:
            row.facts["speed / fastest without neighbours"] = min(quiet) / median(row.seconds[MEASURE])
    return rows


def growth(cfg: BenchConfig, world: World) -> list[Row]:
    """Steps of 4,096 tokens, or of one sequence of a longer context, over contexts 256 to 4096 of size=, or over 1M to 31M
    parameters at context 256; and the fits. A step has whole sequences, so lengths= may make some steps shorter.

    The exponent a of a fit means time per token (or memory) ~ context^a or parameters^a. It is the slope of the logarithms: of
    each round, then the median with its 95 % interval. One sequence's time grows with context^(a + 1).
    """
    cfg, names = replace(cfg, device=str(world.device)), cfg.variants or GROWN
    lengths = cfg.lengths or CONTEXTS
    shapes = [replace(cfg.model, context=T) for T in lengths]
    if cfg.over == "parameters":
        alike = partial(replace, cfg.model, context=min(lengths))
        shapes = [alike(n_layer=layers, d_model=width, n_head=width // 32) for layers, width in SIZES]
    tokens = max(GROWTH_TOKENS, *lengths)
    points = [(name, shape, tokens // shape.context) for shape in shapes for name in names]
    rows = [Row({"over": cfg.over, "model": name, "context": m.context}, b * m.context) for name, m, b in points]
    with elsewhere([(our_step, replace(cfg, model=m), name, b) for name, m, b in points]) as works:
        time_in_turn(MEASURE, rows, works, cfg.rounds, world.device)
        for row, work in zip(rows, works, strict=True):
            if row.seconds:
                row.facts = {"parameters": work.ask(TrainingStep.parameters, False)}
                row.facts |= work.ask(step_memory, world.device)
    return rows + [fit(cfg.over, name, [row for row in rows if row.labels["model"] == name]) for name in names]


def fit(over: str, variant: str, rows: list[Row]) -> Row:
    """A row with the exponents over the measured `rows` of one variant; n/a where fewer than two were measured."""
    fitted = Row({"over": over, "model": variant, "context": "fit"})
    rows = [row for row in rows if row.seconds]
    sizes = [row.labels["context"] if over == "context" else row.facts["parameters"] for row in rows]
    if len(set(sizes)) > 1:
        per_token = ([seconds / row.amount for seconds in row.seconds[MEASURE]] for row in rows)
        slopes = [exponent(sizes, times) for times in zip(*per_token, strict=True)]
        low, high = median_interval(slopes)
        memory = [row.facts["memory (MB)"] for row in rows]
        fitted.facts = {"time exponent": median(slopes), "low": low, "high": high}
        fitted.facts["memory exponent"] = exponent(sizes, memory) if all(memory) else None
    return fitted


def exponent(sizes: list[float], values: list[float]) -> float:
    """a of the least-squares fit log(value) = a log(size) + b."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])
