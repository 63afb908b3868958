"""The fused differential kernel against a float64 computation of its own; in Triton's interpreter where there is no GPU."""

import functools
import importlib.util
import itertools
import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from model.attention.kernels import interpreted, unavailable
from model.attention.mask import CAUSAL, Mask
from model.decoder import Decoder
from tests.conftest import run_command
from tests.model.test_backends import masks, see_of
from tests.variants import config

pytest.importorskip("triton", reason="the fused kernel needs the package triton")
if unavailable(64, 128):
    pytest.skip("the fused kernel needs a CUDA GPU or TRITON_INTERPRET=1", allow_module_level=True)

import triton.language as tl  # noqa: E402

from model.attention.kernels import diff  # noqa: E402
from model.attention.kernels.diff import attend_diff, blocks  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MASKS = ("causal", "bidirectional", "window", "documents", "padding", "padding+window")
GROUPS, WIDTHS, VERSIONS = (1, 2, 4), (32, 48, 64, 128), ("V1", "V2")
# Float32 sums of up to 500 products, in another order: their error is some tens of the unit roundoff, 6e-8.
FLOAT32 = 1e-5


class Case(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    lam: Tensor
    grad: Tensor


def draw(
    T: int, S: int, group: int, d: int, version: str, *, B: int = 2, hkv: int = 1, dv: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Case:  # fmt: skip
    """V1: own keys per map, values of width 2d, one lam. V2: shared keys, values of width d, a lam per token and head."""
    generator = torch.Generator().manual_seed(T + 7 * S + 31 * group + d)
    h, C = group * hkv, 2 if version == "V1" else 1
    dv = dv or d * C

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    lam = torch.tensor(0.63) if version == "V1" else torch.rand(B, h, T, 1, generator=generator)
    return Case(normal(B, h, 2, T, d), normal(B, hkv, C, S, d), normal(B, hkv, S, dv), lam.to(DEVICE), normal(B, h, T, dv))


def view(name: str, B: int, T: int, S: int) -> tuple[Mask, Tensor]:
    """A mask, and who sees whom: bool (B, T, S)."""
    with torch.device(DEVICE):
        mask = masks(B, S, max(1, S // 4))[name]
        return mask, see_of(mask, B, T, S)


def expected(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, see: Tensor) -> Tensor:
    """(softmax(q1 k1' / sqrt d) - lam softmax(q2 k2' / sqrt d)) v with every pair spelled out; a blind row is zero."""
    owner = torch.arange(q.shape[1], device=q.device) // (q.shape[1] // k.shape[1])
    k = k[:, owner].expand(-1, -1, 2, -1, -1)
    mass = (torch.einsum("bhctd,bhcsd->bhcts", q, k) / math.sqrt(q.shape[-1])).exp() * see[:, None, None]
    total = mass.sum(-1, keepdim=True)
    maps = mass / torch.where(total == 0, 1.0, total)
    return torch.einsum("bhts,bhsv->bhtv", maps[:, :, 0] - lam * maps[:, :, 1], v[:, owner])


def leaves(case: Case, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [x.detach().to(dtype or x.dtype).requires_grad_() for x in case[:4]]


def compare(case: Case, mask: Mask, see: Tensor, tolerance: float) -> None:
    """Output and all gradients, relative to the largest entry, or to 1 (the inputs') where they cancel to less."""
    inputs = leaves(case)
    out = attend_diff(*inputs, mask)
    got = (out, *torch.autograd.grad(out, inputs, case.grad))
    exact = leaves(case, torch.float64)
    rows = exact[3].expand(*out.shape[:-1], 1)
    true = expected(*exact[:3], rows, see)
    want = (true, *torch.autograd.grad(true, exact, case.grad.double(), retain_graph=True))
    row_grads = torch.autograd.grad(true, rows, case.grad.double())[0]
    for name, one, other, leaf in zip(("out", "q", "k", "v", "lam"), got, want, (case.v, *case[:4]), strict=True):
        assert one.dtype == leaf.dtype and one.shape == other.shape, name
        scale = max(1.0, other.abs().max().item())
        if name == "lam" and one.dim() == 0:  # a sum over all rows that may cancel: its error is that of its terms
            scale = max(1.0, row_grads.abs().sum().item())
        error = (one.double() - other).abs().max().item()
        assert error <= tolerance * scale, f"{name}: {error:.2e} > {tolerance:.0e} * {scale:.3g}"
    blind = ~see.any(-1)  # (B, T)
    assert not got[0].transpose(1, 2)[blind].any() and not got[1].permute(0, 3, 1, 2, 4)[blind].any()


PRODUCT = itertools.product(enumerate(VERSIONS), enumerate(WIDTHS), enumerate(GROUPS), enumerate(MASKS))
# Every pair of values of two factors, and of each version and mask; the whole product (144) on a GPU, where it takes seconds.
SHORT = [
    (version, d, group, name)
    for (m, version), (i, d), (j, group), (n, name) in PRODUCT
    if not interpreted() or ((i + j + n) % len(GROUPS) == 0 and (i + n // 3 + m) % 2 == 0)
]


@pytest.mark.parametrize(("version", "d", "group", "name"), SHORT)
def test_every_mask_width_and_group_at_63(version: str, d: int, group: int, name: str) -> None:
    compare(draw(63, 63, group, d, version, B=1), *view(name, 1, 63, 63), FLOAT32)


@pytest.mark.parametrize("name", MASKS)
def test_one_query(name: str) -> None:
    """T = 1 with itself as its only key, and with earlier ones as in a decoding step."""
    for version, (d, group, S) in itertools.product(VERSIONS, ((48, 1, 1), (64, 2, 70))):
        compare(draw(1, S, group, d, version, B=1), *view(name, 1, 1, S), FLOAT32)


# Each value of each factor stands here, each mask with both versions; the interpreter runs the first three, half as long.
# Last: how many keys more or less than that; more of them are earlier than all queries.
LONG = (
    ("V1", 32, 1, "causal", 0), ("V2", 128, 1, "padding+window", 37), ("V1", 48, 2, "documents", -100),
    ("V2", 32, 2, "documents", 37), ("V1", 32, 2, "padding", 0), ("V2", 64, 1, "bidirectional", 0),
    ("V2", 48, 2, "causal", 37), ("V1", 64, 1, "bidirectional", 37), ("V1", 64, 4, "window", 0),
    ("V1", 128, 1, "window", 37), ("V2", 64, 1, "padding", 37), ("V1", 128, 1, "padding+window", 37),
)  # fmt: skip


@pytest.mark.parametrize(("version", "d", "group", "name", "more"), LONG[:3] if interpreted() else LONG)
def test_long(version: str, d: int, group: int, name: str, more: int) -> None:
    S = (260 if interpreted() else 500) + more
    T = S - max(0, more)
    compare(draw(T, S, group, d, version, B=1), *view(name, 1, T, S), FLOAT32)


@pytest.mark.parametrize("name", ("causal", "padding+window") if interpreted() else MASKS)
def test_block_boundaries(name: str) -> None:
    """Lengths just under, at and just over a block, with and without earlier keys."""
    sizes = [blocks(torch.device(DEVICE), 32, 64, torch.float32, backward) for backward in (False, True)]
    for edge in sorted({edge for tile in sizes for edge in (tile.BM, tile.BN)}):
        for T, S in ((edge - 1, edge - 1), (edge, edge), (edge + 1, edge + 1), (edge - 3, 2 * edge + 1)):
            compare(draw(T, S, 1, 32, "V1", B=1), *view(name, 1, T, S), FLOAT32)


@pytest.mark.parametrize("window", (1, 64, 65, 1000))
def test_windows(window: int) -> None:
    """Down to itself alone and beyond the length, one-sided and two-sided."""
    for mask in (Mask(window=window), Mask(causal=False, window=window)):
        compare(draw(110, 150, 1, 32, "V2", B=1), mask, see_of(mask, 1, 110, 150).to(DEVICE), FLOAT32)


@pytest.mark.parametrize(("d", "dv"), ((1, 2), (17, 128), (80, 16), (128, 256)))
def test_any_width(d: int, dv: int) -> None:
    for version in VERSIONS:
        compare(draw(20, 20, 1, d, version, dv=dv), *view("causal", 2, 20, 20), FLOAT32)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize(("version", "d", "name"), (("V1", 64, "causal"), ("V2", 128, "padding"), ("V1", 48, "window")))
def test_half_precision(version: str, d: int, name: str, dtype: torch.dtype) -> None:
    """The maps, dS, the outputs and through them delta are rounded to the dtype: together an epsilon of the largest entry.

    Two for bfloat16 in the interpreter, which truncates where a GPU rounds to nearest.
    """
    tolerance = torch.finfo(dtype).eps * (2 if dtype == torch.bfloat16 and interpreted() else 1)
    compare(draw(150, 150, 2, d, version, B=1, dtype=dtype), *view(name, 1, 150, 150), tolerance)


GPU_TILES = [
    ((9, 0), "V1", 64, torch.float16), ((9, 0), "V1", 128, torch.float16), ((9, 0), "V2", 64, torch.float16),
    ((8, 0), "V1", 32, torch.float16), ((8, 0), "V2", 128, torch.float16), ((8, 9), "V1", 128, torch.float16),
    ((9, 0), "V1", 32, torch.float32), ((9, 0), "V2", 128, torch.float32),
]  # fmt: skip


@pytest.mark.parametrize(("card", "version", "d", "dtype"), GPU_TILES)
def test_tiles_of_a_gpu(
    card: tuple[int, int], version: str, d: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter's tiles are its own: the same sums with those of the table."""
    monkeypatch.setattr(diff, "blocks", lambda device, *shape, **options: diff.table(*shape, **options, card=card))
    tolerance = FLOAT32 if dtype == torch.float32 else torch.finfo(dtype).eps
    compare(draw(67, 100, 1, d, version, B=1, dtype=dtype), *view("window", 1, 67, 100), tolerance)


def test_layouts() -> None:
    """Heads inside time, gaps, expanded heads, a transposed last dimension, an expanded gradient: only strides differ."""
    case, (mask, see) = draw(40, 40, 2, 32, "V1", hkv=2), view("causal", 2, 40, 40)
    q = case.q.permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4)
    k = torch.stack((case.k, case.k), -1)[..., 0]  # stride 2 in the last dimension
    v = case.v.mT.contiguous().mT
    grad = case.grad[:1, :1, :1, :1].expand_as(case.grad)
    assert not any(x.is_contiguous() for x in (q, k, v, grad))
    compare(Case(q, k, v, case.lam, grad), mask, see, FLOAT32)
    shared = Case(case.q, case.k[:, :1].expand_as(case.k), case.v[:1].expand_as(case.v), case.lam, case.grad)
    compare(shared, mask, see, FLOAT32)


@pytest.mark.parametrize("shape", ((), (1,), (2, 1, 1), (2, 1, 9, 1), (2, 2, 9, 1)))
def test_lambda_of_any_shape(shape: tuple[int, ...]) -> None:
    case, (mask, see) = draw(9, 9, 2, 16, "V1"), view("causal", 2, 9, 9)
    compare(case._replace(lam=torch.linspace(-0.5, 1.5, math.prod(shape), device=DEVICE).view(shape)), mask, see, FLOAT32)
    low = torch.full(shape, 0.5, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    attend_diff(*case[:3], low, mask).sum().backward()
    assert low.grad.shape == shape and low.grad.dtype == torch.bfloat16


def test_the_future_is_not_read() -> None:
    """Bit for bit: neither the output nor a gradient of an early row depends on later positions."""
    case = draw(130, 130, 2, 32, "V1", B=1)
    early, later = 70, [x.clone() for x in case[:3]]
    for x in later:
        x[..., early:, :] = 10.0
    outs, grads = [], []
    for inputs in (case[:3], later):
        inputs = [x.requires_grad_() for x in inputs]
        out = attend_diff(*inputs, case.lam, CAUSAL)[..., :early, :]
        outs.append(out)
        grads.append(torch.autograd.grad(out.square().sum(), inputs[1:]))  # not q: its sum has no fixed order on a GPU
    assert torch.equal(*outs)
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other) and not one[..., early:, :].any() and one[..., :early, :].any()


def test_torch_knows_the_operators() -> None:
    case, (mask, _) = draw(3, 5, 2, 16, "V2", B=1), view("padding+window", 1, 3, 5)
    rules = (*diff._ids(mask, 1, 3, 5), mask.causal, mask.window)
    inputs = leaves(case)
    torch.library.opcheck(diff._forward, (*inputs, *rules))
    saved = diff._forward(*case[:4], *rules)
    torch.library.opcheck(diff._backward, (case.grad, *case[:4], *rules[:2], *saved, *rules[2:]))


@pytest.mark.skipif(not interpreted(), reason="counts the products that the interpreter runs")
@pytest.mark.parametrize(("version", "pairs"), (("V1", 6), ("V2", 4)))
def test_blocks_of_the_future_are_skipped(version: str, pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiplications per query-key pair in units of d. What a pair costs on a GPU is counted in test_kernels_compiled.py."""
    d, T, counts, real = 64, 256, [], tl.dot

    @functools.wraps(real)
    def dot(a: tl.tensor, b: tl.tensor, *args: object, **options: object) -> tl.tensor:
        counts.append(math.prod(int(n) for n in (*a.shape, b.shape[1])))
        return real(a, b, *args, **options)

    monkeypatch.setattr(tl, "dot", dot)
    case = draw(T, T, 1, d, version, B=1)
    attend_diff(*case[:4], Mask(causal=False))
    assert sum(counts) == pairs * T * T * d
    counts.clear()
    attend_diff(*case[:4], CAUSAL)
    tile = blocks(case.q.device, d, case.v.shape[-1], torch.float32, backward=False)
    assert sum(counts) <= (T * T / 2 + T * max(tile.BM, tile.BN) / 2) * pairs * d


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    case = draw(4, 4, 1, 16, "V1")
    with pytest.raises(ValueError, match="not float64: use model.backend=math$"):
        attend_diff(*(x.double() for x in case[:3]), case.lam, CAUSAL)
    with pytest.raises(ValueError, match="not bfloat16, float32: cast them"):
        attend_diff(case.q, case.k, case.v.bfloat16(), case.lam, CAUSAL)
    with pytest.raises(ValueError, match="not d=160, dv=320: use model.backend=sdpa"):
        attend_diff(*draw(4, 4, 1, 160, "V1")[:4], CAUSAL)
    assert unavailable(128, 256) is None
    inputs = leaves(case)
    (dq,) = torch.autograd.grad(attend_diff(*inputs, CAUSAL), inputs[0], case.grad, create_graph=True)
    with pytest.raises(ValueError, match="cannot be differentiated again: use model.backend=math"):
        dq.sum().backward()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "use model.backend=sdpa" in unavailable(64, 64)
    with pytest.raises(ValueError, match="use model.backend=sdpa"):
        Decoder(config("diff", backend="fused"))
    Decoder(config("baseline", backend="fused"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install triton" in unavailable(64, 64)


def test_the_model_imports_without_triton() -> None:
    """And without torch's compiler."""
    code = (
        "import sys; sys.modules['triton'] = None; import model.decoder; assert 'torch._dynamo' not in sys.modules; "
        "from model.attention.kernels import unavailable; print(unavailable(64, 128))"
    )
    done = run_command("-c", code)
    assert done.returncode == 0 and "pip install triton" in done.stdout, done.stderr
