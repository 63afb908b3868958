"""Every variant against formulas written independently, on awkward shapes, with every backend."""

import numpy as np
import pytest
import torch

from model.attention import VARIANTS as CLASSES
from model.attention.mask import Mask
from model.cache import KVCache
from model.decoder import Decoder, layer_letter, matched
from model.rotary import rope_table
from tests.reference import formulas
from tests.variants import VARIANTS, config, randomized

ATTENTIONS = [name for name in VARIANTS if name not in ("gpt2", "hybrid")]
BACKENDS = ("math", "sdpa")


def masks(T: int) -> dict[str, Mask]:
    """Each rule alone and two together; the padding leaves the first sequence's early queries nothing to see."""
    documents = (torch.arange(T)[None] // max(1, T // 3)).repeat(2, 1)
    keys = torch.ones(2, T, dtype=torch.bool)
    keys[0, : T // 2 + 1] = False
    return {
        "causal": Mask(),
        "bidirectional": Mask(causal=False),
        "window": Mask(window=5),
        "documents": Mask(documents=documents),
        "padding": Mask(keys=keys),
        "padding+window": Mask(keys=keys, window=3),
    }


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


def expected(name: str, cfg, module, x: torch.Tensor, see: np.ndarray, layer: int) -> np.ndarray:
    w = {key: value.detach().numpy() for key, value in module.state_dict().items()}
    common = {"theta": cfg.rope_theta}
    if name in ("baseline", "gated"):
        common["gated"] = name == "gated"
        return formulas.baseline(w, x.numpy(), see, heads=cfg.n_head, kv_heads=cfg.n_kv_head, **common)
    if name == "diff":
        return formulas.diff(w, x.numpy(), see, heads=cfg.n_head, kv_heads=cfg.n_kv_head, layer=layer, **common)
    opt = cfg.introspective
    heads = opt.heads or cfg.n_head // 2
    return formulas.introspective(
        w, x.numpy(), see, mode=opt.mode, paths=opt.paths, heads=heads, kv_heads=heads * cfg.n_kv_head // cfg.n_head,
        width=cfg.head_dim, memory=opt.memory, path_weight=opt.path_weight, **common,
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ratio", (1, 2, 4))
@pytest.mark.parametrize("name", ATTENTIONS)
def test_equals_the_formula(name: str, ratio: int, backend: str) -> None:
    layer = 1
    for T in (1, 2, 13):
        cfg = matched(config(name, n_kv_head=8 // ratio, backend=backend))
        if name == "diff" and ratio == 4:
            assert cfg.n_kv_head == 2  # one differential key head for four queries
        module = randomized(name, n_kv_head=8 // ratio, backend=backend).blocks[layer].attention
        x = torch.randn(2, T, cfg.d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(T))
        table = rope_table(T, cfg.head_dim, cfg.rope_theta)
        for label, mask in masks(T).items():
            got = module(x, tuple(t.double() for t in table), mask).detach().numpy()
            want = expected(name, cfg, module, x, see_of(mask, T), layer)
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
        (loss, grads), (other_loss, other_grads) = results
        assert abs(loss - other_loss) < 1e-9
        for key, grad in grads.items():
            assert grad is not None, f"{key} got no gradient"
            torch.testing.assert_close(
                grad, other_grads[key], atol=1e-9, rtol=1e-6, msg=lambda m, key=key: f"{key}: {m}"
            )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_rows_that_see_nothing_are_zero_forward_and_backward(name: str, backend: str) -> None:
    module = randomized(name, backend=backend).blocks[0].attention
    x = torch.randn(2, 9, 64, dtype=torch.float64, requires_grad=True)
    keys = torch.ones(2, 9, dtype=torch.bool)
    keys[:, :4] = False
    out = module(x, None, Mask(keys=keys))
    out.square().sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()
    if name in ("baseline", "gated", "diff"):  # introspective adds alpha X, which no mask touches
        assert (out[:, :4] == 0).all()


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


@pytest.mark.parametrize("match", ("params", "flops"))
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "gpt2"])
@pytest.mark.parametrize("shape", ((4, 8, 128), (4, 8, 256), (8, 16, 512), (12, 16, 768)))
def test_every_variant_meets_the_baselines_budget(name: str, shape: tuple, match: str) -> None:
    n_layer, n_head, d_model = shape
    changes = {
        "n_layer": n_layer,
        "n_head": n_head,
        "d_model": d_model,
        "context": 64,
        "vocab_size": 512,
        "match": match,
    }
    if name in ("introspective_all_heads", "introspective_narrow_values"):
        pytest.skip(
            "attention alone exceeds the baseline's budget: refused, see test_degenerate_introspection_is_refused"
        )
    with torch.device("meta"):
        ours, baseline = Decoder(config(name, **changes)), Decoder(config("baseline", **changes))
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
    model = Decoder(config(name))
    x = torch.randint(0, 50, (4, 32))
    model(x, x.roll(-1, 1)).backward()
    for key, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().max() > 0, key


def test_greedy_generation_does_not_need_the_cache() -> None:
    model = Decoder(config("diff"))
    prompt = torch.randint(0, 50, (3, 5))
    tokens = prompt
    for _ in range(6):
        tokens = torch.cat((tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)), 1)
    assert torch.equal(model.generate(prompt, 6), tokens)
    sampled = [
        model.generate(prompt, 6, temperature=1.0, top_k=5, generator=torch.Generator().manual_seed(7)) for _ in "ab"
    ]
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
        ({"layers": "bx"}, "unknown letters x"),
        ({"layers": ""}, "unknown letters"),
        ({"norm": "batchnorm"}, "use one of rmsnorm, layernorm"),
        ({"match": "time"}, "use one of params, flops, none"),
        ({"head_dim": 7}, "even head width"),
        ({"vocab_size": 0}, "tokenizer's vocabulary size"),
        ({"n_layer": 0}, "must be at least 1"),
    ),
)
def test_wrong_input_is_refused_with_the_fix(changes: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Decoder(config("baseline", **changes))


@pytest.mark.parametrize(
    ("options", "says"),
    (
        ({"paths": 1}, "path_weight=sigmoid"),
        ({"paths": 1, "path_weight": "literal"}, "always zero"),
        ({"paths": 2, "path_weight": "literal"}, "always .1 and -1"),
        ({"paths": 0}, "paths=3"),
        ({"mode": "parallel"}, "use one of feature, sequence"),
        ({"memory": "q"}, "use one of ka, kv, kva"),
        ({"heads": 3}, "another divisor"),
        ({"heads": 8, "paths": 5}, "exceeds the baseline's budget"),
    ),
)
def test_degenerate_introspection_is_refused(options: dict, says: str) -> None:
    from model.attention.introspective import IntrospectiveConfig

    with pytest.raises(ValueError, match=says):
        Decoder(config("introspective", introspective=IntrospectiveConfig(**options)))


def test_a_prompt_beyond_learned_positions_is_refused_and_rope_goes_on() -> None:
    with pytest.raises(ValueError, match="learned positions"):
        Decoder(config("gpt2"))(torch.zeros(1, 33, dtype=torch.long))
    model = Decoder(config("baseline"))
    short = model(torch.zeros(1, 8, dtype=torch.long))
    model(torch.zeros(1, 50, dtype=torch.long))  # makes a longer table
    torch.testing.assert_close(model(torch.zeros(1, 8, dtype=torch.long)), short)
