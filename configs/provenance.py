"""The origin of a number besides its configuration: the machine and the version of the code."""

import os
import platform
import subprocess
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CODE = ("train.py", "ablation", "bench", "configs", "data", "eval", "model", "scripts", "training")


def machine() -> dict[str, str | int]:
    """Processor, accelerator and library versions of this machine."""
    import numpy
    import torch

    info: dict[str, str | int] = {
        "cpu": cpu_name(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "gpu": "none",
    }
    if torch.cuda.is_available():
        name, count = torch.cuda.get_device_name(), torch.cuda.device_count()
        info |= {"gpu": name, "gpus": count, "cuda": torch.version.cuda or ""}
    return info


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def version() -> str:
    """Git commit, with `-dirty` if the code, new files included, differs from it; `unknown` outside of a checkout."""
    try:
        if Path(_git("rev-parse", "--show-toplevel")).resolve() != ROOT.resolve():  # of another repository
            return "unknown"
        commit = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("--no-optional-locks", "status", "--porcelain", "--untracked-files=all", "--", *CODE).splitlines()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    dirty = any(not line.startswith("??") or line.strip('"').endswith((".py", ".yaml", ".cpp")) for line in changed)
    return f"{commit}-dirty" if dirty else commit


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)  # a file system may hang
    return done.stdout.strip()


def result_record(kind: str, name: str, config: Any, results: Any, **more: Any) -> dict[str, Any]:
    """The content of every result's JSON."""
    plain = asdict(config) if is_dataclass(config) else config
    about = {"eval": kind, "run": name, "config": plain, "machine": machine(), "version": version()}
    return {**about, **more, "results": results}
