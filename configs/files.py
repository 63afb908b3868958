"""Files as every part of the project writes and reads them: whole or not at all, and line by line."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def write_atomic(path: Path, *parts: bytes | memoryview, durable: bool = True) -> None:
    """Write `parts` to `path` so that a reader, a kill or a full disk never leaves half of a file.

    The folder is made where it is missing. durable: wait until the disk has it (fsync).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
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
    """Write `content` as indented JSON, atomically; what JSON does not know becomes its text."""
    write_atomic(path, json.dumps(content, indent=1, default=str).encode())


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file with one JSON object per line; none where the file is missing.

    A last line that a kill cut in half is not a line yet and is left out.
    """
    if path.is_file():
        for line in path.read_text().splitlines():
            if line.endswith("}"):
                yield json.loads(line)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A new folder to write into: it becomes `path` at the end of the block, and is deleted if the block fails."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    partial.mkdir(parents=True)
    try:
        yield partial
        os.replace(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
