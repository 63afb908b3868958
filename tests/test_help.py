"""`--help` of every command: each field stands there with its default and what it means."""

import ast
import dataclasses
import importlib
import itertools
import os
import subprocess
import sys
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest
from hydra.errors import HydraException

from configs import CONFIG_DIR
from configs.help import help_text, meanings, summary

ROOT = Path(__file__).parent.parent


def commands() -> Iterator[tuple[str, str, str]]:
    """Module, command and schema of every function under `@command(name, Schema)`."""
    for path in itertools.chain(*map(ROOT.glob, ("train.py", "data/*.py", "eval/**/*.py", "scripts/*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            for call in getattr(node, "decorator_list", ()):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "command":
                    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                    yield module, call.args[0].value, ast.unparse(call.args[1])


COMMANDS = sorted(set(commands()))


def schema_of(module: str, schema: str) -> tuple[ModuleType, type]:
    loaded = importlib.import_module(module)
    return loaded, getattr(loaded, schema)


def unexplained(schema: type, prefix: str = "") -> Iterator[str]:
    types, texts = typing.get_type_hints(schema), meanings(schema)
    for entry in dataclasses.fields(schema):
        if dataclasses.is_dataclass(types[entry.name]):
            if not summary(types[entry.name]):
                yield f"{prefix}{entry.name} (a docstring of {types[entry.name].__name__})"
            yield from unexplained(types[entry.name], f"{prefix}{entry.name}.")
        elif not texts[entry.name]:
            yield f"{prefix}{entry.name}"


def test_all_commands_are_found() -> None:
    names = {name for _, name, _ in COMMANDS}
    assert {"train", "prepare", "perplexity", "needle", "report", "ablate", "bench", "sample", "publish"} <= names


@pytest.mark.parametrize(("module", "name", "schema"), COMMANDS)
def test_every_field_has_a_meaning(module: str, name: str, schema: str) -> None:
    loaded, cls = schema_of(module, schema)
    assert not list(unexplained(cls)), "add a comment beside the field, or 'name: meaning.' to the docstring"
    text = help_text(name, cls, loaded.__doc__ or "", CONFIG_DIR)
    assert text.startswith((loaded.__doc__ or "").strip().splitlines()[0])
    assert summary(cls) in " ".join(text.split())
    assert all(f"  {entry.name}=" in text or f"\n{entry.name}: " in text for entry in dataclasses.fields(cls))


@dataclass
class Base:
    """What both have. size: of a batch."""

    size: int = 1
    kind: str = "a"  # a | b


@dataclass
class Example(Base):
    """An example.

    `kind`: the form. left, right: a side
    each. Not a field: this.
    """

    left: int = 0
    right: int = 0
    several: list[int] = field(
        default_factory=lambda: [1, 2]  # on several
    )  # lines
    text: str = "# not a comment"
    size: int = 2  # of one row


@dataclass
class Silent:
    size: int = 1


def test_meanings_come_from_comments_and_docstrings() -> None:
    assert meanings(Example) == {
        "size": "of one row",
        "kind": "a | b: the form",
        "left": "a side each. Not a field: this",
        "right": "a side each. Not a field: this",
        "several": "on several lines",
        "text": "",
    }
    assert summary(Example) == "An example." and summary(Base) == "What both have."
    assert meanings(Silent) == {"size": ""} and summary(Silent) == ""
    made = dataclasses.make_dataclass("Made", [("size", int, 3)])
    assert meanings(made) == {"size": ""} and summary(made) == ""


def test_overrides_change_the_defaults_shown_and_wrong_ones_are_refused() -> None:
    loaded, cls = schema_of("train", "TrainConfig")
    text = help_text("train", cls, "", CONFIG_DIR, ["model=diff", "steps=7", "model.window=5"])
    assert "\n  steps=7 " in text and "\n  model.layers=d " in text and "\n  model.window=5 " in text
    assert "model=baseline" in text and "introspective_sequence" in text  # the groups
    with pytest.raises(HydraException):
        help_text("train", cls, "", CONFIG_DIR, ["model=none_such"])


def test_a_group_that_must_be_chosen_does_not_keep_help_from_showing() -> None:
    loaded, cls = schema_of("scripts.ablate", "AblateConfig")
    assert "experiment=REQUIRED" in help_text("ablate", cls, "", CONFIG_DIR)
    assert "shakespeare_cpu" not in help_text("ablate", cls, "", CONFIG_DIR)  # that is an experiment of train.py


def test_the_command_line_shows_it_even_to_a_reader_that_leaves_early() -> None:
    command = f"{sys.executable} -m data.prepare --help data=shakespeare"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "data.source=shakespeare" in done.stdout and not done.stderr
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, shell=True, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert done.returncode == 0 and not done.stderr
