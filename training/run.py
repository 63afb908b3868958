"""A training run as a folder: its configuration, its name, and how it begins, goes on or branches off another run."""

import hashlib
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import IO, Annotated, Any

import torch.distributed as dist
import yaml
from hydra.core.hydra_config import HydraConfig

from configs.composing import in_sweep, key_of, swept_keys
from configs.files import flatten, lock_folder, read_run_config, remove_leftovers, write_atomic
from configs.provenance import machine, version
from data.config import DataConfig
from data.stream import refuse_ignored_options, refuse_other_text, refuse_other_tokenizer, text_digest
from data.tokenizer import Tokenizer
from model.config import DecoderConfig, decoder_config
from model.decoder import Decoder, matched
from training import checkpoint
from training.checkpoint import CheckpointConfig, Saver
from training.distributed import World, pick_dtype
from training.metrics import Metrics
from training.monitor import MonitorConfig
from training.optim import Guard, OptimConfig, check_warmup, decay_start, lr_factor
from training.tracking import import_wandb


@dataclass
class TrainConfig:
    """A training run. Lengths of time are in optimizer steps, sizes of batches and evaluations in tokens."""

    model: DecoderConfig = field(default_factory=DecoderConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    steps: Annotated[int, "[1, 99999999]"] = 1000  # optimizer steps in all
    batch_tokens: Annotated[int, "[1, 1000000000000]"] = 16384  # tokens per optimizer step, over all processes
    micro_batch: Annotated[int | None, "[1, inf)"] = None  # sequences per process and pass; None: all, on a GPU 16384 tokens
    seed: Annotated[int, "[0, 4294967295]"] = 1  # seed of the initial weights, of the order of the data and of dropout
    eval_every: Annotated[int, "[0, inf)"] = 250  # steps between validations; 0: only at the end
    eval_tokens: Annotated[int, "[1, inf)"] = 262144  # tokens that each validation reads
    nonfinite: Annotated[int, "[1, inf)"] = 10  # this many non-finite updates in a row end the run (on a GPU at a logged step)
    log_every: Annotated[int, "[1, inf)"] = 10  # steps between lines of metrics.jsonl
    needle_every: Annotated[int, "[0, inf)"] = 0  # steps between needle-in-a-haystack checks of retrieval; 0: none
    needle_samples: Annotated[int, "[1, inf)"] = 64  # questions in each needle check
    runs: str = "runs"  # parent folder of run folders
    run_dir: str | None = None  # folder of this run; None: a folder in `runs`, named after the overrides
    resume: bool = False  # continue the run in its folder from its newest checkpoint
    init_from: str | None = None  # folder of a run whose weights, and model where no option is given, this run begins with
    branch_from: str | None = None  # folder of a longer wsd run, whose steps before this run's decay are taken over
    device: str = "auto"  # auto | cpu | cuda
    dtype: Annotated[str, ("auto", "float32", "bfloat16")] = "auto"  # of autocast
    compile: bool | None = None  # use torch.compile; None: on CUDA, and on a CPU if the run is long enough to gain time
    parallel: Annotated[str, ("ddp", "fsdp", "hsdp")] = "ddp"  # a copy per process; split over all; a copy per shard_processes
    shard_processes: Annotated[int | None, "[1, inf)"] = None  # hsdp: processes per copy; None: those of one machine
    activation_checkpointing: bool = False  # compute each block again in the backward pass: less memory, more time
    wandb: Annotated[str, ("off", "online", "offline")] = "off"  # mirror metrics.jsonl to Weights & Biases


# The groups and fields that say what a run is: a resume may not change them. (It may change dtype and compile.)
IDENTITY = ("model", "data", "optim", "steps", "batch_tokens", "seed", "init_from")
# Fields of these groups that only say where and how a machine reads data and computes (longest_line, expansion: of old runs).
LOCAL_ONLY = set("data.dir data.path data.workers data.longest_line data.expansion data.streaming model.backend".split())


def check_config(cfg: TrainConfig, world: World, overrides: Sequence[str] = ()) -> None:
    """ValueError for mistakes that can be seen before any work. overrides: those of the command line."""
    refuse_ignored_options(cfg.data, overrides)
    import_wandb(cfg.wandb)
    refuse_unequal_processes(cfg, world)
    check_warmup(cfg.steps, cfg.optim)
    if cfg.run_dir and Path.cwd().is_relative_to(Path(cfg.run_dir).resolve()):
        raise ValueError(f"run_dir={cfg.run_dir} is not a folder for one run alone: use run_dir=runs/NAME")
    if cfg.init_from and cfg.branch_from:
        raise ValueError("init_from= and branch_from= are both given: give one of them")
    unit = cfg.model.context * world.size
    if cfg.batch_tokens % unit:
        wrong = f"batch_tokens={cfg.batch_tokens} is not a multiple of context {cfg.model.context} x {world.size} processes"
        raise ValueError(f"{wrong}: use batch_tokens={max(1, round(cfg.batch_tokens / unit)) * unit}")


def refuse_unequal_processes(cfg: TrainConfig, world: World) -> None:
    """ValueError on all processes if one has another configuration, text or code than the main one."""
    if world.size == 1:
        return
    settings = {key: value for key, value in flatten(asdict(cfg)).items() if key not in LOCAL_ONLY | {"device"}}
    everybody: list[dict] = [{}] * world.size
    dist.all_gather_object(everybody, settings | {"the text's digest": text_digest(cfg.data), "the code's version": version()})
    for rank, other in enumerate(everybody):
        for key, value in everybody[0].items():
            if other.get(key) != value and "unknown" not in (value, other.get(key)):  # where git does not answer
                wrong = f"{key} is {other.get(key)} on rank {rank}, but {value} on rank 0"
                raise ValueError(f"{wrong}: start all processes with the same command, code and data")


def take_architecture(cfg: TrainConfig, overrides: Sequence[str]) -> None:
    """Give `cfg` the model of the run `init_from`, except the fields in `overrides`; do nothing if these choose a model."""
    named = set(map(key_of, overrides))
    if not cfg.init_from or {"model", "size", "experiment"} & named:
        return
    runs = [cfg.init_from, cfg.run_dir] if cfg.resume and cfg.run_dir else [cfg.init_from]  # a resumed run's source may be gone
    known = next((run for run in map(Path, runs) if (run / "config.yaml").is_file()), None)
    if known is None:
        return
    taken = replace(cfg, model=decoder_config(read_run_config(known)["model"]))
    for key in {"model.backend"} | {key for key in named if key.startswith("model.")}:
        group, _, option = key.rpartition(".")
        setattr(attrgetter(group)(taken), option, attrgetter(key)(cfg))
    cfg.model = taken.model


def fill_model(cfg: DecoderConfig, tokenizer: Tokenizer | DecoderConfig) -> DecoderConfig:
    """`cfg` with heads, matched FFN width, and vocabulary size and end of text of the tokenizer, or of a model that was trained
    with it. ValueError: too small a size.
    """
    cfg.vocab_size = cfg.vocab_size or tokenizer.vocab_size
    if cfg.vocab_size < tokenizer.vocab_size:
        wrong = f"model.vocab_size={cfg.vocab_size} is below the tokenizer's {tokenizer.vocab_size}"
        raise ValueError(f"{wrong}: leave it at 0, and with init_from= use data with that run's tokenizer")
    if cfg.document_mask and cfg.eot is None:
        cfg.eot = tokenizer.eot
    return matched(cfg)


def default_run_dir(cfg: TrainConfig) -> Path:
    """runs/NAME, the same on every rank: experiment, model, overrides (in a sweep: those that it varies), seed."""
    hydra = HydraConfig.get()
    choices, swept = hydra.runtime.choices, swept_keys()
    parts = [choices[group] for group in ("experiment", "model") if choices.get(group)]
    for override in hydra.overrides.task:
        key, _, value = override.lstrip("+~").partition("=")
        if swept and key not in swept:
            continue
        if key in ("size", "data"):
            parts += [value]
        elif key not in ("experiment", "model", "sweep", "seed", "resume", "wandb", "device", "runs", "run_dir"):
            parts += [_shortest(key, cfg) + value]
    name = "-".join([*(re.sub(r"[^\w.-]+", "-", part).strip("-") for part in parts), f"s{cfg.seed}"])
    if len(name.encode()) > 150:  # folders' names end at 255 bytes
        name = f"{name.encode()[:120].decode(errors='ignore')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}-s{cfg.seed}"
    in_place = in_sweep() and any(override.lstrip("+").startswith("hydra.sweep.dir=") for override in hydra.overrides.hydra)
    return Path(hydra.sweep.dir if in_place else cfg.runs) / name


def _shortest(key: str, cfg: Any) -> str:
    """The shortest ending of `key` that no other key of the configuration has."""
    parts, known = key.split("."), [f".{other}" for other in flatten(asdict(cfg))]
    endings = (".".join(parts[-count:]) for count in range(1, len(parts)))
    return next((ending for ending in endings if sum(other.endswith(f".{ending}") for other in known) == 1), key)


class Run:
    """The folder of a run, opened by all processes together; deleted if a new run fails at once. first: step to begin at."""

    def __init__(
        self, cfg: TrainConfig, model: Decoder, optimizers: list, guard: Guard, tokenizer: Tokenizer, world: World
    ) -> None:
        self.cfg, self.model, self.optimizers, self.guard, self.world = cfg, model, optimizers, guard, world
        self.folder = Path(cfg.run_dir or default_run_dir(cfg))
        self.is_new = not self.folder.exists()
        self.lock = lock_run(self.folder) if world.main and not self.is_new else None
        count = len(checkpoint.checkpoints(self.folder))
        if world.largest(count) != count:
            raise ValueError(f"the processes see different checkpoints: put {self.folder} on a file system that they share")
        resumed_at = self._resume(tokenizer)
        self.first = self._begin(tokenizer) if resumed_at is None else resumed_at
        self.saver = Saver(self.folder, cfg.checkpoint, model, optimizers, world)
        self.facts = facts(model) | {"dtype": str(pick_dtype(cfg.dtype, world.device)).removeprefix("torch.")}
        self.log: Metrics | None = None
        self.recorded = 0  # step of the last line of metrics.jsonl

    def _resume(self, tokenizer: Tokenizer) -> int | None:
        """Load the newest checkpoint of a run that is to go on; returns its step, None for a new run."""
        cfg, folder, main = self.cfg, self.folder, self.world.main
        if not (cfg.resume and (folder / "config.yaml").exists()):
            if main and ((folder / "metrics.jsonl").exists() or checkpoint.checkpoints(folder)):
                how = "its config.yaml is missing, copy it back" if cfg.resume else "continue it with resume=true"
                raise ValueError(f"{folder} already holds a run: {how}, or choose another run_dir=...")
            return None
        refuse_other_config(folder, asdict(cfg), but=("steps",) if goes_on_longer(folder, cfg) else ())
        if checkpoint.checkpoints(folder):
            refuse_other_tokenizer(folder, tokenizer, cfg.data.dir)
            refuse_other_text(folder, cfg.data)
        step = checkpoint.newest(folder, self._load, main, resumes=True)
        if main and step is not None and step < cfg.steps:
            write_config(cfg, folder)  # options that decide nothing may have changed, as data.dir
        return step

    def _load(self, folder: Path) -> int:
        return checkpoint.load(folder, self.model, self.optimizers, self.guard)

    def _begin(self, tokenizer: Tokenizer) -> int:
        """Make the folder of a new run, with what it takes from `init_from` or `branch_from`. Returns its first step."""
        cfg, first = self.cfg, 0
        if cfg.init_from:
            source = Path(cfg.init_from)
            if not checkpoint.checkpoints(source):
                raise ValueError(f"init_from={source} has no checkpoint: give the folder of a trained run")
            refuse_other_tokenizer(source, tokenizer, cfg.data.dir)
            step = checkpoint.newest(source, lambda folder: checkpoint.load(folder, self.model), self.world.main)
            if self.world.largest(step) != step:
                raise ValueError(f"the processes read different checkpoints of init_from={source}: wait until it is trained")
        if cfg.branch_from:
            trunk, at_decay = Path(cfg.branch_from), trunk_checkpoint(cfg)
            refuse_other_tokenizer(trunk, tokenizer, cfg.data.dir)
            refuse_other_text(trunk, cfg.data)
            first = self._load(at_decay)
        if self.world.main:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = self.lock or lock_run(self.folder)
            tokenizer.save(self.folder)
            write_config(cfg, self.folder)
            if cfg.branch_from and (trunk / "metrics.jsonl").is_file():
                shutil.copyfile(trunk / "metrics.jsonl", self.folder / "metrics.jsonl")  # `Metrics` drops later lines
        return first

    def open_log(self) -> None:
        """The main process begins or continues metrics.jsonl."""
        if self.world.main:
            self.log = Metrics(self.folder, self.cfg.wandb, asdict(self.cfg), self.first)
            if self.first == 0:
                self.record(0, **self.facts, text_digest=text_digest(self.cfg.data))
            else:
                self.record(self.first, continued={key: self.facts[key] for key in ("machine", "version", "dtype")})

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind and self.log and self.is_new and self.recorded == self.first and not checkpoint.checkpoints(self.folder):
            shutil.rmtree(self.folder, ignore_errors=True)

    def finish(self) -> None:
        self.saver.finish()
        if self.log:
            self.log.close()

    def record(self, step: int, **values: Any) -> None:
        """The main process writes a line of metrics.jsonl."""
        if self.log:
            self.recorded = step
            self.log.write(step=step, tokens=step * self.cfg.batch_tokens, **values)

    def save(self, step: int) -> None:
        if step > self.first or not checkpoint.of_step(self.folder, step).exists():
            self.saver.save(step, self.guard)

    def opening(self, compiled: bool, micro_batch: int) -> str:
        """The line printed before the first step: the run's size and how it computes."""
        sizes = self.facts
        return (
            f"{self.folder}: {f'continues at step {self.first}' if self.first else 'new run'}, "
            f"{sizes['params_non_embedding'] / 1e6:.2f}M parameters without embeddings ({sizes['params'] / 1e6:.2f}M with), "
            f"d_ff {sizes['d_ff']}, {sizes['flops_per_token'] / 1e6:.1f} MFLOPs per token "
            f"({sizes['attention_flops_per_token'] / 1e6:.1f} attention), {self.world.device.type} x {self.world.size}, "
            f"{sizes['dtype']}{', compiled' if compiled else ''}, micro batch {micro_batch}"
        )


def write_config(cfg: TrainConfig, run_dir: Path) -> None:
    write_atomic(run_dir / "config.yaml", yaml.safe_dump(asdict(cfg), sort_keys=False).encode())


def lock_run(run_dir: Path) -> IO[str]:
    """Lock `run_dir` for training, and remove what a killed run left half-written there."""
    lock = lock_folder(run_dir, "trains in it")
    for folder in (run_dir, run_dir / "checkpoints"):
        remove_leftovers(folder)
    return lock


def trunk_checkpoint(cfg: TrainConfig) -> Path:
    """The checkpoint of `branch_from` at the step where this run's decay begins, up to which the two runs are equal."""
    trunk, step = Path(cfg.branch_from), decay_start(cfg.steps, cfg.optim)
    if cfg.optim.schedule != "wsd" or not step or not (trunk / "config.yaml").is_file():
        raise ValueError(f"branch_from={trunk}: give a longer run, and optim.schedule=wsd, optim.decay below 1 for both runs")
    advice = "this run must have the configuration of branch_from=, except steps"
    refuse_other_config(trunk, asdict(cfg), but=("steps", "init_from"), advice=advice)
    trunk_steps, folder = read_run_config(trunk).get("steps", 0), checkpoint.of_step(trunk, step)
    if step > decay_start(trunk_steps, cfg.optim):
        raise ValueError(f"branch_from={trunk} decays before step {step}: branch off a run of more than {trunk_steps} steps")
    if not folder.is_dir():
        raise ValueError(f"branch_from={trunk} has no checkpoint of step {step}: train it with checkpoint.at=[{step}]")
    return folder


def identity_of(config: dict[str, Any], but: tuple[str, ...] = ()) -> dict[str, Any]:
    """What makes a run this run: the values of the fields IDENTITY, without `but` and LOCAL_ONLY, under dotted keys."""
    flat = flatten({key: config.get(key) for key in IDENTITY if key not in but})
    if flat.get("init_from"):
        flat["init_from"] = "/".join(Path(str(flat["init_from"])).parts[-2:])  # folders above differ between machines
    return {key: value for key, value in flat.items() if key not in LOCAL_ONLY}


def refuse_other_config(run_dir: Path, ours: dict[str, Any], but: tuple[str, ...] = (), advice: str | None = None) -> None:
    """ValueError if a run was started with other values of the fields IDENTITY without `but`."""
    saved, ours = identity_of(read_run_config(run_dir), but), identity_of(ours, but)
    saved = flatten(asdict(TrainConfig())) | saved  # an older run lacks the options added since: they had their defaults
    if differ := [key for key in ours if saved[key] != ours[key]]:
        what = ", ".join(f"{key}={saved[key]} (now {ours[key]})" for key in differ[:4])
        if differ == ["steps"]:
            what += ", with which its learning rates so far would be others"
        advice = advice or "repeat its overrides, or start a new run with another run_dir=, and init_from= to take its weights"
        raise ValueError(f"{run_dir} was started with {what}: {advice}")


def goes_on_longer(run_dir: Path, cfg: TrainConfig) -> bool:
    """Whether `cfg` lengthens a run and keeps the learning rates of its finished steps, as wsd does before the decay."""
    planned, saved = read_run_config(run_dir).get("steps", cfg.steps), checkpoint.checkpoints(run_dir)
    done = range(int(saved[-1].name.removeprefix("step_")) if saved else 0)
    return cfg.steps > planned and all(lr_factor(s, planned, cfg.optim) == lr_factor(s, cfg.steps, cfg.optim) for s in done)


def facts(model: Decoder) -> dict[str, Any]:
    """What the first line of metrics.jsonl says: the model's sizes, the machine, the version of the code."""
    return sizes(model) | {"machine": machine(), "version": version()}


def sizes(model: Decoder) -> dict[str, int]:
    flops = model.flops_per_token()
    return {
        "params": model.num_params(non_embedding=False),
        "params_non_embedding": model.num_params(),
        "flops_per_token": flops["total"],
        "attention_flops_per_token": flops["attention"],
        "d_ff": model.cfg.d_ff,
    }
