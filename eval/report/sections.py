"""Sections of the page for further evaluations, each with a table of all numbers of one evaluation."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from eval.report.measured import EVALUATIONS
from eval.report.runs import WITH_SE, Arm, Run, ordered
from eval.report.tables import Row, row_of

SETTINGS = ("depth", "needles", "asked", "length", "samples", "windows")  # how something was measured: never rows of results


@dataclass
class Section:
    """The numbers of one evaluation, and the settings that all runs share."""

    name: str
    rows: list[Row]
    settings: dict[str, Any]

    @property
    def title(self) -> str:
        return self.name.replace("_", " ").capitalize()


def sections(arms: list[Arm]) -> list[Section]:
    names = ordered(name for arm in arms for run in arm.runs if not run.diverged for name in run.evals)
    return [_section(arms, name) for name in names if name not in EVALUATIONS]


def _section(arms: list[Arm], name: str) -> Section:
    """Whole numbers that are equal in all runs are counts and lengths: settings, not results."""
    values = {id(run): dict(scalars(run.results(name) or {})) for arm in arms for run in arm.runs}
    measured = [of_run for of_run in values.values() if of_run]
    keys = list(dict.fromkeys(key for of_run in measured for key in of_run))
    errors = {key: error for key in keys for error in _errors(key) if error in keys}
    same = {key for key in keys if isinstance(measured[0].get(key), int) and len({one.get(key) for one in measured}) == 1}
    hidden = {*same, *errors.values()}
    shown = [key for key in keys if key not in hidden and key.rpartition(" · ")[2] not in SETTINGS]

    def row(key: str) -> Row:
        def read(run: Run) -> Any:
            value, error = (values[id(run)].get(name) for name in (key, errors.get(key)))
            return value if value is None or error is None else (value, error)

        return row_of(arms, name, key, read, lambda x: f"{x:.3f}" if 0.001 <= abs(x) < 1000 else f"{x:.3g}")

    settings = {key: measured[0][key] for key in keys if key in same and "=" not in key}  # not of one row
    return Section(name, list(map(row, shown)), settings)


def _errors(key: str) -> list[str]:
    """The possible names of the standard error of `key`; lm-eval's metrics are METRIC,FILTER."""
    parent, separator, last = key.rpartition(" · ")
    metric, comma, chosen = key.partition(",")
    return [f"{parent}{separator}se"] * (last in WITH_SE) + [f"{metric}_stderr{comma}{chosen}", f"{key}_se"]


def scalars(results: dict[str, Any], path: str = "") -> Iterator[tuple[str, float]]:
    """("a · b", number) of all numbers in nested dicts. Items of a list of dicts are named by their first value ("bits=8").

    Left out are the dict of standard errors, `se`, and what splits up another number: `layers`, per_... and by_...
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
