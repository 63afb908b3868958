"""The published formulas (tests/reference/published.py) in float64 against our modules with their weights, on random
configurations, drawn anew every day (PARITY_SEED repeats a day's): outputs, and a derivative of each."""

from functools import partial
from typing import Any

import pytest
import torch

from tests.parity.comparing import assert_equals_formula, imported, random_weights, rope_of
from tests.parity.drawing import DRAWS, choices
from tests.parity.layouts import LAYOUTS
from tests.reference import published

FORMULAS = {  # the formula: its layout
    "microsoft_naive": "microsoft",
    "microsoft_flash_1": "microsoft",
    "microsoft_flash_2": "microsoft",
    "vasqu": "vasqu",
    "timm": "timm",
    "diffllama": "diffllama",
    "axolotl_split": "axolotl_split",
    "axolotl_double": "axolotl_double",
    "blog": "blog",
    "microsoft_v2": "microsoft_v2",
}
BAKED = {"microsoft_naive": {"gqa_pairing": "repeat_first"}}  # options of the importer
NO_GROUPS = {layout for layout, form in LAYOUTS.items() if not form.pairings}
QUERIES = {layout for layout, form in LAYOUTS.items() if form.queries}  # num_heads counts two for each head


def test_every_layout_is_compared() -> None:
    assert set(FORMULAS.values()) == set(LAYOUTS)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("name", FORMULAS)
def test_imported_weights_compute_what_the_source_computes(name: str, draw: str) -> None:
    layout, pick = FORMULAS[name], choices(f"{name}/{draw}")
    heads, width, layer, T = pick(1, 2, 3, 4, 6), pick(2, 4, 6), pick(*range(12)), pick(1, 2, 5, 7)
    kv_heads = heads if layout in NO_GROUPS else pick(*(n for n in range(1, heads + 1) if heads % n == 0))
    unit = 2 if layout in QUERIES else 1
    counts = {"n_head": unit * heads, "n_kv_head": unit * kv_heads}
    of_shapes, of_formula, of_import = options(layout, pick)
    w = random_weights(published.shapes(layout, *counts.values(), width, **of_shapes), layer, pick(*range(100)))
    if "lambda_init" in w and pick(True, False):
        w["lambda_init"] = torch.tensor(pick(-0.7, 0.0, 0.5, 3.0), dtype=torch.float64)
    if layout in NO_GROUPS:
        counts.pop("n_kv_head")
    module, overrides = imported(w, layout, layer, pick("math", "sdpa", "auto"), **counts, **of_import, **BAKED.get(name, {}))
    rope = rope_of(overrides, T) if of_formula.get("rope", True) else None
    formula = partial(getattr(published, name), num_heads=unit * heads, num_kv_heads=unit * kv_heads, depth=layer, **of_formula)
    assert_equals_formula(w, module, rope, formula, T)


def options(layout: str, pick: Any) -> tuple[dict, dict, dict]:
    """Options of the source's constructor, of its formula, and of the importer, that belong together."""
    if layout == "vasqu":
        return {}, {"rope": pick(True, False)}, {}
    if layout == "timm":
        return {name: pick(True, False) for name in ("bias", "proj_bias", "qk_norm", "scale_norm", "dual")}, {}, {}
    if layout == "microsoft_v2":
        return {"dim": pick(None, 20)}, {}, {}
    if layout == "diffllama" or layout.startswith("axolotl"):
        shapes = {"bias": pick(True, False)} | ({"dim": pick(None, 20)} if layout == "diffllama" else {})
        shapes |= {"norm": pick(True, False)} if layout.startswith("axolotl") else {}
        eps = pick(None, 0.01)
        return shapes, {"eps": eps} if eps else {}, {"norm_eps": eps}
    return {}, {}, {}
