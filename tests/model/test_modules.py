"""Attention modules that stand alone: made from keywords, with positions, masks, devices and weights."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from model.attention import VARIANTS, BaselineAttention
from model.attention.backends import ROWS
from model.attention.base import Attention
from model.attention.dex import DexAttention
from model.attention.diff import lambda_init
from model.attention.mask import Mask, alibi_slopes
from model.attention.probe import probe
from model.cache import KVCache
from model.config import DecoderConfig
from model.rotary import RopeScaling, rope_table, rotate
from tests.reference import formulas
from tests.variants import NATIVE, config, stirred

D, H, LAYER = 64, 8, 3
MODULES = {cls.name: (cls, {}) for cls in VARIANTS.values()}
MODULES |= {
    "introspective_sequence": (VARIANTS["i"], {"mode": "sequence"}),
    "introspective_published": (VARIANTS["i"], {"mode": "sequence", "heads": 0, "repeated": True, "path_weight": "literal"}),
    "introspective_flash_2": (VARIANTS["i"], {"mode": "sequence", "heads": 0, "path_weight": "literal"}),
    "introspective_text": (VARIANTS["i"], {"own_path": False, "memory": "kva", "path_norm": "layernorm", "bias": True}),
    "diff_normed": (VARIANTS["d"], {"head_norm": "layernorm", "qkv_bias": True, "lambda_form": "dual_scalar"}),
}


def module(name: str, **keywords: Any) -> Attention:
    """The module in float64, with no parameter at its initial value."""
    cls, options = MODULES[name]
    made = cls(**{"d_model": D, "n_head": H, "n_kv_head": 4, "layer": LAYER, "dtype": torch.float64, **options, **keywords})
    return stirred(made, 0.2, 1).eval()


def formula(name: str, made: Attention, x: Tensor, see: np.ndarray, bias: Any = 0.0, **changes: Any) -> np.ndarray:
    """The independent formula with the module's weights; `bias`, broadcastable to (B, H, T, S), is added to the scores."""
    cls, options = MODULES[name]
    shared = {key: value for key, value in options.items() if key in DecoderConfig.__dataclass_fields__}
    cfg = DecoderConfig(**{"d_model": D, "n_head": H, "n_kv_head": 4, **shared, **changes}).filled()
    cfg = SimpleNamespace(**{**vars(cfg), cls.name: made.options})
    weights = {key: value.detach().numpy() for key, value in made.state_dict().items()}
    first = (weights, x.numpy())
    with formulas.added(bias):
        return getattr(formulas, cls.name)(weights, x.numpy(), see, cfg, 0 if cls.name == "value_residual" else LAYER, first)


def inputs(T: int, B: int = 2, seed: int = 0) -> Tensor:
    return torch.randn(B, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(got: Tensor, want: np.ndarray | Tensor, message: str = "") -> None:
    np.testing.assert_allclose(got.detach().numpy(), np.asarray(want), atol=1e-5, rtol=1e-5, err_msg=message)


def free_masks(T: int, heads: int) -> dict[str, tuple[Mask | Tensor, np.ndarray, np.ndarray | float]]:
    """A mask, who sees whom (B, H, T, T), and what is added: rows that see nothing among them."""
    generator = torch.Generator().manual_seed(T)
    free = torch.rand(2, heads, T, T, generator=generator) < 0.6
    free[0, :, T // 2] = False
    bias = torch.randn(2, heads, T, T, generator=generator, dtype=torch.float64)
    hidden = bias.masked_fill(~free, float("-inf"))
    every, shown = np.ones((2, heads, T, T), dtype=bool), free.numpy()
    padding = torch.ones(2, T, dtype=torch.bool)
    padding[0, : T // 2] = False
    return {
        "bidirectional": (Mask(causal=False), every, 0.0),
        "bool (B, H, T, S)": (free, shown, 0.0),
        "bool (T, S)": (free[1, 0], every & shown[1, 0], 0.0),
        "bool (B, 1, 1, S)": (padding[:, None, None], every & padding[:, None, None].numpy(), 0.0),
        "added (B, H, T, S)": (hidden, shown, bias.numpy()),
        "added (1, H, T, S)": (bias[:1], every, bias[:1].numpy()),
        "added (T, 1)": (bias[0, 0, :, :1], every, bias[0, 0, :, :1].numpy()),
        "causal, added": (Mask(bias=bias[:, :1]), np.tril(every), bias[:, :1].numpy()),
        "causal, bool, padding": (Mask(see=free, keys=padding), np.tril(shown) & padding[:, None, None].numpy(), 0.0),
    }


@pytest.mark.parametrize("name", MODULES)
def test_a_mask_of_any_shape_is_the_formulas(name: str) -> None:
    """Every mask with two modules, and those whose rows or heads differ with every module."""
    made, x = module(name), inputs(5)
    for label, (mask, see, bias) in free_masks(5, made.heads).items():
        if name in ("baseline", "diff") or "(B, H" in label or label.startswith("causal"):
            want = formula(name, made, x, see, bias)
            for made.backend in ("math", "auto"):
                close(made(x, mask=mask), want, f"{label}, {made.backend}")


@pytest.mark.parametrize("name", MODULES)
def test_gradients_under_a_mask_of_any_shape_are_those_of_the_formulas(name: str) -> None:
    """The module equals its formula (above), so the formula's gradient is the difference that the module makes."""
    results = []
    for backend in ("math", "auto"):
        made, x = module(name, backend=backend), inputs(6).requires_grad_()
        bias = free_masks(6, made.heads)["added (B, H, T, S)"][0].clone().requires_grad_()
        made(x, mask=bias).sin().sum().backward()
        results.append([x.grad, bias.grad, *(p.grad for p in made.parameters() if p.grad is not None)])
    torch.testing.assert_close(*results, atol=1e-9, rtol=1e-7)
    generator = torch.Generator().manual_seed(3)
    for key, leaf in (("x", x), ("bias", bias), *made.named_parameters()):
        if leaf.grad is None:
            continue
        way, start, ends = torch.randn(leaf.shape, dtype=leaf.dtype, generator=generator), leaf.detach().clone(), []
        with torch.no_grad():
            for step in (1e-6, -1e-6):
                leaf.copy_(start + step * way)
                ends.append(made(x, mask=bias).sin().sum())
            leaf.copy_(start)
        slope, along = (ends[0] - ends[1]) / 2e-6, (leaf.grad * way).sum()
        torch.testing.assert_close(along, slope, atol=1e-6, rtol=1e-5, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("name", MODULES)
def test_a_module_decodes_with_a_cache_under_any_mask(name: str) -> None:
    for position in ("rope", "alibi"):
        made, x = module(name, position=position), inputs(9)
        bias = torch.randn(9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        whole, cache, parts = made(x, mask=Mask(bias=bias, window=5)), KVCache(9), []
        for part in x.split([4, 1, 4], dim=1):
            start, stop = cache.length, cache.length + part.shape[1]
            mask = Mask(bias=bias[start:stop, :stop], window=5)
            if made.whole:
                with pytest.raises(ValueError, match="computes all rows .* again: leave out cache="):
                    made(part, mask=mask, cache=cache.layer(0))
                return
            parts.append(made(part, mask=mask, cache=cache.layer(0)))
            cache.length = stop
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", MODULES)
def test_attention_to_a_context_is_that_to_its_tokens(name: str) -> None:
    """Queries of x and keys of a context, without positions: as if x and the context were one sequence."""
    made, T, S = module(name, position="none"), 7, 4
    x, context, keys = inputs(T), inputs(S, seed=1), torch.ones(2, S, dtype=torch.bool)
    if not made.takes_context:
        with pytest.raises(ValueError, match=f"{made.name} takes no context.*leave out context="):
            made(x, context=context)
        return
    keys[0, 2] = False
    see = torch.zeros(2, 1, T + S, T + S, dtype=torch.bool)
    see[..., T:] = keys[:, None, None]
    both = made(torch.cat((x, context), 1), mask=see)[:, :T]
    torch.testing.assert_close(made(x, context=context, mask=Mask(causal=False, keys=keys)), both)
    with pytest.raises(ValueError, match="causal=False"):
        made(x, context=context, mask=Mask())
    with probe(made, torch.tensor([0])), pytest.raises(ValueError, match="leave out context="):
        made(x, context=context)
    rotated = module("baseline")
    with pytest.raises(ValueError, match="leave out rope="):
        rotated(x, context=context, rope=(x, x))
    torch.testing.assert_close(rotated(x, context=x), rotated(x, mask=Mask(causal=False)))


@pytest.mark.parametrize("name", MODULES)
def test_a_module_made_without_memory_gets_its_weights_from_reset_parameters(name: str) -> None:
    cls, options = MODULES[name]
    keywords = {"d_model": D, "n_head": H, "layer": LAYER, **options}
    made, want = cls(**keywords, device="meta"), cls(**keywords)
    assert all(p.is_meta for p in made.parameters())
    made.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*made.parameters(), *made.buffers()):
            tensor.fill_(float("nan"))
    made.reset_parameters()
    torch.testing.assert_close(made.state_dict(), want.state_dict(), rtol=0, atol=0)
    assert not torch.equal(made.out.weight, cls(**keywords, seed=1).out.weight)
    half = cls(**keywords, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    for key, p in half.named_parameters():
        assert torch.equal(p, want.get_parameter(key).bfloat16()), key


@pytest.mark.parametrize(
    ("options", "says"),
    (
        ({"d_model": 64, "heads_norm": "none"}, "no option heads_norm: use .*head_norm"),
        ({"rope_scaling": RopeScaling(factor=0.0)}, "^rope_scaling.factor=0.0 is out of range"),
        ({"d_model": "64"}, "^d_model='64' is out of range: use a number"),
    ),
)
def test_keywords_that_are_wrong_are_refused(options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        VARIANTS["d"](**options)
    with pytest.raises(ValueError, match="use DiffAttention.d_model="):
        VARIANTS["d"](512, 16)
    cfg = config("diff", n_layer=1)
    assert VARIANTS["d"](cfg, head_norm="none", n_head=4).heads == 2 and VARIANTS["d"](cfg).heads == 4


def test_lambda_init_follows_a_new_depth() -> None:
    made, x = module("diff"), inputs(5)
    made.set_lambda_init(7)
    assert made.lambda_init == lambda_init(7) and torch.equal(made(x), module("diff", layer=7)(x))


def test_biases_dropouts_and_norms_are_apart() -> None:
    for qkv, projection in ((True, False), (False, True)):
        for name in MODULES:
            made = module(name, bias=False, qkv_bias=qkv, projection_bias=projection)
            first = made.q[0] if isinstance(made.q, nn.ModuleList) else made.q
            assert (first.bias is not None, made.out.bias is not None) == (qkv, projection), name
    x = inputs(5)
    made = module("diff", projection_dropout=0.5)
    assert torch.equal(made(x), module("diff")(x))
    torch.manual_seed(0)
    dropped, kept = made.train()(x), made.eval()(x)
    assert 0.3 < (dropped == 0).double().mean() < 0.7
    torch.testing.assert_close(dropped[dropped != 0], 2 * kept[dropped != 0])
    for letter, option in (("d", "head_norm"), ("b", "head_norm"), ("b", "qk_norm"), ("g", "qk_norm"), ("i", "path_norm")):
        made = VARIANTS[letter](d_model=D, n_head=H, device="meta", **{option: nn.LayerNorm})  # a factory
        made.to_empty(device="cpu").reset_parameters()
        assert any(type(part) is nn.LayerNorm for part in made.modules()) and made(x.float()).isfinite().all()


@pytest.mark.parametrize("heads", (1, 6, 8))
def test_alibi_slopes_are_the_papers(heads: int) -> None:
    """Section 3 and footnote of arXiv 2108.12409: a geometric series; other numbers take every other of twice as many."""
    power = max(n for n in (1, 2, 4, 8, 16) if n <= heads)
    once, twice = ([(2 ** (-8 / n)) ** (i + 1) for i in range(n)] for n in (power, 2 * power))
    np.testing.assert_allclose(alibi_slopes(heads), once + twice[0::2][: heads - power])


@pytest.mark.parametrize("name", MODULES)
def test_positions_are_those_of_the_formula(name: str) -> None:
    """ALiBi, causal and not, on every backend; both layouts of RoPE."""
    made, x, distance = module(name, position="alibi"), inputs(6), np.abs(np.arange(6)[:, None] - np.arange(6))
    bias, causal = -np.array(alibi_slopes(made.heads))[:, None, None] * distance, np.tril(distance >= 0)
    for see, mask in ((causal, None), (distance >= 0, Mask(causal=False))):
        want = formula(name, made, x, see, bias, position="none")
        for made.backend in ("math", "sdpa", *NATIVE):
            close(made(x, mask=mask), want, made.backend)
    for options in ({}, {"rope_layout": "interleaved", "rope_theta": 100.0}):
        made = module(name, **options)
        close(made(x), formula(name, made, x, causal, **options), str(options))


@pytest.mark.parametrize(
    ("mask", "says"),
    (
        (torch.ones(2, 5, dtype=torch.bool), "Mask.keys"),
        (torch.ones(2, 3, 6, 6, dtype=torch.bool), "does not broadcast"),
        (torch.ones(6, 6, dtype=torch.long), "a mask is bool, .* not torch.int64"),
        (torch.ones(6, 6, dtype=torch.bool), r"may be \(B, S\) or \(T, S\): give Mask\(keys=mask\) for padding, or"),
        (torch.ones(1, 6, 6, dtype=torch.bool), "use backend=sdpa"),
    ),
)
def test_a_tensor_that_is_no_mask_is_refused(mask: Tensor, says: str) -> None:
    with pytest.raises(ValueError, match=says), torch.no_grad():
        module("baseline", backend="flex")(inputs(6, 6 if mask.shape == (6, 6) and mask.dtype == torch.bool else 2), mask=mask)


def test_dex_anneals_its_lambda() -> None:
    """Equation 4 of arXiv 2505.16333: at the start the softmax head alone, at the end what is learned."""
    module, x = DexAttention(d_model=16, n_head=2, layer=1, anneal=4), torch.randn(1, 5, 16)
    lambdas = {}
    for step in (2, 4, 9, 0):
        module.set_step(step)
        lambdas[step] = module.lam().item()
    schedule = lambda_init(1)
    assert lambdas == pytest.approx({0: 0.0, 2: 0.25 * schedule + 0.05, 4: 0.1, 9: 0.1})
    plain = BaselineAttention(d_model=16, n_head=2)
    plain.load_state_dict(module.state_dict(), strict=False)
    assert torch.equal(module(x), plain(x))


def test_rope_is_exact_in_half_precision() -> None:
    """Only what comes in and what goes out is rounded."""
    made = VARIANTS["d"](d_model=32, n_head=4, dtype=torch.bfloat16)
    x = torch.randn(1, 300, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    rope, _ = made._ropes(x, x, None, None)
    q = made.project(x, x)[0]
    turned = made.turn(q, rope)
    exact = [table.double() for table in rope_table(300, 8, 10000.0)]
    want = rotate(q.double(), rope._replace(cos=exact[0], sin=exact[1]))
    assert turned.dtype == torch.bfloat16
    assert ((turned - want).abs() <= want.abs() * 2**-8 + 1e-6).all()  # half a unit in the last place, and float32's error


@pytest.mark.parametrize("name", ("diff", "forgetting", "introspective_published"))
def test_export_grad_and_vmap_take_a_module(name: str) -> None:
    cls, options = MODULES[name]
    made = cls(d_model=32, n_head=4, **options).eval()
    x = torch.randn(3, 1, 7, 32, generator=torch.Generator().manual_seed(0))
    want = torch.stack([made(each) for each in x])
    exported = torch.export.export(made, (x[0],)).module()
    torch.testing.assert_close(exported(x[1]), want[1])
    torch.testing.assert_close(torch.vmap(made)(x), want)
    parameters = dict(made.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(made, parameters, (x,)).square().sum()

    grads = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, x)  # of each sample
    made(x[2]).square().sum().backward()
    for key, p in parameters.items():
        torch.testing.assert_close(grads[key][2], p.grad, atol=1e-4, rtol=1e-4, msg=lambda m, key=key: f"{key}: {m}")
    if made.makes_map:  # more rows than are computed at once
        torch.func.grad(loss)(parameters, torch.randn(1, ROWS + 1, 32))
