"""Decoding: the stream and its settings, what is drawn, where rows end, and attention of a single query over a cache."""

import pytest
import torch
from torch import Tensor

from model import decoder
from model.attention import backends
from model.attention.backends import attend, attend_diff
from model.decoder import Decoder, _choose
from tests.model.test_backends import masks
from tests.variants import NATIVE, config, randomized

LOGITS = torch.tensor([2.0, -1.0, 0.5, 2.5, 0.0, 1.9, -3.0])


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def expected(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """The probabilities to draw from, token by token in plain Python."""
    weights = [2.718281828459045 ** (x / temperature) for x in logits.double().tolist()]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])[:top_k]
    total, kept, mass = sum(weights[i] for i in order), [], 0.0
    for i in order:
        if top_p is None or mass < top_p:
            kept.append(i)
        mass += weights[i] / total
    p = torch.zeros(len(weights), dtype=torch.float64)
    for i in kept:
        p[i] = weights[i] / sum(weights[j] for j in kept)
    return p


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, None, None), (0.7, 3, None), (1.3, None, 0.8), (1.0, None, 1.0), (0.5, 4, 0.6), (2.0, 99, 0.95), (1.0, 2, 1e-9)],
)
def test_draws_have_the_probabilities_they_should(temperature: float, top_k: int | None, top_p: float | None) -> None:
    n = 20_000
    drawn = _choose(LOGITS.expand(n, -1), temperature, top_k, top_p, torch.Generator().manual_seed(1))
    share, p = drawn.bincount(minlength=len(LOGITS)) / n, expected(LOGITS, temperature, top_k, top_p)
    assert torch.equal(share > 0, p > 0)  # every kept token is likely enough to turn up in 20,000
    assert ((share - p).abs() <= 5 * (p * (1 - p) / n).sqrt() + 1e-12).all()


def test_the_ends_of_the_unit_interval_draw_possible_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 1.0, float("-inf")]])
    for draw, token in ((0.0, 1), (1 - 2**-52, 3)):
        monkeypatch.setattr(decoder, "_uniform", lambda *_, draw=draw: torch.tensor([[draw]], dtype=torch.float64))
        assert _choose(logits, 1.0, None, None, None).tolist() == [token]
        assert _choose(logits, 1.0, None, 1.0, None).tolist() == [3 if draw == 0 else 1]  # the likeliest first
    monkeypatch.setattr(decoder, "_uniform", lambda *_: torch.ones(1, 1, dtype=torch.float64))
    assert _choose(logits, 1e-30, 1, None, None).tolist() == [3]  # and nothing overflows


def test_a_row_with_a_generator_does_not_depend_on_its_neighbours() -> None:
    model = randomized("diff")
    prompts = torch.randint(0, 50, (3, 6))
    options = {"temperature": 1.5, "top_p": 0.95}
    together = model.generate(prompts, 6, generator=generators(7, 8, 9), **options)
    for row, seed in enumerate((7, 8, 9)):
        alone = model.generate(prompts[row : row + 1], 6, generator=generators(seed), **options)
        assert torch.equal(alone[0], together[row])
    assert torch.equal(model.generate(prompts, 6, generator=generators(7, 8, 9), **options), together)
    assert not torch.equal(model.generate(prompts, 6, generator=generators(1, 2, 3), **options), together)


def test_rows_end_at_a_stop_token_and_repeat_it() -> None:
    model = randomized("baseline")
    prompts = torch.randint(0, 50, (3, 5), generator=torch.Generator().manual_seed(2))
    options = {"temperature": 3.0}
    free = model.generate(prompts, 20, generator=generators(1, 2, 3), **options)[:, 5:].tolist()
    stop = [free[0][3], free[1][9], free[2][6]]
    ends = [min(row.index(s) for s in stop if s in row) for row in free]
    assert len(set(ends)) > 1 and 0 < max(ends) < 19
    new = model.generate(prompts, 20, generator=generators(1, 2, 3), stop=stop, **options)[:, 5:].tolist()
    assert {len(row) for row in new} == {max(ends) + 1}
    for row, wanted, end in zip(new, free, ends, strict=True):
        assert row == wanted[: end + 1] + [wanted[end]] * (max(ends) - end)


def test_learned_positions_are_used_to_the_last() -> None:
    model, prompt = Decoder(config("gpt2")), torch.zeros(1, 8, dtype=torch.long)
    assert model.generate(prompt, 25).shape == (1, 33)  # context 32: the last token is not read
    with pytest.raises(ValueError, match="33 tokens exceed the 32 learned positions"):
        next(model.stream(prompt, 26))
    with pytest.raises(ValueError, match="left padding shifts learned positions"):
        next(model.stream(prompt, 2, keys=torch.ones(1, 8, dtype=torch.bool)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temperature": float("nan")}, "temperature=nan must be 0"),
        ({"temperature": 1.0, "top_k": 0}, "top_k=0 leaves no token: use top_k=50"),
        ({"top_p": 1.5}, "top_p=1.5 is not a share"),
        ({"temperature": 1.0, "generator": generators(1, 2)}, "2 generators for 1 rows: give one for all rows"),
        ({"tokens": torch.zeros(2, 0, dtype=torch.long)}, "the prompt is empty: give at least one token"),
        ({"diverged": True}, "not finite: its training diverged"),
    ],
)
def test_what_cannot_be_generated_is_refused(options: dict, says: str) -> None:
    model, given = Decoder(config("baseline")), {"tokens": torch.zeros(1, 3, dtype=torch.long)} | options
    if given.pop("diverged", False):
        model.norm.weight.data[3] = float("nan")
    with pytest.raises(ValueError, match=says):
        next(model.stream(given.pop("tokens"), 2, **given))


MASKS = masks(2, 37, window=5)  # in the last, the second sequence's last query sees nothing


@pytest.mark.parametrize(("mask", "groups"), tuple(zip(MASKS, (1, 3, 1, 3, 1, 3), strict=True)))
def test_one_query_is_the_formula(mask: str, groups: int) -> None:
    """Softmax attention and both kinds of difference, in outputs and gradients, and with a cache's strides."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    heads, kv, S = 2 * groups, 2, 37
    k, k2, v = (random(2, n, S + 6, w)[:, :, :S] for n, w in ((kv, 8), (2 * kv, 8), (kv, 12)))
    q, q2 = random(2, heads, 1, 8), random(2, heads, 2, 1, 8)
    for op, arguments in (
        (attend, [q, k, v]),
        (attend_diff, [q2, k[:, :, None], v, random(2, heads, 1, 1).sigmoid()]),
        (attend_diff, [q2, k2.unflatten(1, (kv, 2)), v, torch.tensor(0.3, dtype=torch.float64)]),
        (attend_diff, [q2, k2.unflatten(1, (kv, 2)), v, random(heads, 1, 1).sigmoid()]),
    ):
        results = []
        for backend in ("math", "auto", "sdpa", *NATIVE):
            leaves = [x.detach().clone().requires_grad_() for x in arguments]
            out = op(*leaves, MASKS[mask], backend)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        assert results[0][0].shape == (2, heads, 1, 12)
        for other in results[1:]:
            torch.testing.assert_close(other, results[0], atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("mask", MASKS)
def test_one_query_of_two_maps_copies_no_cache(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_both_maps", lambda *given: pytest.fail("keys of both maps were put side by side"))
    q, k, v = torch.randn(2, 2, 2, 1, 8), torch.randn(2, 2, 2, 37, 8), torch.randn(2, 2, 37, 16)
    assert attend_diff(q, k, v, torch.tensor(0.3), MASKS[mask]).shape == (2, 2, 1, 16)
