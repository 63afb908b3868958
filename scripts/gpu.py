"""Measure what needs a CUDA card, in one command: python -m scripts.gpu minutes=25 out=runs/gpu

Stages, whose commands are in configs/gpu/card.yaml:
    kernel     the tests of the fused kernel on the card; beside them, the models of the later stages compile
    attention  scripts/bench.py what=attention, length by length
    mfu        scripts/bench.py what=train at size=124m, with AdamW and with Muon
    training   train.py, arms of experiment=main at tier=gpu_12m: one process for each arm, all side by side, seed after seed;
               beside them one run (resume) that SIGTERM stops and resume=true continues

Options:
    minutes=25     time for all stages; 8 is a short visit. What does not fit is left out
    out=runs/gpu   folder for rows.jsonl (every row as soon as it is measured; a later visit adds to it), table.md (the rows of
                   this visit, also printed at the end) and logs.tar.gz
    stages=A,B     only these stages, in all minutes
    data=FOLDER    shards of a text that data.prepare wrote, for training; without it, Python's own library, as bytes
    tiny=true      tiny shapes on the CPU (configs/gpu/tiny.yaml): tries this script, and measures nothing

Exit status: 0; 1 if a test of the kernel failed or none ran, or if a process failed; 2 for a wrong option.
"""

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# Modules that a machine with torch may lack, first those of Hydra's three wheels.
NEEDED = ("hydra", "omegaconf", "antlr4", "yaml", "pytest", "scipy", "tqdm", "safetensors", "tokenizers", "tiktoken")
HYDRA = ["hydra-core==1.3.8", "omegaconf==2.3.1", "antlr4-python3-runtime==4.9.3"]
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
if not MISSING:
    from omegaconf import OmegaConf

    from configs.composing import merged, quoted
    from configs.provenance import machine, version

SHARES = {"kernel": 0.25, "attention": 0.12, "mfu": 0.15, "training": 0.48}  # of the time; what a stage leaves goes to the next
DEFAULTS = {"minutes": "25", "out": "runs/gpu", "stages": ",".join(SHARES), "data": "", "tiny": "false"}
PYTEST = ["-m", "pytest", "-vv", "--color=no", "-p", "no:cacheprovider"]
OUTCOME = re.compile(r"^\S+::(.+?) (PASSED|FAILED|ERROR)\b", re.MULTILINE)
ENDING = 10.0  # seconds that processes have to end after SIGTERM
# ptxas before 13.3 may reuse registers that a wgmma still reads (triton-lang/triton#9433), and Triton 3.6 brings 12.8.
PTXAS = "TRITON_PTXAS_PATH=FILE (Triton 3.9: TRITON_PTXAS_BLACKWELL_PATH=FILE), where FILE is the ptxas of CUDA 13.3 or newer"
Row = dict[str, Any]


class Job:
    """A command of the project as a process of its own, begun at once."""

    def __init__(self, what: str, name: str, command: list[str], visit: "Visit") -> None:
        self.what, self.name, self.begun, self.stopped = what, name, time.monotonic(), False
        self.log = visit.file(what, name, "log")
        with self.log.open("w") as log:
            options = {"stdout": log, "stderr": log, "cwd": ROOT, "env": visit.env, "start_new_session": True}
            self.process = subprocess.Popen([sys.executable, *command], **options)

    def terminate(self) -> None:
        """SIGTERM, at which a training run leaves a checkpoint."""
        self.stopped = self.process.poll() is None
        self.process.terminate()

    def wait(self, seconds: float) -> None:
        """Until the process has ended; one that takes longer is killed with its children."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Visit:
    """Runs the stages in turn and writes their rows."""

    def __init__(self, options: dict[str, str], work: Path) -> None:
        self.tiny, self.minutes = options["tiny"] == "true", float(options["minutes"])
        self.stages, self.out, self.work = options["stages"].split(","), Path(options["out"]), work
        self.data = Path(options["data"] or work / "shards").resolve()
        plan = OmegaConf.load(ROOT / "configs" / "gpu" / f"{'tiny' if self.tiny else 'card'}.yaml")
        self.plan, self.start = OmegaConf.to_container(plan, resolve=True), time.monotonic()
        self.rows: dict[tuple[str, str], Row] = {}
        self.running: list[Job] = []
        # Processes share what they compile: the later seeds of an arm find its code in the cache.
        self.env = {"TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"), **os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "3"}
        self.env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if self.tiny else {}

    def file(self, what: str, name: str, kind: str) -> Path:
        return self.work / "logs" / f"{what}_{name}.{kind}".replace(" ", "_")

    def carry_out(self) -> None:
        """All stages. A stage ends with its share of the time that is left."""
        end, wide = self.start + 60 * self.minutes - 2 * ENDING, 1 if self.tiny else max(4, (os.cpu_count() or 1) // 2)
        if "training" in self.stages and not any(self.data.glob("*.bin")):
            self.run([("text", "library", self.text())], 1, end)
        for number, stage in enumerate(self.stages):
            share = SHARES[stage] / sum(SHARES[later] for later in self.stages[number:])
            seconds = max(0.0, share * (end - time.monotonic()))
            print(f"{stage}: at most {seconds:.0f} s", flush=True)
            parts = [stage]
            if stage == "kernel":
                parts += ["compile"] * ("mfu" in self.stages) + ["warm"] * ("training" in self.stages) + ["kernel_more"]
            jobs = [(part, *named) for part in parts for named in self.plan.get(part, {}).items()]
            jobs += [("resume", "diff stopped", self.plan["resume"])] * (stage == "training")
            self.run(jobs, {"kernel": wide, "training": 9}.get(stage, 1), time.monotonic() + seconds)

    def run(self, jobs: list[tuple[str, str, str]], side_by_side: int, end: float) -> None:
        """Run the jobs, so many at once, until all are done or `end` is reached; write rows as they are measured."""
        saved = self.work / "runs" / "resume-diff-s1" / "checkpoints"
        while (jobs or self.running) and time.monotonic() < end:
            while jobs and len(self.running) < side_by_side:
                self.begin(*jobs.pop(0))
            time.sleep(0.1)
            for job in list(self.running):
                if job.name == "diff stopped" and any(saved.glob("step_*")):  # as a user or a cluster stops a run
                    job.terminate()
                    job.wait(6 * ENDING)
                    jobs.insert(0, ("resume", "diff", f"{self.plan['resume']} resume=true"))
                self.collect(job)
        self.stop_all()

    def stop_all(self) -> None:
        for job in self.running:
            job.terminate()
        limit = time.monotonic() + ENDING
        for job in list(self.running):
            job.wait(max(0.1, limit - time.monotonic()))
            self.collect(job)

    def begin(self, what: str, name: str, arguments: str) -> None:
        """Start the command of a line of the plan."""
        words, arm = shlex.split(arguments), name.split()[0]
        if what.startswith("kernel"):
            command = [*PYTEST, *words]
        elif what == "text":
            command = ["-m", "data.prepare", *words]
        elif what in ("attention", "mfu", "compile"):
            rounds = 1 if self.tiny else max(3, min(10, round(self.minutes / 2.5)))
            command = ["scripts/bench.py", *merged([f"rounds={rounds}"], words), quoted(f"out={self.file(what, name, 'json')}")]
        else:
            run = quoted(f"run_dir={self.work / 'runs' / f'{what}-{arm}'}") + "-s${seed}"
            text = ["data=text", "data.name=visit", quoted(f"data.dir={self.data}")]
            options = merged(overrides(arm, self.plan["tier"]), words, text, [run])
            command = ["train.py", *sorted(options, key=lambda word: word != "-m")]
        self.running.append(Job(what, name, command, self))

    def collect(self, job: Job) -> None:
        """Write the job's new rows; the end of its process is a row, too."""
        code, rows = job.process.poll(), {}
        if job.what.startswith("kernel"):
            rows = {test: {"right": end == "PASSED"} for test, end in OUTCOME.findall(job.log.read_text())}
        elif job.what in ("attention", "mfu"):
            rows = bench_rows(self.file(job.what, job.name, "json"), job.name)
        elif job.what in ("training", "resume") and job.name != "diff stopped":
            rows = run_rows(self.work / "runs" / f"{job.what}-{job.name}")
        for name, row in rows.items():
            self.write(job.what.removesuffix("_more"), name, **row)
        if code is not None:
            self.running.remove(job)
            ending = {"code": code, "seconds": round(time.monotonic() - job.begun, 1), "stopped": job.stopped}
            if code and not job.stopped:
                ending["failed"] = "".join(job.log.read_text(errors="replace").strip().splitlines()[-1:])[:300]
            self.write("process", f"{job.what} {job.name}", **ending)

    def write(self, what: str, name: str, **values: Any) -> None:
        """Append a row to rows.jsonl, once."""
        if (what, name) not in self.rows:
            self.rows[what, name] = values
            about = {"at_s": round(time.monotonic() - self.start, 1), "what": what, "name": name}
            with (self.out / "rows.jsonl").open("a") as file:
                file.write(json.dumps(about | values, default=str) + "\n")

    def text(self) -> str:
        """Arguments of data.prepare for Python's own library as bytes: a text that every machine has."""
        source, files = self.work / "library.jsonl", Path(sysconfig.get_path("stdlib")).glob(self.plan["text"]["files"])
        with source.open("w") as file:
            for path in sorted(path for path in files if "site-packages" not in path.parts):
                file.write(json.dumps({"text": path.read_text(errors="replace")}) + "\n")
        places = [quoted(f"path={source}"), quoted(f"data.dir={self.data}")]
        options = [
            "data=text",
            "data.name=visit",
            "data.tokenizer.name=bytes",
            f"data.max_tokens={self.plan['text']['max_tokens']}",
        ]
        return shlex.join([*options, *places])


# ---------------------------------------- reading the project's files


def overrides(arm: str, changes: Row) -> list[str]:
    """What an arm of experiment=main gives to train.py at tier=gpu_12m with changes, without its text."""
    OmegaConf.register_new_resolver("times", lambda factor, number: round(factor * number), replace=True)
    folder = ROOT / "configs" / "ablations"
    tier, study = (OmegaConf.load(folder / path) for path in ("tier/gpu_12m.yaml", "experiment/base/main.yaml"))
    content = {"tier": OmegaConf.merge(tier, changes), "arm": OmegaConf.to_container(study)["arms"][arm]}
    plain = OmegaConf.to_container(OmegaConf.create(content), resolve=True)
    return merged([option for option in plain["tier"]["train"] if not option.startswith("data")], plain["arm"])


def bench_rows(path: Path, name: str) -> dict[str, Row]:
    """A bench's rows by their labels: milliseconds (of a training step: tokens a second) and the other columns."""
    rows = {}
    for row in json.loads(path.read_text())["results"]["rows"] if path.exists() else []:
        seconds = {measure: median(times) for measure, times in row["seconds"].items()}
        values = {measure: row["amount"] / s if row["amount"] else 1e3 * s for measure, s in seconds.items()}
        labels = [str(value) for key, value in row["labels"].items() if key in ("model", "variant", "backend")]
        rows[" ".join([name, *labels])] = (
            values | row["facts"] | {f"no {measure}": why for measure, why in row["not_measured"].items()}
        )
    return rows


def run_rows(run: Path) -> dict[str, Row]:
    """The finished runs RUN-sSEED, whose only validation is at the end."""
    rows = {}
    for path in run.parent.glob(f"{run.name}-s*/metrics.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        if losses := [{key: line[key] for key in ("step", "val_loss")} for line in lines if "val_loss" in line]:
            resumed = [{"resumed_at": line["step"]} for line in lines if "continued" in line]
            rows[path.parent.name.split("-", 1)[1]] = losses[-1] | (resumed[-1] if resumed else {})
    return rows


def compared(rows: dict[str, Row]) -> dict[str, Row]:
    """Each arm's losses by seed, and its mean difference to the baseline over common seeds."""
    arms: dict[str, Row] = {"baseline": {}}
    for name, row in sorted(rows.items()):
        arm, seed = name.rsplit("-", 1)
        arms.setdefault(arm, {})[seed] = row["val_loss"]
    common = {arm: [seed for seed in losses if seed in arms["baseline"]] for arm, losses in arms.items()}
    gaps = {arm: [arms[arm][seed] - arms["baseline"][seed] for seed in seeds] for arm, seeds in common.items()}
    return {arm: losses | ({"less baseline": mean(gaps[arm])} if gaps[arm] else {}) for arm, losses in arms.items()}


def table(rows: dict[tuple[str, str], Row]) -> str:
    """A Markdown table for each stage; for the kernel's tests one line, and for the training one row for each arm."""
    parts = []
    for what in dict.fromkeys(what for what, _ in rows):
        named = {name: row for (kind, name), row in rows.items() if kind == what}
        if what == "kernel":
            wrong = [name for name, row in named.items() if not row["right"]]
            parts.append(f"kernel: {len(named)} tests, {len(wrong)} failed {', '.join(wrong[:5])}".rstrip())
            continue
        named = compared(named) if what == "training" else named
        heads = list(dict.fromkeys(key for row in named.values() for key in row))
        cells = [[row.get(head, "-") for head in heads] for row in named.values()]
        texts = [[f"{cell:.5g}" if isinstance(cell, float) else str(cell) for cell in line] for line in cells]
        lines = [[what, *heads], ["---"] * (1 + len(heads)), *([name, *line] for name, line in zip(named, texts, strict=True))]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(parts)


# ---------------------------------------- the command


def parse(arguments: list[str]) -> dict[str, str]:
    """The options of the command line. ValueError with what to type for one that is wrong, and for what the machine lacks."""
    options = dict(DEFAULTS)
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key not in DEFAULTS:
            raise ValueError(f"'{argument}' is not an option: use {', '.join(f'{key}=' for key in DEFAULTS)}")
        options[key] = value
    if not re.fullmatch(r"\d*\.?\d+", options["minutes"]) or not float(options["minutes"]):
        raise ValueError(f"minutes={options['minutes']} is not a positive number: use minutes=25")
    if unknown := [name for name in options["stages"].split(",") if name not in SHARES]:
        raise ValueError(f"stages has no '{unknown[0]}': use {', '.join(SHARES)}")
    if options["data"] and not any(Path(options["data"]).glob("*.bin")):
        raise ValueError(f"data={options['data']} has no shards: use the folder that data.prepare wrote, or leave out data=")
    if MISSING:
        packages = [*HYDRA, *(name for name in MISSING if name not in NEEDED[:3])]
        without = "without network, install their wheels, which pip wheel --no-deps makes on another machine"
        raise ValueError(f"this Python has no {', '.join(MISSING)}: pip install {' '.join(packages)} ({without})")
    if options["tiny"] != "true" and not torch.cuda.is_available():
        raise ValueError("torch finds no CUDA card: use a machine with one, or try the script on the CPU with tiny=true")
    return options


def main(arguments: list[str]) -> int:
    """The command; returns its exit code."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    try:
        options = parse(arguments)
        Path(options["out"]).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        visit = Visit(options, Path(work))
        Path(work, "logs").mkdir()
        subprocess.run("nvidia-smi -q > logs/nvidia-smi.log 2>&1", shell=True, cwd=work)  # driver, clocks, power
        visit.write("environment", "machine", **machine(), version=version(), minutes=visit.minutes)
        try:
            visit.carry_out()
        finally:
            visit.stop_all()
            with tarfile.open(visit.out / "logs.tar.gz", "w:gz") as archive:
                archive.add(Path(work, "logs"), "logs")
            (visit.out / "table.md").write_text(table(visit.rows) + "\n")
            print(table(visit.rows), flush=True)
    right = [row["right"] for (what, _), row in visit.rows.items() if what == "kernel"]
    if not all(right) and not visit.tiny and torch.cuda.get_device_capability()[0] == 9:
        print(f"before you distrust the kernel, repeat with {PTXAS}")
    checked = "kernel" not in visit.stages or (right and all(right))
    return 0 if checked and not any("failed" in row for row in visit.rows.values()) else 1


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
