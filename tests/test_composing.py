"""Configurations are composed as Hydra composes them, and texts printed where a terminal lacks a letter."""

import io
import re
import sys
from dataclasses import dataclass

import pytest
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

import train  # noqa: F401  # registers its schema
from configs import command
from configs.composing import compose_job, composed_by_hydra


def test_groups_composed_once_give_hydras_configuration() -> None:
    overrides = "steps=7 model=diff model.n_layer=3 size=nano optim.lr=3e-4 checkpoint.at=[3,5] data.dir=${runs}/x"
    for each in (overrides, f"{overrides} +model.window=64 steps=8", "data=mqar steps=9"):
        assert compose_job("train", each.split()) == composed_by_hydra("train", each.split())


@pytest.mark.parametrize("override", ("stepz=1", "seed=1,2", "model=none", "steps=x", "~model.n_layer=9"))
def test_what_hydra_refuses_is_refused_in_its_words(override: str) -> None:
    with pytest.raises((HydraException, OmegaConfBaseException)) as ours:
        compose_job("train", [override])
    with pytest.raises(type(ours.value), match=re.escape(str(ours.value))):
        composed_by_hydra("train", [override])


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
