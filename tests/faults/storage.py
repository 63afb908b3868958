"""Faults of storage: what a file system refuses, and what others do to a run's folder. Trials as those of tests/faults."""

import errno
import os
import random
import re
import shutil
import stat
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.faults.ends import logged, slow, until
from tests.faults.runs import STEPS, World, call, compared, launch, wait
from training.checkpoint import checkpoints, load_run


def main() -> None:
    """The command of a reader: load the run sys.argv[1] over and over, until its step is sys.argv[2]."""
    while load_run(sys.argv[1]).step < int(sys.argv[2]):
        pass


def bad_error(text: str) -> str:
    """What is wrong with the output of a command that had to end with one line."""
    lines = len(re.findall("^error: ", text, re.M))
    return "" if lines == 1 and "Traceback" not in text else f"{lines} lines of errors: {text[-300:]}"


def ended(world: World, run: Path, code: int, text: str) -> str:
    """What is wrong with a run that had to end with one line, and that resume=true then has to finish."""
    if code != 2 or bad_error(text):
        return f"exit code {code}, {bad_error(text)}"
    return compared(run, world.whole, call("train", world.train(run, "resume=true"), world.log))


def failing_sync(code: int, refused: Callable[[int], bool]) -> None:
    """Let fsync of a handle fail where refused(handle), in the process of a command."""
    real = os.fsync

    def fsync(handle: int) -> None:
        if refused(handle):
            raise OSError(code, os.strerror(code))
        real(handle)

    os.fsync = fsync


def unsynced_folder(world: World, draw: random.Random) -> str:
    """No folder can be synced, as on CIFS and sshfs."""
    run, code = world.fresh("unsynced"), draw.choice((errno.EINVAL, errno.ENOTSUP))
    failing = partial(failing_sync, code, lambda handle: stat.S_ISDIR(os.fstat(handle).st_mode))
    return compared(run, world.whole, call("train", world.train(run), world.log, failing))


def unsynced_file(world: World, draw: random.Random) -> str:
    """From some file on, none can be synced: one line names it."""
    run, left = world.fresh("unsynced"), iter(range(draw.randrange(5 * STEPS - 5)))
    failing = partial(failing_sync, errno.EIO, lambda _: next(left, None) is None)
    code, text = call("train", world.train(run), world.log, failing), logged(world)
    return f"no file named: {text[-300:]}" if f"'{run}/" not in text else ended(world, run, code, text)


def undeletable(world: World, draw: random.Random) -> str:
    """The first old checkpoints cannot be renamed or, renamed, not be deleted: an open file on NFS."""
    run, count, renamed = world.fresh("undeletable"), draw.randint(1, 8), draw.random() < 0.5

    def install() -> None:
        owner, name = (shutil, "rmtree") if renamed else (Path, "rename")
        real, failures = getattr(owner, name), iter(range(count))

        def refused(*paths: Path, **options: bool) -> object:
            if str(paths[-1]).endswith(".old.part") and next(failures, None) is not None:
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
            return real(*paths, **options)

        setattr(owner, name, refused)

    code, text = call("train", world.train(run), world.log, install), logged(world)
    warnings = text.count("could not be deleted")
    if code or warnings != count:
        return f"exit code {code}, {warnings} warnings of {count}"
    code = call("train", world.train(run, "resume=true"), world.log)  # already done, it deletes what was left
    return compared(run, world.whole, code) or ("" if len(checkpoints(run)) == 2 else f"{len(checkpoints(run))} checkpoints")


def linked(world: World, draw: random.Random) -> str:
    """An old checkpoint, maybe the one that the run goes on from, is a link: the link goes, its target stays."""
    run, target, step = world.fresh("linked"), world.fresh("target"), draw.choice((draw.randrange(1, STEPS), STEPS - 1))
    shutil.copytree(world.whole, run)
    shutil.rmtree(checkpoints(run)[-1])
    newest = checkpoints(run)[-1]
    shutil.copytree(newest, target)
    link = newest.with_name(f"step_{step:08d}")
    if link == newest:
        shutil.rmtree(newest)
    link.symlink_to(target)
    code = 0
    for _ in range(2):
        code = code or call("train", world.train(run, "resume=true", "checkpoint.keep=1"), world.log)
    held, wanted = ({path.name: path.read_bytes() for path in f.iterdir()} for f in (target, checkpoints(world.whole)[-2]))
    kept = "" if held == wanted and len(checkpoints(run)) == 1 else "another target, or an old checkpoint that stays"
    return compared(run, world.whole, code) or kept


def moved(world: World, draw: random.Random) -> str:
    """The folder is moved or deleted while its run trains: one line, and nothing that looks like a run is made in its place."""
    run, elsewhere, step = world.fresh("moved"), world.fresh("elsewhere"), draw.randrange(1, STEPS - 2)
    process = launch("train", world.train(run), world.log, slow)
    until(lambda: any(folder.name >= f"step_{step:08d}" for folder in checkpoints(run)))
    run.rename(elsewhere)
    code, text = wait(process), logged(world)
    if run.exists():
        return f"exit code {code}, and a new folder: {sorted(run.rglob('*'))}"
    if draw.random() < 0.5:
        elsewhere.rename(run)
    return ended(world, run, code, text)


def unwritten(world: World, draw: random.Random) -> str:
    """An evaluation cannot write: it prints its result, and one line."""
    run, code = world.fresh("unwritten"), draw.choice((errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS, errno.EDQUOT))
    shutil.copytree(world.whole, run, ignore=shutil.ignore_patterns("eval", "figures"))
    failing = partial(failing_sync, code, lambda _: True)
    ends, first = call("eval.perplexity", world.evaluate(run), world.log, failing), logged(world)
    start = world.log.stat().st_size
    if ends != 2 or bad_error(first) or list(run.glob("eval/*")):
        return f"{errno.errorcode[code]}: exit code {ends}, {bad_error(first)}"
    call("eval.perplexity", world.evaluate(run), world.log)
    printed = logged(world, start).splitlines()
    lost = [line for line in printed if line not in first.splitlines() and str(run) not in line]
    return f"not printed: {lost}" if lost or not printed else ""


def read_beside(world: World, draw: random.Random) -> str:
    """A reader beside a run that writes a checkpoint at each step and keeps one: each load succeeds, without a warning."""
    run, steps = world.fresh("read"), draw.randint(30, 60)
    process = launch("train", world.train(run, "checkpoint.keep=1", f"steps={steps}"), world.log)
    until(lambda: checkpoints(run))
    reader = launch("tests.faults.storage", [str(run), str(steps)], world.log)
    codes, text = [wait(process), wait(reader, 30)], logged(world)
    return "" if codes == [0, 0] and "warning" not in text else f"exit codes {codes}: {text[-300:]}"


FAULTS: dict[str, Callable[[World, random.Random], str]] = {
    "no folder can be synced": unsynced_folder,
    "a file cannot be synced": unsynced_file,
    "old checkpoints cannot be deleted": undeletable,
    "an old checkpoint is a link": linked,
    "run folder moved or deleted": moved,
    "result cannot be written": unwritten,
    "reader beside a writer": read_beside,
}
