"""The text of `--help`: what a command does, its configuration groups, and every field with its default and its meaning.

The meaning of a field is written once, beside the field: in the comment at the end of its line, or in the docstring of
its dataclass as "name: meaning." ("one, two: meaning." is the meaning of two fields). --help shows both if both exist.
"""

import dataclasses
import inspect
import io
import itertools
import re
import textwrap
import tokenize
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import MISSING, OmegaConf

from configs.ranges import interval_of

WIDTH, COLUMN = 120, 40  # width of a line, and column where the meanings begin
FOOTER = "Override any field as key=value. --cfg job --resolve prints the configuration; -m key=a,b runs once per value."


def help_text(name: str, schema: type, about: str, config_dir: Path, overrides: Sequence[str] = ()) -> str:
    """The help of the command `name`. about: its module's docstring. overrides: change the shown defaults.

    A command with a required group (scripts/ablate.py needs experiment=) shows the defaults of its schema until the
    group is chosen. Raises HydraException for a wrong override.
    """
    try:
        with initialize_config_dir(str(config_dir), version_base=None):
            cfg = compose(name, overrides=list(overrides))
    except HydraException:
        if overrides:
            raise
        cfg = OmegaConf.structured(schema)
    defaults = OmegaConf.to_container(cfg, throw_on_missing=False)
    groups = "".join(f"  {line}\n" for line in _groups(config_dir, name))
    parts = [about.strip(), f"Configuration groups (GROUP=OPTION):\n\n{groups}".rstrip()] if groups else [about.strip()]
    parts += filter(None, ["\n".join(textwrap.wrap(summary(schema), WIDTH, break_on_hyphens=False))])
    fields = "\n".join(_field_lines(schema, defaults))
    return "\n\n".join([*parts, f"Fields, with their defaults:\n\n{fields}", FOOTER])


def meanings(schema: type) -> dict[str, str]:
    """Field name -> meaning, for the fields of the dataclass `schema`; '' without a comment and a docstring entry."""
    names = [field.name for field in dataclasses.fields(schema)]
    comments, texts = dict.fromkeys(names, ""), dict.fromkeys(names, "")
    for owner in reversed(schema.__mro__):
        own = dict.fromkeys(inspect.get_annotations(owner), "")
        comments |= own | _comments(owner)
        texts |= own | _keyed(owner, names)
    return {name: ": ".join(filter(None, (comments[name], texts[name]))) for name in names}


def summary(schema: type) -> str:
    """The docstring of `schema` without the meanings of single fields."""
    text = _docstring(schema)
    keys = list(_keys(text, {field.name for field in dataclasses.fields(schema)}))
    return " ".join(text[: keys[0].start()].split()) if keys else " ".join(text.split())


def _groups(config_dir: Path, name: str) -> Iterator[str]:
    """One line per configuration group in the command's primary file: default, options."""
    primary = config_dir / f"{name}.yaml"
    if not primary.is_file():
        return
    config = yaml.safe_load(primary.read_text())
    added = [config_dir.joinpath(*path.split(".")[1:]) for path in config.get("hydra", {}).get("searchpath", ())]
    for entry in config["defaults"]:
        for group, default in entry.items() if isinstance(entry, dict) else ():
            folder = next(root / group for root in (*added, config_dir) if (root / group).is_dir())
            options = ", ".join(sorted(file.stem for file in folder.glob("*.yaml")))
            yield f"{group}={'REQUIRED' if default == MISSING else default or 'null'}".ljust(COLUMN - 2) + options


def _field_lines(schema: type, defaults: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The fields of `schema` as lines; nested dataclasses follow the plain fields, each under its own heading."""
    types, texts, nested = typing.get_type_hints(schema, include_extras=True), meanings(schema), []
    for field in dataclasses.fields(schema):
        value = defaults.get(field.name, MISSING)
        if dataclasses.is_dataclass(types[field.name]):
            nested.append((field.name, types[field.name], value))
            continue
        left, interval = f"  {prefix}{field.name}={_shown(value)}", interval_of(types[field.name])
        meaning = texts[field.name] + (f" ({interval})" if interval else "")
        lines = textwrap.wrap(re.sub(r"\bNone\b", "null", meaning), WIDTH - COLUMN) or [""]
        if len(left) >= COLUMN:
            yield left
        else:
            yield (left.ljust(COLUMN) + lines.pop(0)).rstrip()
        yield from (" " * COLUMN + line for line in lines if line)
    for name, of, value in nested:
        yield ""
        yield from textwrap.wrap(f"{prefix}{name}: {summary(of)}", WIDTH)
        yield from _field_lines(of, value if isinstance(value, dict) else {}, f"{prefix}{name}.")


def _shown(value: Any) -> str:
    """A value in the syntax of the command line."""
    if value == MISSING:
        return "REQUIRED"
    if value is None or isinstance(value, bool):
        return str(value).replace("None", "null").lower()
    if isinstance(value, (list, dict)):
        return yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False).strip()
    return str(value)


def _source(schema: type) -> str:
    """The source of a class; '' for a class without source (object, classes made by make_dataclass)."""
    try:
        return textwrap.dedent(inspect.getsource(schema))
    except (OSError, TypeError):
        return ""


def _comments(schema: type) -> dict[str, str]:
    """Field name -> the comment beside the field: at the end of its line, or inside an assignment over several lines."""
    found: dict[str, str] = {}
    names, statement = set(inspect.get_annotations(schema)), ""
    for token in tokenize.generate_tokens(io.StringIO(_source(schema)).readline):
        if token.type == tokenize.NAME and not statement:
            statement = token.string
        elif token.type == tokenize.COMMENT and statement in names:
            found[statement] = f"{found.get(statement, '')} {token.string.lstrip('# ')}".strip()
        elif token.type == tokenize.NEWLINE:
            statement = ""
    return found


def _docstring(schema: type) -> str:
    """The docstring of a class; '' for the signature that a dataclass without a docstring has as its docstring."""
    text = schema.__doc__ or ""
    return "" if text.startswith(f"{schema.__name__}(") else inspect.cleandoc(text)


def _keyed(schema: type, names: typing.Iterable[str]) -> dict[str, str]:
    """Field name -> the text after "name:" in the docstring of `schema`."""
    if "__doc__" not in vars(schema):
        return {}
    text = _docstring(schema)
    keys, found = list(_keys(text, names)), {}
    for key, following in itertools.zip_longest(keys, keys[1:]):
        meaning = " ".join(text[key.end() : following.start() if following else None].split()).rstrip(".;")
        found |= dict.fromkeys(key.group(1).replace("`", "").split(", "), meaning)
    return found


def _keys(text: str, names: typing.Iterable[str]) -> Iterator[re.Match[str]]:
    """Matches where a sentence of `text` begins with one or several of `names` and a colon."""
    name = f"`?(?:{'|'.join(map(re.escape, names)) or '(?!)'})`?"
    yield from re.finditer(rf"(?:^|(?<=[.;] )|(?<=[.;]\n)|(?<=\.\) )|(?<=\n\n))({name}(?:, {name})*):\s", text)
