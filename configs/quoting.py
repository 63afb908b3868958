"""Texts in Hydra's quotes, and what to type instead of an override that Hydra cannot read."""

import re
import shlex
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException


def quote(text: str, mark: str = "'") -> str:
    """`text` in Hydra's quotes, because commas, quotes and braces have a meaning outside of them."""
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # OmegaConf reads a name in ${} as another key
    # In Hydra's quotes \' is a quote, and only backslashes before a quote are doubled.
    text = re.sub(rf"(\\*)({mark}|\Z)", lambda end: 2 * end[1] + (f"\\{mark}" if end[2] else ""), text)
    return f"{mark}{text}{mark}"


def retyped(override: str, ambiguous: bool = False) -> str:
    """What is wrong with KEY=VALUE, which Hydra cannot parse or, if `ambiguous`, takes for a sweep; and what to type instead.

    The forms to type are quoted for a POSIX shell.
    """
    key, equals, value = override.partition("=")
    if not equals:
        return f"{override!r} is not KEY=VALUE: type KEY='VALUE', with quotes if the value has blanks"
    text, wrong = _text(key, [value]), f"{' '.join(key.split())}= has a character that Hydra reads as syntax"
    if ambiguous:
        listed = _text(key, value.split(","), "[]")
        return f"{key}= has a comma: type {text} for one text, {listed} for a list, or add -m for a sweep"
    if re.fullmatch(r"\[[^][{}'\"]*\]", value):
        text = _text(key, value[1:-1].split(","), "[]")
    elif value[:1] + value[-1:] in ("[]", "{}") or not value.isprintable():
        text = None
    readable = text and read_value(*shlex.split(text)) is not None
    return f"{wrong}: type {text}" if readable else f"{wrong}: put each text of it in double quotes"


def _text(key: str, texts: list[str], brackets: str = "") -> str:
    values = ",".join(quote(text.strip() if brackets else text, '"') for text in texts)
    return shlex.quote(f"{key}={brackets[:1]}{values}{brackets[1:]}")


def read_value(override: str) -> Any:
    """The value that Hydra reads in KEY=VALUE; None if Hydra cannot read it."""
    try:
        return OverridesParser.create().parse_override(override).value()
    except HydraException:
        return None
