"""Files and output for the whole project: atomic writes, JSON, JSON lines, one writer per folder, and printed text."""

import errno
import fcntl
import gzip
import json
import math
import os
import re
import secrets
import shutil
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

LOCK = ".lock"  # the file of lock_folder
FULL = "free some space and repeat the command"
FIXES = {errno.ENOSPC: FULL, errno.EDQUOT: FULL, errno.EIO: "the disk has failed there, copy the file to another one"}
# A list of numbers in indented JSON. A string cannot match, because it has no line break.
NUMBERS = re.compile(r"\[\n\s*((?:(?:-?\d[\d.e+-]*|null),\s+)*(?:-?\d[\d.e+-]*|null))\s+\]")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """A context that adds the path, and a fix where one is known, to the OSError of a read or write, which names no file."""
    try:
        yield
    except OSError as error:
        if error.filename or not error.errno:
            raise
        fix = f": {FIXES[error.errno]}" if error.errno in FIXES else ""
        raise OSError(error.errno, f"{error.strerror}{fix}", str(path)) from error


def write_atomic(path: Path, *parts: bytes | memoryview) -> None:
    """Write `parts` to `path`, through to the disk (fsync); makes a missing folder. A kill leaves the old or the new file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    try:
        with naming(path), temporary.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Any, indent: int = 1) -> None:
    """Write `content` atomically, indented, but with a list of numbers on one line."""
    text = json_text(content, indent=indent)
    write_atomic(path, NUMBERS.sub(lambda numbers: f"[{' '.join(numbers[1].split())}]", text).encode())


def json_text(content: Any, **how: Any) -> str:
    """`content` as JSON. NaN and infinities become null, other objects their text. how: keywords of json.dumps."""
    return json.dumps(_finite(content), default=str, allow_nan=False, **how)


def _finite(content: Any) -> Any:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    return [_finite(value) for value in content] if isinstance(content, (list, tuple)) else content


def read_json_object(path: Path, fix: str) -> dict[str, Any]:
    """The object in a JSON file. ValueError, with `fix` as what to do, if the file is damaged."""
    if (content := _object(path.read_bytes())) is None:
        raise ValueError(f"{path} is damaged: {fix}")
    return content


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def read_run_config(run: Path, groups: Sequence[str] = ("model", "data")) -> dict[str, Any]:
    """The config.yaml of a run's folder, which must have `groups`."""
    import yaml

    path = run / "config.yaml"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        whole = isinstance(content, dict) and all(isinstance(content[key], dict) for key in groups)
    except (yaml.YAMLError, ValueError, KeyError, RecursionError):
        whole = False
    if not whole:
        raise ValueError(f"{path} is damaged: copy it again, or train the run again")
    return content


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file with one JSON object per line (.gz: compressed); none if there is no file, none in a line that
    does not end in "}" (cut by a kill).
    """
    if not path.is_file():
        return
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        try:
            for number, line in enumerate(file, 1):
                if line.rstrip().endswith(b"}"):
                    if (content := _object(line)) is None:
                        raise ValueError(f"{path} line {number} is not a JSON object: copy the file again")
                    yield content
        except (gzip.BadGzipFile, EOFError, zlib.error):
            raise ValueError(f"{path} is damaged: copy it again") from None


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A new folder to write into. At the end of the block it becomes `path`; on an error it is deleted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _temporary(path)
    partial.mkdir()
    try:
        yield partial
        replace_folder(path, partial)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def replace_folder(path: Path, partial: Path) -> None:
    """Give the folder `partial` the name `path`, in place of an older folder."""
    replaced = _temporary(path)
    if path.is_dir():
        os.replace(path, replaced)
    os.replace(partial, path)
    with suppress(OSError):  # there was none, or another program holds a file in it open
        remove(replaced)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")


def remove_leftovers(folder: Path) -> None:
    """Remove what killed commands left half-written in `folder`, where nobody else writes."""
    for path in folder.glob(".*.part"):
        with suppress(OSError):  # a file that another program holds open
            remove(path)


def remove(path: Path) -> None:
    """Delete a file, a folder with all that is in it, or a symbolic link without its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def lock_folder(folder: Path, what: str) -> IO[str]:
    """The right of one process to write into a folder, for `what`, until it closes this file or ends; on a file system without
    locks, all processes get it.
    """
    file = (folder / LOCK).open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(f"{folder} is in use: another process {what}: wait until it ends, or stop it") from None
    except OSError:
        pass
    return file


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def say(text: str) -> None:
    """Print `text`. A reader that has left, as of `| head`, is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes the rest when it ends
