"""Signals to a training run: when a run may end without a checkpoint, and what a run leaves behind."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import train
from configs.files import read_json_lines
from tests.conftest import train_arguments
from tests.training import processes
from training.checkpoint import checkpoints
from training.distributed import World
from training.optim import Diverged
from training.signals import ENDING, HANGUP, REQUEUING, Signals

CPU = torch.device("cpu")
NUMBERS = (*ENDING, *REQUEUING, *HANGUP)


class Two(World):
    """One of two processes; the other one has no signals."""

    def largest(self, number: float) -> float:
        return float(number)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    clock = SimpleNamespace(now=0.0, exits=[])
    monkeypatch.setattr("training.signals.time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(os, "_exit", clock.exits.append)
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield clock
    for number, handler in before.items():
        signal.signal(number, handler)


def test_processes_agree_only_at_every_nth_step_and_keep_a_request_that_comes_meanwhile(clock: SimpleNamespace) -> None:
    """The reduction waits for the slowest process."""

    class Slow(Two):
        calls = 0

        def largest(self, number: float) -> float:
            self.calls += 1
            if self.calls == 2:  # ending, saving
                signals.save_requested = True  # as SIGHUP's handler; nohup ignores the signal itself
            return float(number)

    before = {number: signal.getsignal(number) for number in NUMBERS}
    with Signals(Slow(0, 2, CPU)) as signals:
        assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
        assert [signals.agreed(step, 1) for step in range(3)] == [(0, False), (0, True), (0, False)]
    assert before == {number: signal.getsignal(number) for number in before}  # a run gives the handlers back
    with Signals(Two(0, 2, CPU)) as signals:
        agreed = []
        for step in range(30):
            signals.save_requested = True
            agreed += [step] if signals.agreed(step, 10)[1] else []
        assert agreed == [0, 10, 20]


@pytest.mark.parametrize("sweep", (True, False))
def test_a_signal_before_a_run_diverges_ends_the_sweep(
    sweep: bool, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """A search goes on with its next trial after a run that diverged."""
    monkeypatch.setattr("training.signals.in_sweep", lambda: sweep)
    with pytest.raises(SystemExit if sweep else Diverged) as caught, Signals(World(0, 1, CPU)):
        os.kill(os.getpid(), signal.SIGTERM)
        raise Diverged("the loss is nan at step 3")
    if sweep:
        assert caught.value.code == 128 + signal.SIGTERM
        assert "error: the loss is nan at step 3" in capfd.readouterr().out


def test_a_second_request_ends_the_process_and_an_echo_does_not(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for second, seconds, under_torchrun, ends in (
        (signal.SIGTERM, 0.1, False, True),
        (signal.SIGTERM, 0.1, True, False),  # forwarded
        (signal.SIGINT, 0.1, False, False),  # a terminal's SIGINT comes back as scripts/ablate.py's SIGTERM
        (signal.SIGINT, 1.1, True, True),
    ):
        clock.exits.clear()
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        if under_torchrun:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
        with Signals(World(0, 1, CPU)) as signals:
            os.kill(os.getpid(), signal.SIGTERM)
            clock.now += seconds
            os.kill(os.getpid(), second)
            assert clock.exits == ([128 + second] if ends else [])
            assert signals.agreed(3, 10) == (signal.SIGTERM, True)


def test_a_signal_during_validation_ends_the_run_after_the_next_step(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validate, signals = train.validation_loss, [signal.SIGTERM]

    def signalled(*arguments: Any) -> float:
        if signals:
            os.kill(os.getpid(), signals.pop())
        return validate(*arguments)

    monkeypatch.setattr(train, "validation_loss", signalled)
    overrides = train_arguments(shards, tmp_path / "run", "steps=6", "model.n_layer=1", "eval_every=2")[1:]
    with pytest.raises(SystemExit):
        processes.train(World(0, 1, CPU), *overrides)
    lines = list(read_json_lines(tmp_path / "run" / "metrics.jsonl"))
    assert [line["step"] for line in lines if "val_loss" in line] == [2]
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step_00000003"]
