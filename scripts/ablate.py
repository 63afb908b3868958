"""Train, evaluate and compare the arms of an experiment over seeds; interrupted or repeated, it goes on where it was.

    python scripts/ablate.py experiment=main seeds=3 [tier=gpu] [jobs=2] [launcher=slurm] ['train=["steps=300"]']

experiment: a file of configs/ablations/experiment/. seeds: a number (1 to N) or a list. Every arm and seed is a run of
train.py, runs/ablate/NAME/ARM-sSEED, then evaluated. Ends in runs/ablate/NAME/results.json, table.md and figures/.
"""

import importlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import MISSING, OmegaConf

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from configs import CONFIG_DIR, USER_ERRORS, command, explain  # noqa: E402
from configs.provenance import machine, version  # noqa: E402
from data.shards import open_split  # noqa: E402
from data.tokenizer import load_tokenizer  # noqa: E402
from eval import ablation  # noqa: E402
from eval.ablation import DIVERGED, Arm, SpikeConfig  # noqa: E402
from eval.common import variant, write_atomically  # noqa: E402
from model.decoder import Decoder, matched  # noqa: E402
from train import TrainConfig, refuse_other_config  # noqa: E402
from training.checkpoint import checkpoints  # noqa: E402
from training.metrics import clock  # noqa: E402

OmegaConf.register_new_resolver("times", lambda factor, number: round(factor * number), replace=True)
REPORT_EVERY = 60  # seconds between two lines of progress
COMPOSING = threading.Lock()  # Hydra's state is global


@dataclass
class TierConfig:
    """A scale: overrides of train.py for every arm, and the shape that experiments refer to."""

    n_head: int = MISSING  # heads of the baseline
    head_dim: int = MISSING  # width of a head
    more_heads_d_ff: int | None = None  # width of the FFN of a baseline with 1.5 times the heads
    retrieval_steps: int | None = None  # steps in which models of this scale learn a needle
    train: list[str] = field(default_factory=list)  # overrides of train.py for every arm
    sizes: dict[str, list[str]] = field(default_factory=dict)  # name -> overrides; experiment=scaling uses them


@dataclass
class LauncherConfig:
    """What starts the runs: processes of this machine, or a launcher plugin of Hydra."""

    plugin: str | None = None  # name of the launcher; None: processes of this machine
    package: str | None = None  # what pip installs for it
    module: str | None = None  # what Python imports of it
    options: dict[str, Any] = field(default_factory=dict)  # of hydra.launcher


@dataclass
class AblateConfig:
    """arms: name -> overrides of train.py; arms are compared with the first. common: overrides for all of them.

    grid: name -> overrides; where given, every arm runs at each of its points and is compared within its point.
    evaluations: commands of eval/ with their overrides. metrics: column -> EVALUATION.key in its JSON, or train.NAME;
    the first is the one that is tested. matched: the arms claim equal parameters. fit: a power law over the grid's sizes.
    train: more overrides for all runs; an arm's own win. only: train and evaluate this run (ARM-sSEED) alone, no table.
    """

    arms: dict[str, list[str]] = MISSING
    grid: dict[str, list[str]] = field(default_factory=dict)
    common: list[str] = field(default_factory=list)
    matched: bool = False
    fit: bool = False
    evaluations: list[str] = field(default_factory=list)
    metrics: dict[str, str] = field(default_factory=dict)
    spikes: SpikeConfig = field(default_factory=SpikeConfig)
    tier: TierConfig = field(default_factory=TierConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    seeds: Any = 3  # a number (1 to N) or a list
    train: list[str] = field(default_factory=list)
    name: str | None = None  # None: the experiment, and the tier where it is not cpu
    runs: str = "runs/ablate"  # where the folders of experiments are made
    jobs: int | None = None  # runs at a time; None: one per GPU, one on a CPU
    only: str | None = None


@dataclass
class Run:
    """One arm at one seed: what train.py and the evaluations are called with."""

    arm: Arm
    seed: int
    folder: Path
    overrides: list[str]
    config: TrainConfig
    evaluations: list[list[str]]
    log: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def trained(self) -> bool:
        found = checkpoints(self.folder)
        return bool(found) and found[-1].name == f"step_{self.config.steps:08d}"

    @property
    def diverged(self) -> bool:
        return (self.folder / DIVERGED).is_file()

    @property
    def work(self) -> float:
        """Training FLOPs in all, to weigh runs in the time left."""
        return self.arm.facts["flops_per_token"] * self.config.batch_tokens * self.config.steps

    def steps_done(self) -> int:
        """Steps logged so far."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        return max((json.loads(line).get("step", 0) for line in lines[-3:] if line.endswith("}")), default=0)

    def left(self) -> list[list[str]]:
        """The commands still to run: training unless finished, evaluations without a result of this training."""
        if self.diverged:
            return []
        commands = [] if self.trained else [[str(ROOT / "train.py"), *self.overrides]]
        return commands + [
            ["-m", f"eval.{name}", f"run={self.folder}", *overrides]
            for name, *overrides in self.evaluations
            if not (self.trained and evaluated(self, name, overrides))
        ]


@command("ablate", AblateConfig)
def main(cfg: AblateConfig) -> None:
    hydra = HydraConfig.get()
    choices = hydra.runtime.choices
    name = cfg.name or choices["experiment"] + ("" if choices["tier"] == "cpu" else f"_{choices['tier']}")
    folder = Path(cfg.runs) / name
    arms, runs = plan(cfg, folder)
    if cfg.only:
        carry_out_alone(cfg, runs, hydra.job.num if hydra.mode == RunMode.MULTIRUN else None)
        return
    refuse_changed(runs)
    left = [run for run in runs if run.left()]
    describe(name, arms, runs, left)
    if left and cfg.launcher.plugin:
        run_by_launcher(cfg, folder, left, list(hydra.overrides.task))
    elif left:
        run_here(left, cfg.jobs, name, len(runs))
    failed = [run for run in runs if run.left()]
    if failed:
        raise ValueError(f"{len(failed)} of {len(runs)} runs are not finished, {reason(failed[0])}")
    write_results(cfg, name, folder, arms, runs)


# What to run


def plan(cfg: AblateConfig, folder: Path) -> tuple[list[Arm], list[Run]]:
    """All arms and runs, every configuration composed and checked before anything is trained."""
    seeds = seed_list(cfg.seeds)
    evaluations = [evaluation_command(text) for text in cfg.evaluations]
    if len({name for name, *_ in evaluations}) < len(evaluations):
        raise ValueError("an evaluation is listed twice, and its results would be too: list each one once")
    arms, runs = [], {}
    for arm, overrides in arm_list(cfg):
        for seed in seeds:
            run_dir = folder / f"{arm.name}-s{seed}"
            full = merged(cfg.tier.train, cfg.common, cfg.train, overrides)
            full = merged(full, [f"seed={seed}", f"run_dir={run_dir}", "resume=true"])
            try:
                config = train_config(full)
            except USER_ERRORS as error:
                raise ValueError(f"arm {arm.name}: {explain(error, TrainConfig)}") from None
            if not arm.facts:
                arm.overrides, arm.variant = full[:-3], variant({"model": asdict(config.model)})
                arm.facts = describe_model(config)
            log = folder / "logs" / f"{run_dir.name}.log"
            runs[seed, arm.name] = Run(arm, seed, run_dir, full, config, evaluations, log)
        arms.append(arm)
    compare_parameters(arms, cfg.matched)
    # Seed by seed, so that an interrupted ablation has whole comparisons.
    return arms, [runs[seed, arm.name] for seed in seeds for arm in arms]


def seed_list(seeds: Any) -> list[int]:
    """seeds=5 means 1 to 5; seeds=[1,4] those."""
    if isinstance(seeds, int) and not isinstance(seeds, bool) and seeds > 0:
        return list(range(1, seeds + 1))
    whole = isinstance(seeds, list) and all(isinstance(s, int) and not isinstance(s, bool) and s >= 0 for s in seeds)
    if not whole or not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds={seeds} is neither a number of seeds nor a list of different ones: use seeds=3")
    return seeds


def arm_list(cfg: AblateConfig) -> list[tuple[Arm, list[str]]]:
    """Arms at every point of the grid, with their overrides; the first arm of a point is the others' reference."""
    if not cfg.metrics:
        raise ValueError("metrics is empty, so nothing would be compared: use '+metrics.valid=perplexity.loss'")
    if not cfg.arms:
        raise ValueError(
            "the experiment has no arms: list them under arms:, as configs/ablations/experiment/main.yaml does"
        )
    found, first = [], next(iter(cfg.arms))
    for point, at in (cfg.grid or {"": []}).items():
        for name, overrides in cfg.arms.items():
            for part in (name, point):
                if re.search(r"[^\w.-]", part):
                    raise ValueError(f"'{part}' cannot be part of a folder's name: use letters, digits, '.', '_', '-'")
            full, reference = (f"{part}-{point}" if point else part for part in (name, first))
            arm = Arm(full, name, point, None if name == first else reference, "", [], {})
            found.append((arm, merged(overrides, at)))
    return found


def merged(*parts: list[str]) -> list[str]:
    """Overrides in order; of several for one key the last stands."""
    last: dict[str, str] = {}
    for override in (o for part in parts for o in part):
        key = override.split("=")[0].lstrip("+~")
        last.pop(key, None)
        last[key] = override
    return list(last.values())


def evaluation_command(text: str) -> list[str]:
    """ "needle samples=20" -> ["needle", "samples=20"], checked."""
    name, *overrides = text.split()
    known = sorted(p.stem for p in (ROOT / "eval").glob("*.py") if re.search(r"^@command\(", p.read_text(), re.M))
    if name not in known or name == "report":
        commands = ", ".join(stem for stem in known if stem != "report")
        raise ValueError(f"evaluations has '{name}', which is none: use {commands}")
    try:
        evaluation_config(name, ["run=none", *overrides])
    except USER_ERRORS as error:
        schema = OmegaConf.get_type(ConfigStore.instance().load(f"{name}_schema.yaml").node)
        raise ValueError(f"evaluation '{text}': {explain(error, schema)}") from None
    return [name, *overrides]


def compose_job(name: str, overrides: list[str]) -> Any:
    """The configuration that a command gets from these overrides."""
    with COMPOSING:
        if GlobalHydra.instance().is_initialized():
            return compose(name, overrides)
        with initialize_config_dir(str(CONFIG_DIR.resolve()), version_base=None):  # in a launcher's job
            return compose(name, overrides)


def evaluation_config(name: str, overrides: list[str]) -> dict[str, Any]:
    """An evaluation's resolved configuration, as it stands in its JSON."""
    importlib.import_module(f"eval.{name}")  # registers its schema
    return OmegaConf.to_container(compose_job(name, overrides), resolve=True)


def train_config(overrides: list[str]) -> TrainConfig:
    """train.py's configuration with what it fills in from the data, as it stands in a run's config.yaml."""
    cfg: TrainConfig = OmegaConf.to_object(compose_job("train", overrides))
    tokenizer = load_tokenizer(Path(cfg.data.dir), cfg.data.tokenizer)
    cfg.model.vocab_size = cfg.model.vocab_size or tokenizer.vocab_size
    if cfg.model.document_mask and cfg.model.eot is None:
        cfg.model.eot = tokenizer.eot
    cfg.model = matched(cfg.model)
    return cfg


def describe_model(cfg: TrainConfig) -> dict[str, Any]:
    """Heads, their width, head norm, parameters and FLOPs, from the model built without memory."""
    with torch.device("meta"):
        model = Decoder(cfg.model)
    attentions, none = [block.attention for block in model.blocks], torch.nn.Identity()
    flops = model.flops_per_token()
    norms = ["no" if isinstance(getattr(a, "head_norm", none), torch.nn.Identity) else "yes" for a in attentions]
    return {
        "heads": _joined(str(getattr(a, "heads", cfg.model.n_head)) for a in attentions),
        "d": _joined(str(a.width) for a in attentions),
        "head_norm": _joined(norms),
        "params": model.num_params(non_embedding=False),
        "params_non_embedding": model.num_params(),
        "flops_per_token": flops["total"],
        "attention_flops_per_token": flops["attention"],
        "d_ff": cfg.model.d_ff,
    }


def _joined(parts: Any) -> str:
    return "/".join(dict.fromkeys(parts))


def compare_parameters(arms: list[Arm], claimed: bool) -> None:
    """Note each arm's parameters against its reference's; refuse more than 0.5 % where equality is claimed."""
    by_name = {arm.name: arm for arm in arms}
    for arm in arms:
        if not arm.reference:
            arm.facts["params_off"] = None
            continue
        theirs = by_name[arm.reference].facts["params_non_embedding"]
        off = arm.facts["params_off"] = arm.facts["params_non_embedding"] / theirs - 1
        if claimed and abs(off) > 0.005:
            raise ValueError(
                f"arm {arm.name} has {off:+.1%} of {arm.reference}'s parameters, and the experiment says matched: true: "
                "give the arm a model.d_ff, or set matched=false"
            )


def refuse_changed(runs: list[Run]) -> None:
    """A run that was started with another configuration is refused before anything is trained, as train.py does."""
    for run in runs:
        if (run.folder / "config.yaml").is_file():
            try:
                refuse_other_config(run.folder, asdict(run.config))
            except ValueError as error:
                advice = "repeat its overrides, or start anew with name=OTHER"
                raise ValueError(str(error).rsplit(": ", 1)[0] + f": {advice}") from None


def evaluated(run: Run, name: str, overrides: list[str]) -> bool:
    """Whether the result of this evaluation is there: of the finished training, with the same settings."""
    path = run.folder / "eval" / f"{name}.json"
    if not path.is_file():
        return False
    try:
        content = json.loads(path.read_text())
    except ValueError:
        return False
    wanted = evaluation_config(name, [f"run={run.folder}", *overrides])
    # A result made by other code may lack a setting that has been added since: its default was meant.
    same = all(content["config"].get(key, value) == value for key, value in wanted.items() if key != "run")
    return same and content.get("step") == run.config.steps


# Running


def describe(name: str, arms: list[Arm], runs: list[Run], left: list[Run]) -> None:
    """What is going to happen, before it does."""
    width = max(len(arm.name) for arm in arms)
    for arm in arms:
        off = arm.facts["params_off"]
        against = "" if off is None else f" ({off:+.2%})"
        print(
            f"{arm.name:<{width}}  {arm.facts['params_non_embedding']:>12,} parameters{against}, d_ff {arm.facts['d_ff']}, "
            f"{arm.facts['flops_per_token'] / 1e6:.2f} MFLOPs per token"
        )
    print(f"{name}: {len(runs)} runs, {len(runs) - len(left)} of them finished", flush=True)


def run_here(left: list[Run], jobs: int | None, name: str, total: int) -> None:
    """Run on this machine, `jobs` at a time, each with a GPU of its own where there are GPUs."""
    gpus = visible_gpus()
    jobs = jobs if jobs is not None else max(1, len(gpus))
    if jobs < 1:
        raise ValueError(f"jobs={jobs} runs nothing: use jobs=1 or more")
    slots: queue.SimpleQueue[int] = queue.SimpleQueue()
    for slot in range(jobs):
        slots.put(slot)
    team, progress = Team(), Progress(name, left, total)

    def task(run: Run) -> None:
        slot = slots.get()
        try:
            carry_out(run, environment(slot, jobs, gpus), team)
        finally:
            slots.put(slot)

    with ThreadPoolExecutor(jobs) as pool, team.stopped_by_signals():
        futures = {pool.submit(task, run): run for run in left}
        watch(futures, team, progress)


def watch(futures: dict[Future, Run], team: "Team", progress: "Progress") -> None:
    """Report progress until all is done; the first failure lets running ones finish and starts no more."""
    waiting = set(futures)
    failure: BaseException | None = None
    while waiting:
        done, waiting = wait(waiting, timeout=1, return_when=FIRST_COMPLETED)
        for future in done:
            if future.cancelled():
                continue
            if future.exception():
                failure = failure or future.exception()
                for other in waiting:
                    other.cancel()
            elif not team.stopping:
                progress.finished(futures[future])
        progress.tick()
    if team.stopping:
        print(f"{progress.name}: stopped; the same command goes on", flush=True)
        raise SystemExit(0)
    if failure:
        raise failure


def visible_gpus() -> list[str]:
    """CUDA devices this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not torch.cuda.is_available():
        return []
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def environment(slot: int, jobs: int, gpus: list[str]) -> dict[str, str]:
    """The environment of one run: its GPU, or its share of the cores (threads of several runs would spin in turn)."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    env.pop("HYDRA_FULL_ERROR", None)  # set by our own entry point for this process
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    elif jobs > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // jobs)))
    return env


class Team:
    """The processes that run now; a signal to us stops them, and train.py then leaves a checkpoint."""

    def __init__(self) -> None:
        self.stopping = False
        self._running: set[subprocess.Popen] = set()
        self._lock = threading.Lock()

    def call(self, arguments: list[str], env: dict[str, str], log: Path) -> int:
        """Run python with these arguments, its output appended to `log`; the exit status."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            file.write(f"$ python {' '.join(arguments)}\n")
            file.flush()
            with self._lock:
                if self.stopping:
                    return 0
                command = [sys.executable, *arguments]
                process = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)
                self._running.add(process)
            try:
                return process.wait()
            finally:
                with self._lock:
                    self._running.discard(process)

    def stop(self, *_: Any) -> None:
        """Ask everything that runs to stop."""
        self.stopping = True
        for process in list(self._running):
            process.terminate()

    def stopped_by_signals(self) -> "_Signals":
        return _Signals(self)


class _Signals:
    """SIGINT and SIGTERM stop the team for as long as the `with` lasts."""

    def __init__(self, team: Team) -> None:
        self.team = team

    def __enter__(self) -> None:
        self.before = {number: signal.signal(number, self.team.stop) for number in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


def carry_out(run: Run, env: dict[str, str], team: Team) -> None:
    """Train and evaluate one run as far as it is not; ValueError names what went wrong."""
    for arguments in run.left():
        if team.stopping or run.diverged:
            return
        start = run.log.stat().st_size if run.log.is_file() else 0
        code = team.call(arguments, env, run.log)
        if team.stopping:
            return
        training = arguments[0] != "-m"
        if code or (training and not run.trained):
            said = run.log.read_bytes()[start:].decode(errors="replace")
            infinite = re.search(r"error: (the loss is \S+ at step \d+)", said)
            if not (training and infinite):
                raise ValueError(f"{run.folder}, {reason(run)}")
            write_atomically(run.folder / DIVERGED, json.dumps({"error": infinite.group(1)}).encode())


def reason(run: Run) -> str:
    """The last error that a run's log holds, and where to read more."""
    lines = run.log.read_text(errors="replace").splitlines() if run.log.is_file() else []
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    last = said[-1] if said else (lines[-1] if lines else "it has not begun")
    return f"{run.name}: {last} (see {run.log}); then repeat this command, finished runs are kept"


class Progress:
    """Lines of progress: runs done, steps of those that run, time left by the FLOPs still to spend."""

    def __init__(self, name: str, left: list[Run], total: int) -> None:
        self.name, self.left, self.total = name, left, total
        self.done = total - len(left)
        self.began = self.last = time.monotonic()
        self.before = self._spent()

    def _spent(self) -> float:
        return sum(run.work * min(1.0, run.steps_done() / run.config.steps) for run in self.left)

    def finished(self, run: Run) -> None:
        self.done += 1
        what = "diverged" if run.diverged else "done"
        self._say(f"{run.name} {what}")

    def tick(self) -> None:
        if time.monotonic() - self.last >= REPORT_EVERY:
            busy = [run for run in self.left if run.steps_done() and run.left()]
            self._say(", ".join(f"{run.name} {run.steps_done()}/{run.config.steps}" for run in busy) or "starting")

    def _say(self, what: str) -> None:
        self.last = time.monotonic()
        elapsed, spent = self.last - self.began, self._spent()
        gained, missing = spent - self.before, sum(run.work for run in self.left) - spent
        eta = clock(elapsed * missing / gained) if gained > 0 else "?"
        print(
            f"{self.name}: {self.done} of {self.total} runs | {what} | elapsed {clock(elapsed)}, eta {eta}", flush=True
        )


def carry_out_alone(cfg: AblateConfig, runs: list[Run], job: int | None) -> None:
    """only=: one run, on this machine. job: its number, where a launcher started it; then a failure is told by the log."""
    run = next((run for run in runs if run.name == cfg.only), None)
    if run is None:
        known = ", ".join(run.name for run in runs)
        raise ValueError(f"only={cfg.only} is no run of this experiment: use one of {known}")
    refuse_changed([run])
    team = Team()
    try:
        with team.stopped_by_signals():
            carry_out(run, environment(job or 0, 1, visible_gpus()), team)
    except ValueError as error:
        if job is None:
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        return
    print(f"{run.folder}: {'stopped' if team.stopping else 'done'}", flush=True)


def run_by_launcher(cfg: AblateConfig, folder: Path, left: list[Run], task: list[str]) -> None:
    """Hand each run to a Hydra launcher: this script again, as a sweep over only=."""
    launcher = cfg.launcher
    try:
        importlib.import_module(launcher.module or "hydra")
    except ImportError:
        needs = f"launcher={launcher.plugin} needs the package '{launcher.package}'"
        raise ValueError(f"{needs}: pip install {launcher.package}") from None
    overrides = [o for o in task if not o.startswith(("launcher", "only="))]
    options = [f"hydra.launcher.{key}={value}" for key, value in launcher.options.items()]
    sweep = [f"hydra/launcher={launcher.plugin}", *options, f"hydra.sweep.dir={folder}"]
    names = "only=" + ",".join(run.name for run in left)
    arguments = [sys.executable, str(ROOT / "scripts" / "ablate.py"), "-m", *overrides, *sweep, names]
    done = subprocess.run(arguments, env=environment(0, launcher.options.get("n_jobs", 1), []))
    if done.returncode:
        raise ValueError(f"launcher={launcher.plugin} ended with exit code {done.returncode}: read its lines above")


# Results


def write_results(cfg: AblateConfig, name: str, folder: Path, arms: list[Arm], runs: list[Run]) -> None:
    """Read all runs, compare, and write results.json, table.md and the figures; print the table."""
    for run in runs:
        run.arm.runs.append(ablation.read_run(run.folder, run.seed, cfg.metrics, cfg.spikes))
    ablation.refuse_other_text(run.folder for run in runs)
    metrics, seeds = list(cfg.metrics), list(dict.fromkeys(run.seed for run in runs))
    ablation.compare(arms, metrics)
    fits = ablation.fit_sizes(arms, metrics[0]) if cfg.fit else None
    epochs = read_epochs(runs[0].config)
    remarks = ablation.notes(arms, metrics[0], seeds, epochs)
    content = {
        "eval": "ablation",
        "run": name,
        "config": asdict(cfg),
        "machine": machine(),
        "version": version(),
        "seeds": seeds,
        "results": {
            "arms": [asdict(arm) for arm in arms],
            "noise_floor": ablation.noise_floor(arms, metrics[0]),
            "fits": fits,
            "epochs": epochs,
            "notes": remarks,
        },
    }
    rows = ablation.table(arms, metrics)
    text = ablation.markdown(rows) + ("\n" + ablation.markdown(ablation.fit_rows(fits)) if fits else "")
    write_atomically(folder / "results.json", json.dumps(content, indent=1, default=str).encode())
    write_atomically(folder / "table.md", (text + "\n" + "\n\n".join(remarks) + "\n").encode())
    figures = ablation.draw_all(folder / "figures", arms, metrics, fits)
    print(f"{text}\n" + "\n".join(remarks))
    print(f"ablation  {folder / 'table.md'} ({len(runs)} runs, {len(figures)} figures)", flush=True)


def read_epochs(cfg: TrainConfig) -> float:
    """How often training reads the prepared text; 1 and less is unrepeated."""
    tokens = sum(len(shard) for shard in open_split(Path(cfg.data.dir), "train"))
    return cfg.steps * cfg.batch_tokens * (1 - cfg.data.retrieval.weight / 100) / tokens


if __name__ == "__main__":
    main()
