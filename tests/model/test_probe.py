"""Probes and visitors: a forward pass shows the maps and logits that it used, and a visitor changes them."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from model.attention.baseline import BaselineAttention
from model.attention.mask import Mask
from model.attention.probe import entropy, first_share, negative_share, probe, visit_logits
from model.cache import KVCache
from tests.variants import VARIANTS, randomized


@pytest.mark.parametrize("name", VARIANTS)
def test_a_probe_sees_the_map_that_was_used(name: str) -> None:
    """Row sums, causality, and the same rows whether read alone, together or per sequence."""
    model = randomized(name).float()
    tokens = torch.randint(0, 50, (2, 12))
    plain = model(tokens)
    with probe(model, torch.tensor([3, 11])) as maps:
        assert torch.equal(model(tokens), plain)
    with probe(model, torch.tensor([[3], [11]])) as each:
        model(tokens)
    assert len(maps.layers) == len(model.blocks)
    for layer, (both, single) in enumerate(zip(maps.layers, each.layers, strict=True)):
        assert both.shape[-2:] == (2, 12) and (both[..., 0, 4:] == 0).all()
        torch.testing.assert_close(both[0, :, 0], single[0, :, 0])
        torch.testing.assert_close(both[1, :, 1], single[1, :, 0])
        attention = model.blocks[layer].attention
        sums = both.sum(-1)
        if attention.row_sums == "one":
            torch.testing.assert_close(sums, torch.ones_like(sums), atol=1e-5, rtol=1e-5)
        elif hasattr(attention, "lambda_init"):
            torch.testing.assert_close(sums, (1 - attention.lam()).expand(sums.shape), atol=1e-5, rtol=1e-5)
        assert attention.row_sums == "any" or (sums > 0).all()
        assert attention.makes_map or attention.row_sums != "one" or (both >= 0).all()  # a softmax has no negative weight


def test_a_row_that_sees_nothing_has_shares_of_zero() -> None:
    model, rows = randomized("baseline"), torch.tensor([0, 3])
    keys = torch.tensor([[False, True, True, True]])  # the first query sees itself alone, which is padding
    with probe(model, rows) as maps:
        model(torch.zeros(1, 4, dtype=torch.long), keys=keys)
    for share in (entropy, negative_share, first_share):
        assert share(maps.layers[0])[..., 0].tolist() == [[0.0] * 8]


MAPS = {"baseline": 8, "gpt2": 8, "diff": 8, "diff_v2": 16, "gated": 8, "integral": 4, "introspective": 12}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_visitor_sees_the_logits_that_were_used_and_changes_them(name: str) -> None:
    """The softmax of what it sees is what a probe sees; what it returns is what the model uses; others look as before."""
    model, tokens = randomized(name), torch.randint(0, 50, (2, 12))
    plain, seen = model(tokens), []

    def see_all(layer: int, logits: torch.Tensor, see: torch.Tensor) -> None:
        assert logits.shape[-2] == 12 and see.expand_as(logits).any(-1).all()
        assert not see.expand_as(logits).unflatten(-1, (-1, 12)).movedim(-2, 0).triu(1).any()  # nor any set's future
        seen.append((layer, logits.shape))

    with visit_logits(model, see_all):
        torch.testing.assert_close(model(tokens), plain)
    assert sorted({layer for layer, _ in seen}) == list(range(model.cfg.n_layer))
    if name in MAPS:
        assert sum(shape[1:-2].numel() for layer, shape in seen if layer == 1) == MAPS[name]
    with visit_logits(model, lambda layer, logits, see: 2 * logits if layer == 1 else None):
        changed = model(tokens)
    assert (changed - plain).abs().max() > 1e-3
    torch.testing.assert_close(model(tokens), plain)


def test_probes_and_visitors_show_the_products_of_queries_and_keys() -> None:
    made, x, seen = BaselineAttention(d_model=64, n_head=8, position="none", backend="flex"), torch.randn(1, 10, 64), []
    with torch.no_grad():
        with visit_logits(made, lambda layer, logits, see: seen.append(logits)):
            made(x)
        with probe(made, torch.tensor([9])) as maps:
            made(x)
        q, k = (p(x).unflatten(-1, (8, -1)).transpose(1, 2) for p in (made.q, made.k))
    torch.testing.assert_close(seen, [q @ k.mT / 8**0.5])
    torch.testing.assert_close(maps.layers[0], seen[0].softmax(-1)[:, :, 9:])
    made.backend, bias = "sdpa", torch.full((10, 10), float("-inf")).index_fill(1, torch.tensor([2]), 0.0)
    with probe(made, torch.tensor([9])) as maps:
        made(x, mask=bias)  # hides all but one key
    assert maps.layers[0].nonzero()[:, -1].eq(2).all() and (maps.layers[0][..., 2] == 1).all()


def test_visitors_and_probes_do_not_nest() -> None:
    model = randomized("baseline")
    with (
        visit_logits(model, lambda layer, logits, see: None),
        pytest.raises(ValueError, match="already active"),
        probe(model, torch.tensor([0])),
    ):
        pass
    with pytest.raises(RuntimeError), visit_logits(model, lambda layer, logits, see: None):
        raise RuntimeError
    with probe(model, torch.tensor([0])):  # it ended, although its block failed
        model(torch.zeros(1, 4, dtype=torch.long))


class Twice(BaselineAttention):
    """Attention whose output is the mean of two calls: their maps are no heads side by side."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, mask: Mask) -> Tensor:
        return (super().attend(q, k, v, x, mask) + super().attend(k, q, v, x, mask)) / 2


class WithAnExtraKey(BaselineAttention):
    """Attention with one more key than tokens, which every query sees: the rows would be those of other queries."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, mask: Mask) -> Tensor:
        k, v = (F.pad(kv, (0, 0, 1, 0)) for kv in (k, v))
        return super().attend(q, k, v, x, Mask(causal=False))


class Unseen(BaselineAttention):
    """Attention that no operation of backends.py computes."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, mask: Mask) -> Tensor:
        return (q @ k.mT).sigmoid() @ v


@pytest.mark.parametrize(
    ("kind", "says"),
    (
        (Twice, "Twice attends several times in one layer: set joins_calls=True"),
        (WithAnExtraKey, "6 keys of 5 tokens cannot be probed"),
        (Unseen, "Unseen does not attend through .* monitor.every=0"),
    ),
)
def test_attention_that_a_probe_cannot_see_is_refused(kind: type[BaselineAttention], says: str) -> None:
    made, x = kind(d_model=64, n_head=4), torch.randn(1, 5, 64)
    assert made(x).shape == x.shape
    for row in (0, 2):
        with pytest.raises(ValueError, match=says), probe(made, torch.tensor([row])):
            made(x)


@pytest.mark.parametrize(("cached", "row"), [(0, 5), (2, 1), (2, 5)])
def test_rows_outside_of_the_pass_are_refused(cached: int, row: int) -> None:
    made, cache = BaselineAttention(d_model=64, n_head=4), KVCache(8)
    if cached:
        made(torch.randn(1, cached, 64), cache=cache.layer(0))
        cache.length = cached
    x = torch.randn(1, 5 - cached, 64)
    wrong = f"rows {row} to {row} of a probe are not in this pass: give rows from {cached} to 4"
    with pytest.raises(ValueError, match=wrong), probe(made, torch.tensor([row])):
        made(x, cache=cache.layer(0))
    with probe(made, torch.tensor([4])) as maps:
        made(x=x, cache=cache.layer(0))
    assert maps.layers[0].shape == (1, 4, 1, 5)
