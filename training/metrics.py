"""What a run reports: metrics.jsonl is the record; the terminal lines and wandb repeat it."""

import errno
import json
import math
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from configs.files import json_text, naming, read_json_lines, write_atomic
from training.distributed import World
from training.tracking import mirror, start_wandb

STATUS = Path("/proc/self/status")  # of Linux

# Dense bfloat16 peak (V100: float16), FLOP/s, from the makers' data sheets. The first key in the device's name counts.
PEAK_FLOPS = {
    "B200": 2250e12, "H200 NVL": 835e12, "GH200": 989e12, "H200": 989e12, "H100 NVL": 835e12, "H100 PCIe": 756e12,
    "H100": 989e12, "A100": 312e12, "A40": 149.7e12, "A10": 125e12, "A10G": 70e12, "L40S": 362e12, "L40": 181e12,
    "L4": 121e12, "RTX 5090": 209.5e12, "RTX 4090": 165e12, "RTX 3090": 71e12, "V100": 125e12,
}  # fmt: skip


def peak_flops(device: torch.device) -> float | None:
    """The device's dense bfloat16 peak in FLOP/s; None where it is not in the table (CPUs and MIG slices of a card are not)."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "MIG"
    if "MIG" in name:
        return None
    return next((peak for key, peak in PEAK_FLOPS.items() if re.search(rf"\b{key}\b(?! (Ti|D|Laptop)\b)", name)), None)


def memory_gb(device: torch.device) -> float | None:
    """Peak memory so far in GB, to the MB: allocated on the GPU, or resident in this process (None but on Linux)."""
    peak = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else status_gb("VmHWM")
    return None if peak is None else round(peak, 3)


def status_gb(key: str) -> float | None:
    """This process's resident memory in GB, as Linux reports it: VmRSS, now, or VmHWM, the peak. None without it (gVisor)."""
    size = re.search(rf"{key}:\s+(\d+) kB", STATUS.read_text()) if STATUS.is_file() else None
    return int(size[1]) * 1.024e-6 if size else None


class Metrics:
    """Appends to `metrics.jsonl` and wandb, on rank 0. A run that goes on at step `first` drops later lines; 0: all lines."""

    def __init__(self, run_dir: Path, wandb: str, config: dict[str, Any], first: int) -> None:
        self.path = run_dir / "metrics.jsonl"
        self.seconds_before = 0.0  # of training, before a resume
        self.wandb = start_wandb(wandb, run_dir, config)  # before lines are dropped: if it fails, they stay
        if self.path.exists():
            kept = [line for line in read_json_lines(self.path) if first > 0 and line.get("step", math.inf) <= first]
            write_atomic(self.path, "".join(f"{json_text(line)}\n" for line in kept).encode())
            self.seconds_before = max((line.get("time_s", 0.0) for line in kept), default=0.0)
        self.file = self.path.open("ab", buffering=0)  # unbuffered: close() does not write a failed line again

    def write(self, **line: Any) -> None:
        """Append one line, without None and non-finite values. OSError: the disk is full. ValueError: the file was deleted."""
        line = {key: value for key, value in json.loads(json_text(line)).items() if value is not None}
        text = f"{json_text(line)}\n".encode()
        if not self.path.exists():
            raise ValueError(f"{self.path} was deleted while the run was trained: train it again")
        with naming(self.path):
            if self.file.write(text) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.wandb:
            mirror(self.wandb, line)

    def close(self) -> None:
        self.file.close()
        if self.wandb:
            self.wandb.summary.update({"best_val_loss": min(val_losses(self.path.parent))})
            self.wandb.finish()


def val_losses(run_dir: Path) -> list[float]:
    return [line["val_loss"] for line in read_json_lines(run_dir / "metrics.jsonl") if "val_loss" in line] or [math.nan]


class Stopwatch:
    """Seconds of training, `before` included, without those inside `with watch.paused()`; the speed since the last reading."""

    def __init__(self, before: float, step: int) -> None:
        self._start, self._paused = time.perf_counter() - before, 0.0
        self._read_at = step, before

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start - self._paused

    def __str__(self) -> str:
        return clock(self.seconds)

    @contextmanager
    def paused(self) -> Iterator[None]:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # steps that the GPU has not finished count as training
        since = time.perf_counter()
        yield
        self._paused += time.perf_counter() - since

    def reading(self, step: int, batch_tokens: int, flops_per_token: int, world: World) -> dict[str, float | None]:
        """tokens_per_s and mfu since the last reading, mem_gb and time_s, at the end of `step`."""
        (last_step, last_seconds), seconds = self._read_at, self.seconds
        self._read_at = step, seconds
        speed, peak = (step - last_step) * batch_tokens / (seconds - last_seconds), peak_flops(world.device)
        mfu = speed * flops_per_token / (peak * world.size) if peak else None
        return {"tokens_per_s": round(speed, 1), "mfu": mfu, "mem_gb": memory_gb(world.device), "time_s": round(seconds, 2)}


def log_line(step: int, steps: int, batch_tokens: int, line: dict[str, Any]) -> str:
    """The terminal line of a logged step, from its line of metrics.jsonl."""
    mfu = "n/a" if line["mfu"] is None else f"{line['mfu']:.1%}"
    memory = "n/a" if line["mem_gb"] is None else f"{line['mem_gb']:.2f} GB"
    eta = clock((steps - step) * batch_tokens / max(line["tokens_per_s"], 0.1))
    return (
        f"step {step:>{len(str(steps))}}/{steps} | loss {line['loss']:.4f} | lr {line['lr']:.2e} | norm {line['grad_norm']:.2f}"
        f" | {line['tokens_per_s']:,.0f} tok/s | mfu {mfu} | mem {memory} | eta {eta}"
    )


def clock(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds)))
