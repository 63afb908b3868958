"""Measure what needs a CUDA card, in one command: python -m scripts.gpu minutes=25 out=runs/gpu

Stages, whose commands are in configs/gpu/card.yaml:
    kernel     the tests of the fused kernel on the card; beside them, the models of the later stages compile
    attention, mfu   scripts/bench.py: what=attention, length by length; what=train at size=124m, with AdamW and with Muon
    training   train.py on Python's own library, arms of experiment=main at tier=gpu_12m, side by side; one stops and resumes

Options:
    minutes=25     time for all stages; 8 is a short visit. What does not fit is left out
    out=runs/gpu   folder for visit.json (all results), table.md (also printed) and visit.log (what the processes printed)
    stages=A,B     only these stages, in all minutes
    tiny=true      tiny shapes on the CPU (configs/gpu/tiny.yaml): tries this script, and measures nothing

Exit status: 0; 1 if a test of the kernel failed or none ran, or if a process failed; 2 for a wrong option.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

PACKAGES = "hydra-core==1.3.8 omegaconf==2.3.1 antlr4-python3-runtime==4.9.3 pytest scipy tqdm safetensors tokenizers tiktoken"
try:
    from omegaconf import OmegaConf

    from configs.composing import merged, quoted
    from configs.files import read_json_lines, read_json_object, write_atomic, write_json
    from configs.provenance import ROOT, machine, version
except ModuleNotFoundError as error:
    fix = f"pip install {PACKAGES} (without network, their wheels, which pip wheel --no-deps makes on another machine)"
    print(f"error: this Python has no {error.name}: {fix}", file=sys.stderr)
    sys.exit(2)

SHARES = {"kernel": 0.25, "attention": 0.12, "mfu": 0.15, "training": 0.48}  # of the time; what a stage leaves goes to the next
DEFAULTS = {"minutes": "25", "out": "runs/gpu", "stages": ",".join(SHARES), "tiny": "false"}
OUTCOME = re.compile(r"^\S+::(.+?) (PASSED|FAILED|ERROR)\b", re.MULTILINE)
ENDING = 10.0  # seconds that processes have to end after SIGTERM


class Visit:
    """Runs the stages in turn."""

    def __init__(self, options: dict[str, str], work: Path) -> None:
        self.tiny, self.minutes = options["tiny"] == "true", float(options["minutes"])
        self.stages, self.out, self.work = options["stages"].split(","), Path(options["out"]).resolve(), work
        plan = OmegaConf.load(ROOT / "configs" / "gpu" / f"{'tiny' if self.tiny else 'card'}.yaml")
        self.plan, self.start = OmegaConf.to_container(plan, resolve=True), time.monotonic()
        self.running: dict[str, tuple[subprocess.Popen, float]] = {}  # what for and name in the plan -> process, its start
        self.processes: dict[str, dict[str, Any]] = {}  # the same name, of a process that has ended -> how
        self.kernel: dict[str, str] = {}  # test of the kernel -> PASSED, FAILED or ERROR
        self.data = ["data=text", "data.name=visit", quoted(f"data.dir={work / 'shards'}")]
        # Processes share what they compile: the later seeds of an arm find its code in the cache.
        self.env = {"TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"), **os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "3"}
        self.env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if self.tiny else {}

    def file(self, name: str, kind: str) -> Path:
        return self.work / (re.sub(r"\W+", "_", name) + f".{kind}")

    def carry_out(self) -> None:
        """All stages. A stage ends with its share of the time that is left."""
        end, wide = self.start + 60 * self.minutes - 2 * ENDING, 1 if self.tiny else max(4, (os.cpu_count() or 1) // 2)
        if "training" in self.stages:
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
        """Run the jobs, so many at once, until all have ended or `end` is reached."""
        saved = self.work / "runs" / "resume-diff-s1" / "checkpoints"
        while (jobs or self.running) and time.monotonic() < end:
            while jobs and len(self.running) < side_by_side:
                what, name, arguments = jobs.pop(0)
                command, job = [sys.executable, *self.command(what, name, arguments)], f"{what} {name}"
                with self.file(job, "log").open("w") as log:
                    options = {"stdout": log, "stderr": log, "cwd": ROOT, "env": self.env, "start_new_session": True}
                    self.running[job] = subprocess.Popen(command, **options), time.monotonic()
            time.sleep(0.1)
            for name, (process, _) in list(self.running.items()):
                if name == "resume diff stopped" and any(saved.glob("step_*")):  # as a user or a cluster stops a run
                    self.stop([name], 6 * ENDING)
                    jobs.insert(0, ("resume", "diff", f"{self.plan['resume']} resume=true"))
                elif process.poll() is not None:
                    self.ended(name)
        self.stop(list(self.running), ENDING)

    def command(self, what: str, name: str, arguments: str) -> list[str]:
        """The command of a line of the plan."""
        words, arm = shlex.split(arguments), name.split()[0]
        if what.startswith("kernel"):
            return ["-m", "pytest", "-vv", "--color=no", "-p", "no:cacheprovider", *words]
        if what == "text":
            return ["-m", "data.prepare", *words]
        if what in ("attention", "mfu", "compile"):
            return ["scripts/bench.py", *words, quoted(f"out={self.file(f'{what} {name}', 'json')}")]
        run = f"run_dir='{self.work}/runs/{what}-{arm}-s${{seed}}'"
        options = merged(overrides(arm, self.plan["tier"]), words, self.data, [run])
        return ["train.py", *sorted(options, key=lambda word: word != "-m")]

    def stop(self, names: list[str], seconds: float) -> None:
        """SIGTERM, at which a training run leaves a checkpoint; what has not ended in time is killed with its children."""
        running = {name: self.running[name][0] for name in names}
        stopped = [name for name, process in running.items() if process.poll() is None]
        for process in running.values():
            process.terminate()
        limit = time.monotonic() + seconds
        for name, process in running.items():
            try:
                process.wait(max(0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            self.ended(name, name in stopped)

    def ended(self, name: str, stopped: bool = False) -> None:
        """Write down how a process ended, and what it printed."""
        process, begun = self.running.pop(name)
        printed = self.file(name, "log").read_text(errors="replace")
        with (self.out / "visit.log").open("a") as log:
            log.write(f"==== {name}\n{printed}\n")
        end = {"code": process.returncode, "seconds": round(time.monotonic() - begun, 1), "stopped": stopped}
        if end["code"] and not stopped:
            end["failed"] = "".join(printed.strip().splitlines()[-1:])[:300]
        self.processes[name] = end
        self.kernel |= OUTCOME.findall(printed)
        self.report()

    def report(self) -> None:
        """Write visit.json and table.md from all that is known so far."""
        benches = [path for name in self.processes if (path := self.file(name, "json")).exists()]
        content = {"machine": machine(), "version": version(), "minutes": self.minutes, "kernel": self.kernel}
        content |= {kind: runs(self.work / "runs", kind) for kind in ("training", "resume")}
        content |= {"processes": self.processes, "benches": {path.stem: read_json_object(path, "") for path in benches}}
        write_json(self.out / "visit.json", content)
        wrong = [test for test, end in self.kernel.items() if end != "PASSED"]
        parts = [f"kernel: {len(self.kernel)} tests, {len(wrong)} failed {', '.join(wrong[:5])}".rstrip()]
        timed = [path for path in benches if not path.stem.startswith("compile")]
        parts += [f"{path.stem}\n\n{path.with_suffix('.md').read_text().strip()}" for path in timed]
        parts.append(table("training", compared(content["training"])))
        parts += [table("resume", content["resume"]), table("process", self.processes)]
        write_atomic(self.out / "table.md", ("\n\n".join(parts) + "\n").encode())

    def text(self) -> str:
        """Arguments of data.prepare for Python's own library as bytes: a text that every machine has."""
        source, files = self.work / "library.jsonl", Path(sysconfig.get_path("stdlib")).glob(self.plan["text"]["files"])
        texts = [path.read_text(errors="replace") for path in sorted(files) if "site-packages" not in path.parts]
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        sizes = ["data.tokenizer.name=bytes", f"data.max_tokens={self.plan['text']['max_tokens']}"]
        return shlex.join([*self.data, *sizes, quoted(f"path={source}")])


def overrides(arm: str, changes: dict[str, Any]) -> list[str]:
    """What an arm of experiment=main gives to train.py at tier=gpu_12m with changes, without its text."""
    folder = ROOT / "configs" / "ablations"
    tier, study = (OmegaConf.load(folder / path) for path in ("tier/gpu_12m.yaml", "experiment/base/main.yaml"))
    content = {"tier": OmegaConf.merge(tier, changes), "arm": OmegaConf.to_container(study)["arms"][arm]}
    plain = OmegaConf.to_container(OmegaConf.create(content), resolve=True)
    return merged([option for option in plain["tier"]["train"] if not option.startswith("data")], plain["arm"])


def runs(folder: Path, kind: str) -> dict[str, dict[str, Any]]:
    """The finished runs KIND-ARM-sSEED, whose only validation is at the end: ARM-sSEED -> step, val_loss, resumed_at."""
    rows: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob(f"{kind}-*/metrics.jsonl")):
        row = rows[path.parent.name.split("-", 1)[1]] = {}
        for line in read_json_lines(path):
            row |= {key: line[key] for key in ("step", "val_loss")} if "val_loss" in line else {}
            row |= {"resumed_at": line["step"]} if "continued" in line else {}
    return {name: row for name, row in rows.items() if "val_loss" in row}


def compared(finished: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Each arm's mean loss, less the baseline's, over the seeds that both have."""
    gaps: dict[str, list[float]] = {}
    for name, row in finished.items():
        arm, seed = name.rsplit("-", 1)
        if baseline := finished.get(f"baseline-{seed}"):
            gaps.setdefault(arm, []).append(row["val_loss"] - baseline["val_loss"])
    return {arm: {"less baseline": mean(each), "seeds": len(each)} for arm, each in gaps.items()}


def table(what: str, rows: dict[str, dict[str, Any]]) -> str:
    """The named rows as a Markdown table."""
    heads = list(dict.fromkeys(key for row in rows.values() for key in row))
    body = [[name, *(str(row.get(head, "-"))[:60] for head in heads)] for name, row in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in [[what, *heads], ["---"] * (1 + len(heads)), *body])


def parse(arguments: list[str]) -> dict[str, str]:
    """The options of the command line. ValueError with what to type for one that is wrong, and where there is no card."""
    import torch

    if wrong := [argument for argument in arguments if "=" not in argument or argument.split("=")[0] not in DEFAULTS]:
        raise ValueError(f"'{wrong[0]}' is not an option: use {', '.join(f'{key}=' for key in DEFAULTS)}")
    options = DEFAULTS | dict(argument.split("=", 1) for argument in arguments)
    if not re.fullmatch(r"\d*\.?\d+", options["minutes"]) or not float(options["minutes"]):
        raise ValueError(f"minutes={options['minutes']} is not a positive number: use minutes=25")
    if unknown := [name for name in options["stages"].split(",") if name not in SHARES]:
        raise ValueError(f"stages has no '{unknown[0]}': use {', '.join(SHARES)}")
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
        subprocess.run("nvidia-smi -q > visit.log 2>&1", shell=True, cwd=visit.out)  # driver, clocks, power
        try:
            visit.carry_out()
        finally:
            visit.stop(list(visit.running), ENDING)
            visit.report()
            print((visit.out / "table.md").read_text(), flush=True)
    right = "kernel" not in visit.stages or set(visit.kernel.values()) == {"PASSED"}
    return 0 if right and not any("failed" in end for end in visit.processes.values()) else 1


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
