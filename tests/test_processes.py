"""The commands that the tests start report the exit status that they ended with."""

import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import popen_forkserver
from pathlib import Path

import pytest

from tests.processes import Command


def test_commands_of_many_threads_have_their_own_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = popen_forkserver.forkserver.read_signed

    def read_slowly(descriptor: int) -> int:  # while one thread reads a status, others start processes and look for it
        time.sleep(random.uniform(0, 0.1))
        return read(descriptor)

    monkeypatch.setattr(popen_forkserver.forkserver, "read_signed", read_slowly)

    script = tmp_path / "ends_with.py"
    script.write_text("import sys; sys.exit(int(sys.argv[1]))")

    def status(number: int) -> int:
        with (tmp_path / "said").open("a") as said:
            return Command([sys.executable, str(script), str(number)], dict(os.environ), said).wait(60)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(status, range(12))) == list(range(12))
