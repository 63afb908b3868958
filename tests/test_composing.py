"""Texts in Hydra's quotes are read as they were, and printed where a terminal lacks a letter."""

import io
import sys
from dataclasses import dataclass

import pytest

import data.prepare  # noqa: F401  # registers its schema
from configs import command
from configs.composing import compose_job, quote


@pytest.mark.parametrize("text", ["plain", 'a"b', "a'b", "a\\", "${x}", "\\'", "\\${x}", "a, b=[c]"])
def test_quotes(text: str) -> None:
    assert compose_job("prepare", [f"path={quote(text)}"]).path == text


@dataclass
class Nothing:
    """A command without options."""


def test_an_ascii_terminal_gets_question_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "argv", ["ascii"])
    command("ascii", Nothing)(lambda cfg: print("1 ± 2"))()
    out.flush()
    assert out.buffer.getvalue() == b"1 ? 2\n"
