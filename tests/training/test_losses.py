"""Losses of 25 training steps on the fast path, against a plain one: a guard for whoever changes either.

Fast: the C++ attention kernel, the output head's loss in pieces with its gradients, Muon over stacks of matrices. Plain:
the N x N formulas, whole logits, torch's Muon. Both compute in float64, but Muon's iterations, which are in bfloat16 by
definition.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from model import loss as head_loss
from model.attention.kernels import cpu
from tests.variants import NATIVE, randomized
from training import muon
from training.optim import OptimConfig, build_optimizers

STEPS, TOLERANCE = 25, {"adamw": 1e-9, "muon": 1e-2}
VARIANTS = ("baseline", "diff", "introspective", "introspective_sequence")


def losses(name: str, optim: str, plain: bool, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The losses (STEPS,) of a tiny run on 4 batches of random tokens, of which some are not scored."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50, (4, 2, 81), generator=generator)
    targets = tokens[:, :, 1:].clone()
    targets[:, :, ::9] = head_loss.IGNORED
    model = randomized(name, backend="math" if plain else "auto", context=80).train()
    with monkeypatch.context() as patch:
        if plain:
            patch.setattr("training.optim.Muon", lambda groups, world, **options: torch.optim.Muon(groups, **options))
        optimizers = build_optimizers(model, OptimConfig(name=optim, lr=3e-3, muon_lr=0.005))
    values = []
    for step in range(STEPS):
        inputs, wanted = tokens[step % 4, :, :-1], targets[step % 4]
        loss = F.cross_entropy(model(inputs).flatten(0, 1), wanted.flatten()) if plain else model(inputs, wanted)
        loss.backward()
        values.append(loss.detach())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(values)


def apart(name: str, optim: str, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(head_loss, "LOGITS", 50 * 20)  # several pieces of 20 tokens
    fast, plain = (losses(name, optim, which, monkeypatch) for which in (False, True))
    assert plain[-1] < plain[0] - 0.1  # it trains
    return (fast - plain).abs().max().item()


@pytest.mark.parametrize(("name", "optim"), (*((name, "adamw") for name in VARIANTS), ("diff", "muon")))
def test_the_fast_path_has_the_losses_of_the_plain_one(name: str, optim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert apart(name, optim, monkeypatch) < TOLERANCE[optim]


def lambda_stands_still(right: Callable) -> Callable:
    return lambda *given: [x * (i < 3) for i, x in enumerate(right(*given))]


def one_iteration_less(right: Callable) -> Callable:
    return lambda x, coefficients, steps, eps: right(x, coefficients, steps - 1, eps)


@pytest.mark.parametrize(
    ("where", "what", "error", "name", "optim"),
    (
        *[(cpu, "BACKWARD", lambda_stands_still, "diff", "adamw") for _ in NATIVE],
        (muon, "orthogonalized", one_iteration_less, "baseline", "muon"),
    ),
)
def test_a_planted_error_is_seen(
    where: object, what: str, error: Callable, name: str, optim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, what, error(getattr(where, what)))
    assert apart(name, optim, monkeypatch) > TOLERANCE[optim]
