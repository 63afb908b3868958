"""Measure speed: python scripts/bench.py what=attention|train|loader|tokenizer|decode|probe|monitor [out=runs/bench/WHAT.json]

    attention   a variant's attention on a backend: facade calls alone ("op") and with projections ("module")
    train       whole training steps of configs/model at size=micro    decode     a token, with and without a cache
    loader      batches from shards in the page cache                  tokenizer  text to ids, one thread
    probe       one query's attention rows in a long context: time and peak memory, in a process of its own (rounds=1)
    monitor     a look of training/monitor.py right after a training step, and its share of the steps at the default frequency

After a warm-up, rows are timed in turn within every round (A B C A B C ...), so that a slow spell of the machine meets all of
them alike. A cell is the median over rounds, (least-most), and the median of the rounds' ratios to the first row measured
at that length. Forward alone runs without gradients. What cannot run here is a row that says why. Options: --cfg job.
"""

import inspect
import itertools
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))

from configs import CONFIG_DIR, command  # noqa: E402
from configs.files import write_atomic  # noqa: E402
from configs.provenance import machine, version  # noqa: E402
from data.config import RetrievalMixConfig, TokenizerConfig  # noqa: E402
from data.loader import Loader, Windows  # noqa: E402
from data.retrieval import RetrievalSource  # noqa: E402
from data.shards import Shard, write_shard  # noqa: E402
from data.tokenizer import build_tokenizer  # noqa: E402
from eval.common import progress  # noqa: E402
from model.attention import backends  # noqa: E402
from model.attention.mask import Mask  # noqa: E402
from model.attention.probe import probe as attention_rows  # noqa: E402
from model.cache import KVCache  # noqa: E402
from model.config import DecoderConfig  # noqa: E402
from model.decoder import Decoder  # noqa: E402
from training.distributed import World, join_world, pick_dtype  # noqa: E402
from training.metrics import memory_gb, peak_flops  # noqa: E402
from training.monitor import Monitor, MonitorConfig  # noqa: E402
from training.optim import OptimConfig, build_optimizers  # noqa: E402

BACKENDS = ("auto", "math", "sdpa", "blocked", "flex", "fused")
TWO_CALLS = "two SDPA calls"
VOCABULARY = 4096
PROBE_VOCABULARY = 50_257  # gpt2's: whole logits of 32,768 tokens would be 6.6 GB
LEAST_SECONDS = 0.02  # of one timing; shorter work is repeated within it
ERROR_ROWS = 512  # query rows of the N x N formula at a time
SHARD_TOKENS = 4_000_000
# What makes a row "not measured", with its reason
UNAVAILABLE = (ValueError, RuntimeError, ImportError, OSError, OmegaConfBaseException)


@dataclass
class BenchConfig:
    """What to time, and at which shape. None is the device's default, named in the function of that `what`."""

    what: str = MISSING  # attention | train | loader | tokenizer | decode | probe | monitor
    out: str | None = None  # the JSON; None: runs/bench/WHAT.json
    rounds: int = 10  # timings of each row
    device: str = "auto"  # auto | cpu | cuda
    dtype: str = "auto"  # auto (decode: float32, as scripts/sample.py) | float32 | bfloat16 (autocast)
    variants: list[str] | None = (
        None  # names in configs/model, for all but loader, tokenizer; None: all, baseline first
    )
    lengths: list[int] | None = None  # attention, decode, probe: tokens
    batch: int | None = None  # sequences
    backends: list[str] | None = None  # attention; None: all
    heads: int | None = None  # attention: the baseline's, from which the variants derive theirs
    width: int | None = None  # attention: of a baseline head
    model: DecoderConfig = field(
        default_factory=DecoderConfig
    )  # size= fills it in; a variant's own options come on top
    optim: OptimConfig = field(default_factory=OptimConfig)  # train
    compile: bool | None = None  # train; None: on CUDA


# ---------------------------------------- timing


@dataclass
class Row:
    """One line of the table. `seconds[measure]` has the time of one call for every round."""

    labels: dict[str, str | int]
    amount: float | None = None  # tokens or MB of one call; the table then shows speed
    seconds: dict[str, list[float]] = field(default_factory=dict)
    ratio: dict[str, float] = field(default_factory=dict)  # to the first row measured, of times or of speeds
    not_measured: dict[str, str] = field(default_factory=dict)  # measure -> reason
    facts: dict[str, float | str | None] = field(default_factory=dict)  # a string: why not measured


Work = Callable[[], Any]


def attempt(build: Callable[[], Any]) -> Any:
    """What `build` makes, or as a string the reason why that is not to be had here."""
    try:
        return build()
    except UNAVAILABLE as error:
        return " ".join(str(error).split()) or type(error).__name__


def time_in_turn(
    measure: str, rows: list[Row], works: list[Work | str], rounds: int, device: torch.device, bar: tqdm
) -> None:
    """Fill in `measure` of every row from its work, or from the string that says why it has none."""
    ready = []
    for row, work in zip(rows, works, strict=True):
        repeats = work if isinstance(work, str) else attempt(partial(warm_up, work, device))
        if isinstance(repeats, str):
            row.not_measured[measure] = repeats
        else:
            ready.append((row, work, repeats))
            row.seconds[measure] = []
    for _ in range(rounds):
        for row, work, repeats in ready:
            row.seconds[measure].append(seconds_of(work, repeats, device))
        bar.update()
    for row, _, _ in ready:
        row.ratio[measure] = paired_ratio(row, ready[0][0], measure)


def paired_ratio(row: Row, first: Row, measure: str) -> float:
    """Median over rounds of this row's time over the first's; of speeds (same amount of work), where rows show speed."""
    pairs = zip(row.seconds[measure], first.seconds[measure], strict=True)
    return median(mine / its if row.amount is None else its / mine for mine, its in pairs)


def warm_up(work: Work, device: torch.device) -> int:
    """Call once (compilation, caches), then see how many calls one timing needs."""
    seconds_of(work, 1, device)
    return max(1, math.ceil(LEAST_SECONDS / seconds_of(work, 1, device)))


def seconds_of(work: Work, repeats: int, device: torch.device) -> float:
    """Seconds per call."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    wait()
    return (time.perf_counter() - start) / repeats


# ---------------------------------------- models


def variants(cfg: BenchConfig) -> list[str]:
    """The names asked for, or all of configs/model, the baseline first."""
    return cfg.variants or sorted(names("model"), key=lambda name: (name != "baseline", name))


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml"))


def model_config(cfg: BenchConfig, variant: str, **changes: Any) -> DecoderConfig:
    """The configuration that `train.py model=VARIANT size=...` composes, with `changes`."""
    group = yaml.safe_load((CONFIG_DIR / "model" / f"{variant}.yaml").read_text()) or {}
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cfg.model), group, changes))


def autocast(cfg: BenchConfig, world: World) -> torch.autocast:
    dtype = pick_dtype(cfg.dtype, world.device)
    return torch.autocast(world.device.type, dtype, enabled=dtype != torch.float32)


def random_tokens(rows: int, length: int, vocabulary: int, world: World) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (rows, length), generator=generator).to(world.device)


# ---------------------------------------- attention


def attention(cfg: BenchConfig, world: World) -> list[Row]:
    """Every variant on every backend, and what makes two plain SDPA calls of a difference."""
    rows = []
    lengths = cfg.lengths or ([512] if world.device.type == "cpu" else [2048, 4096, 8192, 16384])
    with progress("attention", len(lengths) * len(AttentionArm.MEASURES) * cfg.rounds) as bar:
        for length in lengths:
            arms = [
                (Row({"length": length, "variant": variant, "backend": backend}), arm)
                for variant in cfg.variants or [v for v in variants(cfg) if not mixed(cfg, v)]
                for backend in (*(cfg.backends or BACKENDS), TWO_CALLS)
                for arm in [attempt(partial(AttentionArm, cfg, variant, backend, length, world))]
                if backend != TWO_CALLS or getattr(arm, "differential", False)
            ]
            group = [row for row, _ in arms]
            for measure in AttentionArm.MEASURES:
                works = [arm if isinstance(arm, str) else partial(arm.run, measure) for _, arm in arms]
                time_in_turn(measure, group, works, cfg.rounds, world.device, bar)
            for row, arm in arms:
                for fact, method in {"memory (MB)": "peak_megabytes", "error": "largest_error"}.items():
                    row.facts[fact] = None if isinstance(arm, str) else attempt(getattr(arm, method))
            rows += group
    return rows


def mixed(cfg: BenchConfig, variant: str) -> bool:
    return len(set(model_config(cfg, variant).layers)) > 1


class AttentionArm:
    """A variant's attention module on random input, and the facade calls that the module makes on it.

    Default shapes: 8 sequences and a baseline of 8 heads of 32 on a CPU, 4 and 16 heads of 64 on CUDA.
    """

    MEASURES = ("op forward", "op forward+backward", "module forward", "module forward+backward")

    def __init__(self, cfg: BenchConfig, variant: str, backend: str, length: int, world: World) -> None:
        if backend == "fused" and world.device.type != "cuda":
            raise ValueError("the fused kernel needs a CUDA GPU")  # Triton's interpreter would run, and measure nothing
        if mixed(cfg, variant):
            raise ValueError("its layers are of several variants: see their rows")
        self.ops = {"attend_diff": two_calls} if backend == TWO_CALLS else {}
        self.device, self.autocast = world.device, autocast(cfg, world)
        on_cpu = world.device.type == "cpu"
        heads, width = cfg.heads or (8 if on_cpu else 16), cfg.width or (32 if on_cpu else 64)
        shape = {"n_layer": 1, "n_head": heads, "head_dim": width, "d_model": heads * width, "context": length}
        small = {"d_ff": 8, "vocab_size": 256, "backend": "sdpa" if self.ops else backend}  # only attention is timed
        model, generator = Decoder(model_config(cfg, variant, **shape, **small)), torch.Generator().manual_seed(0)
        self.module = model.blocks[0].attention
        for p in self.module.parameters():
            if p.dim() == 2:  # scores of order 1: at initialization the maps are flat, and an error hardly shows
                torch.nn.init.normal_(p, std=p.shape[1] ** -0.5, generator=generator)
        model.to(world.device)
        tokens = random_tokens(cfg.batch or (8 if on_cpu else 4), length, 256, world)
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._record(model, tokens)
        self.differential = any(name == "attend_diff" for name, _ in self.calls)
        self.gradients: dict[str, list[Tensor]] = {}  # of the outputs, made at the first backward

    def _record(self, model: Decoder, tokens: Tensor) -> None:
        """Note what the module is given, and what it gives to the facade, in one forward pass."""
        given: list[Any] = []

        def recorded(name: str, function: Callable) -> Callable:
            def call(*args: Any, **options: Any) -> Tensor:
                arguments = inspect.signature(function).bind(*args, **options).arguments
                self.calls.append((name, {key: leaf(value) for key, value in arguments.items()}))
                return self.ops.get(name, function)(*args, **options)

            return call

        hook = self.module.register_forward_pre_hook(lambda _, args: given.extend(args))
        with facade(recorded), self.autocast, torch.no_grad():
            model(tokens)
        hook.remove()
        self.x, *self.rest = map(leaf, given)

    def run(self, measure: str) -> None:
        """One call of what `measure` names."""
        level, passes = measure.split()
        forward = self.op if level == "op" else self.whole
        if passes == "forward":
            with torch.no_grad(), self.autocast:
                forward()
            return
        with self.autocast:
            outputs = forward()
        if measure not in self.gradients:
            self.gradients[measure] = [torch.randn_like(y) for y in outputs]
        inputs = [self.x, *self.module.parameters()]
        if level == "op":
            inputs = [x for _, arguments in self.calls for x in tensors(list(arguments.values()))]
        torch.autograd.grad(outputs, inputs, self.gradients[measure], allow_unused=True)

    def op(self) -> list[Tensor]:
        """The outputs of the facade calls alone."""
        return [self.ops.get(name, getattr(backends, name))(**arguments) for name, arguments in self.calls]

    def whole(self) -> list[Tensor]:
        """The output of the module."""
        with facade(lambda name, function: self.ops.get(name, function)) if self.ops else nullcontext():
            return [self.module(self.x, *self.rest)]

    def peak_megabytes(self) -> float | None:
        """What forward and backward of the op allocate at most, beside the inputs; None on a CPU, which does not count it."""
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.run("op forward+backward")
        return (torch.cuda.max_memory_allocated() - before) / 1e6

    @torch.no_grad()
    def largest_error(self) -> float:
        """Largest difference of the op's outputs from the N x N formula in float64, on the first sequence."""
        with self.autocast:
            outputs = self.op()
        worst = []
        for (name, arguments), output in zip(self.calls, outputs, strict=True):
            T = output.shape[-2]
            for start in range(0, T, ERROR_ROWS):
                stop = min(T, start + ERROR_ROWS)
                part = {key: query_rows(key, value, start, stop) for key, value in arguments.items()}
                expected = getattr(backends, name)(**part | {"backend": "math"})
                worst.append((output[:1, ..., start:stop, :].double() - expected).abs().max())
        return torch.stack(worst).max().item()  # NaN if any is


def two_calls(
    q: Tensor, k: Tensor, v: Tensor, lam: Tensor, mask: Mask, backend: str = "sdpa", dropout: float = 0.0
) -> Tensor:
    """`attend_diff` as one would write it first: two causal SDPA calls and a subtraction."""
    if not mask.plain:
        raise ValueError("two plain calls are for the causal mask alone")
    options = {"dropout_p": dropout, "is_causal": True, "enable_gqa": v.shape[1] != q.shape[1]}
    first, second = (
        F.scaled_dot_product_attention(q[:, :, i], keys, v, **options)
        for i, keys in enumerate(k.expand(-1, -1, 2, -1, -1).unbind(2))
    )
    return first - lam.to(first.dtype) * second


@contextmanager
def facade(replace: Callable[[str, Callable], Callable]) -> Iterator[None]:
    """Within it, a variant that calls facade function `name` calls `replace(name, function)` instead."""
    try:
        for file, name, function in facade_uses():
            setattr(file, name, replace(name, function))
        yield
    finally:
        for file, name, function in facade_uses():
            setattr(file, name, function)


@cache
def facade_uses() -> list[tuple[ModuleType, str, Callable]]:
    """(variant's file, name, function) wherever a variant has imported a function of the facade."""
    functions = {name: getattr(backends, name) for name in ("attend", "attend_diff", "attend_union")}
    files = [m for name, m in sys.modules.items() if name.startswith("model.attention.") and m is not backends]
    return [(m, name, f) for m in files for name, f in functions.items() if getattr(m, name, None) is f]


def leaf(value: Any) -> Any:
    """The tensors of an argument (same strides) as leaves that take a gradient."""
    if isinstance(value, list):
        return [leaf(part) for part in value]
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value


def tensors(value: Any) -> list[Tensor]:
    """All floating-point tensors in an argument."""
    if isinstance(value, list):
        return [x for part in value for x in tensors(part)]
    return [value] if isinstance(value, Tensor) and value.is_floating_point() else []


def query_rows(name: str, value: Any, start: int, stop: int) -> Any:
    """A facade argument in float64, of the first sequence's query rows start..stop, which see no later key."""
    if isinstance(value, list):
        return [query_rows(name, part, start, stop) for part in value]
    if not tensors(value):
        return value
    value = (value[:1] if value.dim() > 3 else value).double()
    if name in ("k", "v", "keys", "values"):
        return value[..., :stop, :]
    per_row = value.dim() > 1 and value.shape[-2] > 1  # q, and a lambda per token
    return value[..., start:stop, :] if per_row else value


# ---------------------------------------- train and decode


def train(cfg: BenchConfig, world: World) -> list[Row]:
    """Training steps on random tokens; 8 sequences on a CPU, 64 on CUDA, of the size's context."""
    batch = cfg.batch or (8 if world.device.type == "cpu" else 64)
    tokens, peak = batch * cfg.model.context, peak_flops(world.device)
    rows = [
        Row({"model": variant, "layers": cfg.model.n_layer, "width": cfg.model.d_model}, tokens)
        for variant in variants(cfg)
    ]
    steps = [attempt(partial(TrainingStep, cfg, variant, batch, world)) for variant in variants(cfg)]
    with progress("train", cfg.rounds) as bar:
        time_in_turn("tokens/s", rows, steps, cfg.rounds, world.device, bar)
    for row, step in zip(rows, steps, strict=True):
        if seconds := row.seconds.get("tokens/s"):
            flops = step.model.flops_per_token()["total"]
            row.facts = {"parameters": step.model.num_params(), "MFLOPs/token": flops / 1e6}
            row.facts["mfu"] = flops * tokens / median(seconds) / peak if peak else None
    return rows


class TrainingStep:
    """Calling it takes one optimizer step, as train.py takes it."""

    def __init__(self, cfg: BenchConfig, variant: str, batch: int, world: World) -> None:
        self.model = Decoder(model_config(cfg, variant, vocab_size=VOCABULARY)).to(world.device)
        self.optimizers, self.autocast = build_optimizers(self.model, cfg.optim), autocast(cfg, world)
        compiled = cfg.compile if cfg.compile is not None else world.device.type == "cuda"
        self.clip = cfg.optim.clip or float("inf")
        self.net = torch.compile(self.model, dynamic=False) if compiled else self.model
        self.rows = random_tokens(batch, self.model.cfg.context + 1, VOCABULARY, world)

    def __call__(self) -> None:
        with self.autocast:
            loss = self.net(self.rows[:, :-1], self.rows[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def monitor(cfg: BenchConfig, world: World) -> list[Row]:
    """Training steps as `train` takes them, and the same with a look after each; a look's own time is `look (ms)`."""
    batch, settings = cfg.batch or (8 if world.device.type == "cpu" else 64), MonitorConfig()
    rows = [
        Row({"model": variant, "layers": cfg.model.n_layer, "width": cfg.model.d_model, "sequences": batch})
        for variant in variants(cfg)
    ]
    steps = [attempt(partial(TrainingStep, cfg, variant, batch, world)) for variant in variants(cfg)]
    looks = [step if isinstance(step, str) else StepAndLook(step, settings, world) for step in steps]
    with progress("monitor", 2 * cfg.rounds) as bar:
        time_in_turn("step", rows, steps, cfg.rounds, world.device, bar)
        time_in_turn("step and look", rows, looks, cfg.rounds, world.device, bar)
    for row, look in zip(rows, looks, strict=True):
        if seconds := row.seconds.get("step and look"):
            own = median(look.seconds[-len(seconds) :])
            share = own / settings.every / median(row.seconds["step"])
            row.facts = {"look (ms)": 1e3 * own, f"share at every={settings.every} (%)": 100 * share}
    return rows


class StepAndLook:
    """Calling it takes a training step and reads the monitor, whose own time it notes."""

    def __init__(self, step: "TrainingStep", settings: MonitorConfig, world: World) -> None:
        self.step, self.device, self.seconds = step, world.device, []
        self.monitor = Monitor(step.model, step.rows[: settings.windows, :-1], settings.layers)

    def __call__(self) -> None:
        self.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(self.monitor.read()["monitor_s"])


def decode(cfg: BenchConfig, world: World) -> list[Row]:
    """Token number `length` of one sequence, greedily, with and without a cache; 512 and float32 by default."""
    lengths, rows = cfg.lengths or [512], []
    with progress("decode", len(lengths) * cfg.rounds) as bar:
        for length in lengths:
            arms = {name: attempt(partial(Decoding, cfg, name, length, world)) for name in variants(cfg)}
            group = [Row({"length": length, "model": name, "cache": how}) for name in arms for how in ("yes", "no")]
            pairs = [(arm, arm) if isinstance(arm, str) else (arm.cached, arm.uncached) for arm in arms.values()]
            works = [work for pair in pairs for work in pair]
            time_in_turn("token", group, works, cfg.rounds, world.device, bar)
            for cached, uncached in zip(group[::2], group[1::2], strict=True):
                if cached.seconds and uncached.seconds:
                    cached.facts["faster than without"] = paired_ratio(uncached, cached, "token")
            rows += group
    return rows


class Decoding:
    """The last token of a random sequence, the others being in the cache already or not; calls return the next id (B,)."""

    def __init__(self, cfg: BenchConfig, variant: str, length: int, world: World) -> None:
        if length < 2:
            raise ValueError(f"length {length} leaves nothing to cache")
        changes = {"vocab_size": VOCABULARY, "context": max(length, cfg.model.context)}
        self.model = Decoder(model_config(cfg, variant, **changes)).to(world.device).eval()
        self.autocast, self.cache = autocast(cfg, world), KVCache(length)
        self.tokens = random_tokens(cfg.batch or 1, length, VOCABULARY, world)
        self.last = torch.tensor([length - 1], device=world.device)
        with torch.no_grad(), self.autocast:
            self.model(self.tokens[:, :-1], cache=self.cache)

    @torch.no_grad()
    def cached(self) -> Tensor:
        self.cache.length = self.tokens.shape[1] - 1  # forget the last call
        with self.autocast:
            return self.model(self.tokens[:, -1:], cache=self.cache)[:, -1].argmax(-1)

    @torch.no_grad()
    def uncached(self) -> Tensor:
        with self.autocast:
            return self.model(self.tokens, rows=self.last)[:, -1].argmax(-1)


# ---------------------------------------- probe


def probe(cfg: BenchConfig, world: World) -> list[Row]:
    """What eval.attention_noise does for one prompt, of 2,048, 8,192 and 32,768 tokens and gpt2's vocabulary by default."""
    lengths, rows = cfg.lengths or [2048, 8192, 32768], []
    with progress("probe", len(lengths) * len(variants(cfg)) * cfg.rounds) as bar:
        for length in lengths:
            group = [Row({"length": length, "variant": variant}) for variant in variants(cfg)]
            for _ in range(cfg.rounds):
                for row in group:
                    done = attempt(partial(in_own_process, probe_once, cfg, row.labels["variant"], length, world))
                    if isinstance(done, str):
                        row.not_measured["rows"] = done
                    else:
                        row.seconds.setdefault("rows", []).append(done[0])
                        row.facts["peak memory (MB)"] = max(done[1], row.facts.get("peak memory (MB)", 0))
                    bar.update()
            measured = [row for row in group if row.seconds]
            for row in measured:
                row.ratio["rows"] = paired_ratio(row, measured[0], "rows")
            rows += group
    return rows


def in_own_process(work: Callable, *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


@torch.inference_mode()
def probe_once(cfg: BenchConfig, variant: str, length: int, world: World) -> tuple[float, float]:
    """Seconds of one forward pass that records the last token's rows, and the process's peak memory in MB."""
    changes = {"vocab_size": PROBE_VOCABULARY, "context": length}
    model = Decoder(model_config(cfg, variant, **changes)).to(world.device).eval()
    tokens = random_tokens(cfg.batch or 1, length, PROBE_VOCABULARY, world)
    last = torch.tensor([length - 1], device=world.device)

    def look() -> None:
        with attention_rows(model, last), autocast(cfg, world):
            model(tokens, rows=last)

    return seconds_of(look, 1, world.device), peak_of_process(world.device)


def peak_of_process(device: torch.device) -> float:
    """MB; of a process on Linux not `memory_gb`'s number, which a child takes over from the process that started it."""
    status = Path("/proc/self/status")
    if device.type == "cpu" and status.is_file():
        peak = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
        return int(peak[1]) * 1.024e-3
    peak = memory_gb(device)
    return float("nan") if peak is None else 1e3 * peak


# ---------------------------------------- loader and tokenizer


def sample_text() -> str:
    """0.7 MB of English: the language reference that is installed with Python."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def loader(cfg: BenchConfig, world: World) -> list[Row]:
    """Batches of 64 sequences of the size's context, read and shuffled as in training, without the prefetching thread."""
    ids, length = build_tokenizer(TokenizerConfig("bytes")), cfg.model.context
    tokens, batch = np.resize(ids.encode_array(sample_text()), SHARD_TOKENS), cfg.batch or 64
    with tempfile.TemporaryDirectory() as folder, progress("loader", cfg.rounds) as bar:
        sources = {}
        for name, vocabulary in {"text, uint16": ids.vocab_size, "text, uint32": 100_000}.items():
            path = Path(folder) / f"{vocabulary}.bin"
            write_shard(path, tokens, vocab_size=vocabulary, fingerprint=ids.fingerprint)
            sources[name] = attempt(partial(Windows, [Shard(path)], length))
        mixed = partial(RetrievalSource, RetrievalMixConfig(), sources["text, uint16"], ids, length)
        sources["retrieval documents"] = attempt(mixed)
        works = [s if isinstance(s, str) else batches(Loader(s, batch, length, seed=1)) for s in sources.values()]
        rows = [Row({"source": name, "length": length}, batch * length) for name in sources]
        time_in_turn("tokens/s", rows, works, cfg.rounds, world.device, bar)
    return rows


def batches(load: Loader) -> Work:
    """Every call reads the next batch."""
    steps = itertools.count()
    return lambda: load(next(steps))


def tokenizer(cfg: BenchConfig, world: World) -> list[Row]:
    """Bytes, a bpe vocabulary of 4096 trained on the text itself, and gpt2 where tiktoken has its file or gets it."""
    text, rows, works = sample_text(), [], []
    n_bytes = len(text.encode())
    for wanted in (TokenizerConfig("bytes"), TokenizerConfig("bpe", VOCABULARY), TokenizerConfig("gpt2")):
        made = attempt(partial(build_tokenizer, wanted, [text]))
        missing = isinstance(made, str)
        facts = (
            {} if missing else {"vocabulary": made.vocab_size, "bytes/token": n_bytes / len(made.encode_array(text))}
        )
        rows.append(Row({"tokenizer": wanted.name}, n_bytes / 1e6, facts=facts))
        works.append(made if missing else partial(made.encode_array, text))
    with progress("tokenizer", cfg.rounds) as bar:
        time_in_turn("MB/s", rows, works, cfg.rounds, world.device, bar)
    return rows


BENCHES = {
    "attention": attention,
    "train": train,
    "loader": loader,
    "tokenizer": tokenizer,
    "decode": decode,
    "probe": probe,
    "monitor": monitor,
}


# ---------------------------------------- table and command


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table, its columns padded to be read in a terminal."""
    measures = list(dict.fromkeys(m for row in rows for m in (*row.seconds, *row.not_measured)))
    facts = list(dict.fromkeys(key for row in rows for key in row.facts))
    heads = [measure if row.amount else f"{measure} (ms)" for row in rows[:1] for measure in measures]
    lines = [[*rows[0].labels, *heads, *facts, "note"]]
    for row in rows:
        cells = [*map(str, row.labels.values()), *(cell(row, measure) for measure in measures)]
        shown = [number(row.facts.get(key)) for key in facts]
        lines.append([*cells, *shown, note(row, measures)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    padded = (" | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(f"| {line} |" for line in padded)


def cell(row: Row, measure: str) -> str:
    """median (least-most) ratio."""
    if measure not in row.seconds:
        return "-"
    values = [row.amount / s if row.amount else 1e3 * s for s in row.seconds[measure]]
    return f"{number(median(values))} ({number(min(values))}-{number(max(values))}) {row.ratio[measure]:.2f}x"


def note(row: Row, measures: list[str]) -> str:
    """Why something is missing, once per reason."""
    reasons: dict[str, list[str]] = {}
    for measure, reason in row.not_measured.items():
        reasons.setdefault(reason, []).append(measure)
    whole = len(row.not_measured) == len(measures)
    texts = (f"{'' if whole else ', '.join(which) + ' '}not measured: {why[:160]}" for why, which in reasons.items())
    return "; ".join(texts)


def number(value: float | str | None) -> str:
    """Three significant digits, or all before the decimal point; n/a for None, the reason for what was not measured."""
    if value is None or isinstance(value, str):
        return f"not measured: {value[:160]}" if value else "n/a"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def check(cfg: BenchConfig) -> None:
    """Raise ValueError, with what to type, for names that do not exist and sizes that are not positive."""
    known = {
        "what": ([cfg.what], list(BENCHES)),
        "variants": (cfg.variants or [], names("model")),
        "backends": (cfg.backends or [], list(BACKENDS)),
    }
    for key, (given, allowed) in known.items():
        if unknown := [name for name in given if name not in allowed]:
            raise ValueError(f"{key} has no '{unknown[0]}': use {', '.join(allowed)}")
    for key in ("rounds", "batch", "heads", "width", "lengths"):
        value = getattr(cfg, key)
        if any(number is not None and number < 1 for number in (value if isinstance(value, list) else [value])):
            raise ValueError(f"{key}={value} must be at least 1: correct it, or leave it out")


@command("bench", BenchConfig)
def main(cfg: BenchConfig) -> None:
    check(cfg)
    if cfg.what == "decode" and cfg.dtype == "auto":
        cfg.dtype = "float32"
    world, load = join_world(cfg.device), os.getloadavg()[0]
    rows = BENCHES[cfg.what](cfg, world)
    if not any(row.seconds for row in rows):
        raise ValueError(f"nothing could be measured: {next(iter(rows[0].not_measured.values()))}")
    where = machine() | {"load": round(load, 2), "dtype": str(pick_dtype(cfg.dtype, world.device))}
    content = {"bench": cfg.what, "config": asdict(cfg), "machine": where, "version": version()}
    path = Path(cfg.out or f"runs/bench/{cfg.what}.json")
    write_atomic(path, json.dumps(content | {"results": {"rows": list(map(asdict, rows))}}, indent=1).encode())
    text = f"{table(rows)}\n\n{conditions(content)}\n"
    write_atomic(path.with_suffix(".md"), text.encode())
    print(f"{text}{path}")


def conditions(content: dict[str, Any]) -> str:
    """Under which the table was made, in one line."""
    where = content["machine"]
    return (f"n = {content['config']['rounds']} rounds; {where['cpu']}, GPU {where['gpu']}, {where['threads']} threads, "
            f"{where['dtype']}, load {where['load']} at the start; {content['version']}")  # fmt: skip


if __name__ == "__main__":
    main()
