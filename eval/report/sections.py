"""Sections of the page for further evaluations, each with a table of all numbers of one evaluation."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from eval.common import command_of
from eval.report.measured import EVALUATIONS
from eval.report.runs import Arm, Run, evaluations
from eval.report.tables import Row, row_of

ROWS_SHOWN = 40  # rows of one evaluation; the JSON has all
# Numbers that say how something was measured: never rows of results.
LABELS = ("depth", "needles", "asked", "length")  # of cells
SETTINGS = (*LABELS, "samples", "windows")
TITLES = {
    "mqar": "Associative recall among distractors",
    "icl": "In-context learning",
    "outliers": "Activation outliers",
    "quantization": "Quantized attention logits",
    "harness": "Tasks of lm-evaluation-harness",
}


@dataclass
class Section:
    """The numbers of one evaluation under their names in the JSON, and the settings that all runs share."""

    name: str
    rows: list[Row]
    settings: dict[str, Any]
    left_out: int = 0

    @property
    def title(self) -> str:
        command = command_of(self.name)
        if command not in TITLES:
            return self.name.replace("_", " ").capitalize()
        return TITLES[command] + self.name.removeprefix(command).replace("_", ": ", 1)


def sections(arms: list[Arm]) -> list[Section]:
    """One section for each evaluation that is not in the headline table."""
    runs = [run for arm in arms for run in arm.runs if not run.diverged]
    return [_section(arms, name) for name in evaluations(runs) if name not in EVALUATIONS]


def _section(arms: list[Arm], name: str) -> Section:
    flat = {id(run): dict(scalars(run.results(name) or {})) for arm in arms for run in arm.runs}
    measured = [values for values in flat.values() if values]
    keys = list(dict.fromkeys(key for values in measured for key in values))
    settings = _settings(measured, keys)
    errors = {key: error for key in keys for error in _errors(key) if error in keys and error != key}
    shown = [key for key in keys if key not in (*settings, *errors.values()) and _last(key) not in SETTINGS]

    def read(run: Run, key: str) -> Any:
        value, error = flat[id(run)].get(key), flat[id(run)].get(errors.get(key, ""))
        return (value, error) if value is not None and error is not None else value

    rows = [row_of(arms, name, key, lambda run, key=key: read(run, key), _short) for key in shown[:ROWS_SHOWN]]
    return Section(name, rows, settings, max(0, len(shown) - ROWS_SHOWN))


def _settings(measured: list[dict[str, float]], keys: list[str]) -> dict[str, float]:
    """Whole numbers that are equal in all runs, which are counts and lengths, and SETTINGS.

    One of SETTINGS that is the same in all cells stands there once, under its last name; LABELS that differ between the
    cells are left out.
    """
    found: dict[str, float] = {}
    for key in keys:
        last, own = _last(key), {values.get(key) for values in measured}
        if last in SETTINGS:
            own_and_others = {value for values in measured for other, value in values.items() if _last(other) == last}
            if len(own_and_others) == 1:
                found[last] = own_and_others.pop()
                continue
        if len(own) == 1 and isinstance(measured[0].get(key), int) and not (" · " in key and last in LABELS):
            found[key] = own.pop()
    return found


def _last(key: str) -> str:
    return key.rpartition(" · ")[2]


def _errors(key: str) -> list[str]:
    """The possible names of the standard error of `key`; lm-eval's metrics are METRIC,FILTER."""
    beside = key.removesuffix(_last(key)) + "se" if _last(key) in ("accuracy", "loss", "mean") else ""
    return [f"{key}_se", f"{key}_stderr", beside, "_stderr,".join(key.rsplit(",", 1))]


def scalars(results: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """("a · b", number) of all numbers in nested dicts. Items of a list of dicts are named by their first value ("bits=8").

    Left out are the dict of standard errors, `se`, and what splits up a number that stands under another key: `layers`, and
    keys that begin with per_ or by_.
    """
    for key, value in results.items():
        name = f"{path} · {key}" if path else str(key)
        if str(key).startswith(("per_", "by_")) or key == "layers" or (key == "se" and isinstance(value, dict)):
            continue
        if isinstance(value, dict):
            yield from scalars(value, name)
        elif isinstance(value, list) and value and all(isinstance(item, dict) and item for item in value):
            for label, rest in _labelled(value):
                yield from scalars(rest, f"{name} · {label}" if path else label)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, value


def _labelled(items: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(label, rest) of each item, e.g. ("bits=8", ...). A label has as many first values as all labels need to differ."""
    for count in range(1, len(items[0]) + 1):
        named = [", ".join(f"{key}={value}" for key, value in list(item.items())[:count]) for item in items]
        if len(set(named)) == len(items):
            break
    for label, item in zip(named, items, strict=True):
        yield label, dict(list(item.items())[count:])


def _short(value: float) -> str:
    return f"{value:.3f}" if 0.001 <= abs(value) < 1000 else f"{value:.3g}"
