"""The importer of published attention modules (layouts.py): folded factors and layouts. That it is right is shown by the
other files of this folder."""

from functools import partial

import pytest
import torch

from model.attention.mask import Mask
from model.interop.rows import half_from_interleaved
from tests.parity.comparing import assert_equals_formula, imported, random_weights, rope_of
from tests.parity.layouts import import_attention
from tests.reference import published

T = 7


def test_the_two_pairings_are_two_functions_and_repeating_first_loses_the_sharing() -> None:
    w = random_weights(published.shapes("microsoft", 4, 2, 4))
    x = torch.randn(1, T, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    out = {}
    for pairing, kv_heads in (("pair_first", 4), ("repeat_first", 8)):
        module, overrides = imported(w, "microsoft", 0, n_head=4, n_kv_head=2, gqa_pairing=pairing)
        assert overrides["n_head"] == 8 and overrides["n_kv_head"] == kv_heads
        out[pairing] = module(x, rope_of(overrides), Mask())
    assert (out["pair_first"] - out["repeat_first"]).abs().max() > 0.1


@pytest.mark.parametrize("stored", (0.0, -0.7))
@pytest.mark.parametrize("size", (0.0, 3.0))
def test_a_stored_lambda_init_keeps_its_lambda(stored: float, size: float) -> None:
    """Whatever was stored (axolotl's zero-init stores zeros), and however much the vectors have to make up for."""
    for depth in (0, 3):
        w = random_weights(published.shapes("axolotl_double", 4, 2, 4), depth) | {"lambda_init": torch.tensor(stored)}
        for key in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            w[key] *= size
        module, overrides = imported(w, "axolotl_double", depth, n_head=4, n_kv_head=2)
        formula = partial(published.axolotl_double, num_heads=4, num_kv_heads=2, depth=depth)
        assert_equals_formula(w, module, rope_of(overrides), formula)


def test_a_schedule_stored_in_float32_leaves_the_vectors_alone() -> None:
    w = random_weights(published.shapes("axolotl_double", 4, 4, 4))
    w["lambda_init"] = torch.tensor(float(published.lambda_init(2)), dtype=torch.float32)
    _, state = import_attention(w, "axolotl_double", n_head=4, layer=2)
    assert all(torch.equal(state[key], w[key]) for key in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"))


def test_folded_factors_do_not_round_in_bfloat16() -> None:
    w = {key: value.bfloat16() for key, value in random_weights(published.shapes("blog", 4, 4, 4)).items()}
    _, state = import_attention(w, "blog", n_head=4, layer=2)
    want = w["out_proj.weight"].double() / (1 - float(published.lambda_init(2)))
    # float32 rounds at 6e-8 of a value, bfloat16 at 4e-3
    torch.testing.assert_close(state["out.weight"].double(), want, rtol=1e-7, atol=0)
    assert state["q.weight"].dtype == torch.bfloat16


def test_interleaved_rows_permuted_to_half_split_give_the_same_outputs() -> None:
    w = random_weights(published.shapes("microsoft", 4, 2, 6))
    module, overrides = imported(w, "microsoft", 0, n_head=4, n_kv_head=2)
    x = torch.randn(2, T, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rope = rope_of(overrides)
    before = module(x, rope, Mask())
    with torch.no_grad():
        for linear in (module.q, module.k):
            linear.weight.copy_(half_from_interleaved(linear.weight, 6))
    torch.testing.assert_close(module(x, rope._replace(interleaved=False), Mask()), before, rtol=1e-9, atol=1e-11)
    assert (module(x, rope, Mask()) - before).abs().max() > 1e-3
    assert half_from_interleaved(torch.arange(12.0), 6).tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


def test_the_source_is_left_as_it_was_and_must_be_finite() -> None:
    w = random_weights(published.shapes("axolotl_double", 4, 4, 4, bias=True))
    before = {key: value.clone() for key, value in w.items()}
    _, state = import_attention(w, "axolotl_double", n_head=4, layer=0)
    for value in state.values():
        value.zero_()
    assert w.keys() == before.keys() and all(torch.equal(w[key], before[key]) for key in w)
    with pytest.raises(ValueError, match="lambda_init is not finite"):
        import_attention(w | {"lambda_init": torch.tensor(float("nan"))}, "axolotl_double", n_head=4, layer=0)
