"""Commands of the repository in processes of their own that start at once, because a server forks them that has imported torch.

A new interpreter needs three to four seconds for its imports, and the tests start hundreds of commands. The child runs what
`python ARGUMENTS` would run, in the same environment, with exit status, standard output and standard error of its own. What
must be there before Python starts (another Triton, a variable of libgomp) needs a real process: `run_command(..., env=...)`.
"""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import IO

import torch

ROOT = Path(__file__).parent.parent
PRELOADED = ["torch._dynamo", "torch.distributed.checkpoint", "numpy", "hydra", "tiktoken", "matplotlib", "jinja2"]
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(PRELOADED)
# A child's exit status can be read once. `start` and `exitcode` read it, of any child that has ended: one thread at a time.
READING = threading.Lock()


class Command:
    """As much of subprocess.Popen as tests, ablation/jobs.py and scripts/gpu.py use: Command([sys.executable, "train.py"])."""

    def __init__(
        self, arguments: Sequence[str], env: Mapping[str, str], stdout: IO, stderr: IO | int = subprocess.STDOUT, **_: object
    ) -> None:
        paths = [stdout.name, stdout.name if stderr == subprocess.STDOUT else stderr.name]
        self.process = SERVER.Process(target=_child, args=(list(arguments[1:]), dict(env), paths))
        with READING:
            self.process.start()
        self.pid = self.process.pid

    def wait(self, timeout: float | None = None) -> int:
        """The exit status; negative for a signal."""
        if not connection.wait([self.process.sentinel], timeout):
            self.process.kill()
            raise subprocess.TimeoutExpired("a command of a test", timeout)
        return self.poll()

    def poll(self) -> int | None:
        with READING:
            return self.process.exitcode

    returncode = property(poll)

    def terminate(self) -> None:
        self.process.terminate()


def _child(arguments: list[str], env: dict[str, str], paths: list[str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", 1)))  # torch read the server's environment
    os.chdir(ROOT)
    for descriptor, path in enumerate((os.devnull, *paths)):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), descriptor)
    module = arguments[0] == "-m"
    sys.argv = arguments[1:] if module else arguments
    sys.path[0:1] = [str(ROOT if module else (ROOT / arguments[0]).parent)]
    try:
        if module:
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
