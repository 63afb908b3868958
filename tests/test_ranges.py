"""Numbers outside of their field's range, empty texts and unknown keys are refused in one place, for every command."""

import math
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any

import pytest
from omegaconf import MISSING

from model.ranges import check_ranges
from tests.test_help import COMMANDS, schema_of
from training.run import TrainConfig


@dataclass
class Inner:
    share: Annotated[float, "(0, 1)"] = 0.5
    plain: float = 1.0


@dataclass
class Outer:
    size: Annotated[int | None, "[1, inf)"] = None
    steps: Annotated[list[list[int]], "[0, 9]"] = field(default_factory=list)
    seeds: Annotated[dict[str, int], "[1, inf)"] = field(default_factory=dict)
    folder: str = "runs"
    mark: str = ""
    kind: Annotated[str, ("one", "two")] = "one"
    inner: Inner = field(default_factory=Inner)


def test_what_no_field_can_mean_is_refused_and_what_lies_in_range_passes() -> None:
    for cfg, says in (
        (Outer(size=0), r"size=0 is out of range: use a number in \[1, inf\)"),
        (Outer(size="1"), "size='1' is out of range"),
        (Outer(steps=[[0], [9, 10]]), r"steps=.* is out of range: use a number in \[0, 9\]"),
        (Outer(seeds={"a": 1, "b": 0}), "seeds=.* is out of range"),
        (Outer(folder=""), "folder= is empty"),
        (Outer(kind="three"), "kind=three is unknown: use one of one, two"),
        (Outer(inner=Inner(share=float("nan"))), r"inner.share=nan is out of range: use a number in \(0, 1\)"),
        (Outer(inner=Inner(plain=float("inf"))), r"inner.plain=inf is out of range: use a number in \(-inf, inf\)"),
    ):
        with pytest.raises(ValueError, match=f"^{says}"):
            check_ranges(cfg)
    for cfg in (Outer(), Outer(size=1, steps=[[0, 9]], seeds={"a": 1}, mark=""), TrainConfig()):
        check_ranges(cfg)
    unknown = Outer()
    unknown.inner.other = 1
    with pytest.raises(ValueError, match="no configuration key 'inner.other'"):
        check_ranges(unknown)
    free = [key for _, _, key, hint in numbers(TrainConfig()) if not hasattr(hint, "__metadata__")]
    assert not [key for key in free if not key.startswith("model.")], "write the type as Annotated[int, '[0, inf)']"


def numbers(config: Any, prefix: str = "") -> Iterator[tuple[Any, str, str, Any]]:
    """The object, name, key and type of every number in a dataclass object."""
    hints = typing.get_type_hints(type(config), include_extras=True)
    for name in (entry.name for entry in fields(config)):
        if is_dataclass(hints[name]):
            if getattr(config, name) == MISSING:
                setattr(config, name, hints[name]())
            yield from numbers(getattr(config, name), f"{prefix}{name}.")
        elif {int, float} & set(parts(hints[name])):
            yield config, name, f"{prefix}{name}", hints[name]


def parts(hint: Any) -> list[Any]:
    """The type and, of a list or a union, the types inside it."""
    return [hint, *(part for inner in typing.get_args(hint) for part in parts(inner))]


@pytest.mark.parametrize(("module", "name", "schema"), COMMANDS)
def test_every_number_of_every_command_is_refused_outside_of_its_range(module: str, name: str, schema: str) -> None:
    config = schema_of(module, schema)[1]()
    every = list(numbers(config))
    for owner, field_name, _, _ in every:
        if getattr(owner, field_name) == MISSING:
            setattr(owner, field_name, 1)
    for owner, field_name, key, hint in every:
        text = getattr(hint, "__metadata__", ("(-inf, inf)",))[0]
        assert re.fullmatch(r"[\[(]\S+, \S+[\])]", text), f"{key}: '{text}' is not an interval"
        low, high = map(float, text[1:-1].split(", "))
        outside = [math.nan, low - 1, high + 1] + [low] * (text[0] == "(") + [high] * (text[-1] == ")")
        assert low < high
        right, kinds = getattr(owner, field_name), [typing.get_origin(kind) for kind in parts(hint)]
        for number in outside:
            setattr(owner, field_name, [number] if list in kinds else {"a": number} if dict in kinds else number)
            with pytest.raises(ValueError, match=f"^{re.escape(key)}=.* is out of range"):
                check_ranges(config)
        setattr(owner, field_name, right)
