"""Files as every part of the project writes and reads them: whole or not at all, line by line, one writer at a time."""

import glob
import json
import math
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows has no such module
    fcntl = None


def write_atomic(path: Path, *parts: bytes | memoryview, durable: bool = True) -> None:
    """Write `parts` to `path` so that a reader, a kill or a full disk never leaves half of a file.

    The folder is made where it is missing; what a killed command left there of the same file is removed.
    durable: wait until the disk has it (fsync).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent, path.name)
    temporary = _temporary(path)
    try:
        with temporary.open("wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write `content` as indented JSON, atomically, as `json_text` does."""
    write_atomic(path, json_text(content, indent=1).encode())


def json_text(content: Any, **how: Any) -> str:
    """`content` as JSON: NaN and infinities, which JSON does not know, become null, and other objects their text.

    how: of json.dumps, as indent=1.
    """
    return json.dumps(_finite(content), default=str, allow_nan=False, **how)


def _finite(content: Any) -> Any:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    return [_finite(value) for value in content] if isinstance(content, (list, tuple)) else content


def read_json_object(path: Path, fix: str) -> dict[str, Any]:
    """The object of a JSON file. ValueError, which ends in `fix`, where the file is none or is nested too deeply."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: {fix}")
    return content


def read_run_config(run: Path, groups: Sequence[str] = ("model", "data")) -> dict[str, Any]:
    """The config.yaml of a run's folder. ValueError where it is none: no YAML, or without these groups."""
    import yaml  # here: make gpu works without it

    path = run / "config.yaml"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        whole = isinstance(content, dict) and all(isinstance(content[key], dict) for key in groups)
    except (yaml.YAMLError, ValueError, KeyError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise ValueError(f"{path} is damaged: copy it again, or train the run again")
    return content


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file with one JSON object per line; none where the file is missing.

    A last line that a kill cut in half is not a line yet and is left out. ValueError for another line that is no object.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.rstrip().endswith(b"}"):
                try:
                    content = json.loads(line)
                except (ValueError, RecursionError):
                    content = None
                if not isinstance(content, dict):
                    raise ValueError(f"{path} line {number} is not a JSON object: delete that line")
                yield content


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A new folder to write into: it becomes `path` at the end of the block, and is deleted if the block fails.

    A folder that has that name already is replaced; a kill between the two renames leaves it to `sweep`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent, path.name)
    partial, replaced = _temporary(path), _temporary(path.with_name(f"{path.name}{REPLACED}"))
    partial.mkdir()
    try:
        yield partial
        if path.is_dir():
            os.replace(path, replaced)
        os.replace(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


REPLACED = ".replaced"  # ends the name of a folder whose place another one takes


def _temporary(path: Path) -> Path:
    """Where `path` is written before it is whole: the name says by which process of which machine."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.part")


def sweep(folder: Path, name: str = "*") -> None:
    """Remove what commands of this machine that were killed left of the files `name` in `folder`.

    A folder that was about to be replaced gets its name back where no other one has it.
    """
    host, name = socket.gethostname(), "*" if name == "*" else glob.escape(name)
    found = [*folder.glob(f".{name}{REPLACED}.{host}.*.part"), *folder.glob(f".{name}.{host}.*.part")]
    for path in dict.fromkeys(found):
        process = path.name.split(".")[-2]
        if not process.isdecimal() or int(process) == os.getpid() or _runs(int(process)):
            continue
        own = path.name[1:].removesuffix(f".{host}.{process}.part")
        if own.endswith(REPLACED) and not (before := folder / own.removesuffix(REPLACED)).exists():
            os.replace(path, before)
        else:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's, so it runs
        return True
    return True


class FolderLock:
    """The right to write into a folder: ValueError where another process has it, who does `what` there.

    The kernel takes it back when its process ends, however that ends; a file system without locks grants it to all.
    """

    def __init__(self, folder: Path, what: str) -> None:
        self._file = (folder / ".lock").open("a+")
        self._file.seek(0)
        self.holder = self._file.read().strip()  # what the last holder noted
        try:
            if fcntl is not None:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            who = f"another process ({self.holder})" if self.holder else "another process"
            raise ValueError(f"{folder} is in use: {who} {what}: wait until that ends, or stop it") from None
        except OSError:
            pass

    def note(self, text: str) -> None:
        """Write down who holds it, for those that are refused."""
        self._file.truncate(0)
        self._file.write(f"{text}\n")
        self._file.flush()

    def release(self) -> None:
        """Let the next one have it."""
        self._file.close()
