"""The origin of a number besides its configuration: the machine and the version of the code."""

import os
import platform
import subprocess
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


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
        info |= {
            "gpu": torch.cuda.get_device_name(),
            "gpus": torch.cuda.device_count(),
            "cuda": torch.version.cuda or "",
        }
    return info


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def version() -> str:
    """Git commit of the code, with `-dirty` if the files differ from the commit; `unknown` outside a checkout."""
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def result_record(kind: str, name: str, config: Any, results: Any, **more: Any) -> dict[str, Any]:
    """The content of every result's JSON: kind of evaluation, run's name, configuration, machine, code version, results."""
    plain = asdict(config) if is_dataclass(config) else config
    about = {"eval": kind, "run": name, "config": plain, "machine": machine(), "version": version()}
    return {**about, **more, "results": results}
