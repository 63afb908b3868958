"""The decoder's own options: logits at asked positions only."""

import pytest
import torch

from model.cache import KVCache
from tests.variants import VARIANTS, randomized


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_are_the_logits_at_those_positions(name: str) -> None:
    model = randomized(name).eval()
    tokens = torch.randint(50, (2, 13), generator=torch.Generator().manual_seed(1))
    logits = model(tokens)
    same, own = torch.tensor([0, 12, 5]), torch.tensor([[3, 3, 11], [12, 0, 7]])
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, rows=same), logits[:, same])
        torch.testing.assert_close(model(tokens, rows=own), torch.stack([logits[0, own[0]], logits[1, own[1]]]))


def test_rows_count_the_cached_tokens_and_may_be_none_at_all() -> None:
    model = randomized("hybrid").eval()
    tokens = torch.randint(50, (2, 13), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits, cache = model(tokens), KVCache(13)
        assert model(tokens[:, :8], rows=torch.zeros(0, dtype=torch.long), cache=cache).shape == (2, 0, 50)
        late = model(tokens[:, 8:], rows=torch.tensor([8, 12]), cache=cache)
    # The second part attends through another kernel than the whole: float64 rounding, 1e-10 is 1e5 times that.
    torch.testing.assert_close(late, logits[:, [8, 12]], rtol=0, atol=1e-10)


def test_the_output_head_sees_only_the_rows() -> None:
    model = randomized("baseline").eval()
    seen = []
    model.head.register_forward_hook(lambda module, given, out: seen.append(tuple(out.shape)))
    model(torch.zeros(3, 20, dtype=torch.long), rows=torch.tensor([[1], [5], [19]]))
    assert seen == [(3, 1, 50)]


def test_targets_at_rows_are_scored_alone() -> None:
    model = randomized("baseline").eval()
    tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(2))
    targets, rows = torch.tensor([[4, 5], [6, 7]]), torch.tensor([2, 8])
    with torch.no_grad():
        log_probabilities = model(tokens).log_softmax(-1)
        expected = -torch.stack([log_probabilities[b, rows, targets[b]] for b in (0, 1)]).mean()
        # The loss is computed in float32.
        assert model(tokens, targets, rows=rows).item() == pytest.approx(expected.item(), rel=1e-6)
