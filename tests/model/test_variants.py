"""Every variant against formulas written independently, on awkward shapes, with every backend."""

import functools

import numpy as np
import pytest
import torch
from torch import nn

from model.attention import VARIANTS as CLASSES
from model.attention.base import Carry
from model.attention.baseline import BaselineConfig
from model.attention.diff import DiffConfig
from model.attention.integral import IntegralConfig
from model.attention.introspective import IntrospectiveConfig
from model.attention.mask import Mask
from model.cache import KVCache
from model.decoder import Decoder, layer_letter
from tests.model.test_backends import masks, see_of
from tests.reference import formulas
from tests.variants import NATIVE, VARIANTS, config, randomized

ATTENTIONS = [name for name, options in VARIANTS.items() if name != "gpt2" and len(options["layers"]) == 1]
BACKENDS = ("math", "sdpa", *NATIVE)


def on(model: Decoder, backend: str) -> Decoder:
    """The model, all of whose attention runs on the backend."""
    for block in model.blocks:
        block.attention.backend = backend
    return model


def weights_of(module: nn.Module) -> dict[str, np.ndarray]:
    return {key: value.detach().numpy() for key, value in module.state_dict().items()}


@pytest.mark.parametrize("ratio", (1, 4))
@pytest.mark.parametrize("name", ATTENTIONS)
def test_equals_the_formula(name: str, ratio: int) -> None:
    """Of the second layer: the independent formula is the function of the variant's name."""
    model = randomized(name, n_kv_head=8 // ratio)
    formula = getattr(formulas, CLASSES[layer_letter(model.cfg, 1)].name)
    earlier, module = (block.attention for block in model.blocks[:2])
    views = [(7, label) for label in masks(2, 7) if ratio == 1 or label in ("causal", "padding+window")]
    for T, label in ((1, "padding"), *views):
        mask = masks(2, T, window=4)[label]
        x, x0 = torch.randn(2, 2, T, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(T)).unbind(0)
        first = (weights_of(earlier), x0.numpy())
        want = formula(weights_of(module), x.numpy(), see_of(mask, 2, T, T).numpy(), model.cfg, 1, first)
        for backend in BACKENDS:
            on(model, backend)
            carry: Carry = {}
            earlier(x0, None, mask, carry=carry)
            got = module(x, None, mask, carry=carry).detach().numpy()
            np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5, err_msg=f"{backend}, T={T}, {label}")


@pytest.mark.parametrize("name", ATTENTIONS)
def test_backends_agree_in_outputs_and_gradients(name: str) -> None:
    model = randomized(name, n_kv_head=2, d_ff=16)
    x, results = torch.randint(0, 50, (2, 19), generator=torch.Generator().manual_seed(1)), []
    for backend in BACKENDS:
        loss = on(model, backend)(x, x.roll(-1, 1))
        results.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=1e-9, rtol=1e-6)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_rows_that_see_nothing_are_zero_forward_and_backward(name: str) -> None:
    model = randomized(name)
    keys = torch.ones(2, 9, dtype=torch.bool)
    keys[:, :4] = False
    for backend in ("math", "sdpa"):
        module = on(model, backend).blocks[0].attention
        x = torch.randn(2, 9, 64, dtype=torch.float64, requires_grad=True)
        out = module(x, None, Mask(keys=keys))
        out.sin().sum().backward()  # whose gradient at 0 is 1
        assert out.isfinite().all() and x.grad.isfinite().all()
        if not name.startswith("introspective"):  # alpha X is touched by no mask
            assert (x.grad[:, :4] == 0).all()
            assert module.out.bias is not None or (out[:, :4] == 0).all()


@pytest.mark.parametrize("name", VARIANTS)
def test_no_token_sees_the_future(name: str) -> None:
    model, x = randomized(name), torch.randint(0, 50, (2, 14))
    for backend in BACKENDS:
        before = on(model, backend)(x)
        for t in (1, 9):
            changed = x.clone()
            changed[:, t:] = (changed[:, t:] + 1 + torch.arange(14 - t)) % 50
            after = model(changed)
            torch.testing.assert_close(after[:, :t], before[:, :t], atol=1e-12, rtol=0)
            assert (after[:, t] - before[:, t]).abs().max() > 1e-6


@pytest.mark.parametrize("name", VARIANTS)
def test_decoding_with_a_cache_equals_prefill(name: str) -> None:
    model, x = randomized(name, n_kv_head=4), torch.randint(0, 50, (2, 12))
    with torch.no_grad():
        for backend in BACKENDS:
            whole = on(model, backend)(x)
            cache = KVCache(12)
            parts = [model(part, cache=cache) for part in x.split([4, 1, 1, 6], dim=1)]
            torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "gpt2"])
def test_decoding_a_padded_batch_with_a_window_equals_each_prompt_alone(name: str) -> None:
    """Prompts of two lengths, padded on the left, in documents and under a sliding window."""
    model = randomized(name, window=5, document_mask=True, eot=0)
    long, short = torch.randint(1, 50, (2, 14)).unbind(0)
    long[4] = short[9] = 0  # a document begins in the middle
    prompts = torch.stack((long, torch.cat((torch.full((6,), 7), short[6:]))))
    keys = torch.ones(2, 14, dtype=torch.bool)
    keys[1, :6] = False
    both = model.generate(prompts, 2, keys=keys)
    assert torch.equal(both[0], model.generate(long[None], 2)[0])
    assert torch.equal(both[1, 6:], model.generate(short[None, 6:], 2)[0])
    cache, logits = KVCache(14), []
    for part, at in ((prompts[:, :10], 10), (prompts[:, 10:11], 11), (prompts[:, 11:], 14)):
        logits.append(model(part, cache=cache, keys=keys[:, :at]))
    whole = model(prompts, keys=keys)
    torch.testing.assert_close(torch.cat(logits, 1)[keys], whole[keys], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", ("hybrid", "introspective_sequence", "selective"))
def test_documents_do_not_see_each_other(name: str) -> None:
    model, x = randomized(name, document_mask=True, eot=0), torch.randint(1, 50, (2, 14))
    x[:, 9] = 0
    before = model(x)
    x[:, :9] = x[:, :9] % 49 + 1
    after = model(x)
    torch.testing.assert_close(after[:, 9:], before[:, 9:], atol=1e-12, rtol=0)
    assert (after[:, :9] != before[:, :9]).any()


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_dropout_is_random_in_training_only_and_right_on_average(name: str) -> None:
    model = randomized(name, attention_dropout=0.3, n_layer=1)
    module, x = model.blocks[0].attention, torch.randn(1, 6, 64, dtype=torch.float64)
    torch.manual_seed(0)
    assert not torch.equal(module(x, None, Mask()), module(x, None, Mask()))
    plain = model.eval().blocks[0].attention(x, None, Mask())
    assert torch.equal(plain, module(x, None, Mask()))
    normed = not isinstance(getattr(module, "head_norm", nn.Identity()), nn.Identity)
    if module.out.in_features == 64 and not normed and not name.startswith("introspective"):
        # Linear in the map (no norm after it): the mean over draws is the value without dropout.
        many = module.train()(x.expand(200, -1, -1), None, Mask())
        spread = many.std(0) / 200**0.5
        assert ((many.mean(0) - plain[0]).abs() < 6 * spread + 1e-9).all()


def test_a_stack_on_the_fused_backend_equals_the_formulas() -> None:
    """Prefill, gradients and decoding; layers without a difference of maps go to sdpa."""
    pytest.importorskip("triton", reason="the fused backend needs triton: pip install triton")
    results = []
    for backend in ("math", "fused"):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = randomized("hybrid", n_head=4, n_kv_head=2, backend=backend, window=5).float().to(device)
        x = torch.randint(0, 50, (1, 12), generator=torch.Generator().manual_seed(1)).to(device)
        loss = model(x, x.roll(-1, 1))
        loss.backward()
        with torch.no_grad():
            cache = KVCache(12)
            logits = torch.cat([model(part, cache=cache) for part in x.split([7, 1, 4], dim=1)], dim=1)
        results.append((loss.detach(), logits, {key: p.grad for key, p in model.named_parameters()}))
    torch.testing.assert_close(*results, atol=2e-5, rtol=1e-4)


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


def test_options_that_change_shapes_or_starts() -> None:
    """V2 may start with the subtraction all but closed; the last of paths that see only earlier ones has no keys."""
    lam = Decoder(config("diff_v2_biased")).blocks[0].attention.lam(torch.randn(2, 5, 64))
    assert lam.shape == (2, 8, 5, 1) and (lam - torch.sigmoid(torch.tensor(-4.0))).abs().max() < 0.02
    paths = Decoder(config("introspective_earlier_paths")).blocks[0].attention
    assert len(paths.q) == 3 and len(paths.k) == len(paths.v) == 2
    model = Decoder(config("baseline", layers="bbdd", n_layer=6))
    assert [type(block.attention) for block in model.blocks] == [CLASSES[c] for c in "bbddbb"]


@functools.cache
def measured(name: str, measure: str, bias: bool = False, **changes: object) -> int:
    with torch.device("meta"):
        model = Decoder(config(name, **({"bias": bias} if name == "baseline" else {}), match=measure, **changes))
    return model.num_params() if measure == "params" else model.flops_per_token()["total"]


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ("gpt2", "introspective_all_heads")])
def test_every_variant_meets_the_baselines_budget(name: str) -> None:
    bias, shape = VARIANTS[name].get("bias", False), {"n_layer": 4, "context": 64, "vocab_size": 512}
    for n_head, d_model, measure in ((8, 128, "params"), (16, 512, "flops")):
        if name != "introspective_narrow_values" or d_model == 512:  # its attention alone is too large
            shape |= {"n_head": n_head, "d_model": d_model}
            assert abs(measured(name, measure, **shape) / measured("baseline", measure, bias, **shape) - 1) < 0.005


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


@pytest.mark.parametrize("name", VARIANTS)
def test_every_parameter_learns(name: str) -> None:
    """No parameter is dead after one step (memory projections start at zero, but their gradient does not).

    No buffer depends on what was read: default DDP broadcasts buffers, and aborts where one process has larger ones.
    """
    model = Decoder(config(name)).double()
    x = torch.randint(0, 50, (2, 32))
    model(x, x.roll(-1, 1)).backward()
    largest = max(p.grad.abs().max() for p in model.parameters())
    for key, p in model.named_parameters():
        assert p.grad.abs().max() > 1e-9 * largest, key  # above what rounding leaves of a gradient of zero
    assert all(not buffer.shape for buffer in model.buffers())


@pytest.mark.parametrize(
    ("changes", "says"),
    (
        ({"n_head": 7}, "n_head=7 does not divide d_model=64: use n_head=8"),
        ({"n_head": 3, "d_model": 48, "layers": "d"}, "n_kv_head=3 is odd: use even numbers, or .diff. heads=double"),
        ({"layers": "b?"}, "unknown letters"),
        ({"head_dim": 7}, "even head width"),
        ({"vocab_size": 0}, "tokenizer's vocabulary size"),
        ({"document_mask": True}, "eot=TOKEN_ID"),
        ({"backend": "flash"}, "use one of auto, math, sdpa, one_call, two_calls, four_calls, cpu, flex, fused"),
        ({"backend": "flex", "attention_dropout": 0.1}, "use backend=sdpa or attention_dropout=0"),
        ({"backend": "flex", "position": "alibi"}, "no ALiBi: use backend=sdpa$"),
        ({"backend": "fused", "layers": "d", "head_dim": 256}, "backend=sdpa"),
        ({"baseline": BaselineConfig(head_norm="layer")}, "head_norm=layer is unknown: use one of affine"),
        ({"layers": "d", "diff": DiffConfig(lambda_init=1.0)}, "1.0 is not below 1: use lambda_init=0.8"),
        ({"layers": "n", "integral": IntegralConfig(signals=3)}, "signals=3 does not divide n_kv_head=8: use signals=2"),
        ({"layers": "u", "n_kv_head": 1}, "ratio=2 does not divide n_kv_head=1: use ratio=1"),
    ),
)
def test_wrong_input_is_refused_with_the_fix(changes: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Decoder(config("baseline", **changes))


def test_degenerate_introspection_is_refused() -> None:
    for options, says in (
        ({"paths": 1}, "path_weight=sigmoid"),
        ({"paths": 2, "path_weight": "literal"}, "always .1 and -1: use path_weight=sigmoid"),
        ({"heads": 3}, "heads=3 of each path do not divide d_model=64: set introspective.heads$"),
        ({"heads": 8, "paths": 5}, "exceeds the baseline's budget"),
        ({"mode": "sequence", "repeated": True, "paths": 11}, "at most paths=10$"),
    ):
        with pytest.raises(ValueError, match=says):
            Decoder(config("introspective", introspective=IntrospectiveConfig(**options)))
