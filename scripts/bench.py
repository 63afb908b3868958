"""Measure speed: python scripts/bench.py what=NAME [out=runs/bench/NAME.json], where NAME is one of

    attention   a variant's attention on a backend: the attention product alone ("op", with its memory) and the whole module
    train       whole training steps of configs/model at size=micro; with peer=FOLDER the gpt2 stack against a nanoGPT checkout
    shares      the share of attention, of matrix products, of the loss, ... in these steps, uncompiled, by torch's profiler
    choices     matrices of a layer joined into one or separate, and the dtype of the residual stream
    growth      time and memory of a step against its context (over=parameters: against its parameters), with fitted exponents
    busy        training steps beside other processes, for each way in which threads wait for each other
    decode      decoding of one token, with and without a cache
    loader      batches from shards in the page cache, and how long a training step waits for the next batch
    tokenizer   text to ids on one thread: tiktoken alone, our tokenizer, and the whole of data.prepare
    probe       one query's attention rows in a long context: time and peak memory, in a process of its own; use rounds=1
    monitor     a reading of training/monitor.py after a training step, and its share of the time at the default frequency
    checkpoint  training steps, a checkpoint of the same model, and the checkpoint's share of the time at checkpoint.every=100

After a warm-up, every round times all rows in turn (A B C A B C ...), so that a slow period of the machine affects all rows
alike. A cell of the table has the median over rounds, the least and the most in brackets, and the median of the rounds' ratios
to the first row of the same group that could be measured (a group: one length, tokenizer, choice or number of busy processes,
else the whole table). "Forward" runs without gradients. A row that cannot run on this machine says why.
"""

import itertools
import os
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import Tensor

from bench.attention import AttentionArm, op_memory
from bench.data import loader, tokenizer
from bench.models import VOCABULARY, BenchConfig, autocast, batch_size, mixed, model_config, names, random_tokens, variants
from bench.processes import in_own_process
from bench.shares import choices, shares
from bench.timing import Row, Work, attempt, paired_ratios, peak_of_process, seconds_of, table, time_in_turn
from bench.training import TrainingStep, busy, growth, train, training_steps
from configs import command
from configs.files import write_atomic, write_json
from configs.provenance import machine, version
from eval.common import progress
from model.attention.backends import BACKENDS, ROUTES
from model.attention.probe import probe as attention_rows
from model.cache import KVCache
from model.decoder import Decoder
from training.checkpoint import CheckpointConfig
from training.distributed import World, join_world, pick_dtype
from training.monitor import Monitor, MonitorConfig
from training.saver import Saver

PROBE_VOCABULARY = 50_257  # gpt2's: whole logits of 32,768 tokens would be 6.6 GB


# ---------------------------------------- attention


def attention(cfg: BenchConfig, world: World) -> list[Row]:
    """Every variant on every backend. The routes of SDPA for a difference of maps run only for variants with a difference."""
    rows = []
    for length in cfg.lengths or ([512] if world.device.type == "cpu" else [2048, 4096, 8192, 16384]):
        arms = [
            (Row({"length": length, "variant": variant, "backend": backend}), arm)
            for variant in cfg.variants or [v for v in variants(cfg) if not mixed(cfg, v)]
            for backend in cfg.backends or BACKENDS
            for arm in [attempt(partial(AttentionArm, cfg, variant, backend, length, world))]
            if backend not in ROUTES or getattr(arm, "differential", True)
        ]
        group = [row for row, _ in arms]
        for measure in AttentionArm.MEASURES:
            works = [arm if isinstance(arm, str) else partial(arm.run, measure) for _, arm in arms]
            time_in_turn(measure, group, works, cfg.rounds, world.device)
        with progress("memory and errors", len(arms)) as bar:
            for row, arm in arms:
                which, missing = (row.labels["variant"], row.labels["backend"], length), isinstance(arm, str)
                row.facts["memory (MB)"] = None if missing else attempt(partial(op_memory, cfg, *which, world))
                row.facts["error"] = None if missing else attempt(arm.largest_error)
                bar.update()
        rows += group
    return rows


# ---------------------------------------- monitor and decode


def shape(cfg: BenchConfig, world: World) -> dict[str, int]:
    """The labels of a training step's shape."""
    return {"layers": cfg.model.n_layer, "width": cfg.model.d_model, "sequences": batch_size(cfg, world)}


def monitor(cfg: BenchConfig, world: World) -> list[Row]:
    """Training steps as in `train`, and with a reading of the monitor after each; `look (ms)` is the time of a reading."""
    settings, (rows, steps) = MonitorConfig(), training_steps(cfg, world, **shape(cfg, world))
    looks = [step if isinstance(step, str) else StepAndLook(step, settings, world) for step in steps]
    time_in_turn("step", rows, steps, cfg.rounds, world.device)
    time_in_turn("step and look", rows, looks, cfg.rounds, world.device)
    for row, look in zip(rows, looks, strict=True):
        if row.seconds.keys() >= {"step", "step and look"}:
            own = median(look.seconds[-len(row.seconds["step and look"]) :])
            share = own / settings.every / median(row.seconds["step"])
            row.facts = {"look (ms)": 1e3 * own, f"share at every={settings.every} (%)": 100 * share}
    return rows


class StepAndLook:
    """Calling it takes a training step, reads the monitor, and adds the reading's time to `seconds`."""

    def __init__(self, step: TrainingStep, settings: MonitorConfig, world: World) -> None:
        self.step, self.device, self.seconds = step, world.device, []
        self.monitor = Monitor(step.model, step.rows[: settings.windows, :-1], settings.layers)

    def __call__(self) -> None:
        self.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(self.monitor.read()["monitor_s"])


def checkpoint(cfg: BenchConfig, world: World) -> list[Row]:
    """Training steps as in `train`, checkpoints of the same model, and the share of time of one checkpoint in 100 steps."""
    rows, steps = training_steps(cfg, world, **shape(cfg, world))
    time_in_turn("step", rows, steps, cfg.rounds, world.device)
    with tempfile.TemporaryDirectory(dir=".") as folder:  # /tmp may be in memory
        runs = [Path(folder) / str(row.labels["model"]) for row in rows]
        saves = [step if isinstance(step, str) else writing(step, run, world) for step, run in zip(steps, runs, strict=True)]
        time_in_turn("checkpoint", rows, saves, cfg.rounds, world.device)
        for row, run in zip(rows, runs, strict=True):
            if row.seconds.keys() >= {"step", "checkpoint"}:
                files = next((run / "checkpoints").iterdir()).iterdir()
                row.facts["checkpoint (MB)"] = sum(file.stat().st_size for file in files) / 1e6
                row.facts["share at every=100 (%)"] = median(row.seconds["checkpoint"]) / median(row.seconds["step"])
    return rows


def writing(step: "TrainingStep", run: Path, world: World) -> Work:
    """A work that writes a checkpoint as train.py does, waits until it is on disk, and deletes the last but one."""
    saver, numbers = Saver(run, CheckpointConfig(), step.model, step.optimizers, world), itertools.count(1)
    return lambda: saver.save(next(numbers))


def decode(cfg: BenchConfig, world: World) -> list[Row]:
    """Greedy decoding of token number `length` of one sequence, with and without a cache; 512 and float32 by default."""
    rows = []
    for length in cfg.lengths or [512]:
        arms = {name: attempt(partial(Decoding, cfg, name, length, world)) for name in variants(cfg)}
        group = [Row({"length": length, "model": name, "cache": how}) for name in arms for how in ("yes", "no")]
        pairs = [(arm, arm) if isinstance(arm, str) else (arm.cached, arm.uncached) for arm in arms.values()]
        time_in_turn("token", group, [work for pair in pairs for work in pair], cfg.rounds, world.device)
        for cached, uncached in zip(group[::2], group[1::2], strict=True):
            if cached.seconds and uncached.seconds:
                cached.facts["faster than without"] = median(paired_ratios(uncached, cached, "token"))
        rows += group
    return rows


class Decoding:
    """Reads the last token of a random sequence with the others cached, or all tokens; both calls return the next id (B,)."""

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
    """eval.attention_noise's forward pass of one prompt, by default of 2,048, 8,192 and 32,768 tokens, gpt2's vocabulary."""
    lengths, rows = cfg.lengths or [2048, 8192, 32768], []
    with progress("probe", len(lengths) * len(variants(cfg)) * cfg.rounds) as bar:
        for length in lengths:
            group = [Row({"length": length, "variant": variant}) for variant in variants(cfg)]
            for _ in range(cfg.rounds):
                for row in [row for row in group if not row.not_measured]:
                    done = attempt(partial(in_own_process, probe_once, cfg, row.labels["variant"], length, world))
                    if isinstance(done, str):
                        row.not_measured["rows"] = done
                        row.seconds.pop("rows", None)
                    else:
                        row.seconds.setdefault("rows", []).append(done[0])
                        row.facts["peak memory (MB)"] = max(done[1], row.facts.get("peak memory (MB)", 0))
                    bar.update()
            measured = [row for row in group if row.seconds]
            for row in measured:
                row.ratio["rows"] = median(paired_ratios(row, measured[0], "rows"))
            rows += group
    return rows


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


WORKS = (attention, train, shares, choices, growth, busy, loader, tokenizer, decode, probe, monitor, checkpoint)
BENCHES = {work.__name__: work for work in WORKS}


# ---------------------------------------- the command


def check(cfg: BenchConfig) -> None:
    """Raise ValueError, with what to type, for names that do not exist."""
    known = {
        "what": ([cfg.what], list(BENCHES)),
        "variants": (cfg.variants or [], names()),
        "backends": (cfg.backends or [], list(BACKENDS)),
        "over": ([cfg.over], ["context", "parameters"]),
    }
    for key, (given, allowed) in known.items():
        if unknown := [name for name in given if name not in allowed]:
            raise ValueError(f"{key} has no '{unknown[0]}': use {', '.join(allowed)}")
    if cfg.out and Path(cfg.out).suffix != ".json":
        raise ValueError(f"out={cfg.out} is not a .json file: use out=runs/bench/{cfg.what}.json")


@command("bench", BenchConfig)
def main(cfg: BenchConfig) -> None:
    check(cfg)
    if cfg.what == "decode" and cfg.dtype == "auto":
        cfg.dtype = "float32"
    world, load = join_world(cfg.device), os.getloadavg()[0]
    rows = BENCHES[cfg.what](cfg, world)
    if not any(row.seconds for row in rows):
        reasons = [reason for row in rows for reason in row.not_measured.values()]
        raise ValueError(f"nothing could be measured: {[*reasons, 'none of variants= can use one of backends='][0]}")
    where = machine() | {"load": round(load, 2), "dtype": str(pick_dtype(cfg.dtype, world.device))}
    content = {"bench": cfg.what, "config": asdict(cfg), "machine": where, "version": version()}
    path = Path(cfg.out or f"runs/bench/{cfg.what}.json")
    write_json(path, content | {"results": {"rows": list(map(asdict, rows))}})
    text = f"{table(rows)}\n\n{conditions(content)}\n"
    write_atomic(path.with_suffix(".md"), text.encode())
    print(f"{text}{path}")


def conditions(content: dict[str, Any]) -> str:
    """One line with the conditions under which the table was made."""
    where = content["machine"]
    return (f"n = {content['config']['rounds']} rounds; {where['cpu']}, GPU {where['gpu']}, {where['threads']} threads, "
            f"{where['dtype']}, load {where['load']} at the start; {content['version']}")  # fmt: skip


if __name__ == "__main__":
    main()
