"""The facade: which kernel it calls, what a probe sees, what a cache holds."""

import pytest
import torch
import torch.nn.functional as F

from model.attention import backends, reference
from model.attention.mask import CAUSAL, Mask
from model.attention.probe import probe
from model.cache import KVCache
from tests.variants import VARIANTS, randomized


def test_wide_values_stay_on_the_fast_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of width 2d would drop SDPA to its slow CPU kernel: one call, all widths equal, no mask tensor."""
    calls = []
    real = F.scaled_dot_product_attention

    def record(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
        calls.append((q.shape, k.shape, v.shape, options))
        return real(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    q, k, v = torch.randn(2, 3, 2, 7, 8), torch.randn(2, 3, 2, 7, 8), torch.randn(2, 3, 7, 16)
    backends.attend_diff(q, k, v, torch.tensor(0.3), CAUSAL)
    ((q_shape, k_shape, v_shape, options),) = calls
    assert q_shape == k_shape == v_shape == (2, 6, 7, 16)
    assert options == {"is_causal": True, "scale": 8**-0.5}


@pytest.mark.parametrize("widths", ((8, 16), (16, 8), (8, 8)))
def test_a_union_is_one_softmax_with_exact_gradients(widths: tuple[int, int]) -> None:
    d, dv = widths
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(2, 2, 9, width, dtype=torch.float64, generator=generator, requires_grad=True)
        for width in (d, d, d, d, dv, dv, dv)
    ]

    def union(backend: str):  # noqa: ANN202
        return lambda q, *sets: backends.attend_union(q, list(sets[:3]), list(sets[3:]), CAUSAL, backend)

    outputs, gradients = [], []
    for backend in ("math", "sdpa"):
        out = union(backend)(*tensors)
        outputs.append(out)
        gradients.append(torch.autograd.grad(out.sin().sum(), tensors))
    torch.testing.assert_close(*outputs, atol=1e-12, rtol=1e-9)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-7)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_probe_sees_the_map_that_was_used(name: str) -> None:
    """Row sums, causality, and the same rows whether asked alone, together or per sequence."""
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
        total = 1 - attention.lam() if hasattr(attention, "lam") else torch.ones(())
        torch.testing.assert_close(both.sum(-1), total.expand(both.shape[:-1]), atol=1e-5, rtol=1e-5)


def test_a_probe_reads_the_baselines_own_softmax() -> None:
    model = randomized("baseline", position="learned").float()
    tokens = torch.randint(0, 50, (1, 10))
    seen: dict[str, torch.Tensor] = {}
    block = model.blocks[0]
    block.attention.register_forward_pre_hook(lambda module, inputs: seen.update(x=inputs[0]))
    with probe(model, torch.tensor([9])) as maps:
        model(tokens)
    q, k = (p(seen["x"]).unflatten(-1, (8, -1)).transpose(1, 2) for p in (block.attention.q, block.attention.k))
    torch.testing.assert_close(maps.layers[0], reference.weights(q[:, :, -1:], k, torch.ones(1, 10, dtype=torch.bool)))


def test_probes_do_not_nest_and_end_with_their_block() -> None:
    model = randomized("baseline")
    with (
        probe(model, torch.tensor([0])),
        pytest.raises(ValueError, match="already active"),
        probe(model, torch.tensor([0])),
    ):
        pass
    model(torch.zeros(1, 4, dtype=torch.long))  # nothing is active any more


def test_a_cache_that_is_too_short_says_how_long_it_must_be() -> None:
    model = randomized("diff")
    with pytest.raises(ValueError, match="max_length=6"):
        model(torch.zeros(1, 6, dtype=torch.long), cache=KVCache(5))


def test_cached_queries_are_the_last_positions() -> None:
    mask = Mask(window=3)
    see = mask.dense(2, 6, torch.device("cpu"))[0, 0]
    assert see.tolist() == [[False, False, True, True, True, False], [False, False, False, True, True, True]]
