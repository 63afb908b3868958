"""The published formulas (tests/reference/published.py) in float64 against our modules with their weights, on random
configurations, drawn anew every day (PARITY_SEED repeats a day's): outputs, and a derivative of each."""

from functools import partial
from typing import Any

import pytest
import torch

from tests.parity.comparing import DRAWS, assert_equals_formula, choices, imported, random_weights, rope_of
from tests.parity.layouts import LAYOUTS, import_attention
from tests.reference import published

FORMULAS = {name: name for name in LAYOUTS if name not in ("microsoft", "timm", "diffllama")}  # the formula: its layout
FORMULAS |= dict.fromkeys(("microsoft_naive", "microsoft_flash_1", "microsoft_flash_2"), "microsoft")
BAKED = {"microsoft_naive": {"gqa_pairing": "repeat_first"}}  # options of the importer


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("name", FORMULAS)
def test_imported_weights_compute_what_the_source_computes(name: str, draw: str) -> None:
    layout, pick = FORMULAS[name], choices(f"{name}/{draw}")
    heads, width, layer, T = pick(1, 2, 3, 4, 6), pick(2, 4, 6), pick(*range(12)), pick(1, 2, 5, 7)
    kv_heads = pick(*(n for n in range(1, heads + 1) if heads % n == 0)) if LAYOUTS[layout].pairings else heads
    unit = 2 if LAYOUTS[layout].queries else 1  # num_heads counts two for each head
    counts = {"n_head": unit * heads, "n_kv_head": unit * kv_heads}
    of_shapes, of_formula, of_import = options(layout, pick)
    w = random_weights(published.shapes(layout, *counts.values(), width, **of_shapes), layer, pick(*range(100)))
    if "lambda_init" in w and pick(True, False):
        w["lambda_init"] = torch.tensor(pick(-0.7, 0.0, 0.5, 3.0), dtype=torch.float64)
    module, overrides = imported(w, layout, layer, pick("math", "sdpa", "auto"), **counts, **of_import, **BAKED.get(name, {}))
    rope = rope_of(overrides, T) if of_formula.get("rope", True) else None
    formula = partial(getattr(published, name), num_heads=unit * heads, num_kv_heads=unit * kv_heads, depth=layer, **of_formula)
    assert_equals_formula(w, module, rope, formula, T)


def options(layout: str, pick: Any) -> tuple[dict, dict, dict]:
    """Options of the source's constructor, of its formula, and of the importer, that belong together."""
    if layout == "vasqu":
        return {}, {"rope": pick(True, False)}, {}
    if layout == "microsoft_v2":
        return {"dim": pick(None, 20)}, {}, {}
    if layout.startswith("axolotl"):
        shapes = {"bias": pick(True, False), "norm": pick(True, False)}
        eps = pick(None, 0.01)
        return shapes, {"eps": eps} if eps else {}, {"norm_eps": eps}
    return {}, {}, {}


def test_a_schedule_stored_in_float32_leaves_the_vectors_alone() -> None:
    w = random_weights(published.shapes("axolotl_double", 4, 4, 4))
    w["lambda_init"] = torch.tensor(float(published.lambda_init(2)), dtype=torch.float32)
    _, state = import_attention(w, "axolotl_double", n_head=4, layer=2)
    assert all(torch.equal(state[key], w[key]) for key in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"))
    with pytest.raises(ValueError, match="lambda_init is not finite"):
        import_attention(w | {"lambda_init": torch.tensor(float("nan"))}, "axolotl_double", n_head=4, layer=2)
