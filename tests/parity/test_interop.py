"""The importer of published attention modules (layouts.py): pairings and rotations. That it is right is shown by the
other files of this folder."""

import pytest
import torch

from model.attention.mask import Mask
from model.interop.rows import half_from_interleaved
from tests.parity.comparing import imported, random_weights, rope_of
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


def test_a_schedule_stored_in_float32_leaves_the_vectors_alone() -> None:
    w = random_weights(published.shapes("axolotl_double", 4, 4, 4))
    w["lambda_init"] = torch.tensor(float(published.lambda_init(2)), dtype=torch.float32)
    _, state = import_attention(w, "axolotl_double", n_head=4, layer=2)
    assert all(torch.equal(state[key], w[key]) for key in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"))
    with pytest.raises(ValueError, match="lambda_init is not finite"):
        import_attention(w | {"lambda_init": torch.tensor(float("nan"))}, "axolotl_double", n_head=4, layer=2)


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
