"""Faults on purpose, and what was survived: kills, NaN and infinity, damaged checkpoints, restarts by torchrun.

  python -m tests.faults kills=100 parts=10 injections=40 damages=20 restarts=10 storage=10 ranks=10 ends=1 seed=1

storage: trials of each fault of tests/faults/storage.py. ends=1: the ways to end of tests/faults/ends.py as well. Trials are
drawn from the seed. The table says how many trials ended as they must; a failed one is named, and the exit code is 1. The
commands run in forks of this process, on the CPU, on a model of two layers.
"""

import importlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hydra._internal.hydra import Hydra

from configs.files import read_json_lines
from tests.conftest import ROOT
from tests.faults import ends, storage
from tests.faults.runs import STEPS, World, all_finite, call, compared, evaluated, launch, launch_two, prepared, wait
from training.checkpoint import checkpoints

Trial = Callable[[World, random.Random], str]  # "" where it ended as it must, else what is wrong


def killed(module: str, arguments: list[str], world: World, after: float) -> None:
    process = launch(module, arguments, world.log)
    time.sleep(after)
    os.kill(process, signal.SIGKILL)
    wait(process)


def kill_training(world: World, draw: random.Random) -> str:
    """One to three kills at any moment of the run."""
    run = world.fresh("killed")
    for _ in range(draw.randint(1, 3)):
        killed("train", world.train(run, "resume=true"), world, draw.uniform(0, world.seconds["training"]))
    return compared(run, world.whole, call("train", world.train(run, "resume=true"), world.log))


def kill_checkpoint(world: World, draw: random.Random) -> str:
    """A kill while a checkpoint is written."""
    run, begun = world.fresh("killed"), draw.randrange(1, STEPS)
    process = launch("train", world.train(run, "resume=true"), world.log)
    peek = os.WEXITED | os.WNOHANG | os.WNOWAIT
    writing = f".step_{begun:08d}"  # begins the temporary name of the checkpoint's folder
    while not any(path.name >= writing for path in run.glob("checkpoints/.step_*")) and not os.waitid(os.P_PID, process, peek):
        time.sleep(0.0005)
    os.kill(process, signal.SIGKILL)
    if not wait(process):
        return "it ended before the kill"
    return compared(run, world.whole, call("train", world.train(run, "resume=true"), world.log))


def kill_parts(world: World, draw: random.Random) -> str:
    """A kill of one or both of two processes that share a model, while each writes its part of a checkpoint."""
    more = ("parallel=fsdp", "checkpoint.background=true", "resume=true", "steps=6")
    whole, run, begun = world.folder / "whole_parts", world.fresh("killed"), draw.randrange(1, 6)
    if not whole.exists() and (codes := [wait(p) for p in launch_two(world.train(whole, *more), world.log)]) != [0, 0]:
        return f"without a kill: exit codes {codes}"
    processes = launch_two(world.train(run, *more), world.log)
    ends.until(lambda: list(run.glob(f"checkpoints/.*step_{begun:08d}*")))
    time.sleep(draw.uniform(0, 0.03))  # a part is written, or all are, or they get their name
    for process in draw.choice((processes, processes[:1], processes[1:])):
        os.kill(process, signal.SIGKILL)
    if 0 in (codes := [wait(process) for process in processes]) or 124 in codes:
        return f"killed: exit codes {codes}"
    codes = [wait(process) for process in launch_two(world.train(run, *more), world.log)]
    return compared(run, whole, max(codes))


def kill_preparation(world: World, draw: random.Random) -> str:
    shards = world.fresh("killed_shards")
    killed("data.prepare", world.prepare(shards), world, draw.uniform(0, world.seconds["preparation"]))
    code = call("data.prepare", world.prepare(shards), world.log)
    return "" if not code and prepared(shards) == prepared(world.shards) else f"exit code {code}"


def kill_evaluation(world: World, draw: random.Random) -> str:
    run = world.fresh("evaluated")
    shutil.copytree(world.whole, run, ignore=shutil.ignore_patterns("eval"))
    killed("eval.perplexity", world.evaluate(run), world, draw.uniform(0, world.seconds["evaluation"]))
    code = call("eval.perplexity", world.evaluate(run), world.log)
    return "" if not code and evaluated(run) == evaluated(world.whole) else f"exit code {code}"


def poison(kind: str, steps: set[int]) -> None:
    """Spoil the gradients, the loss or the weights of these steps (from 1), in the process that trains."""
    clip, seen = torch.nn.utils.clip_grad_norm_, [0]

    def spoiled(parameters: object, limit: float) -> torch.Tensor:
        parameters = [p for p in parameters if p.grad is not None]
        seen[0] += 1
        if seen[0] in steps:
            target = parameters[seen[0] % len(parameters)]
            if kind == "weight":
                target.data[(0,) * target.dim()] = float("nan")
            elif kind == "spike":
                target.grad *= 1e9
            else:
                target.grad[(0,) * target.dim()] = float(kind)
        return clip(parameters, limit)

    torch.nn.utils.clip_grad_norm_ = spoiled


def inject(world: World, draw: random.Random) -> str:
    """NaN, inf or a spike in the gradients, or a NaN in the weights, once or in a row; the last step may be among them."""
    run, kind = world.fresh("injected"), draw.choice(("nan", "inf", "-inf", "spike", "weight"))
    first = draw.randint(1, STEPS)
    steps = set(range(first, min(STEPS, first + draw.choice((0, 0, 1, 5))) + 1))
    code, text = call("train", world.train(run, "nonfinite=4"), world.log, partial(poison, kind, steps)), ends.logged(world)
    errors = len(re.findall(r"^error: ", text, re.M))
    if not all_finite(run) or "Traceback" in text:
        return f"{kind} at {sorted(steps)}: a harmed checkpoint, or a traceback"
    recovers = kind == "spike" or (kind != "weight" and len(steps) < 4 and STEPS not in steps)
    if recovers == bool(code) or errors != (not recovers):
        return f"{kind} at {sorted(steps)}: exit code {code}, {errors} lines of errors"
    noted = [line["step"] for line in read_json_lines(run / "metrics.jsonl") if "skipped" in line]
    if recovers and kind != "spike" and noted != sorted(steps):
        return f"{kind} at {sorted(steps)}: metrics.jsonl notes {noted}"
    return ""


def damage(world: World, draw: random.Random) -> str:
    """Any damage to the newest checkpoint of a run that is not finished."""
    from tests.training.test_checkpoint import DAMAGES

    run, kind = world.fresh("damaged"), draw.choice(sorted(DAMAGES))
    shutil.copytree(world.whole, run)
    newest = checkpoints(run)[-1]
    try:
        DAMAGES[kind](newest)
    except KeyError:  # this model has no such tensor
        (newest / "model.safetensors").write_bytes(b"")
    code = call("train", world.train(run, "resume=true"), world.log)
    warnings = ends.logged(world).count("warning: ")
    return compared(run, world.whole, code) or ("" if warnings == 1 else f"{kind}: {warnings} warnings")


def restart(world: World, draw: random.Random) -> str:
    """torchrun with two processes, one of which is killed."""
    run, at, steps = world.fresh("restarted"), draw.randrange(2, 20), 60
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1", "train.py"]
    with world.log.open("a") as log:
        options = {"cwd": ROOT, "stdout": log, "stderr": log, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
        agent = subprocess.Popen([sys.executable, *torchrun, *world.train(run, "resume=true", f"steps={steps}")], **options)
        while agent.poll() is None and not any(folder.name >= f"step_{at:08d}" for folder in checkpoints(run)):
            time.sleep(0.005)
        if agent.poll() is not None:
            return "it ended before the kill"
        workers = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        os.kill(int(draw.choice(workers)), signal.SIGKILL)
        try:
            code = agent.wait(timeout=180)
        except subprocess.TimeoutExpired:
            agent.terminate()
            return "no end within 180 s"
    return f"exit code {code}" if code else ("" if checkpoints(run)[-1].name == f"step_{steps:08d}" else "not finished")


def ranks_apart(world: World, draw: random.Random) -> str:
    """One of two processes is started with another configuration or text: both say it before they train."""
    shards, run = world.folder / "other_shards", world.fresh("apart")
    if not shards.exists() and (code := call("data.prepare", [*world.prepare(shards), "data.val_fraction=0.2"], world.log)):
        return f"preparation of other shards: exit code {code}"
    others = {"optim.lr": "3e-3", "seed": "2", "steps": "17", "model.n_layer": "3", "data.dir": str(shards)}
    key = draw.choice(sorted(others))
    codes = [wait(process) for process in launch_two(world.train(run), world.log, (f"{key}={others[key]}",))]
    text, name = world.log.read_text(), "the text's digest" if key == "data.dir" else key
    if codes == [2, 2] and re.search(rf"^error: {name} is \S+ on rank 1, but", text, re.M) and not run.exists():
        return ""
    return f"{key}: exit codes {codes}, run folder {run.exists()}"


SIZES = {"kills": 100, "parts": 10, "injections": 40, "damages": 20, "restarts": 10, "storage": 10, "ranks": 10}
SIZES |= {"ends": 1, "seed": 1}


def plan(sizes: dict[str, int]) -> list[tuple[str, int, Trial]]:
    """Fault, trials, trial: the kills are shared out over the commands, with at least one in training."""
    rest = [sizes["kills"] * share // 100 for share in (30, 20, 10)]
    return [
        ("kill in training", sizes["kills"] - sum(rest), kill_training),
        ("kill in a checkpoint", rest[0], kill_checkpoint),
        ("kill in preparation", rest[1], kill_preparation),
        ("kill in evaluation", rest[2], kill_evaluation),
        ("kill in a sharded checkpoint", sizes["parts"], kill_parts),
        ("NaN, inf, spike", sizes["injections"], inject),
        ("damaged newest checkpoint", sizes["damages"], damage),
        ("elastic restart", sizes["restarts"], restart),
        ("two processes with different settings", sizes["ranks"], ranks_apart),
        *((name, sizes["storage"], trial) for name, trial in storage.FAULTS.items()),
        *((name, sizes["ends"], lambda world, _, trial=trial: trial(world)) for name, trial in ends.ENDS.items()),
    ]


def main() -> int:
    sizes = SIZES | {key: int(count) for key, _, count in (argument.partition("=") for argument in sys.argv[1:])}
    failures = []
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Hydra, "get_mode", lambda hydra, **given: None)  # as in tests/conftest.py
        for module in ("data.prepare", "eval.perplexity", "train", "torch._dynamo"):  # once for all forks
            importlib.import_module(module)
        torch.set_num_threads(1)
        world = World(Path(folder) / "world")
        print("| fault | trials | survived | seconds |\n| --- | --- | --- | --- |", flush=True)
        for name, count, trial in plan(sizes):
            begin, survived = time.monotonic(), 0
            for number in range(count):
                world.log.write_text("")
                wrong = trial(world, random.Random(f"{sizes['seed']} {name} {number}"))
                survived += not wrong
                failures += [f"{name}, trial {number}: {wrong}\n{world.log.read_text()[-1000:]}"] if wrong else []
            print(f"| {name} | {count} | {survived} | {time.monotonic() - begin:.0f} |", flush=True)
        if failures:
            print("\n".join(failures), file=sys.stderr)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
