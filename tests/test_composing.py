"""Texts in Hydra's quotes are read as they were."""

import pytest

import data.prepare  # noqa: F401  # registers its schema
from configs.composing import compose_job, quote


@pytest.mark.parametrize("text", ["plain", 'a"b', "a'b", "a\\", "${x}", "\\'", "\\${x}", "a, b=[c]"])
def test_quotes(text: str) -> None:
    assert compose_job("prepare", [f"path={quote(text)}"]).path == text
