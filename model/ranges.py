"""What a field may be: Annotated[int, "[1, inf)"] names an interval (a round bracket excludes the end), or a tuple of choices.

configs/__init__.py runs this file alone, so it imports only the standard library.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_type_hints


def check_ranges(options: Any, key: str = "") -> None:
    """ValueError for a number outside of its field's interval (also in a list or dictionary), a float that is not finite, an
    unknown choice (but a factory), an empty text if the default is not empty, and an attribute that is not a field.
    """
    rules = _rules(type(options))
    if unknown := sorted(vars(options).keys() - rules.keys()):
        raise ValueError(f"there is no configuration key '{f'{key}.{unknown[0]}'.lstrip('.')}': leave it out")
    for field in fields(options):
        name, value, rule = f"{key}.{field.name}".lstrip("."), getattr(options, field.name), rules[field.name]
        if is_dataclass(value):
            check_ranges(value, name)
        elif value == "" and field.default != "":
            raise ValueError(f"{name}= is empty: give it a value, or leave it out")
        elif isinstance(rule, tuple):
            if value not in rule and not callable(value):
                raise ValueError(f"{name}={value} is unknown: use one of {', '.join(rule)}")
            continue
        for member in _members(value):
            interval = rule or (isinstance(member, float) and "(-inf, inf)")
            if interval and not (isinstance(member, int | float) and _holds(interval, member)):
                raise ValueError(f"{name}={value!r} is out of range: use a number in {interval}")


@cache
def _rules(kind: type) -> dict[str, str | tuple[str, ...] | None]:
    """Field name -> the interval or the choices that the field's type names, or None."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: getattr(hint, "__metadata__", (None,))[0] for name, hint in hints.items()}


def _members(value: Any) -> Iterator[Any]:
    """What stands in (nested) lists and dictionaries, or the value itself; nothing for None."""
    if isinstance(value, list | tuple | dict):
        for member in value.values() if isinstance(value, dict) else value:
            yield from _members(member)
    elif value is not None:
        yield value


def _holds(interval: str, value: float) -> bool:
    low, high = map(float, interval[1:-1].split(", "))
    return low < value < high or (interval[0] == "[" and value == low) or (interval[-1] == "]" and value == high)
