"""What training anneals in an attention, and what layers hand to each other in a stack."""

import math

import pytest
import torch

from model.attention import BaselineAttention
from model.attention.dex import DexAttention
from model.cache import KVCache
from tests.variants import randomized


def test_dex_anneals_its_lambda() -> None:
    """Equation 4 of arXiv 2505.16333: at the start the softmax head alone, at the end what is learned."""
    module, x = DexAttention(d_model=16, n_head=2, layer=1, anneal=4), torch.randn(1, 5, 16)
    lambdas = {}
    for step in (2, 4, 9, 0):
        module.set_step(step)
        lambdas[step] = module.lam().item()
    schedule = 0.8 - 0.6 * math.exp(-0.3)
    assert lambdas == pytest.approx({0: 0.0, 2: 0.25 * schedule + 0.05, 4: 0.1, 9: 0.1})
    plain = BaselineAttention(d_model=16, n_head=2)
    plain.load_state_dict(module.state_dict(), strict=False)
    assert torch.equal(module(x), plain(x))


def test_values_are_mixed_with_those_of_the_first_layer() -> None:
    """In the third layer too, and of a hybrid stack with the first layer of the variant; a single module keeps its values."""
    model = randomized("value_residual_later", layers="brrr", context=8)
    inputs, values = {}, {}
    for i, block in enumerate(model.blocks):
        block.attention.register_forward_pre_hook(lambda _, given, i=i: inputs.update({i: given[0]}))
    cache = KVCache(8)
    model(torch.randint(0, 50, (1, 8)), cache=cache)
    for i in (1, 2, 3):
        values[i] = model.blocks[i].attention.v(inputs[i]).unflatten(-1, (8, -1)).transpose(1, 2)
        want = values[1] if i == 1 else (values[1] + values[i]) / 2
        torch.testing.assert_close(cache.slots[i, 0][1], want)
    alone = model.blocks[2].attention
    assert torch.equal(alone(inputs[2]), alone(inputs[2], carry={}))
