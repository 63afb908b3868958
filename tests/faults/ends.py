"""Ends of a training run before the last step: each scenario returns "" where it ended as it must, else what is wrong."""

import fcntl
import os
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from data import loader
from tests.faults.runs import World, call, compared, ending, launch, wait
from training import checkpoint
from training.checkpoint import checkpoints

LONG = ("steps=100000", "checkpoint.every=0")


def logged(world: World, since: int = 0) -> str:
    return world.log.read_bytes()[since:].decode()


def until(condition: Callable[[], object], limit: float = 180.0) -> None:
    end = time.monotonic() + limit
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)


def started(run: Path, lines: int = 4) -> Callable[[], bool]:
    """Whether the run has written so many lines."""
    path = run / "metrics.jsonl"
    return lambda: path.exists() and path.read_bytes().count(b"\n") >= lines


def slow() -> None:
    """A run that a signal finds under way."""
    real = loader.Loader.__call__
    loader.Loader.__call__ = lambda self, step, micro=0: time.sleep(0.1) or real(self, step, micro)


def by_signal(number: int) -> Callable[[World], str]:
    """The signal leaves a checkpoint and its exit code, and a resumed run ends as if there had been none.

    SIGUSR1 is a launcher's (submitit's), which gets a checkpoint before it queues the job again.
    """

    def scenario(world: World) -> str:
        run, marker = world.fresh("end"), world.folder / "queued"
        marker.unlink(missing_ok=True)

        def job() -> None:
            slow()
            if number == signal.SIGUSR1:
                signal.signal(number, lambda *_: marker.write_text(checkpoints(run)[-1].name))

        arguments = world.train(run, "checkpoint.every=0", "resume=true")
        process = launch("train", arguments, world.log, job)
        until(started(run))
        os.kill(process, number)
        code = wait(process)
        if code != 128 + number or not checkpoints(run) or marker.exists() != (number == signal.SIGUSR1):
            return f"exit code {code}, {len(checkpoints(run))} checkpoints, queued again: {marker.exists()}"
        code = call("train", arguments, world.log)
        weights, wanted = (ending(ended)["model.safetensors"] for ended in (run, world.whole))
        return "" if not code and weights == wanted else f"resumed: exit code {code}"

    return scenario


def second_signal(world: World) -> str:
    """A second one ends at once, even while a checkpoint is written."""

    def never() -> None:
        checkpoint.save_file = lambda *_: time.sleep(60)

    run = world.fresh("end")
    process = launch("train", world.train(run, *LONG), world.log, never)
    until(started(run))
    os.kill(process, signal.SIGTERM)
    time.sleep(0.5)
    os.kill(process, signal.SIGTERM)
    begin = time.monotonic()
    code = wait(process)
    return "" if code == 143 and time.monotonic() - begin < 5 and not checkpoints(run) else f"exit code {code}"


def into_pipe(world: World, run: Path, prepare: Callable[[int], None], *more: str) -> tuple[int, int]:
    """A run whose output goes into a pipe, after prepare(read end); (process, read end)."""
    ends = os.pipe()
    process = launch("train", world.train(run, *more), world.log, lambda: (os.dup2(ends[1], 1), os.close(ends[0])))
    os.close(ends[1])
    prepare(ends[0])
    return process, ends[0]


def full_pipe(world: World) -> str:
    """Nobody reads the output: the run stands still until a signal ends it, with a checkpoint."""
    run = world.fresh("end")
    process, end = into_pipe(world, run, lambda fd: fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, 4096), *LONG)
    until(started(run, 2))  # poll takes a pipe of one page for full after its first line
    size = -1
    while size != (size := (run / "metrics.jsonl").stat().st_size):
        time.sleep(1)
    os.kill(process, signal.SIGTERM)
    code = wait(process, 20)
    os.close(end)
    return "" if code == 143 and checkpoints(run) else f"exit code {code}, {len(checkpoints(run))} checkpoints"


def closed_output(world: World) -> str:
    """The reader has left (| head -1): the run goes on to its end."""
    run = world.fresh("end")
    process, _ = into_pipe(world, run, os.close)
    return compared(run, world.whole, wait(process))


def hangup_and_second_trainer(world: World) -> str:
    """SIGHUP writes a checkpoint and the run goes on; meanwhile a second trainer of the folder is refused."""
    run = world.fresh("end")
    process = launch("train", world.train(run, *LONG), world.log)
    until(started(run))
    os.kill(process, signal.SIGHUP)
    until(lambda: checkpoints(run))
    second = call("train", world.train(run, *LONG, "resume=true"), world.log)
    refused = second == 2 and "is in use: another process" in logged(world)
    os.kill(process, signal.SIGINT)
    code = wait(process)
    return "" if refused and code == 130 and len(checkpoints(run)) == 2 else f"second {second}, first {code}"


def full_disk(world: World) -> str:
    """No file, metrics.jsonl among them, may grow: one line; the checkpoint before is kept, and nothing half written."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))

    run, options = world.fresh("end"), ("checkpoint.every=4", "checkpoint.keep=0", "steps=8")
    if call("train", world.train(run, *options), world.log):
        return "the run without a fault failed"
    shutil.rmtree(run / "checkpoints" / "step_00000008")
    first, *others = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([f'{first[:-2]}, "note": "{"x" * 398_500}"}}\n', *others]))
    world.log.write_text("")
    code, errors = call("train", world.train(run, *options, "resume=true"), world.log, limit), logged(world)
    left = [folder.name for folder in checkpoints(run)] + [path.name for path in run.rglob(".*.part")]
    one_line = len(re.findall("^error: ", errors, re.M)) == 1 and "Traceback" not in errors
    return "" if code == 2 and one_line and left == ["step_00000004"] else f"exit code {code}, {left}"


ENDS: dict[str, Callable[[World], str]] = {
    "SIGTERM": by_signal(signal.SIGTERM),
    "SIGINT": by_signal(signal.SIGINT),
    "second signal": second_signal,
    "full pipe": full_pipe,
    "closed output": closed_output,
    "SIGHUP, second trainer": hangup_and_second_trainer,
    "full disk": full_disk,
    "requeued job": by_signal(signal.SIGUSR1),
}
