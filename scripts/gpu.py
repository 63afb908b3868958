"""Measure what needs a CUDA machine, in one command: python -m scripts.gpu minutes=25 out=runs/gpu

Stages:
    environment   the machine, its copy and matrix rates, and the kernel that SDPA chooses for each shape
    kernel        outputs and gradients of the fused kernel against float64
    attention     time and peak memory of every way to compute attention
    mfu           training steps at 30M and 124M parameters
    tiles         time of the fused kernel's tiles, those in use and their neighbours first
    nccl          sums over all cards, if there are two or more
    training      training runs of 30M parameters, the most informative runs first
    compiled      the fused kernel, compiled for other cards; needs no card, and runs only if stages= names it

Options:
    minutes=25    time for all stages together, of which each stage has a share. kernel, attention, mfu, tiles and training
                  have more rows than fit: repeat the command, or name the stage
    out=runs/gpu  folder for one JSON per stage; a repeated command measures only the rows that are missing, or
                  all rows again for other source files, card, torch, Triton, ptxas or text (the old JSON gets another name)
    stages=A,B    only these stages, which then have all minutes: A half, and B what is left
    data=FOLDER   prepared shards for the stage training; without it, the source text of Python's library, as bytes
    table=FILE    print this JSON as a table, and measure nothing

Needs torch 2.11 or newer and numpy, but neither Hydra nor yaml. Each stage runs in its own process and saves each row when it
is done. A row that fails, or is not done in 5 minutes (training: 20), says so in the JSON, and the next row runs. Without a
card, all stages run with small shapes.
Exit status: 0; 1 if a kernel's result is wrong, if the stage kernel has a row that failed, or if a stage's process died;
2 for a wrong option. A stage that had no time left is not an error.
"""

import hashlib
import importlib.util
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
# configs/__init__.py imports Hydra, but configs/files.py and configs/provenance.py do not.
if importlib.util.find_spec("hydra") is None:
    sys.modules["configs"] = types.ModuleType("configs")
    sys.modules["configs"].__path__ = [str(ROOT / "configs")]

import torch

from configs.files import FolderLock, write_json
from configs.provenance import result_record
from scripts import gpu_stages
from scripts.gpu_tools import kernel_compiler

DEFAULTS = {"minutes": "25", "out": "runs/gpu", "stages": "", "data": "", "table": ""}
# Most seconds of each stage at minutes=25, in the order in which stages run; training takes the seconds that are left.
LIMITS = {"environment": 60, "kernel": 150, "attention": 240, "mfu": 240, "tiles": 120, "nccl": 60, "training": None}
STAGE = ("run", "seconds")  # options that this command adds for the process of a stage
UNSOUND = 1  # exit code
DEVICE_BROKEN = 3  # exit code after an error that breaks the process's CUDA context; a new process continues
RETRIES = 3  # processes of a stage that may hang, or end without a new row
# ptxas before 13.3 may reuse registers that a wgmma still reads (triton-lang/triton#9433), and Triton 3.6 brings 12.8.
PTXAS = "TRITON_PTXAS_PATH=FILE (Triton 3.9: TRITON_PTXAS_BLACKWELL_PATH=FILE), where FILE is the ptxas of CUDA 13.3 or newer"
GRACE = 60.0  # seconds for the row that runs when the time of its stage is over
PATIENCE, PATIENCE_TRAINING = 300.0, 1200.0  # seconds that a row may last
NAMED = ("architecture", "width", "version", "group", "dtype", "mask")  # keys in the row name of a compiled kernel


class Ended(NamedTuple):
    """How a stage's process ended."""

    returncode: int | None  # None: it was ended because a row was not done in time
    seconds: float  # of its last row
    said: str  # its standard error


def main(arguments: list[str]) -> int:
    """The command; returns its exit code."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    try:
        options = parse(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    out, end = Path(options["out"]), time.monotonic() + 60 * float(options["minutes"])
    if options["table"]:
        print(table(read(Path(options["table"]))))
        return 0
    if "run" in options:
        return run_stage(options["run"], out, options["data"], float(options["seconds"]))
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(out, "measures for it")  # two commands on one card time each other
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    lock.note(f"process {os.getpid()}")
    share, sound = float(options["minutes"]) / 25, True
    named = [name for name in options["stages"].split(",") if name]
    for done, stage in enumerate(named or LIMITS):
        left = end - time.monotonic()
        most = left / (len(named) - done) if named else LIMITS[stage] * share if LIMITS[stage] else left
        sound &= start_stage(stage, out, options["data"], min(left, most))
    return 0 if sound else UNSOUND


def parse(arguments: list[str]) -> dict[str, str]:
    """The options of the command line. ValueError with what to type for one that is wrong."""
    options = dict(DEFAULTS)
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key not in (*DEFAULTS, *(STAGE if "seconds=" in " ".join(arguments) else ())):
            raise ValueError(f"'{argument}' is not an option: use {', '.join(f'{key}=' for key in DEFAULTS)}")
        options[key] = value
    try:
        possible = 0 < float(options["minutes"]) < math.inf
    except ValueError:
        possible = False
    if not possible:
        raise ValueError(f"minutes={options['minutes']} is not a positive number: use minutes=25")
    unknown = [name for name in options["stages"].split(",") if name and name not in gpu_stages.STAGES]
    if unknown:
        raise ValueError(f"stages has no '{unknown[0]}': use {', '.join(gpu_stages.STAGES)}")
    rows = read(Path(options["table"])).get("results") if options["table"] else None
    if options["table"] and not (isinstance(rows, dict) and all(isinstance(row, dict) for row in rows.values())):
        raise ValueError(f"table={options['table']} is not a JSON file of this command: use one that it wrote")
    if not options["out"] or Path(options["out"]).is_file():
        raise ValueError(f"out={options['out']} is not a folder: use out=runs/gpu")
    if options["data"] and not Path(options["data"]).is_dir():
        raise ValueError(f"data={options['data']} is not a folder: use the folder that data.prepare wrote, or leave out data=")
    return options


def start_stage(stage: str, out: Path, data: str, seconds: float) -> bool:
    """Run a stage in processes of its own, at most `seconds` in all; what went wrong is added to its JSON.

    Returns False if a kernel's result is wrong or unknown, or if the stage's process died.
    """
    path, start = out / f"{stage}.json", time.monotonic()
    set_aside(stage, path, data)
    if read(path).get("complete"):
        return report(stage, path, f"done before, {path}")
    if (content := read(path)).pop("running", None):  # of a visit that was interrupted
        write_json(path, content)
    problem, died, idle = "no time was left", False, 0
    while idle < RETRIES and (left := seconds - (time.monotonic() - start)) > 0:
        before = len(content.get("results", {}))
        from_root = data and os.path.relpath(Path(data).resolve(), ROOT.resolve())
        options = (f"run={stage}", f"out={out.resolve()}", f"data={from_root}", f"seconds={left}")
        command = [sys.executable, "-m", "scripts.gpu", *options]
        done = in_process(command, path, stage, left + GRACE)
        if done.returncode is None:
            problem, died = give_up_slow(path, stage, done.seconds), False
        else:
            said = done.said.strip().splitlines() or ["no message"]
            problem = f"exit code {done.returncode}: {said[-1][:500]}" if done.returncode else None
            died = done.returncode != 0
            if problem:
                give_up_row(path, problem)
        content = read(path)
        idle += done.returncode is None or len(content.get("results", {})) == before
        if done.returncode not in (None, DEVICE_BROKEN):
            break
    if problem:
        write_json(path, {**(content or {"stage": stage, "results": {}}), "problem": problem})
    return report(stage, path, problem) and not died


def in_process(command: list[str], path: Path, stage: str, seconds: float) -> Ended:
    """Run a stage's process. It stops by itself between rows; a row that hangs is ended from here, with the process."""
    with tempfile.TemporaryFile("w+") as said:
        start = begun = time.time()
        process = subprocess.Popen(command, cwd=ROOT, env=environment(stage), stderr=said)
        try:
            while (code := process.poll()) is None:
                if path.exists():
                    begun = max(start, path.stat().st_mtime)  # each row begins with writing the JSON
                if time.time() > min(start + seconds, begun + patience(stage)):
                    return Ended(None, time.time() - begun, "")
                time.sleep(0.2)
        finally:
            process.kill()
            process.wait()
        said.seek(0)
        return Ended(code, time.time() - begun, said.read())


def patience(stage: str) -> float:
    """Seconds after which a row that is not done is given up: those of all visits together."""
    return PATIENCE_TRAINING if stage == "training" else PATIENCE


def give_up_slow(path: Path, stage: str, seconds: float) -> str:
    """Count the time of a row that was ended; the row fails if it has had enough in all visits. Returns what happened."""
    content = read(path)
    name = content.pop("running", None)
    if name is None:
        return f"the process was ended after {seconds:.0f} s, before a row"
    slow = content.setdefault("unfinished", {})
    slow[name] = round(slow.get(name, 0) + seconds, 1)
    if slow[name] >= patience(stage):
        spent = slow.pop(name)
        content["results"][name] = {"failed": f'not done after {spent:.0f} s: delete this row and "complete" to try it again'}
    write_json(path, content)
    return f"{name} was not done after {seconds:.0f} s, and was ended"


def report(stage: str, path: Path, note: str | None) -> bool:
    """Print how the rows of a stage ended. Returns whether no result is wrong, and every check of the kernel ran."""
    content = read(path)
    rows = content.get("results", {})
    failed = [name for name, row in rows.items() if "failed" in row]
    wrong = [name for name, row in rows.items() if row.get("right") is False]
    said = f"{len(rows)} rows, {len(failed)} failed" + (f", {len(wrong)} WRONG (first: {wrong[0]})" if wrong else "")
    how = "" if content.get("complete") else " (not all: run the command again)"
    print(f"{stage}: {said}{how}{f': {note}' if note else ''}", flush=True)
    if wrong and stage == "kernel" and gpu_stages.on_hopper():
        print(f"{stage}: before you distrust the kernel, repeat with {PTXAS}", flush=True)
    return not wrong and not (stage == "kernel" and failed)


def set_aside(stage: str, path: Path, data: str) -> None:
    """Rename the stage's JSON if its rows have another origin than new rows would have: one file has one origin."""
    before = read(path)
    if not before.get("results"):
        return
    old, new = origin(before), origin(record_of(stage, data, {}))
    if differing := [key for key, value in old.items() if value != new[key]]:
        kept = next(name for i in itertools.count(1) if not (name := path.with_name(f"{stage}_{i}.json")).exists())
        path.rename(kept)
        print(f"{stage}: measured again, because the rows in {kept} have another {' and '.join(differing)}", flush=True)


def origin(record: dict[str, Any]) -> dict[str, Any]:
    """What the numbers of a stage depend on. The version of the checkout is not part: a commit of notes changes it, too."""
    machine, config = record.get("machine", {}), record.get("config", {})
    about = {"card": machine.get("gpu"), "cards": machine.get("gpus"), "torch": machine.get("torch")}
    about |= {"code": record.get("code"), "compiler": record.get("compiler")}
    return about | {"device": config.get("device"), "text": record.get("text")}


def record_of(stage: str, data: str, rows: dict[str, Any]) -> dict[str, Any]:
    """The content of a stage's JSON, with its origin."""
    more = {"text": text_digest(data)} if stage == "training" else {}
    config = {"data": data, "device": gpu_stages.DEVICE.type}
    return result_record("gpu", stage, config, rows, code=code_digest(), compiler=kernel_compiler(), **more)


def code_digest() -> str:
    """A digest of the source files that the numbers depend on, by path and content: it needs no git."""
    folders = ("model", "training", "data", "configs")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".cpp")]
    files += (ROOT / "scripts").glob("gpu*.py")
    return digest((path.relative_to(ROOT).as_posix(), path.read_bytes()) for path in files)


def text_digest(data: str) -> str:
    """A digest of the text of the stage training: of Python's library, or of every shard's name, size and header."""
    if not data:
        return digest([("", gpu_stages.library().tobytes())])
    files = [path for path in Path(data).iterdir() if path.is_file()]
    return digest((f"{path.name} {path.stat().st_size}", path.open("rb").read(1024)) for path in files)


def digest(parts: Iterable[tuple[str, bytes]]) -> str:
    """A digest of names and their contents, in whatever order they come."""
    found = hashlib.sha256()
    for name, content in sorted(parts):
        found.update(f"{name}\0{len(content)}\0".encode() + content)
    return found.hexdigest()[:16]


def give_up_row(path: Path, problem: str) -> None:
    """If a stage's process ended within a row, write that as the row's result, so that a later start continues after it."""
    content = read(path)
    if name := content.pop("running", None):
        content["results"][name] = {"failed": f"the process ended in this row, {problem}"}
        write_json(path, content)


def environment(stage: str) -> dict[str, str]:
    """Environment variables of a stage's process. Without a card Triton interprets, except in the stage that compiles."""
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    found.pop("TRITON_INTERPRET", None)
    interprets = stage in ("kernel", "tiles", "attention") and not torch.cuda.is_available()
    return {**found, "TRITON_INTERPRET": "1"} if interprets else found


def run_stage(stage: str, out: Path, data: str, seconds: float) -> int:
    """Measure the rows of `stage` that its JSON does not have yet, until `seconds` are over."""
    path, end = out / f"{stage}.json", time.monotonic() + seconds
    content = read(path)
    rows: dict[str, Any] = dict(content.get("results", {}))
    record = record_of(stage, data, rows) | {"unfinished": content.get("unfinished", {})}
    for name, measure in gpu_stages.rows_of(stage, Path(data) if data else None):
        if name in rows:
            continue
        if time.monotonic() > end:
            write_json(path, {**record, "complete": False})
            return 0
        write_json(path, {**record, "complete": False, "running": name})
        start = time.monotonic()
        rows[name], broken = attempt(measure)
        rows[name]["seconds"] = round(time.monotonic() - start, 2)
        record["unfinished"].pop(name, None)
        write_json(path, {**record, "complete": False})
        if broken:
            return DEVICE_BROKEN
    write_json(path, {**record, "complete": True})
    return 0


def attempt(measure: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], bool]:
    """A row, or why it failed; and whether the error has left the card unusable for this process."""
    try:
        return measure(), False
    except Exception as error:  # no error of a row may stop the other rows
        text = " ".join(str(error).split())[:500]
        return {"failed": f"{type(error).__name__}: {text}"}, breaks_device(error, text)


def breaks_device(error: Exception, text: str) -> bool:
    """Whether an error leaves the process without a usable CUDA context: not if memory lacks or cuBLAS refuses a call."""
    harmless = isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "CUBLAS_STATUS" in text
    return not harmless and any(words in text for words in ("CUDA error", "Triton Error [CUDA]"))


def table(content: dict[str, Any]) -> str:
    """A stage's results as a Markdown table, one line for a row or, where a row has several, for each compiled kernel."""
    lines = [
        {"row": name} | {key: value for key, value in part.items() if not isinstance(value, dict) and key not in NAMED}
        for name, row in content["results"].items()
        for part in row.get("kernels", [row])
    ]
    heads = list(dict.fromkeys(key for line in lines for key in line))
    cells = [[cell(line.get(head)) for head in heads] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *cells))


def cell(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(str(int(x)) for x in value)
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def read(path: Path) -> dict[str, Any]:
    """What a stage has written so far."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # and so ends the process of a stage
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
