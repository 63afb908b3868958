"""Rows of a benchmark: timings in turn, so that a slow period of the machine affects all rows alike; memory; a table."""

import ctypes
import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from scipy.stats import quantile_test

from eval.common import progress
from training.metrics import status_gb

LEAST_SECONDS = 0.02  # of one timing; a shorter work is repeated within the timing
GROWTHS = 5  # calls whose memory is measured
PROCESSES = get_context("spawn")  # for works whose memory is measured, or whose setup is another trainer's


@dataclass
class Row:
    """One line of the table. `seconds[measure]` has the time of one call for every round."""

    labels: dict[str, str | int]
    amount: float | None = None  # tokens or MB of one call; the table then shows speed
    seconds: dict[str, list[float]] = field(default_factory=dict)
    ratio: dict[str, float] = field(default_factory=dict)  # of times or speeds, to the first measured row
    not_measured: dict[str, str] = field(default_factory=dict)  # measure -> reason
    facts: dict[str, float | str | None] = field(default_factory=dict)  # other columns; a string: why not measured


Work = Callable[[], Any]


def attempt(build: Callable[[], Any]) -> Any:
    """The result of `build()`, or a string with the reason why it is not available on this machine."""
    try:
        return build()
    except (AssertionError, AttributeError, LookupError, NameError, TypeError):
        raise  # a bug
    except Exception as error:  # of torch, Triton or the system
        return " ".join(str(error).split()) or type(error).__name__


def time_in_turn(measure: str, rows: list[Row], works: Sequence[Work | str], rounds: int, device: torch.device) -> None:
    """Time the works in turn, and fill in `measure` of every row. A string in `works` says why its row has no work.

    A work that fails in a later round, for lack of memory, for example, leaves its row without times; the others go on.
    """
    repeats = {}
    for i, (row, work) in enumerate(zip(rows, works, strict=True)):
        calls = work if isinstance(work, str) else attempt(partial(warm_up, work, device))
        if isinstance(calls, str):
            row.not_measured[measure] = calls
        else:
            repeats[i], row.seconds[measure] = calls, []
    with progress(measure, rounds) as bar:
        for _ in range(rounds):
            for i in list(repeats):
                seconds = attempt(partial(seconds_of, works[i], repeats[i], device))
                if isinstance(seconds, str):
                    rows[i].not_measured[measure] = seconds
                    del rows[i].seconds[measure], repeats[i]
                else:
                    rows[i].seconds[measure].append(seconds)
            bar.update()
    measured = [row for row in rows if measure in row.seconds]
    for row in measured:
        row.ratio[measure] = median(paired_ratios(row, measured[0], measure))


def paired_ratios(row: Row, first: Row, measure: str) -> list[float]:
    """For every round this row's time divided by the first's; if rows show speed, this speed divided by the first's."""
    ratios = [mine / its for mine, its in zip(row.seconds[measure], first.seconds[measure], strict=True)]
    return ratios if row.amount is None else [row.amount / first.amount / ratio for ratio in ratios]


def median_interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """95 % interval of the median, of any distribution: two order statistics (Conover, Practical Nonparametric Statistics,
    section 3.2). None for fewer than 6 values: even the whole range of 5 values has less than 95 %.
    """
    interval = quantile_test(values, p=0.5).confidence_interval(0.95)
    return (None, None) if math.isnan(interval.low) else (float(interval.low), float(interval.high))


def warm_up(work: Work, device: torch.device) -> int:
    """Call once (compilation, caches), then return the number of calls that last LEAST_SECONDS."""
    seconds_of(work, 1, device)
    return max(1, math.ceil(LEAST_SECONDS / seconds_of(work, 1, device)))


def seconds_of(work: Work, repeats: int, device: torch.device) -> float:
    """Seconds per call."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    wait()
    return (time.perf_counter() - start) / repeats


def peak_growth(work: Work, device: torch.device) -> float | None:
    """Peak memory in MB that a call of `work` adds to the memory in use; None on a system that does not report it.

    On a CPU this is the resident memory of the process, and other threads count: call it in a process that does nothing else.
    One call differs from the next by several percent, so it is the median of GROWTHS calls after a first one.
    """
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    if status_gb("VmHWM") is None:
        return None
    growths = []
    for _ in range(GROWTHS):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # else work could use memory that was freed but kept, uncounted
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak to the memory resident now (man 5 proc)
        before = status_gb("VmRSS")
        work()
        growths.append(max(0.0, 1e3 * (status_gb("VmHWM") - before)))
    return median(growths)


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table, its columns padded to be read in a terminal."""
    measures = list(dict.fromkeys(m for row in rows for m in (*row.seconds, *row.not_measured)))
    facts = list(dict.fromkeys(key for row in rows for key in row.facts))
    heads = [measure if rows[0].amount else f"{measure} (ms)" for measure in measures]
    lines = [[*rows[0].labels, *heads, *facts, "note"]]
    for row in rows:
        timed = [cell(row, measure) for measure in measures]
        reasons = "; ".join(f"not measured: {reason[:160]}" for reason in dict.fromkeys(row.not_measured.values()))
        lines.append([*map(str, row.labels.values()), *timed, *(number(row.facts.get(key)) for key in facts), reasons])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    padded = (" | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(f"| {line} |" for line in padded)


def cell(row: Row, measure: str) -> str:
    """median (least-most) ratio."""
    if measure not in row.seconds:
        return "-"
    values = [row.amount / s if row.amount else 1e3 * s for s in row.seconds[measure]]
    return f"{number(median(values))} ({number(min(values))}-{number(max(values))}) {row.ratio[measure]:.2f}x"


def number(value: float | str | None) -> str:
    """Three significant digits, or all before the decimal point; n/a for None; a string is why it was not measured."""
    if value is None or isinstance(value, str):
        return f"not measured: {value[:160]}" if value else "n/a"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
