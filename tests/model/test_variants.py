"""Every variant against formulas written independently, on awkward shapes, with every backend."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from model.attention import VARIANTS as CLASSES
from model.attention.base import Carry
from model.attention.baseline import BaselineConfig
from model.attention.diff import DiffConfig
from model.attention.gated import GatedConfig
from model.attention.integral import IntegralConfig
from model.attention.mask import Mask
from model.cache import KVCache
from model.config import DecoderConfig
from model.decoder import Decoder, layer_letter
from model.rotary import Rope, rope_table, rotate
from tests.model.test_backends import masks
from tests.reference import formulas
from tests.variants import NATIVE, VARIANTS, config, randomized

ATTENTIONS = [name for name, options in VARIANTS.items() if name != "gpt2" and len(options["layers"]) == 1]
FEWEST = {"diff": 2, "diff_biased": 2, "diff_own_scale": 2, "diff_plain": 2, "dint": 2, "gated_diff": 2, "integral": 2}
FEWEST |= {"shared_diff": 2, "grouped_diff": 2}  # key heads of variants that pair or share them
BACKENDS = ("math", "sdpa", *NATIVE)


def see_of(mask: Mask, T: int) -> np.ndarray:
    """Who sees whom (2, T, T), by the words of Mask's docstring and a loop."""
    see = np.zeros((2, T, T), dtype=bool)
    for b in range(2):
        for t in range(T):
            for s in range(T):
                ok = s <= t or not mask.causal
                ok &= mask.window is None or abs(t - s) < mask.window
                ok &= mask.documents is None or bool(mask.documents[b, t] == mask.documents[b, s])
                ok &= mask.keys is None or bool(mask.keys[b, s])
                see[b, t, s] = ok
    return see


def formula_of(cfg: DecoderConfig, layer: int) -> Callable[..., np.ndarray]:
    """The independent formula of the layer's variant, found by its name."""
    name = CLASSES[layer_letter(cfg, layer)].name
    assert hasattr(formulas, name), f"tests/reference/formulas.py has no formula of {name}: write the function {name}"
    return getattr(formulas, name)


def test_a_variant_without_a_formula_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(formulas, "temperature")
    with pytest.raises(AssertionError, match="has no formula of temperature: write the function temperature"):
        formula_of(config("temperature"), 0)


def weights_of(module: nn.Module) -> dict[str, np.ndarray]:
    return {key: value.detach().numpy() for key, value in module.state_dict().items()}


def rope_of(cfg: DecoderConfig, T: int) -> Rope:
    cos, sin = rope_table(T, cfg.head_dim, cfg.rope_theta)
    return Rope(cos.double(), sin.double(), cfg.rope_layout == "interleaved")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ratio", (1, 2, 8))
@pytest.mark.parametrize("name", ATTENTIONS)
def test_equals_the_formula(name: str, ratio: int, backend: str) -> None:
    layer = 1
    n_kv_head = max(8 // ratio, FEWEST.get(name, 1))  # ratio 8: multi-query attention
    model = randomized(name, n_kv_head=n_kv_head, backend=backend)
    cfg, formula = model.cfg, formula_of(model.cfg, layer)
    earlier, module = (block.attention for block in model.blocks[:2])
    for T in (1, 2, 13):
        generator = torch.Generator().manual_seed(T)
        x = torch.randn(2, T, cfg.d_model, dtype=torch.float64, generator=generator)
        x0 = torch.randn(2, T, cfg.d_model, dtype=torch.float64, generator=generator)
        for label, mask in masks(2, T, window=5).items():
            carry: Carry = {}
            earlier(x0, rope_of(cfg, T), mask, carry=carry)
            got = module(x, rope_of(cfg, T), mask, carry=carry).detach().numpy()
            first = (weights_of(earlier), x0.numpy())
            want = formula(weights_of(module), x.numpy(), see_of(mask, T), cfg, layer, first)
            np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5, err_msg=f"T={T}, {label}")


@pytest.mark.parametrize("name", ATTENTIONS)
def test_backends_agree_in_outputs_and_gradients(name: str) -> None:
    for T, ratio in ((63, 2), (128, 1)):
        results = []
        for backend in BACKENDS:
            model = randomized(name, n_kv_head=8 // ratio, backend=backend, context=T, d_ff=16)
            x = torch.randint(0, 50, (2, T), generator=torch.Generator().manual_seed(1))
            loss = model(x, x.roll(-1, 1))
            loss.backward()
            results.append((loss, {key: p.grad for key, p in model.named_parameters()}))
        (loss, grads), *others = results
        for other_loss, other_grads in others:
            assert abs(loss - other_loss) < 1e-9
            for key, grad in grads.items():
                assert grad is not None, f"{key} got no gradient"
                torch.testing.assert_close(grad, other_grads[key], atol=1e-9, rtol=1e-6, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_rows_that_see_nothing_are_zero_forward_and_backward(name: str, backend: str) -> None:
    module = randomized(name, backend=backend).blocks[0].attention
    x = torch.randn(2, 9, 64, dtype=torch.float64, requires_grad=True)
    keys = torch.ones(2, 9, dtype=torch.bool)
    keys[:, :4] = False
    out = module(x, None, Mask(keys=keys))
    out.sin().sum().backward()  # whose gradient at 0 is 1
    assert out.isfinite().all() and x.grad.isfinite().all()
    if not name.startswith("introspective"):  # alpha X is touched by no mask
        assert (x.grad[:, :4] == 0).all()
        assert module.out.bias is not None or (out[:, :4] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", VARIANTS)
def test_no_token_sees_the_future(name: str, backend: str) -> None:
    model = randomized(name, backend=backend)
    x = torch.randint(0, 50, (2, 20))
    before = model(x)
    for t in (1, 7, 19):
        changed = x.clone()
        changed[:, t:] = (changed[:, t:] + 1 + torch.arange(20 - t)) % 50
        after = model(changed)
        torch.testing.assert_close(after[:, :t], before[:, :t], atol=1e-12, rtol=0)
        assert (after[:, t] - before[:, t]).abs().max() > 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", VARIANTS)
def test_decoding_with_a_cache_equals_prefill(name: str, backend: str) -> None:
    model = Decoder(config(name, n_kv_head=4, backend=backend))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.1)
        x = torch.randint(0, 50, (2, 24))
        whole = model(x)
        for chunks in ((1,) * 24, (10, 1, 1, 12), (23, 1)):
            cache = KVCache(24)
            parts = [model(part, cache=cache) for part in x.split(list(chunks), dim=1)]
            torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "gpt2"])
def test_decoding_a_padded_batch_with_a_window_equals_each_prompt_alone(name: str) -> None:
    """Prompts of two lengths, padded on the left, in documents and under a sliding window."""
    model = randomized(name, window=5, document_mask=True, eot=0)
    long, short = torch.randint(1, 50, (2, 14)).unbind(0)
    long[4] = short[9] = 0  # a document begins in the middle
    prompts = torch.stack((long, torch.cat((torch.full((6,), 7), short[6:]))))
    keys = torch.ones(2, 14, dtype=torch.bool)
    keys[1, :6] = False
    both = model.generate(prompts, 8, keys=keys)
    assert torch.equal(both[0], model.generate(long[None], 8)[0])
    assert torch.equal(both[1, 6:], model.generate(short[None, 6:], 8)[0])
    cache, logits = KVCache(14), []
    for part, at in ((prompts[:, :10], 10), (prompts[:, 10:11], 11), (prompts[:, 11:], 14)):
        logits.append(model(part, cache=cache, keys=keys[:, :at]))
    whole = model(prompts, keys=keys)
    torch.testing.assert_close(torch.cat(logits, 1)[keys], whole[keys], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", VARIANTS)
def test_documents_do_not_see_each_other(name: str, backend: str) -> None:
    model = randomized(name, document_mask=True, eot=0, backend=backend)
    x = torch.randint(1, 50, (2, 20))
    x[:, 9] = 0
    before = model(x)
    x[:, :9] = x[:, :9] % 49 + 1
    after = model(x)
    torch.testing.assert_close(after[:, 9:], before[:, 9:], atol=1e-12, rtol=0)
    assert (after[:, :9] != before[:, :9]).any()


@pytest.mark.parametrize("backend", ("math", "sdpa"))
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_dropout_is_random_in_training_only_and_right_on_average(name: str, backend: str) -> None:
    model = randomized(name, attention_dropout=0.3, n_layer=1, backend=backend)
    module, x = model.blocks[0].attention, torch.randn(1, 6, 64, dtype=torch.float64)
    torch.manual_seed(0)
    assert not torch.equal(module(x, None, Mask()), module(x, None, Mask()))
    plain = model.eval().blocks[0].attention(x, None, Mask())
    assert torch.equal(plain, module(x, None, Mask()))
    normed = not isinstance(getattr(module, "head_norm", nn.Identity()), nn.Identity)
    if module.out.in_features == 64 and not normed and not name.startswith("introspective"):
        # Linear in the map (no norm after it): the mean over draws is the value without dropout.
        many = module.train()(x.expand(4000, -1, -1), None, Mask())
        spread = many.std(0) / 4000**0.5
        assert ((many.mean(0) - plain[0]).abs() < 6 * spread + 1e-9).all()


@pytest.mark.parametrize("name", ("diff", "diff_double", "diff_v2", "hybrid", "baseline"))
def test_a_stack_on_the_fused_backend_equals_the_formulas(name: str) -> None:
    """Prefill, gradients and decoding; layers without a difference of maps go to sdpa."""
    pytest.importorskip("triton", reason="the fused backend needs triton: pip install triton")
    results = []
    for backend in ("math", "fused"):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = randomized(name, n_kv_head=4, backend=backend, window=9).float().to(device)
        x = torch.randint(0, 50, (1, 20), generator=torch.Generator().manual_seed(1)).to(device)
        loss = model(x, x.roll(-1, 1))
        loss.backward()
        with torch.no_grad():
            cache = KVCache(20)
            logits = torch.cat([model(part, cache=cache) for part in x.split([12, 1, 7], dim=1)], dim=1)
        results.append((loss.detach(), logits, {key: p.grad for key, p in model.named_parameters()}))
    torch.testing.assert_close(*results, atol=2e-5, rtol=1e-4)


def test_fused_without_a_gpu_is_refused_when_the_model_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="use model.backend=sdpa"):
        Decoder(config("diff", backend="fused"))
    Decoder(config("baseline", backend="fused"))


def test_without_positions_only_the_set_of_earlier_tokens_counts() -> None:
    model = randomized("diff", position="none", n_layer=1)
    x = torch.randint(0, 50, (1, 12))
    shuffled = torch.cat((x[:, :11].flip(1), x[:, 11:]), dim=1)
    torch.testing.assert_close(model(shuffled)[:, -1], model(x)[:, -1], atol=1e-12, rtol=0)
    rotated = randomized("diff", n_layer=1)
    assert (rotated(shuffled)[:, -1] - rotated(x)[:, -1]).abs().max() > 1e-6


@pytest.mark.parametrize("layout", ("half", "interleaved"))
def test_rope_turns_scores_by_distance_alone_whatever_the_offset(layout: str) -> None:
    q, k = torch.randn(2, 1, 1, 9, 16, dtype=torch.float64).unbind(0)
    scores = []
    for offset in (0, 1000):
        cos, sin = rope_table(9, 16, 10000.0, offset=offset)
        rope = Rope(cos.double(), sin.double(), layout == "interleaved")
        scores.append(rotate(q, rope) @ rotate(k, rope).mT)
    torch.testing.assert_close(*scores, atol=1e-3, rtol=0)  # angles are float32: 1000 rad to 6e-5
    assert (scores[0] - q @ k.mT).abs().max() > 0.1


def test_lambda_warms_up_and_the_warm_up_is_saved() -> None:
    model = Decoder(config("diff", diff=DiffConfig(lambda_warmup=4)))
    full = model.blocks[1].attention.lam().item()
    for step, share in ((0, 0.25), (1, 0.5), (3, 1.0), (9, 1.0)):
        model.set_step(step)
        assert model.blocks[1].attention.lam().item() == pytest.approx(share * full, rel=1e-6)
    model.set_step(1)
    other = Decoder(config("diff"), seed=5)
    other.load_state_dict(model.state_dict())
    assert other.blocks[1].attention.lam().item() == pytest.approx(0.5 * full, rel=1e-6)
    other.set_step(0)  # of a configuration without a warm-up
    assert other.blocks[1].attention.lam().item() == pytest.approx(full, rel=1e-6)


def test_v2_may_start_with_the_subtraction_all_but_closed() -> None:
    attention = Decoder(config("diff_v2_biased")).blocks[0].attention
    lam = attention.lam(torch.randn(2, 5, 64))
    assert lam.shape == (2, 8, 5, 1) and (lam - torch.sigmoid(torch.tensor(-4.0))).abs().max() < 0.02


def test_the_last_of_paths_that_see_only_earlier_ones_has_no_keys() -> None:
    attention = Decoder(config("introspective_earlier_paths")).blocks[0].attention
    assert len(attention.q) == 3 and len(attention.k) == len(attention.v) == 2


@pytest.mark.parametrize("match", ("params", "flops"))
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "gpt2"])
@pytest.mark.parametrize("shape", ((4, 8, 128), (4, 8, 256), (8, 16, 512), (12, 16, 768)))
def test_every_variant_meets_the_baselines_budget(name: str, shape: tuple, match: str) -> None:
    n_layer, n_head, d_model = shape
    changes = {"n_layer": n_layer, "n_head": n_head, "d_model": d_model, "context": 64, "vocab_size": 512, "match": match}
    with torch.device("meta"):
        try:
            ours = Decoder(config(name, **changes))
        except ValueError as error:  # attention alone is too large
            assert "exceeds the baseline's budget" in str(error)
            assert name in ("introspective_all_heads", "introspective_narrow_values") and d_model < 512
            return
        baseline = Decoder(config("baseline", bias=ours.cfg.bias, **changes))
    measure = Decoder.num_params if match == "params" else lambda m: m.flops_per_token()["total"]
    assert abs(measure(ours) / measure(baseline) - 1) < 0.005


def test_flops_are_counted_from_the_matrices() -> None:
    model = Decoder(config("baseline", tie=False))
    D, V, T, L = 64, 50, 32, 2
    matrices = L * (4 * D * D + 3 * D * model.cfg.d_ff) + V * D
    assert model.flops_per_token() == {"total": 6 * matrices + 12 * L * D * T, "attention": 12 * L * D * T}
    assert model.num_params() == L * (4 * D * D + 3 * D * model.cfg.d_ff + 2 * D) + D


def test_variants_share_the_weights_both_have() -> None:
    baseline, diff = Decoder(config("baseline"), seed=3), Decoder(config("diff"), seed=3)
    for name in ("embedding.weight", "blocks.1.attention.q.weight", "blocks.0.attention.out.weight"):
        assert torch.equal(baseline.state_dict()[name], diff.state_dict()[name])
    assert not torch.equal(baseline.embedding.weight, Decoder(config("baseline"), seed=4).embedding.weight)


@pytest.mark.parametrize("name", [name for name in VARIANTS])
def test_every_parameter_learns(name: str) -> None:
    """No parameter is dead after one step (memory projections start at zero, but their gradient does not)."""
    model = Decoder(config(name)).double()
    x = torch.randint(0, 50, (4, 32))
    model(x, x.roll(-1, 1)).backward()
    largest = max(p.grad.abs().max() for p in model.parameters())
    for key, p in model.named_parameters():
        assert p.grad.abs().max() > 1e-9 * largest, key  # above what rounding leaves of a gradient of zero


def test_greedy_generation_does_not_need_the_cache() -> None:
    model = Decoder(config("diff"))
    prompt = torch.randint(0, 50, (3, 5))
    tokens = prompt
    for _ in range(6):
        tokens = torch.cat((tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)), 1)
    assert torch.equal(model.generate(prompt, 6), tokens)
    sampled = [model.generate(prompt, 6, temperature=1.0, top_k=5, generator=torch.Generator().manual_seed(7)) for _ in "ab"]
    assert torch.equal(*sampled)


def test_letters_tile_over_the_depth() -> None:
    cfg = config("hybrid", n_layer=5)
    assert [layer_letter(cfg, i) for i in range(5)] == list("bdbdb")
    model = Decoder(config("baseline", layers="bbdd", n_layer=4))
    assert [type(block.attention) for block in model.blocks] == [CLASSES[c] for c in "bbdd"]


@pytest.mark.parametrize(
    ("changes", "says"),
    (
        ({"n_head": 7}, "use model.n_head=8"),
        ({"n_head": 3, "d_model": 48, "layers": "d"}, "use model.n_head=4"),
        ({"n_kv_head": 3}, "use model.n_kv_head="),
        ({"n_kv_head": 1, "layers": "d"}, "use model.n_kv_head=2"),
        ({"n_head": 6, "n_kv_head": 3, "d_model": 48, "layers": "d"}, "use model.n_kv_head=2"),  # 4 does not divide 6
        ({"layers": "b?"}, "unknown letters"),
        ({"layers": ""}, "model.layers= is empty: give it a value"),
        ({"norm": "batchnorm"}, "use one of rmsnorm, layernorm"),
        ({"match": "time"}, "use one of params, flops, none"),
        ({"head_dim": 7}, "even head width"),
        ({"vocab_size": 0}, "tokenizer's vocabulary size"),
        ({"n_layer": 0}, r"model.n_layer=0 is out of range: use a number in \[1, 100000\]"),
        ({"n_layer": 10**9}, "model.n_layer=1000000000 is out of range"),
        ({"rope_theta": -1.0}, "model.rope_theta=-1.0 is out of range"),
        ({"norm_eps": float("nan")}, "model.norm_eps=nan is out of range"),
        ({"head_dim": -16}, "model.head_dim=-16 is out of range"),
        ({"window": 0}, "model.window=0 is out of range"),
        ({"dropout": 1.0}, r"use a number in \[0, 1\)"),
        ({"document_mask": True}, "model.eot=TOKEN_ID"),
        ({"rope_layout": "neox"}, "use one of half, interleaved"),
        ({"backend": "flash"}, "use one of auto, math, sdpa, one_call, two_calls, four_calls, cpu, flex, fused"),
        ({"backend": "flex", "attention_dropout": 0.1}, "use model.backend=sdpa"),
        ({"backend": "fused", "attention_dropout": 0.1, "layers": "d"}, "use model.backend=sdpa"),
        ({"backend": "fused", "layers": "d", "head_dim": 256}, "model.backend=sdpa"),
        ({"baseline": BaselineConfig(head_norm="layer")}, "model.baseline.head_norm=layer is unknown: use one of affine"),
        ({"layers": "d", "diff": DiffConfig(lambda_form="exp")}, "use one of vectors, dual_scalar, fixed"),
        ({"layers": "d", "diff": DiffConfig(head_norm="layer")}, "use one of affine, plain, layernorm, none"),
        ({"layers": "d", "diff": DiffConfig(heads="all")}, "use one of half, double"),
        ({"layers": "d", "diff": DiffConfig(lambda_warmup=-1)}, "model.diff.lambda_warmup=-1 is out of range"),
        ({"layers": "d", "diff": DiffConfig(lambda_init=1.0)}, "use model.diff.lambda_init=0.8"),
        ({"layers": "d", "diff": DiffConfig(qk_norm=nn.LayerNorm)}, "qk_norm=.* use true or false"),
        ({"layers": "d", "diff": DiffConfig(scale_norm=nn.LayerNorm)}, "scale_norm=.* use true or false"),
        ({"layers": "g", "gated": GatedConfig(gate="scalar")}, "use one of headwise, elementwise"),
        ({"layers": "n", "integral": IntegralConfig(signals=3)}, "does not divide.*use model.integral.signals=2"),
        ({"layers": "n", "n_kv_head": 1}, "use model.integral.signals=1"),
    ),
)
def test_wrong_input_is_refused_with_the_fix(changes: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Decoder(config("baseline", **changes))


@pytest.mark.parametrize(
    ("options", "says"),
    (
        ({"paths": 1}, "path_weight=sigmoid"),
        ({"paths": 1, "path_weight": "literal"}, "always zero.*path_weight=sigmoid"),
        ({"paths": 2, "path_weight": "literal"}, "always .1 and -1"),
        ({"paths": 0}, "model.introspective.paths=0 is out of range"),
        ({"mode": "parallel"}, "use one of feature, sequence"),
        ({"memory": "q"}, "use one of ka, kv, kva"),
        ({"heads": 3}, "use model.introspective.heads=2$"),
        ({"heads": 8, "paths": 5}, "exceeds the baseline's budget"),
        ({"mode": "sequence", "repeated": True, "paths": 11}, "too many for 11 paths: use model.introspective.paths=10"),
    ),
)
def test_degenerate_introspection_is_refused(options: dict, says: str) -> None:
    from model.attention.introspective import IntrospectiveConfig

    with pytest.raises(ValueError, match=says):
        Decoder(config("introspective", introspective=IntrospectiveConfig(**options)))


def test_a_prompt_beyond_learned_positions_is_refused_and_rope_goes_on() -> None:
    with pytest.raises(ValueError, match="learned positions"):
        Decoder(config("gpt2"))(torch.zeros(1, 33, dtype=torch.long))
    assert Decoder(config("baseline"))(torch.zeros(1, 50, dtype=torch.long)).isfinite().all()
