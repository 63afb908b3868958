"""Train a decoder: python train.py model=diff size=micro data=stdlib, or torchrun --nproc_per_node=8 train.py ...

The loop is below, flat, in running order: configuration, data, model, optimizer, resume, then step by step.
"""

import contextlib
import re
import signal
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from hydra.core.hydra_config import HydraConfig
from torch.nn.parallel import DistributedDataParallel

from configs import command
from configs.provenance import machine, version
from data.config import DataConfig
from data.loader import Loader, Mixture, Prefetcher, Source, Windows, mix
from data.retrieval import RetrievalSource
from data.shards import open_split
from data.tokenizer import Tokenizer, load_tokenizer
from model.config import DecoderConfig, decoder_config
from model.decoder import Decoder, matched
from training import checkpoint
from training.checkpoint import CheckpointConfig
from training.distributed import World, join_world, pick_dtype
from training.metrics import Metrics, Stopwatch, clock, last_val_loss, log_line, memory_gb, peak_flops
from training.monitor import MonitorConfig, monitor_of
from training.optim import OptimConfig, build_optimizers, set_lr
from training.schedule import lr_factor


@dataclass
class TrainConfig:
    """A training run. Lengths of time are in optimizer steps, sizes of batches and evaluations in tokens."""

    model: DecoderConfig = field(default_factory=DecoderConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    steps: int = 1000
    batch_tokens: int = 16384  # per optimizer step, over all processes
    micro_batch: int | None = None  # sequences per process and forward pass; None: all of them, no accumulation
    seed: int = 1
    eval_every: int = 250
    eval_tokens: int = 262144
    log_every: int = 10
    runs: str = "runs"  # where run directories are made
    run_dir: str | None = None  # None: a name made of the overrides, in `runs`
    resume: bool = False
    init_from: str | None = None  # a run whose weights to start from
    device: str = "auto"  # auto | cpu | cuda
    dtype: str = "auto"  # auto | float32 | bfloat16 (autocast)
    compile: bool | None = None  # None: on CUDA
    wandb: str = "off"  # off | online | offline


@command("train", TrainConfig)
def main(cfg: TrainConfig) -> float:
    world = join_world(cfg.device)
    try:
        return train(cfg, world)
    except Diverged as error:
        if "direction" not in HydraConfig.get().sweeper:  # only a search goes on, and has learned something
            raise
        print(f"error: {error}", flush=True)
        return float("inf")
    finally:
        world.close()


class Diverged(ValueError):
    """The loss is no finite number any more."""


def train(cfg: TrainConfig, world: World) -> float:
    """Run `cfg` to its last step, or to the first signal; everything it leaves is in its run directory.

    Returns the validation loss at the end, which a search over the configuration minimises.
    """
    # ---------------------------------------- data
    folder = Path(cfg.data.dir)
    tokenizer = load_tokenizer(folder, cfg.data.tokenizer)
    same = {"vocab_size": tokenizer.vocab_size, "fingerprint": tokenizer.fingerprint}
    train_shards, val_shards = (open_split(folder, split, **same) for split in ("train", "val"))
    cfg.model.vocab_size = cfg.model.vocab_size or tokenizer.vocab_size
    if cfg.model.vocab_size < tokenizer.vocab_size:
        wrong = f"model.vocab_size={cfg.model.vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size}"
        raise ValueError(f"{wrong}: leave it at 0")
    if cfg.model.document_mask and cfg.model.eot is None:
        cfg.model.eot = tokenizer.eot
    T = cfg.model.context
    batch = sequences_per_step(cfg, world)
    source = training_source(cfg, Windows(train_shards, T), tokenizer)
    micro_batch = cfg.micro_batch or batch // world.size
    loader = Prefetcher(Loader(source, batch, T, cfg.seed, world.rank, world.size, micro_batch))
    val_windows = Windows(val_shards, T)

    # ---------------------------------------- model and optimizer
    cfg.model = matched(cfg.model)
    model = Decoder(cfg.model, seed=cfg.seed).to(world.device)
    optimizers = build_optimizers(model, cfg.optim)
    dtype = pick_dtype(cfg.dtype, world.device)
    autocast = torch.autocast(world.device.type, dtype, enabled=dtype != torch.float32)
    net = model
    if cfg.compile if cfg.compile is not None else world.device.type == "cuda":
        net = torch.compile(net, dynamic=False)
    if world.size > 1:
        net = DistributedDataParallel(net, broadcast_buffers=False)  # all ranks make the same ones

    monitor = monitor_of(cfg.monitor, model, val_windows, world.device)

    # ---------------------------------------- run directory: new, or continued
    run_dir = Path(cfg.run_dir or default_run_dir(cfg))
    first = start_or_resume(cfg, run_dir, model, optimizers, tokenizer, world)
    world.barrier()
    if first == cfg.steps:
        if world.main:
            print(f"{run_dir}: already done, {first} steps")
        return last_val_loss(run_dir)
    flops = model.flops_per_token()
    log = None
    if world.main:
        log = Metrics(run_dir, cfg.wandb, asdict(cfg), first)
        if first == 0:
            tokenizer.save(run_dir)
            log.write(step=0, tokens=0, **facts(cfg, model, flops))
        print(f"{run_dir}: {model.num_params() / 1e6:.2f}M parameters without embeddings ({model.num_params(False) / 1e6:.2f}M "
              f"with), d_ff {cfg.model.d_ff}, {flops['total'] / 1e6:.1f} MFLOPs per token ({flops['attention'] / 1e6:.1f} "
              f"attention), {world.device.type} x {world.size}, {str(dtype).removeprefix('torch.')}", flush=True)  # fmt: skip

    # ---------------------------------------- loop
    stop = StopSignal()
    peak = peak_flops(world.device)
    watch = Stopwatch(log.seconds_before if log else 0.0)  # of training alone: stands still in evaluation and saving
    step, logged, seconds = first, first, watch.seconds
    if first == 0:
        model.set_step(0)  # what warms up is seen at its beginning
    while True:
        last = step == cfg.steps

        # once in a while: loss on the validation set (all processes take part)
        if last or (cfg.eval_every and step % cfg.eval_every == 0 and step > first):
            with watch.paused(), autocast:
                val_loss = evaluate(model, val_windows, cfg.eval_tokens, micro_batch, world)
            if log:
                log.write(step=step, tokens=step * cfg.batch_tokens, val_loss=val_loss, time_s=round(watch.seconds, 2))
                print(f"step {step}/{cfg.steps} | val loss {val_loss:.4f}", flush=True)

        # once in a while: lambda, gates and entropies of a few layers (the main process looks)
        if log and monitor and (last or step % cfg.monitor.every == 0) and (step > first or step == 0):
            with watch.paused():
                log.write(step=step, tokens=step * cfg.batch_tokens, **monitor.read())

        # once in a while: a checkpoint (the main process writes)
        stopping = stop.asked(world, step, cfg.log_every)
        if last or stopping or (cfg.checkpoint.every and step % cfg.checkpoint.every == 0 and step > first):
            with watch.paused():
                if world.main:
                    checkpoint.save(run_dir, step, model, optimizers, cfg.checkpoint.keep)
                world.barrier()
        if last or stopping:
            break

        # one step: micro batches, clipping, optimizers
        lr = set_lr(optimizers, lr_factor(step, cfg.steps, cfg.optim))
        model.set_step(step)
        torch.manual_seed(mix(cfg.seed, step, world.rank) >> 1)  # dropout is a function of the step: nothing to save
        loss = torch.zeros((), device=world.device)
        for micro in range(loader.micros):
            rows = torch.from_numpy(loader(step, micro)).to(world.device)  # (b, T + 1)
            final = micro == loader.micros - 1
            with net.no_sync() if world.size > 1 and not final else contextlib.nullcontext():
                with autocast:
                    part = net(rows[:, :-1], rows[:, 1:]) / loader.micros
                part.backward()
            loss += part.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.optim.clip or float("inf"))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1

        # one line
        if step % cfg.log_every == 0 or step in (1, cfg.steps):
            loss = world.mean(loss).item()
            if not loss < float("inf"):
                raise Diverged(f"the loss is {loss} at step {step}: lower optim.lr, or lengthen optim.warmup")
            speed = (step - logged) * cfg.batch_tokens / (watch.seconds - seconds)
            logged, seconds = step, watch.seconds
            line = {
                "loss": loss,
                "lr": lr,
                "grad_norm": norm.item(),
                "tokens_per_s": round(speed, 1),
                "mfu": speed * flops["total"] / (peak * world.size) if peak else None,
                "mem_gb": round(memory_gb(world.device), 3),
                "time_s": round(seconds, 2),
            }
            if log:
                log.write(step=step, tokens=step * cfg.batch_tokens, **line)
                print(log_line(step, cfg.steps, line, (cfg.steps - step) * cfg.batch_tokens / speed), flush=True)

    loader.close()
    if log:
        log.close()
        how = "done" if last else f"stopped by {stop.name}; continue with the same command and resume=true"
        print(f"{run_dir}: {how} after step {step} and {clock(watch.seconds)} of training", flush=True)
    if not last:
        raise SystemExit(0)  # ends a sweep too
    return val_loss


def sequences_per_step(cfg: TrainConfig, world: World) -> int:
    """Global batch in sequences; refuses token counts that do not divide."""
    T = cfg.model.context
    if cfg.batch_tokens % (T * world.size):
        step = T * world.size
        near = max(1, round(cfg.batch_tokens / step)) * step
        wrong = f"batch_tokens={cfg.batch_tokens} is not a multiple of context {T} x {world.size} processes"
        raise ValueError(f"{wrong}: use batch_tokens={near}")
    return cfg.batch_tokens // T


def training_source(cfg: TrainConfig, text: Windows, tokenizer: Tokenizer) -> Source:
    """The text alone, or mixed with retrieval documents made from it."""
    weight = cfg.data.retrieval.weight
    if not weight:
        return text
    retrieval = RetrievalSource(cfg.data.retrieval, text, tokenizer, cfg.model.context)
    return Mixture([(text, 100 - weight), (retrieval, weight)])


@torch.no_grad()
def evaluate(model: Decoder, windows: Windows, tokens: int, batch: int, world: World) -> float:
    """Mean loss in nats over `tokens` of the validation set, in windows at even distances, shared out over the processes."""
    count = max(1, min(len(windows), tokens // windows.length))
    chosen = torch.linspace(0, len(windows) - 1, count, dtype=torch.float64).round().long().tolist()
    total = torch.zeros(2, dtype=torch.float64, device=world.device)  # summed loss, windows
    model.eval()
    mine = chosen[world.rank :: world.size]
    for at in range(0, len(mine), batch):
        rows = torch.stack([torch.from_numpy(windows.window(i)) for i in mine[at : at + batch]]).to(world.device)
        loss = model(rows[:, :-1], rows[:, 1:])
        total += torch.tensor([loss.item() * len(rows), len(rows)], dtype=torch.float64, device=world.device)
    model.train()
    total = world.mean(total)
    return (total[0] / total[1]).item()


def default_run_dir(cfg: TrainConfig) -> str:
    """runs/NAME, the same on every rank: the groups chosen, the seed and every other override."""
    choices, overrides = HydraConfig.get().runtime.choices, HydraConfig.get().overrides.task
    groups = [choices[group] for group in ("experiment", "model", "size", "data") if choices.get(group)]
    named = ("experiment", "sweep", "model", "size", "data", "seed", "resume", "wandb", "device", "runs", "run_dir")
    others = [o.lstrip("+~") for o in overrides if o.split("=")[0].lstrip("+~") not in named]
    short = [
        re.sub(r"[^\w.-]+", "-", other.split(".")[-1] if "=" not in other else _last_key(other)) for other in others
    ]
    return f"{cfg.runs}/" + "-".join([*groups, *short, f"s{cfg.seed}"])


def _last_key(override: str) -> str:
    key, value = override.split("=", 1)
    return f"{key.rsplit('.', 1)[-1]}{value}"


def start_or_resume(
    cfg: TrainConfig, run_dir: Path, model: Decoder, optimizers: list, tokenizer: Tokenizer, world: World
) -> int:
    """Make the run directory, or load its newest checkpoint; returns the step to go on from."""
    config = asdict(cfg)
    if cfg.resume and (run_dir / "config.yaml").exists():
        refuse_other_config(run_dir, config)
        if found := checkpoint.checkpoints(run_dir):
            refuse_other_tokenizer(run_dir, tokenizer, cfg.data.dir)
            return checkpoint.load(found[-1], model, optimizers)
    elif (run_dir / "metrics.jsonl").exists() and world.main:
        raise ValueError(f"{run_dir} already holds a run: continue it with resume=true, or choose another run_dir=...")
    if cfg.init_from:
        found = checkpoint.checkpoints(Path(cfg.init_from))
        if not found:
            raise ValueError(f"init_from={cfg.init_from} has no checkpoint: give the folder of a trained run")
        refuse_other_tokenizer(Path(cfg.init_from), tokenizer, cfg.data.dir)
        checkpoint.load(found[-1], model)
    if world.main:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return 0


def refuse_other_tokenizer(run: Path, tokenizer: Tokenizer, shards: str) -> None:
    """Weights know token ids of one tokenizer only."""
    theirs = load_tokenizer(run)
    if theirs.fingerprint != tokenizer.fingerprint:
        wrong = f"{run} was trained with another tokenizer ({theirs.name}, {theirs.vocab_size} tokens) than that of {shards}"
        raise ValueError(
            f"{wrong} ({tokenizer.name}, {tokenizer.vocab_size}): use data prepared with the run's tokenizer"
        )


def refuse_other_config(run_dir: Path, ours: dict[str, Any]) -> None:
    """A resumed run must be the same run: what decides its losses may not change."""
    theirs = yaml.safe_load((run_dir / "config.yaml").read_text())
    theirs["model"] = asdict(decoder_config(theirs["model"]))  # options that are newer than the run have their defaults
    flat_theirs, flat_ours = flatten({k: theirs.get(k) for k in DECIDES}), flatten({k: ours[k] for k in DECIDES})
    differ = [key for key in flat_ours if flat_theirs.get(key) != flat_ours[key]]
    if differ:
        what = ", ".join(f"{key}={flat_theirs.get(key)} (now {flat_ours[key]})" for key in differ[:4])
        raise ValueError(
            f"{run_dir} was started with {what}: repeat its overrides, or start a new run with init_from={run_dir}"
        )


DECIDES = ("model", "data", "optim", "steps", "batch_tokens", "seed")


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def facts(cfg: TrainConfig, model: Decoder, flops: dict[str, int]) -> dict[str, Any]:
    """What the first line of metrics.jsonl states."""
    return {
        "params": model.num_params(non_embedding=False),
        "params_non_embedding": model.num_params(),
        "flops_per_token": flops["total"],
        "attention_flops_per_token": flops["attention"],
        "d_ff": cfg.model.d_ff,
        "machine": machine(),
        "version": version(),
    }


class StopSignal:
    """SIGTERM and SIGINT ask the loop to leave at the next step that all processes look at."""

    def __init__(self) -> None:
        self.name = ""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, _: Any) -> None:
        self.name = signal.Signals(number).name

    def asked(self, world: World, step: int, every: int) -> bool:
        """Whether to stop now. Several processes agree at every `every`-th step only: agreeing waits for the device."""
        if world.size == 1:
            return bool(self.name)
        return step % every == 0 and world.any(bool(self.name))


if __name__ == "__main__":
    main()
