"""`--help` of every command: each field stands there with its default and what it means."""

import ast
import importlib
import inspect
import itertools
import os
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType

import pytest

from configs.help import print_help
from tests.conftest import Typed

ROOT = Path(__file__).parent.parent


def commands() -> Iterator[tuple[str, str, str]]:
    """Module, command and schema of every function under `@command(name, Schema)`."""
    for path in itertools.chain(*map(ROOT.glob, ("train.py", "data/*.py", "eval/**/*.py", "ablation/*.py", "scripts/*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            for call in getattr(node, "decorator_list", ()):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "command":
                    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                    yield module, call.args[0].value, ast.unparse(call.args[1])


COMMANDS = sorted(set(commands()))


def schema_of(module: str, schema: str) -> tuple[ModuleType, type]:
    loaded = importlib.import_module(module)
    return loaded, getattr(loaded, schema)


def dataclasses_in(schema: type) -> Iterator[type]:
    """`schema`, its bases that are dataclasses, and the dataclasses of their fields."""
    yield from filter(is_dataclass, schema.__mro__)
    for kind in filter(is_dataclass, typing.get_type_hints(schema).values()):
        yield from dataclasses_in(kind)


def unexplained(cls: type) -> Iterator[str]:
    """Fields in the source of `cls` without a comment beside them and without a word in its docstring."""
    source = inspect.getsource(cls)
    for node in ast.parse(source).body[0].body:
        if isinstance(node, ast.AnnAssign) and not is_dataclass(typing.get_type_hints(cls)[node.target.id]):
            statement = "\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno])
            if "# " not in statement and not re.search(rf"\b{node.target.id}\b", cls.__doc__ or ""):
                yield f"{cls.__name__}.{node.target.id}"


@pytest.mark.parametrize(("module", "name", "schema"), COMMANDS)
def test_every_field_stands_there_with_a_meaning(module: str, name: str, schema: str, capsys: pytest.CaptureFixture) -> None:
    loaded, cls = schema_of(module, schema)
    print_help(name, cls, loaded.__doc__)
    text = capsys.readouterr().out
    assert text.startswith(loaded.__doc__.strip())
    for part in dataclasses_in(cls):
        shown = [entry.name for entry in fields(part) if not re.search(rf"^    {entry.name}: ", text, re.M)]
        if part.__name__ == "VariantOptions":  # has no source; its fields are groups
            assert all(f"# The fields model.{name}.KEY=VALUE" in text for name in shown)
            continue
        assert not {*shown} & {*inspect.get_annotations(part)}, "a field is not shown"
        assert not list(unexplained(part)), "add a comment beside the field, or say in the docstring what it means"


def test_the_groups_stand_there_with_their_options(capsys: pytest.CaptureFixture) -> None:
    names = {name for _, name, _ in COMMANDS}
    assert {"train", "prepare", "perplexity", "needle", "report", "ablate", "bench", "sample", "publish"} <= names
    print_help("train", schema_of("train", "TrainConfig")[1], "")
    text = capsys.readouterr().out
    assert re.search(r"# GROUP model=baseline: baseline, .*\bdiff, ", text) and "# GROUP experiment=null: quickstart, " in text
    assert "    def " not in text  # methods
    print_help("ablate", schema_of("scripts.ablate", "AblateConfig")[1], "")
    text = capsys.readouterr().out
    assert "# GROUP experiment=MISSING: ablation_v1, " in text and ", base, " not in text  # a folder
    assert "shakespeare_cpu" not in text  # an experiment of train.py


def test_the_command_line_shows_it_and_a_reader_may_leave_early(typed: Typed) -> None:
    done = typed("data/prepare.py", "--help", "data=shakespeare")
    assert done.returncode == 0 and "# GROUP data=stdlib: " in done.stdout and not done.stderr
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "data.prepare", "--help"]
    done = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert done.returncode == 0 and not done.stderr
