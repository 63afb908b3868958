"""Ranges of numbers: a field's type names an interval, and every command checks the intervals of its fields.

    steps: Annotated[int, "[1, inf)"] = 1000  # optimizer steps in all

A square bracket includes the end of the interval, a round bracket does not. The interval of a list or a dictionary
applies to each of its members. A dataclass needs only `typing.Annotated`, so `model/`, which imports no other folder,
states its ranges in the same way. `@command` (configs/__init__.py) calls `check_ranges` for every command, and --help
shows each range.
"""

import dataclasses
import math
import re
import typing
from collections.abc import Iterator
from typing import Any

INTERVAL = re.compile(r"([\[(])(\S+), (\S+)([\])])")


class Interval:
    """The numbers between two ends; `text` is like "[1, inf)". ValueError for a text that is not an interval."""

    def __init__(self, text: str) -> None:
        match = INTERVAL.fullmatch(text)
        if match is None:
            raise ValueError(f"'{text}' is not an interval: write it like '[1, inf)'")
        self.low, self.high = float(match[2]), float(match[3])
        self.has_low, self.has_high = match[1] == "[", match[4] == "]"

    def __contains__(self, number: float) -> bool:
        above = number >= self.low if self.has_low else number > self.low
        return above and (number <= self.high if self.has_high else number < self.high)

    def __str__(self) -> str:
        """In words: "1 or more", "more than 0 and less than 1"."""
        if self.has_low and self.has_high:
            return f"{self.low:.15g} to {self.high:.15g}"
        ends = []
        if self.low > -math.inf:
            ends.append(f"{self.low:.15g} or more" if self.has_low else f"more than {self.low:.15g}")
        if self.high < math.inf:
            ends.append(f"{self.high:.15g} or less" if self.has_high else f"less than {self.high:.15g}")
        return " and ".join(ends)


def interval_of(hint: Any) -> Interval | None:
    """The interval that a field's type names; None for a type without an interval."""
    texts = [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, str)]
    return Interval(texts[0]) if texts else None


def check_ranges(cfg: Any, prefix: str = "") -> None:
    """Raise a ValueError that names the key for a wrong value in the dataclass object `cfg` or in a dataclass inside it.

    Wrong are: a number outside of its field's interval, a number that is not finite in a field without an interval, an
    empty text if the default is not empty, and a key that the dataclass does not have.
    """
    hints = typing.get_type_hints(type(cfg), include_extras=True)
    if unknown := sorted(vars(cfg).keys() - hints.keys()):
        raise ValueError(f"there is no configuration key '{prefix}{unknown[0]}'; `--cfg job` lists the keys")
    for field in dataclasses.fields(cfg):
        key, value = f"{prefix}{field.name}", getattr(cfg, field.name)
        if dataclasses.is_dataclass(value):
            check_ranges(value, f"{key}.")
            continue
        if value == "" and field.default != "":
            raise ValueError(f"{key}= is empty: give it a value, or leave it out")
        interval = interval_of(hints[field.name])
        for number in _numbers(value):
            if interval is not None and number not in interval:
                raise ValueError(f"{key}={value} is out of range: use {interval}")
            if interval is None and isinstance(number, float) and not math.isfinite(number):
                raise ValueError(f"{key}={value} is not finite: use a number")


def _numbers(value: Any) -> Iterator[float]:
    """The numbers in a value: in a number, in (nested) lists, or in a dictionary's values."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for member in value.values() if isinstance(value, dict) else value:
            yield from _numbers(member)
