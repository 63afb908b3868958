"""Updates that are skipped: on the host and on the device alike, and only those."""

import math

import pytest
import torch

from model.decoder import Decoder
from tests.variants import config
from training.distributed import World
from training.optim import Diverged, Guard, OptimConfig, build_optimizers, state_tensors

ALONE = World(0, 1, torch.device("cpu"))
TOKENS = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(0))


def train(kind: str, bad: dict[int, float], ask_host: bool, guarded: bool = True) -> dict[str, torch.Tensor]:
    """Weights and state after 5 updates, whose gradients are multiplied by `bad` where that has their number."""
    model = Decoder(config("diff"))
    optimizers = build_optimizers(model, OptimConfig(name=kind))
    guard = Guard(optimizers, ALONE, nonfinite=10)
    guard.ask_host = ask_host
    for step in range(1, 6):
        loss = model(TOKENS, TOKENS.roll(-1, 1))
        loss.backward()
        if not guarded:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            continue
        if step in bad:
            for p in model.parameters():
                p.grad *= bad[step]
        guard.step_optimizers(step, loss, torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    assert [step for step, _ in guard.skipped_updates()] == sorted(bad)
    return {name: p.clone() for name, p in model.named_parameters()} | state_tensors(optimizers)


@pytest.mark.parametrize("kind", ("adamw", "muon"))
def test_a_skipped_update_leaves_no_trace(kind: str) -> None:
    plain = train(kind, {}, True, guarded=False)
    for ask_host in (True, False):
        good = train(kind, {}, ask_host)
        assert all(torch.equal(good[name], plain[name]) for name in good)  # a guard changes no bit
    for number in (float("nan"), float("inf")):
        skipped, host = (train(kind, {1: number, 3: number}, ask_host) for ask_host in (False, True))
        assert all(tensor.isfinite().all() for tensor in skipped.values())
        assert all(torch.equal(skipped[name], host[name]) for name in host)
        assert any(not torch.equal(skipped[name], good[name]) for name in good)


def guard_of() -> Guard:
    return Guard([torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])], ALONE, nonfinite=3)


def feed(guard: Guard, losses: list[float], norm: float = 1.0) -> list[int]:
    for step, loss in enumerate(losses, 1):
        guard.step_optimizers(step, torch.tensor(loss), torch.tensor(norm))
    return [step for step, _ in guard.skipped_updates()]


def test_a_row_of_bad_updates_ends_the_run_and_a_broken_row_does_not() -> None:
    nan, guard = math.nan, guard_of()
    guard.step_optimizers(3, torch.tensor(nan), torch.tensor(2.5))
    assert list(guard.skipped_updates()) == [(3, "loss nan, gradient norm 2.5")]
    assert feed(guard_of(), [nan, nan, 1.0, nan, math.inf]) == [1, 2, 4, 5]
    guard, seen = guard_of(), []
    for step, loss in enumerate([1.0, nan, nan, nan, 1.0], 1):
        guard.step_optimizers(step, torch.tensor(loss), torch.tensor(1.0))
    with pytest.raises(Diverged, match=r"the loss is nan at step 4 .*3 updates in a row"):
        seen.extend(step for step, _ in guard.skipped_updates())
    assert seen == [2, 3, 4]  # what ended the run is recorded, too
    for loss, norm in ((nan, 1.0), (2.5, math.inf)):
        guard = guard_of()
        feed(guard, [1.0, loss], norm)
        with pytest.raises(Diverged, match=rf"the loss is {loss} at step 2 \(gradient norm {norm}\), the last one"):
            guard.refuse_bad_end(2, 1.0)
    with pytest.raises(Diverged, match="the loss is nan at step 2"):
        guard_of().refuse_bad_end(2, nan)
    guard_of().refuse_bad_end(2, 1.0)
