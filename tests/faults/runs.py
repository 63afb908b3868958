"""Tiny commands for tests/faults, started in forks of a process that has imported them, and what they end with."""

import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from safetensors.torch import load_file

from configs.files import read_json_lines
from tests.conftest import TINY, WORDS
from training.checkpoint import checkpoints

STEPS = 10
RUN = (
    *TINY, "data=text", "data.name=tiny", "data.tokenizer.name=bytes", "model=diff", f"steps={STEPS}",
    "checkpoint.every=1", "monitor.every=0", "model.dropout=0.1", "eval_tokens=1024",
)  # fmt: skip


def launch(module: str, arguments: list[str], log: Path, before: Callable[[], None] | None = None) -> int:
    """Start the command `module` in a fork, after `before()` there; returns the process."""
    child = os.fork()
    if child:
        return child
    code = 1
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # what started the tests may have ignored it, as nohup does
    try:
        with log.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.argv = [module, *arguments]
        if before:
            before()
        importlib.import_module(module).main()
        code = 0
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def launch_two(arguments: list[str], log: Path, others: tuple[str, ...] = ()) -> list[int]:
    """Start `train` in two forks that find each other as those of torchrun do. others: arguments of the second alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    about = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    prepare = [partial(os.environ.update, about, RANK=rank, LOCAL_RANK=rank) for rank in "01"]
    return [launch("train", [*arguments, *others * rank], log, prepare[rank]) for rank in (0, 1)]


def wait(process: int, limit: float = 120.0) -> int:
    """The exit code (128 + signal where a signal ended it); it is killed after `limit` seconds."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        time.sleep(0.01)
    os.kill(process, 9)
    os.waitpid(process, 0)
    return 124


def call(module: str, arguments: list[str], log: Path, before: Callable[[], None] | None = None) -> int:
    """Run a command to its end; its exit code."""
    return wait(launch(module, arguments, log, before))


class World:
    """What all trials share in `folder`: prepared text, a finished run, its evaluation, and how long each of them takes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log, self.shards, self.whole = folder, folder / "log.txt", folder / "shards", folder / "whole"
        folder.mkdir(parents=True, exist_ok=True)
        draw = random.Random(0)
        lines = [json.dumps({"text": " ".join(draw.choices(WORDS, k=60)) + "."}) for _ in range(400)]
        (folder / "tiny.jsonl").write_text("\n".join(lines) + "\n")
        self.seconds: dict[str, float] = {}
        for name, arguments, module in (
            ("preparation", self.prepare(self.shards), "data.prepare"),
            ("training", self.train(self.whole), "train"),
            ("evaluation", self.evaluate(self.whole), "eval.perplexity"),
        ):
            begin = time.monotonic()
            if code := call(module, arguments, self.log):
                raise SystemExit(f"{name} without a fault ended with {code}:\n{self.log.read_text()}")
            self.seconds[name] = time.monotonic() - begin

    def prepare(self, shards: Path) -> list[str]:
        return [
            "data=text", "data.name=tiny", f"data.dir={shards}", "data.tokenizer.name=bytes", "data.val_fraction=0.1",
            "data.shard_tokens=9000", f"path={self.folder / 'tiny.jsonl'}",
        ]  # fmt: skip

    def train(self, run: Path, *more: str) -> list[str]:
        return [*RUN, f"data.dir={self.shards}", f"run_dir={run}", *more]

    def evaluate(self, run: Path) -> list[str]:
        return [f"run={run}", "tokens=2048", "device=cpu"]

    def fresh(self, name: str) -> Path:
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        return folder


def ending(run: Path) -> dict[str, str]:
    """What a finished run ends with, without times and resumptions: losses, and the bits of weights and optimizer."""
    timed = {"tokens_per_s", "mem_gb", "time_s", "machine", "version", "monitor_s"}
    lines = [line for line in read_json_lines(run / "metrics.jsonl") if "continued" not in line]
    if not checkpoints(run):
        return {}
    last = checkpoints(run)[-1]
    return {
        "metrics": json.dumps([{k: v for k, v in line.items() if k not in timed} for line in lines]),
        "checkpoint": last.name,
        **{path.name: _digest(path) for path in last.glob("*.safetensors")},
        "litter": ", ".join(path.name for path in run.rglob(".*") if path.name != ".lock"),
    }


def compared(run: Path, whole: Path, code: int = 0) -> str:
    """What is wrong with a run that had to end as `whole`."""
    ends, wanted = ending(run), ending(whole)
    return ", ".join([f"exit code {code}"] * (code > 0) + [f"another {key}" for key in wanted if ends.get(key) != wanted[key]])


def prepared(folder: Path) -> dict[str, str]:
    return {path.name: _digest(path) for path in sorted(folder.iterdir()) if path.is_file() and path.suffix == ".bin"}


def evaluated(run: Path) -> dict[str, str]:
    return {path.name: json.dumps(json.loads(path.read_text())["results"]) for path in (run / "eval").glob("*.json")}


def all_finite(run: Path) -> bool:
    """Whether every checkpoint of the run holds numbers alone."""
    files = (path for folder in checkpoints(run) for path in folder.glob("*.safetensors"))
    return all(tensor.isfinite().all() for path in files for tensor in load_file(path).values())


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
