"""Numbers outside of their field's range, empty texts and unknown keys are refused in one place, for every command."""

import typing
from dataclasses import dataclass, field, is_dataclass
from typing import Annotated, Any

import pytest

from configs.help import help_text
from configs.ranges import Interval, check_ranges, interval_of
from training.run import TrainConfig


@dataclass
class Inner:
    share: Annotated[float, "(0, 1)"] = 0.5
    plain: float = 1.0


@dataclass
class Outer:
    size: Annotated[int | None, "[1, inf)"] = None
    steps: Annotated[list[list[int]], "[0, 9]"] = field(default_factory=list)
    folder: str = "runs"
    mark: str = ""
    inner: Inner = field(default_factory=Inner)


@pytest.mark.parametrize(
    ("cfg", "says"),
    (
        (Outer(size=0), "size=0 is out of range: use 1 or more"),
        (Outer(steps=[[0], [9, 10]]), "steps=.* is out of range: use 0 to 9"),
        (Outer(folder=""), "folder= is empty"),
        (Outer(inner=Inner(share=1.0)), "inner.share=1.0 is out of range: use more than 0 and less than 1"),
        (Outer(inner=Inner(share=float("nan"))), "inner.share=nan"),
        (Outer(inner=Inner(plain=float("inf"))), "inner.plain=inf is not finite"),
    ),
)
def test_what_no_field_can_mean_is_refused(cfg: Outer, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_ranges(cfg)


def test_what_lies_in_range_passes() -> None:
    check_ranges(Outer())
    check_ranges(Outer(size=1, steps=[[0, 9]], mark=""))
    check_ranges(TrainConfig(data=TrainConfig().data))
    unknown = Outer()
    unknown.inner.other = 1
    with pytest.raises(ValueError, match="no configuration key 'inner.other'"):
        check_ranges(unknown)
    with pytest.raises(ValueError, match="'1 to 2' is not an interval"):
        Interval("1 to 2")


def numbers_without_range(schema: type, prefix: str = "") -> typing.Iterator[str]:
    for name, hint in typing.get_type_hints(schema, include_extras=True).items():
        if is_dataclass(hint):
            yield from numbers_without_range(hint, f"{prefix}{name}.")
        elif {int, float} & set(parts(hint)) and interval_of(hint) is None:
            yield f"{prefix}{name}"


def parts(hint: Any) -> list[Any]:
    """The type and, of a list or a union, the types inside it."""
    inside = [part for inner in typing.get_args(hint) for part in parts(inner)]
    return [hint, *inside]


def test_every_number_of_train_py_has_a_range_and_help_shows_it() -> None:
    import train  # noqa: F401  # registers its schema
    from configs import CONFIG_DIR

    free = [name for name in numbers_without_range(TrainConfig) if not name.startswith("model.")]
    assert not free, "write the type as Annotated[int, '[0, inf)']"
    text = help_text("train", TrainConfig, "", CONFIG_DIR)
    assert "optimizer steps in all (1 to 99999999)" in text
