"""Converted baselines: what is kept, what changes, and which parameters learn from which step on."""

import copy

import pytest
import torch
from torch import Tensor

from model.attention.baseline import BaselineConfig
from model.attention.diff import lambda_init
from model.config import DecoderConfig
from model.conversion import Conversion, change, convert, converted_config
from model.decoder import Decoder
from tests.variants import stirred

SHAPES = {
    "mha": {},
    "gqa": {"n_kv_head": 2},
    "gpt2": {"norm": "layernorm", "mlp": "gelu", "position": "learned", "bias": True, "match": "none"},
    "norms": {"n_kv_head": 4, "baseline": BaselineConfig(qk_norm="head"), "norm_place": "after"},
    "odd": {"n_head": 5, "d_model": 40},
    "interleaved_wide": {"n_kv_head": 4, "head_dim": 12, "rope_layout": "interleaved", "bias": True, "tie": False},
}
EXACT = {
    "zero": Conversion(),
    "zero, random": Conversion(second="random"),
    "mirror": Conversion(init="mirror"),
    "mirror at 0.3": Conversion(init="mirror", lambda_init=0.3),
    "v2": Conversion(to="diff_v2", lambda_bias=0.0),
    "gated": Conversion(to="gated"),
    "dex": Conversion(to="dex"),
}
LEARN = EXACT | {
    "split": Conversion(heads="split"),
    "open": Conversion(init="open", second="random"),
    "split, open": Conversion(heads="split", init="open"),
    "v2, random": Conversion(to="diff_v2", second="random"),
    "zero, norm": Conversion(second="random", sublayer_norm=True),
    "split, norm": Conversion(heads="split", sublayer_norm=True),
    "zero, copy, norm": Conversion(sublayer_norm=True),
    "mirror, norm": Conversion(init="mirror", sublayer_norm=True),
    "same, norm": Conversion(to="same", sublayer_norm=True),
}


def baseline(shape: str = "mha", seed: int = 0, **changes: object) -> Decoder:
    """A float32 baseline with the logits of a trained one (order 1 and more) and nothing left at a zero or a one."""
    options = {"n_layer": 3, "n_head": 8, "d_model": 64, "context": 32, "vocab_size": 50} | SHAPES[shape] | changes
    return stirred(Decoder(DecoderConfig(**options), seed=seed), 0.15, seed).eval()


def text(model: Decoder, rows: int = 3, length: int = 31) -> Tensor:
    return torch.randint(model.cfg.vocab_size, (rows, length), generator=torch.Generator().manual_seed(5))


PAIRS = [(n, s) for i, n in enumerate(EXACT) for j, s in enumerate(SHAPES) if (i + j) % 2 == 0 or n == "zero"]


@pytest.mark.parametrize(("name", "shape"), [(n, s) for n, s in PAIRS if s != "norms" or EXACT[n].to in ("diff", "gated")])
def test_exact_conversions_leave_the_logits_alone(name: str, shape: str) -> None:
    source = baseline(shape)
    changed = change(source, convert(source, EXACT[name]), text(source))
    assert changed.max_logit < 1e-4 and changed.mean_logit <= changed.max_logit  # float32; logits up to ~ 30
    assert len(changed.hidden) == 3 and max(changed.hidden) < 1e-5
    assert source(text(source)).abs().max() > 1


def test_the_mirrored_factor_is_what_keeps_the_logits() -> None:
    source = baseline("gqa")
    model = convert(source, EXACT["mirror"])
    for layer, (before, after) in enumerate(zip(source.blocks, model.blocks, strict=True)):
        assert after.attention.lam().item() == pytest.approx(lambda_init(layer), abs=1e-7)
        torch.testing.assert_close(after.attention.out.weight, before.attention.out.weight / (1 - lambda_init(layer)) ** 2)


@pytest.mark.parametrize("shape", ("gqa", "interleaved_wide"))
def test_split_keeps_every_map_and_the_first_half_of_the_values(shape: str) -> None:
    """The formula head by head: map c of head i is a whole baseline map, and at lambda 0 only map 0 is looked through."""
    source = baseline(shape)
    model = convert(source, Conversion(heads="split"))
    for before, after in zip(source.blocks, model.blocks, strict=True):
        a, b = before.attention, after.attention
        r, d = a.heads // a.kv_heads, a.width
        q, k, v = (p.weight.detach().unflatten(0, (-1, d)) for p in (a.q, a.k, a.v))
        q2, k2 = (p.weight.detach().unflatten(0, (-1, d)) for p in (b.q, b.k))
        v2 = b.v.weight.detach().unflatten(0, (-1, 2 * d))
        out = a.out.weight.detach().unflatten(1, (-1, d))
        out2 = b.out.weight.detach().unflatten(1, (-1, 2 * d))
        used = []
        for i in range(b.heads):
            for c in (0, 1):
                head, *others = [h for h in range(a.heads) if torch.equal(q[h], q2[2 * i + c])] or [None]
                assert head is not None and not others
                used.append(head)
                group = head // r
                assert torch.equal(k2[2 * (i // r) + c], k[group])
                assert torch.equal(v2[i // r, c * d : (c + 1) * d], v[group])
                assert torch.equal(out2[:, i, c * d : (c + 1) * d], out[:, head])
        assert sorted(used) == list(range(a.heads))
        assert b.lam().item() == 0


@torch.no_grad()
def test_open_subtracts_lambda_init_of_fresh_maps_from_the_sources_heads() -> None:
    """axolotl's default: A V W - lambda_init B V W, with the source's A, V and W and B of the new queries and keys."""
    source = baseline("gqa")
    x = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(2))
    for start in (None, 0.3):
        model = convert(source, Conversion(init="open", second="random", lambda_init=start))
        for layer, (before, after) in enumerate(zip(source.blocks, model.blocks, strict=True)):
            li, attention = start or lambda_init(layer), after.attention
            assert attention.lam().item() == pytest.approx(li, abs=1e-7)
            second = copy.deepcopy(before.attention)
            for name in ("q", "k"):
                rows = getattr(attention, name).weight.unflatten(0, (-1, 2, attention.width))[:, 1].flatten(0, 1)
                getattr(second, name).weight.copy_(rows)
            torch.testing.assert_close(attention(x), before.attention(x) - li * second(x), rtol=1e-4, atol=1e-5)


def test_with_a_head_norm_the_output_projection_restores_the_heads_sizes() -> None:
    """Exactly for a single token, whose heads have one size each; on average for a text."""
    source = baseline("gqa")
    tokens = text(source)
    for how in (LEARN["zero, norm"], LEARN["mirror, norm"], LEARN["same, norm"]):
        blind, measured = (change(source, convert(source, how, 0, t), tokens) for t in (None, tokens))
        assert measured.hidden[0] < 0.9 * blind.hidden[0]
        assert change(source, convert(source, how, 0, tokens[:1, :1]), tokens[:1, :1]).max_logit < 1e-2  # the norm's eps
        assert change(source, convert(source, how), tokens[:1, :1]).max_logit > 0.1
    zero, mirror = (convert(source, Conversion(init=init, sublayer_norm=True)) for init in ("zero", "mirror"))
    assert change(zero, mirror, tokens).max_logit < 1e-2  # the norm takes 1 - lambda itself, but for its eps


def second_rows(model: Decoder) -> dict[str, Tensor]:
    """Gradients of the second maps' query (and, in version 1, key) rows, per layer."""
    rows = {}
    for layer, block in enumerate(model.blocks):
        for name in {"d": ("q", "k"), "v": ("q",)}.get(model.cfg.layers, ()):
            grad = getattr(block.attention, name).weight.grad
            rows[f"{layer}.{name}"] = grad.unflatten(0, (-1, 2, block.attention.width))[:, 1]
    return rows


@pytest.mark.parametrize("name", LEARN)
def test_every_parameter_learns_at_once_but_second_maps_at_lambda_zero(name: str) -> None:
    how = LEARN[name]
    model = convert(baseline("gqa"), how).train()
    model.set_step(0)
    optimizer, tokens = torch.optim.AdamW(model.parameters(), lr=1e-3), text(model, 4, 32)
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    for key, p in model.named_parameters():
        waits = key.endswith("lambda_learned")  # of dex, whose matrix is zero
        assert p.grad is not None and bool(p.grad.any()) != waits, key
        if "lambda" in key and not waits:
            assert (p.grad != 0).all(), key
    waiting = [key for key, grad in second_rows(model).items() if not grad.any()]
    assert waiting == (list(second_rows(model)) if (how.to, how.init) == ("diff", "zero") else [])
    optimizer.step()
    model.zero_grad()
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    assert all(p.grad.any() for key, p in model.named_parameters() if key.endswith("lambda_learned"))
    for key, grad in second_rows(model).items():
        assert (grad.flatten(1).abs().amax(1) > 0).all(), key  # of every head


def test_what_is_not_attention_is_kept_to_the_bit_and_a_seed_decides_what_is_random() -> None:
    """Conversions that are not exact are a change and say so."""
    source, tokens = baseline("gpt2"), text(baseline())
    before = copy.deepcopy(source.state_dict())
    for name, how in LEARN.items():
        model = convert(source, how)
        assert how.exact == (name in EXACT) == (change(source, model, tokens).max_logit < 1e-3)
        state = model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in before.items() if ".attention." not in name)
    mixed = baseline(layers="gdx")
    assert change(mixed, convert(mixed, Conversion(to="same")), tokens).max_logit == 0
    same = convert(source, Conversion(to="same"))
    for model in (source, same):
        assert model.cfg == source.cfg and all(torch.equal(value, before[k]) for k, value in model.state_dict().items())
    one, again, other = (convert(source, EXACT["zero, random"], seed).blocks[0].attention.state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["q.weight"], other["q.weight"]) and not torch.equal(one["lambda_q1"], other["lambda_q1"])


@pytest.mark.parametrize(
    ("cfg", "how", "says"),
    [
        ({}, Conversion(to="diff3"), "to=diff3 is unknown: use one of diff, diff_v2, gated, dex, same"),
        ({}, Conversion(lambda_init=0.3), "leave lambda_init out"),
        ({}, Conversion(init="open"), "use second=random, or init=mirror"),
        ({}, Conversion(to="diff_v2", sublayer_norm=True), "use sublayer_norm=false"),
        ({}, Conversion(lambda_bias=-3.0), "leave lambda_bias out"),
        ({}, Conversion(to="same", heads="split"), "leave out heads"),
        ({}, Conversion(to="dex", init="mirror"), "leave out init"),
        ({"n_head": 5, "d_model": 40}, Conversion(heads="split"), "n_head=5 .* is odd: use heads=double"),
        ({"baseline": BaselineConfig(head_norm="affine")}, Conversion(), "convert a baseline with head_norm=none"),
        ({"baseline": BaselineConfig(qk_norm="all")}, Conversion(), "qk_norm=none or head"),
        ({"baseline": BaselineConfig(qk_norm="head")}, Conversion(to="diff_v2"), "use to=diff"),
    ],
)
def test_sources_that_cannot_be_converted_are_refused(cfg: dict, how: Conversion, says: str) -> None:
    """And options that exclude each other."""
    with pytest.raises(ValueError, match=says):
        how.check()
        converted_config(DecoderConfig(**cfg), how)
