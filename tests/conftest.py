"""A tiny prepared data set and tiny training runs, made once per session."""

import gc
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import pytest
import torch
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra

from tests.processes import Command

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton: kernels run in its interpreter

# What tests/parity draws its configurations from; set it to repeat a failure, whose name holds it. Workers inherit it.
os.environ.setdefault("PARITY_SEED", f"{date.today():%Y%m%d}")

ROOT = Path(__file__).parent.parent
# Enough for 40 windows; the words repeat, so that a loss can fall in a few steps.
WORDS = "the quick brown fox jumps over a lazy dog and one small model learns to read it again ".split()

TINY = (
    "size=nano", "model.n_layer=2", "model.n_head=4", "model.d_model=32", "model.context=64", "batch_tokens=512",
    "device=cpu", "dtype=float32", "log_every=1", "eval_every=0", "eval_tokens=1024", "optim.warmup=2",
)  # fmt: skip


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"parity seed: PARITY_SEED={os.environ['PARITY_SEED']}")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    # Garbage is collected less often, and without all that has been imported: a twentieth of the tests' time.
    gc.freeze()
    gc.set_threshold(10_000, 10, 50)


@pytest.fixture(scope="session", autouse=True)
def hydra_composes_once() -> Iterator[None]:
    """Hydra composes a configuration twice, the first time for `hydra.mode` alone, and copies all dataclasses each time.

    A quarter of a second a command, for hundreds of commands that run in the tests' own process. Without a mode, the command
    line alone decides between one run and several.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Hydra, "get_mode", lambda hydra, **given: None)
        patch.setattr(ConfigStore, "__deepcopy__", lambda store, memo: store, raising=False)
        yield


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 400 short documents as jsonl."""
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "tiny.jsonl"
    lines = [" ".join(draw.choices(WORDS, k=60)) + "." for _ in range(400)]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


@pytest.fixture(scope="session")
def shards(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text as byte-tokenized shards."""
    folder = tmp_path_factory.mktemp("shards") / "tiny"
    done = run_command(
        "-m", "data.prepare", "data=text", f"path={text_file}", "data.name=tiny", f"data.dir={folder}",
        "data.tokenizer.name=bytes", "data.val_fraction=0.1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def remote_code(tmp_path_factory: pytest.TempPathFactory) -> None:
    """transformers without progress bars, its copies of remote code (one folder per process) kept out of the home."""
    import transformers
    from transformers import dynamic_module_utils

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    dynamic_module_utils.HF_MODULES_CACHE = str(tmp_path_factory.mktemp("modules"))


def run_command(*arguments: str, env: dict[str, str] | None = None, timeout: int = 240) -> subprocess.CompletedProcess:
    """Run python with these arguments (a script, or -m and a module) at the root; with `env` as a new interpreter."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    environment.pop("HYDRA_FULL_ERROR", None)
    command = [sys.executable, *arguments]
    if env or arguments[0] == "-c":
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as error:
        code = Command(command, environment, out, error).wait(timeout)
        said = [Path(file.name).read_text() for file in (out, error)]
    return subprocess.CompletedProcess(command, code, *said)


Typed = Callable[..., subprocess.CompletedProcess]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Typed:
    """typed("train.py", "steps=5") -> what the command printed and its exit code, without starting a process."""

    def type_in(command: str, *arguments: str) -> subprocess.CompletedProcess:
        monkeypatch.setattr(sys, "argv", [command, *arguments])
        code = 0
        try:
            importlib.import_module(command.removesuffix(".py").replace("/", ".")).main()
        except SystemExit as stopped:
            code = stopped.code or 0
        finally:
            GlobalHydra.instance().clear()
        said = capsys.readouterr()
        return subprocess.CompletedProcess([command, *arguments], code, said.out, said.err)

    return type_in


def train_arguments(shards: Path, run_dir: Path, *more: str) -> list[str]:
    """Arguments of a tiny training run."""
    data = ("data=text", "data.name=tiny", f"data.dir={shards}", "data.tokenizer.name=bytes")
    return ["train.py", *data, *TINY, f"run_dir={run_dir}", *more]


def assert_one_line_error(done: subprocess.CompletedProcess, says: str) -> None:
    """The command failed with one line that names the fix, and no traceback."""
    assert done.returncode != 0, done.stdout
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    assert says in lines[0], lines[0]
