"""The text of `--help`: what a command does, its configuration groups, and its fields as they stand in the code."""

import inspect
import typing
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path

import yaml

from configs.files import say

FOOTER = """# MISSING: required. None: type null. Override any field as KEY=VALUE. -m KEY=A,B runs once per value.
# --cfg job --resolve prints the configuration that the chosen groups and overrides give."""


def print_help(name: str, schema: type, about: str) -> None:
    """Print the help of the command `name`. about: its module's docstring."""
    say("\n\n".join([about.strip(), *_groups(Path(__file__).parent, name), *_sources(schema), FOOTER]))


def _sources(schema: type, prefix: str = "") -> Iterator[str]:
    """The dataclass as its source has it, without its methods; its bases, and the dataclasses in it."""
    yield f"# The fields {prefix}KEY=VALUE, with their defaults:"
    for cls in filter(is_dataclass, reversed(schema.__mro__)):
        try:
            yield inspect.getsource(cls).split("\n    def ")[0].split("\n    @")[0].rstrip()
        except OSError:  # made by make_dataclass
            continue
    for name, kind in typing.get_type_hints(schema).items():
        if is_dataclass(kind):
            yield from _sources(kind, f"{prefix}{name}.")


def _groups(folder: Path, name: str) -> Iterator[str]:
    """One line per configuration group in the command's primary file: default, options."""
    file = folder / f"{name}.yaml"
    primary = yaml.safe_load(file.read_text()) if file.exists() else {"defaults": []}
    roots = [folder / "ablations", folder] if "hydra" in primary else [folder]  # as its hydra.searchpath says
    defaults = [item for entry in primary["defaults"] if isinstance(entry, dict) for item in entry.items()]
    for group, default in defaults:
        options = next(sorted(path.stem for path in (root / group).glob("*.yaml")) for root in roots if (root / group).is_dir())
        yield f"# GROUP {group}={'MISSING' if default == '???' else default or 'null'}: {', '.join(options)}"
