"""What configs/quoting.py says to type instead of an override that Hydra does not take."""

import re
import subprocess

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException

from configs import explain
from configs.composing import compose_job
from configs.quoting import quote
from data.prepare import PrepareConfig

NAMES = ["a=b.txt", "it's.txt", "a b (1).txt", "x{1}.txt", "[1].txt", "pre#1.txt", "é.txt", 'say "yes"!=.txt', "a=\\.txt"]


def said(*overrides: str) -> str:
    with pytest.raises(Exception) as caught:  # noqa: B017  # as the command line gets it
        compose_job("prepare", list(overrides))
    line = explain(caught.value, PrepareConfig)
    assert "\n" not in line and "hydra.cc" not in line and "\\'" not in line
    return line


def typed_in_a_shell(form: str) -> str:
    """The argument that a command gets if `form` is pasted into a shell."""
    return subprocess.run(["sh", "-c", f"printf %s {form}"], capture_output=True, text=True, check=True).stdout


def path_of(form: str) -> str:
    return compose_job("prepare", [typed_in_a_shell(form)]).data.path


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_hydra_cannot_parse_is_said_as_it_must_be_typed(name: str) -> None:
    line = said(f"path=my texts/{name}")
    start = "path= has a character that Hydra reads as syntax: type "
    assert line.startswith(start)
    assert path_of(line.removeprefix(start)) == f"my texts/{name}"


@pytest.mark.parametrize("name", ["a,b.txt", "a, b.txt", "it,a.txt"])
def test_a_comma_may_be_a_text_a_list_or_a_sweep(name: str) -> None:
    text, listed = re.fullmatch(
        "path= has a comma: type (.*) for one text, (.*) for a list, or add -m for a sweep", said(f"path={name}")
    ).groups()
    assert path_of(text) == name
    parsed = OverridesParser.create().parse_override(typed_in_a_shell(listed)).value()
    assert [str(part) for part in parsed] == [part.strip() for part in name.split(",")]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("runs=[a=b, c]", """type 'runs=["a=b","c"]'"""),
        ("+arms={lr:[model=b]}", "put each text of it in double quotes"),
        ("texts/a.txt", "'texts/a.txt' is not KEY=VALUE: type KEY='VALUE', with quotes if the value has blanks"),
        ("a\nb", "'a\\nb' is not KEY=VALUE: type KEY='VALUE', with quotes if the value has blanks"),
        ("path=a\nb=c", "put each text of it in double quotes"),
    ],
)
def test_lists_and_groups(override: str, says: str) -> None:
    with pytest.raises(OverrideParseException) as caught:
        OverridesParser.create().parse_overrides([override])
    assert explain(caught.value, PrepareConfig).endswith(says)


@pytest.mark.parametrize("text", ["plain", 'a"b', "a'b", "a\\", "${x}", '\\"', "\\${x}"])
@pytest.mark.parametrize("mark", ["'", '"'])
def test_quotes(text: str, mark: str) -> None:
    override = f"path={quote(text, mark)}"
    assert compose_job("prepare", [override]).path == text
