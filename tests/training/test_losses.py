"""Losses of 25 training steps on the fast path, against a plain one: a guard for whoever changes either.

Fast: the C++ attention kernel, the output head's loss in pieces with its gradients, Muon over stacks of matrices. Plain:
the N x N formulas, whole logits, torch's Muon. Both compute in float64, but Muon's iterations, which are in bfloat16 by
definition.
"""

import pytest
import torch
import torch.nn.functional as F

from model import loss as head_loss
from tests.variants import randomized
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


@pytest.mark.parametrize(("name", "optim"), (*((name, "adamw") for name in VARIANTS), ("diff", "muon")))
def test_the_fast_path_has_the_losses_of_the_plain_one(name: str, optim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_loss, "LOGITS", 50 * 20)  # several pieces of 20 tokens
    fast, plain = (losses(name, optim, which, monkeypatch) for which in (False, True))
    assert plain[-1] < plain[0] - 0.1  # it trains
    assert (fast - plain).abs().max() < TOLERANCE[optim]
