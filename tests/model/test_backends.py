"""The facade: which kernel it calls, what masks and caches hold."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from model.attention import backends, base, flex, reference, sdpa
from model.attention.mask import CAUSAL, Mask
from model.cache import KVCache
from tests.variants import NATIVE, randomized


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list:
    """The shapes and options of every call of SDPA from here on."""
    calls, real = [], F.scaled_dot_product_attention

    def record(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
        calls.append((q.shape, k.shape, v.shape, options))
        return real(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    return calls


@pytest.mark.parametrize(("backend", "calls"), (("sdpa", 1), ("one_call", 1), ("two_calls", 2), ("four_calls", 4)))
def test_wide_values_stay_on_the_fast_kernel(backend: str, calls: int, recorded: list) -> None:
    """The calls of the route's name, all widths equal but in two calls: others would drop SDPA to its slow CPU kernel."""
    run("diff", tensors("diff", 1, 9, 2, 16), CAUSAL, backend)
    assert len(recorded) == calls and max(v[-1] for _, _, v, _ in recorded) == (16 if calls == 4 else 32)
    for q, k, v, options in recorded:
        assert q == k and (q[-1] == v[-1] or calls == 2)
        assert options["is_causal"] and options["scale"] == 16**-0.5


OPERATIONS, LENGTHS, RATIOS, WIDTHS = ("attend", "diff", "diff_v2", "union"), (1, 63, 500), (1, 2, 4), (32, 48, 64)
# Every pair of values of two factors.
PAIRWISE = [
    (operation, T, RATIOS[(i + j) % 3], WIDTHS[(i + 2 * j) % 3])
    for (i, operation), (j, T) in itertools.product(enumerate(OPERATIONS), enumerate(LENGTHS))
]


def masks(B: int, S: int, window: int = 17) -> dict[str, Mask]:
    """Each rule alone and two together."""
    documents = torch.stack([torch.arange(S) * (3 + b) // S - 1 for b in range(B)])  # labels -1, 0, 1, ...
    keys = torch.ones(B, S, dtype=torch.bool)
    keys[0, : (S + 1) // 2] = False  # on the left: the first queries see nothing
    keys[-1, S - S // 5 :] = False  # on the right
    return {
        "causal": Mask(),
        "bidirectional": Mask(causal=False),
        "window": Mask(window=window),
        "documents": Mask(documents=documents),
        "padding": Mask(keys=keys),
        "padding+window": Mask(keys=keys, window=window),
    }


def see_of(mask: Mask, B: int, T: int, S: int) -> torch.Tensor:
    """Who sees whom, by the words of Mask's docstring: bool (B, T, S) for the last T of S positions."""
    t, s = torch.arange(S - T, S)[:, None], torch.arange(S)
    see = ((s <= t) | (not mask.causal)).expand(B, T, S)
    if mask.window is not None:
        see = see & ((t - s).abs() < mask.window)
    if mask.documents is not None:
        see = see & (mask.documents[:, S - T :, None] == mask.documents[:, None])
    return see if mask.keys is None else see & mask.keys[:, None]


def tensors(operation: str, B: int, T: int, ratio: int, d: int) -> list[torch.Tensor]:
    """Inputs of an operation with one key/value head, float32, that require gradients."""
    shapes = {
        "attend": [(B, ratio, T, d), (B, 1, T, d), (B, 1, T, d)],
        "diff": [(B, ratio, 2, T, d), (B, 1, 2, T, d), (B, 1, T, 2 * d), ()],
        "diff_v2": [(B, ratio, 2, T, d), (B, 1, 1, T, d), (B, 1, T, d), (B, ratio, T, 1)],
        "union": [(B, ratio, T, d), *[(B, 1, T, d)] * 2, *[(B, 1, T, d)] * 2],
    }
    generator = torch.Generator().manual_seed(T + ratio + d)
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes[operation]]


def run(operation: str, inputs: list[torch.Tensor], mask: Mask, backend: str) -> torch.Tensor:
    if operation == "union":
        return backends.attend_union(inputs[0], inputs[1:3], inputs[3:], mask, backend)
    return {"attend": backends.attend}.get(operation, backends.attend_diff)(*inputs, mask, backend)


def exact(operation: str, inputs: list[torch.Tensor], mask: Mask, T: int) -> torch.Tensor:
    """The N x N formulas in float64, on dense tensors with repeated heads."""
    q, h, see = inputs[0], inputs[0].shape[1], mask.dense(T, T, torch.device("cpu"))
    rest = [x.repeat_interleave(h, 1) if x.dim() > 3 and x.shape[1] == 1 else x for x in inputs[1:]]
    if operation == "union":
        return reference.attend(q, torch.cat(rest[:2], -2), torch.cat(rest[2:], -2), see.repeat(1, 1, 1, 2))
    return {"attend": reference.attend}.get(operation, reference.attend_diff)(q, *rest, see)


@pytest.mark.parametrize(("operation", "T", "ratio", "d"), PAIRWISE)
def test_backends_agree_with_the_float64_reference(operation: str, T: int, ratio: int, d: int) -> None:
    """Outputs and all gradients (lambda's too), every mask and route; the fused kernel has another file. flex: forward."""
    B = 1 if T == 500 else 2
    inputs = tensors(operation, B, T, ratio, d)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    for label, mask in masks(B, T).items():
        if T == 500 and label not in ("causal", "padding+window"):
            continue
        want = exact(operation, doubles, mask, T)
        want_grads = torch.autograd.grad(want.sin().sum(), doubles)
        for backend in ("math", *backends.ROUTES, *NATIVE, "auto"):  # on a CPU, sdpa is one_call
            got = run(operation, inputs, mask, backend)
            grads = torch.autograd.grad(got.sin().sum(), inputs)
            close(got, want, f"{backend}, {label}")
            for one, other in zip(grads, want_grads, strict=True):
                close(one, other, f"{backend}, {label}, gradient")
        if T == 63 and operation in ("diff", "union"):  # each shape is compiled
            with torch.no_grad():
                close(run(operation, inputs, mask, "flex"), want, f"flex, {label}")


def close(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Equal to float32's precision: 2e-5 of the largest entry, after sums of up to 500 x 128 products."""
    error, scale = (got.double() - want).abs().max().item(), max(1.0, want.abs().max().item())
    assert error < 2e-5 * scale, f"{what}: off by {error:.1e} at a scale of {scale:.1e}"


H100, A100, ADA = (9, 0), (8, 0), (8, 9)


@pytest.mark.parametrize(
    ("card", "dtype", "d", "dv", "want"),
    (
        (H100, torch.bfloat16, 64, 128, "two_calls"),  # cuDNN takes both widths
        (H100, torch.bfloat16, 128, 256, "four_calls"),  # nothing takes 256 beside 128
        (A100, torch.bfloat16, 64, 128, "four_calls"),  # flash takes one width
        (ADA, torch.float16, 64, 64, "two_calls"),
        ((12, 0), torch.bfloat16, 64, 128, "four_calls"),  # torch does not put cuDNN first there
        (H100, torch.bfloat16, 36, 72, "four_calls"),  # cuDNN and the memory-efficient kernel need multiples of 8
        (H100, torch.bfloat16, 36, 48, "one_call"),
        (A100, torch.bfloat16, 72, 96, "one_call"),  # halves of 48 are no width of 72 either
        (A100, torch.float32, 64, 128, "two_calls"),  # the memory-efficient kernel takes both
    ),
)
def test_the_route_that_auto_takes_on_a_card(
    card: tuple[int, int], dtype: torch.dtype, d: int, dv: int, want: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in (91501, 91500):  # an old cuDNN gets halves of the values
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        expected = "four_calls" if version == 91500 and card == H100 and dv == 128 else want
        assert backends.choose(card, dtype, d, dv, CAUSAL, 1024, 1024) == expected
        for label, mask in masks(2, 1024).items():
            if label not in ("causal", "bidirectional"):
                assert backends.choose(card, dtype, d, dv, mask, 1024, 1024) == ("flex" if dv <= 128 else expected), label
                assert backends.choose(card, dtype, d, dv, mask, 1000, 1000) == expected, label  # no block is whole
                assert backends.choose(card, dtype, d, dv, mask, 128, 1024) == expected, label  # cached keys
                assert backends.choose(card, dtype, 8, 16, mask, 1024, 1024) != "flex", label  # too narrow for it


@pytest.mark.parametrize(("B", "heads", "T"), ((2, 3, 40), (1, 1, 40), (2, 3, 1)))
def test_cudnns_output_lies_as_compiled_code_expects(B: int, heads: int, T: int) -> None:
    """dv != d, and V1's queries lie in time's order: the fake output beside the rule of sdp_utils.h of torch 2.11 and 2.13."""
    q = torch.empty(B, T, heads, 2, 16, device="meta", dtype=torch.bfloat16).permute(0, 2, 3, 1, 4)[:, :, 0]
    values = q.new_empty(B, heads, T, 32)
    out = torch.ops.aten._scaled_dot_product_cudnn_attention(q, q, values, None, True)[0]
    want, stride = {}, 1
    for dim in sorted(range(4), key=q.stride):
        want[dim], stride = stride, stride * values.shape[dim]
    assert all(out.stride(dim) == want[dim] for dim in range(4) if out.shape[dim] > 1)


def test_what_auto_takes_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = (
        *((dtype, CAUSAL, "cpu" if NATIVE else "one_call") for dtype in (torch.float32, torch.float64, torch.bfloat16)),
        (torch.float32, Mask(window=9), "one_call"),
        (torch.float16, CAUSAL, "one_call"),
    )
    for dtype, mask, want in cases:
        assert backends.choose(None, dtype, 64, 128, mask, 512, 512) == want
        assert backends.choose(None, dtype, 64, 128, mask, 1, 512) == "one_call"  # cached keys
    monkeypatch.setattr(backends.cpu, "missing", lambda: "no compiler")
    assert all(backends.choose(None, dtype, 64, 128, mask, 512, 512) == "one_call" for dtype, mask, _ in cases)


def test_the_block_mask_is_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = flex._blocks
    monkeypatch.setattr(flex, "_blocks", lambda *args: made.append(args) or real(*args))
    model = randomized("hybrid", backend="flex", n_layer=4)
    with torch.no_grad():
        model(torch.randint(0, 50, (2, 12)), documents=torch.zeros(2, 12, dtype=torch.long))
        assert len(made) == 1
        kept = Mask(window=4)
        for T in (5, 6, 7):  # one that is kept for many passes does not collect what it made for each
            model.blocks[0].attention(torch.zeros(1, T, 64, dtype=torch.float64), mask=kept)
    assert len(kept.block_masks) == 1


def test_block_masks_are_prepared_for_the_width_of_a_layers_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention takes widths from 16 on: two signals of width 8 are one product of width 16."""
    widths = []
    monkeypatch.setattr(base, "prepare_block_mask", lambda x, d, *others: widths.append(d))
    for name in ("integral", "baseline", "diff_v2"):
        randomized(name, head_dim=8, n_layer=1).blocks[0].attention.prepare(torch.zeros(1, 8, 64), CAUSAL)
    assert widths == [16, 8, 8]


@pytest.mark.parametrize(
    ("card", "dtype", "width", "merged"),
    (
        (A100, torch.bfloat16, 256, True),
        (A100, torch.bfloat16, 264, False),
        (A100, torch.float32, 64, False),
        ((7, 5), torch.float16, 64, False),
        (ADA, torch.bfloat16, 208, False),
        ((12, 0), torch.bfloat16, 256, True),
    ),
)
def test_a_union_calls_flash_itself_only_where_sdpa_would(
    card: tuple[int, int], dtype: torch.dtype, width: int, merged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meta tensors take the routes of a card."""
    calls = []
    monkeypatch.setattr(sdpa, "card", lambda: card)
    monkeypatch.setattr(sdpa, "_flash", lambda q, *rest: calls.append(1) or (q, q[..., 0].float()))
    q, *sets = (torch.empty(1, 2, 128, width, device="meta", dtype=dtype) for _ in range(5))
    assert backends.attend_union(q, sets[:2], sets[2:], CAUSAL).shape == q.shape
    assert len(calls) == 2 * merged


def test_an_eager_flex_is_compiled_for_more_shapes_than_torch_compiles_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    shapes, real = [], torch.compile
    compiler = lambda graph, inputs: shapes.append(inputs[0].shape) or graph  # noqa: E731
    monkeypatch.setattr(torch, "compile", lambda *args, **options: real(*args, **options, backend=compiler))
    torch._dynamo.reset()
    compiled, mask = flex._compiled.__wrapped__(flex_attention), Mask(window=9)
    with torch._dynamo.config.patch(recompile_limit=1):  # instead of 8, to save time
        for T in (5, 6, 7):
            q = torch.zeros(1, 1, T, 16)
            compiled(q, q, q, block_mask=flex._blocks(mask, 1, T, T, 1, q.device))
    assert len(shapes) == 3


def narrow_on_a_card() -> None:
    q = torch.empty(1, 2, 128, 8, device="meta")
    flex.attend(q, q, q, Mask(window=9))


def fewer_keys() -> None:
    q, k, v, lam = tensors("diff", 1, 8, 1, 32)
    backends.attend_diff(q, k[..., :5, :], v[..., :5, :], lam, Mask(causal=False), "fused")


def masked(**options: Any) -> Callable[[], object]:
    return lambda: run("diff", tensors("diff", 2, 9, 1, 32), Mask(**options), "sdpa")


@pytest.mark.parametrize(
    ("call", "says"),
    (
        (fewer_keys, "at least as many keys as queries: use backend=sdpa$"),
        (lambda: backends.check_backend("four_calls", 64, 128, 0.1, 2), "use backend=sdpa or attention_dropout=0$"),
        (lambda: run("attend", tensors("attend", 1, 8, 1, 32), CAUSAL, "flex"), "no backward on a CPU: use backend=sdpa$"),
        (narrow_on_a_card, "takes heads from width 16 on, on CUDA: use backend=sdpa$"),
        (masked(keys=torch.ones(2, 9)), "are bool"),
        (masked(documents=torch.zeros(2, 9)), "are integers"),
        (masked(documents=torch.zeros(2, 8, dtype=torch.long)), "one entry per key"),
        (masked(window=0), "window=1"),
        (lambda: randomized("diff")(torch.zeros(1, 6, dtype=torch.long), cache=KVCache(5)), "max_length=6"),
    ),
)
def test_what_cannot_be_computed_is_refused(call: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


def test_lambda_is_not_rounded_to_the_maps_precision() -> None:
    """Equal maps cancel to (1 - lambda) v: bfloat16 knows 1.00390625 and 1, and nothing between."""
    q, k, v, _ = (x.detach().bfloat16() for x in tensors("diff", 1, 8, 1, 32))
    q, k, v = q[:, :, :1].expand(-1, -1, 2, -1, -1), k[:, :, :1].expand(-1, -1, 2, -1, -1), torch.ones_like(v)
    for backend in ("math", "sdpa", *NATIVE):
        out = backends.attend_diff(q, k, v, torch.tensor(1 + 2**-9), CAUSAL, backend)
        torch.testing.assert_close(out, torch.full_like(out, -(2**-9)), rtol=0.02, atol=0, msg=backend)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("last", (1, 5))
def test_cached_queries_see_what_the_mask_says(operation: str, last: int) -> None:
    """The last of 12 positions alone give what they gave among all."""
    inputs = [x.detach() for x in tensors(operation, 2, 12, 2, 32)]
    for label, mask in masks(2, 12).items():
        if mask.causal:
            rest = [inputs[0][..., -last:, :], *inputs[1:]]
            if operation == "diff_v2":
                rest[3] = rest[3][:, :, -last:]
            for backend in ("math", "sdpa", *NATIVE, *(("flex",) if operation == "diff" and last == 5 else ())):
                whole = run(operation, inputs, mask, backend)
                close(run(operation, rest, mask, backend), whole[..., -last:, :].double(), f"{backend}, {label}")


@pytest.mark.parametrize("backend", ("auto", "sdpa", "flex"))
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_decoding_step_on_a_card_repeats_no_keys(
    operation: str, backend: str, recorded: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meta tensors take the routes of a card. flex would be compiled again for every length of the cache."""
    monkeypatch.setattr(backends, "card", lambda: A100)
    inputs = [x.detach().to("meta") for x in tensors(operation, 2, 256, 4, 32)]
    inputs[0] = inputs[0][..., -1:, :]
    inputs[-1] = inputs[-1][:, :, -1:] if operation == "diff_v2" else inputs[-1]
    for mask in (CAUSAL, Mask(window=9)):
        run(operation, inputs, mask, backend)
    assert [(q[1], k[1]) for q, k, _, _ in recorded] == [(1, 1)] * (4 if operation == "diff" else 2)


@pytest.mark.parametrize("widths", ((8, 16), (16, 8), (8, 8)))
def test_a_union_is_one_softmax_with_exact_gradients(widths: tuple[int, int]) -> None:
    d, dv = widths
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 2, 9, width) for width in (d, d, d, d, dv, dv, dv)]
    q, *sets = tensors = [torch.randn(s, dtype=torch.float64, generator=generator, requires_grad=True) for s in shapes]
    results = []
    for backend in ("math", "sdpa"):
        # aten's flash operators on a CPU are silently wrong for tensors whose last stride is not 1.
        rows, *each = [x.mT.contiguous().mT if backend == "sdpa" else x for x in tensors]
        out = backends.attend_union(rows, each[:3], each[3:], CAUSAL, backend)
        results.append([out, *torch.autograd.grad(out.mT.contiguous().mT.sin().sum(), tensors, retain_graph=True)])
    torch.testing.assert_close(*results, atol=1e-10, rtol=1e-7)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(ValueError, match="differentiated again: use model.backend=math"):
        dq.sum().backward()
