"""A training run as a folder: its configuration, its name, and how it begins, continues or branches off another run."""

import hashlib
import math
import os
import re
import socket
import sys
import sysconfig
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import yaml
from hydra.core.hydra_config import HydraConfig

from configs.files import FolderLock, json_text, read_json_lines, read_run_config, remove_leftovers, write_atomic
from configs.provenance import machine, version
from data.config import DataConfig
from data.tokenizer import Tokenizer, load_tokenizer
from model import native
from model.config import DecoderConfig
from model.decoder import Decoder, matched
from training import checkpoint
from training.checkpoint import CheckpointConfig, flatten
from training.distributed import World, restarts
from training.guard import Guard
from training.monitor import MonitorConfig
from training.optim import OptimConfig
from training.schedule import decay_start
from training.text import refuse_other_text


@dataclass
class TrainConfig:
    """A training run. Lengths of time are in optimizer steps, sizes of batches and evaluations in tokens."""

    model: DecoderConfig = field(default_factory=DecoderConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    steps: Annotated[int, "[1, 99999999]"] = 1000  # optimizer steps in all
    batch_tokens: Annotated[int, "[1, inf)"] = 16384  # tokens per optimizer step, over all processes
    micro_batch: Annotated[int | None, "[1, inf)"] = None  # sequences per process and pass; None: as many as fit
    seed: Annotated[int, "[0, 4294967295]"] = 1  # seed of the initial weights, of the order of the data and of dropout
    eval_every: Annotated[int, "[0, inf)"] = 250  # steps between validations; 0: only at the end
    eval_tokens: Annotated[int, "[1, inf)"] = 262144  # tokens that each validation reads
    nonfinite: Annotated[int, "[1, inf)"] = 10  # end the run after this many updates in a row that are not finite
    outlier_z: Annotated[float | None, "(0, 7.8]"] = (
        None  # skip updates whose loss or gradient norm is this many standard deviations above its recent mean; None: never
    )
    log_every: Annotated[int, "[1, inf)"] = 10  # steps between lines of metrics.jsonl
    needle_every: Annotated[int, "[0, inf)"] = 0  # steps between needle-in-a-haystack checks of retrieval; 0: none
    needle_samples: Annotated[int, "[1, inf)"] = 64  # questions in each needle check
    runs: str = "runs"  # parent folder of run folders
    run_dir: str | None = None  # folder of this run; None: a folder in `runs` whose name lists the overrides
    resume: bool = False  # continue the run in its folder from its newest checkpoint
    init_from: str | None = None  # folder of a run; its weights become the initial weights of this run
    branch_from: str | None = None  # folder of a longer wsd run, whose steps before this run's decay are taken over
    device: str = "auto"  # auto | cpu | cuda
    dtype: str = "auto"  # auto | float32 | bfloat16 (autocast)
    compile: bool | None = None  # use torch.compile; None: on CUDA, and on a CPU if the run is long enough to gain time
    parallel: str = "ddp"  # ddp: a copy per process; fsdp: split over all processes; hsdp: a copy per `shard_processes` of them
    shard_processes: Annotated[int | None, "[1, inf)"] = None  # hsdp: processes per copy; None: those of one machine
    activation_checkpointing: bool = False  # compute each block again in the backward pass: less memory, more time
    wandb: str = "off"  # off | online | offline: mirror metrics.jsonl to Weights & Biases


# The groups and fields that a resume may not change. (It may change dtype and compile, because the machine may change.)
DECIDES = ("model", "data", "optim", "steps", "batch_tokens", "seed", "outlier_z", "init_from")
# Fields within these groups that only say where and how a machine reads the data and computes: not part of what a run is.
WHERE = (
    "data.dir", "data.path", "data.workers", "data.longest_line", "data.expansion", "data.streaming", "model.backend",
)  # fmt: skip


# Measured on two CPU cores (docs/PERFORMANCE.md): seconds that compiling takes, share of a step's time that it saves, and
# FLOP/s of an eager step.
COMPILE_SECONDS, COMPILE_SAVES, CPU_FLOPS = 60, 0.2, 1.3e11


def compiles(cfg: TrainConfig, flops_per_token: int, world: World) -> bool:
    """Whether to compile: as `cfg` says; else on CUDA, and on a CPU that can compile if the run is long enough to repay it.

    The length of the whole run decides, so that a run that is resumed goes on as it began. ValueError: it is to be compiled,
    but this machine cannot compile.
    """
    on_card = world.device.type == "cuda"
    if cfg.compile is None and not on_card:
        seconds = flops_per_token * cfg.steps * cfg.batch_tokens / world.size / CPU_FLOPS
        return seconds * COMPILE_SAVES > COMPILE_SECONDS and can_compile("c++")
    language = "c" if on_card else "c++"
    if cfg.compile is not False and sys.platform == "linux" and not can_compile(language):
        wrong = f"torch.compile needs a compiler for {language.upper()} and Python's headers, which this machine lacks"
        raise ValueError(f"{wrong}: install them (Debian: g++ and python3-dev), or train with compile=false")
    return cfg.compile is not False


def can_compile(language: str) -> bool:
    """Whether torch.compile finds what it needs: Linux, a compiler (c++, or c for Triton on a GPU) and Python's headers."""
    # The folders in which torch and Triton look for the headers, and those in which the compiler does.
    folders = [sysconfig.get_path("include"), sysconfig.get_path("include", scheme="posix_prefix")]
    folders += filter(None, os.environ.get("CPATH", "").split(os.pathsep))
    headers = any(Path(folder, "Python.h").is_file() for folder in folders)
    return sys.platform == "linux" and bool(native.compiler(language)) and headers


@dataclass(frozen=True)
class Vocabulary:
    """What a model's configuration takes from a tokenizer. eot: id of the end-of-text token, None if no model needs it."""

    vocab_size: int
    eot: int | None = None


def fill_model(cfg: DecoderConfig, tokenizer: Tokenizer | Vocabulary) -> DecoderConfig:
    """`cfg` with the tokenizer's vocabulary and end-of-text token, its heads and its matched FFN width.

    ValueError where the configuration gives a vocabulary that is smaller than the tokenizer's.
    """
    cfg.vocab_size = cfg.vocab_size or tokenizer.vocab_size
    if cfg.vocab_size < tokenizer.vocab_size:
        wrong = f"model.vocab_size={cfg.vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size}"
        raise ValueError(f"{wrong}: leave it at 0")
    if cfg.document_mask and cfg.eot is None:
        cfg.eot = tokenizer.eot
    return matched(cfg)


# The folder's name


def default_run_dir(cfg: TrainConfig) -> Path:
    """runs/NAME, the same on every rank: the experiment, the model, the overrides as KEYVALUE, and the seed.

    size= and data= give their values alone; sweep, resume, wandb, device, runs and run_dir are left out. A key is shortened to
    its shortest ending that no other key of the configuration has, and a hash stands for the end of a long name.
    """
    hydra = HydraConfig.get()
    choices = hydra.runtime.choices
    parts = [choices[group] for group in ("experiment", "model") if choices.get(group)]
    for override in hydra.overrides.task:
        key, _, value = override.lstrip("+~").partition("=")
        if key in ("size", "data"):
            parts.append(value)
        elif key not in ("experiment", "model", "sweep", "seed", "resume", "wandb", "device", "runs", "run_dir"):
            parts.append(_shortest(key, cfg) + value)
    name = "-".join([*(re.sub(r"[^\w.-]+", "-", part).strip("-") for part in parts), f"s{cfg.seed}"])
    if len(name) > 150:  # folders' names end at 255 bytes
        name = f"{name[:120]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}-s{cfg.seed}"
    return Path(cfg.runs) / name


def _shortest(key: str, cfg: Any) -> str:
    parts, known = key.split("."), flatten(asdict(cfg))
    for count in range(1, len(parts)):
        short = ".".join(parts[-count:])
        if sum(other == short or other.endswith(f".{short}") for other in known) == 1:
            return short
    return key


# How a run begins


def start_or_resume(
    cfg: TrainConfig, run_dir: Path, model: Decoder, optimizers: list, guard: Guard, tokenizer: Tokenizer, world: World
) -> tuple[int, FolderLock | None]:
    """Begin, resume or branch this run. Returns the next step to train, and the lock of the run folder (main process only).

    A run is resumed from its newest undamaged checkpoint. A new run takes its weights from `init_from`, or its first steps
    (weights, state of optimizers and guard, metrics) from `branch_from`, if one of them is given.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise ValueError(f"run_dir={run_dir} is a file: give a folder")
    lock = lock_run(run_dir) if world.main and run_dir.is_dir() else None
    there = len(checkpoint.checkpoints(run_dir))
    if world.largest(there) != there:
        wrong = f"{run_dir} has fewer checkpoints for this process than for another"
        raise ValueError(f"{wrong}: put run_dir on a file system that all processes share")
    restarted = world.main and lock is not None and restarts() > 0 and lock.holder == launcher()
    if (cfg.resume or world.largest(restarted)) and (run_dir / "config.yaml").exists():
        refuse_other_config(run_dir, asdict(cfg))
        if checkpoint.checkpoints(run_dir):
            refuse_other_tokenizer(run_dir, tokenizer, cfg.data.dir)
            refuse_other_text(run_dir, cfg.data)
        step = checkpoint.newest(run_dir, lambda f: checkpoint.load(f, model, optimizers, guard), world.main)
        if step is not None:
            if world.main and step < cfg.steps:
                write_config(cfg, run_dir)  # options that decide nothing may have changed, as data.dir
            return step, lock
    elif world.main and ((run_dir / "metrics.jsonl").exists() or checkpoint.checkpoints(run_dir)):
        how = "its config.yaml is missing, copy it back" if cfg.resume else "continue it with resume=true"
        raise ValueError(f"{run_dir} already holds a run: {how}, or choose another run_dir=...")
    if cfg.init_from and cfg.branch_from:
        raise ValueError("init_from= and branch_from= are both given: give one of them")
    first = 0
    if cfg.init_from:
        if not checkpoint.checkpoints(Path(cfg.init_from)):
            raise ValueError(f"init_from={cfg.init_from} has no checkpoint: give the folder of a trained run")
        refuse_other_tokenizer(Path(cfg.init_from), tokenizer, cfg.data.dir)
        checkpoint.newest(Path(cfg.init_from), lambda f: checkpoint.load(f, model), world.main)
    if cfg.branch_from:
        folder = trunk_checkpoint(cfg)
        refuse_other_tokenizer(Path(cfg.branch_from), tokenizer, cfg.data.dir)
        refuse_other_text(Path(cfg.branch_from), cfg.data)
        first = checkpoint.load(folder, model, optimizers, guard)
    if world.main:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = lock or lock_run(run_dir)
        begin(cfg, run_dir, tokenizer, first)
    return first, lock


def begin(cfg: TrainConfig, run_dir: Path, tokenizer: Tokenizer, first: int) -> None:
    """Write tokenizer and configuration of a new run, and for a branch the trunk's metrics up to step `first`."""
    tokenizer.save(run_dir)
    write_config(cfg, run_dir)
    if cfg.branch_from:
        lines = read_json_lines(Path(cfg.branch_from) / "metrics.jsonl")
        shared = [json_text(line) for line in lines if line.get("step", math.inf) <= first]
        write_atomic(run_dir / "metrics.jsonl", "".join(f"{line}\n" for line in shared).encode())


def write_config(cfg: TrainConfig, run_dir: Path) -> None:
    write_atomic(run_dir / "config.yaml", yaml.safe_dump(asdict(cfg), sort_keys=False).encode())


def lock_run(run_dir: Path) -> FolderLock:
    """Lock `run_dir` for training, and remove the half-written files that a killed training run left there."""
    lock = FolderLock(run_dir, "trains in it")
    for folder in (run_dir, run_dir / "checkpoints"):
        remove_leftovers(folder)
    return lock


def launcher() -> str:
    """Text that names the launcher of this process (torchrun or a Slurm job); a restart by the launcher keeps it."""
    if job := os.environ.get("SLURM_JOB_ID"):
        return f"started by Slurm's job {job}"
    return f"started by process {os.getppid()} on {socket.gethostname()}"


def trunk_checkpoint(cfg: TrainConfig) -> Path:
    """The checkpoint of `branch_from` at the step where this run's own decay begins.

    With schedule=wsd, a shorter run equals a longer run up to that step, so the branch ends as if it had been trained alone.
    """
    trunk, step = Path(cfg.branch_from or ""), decay_start(cfg.steps, cfg.optim)
    if cfg.optim.schedule != "wsd":
        raise ValueError("branch_from= needs a schedule with a stable phase: use optim.schedule=wsd for both runs")
    if step == 0:
        wrong = "this run decays from its first step, so it shares no step with branch_from="
        raise ValueError(f"{wrong}: leave branch_from= out, or lower optim.decay")
    if not (trunk / "config.yaml").is_file():
        raise ValueError(f"branch_from={trunk} is not a run: give the folder of a longer run with optim.schedule=wsd")
    advice = "this run must have the configuration of branch_from=, except steps"
    refuse_other_config(trunk, asdict(cfg), but=("steps", "init_from"), advice=advice)
    theirs = read_run_config(trunk).get("steps", 0)
    if step > decay_start(theirs, cfg.optim):
        raise ValueError(f"branch_from={trunk} decays before step {step}: branch off a run of more than {theirs} steps")
    folder = checkpoint.of_step(trunk, step)
    if not folder.is_dir():
        raise ValueError(f"branch_from={trunk} has no checkpoint of step {step}: train it with checkpoint.at=[{step}]")
    return folder


def refuse_other_tokenizer(run: Path, tokenizer: Tokenizer, shards: str) -> None:
    """ValueError if `run` has another tokenizer: weights fit the token ids of one tokenizer only."""
    theirs = load_tokenizer(run)
    if theirs.fingerprint != tokenizer.fingerprint:
        raise ValueError(
            f"{run} was trained with another tokenizer ({theirs.name}, {theirs.vocab_size} tokens) than that of {shards} "
            f"({tokenizer.name}, {tokenizer.vocab_size}): use data prepared with the run's tokenizer (of data=mqar: its "
            "keys, values and noise)"
        )


def deciding(config: dict[str, Any], but: tuple[str, ...] = ()) -> dict[str, Any]:
    """The values of DECIDES under dotted keys, without `but` and WHERE.

    Of init_from only PARENT/NAME counts, because the folders above it differ between machines.
    """
    flat = flatten({key: config.get(key) for key in DECIDES if key not in but})
    if flat.get("init_from"):
        flat["init_from"] = "/".join(Path(str(flat["init_from"])).parts[-2:])
    return {key: value for key, value in flat.items() if key not in WHERE}


def refuse_other_config(run_dir: Path, ours: dict[str, Any], but: tuple[str, ...] = (), advice: str | None = None) -> None:
    """ValueError if a run was started with other values of the fields DECIDES; the fields `but` and WHERE may differ."""
    flat_theirs, flat_ours = deciding(read_run_config(run_dir), but), deciding(ours, but)
    default = flatten(asdict(TrainConfig()))  # an older run lacks the options added since: they had their defaults
    differ = [key for key in flat_ours if flat_theirs.get(key, default.get(key)) != flat_ours[key]]
    if differ:
        what = ", ".join(f"{key}={flat_theirs.get(key, default.get(key))} (now {flat_ours[key]})" for key in differ[:4])
        advice = advice or "repeat its overrides, or choose another run_dir= for a new run"
        raise ValueError(f"{run_dir} was started with {what}: {advice}")


def facts(model: Decoder) -> dict[str, Any]:
    """What the first line of metrics.jsonl states."""
    return sizes(model) | origin()


def origin() -> dict[str, Any]:
    """The machine and the version of the code."""
    return {"machine": machine(), "version": version()}


def sizes(model: Decoder) -> dict[str, int]:
    flops = model.flops_per_token()
    return {
        "params": model.num_params(non_embedding=False),
        "params_non_embedding": model.num_params(),
        "flops_per_token": flops["total"],
        "attention_flops_per_token": flops["attention"],
        "d_ff": model.cfg.d_ff,
    }
