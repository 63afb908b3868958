"""Ranges of numbers: a field's type names an interval, as in Annotated[int, "[1, inf)"]; a round bracket excludes the end."""

from dataclasses import is_dataclass
from functools import cache
from typing import Any, get_type_hints


def check_ranges(options: Any, key: str) -> None:
    """ValueError for a number of the dataclass object `options` (named `key`), or inside it, that is not in its range."""
    for name, text in _ranges(type(options)).items():
        value = getattr(options, name)
        if is_dataclass(value):
            check_ranges(value, f"{key}.{name}")
        elif text and value is not None and not (isinstance(value, int | float) and _holds(text, value)):
            raise ValueError(f"{key}.{name}={value!r} is out of range: use a number in {text}")


@cache
def _ranges(kind: type) -> dict[str, str | None]:
    """Field name -> the interval that the field's type names, or None."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: getattr(hint, "__metadata__", (None,))[0] for name, hint in hints.items()}


def _holds(text: str, value: float) -> bool:
    low, high = map(float, text[1:-1].split(", "))
    return (low < value or text[0] == "[" and low == value) and (value < high or text[-1] == "]" and high == value)
