"""Published attention modules against ours with their weights: the formulas of tests/reference/published.py in float64,
and the packages that can be installed."""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from model.attention import VARIANTS
from model.attention.mask import Mask
from model.config import DecoderConfig
from model.interop.layouts import LAYOUTS, half_from_interleaved, import_attention
from model.rotary import Rope
from tests.reference import published

T = 7
LI = {depth: 0.8 - 0.6 * float(np.exp(-0.3 * depth)) for depth in (0, 2, 3)}

# Layout, formula, the system's num_heads and num_kv_heads, options of the importer, of the formula, and of the shapes.
CASES: dict[str, tuple] = {
    "microsoft, naive": ("microsoft", published.microsoft_naive, 4, 4, {"gqa_pairing": "repeat_first"}, {}, {}),
    "microsoft, flash_1": ("microsoft", published.microsoft_flash_1, 4, 4, {}, {}, {}),
    "microsoft, flash_2": ("microsoft", published.microsoft_flash_2, 4, 4, {}, {}, {}),
    "microsoft, naive, grouped by 2": ("microsoft", published.microsoft_naive, 4, 2, {"gqa_pairing": "repeat_first"}, {}, {}),
    "microsoft, naive, grouped by 3": ("microsoft", published.microsoft_naive, 6, 2, {"gqa_pairing": "repeat_first"}, {}, {}),
    "microsoft, naive, one key head": ("microsoft", published.microsoft_naive, 4, 1, {"gqa_pairing": "repeat_first"}, {}, {}),
    "microsoft, flash_1, grouped by 2": ("microsoft", published.microsoft_flash_1, 4, 2, {}, {}, {}),
    "microsoft, flash_1, one key head": ("microsoft", published.microsoft_flash_1, 4, 1, {"gqa_pairing": "pair_first"}, {}, {}),
    "microsoft, flash_2, grouped by 3": ("microsoft", published.microsoft_flash_2, 6, 2, {}, {}, {}),
    "vasqu": ("vasqu", published.vasqu, 8, 8, {}, {}, {}),
    "vasqu, grouped by 2": ("vasqu", published.vasqu, 8, 4, {}, {}, {}),
    "vasqu, grouped by 3": ("vasqu", published.vasqu, 12, 4, {}, {}, {}),
    "vasqu, no RoPE": ("vasqu", published.vasqu, 8, 4, {}, {"rope": False}, {}),
    "timm": ("timm", published.timm, 4, 4, {}, {}, {"proj_bias": True}),
    "timm, no bias": ("timm", published.timm, 4, 4, {}, {}, {}),
    "timm, one query bias": ("timm", published.timm, 4, 4, {}, {}, {"bias": True, "qk_norm": True}),
    "timm, norms": ("timm", published.timm, 4, 4, {}, {}, {"qk_norm": True, "scale_norm": True}),
    "timm, everything": (
        "timm", published.timm, 3, 3, {}, {},
        {"bias": True, "proj_bias": True, "qk_norm": True, "scale_norm": True, "dual": True},
    ),
    "diffllama": ("diffllama", published.diffllama, 8, 8, {}, {}, {}),
    "diffllama, grouped by 2": ("diffllama", published.diffllama, 8, 4, {}, {}, {}),
    "diffllama, two key heads, head_dim": ("diffllama", published.diffllama, 12, 2, {}, {}, {"dim": 20}),
    "diffllama, biases and eps": (
        "diffllama", published.diffllama, 8, 4, {"norm_eps": 0.01}, {"eps": 0.01}, {"bias": True},
    ),
    "axolotl, split": ("axolotl_split", published.axolotl_split, 8, 8, {}, {}, {}),
    "axolotl, split, grouped by 2": ("axolotl_split", published.axolotl_split, 8, 4, {}, {}, {"bias": True}),
    "axolotl, split, no norm": ("axolotl_split", published.axolotl_split, 12, 4, {}, {}, {"norm": False}),
    "axolotl, double": ("axolotl_double", published.axolotl_double, 4, 4, {}, {}, {}),
    "axolotl, double, odd heads": ("axolotl_double", published.axolotl_double, 3, 3, {}, {}, {}),
    "axolotl, double, grouped by 2": (
        "axolotl_double", published.axolotl_double, 4, 2, {"norm_eps": 0.01}, {"eps": 0.01}, {"bias": True},
    ),
    "axolotl, double, no norm": ("axolotl_double", published.axolotl_double, 6, 2, {}, {}, {"norm": False}),
    "blog": ("blog", published.blog, 4, 4, {}, {}, {}),
    "microsoft_v2": ("microsoft_v2", published.microsoft_v2, 4, 4, {}, {}, {}),
    "microsoft_v2, grouped by 2": ("microsoft_v2", published.microsoft_v2, 4, 2, {}, {}, {"dim": 20}),
    "microsoft_v2, one key head": ("microsoft_v2", published.microsoft_v2, 3, 1, {}, {}, {}),
}  # fmt: skip


def random_weights(shapes: dict[str, tuple], depth: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """A float64 state dict in which nothing is a zero or a one; a stored lambda_init has the schedule's value."""
    generator = torch.Generator().manual_seed(seed)
    w = {key: 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64) for key, shape in shapes.items()}
    return w | ({"lambda_init": torch.tensor(LI[depth], dtype=torch.float64)} if "lambda_init" in w else {})


def rope_of(overrides: dict, length: int = T) -> Rope | None:
    """float64 rotations for the imported module; None where its layout has no positions."""
    if overrides.get("position") == "none":
        return None
    d = overrides["head_dim"]
    angle = torch.arange(length).double()[:, None] * published.THETA ** (-torch.arange(0, d, 2).double() / d)
    return Rope(angle.cos(), angle.sin(), overrides["rope_layout"] == "interleaved")


def imported(
    source: dict[str, Tensor], layout: str, layer: int, backend: str = "math", **options
) -> tuple[nn.Module, dict]:
    """Our module with the source's weights, in the source's dtype."""
    overrides, state = import_attention(source, layout, layer=layer, **options)
    cfg = DecoderConfig(**overrides, backend=backend).filled()
    module = VARIANTS[cfg.layers](cfg, layer).to(next(iter(source.values())).dtype)
    module.load_state_dict(state, strict=True)
    return module, overrides


def assert_equals_formula(w: dict[str, Tensor], module: nn.Module, rope: Rope | None, formula: Callable) -> None:
    """Output, and its gradient with respect to x along three directions, which the formula gives by an imaginary step."""
    generator = torch.Generator().manual_seed(1)
    D = module.q.in_features
    x = torch.randn(2, T, D, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, T, D, generator=generator, dtype=torch.float64)
    module.position = "rope" if rope else "none"  # where no rotations are given, a module has its own
    y = module(x, rope, Mask())
    (grad,) = torch.autograd.grad((y * weight).sum(), x)
    arrays = {key: value.numpy() for key, value in w.items()}
    want = np.stack([formula(arrays, each) for each in x.detach().numpy()])
    # Both sides are float64 and of order 1; they differ by the order of their sums.
    np.testing.assert_allclose(y.detach().numpy(), want, rtol=1e-9, atol=1e-11)
    for direction in torch.randn(3, 2, T, D, generator=generator, dtype=torch.float64):
        step = x.detach().numpy() + 1e-30j * direction.numpy()
        slope = (
            sum((formula(arrays, each) * g).sum().imag for each, g in zip(step, weight.numpy(), strict=True)) / 1e-30
        )
        assert (grad * direction).sum().item() == pytest.approx(slope, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("backend", ("math", "sdpa"))
@pytest.mark.parametrize("name", CASES)
def test_imported_weights_compute_what_the_source_computes(name: str, backend: str) -> None:
    layout, formula, n_head, n_kv_head, options, formula_options, shape_options = CASES[name]
    w = random_weights(published.shapes(layout, n_head, n_kv_head, 4, **shape_options))
    heads = {"n_head": n_head} if n_head == n_kv_head else {"n_head": n_head, "n_kv_head": n_kv_head}
    module, overrides = imported(w, layout, 2, backend, **heads, **options)
    rope = rope_of(overrides) if formula_options.get("rope", True) else None
    formula = partial(formula, num_heads=n_head, num_kv_heads=n_kv_head, depth=2, **formula_options)
    assert_equals_formula(w, module, rope, formula)


def test_every_layout_is_compared() -> None:
    assert {case[0] for case in CASES.values()} == set(LAYOUTS)


def test_the_two_pairings_are_two_functions_and_repeating_first_loses_the_sharing() -> None:
    w = random_weights(published.shapes("microsoft", 4, 2, 4))
    x = torch.randn(1, T, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    out = {}
    for pairing, kv_heads in (("pair_first", 4), ("repeat_first", 8)):
        module, overrides = imported(w, "microsoft", 0, n_head=4, n_kv_head=2, gqa_pairing=pairing)
        assert overrides["n_head"] == 8 and overrides["n_kv_head"] == kv_heads
        out[pairing] = module(x, rope_of(overrides), Mask())
    assert (out["pair_first"] - out["repeat_first"]).abs().max() > 0.1


@pytest.mark.parametrize("layout", ("axolotl_split", "axolotl_double"))
@pytest.mark.parametrize("stored", (0.0, 0.5, -0.7, 1.0, 3.0))
@pytest.mark.parametrize("vectors", ("random", "zero", "large"))
def test_a_stored_lambda_init_keeps_its_lambda(layout: str, stored: float, vectors: str) -> None:
    """Whatever was stored (axolotl's zero-init stores zeros), and however much the vectors have to make up for."""
    for depth in (0, 3):
        w = random_weights(published.shapes(layout, 4, 2, 4), depth) | {"lambda_init": torch.tensor(stored)}
        for key in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            w[key] *= {"random": 1.0, "zero": 0.0, "large": 3.0}[vectors]
        module, overrides = imported(w, layout, depth, n_head=4, n_kv_head=2)
        formula = partial(getattr(published, layout), num_heads=4, num_kv_heads=2, depth=depth)
        assert_equals_formula(w, module, rope_of(overrides), formula)


def test_a_schedule_stored_in_float32_leaves_the_vectors_alone() -> None:
    w = random_weights(published.shapes("axolotl_double", 4, 4, 4))
    w["lambda_init"] = torch.tensor(LI[2], dtype=torch.float32)
    _, state = import_attention(w, "axolotl_double", n_head=4, layer=2)
    assert all(torch.equal(state[key], w[key]) for key in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"))


def test_folded_factors_do_not_round_in_bfloat16() -> None:
    w = {key: value.bfloat16() for key, value in random_weights(published.shapes("blog", 4, 4, 4)).items()}
    _, state = import_attention(w, "blog", n_head=4, layer=2)
    want = w["out_proj.weight"].double() / (1 - LI[2])
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
    bias = torch.arange(12.0)
    assert half_from_interleaved(bias, 6).tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    for width in (5, 8):
        with pytest.raises(ValueError, match="give the model's head_dim"):
            half_from_interleaved(bias, width)


def test_the_source_is_left_as_it_was() -> None:
    w = random_weights(published.shapes("timm", 4, 4, 4, bias=True, qk_norm=True, scale_norm=True))
    before = {key: value.clone() for key, value in w.items()}
    _, state = import_attention(w, "timm", n_head=4, layer=0)
    for value in state.values():
        value.zero_()
    assert w.keys() == before.keys() and all(torch.equal(w[key], before[key]) for key in w)


def _without(key: str) -> Callable[[dict], dict]:
    return lambda w: {k: v for k, v in w.items() if k != key}


MICROSOFT = ("microsoft", 4, 2)
WRONG = {
    "unknown layout": (MICROSOFT, None, {"layout": "flash"}, "layout=flash is unknown: use one of microsoft, vasqu"),
    "missing key": (MICROSOFT, _without("lambda_k2"), {}, "lacks lambda_k2: give one module's state dict"),
    "surplus key": (MICROSOFT, lambda w: w | {"q_norm.weight": torch.ones(4)}, {}, "has also q_norm.weight"),
    "another's keys": (
        ("vasqu", 8, 4),
        None,
        {"layout": "diffllama", "n_head": 8},
        "lacks o_proj.weight and has also out",
    ),
    "half a group": (("diffllama", 4, 4), lambda w: w | {"q_proj.bias": torch.ones(16)}, {}, "lacks k_proj.bias"),
    "both lambdas": (
        ("timm", 4, 4),
        lambda w: w | {"lambda_a": torch.ones(())},
        {},
        "lacks lambda_b and has also lambda_k1",
    ),
    "wrong shape": (
        MICROSOFT,
        lambda w: w | {"k_proj.weight": torch.ones(8, 32)},
        {},
        "k.weight .16, 32., but it is .8, 32.",
    ),
    "wrong rank": (MICROSOFT, lambda w: w | {"q_proj.weight": torch.ones(32)}, {}, "cannot share out query rows"),
    "fused rows": (("timm", 4, 4), lambda w: w | {"qkv.weight": torch.ones(95, 32)}, {}, "makes v.weight"),
    "a scalar": (("timm", 4, 4), lambda w: w | {"qkv.weight": torch.ones(())}, {}, "cannot share out query rows"),
    "baseline's heads": (MICROSOFT, None, {"n_head": 8, "n_kv_head": 4}, "give n_head and n_kv_head in heads after"),
    "differential heads": (("diffllama", 8, 8), None, {"n_head": 4, "n_kv_head": 4}, "n_kv_head in baseline heads"),
    "heads that do not share": (MICROSOFT, None, {"n_head": 6}, "cannot share out query rows of shape .32, 32."),
    "odd heads": (("diffllama", 6, 3), None, {}, "n_kv_head=3 must be even: give the baseline's heads"),
    "odd heads, vasqu": (("vasqu", 7, 7), None, {}, "n_head=7 and n_kv_head=7 must be even"),
    "groups that do not share": (MICROSOFT, None, {"n_kv_head": 3}, "n_kv_head=3 does not divide n_head=4"),
    "no heads": (MICROSOFT, None, {"n_head": 0}, "give both as the source counts them"),
    "no groups": (
        ("blog", 4, 4),
        None,
        {"n_kv_head": 2},
        "no grouped keys, so n_kv_head=2 is wrong: leave n_kv_head out",
    ),
    "no pairing": (("vasqu", 8, 4), None, {"gqa_pairing": "repeat_first"}, "leave gqa_pairing out"),
    "unknown pairing": (MICROSOFT, None, {"gqa_pairing": "naive"}, "use one of pair_first, repeat_first"),
    "no layer": (MICROSOFT, None, {"layer": -1}, "count layers from 0"),
    "no eps": (("timm", 4, 4), None, {"norm_eps": 0.0}, "give eps as 1e-5"),
    "not finite": (
        ("axolotl_double", 4, 4),
        lambda w: w | {"lambda_init": torch.tensor(float("nan"))},
        {},
        "not finite",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_refused_in_one_line_with_the_fix(name: str) -> None:
    (layout, n_head, n_kv_head), change, options, says = WRONG[name]
    w = random_weights(published.shapes(layout, n_head, n_kv_head, 4))
    w = change(w) if change else w
    arguments = {"layout": layout, "n_head": n_head, "n_kv_head": n_kv_head, "layer": 0} | options
    with pytest.raises(ValueError, match=says) as error:
        import_attention(w, **arguments)
    assert "\n" not in str(error.value)


# --- the packages themselves ---

# Both sides compute in float32: sums of up to 64 products of order 1, in different orders, differ by a few 1e-6.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def assert_same_function(ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Outputs and gradients with respect to x; parameters keep their gradients."""
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(3)) / 8  # gradients of order 1
    results = []
    for function in (ours, theirs):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        (y * weight).sum().backward()
        results.append((y.detach(), leaf.grad))
    torch.testing.assert_close(results[0][0], results[1][0], **CLOSE)
    torch.testing.assert_close(results[0][1], results[1][1], **CLOSE)


def randomize(module: nn.Module) -> None:
    """Norm weights too, which start at one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * (0.2 if p.dim() == 2 else 0.5))


@pytest.mark.parametrize("implementation", ("eager", "sdpa"))
@pytest.mark.parametrize("shape", ((8, 8, False), (8, 4, True), (8, 2, False)))
def test_equals_transformers_diffllama(implementation: str, shape: tuple) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    from transformers.models.diffllama import DiffLlamaConfig
    from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention, DiffLlamaRotaryEmbedding

    n_head, n_kv_head, bias = shape
    config = DiffLlamaConfig(
        hidden_size=64, num_attention_heads=n_head, num_key_value_heads=n_kv_head, attention_bias=bias, rms_norm_eps=1e-4,
        attn_implementation=implementation,
    )  # fmt: skip
    theirs = DiffLlamaAttention(config, layer_idx=3).eval()
    randomize(theirs)
    heads = {"n_head": n_head, "n_kv_head": n_kv_head, "norm_eps": 1e-4}
    ours, overrides = imported(theirs.state_dict(), "diffllama", 3, "sdpa", **heads)
    B, S = 2, 33
    x = torch.randn(B, S, 64, generator=torch.Generator().manual_seed(1))
    positions = DiffLlamaRotaryEmbedding(config)(x, torch.arange(S)[None])
    hidden = torch.full((S, S), float("-inf")).triu(1)[None, None] if implementation == "eager" else None
    rope = Rope(*(table.float() for table in rope_of(overrides, S)[:2]), interleaved=False)
    assert_same_function(lambda x: ours(x, rope, Mask()), lambda x: theirs(x, positions, hidden)[0], x)
    # The map of the weights is a permutation, so the gradients go through it like the weights.
    _, grads = import_attention({key: p.grad for key, p in theirs.named_parameters()}, "diffllama", layer=3, **heads)
    for key, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, grads[key], **CLOSE, msg=lambda text, key=key: f"{key}: {text}")


@contextlib.contextmanager
def timm_layers() -> Iterator[Callable[[str], ModuleType]]:
    """import_module for single files of timm.layers: timm's own __init__ imports all its models, and those torchvision.

    Stand-ins for the two packages, of which only __path__ is real; afterwards sys.modules is what it was.
    """
    spec = importlib.util.find_spec("timm")
    if spec is None:
        pytest.skip("timm is not installed: pip install --no-deps timm")
    ours = [name for name in sys.modules if name.split(".")[0] == "timm"]
    before = {name: sys.modules.pop(name) for name in ours}
    try:
        for name in ("timm", "timm.layers"):
            package = ModuleType(name)
            package.__path__ = [str(Path(spec.origin).parent.joinpath(*name.split(".")[1:]))]
            sys.modules[name] = package
        yield importlib.import_module
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "timm"]:
            del sys.modules[name]
        sys.modules.update(before)


@pytest.mark.parametrize("fused", (True, False), ids=("fused", "manual"))
@pytest.mark.parametrize("dual_lambda", (False, True), ids=("vectors", "dual_lambda"))
@pytest.mark.parametrize("norms", ((False, False), (True, False), (False, True), (True, True)), ids=str)
@pytest.mark.parametrize("biases", ((False, True), (True, False), (True, True), (False, False)), ids=str)
def test_equals_timm(biases: tuple, norms: tuple, dual_lambda: bool, fused: bool) -> None:
    (qkv_bias, proj_bias), (qk_norm, scale_norm) = biases, norms
    with timm_layers() as load:
        theirs = load("timm.layers.diff_attention").DiffAttention(
            64, num_heads=4, qkv_bias=qkv_bias, proj_bias=proj_bias, qk_norm=qk_norm, scale_norm=scale_norm, depth=2,
            dual_lambda=dual_lambda,
        ).eval()  # fmt: skip
    theirs.fused_attn = fused
    randomize(theirs)
    x = torch.randn(2, 17, 64, generator=torch.Generator().manual_seed(1))
    for causal in (True, False):
        theirs.zero_grad()
        ours, _ = imported(theirs.state_dict(), "timm", 2, "sdpa", n_head=4)
        assert_same_function(
            lambda x, m=ours, c=causal: m(x, None, Mask(causal=c)), lambda x, c=causal: theirs(x, is_causal=c), x
        )
        assert_timm_gradients(ours, theirs)


def assert_timm_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    """Weights that were scaled by s because of timm's other eps have 1/s of its gradient, and were imported with s of it."""
    source = {key: p.grad for key, p in theirs.named_parameters()}
    _, grads = import_attention(source, "timm", n_head=4, layer=2)
    scaled = ("q.", "k.") if "q_norm.weight" in source else ()
    scaled += ("head_norm.",) if "norm.weight" in source else ()
    absent = {"qkv.bias": ("q.bias", "k.bias", "v.bias"), "proj.bias": ("out.bias",)}
    zeros = {name for key, names in absent.items() if key not in source for name in names}
    for key, p in ours.named_parameters():
        if key not in zeros:
            want = grads[key] / 10 if key.startswith(scaled) else grads[key]
            torch.testing.assert_close(p.grad, want, **CLOSE, msg=lambda text, key=key: f"{key}: {text}")


def test_loading_timm_alone_leaves_no_trace() -> None:
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "timm"}
    with timm_layers() as load:
        load("timm.layers.diff_attention")
    assert {name: module for name, module in sys.modules.items() if name.split(".")[0] == "timm"} == before
