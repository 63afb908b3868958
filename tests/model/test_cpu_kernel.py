"""The C++ kernel: exact on awkward shapes, in every dtype; how it is compiled, kept and refused."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from model import loss, native
from model.attention import reference
from model.attention.baseline import BaselineAttention
from model.attention.kernels import cpu

pytestmark = pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))

# B, key/value heads, query heads of each, T, d, dv, key sets (or keys of a head); blocks have 24 rows
SHAPES = [
    (1, 1, 1, 1, 1, 1, 1), (2, 3, 1, 2, 7, 5, 1), (1, 2, 3, 23, 16, 32, 2), (2, 1, 2, 25, 20, 40, 1), (1, 2, 1, 72, 33, 65, 2),
    (2, 1, 1, 73, 64, 128, 2), (1, 1, 2, 145, 128, 256, 1),
]  # fmt: skip


def union(shape: tuple[int, ...], dtype: torch.dtype = torch.float64, scale: float = 1.0) -> list[Tensor]:
    """q, keys, values, and the gradient of the output. Positions lie before heads in memory, as in a model."""
    B, K, G, T, d, dv, n = shape
    generator = torch.Generator().manual_seed(sum(shape))
    sizes = [(K * G, d), *[(K, d)] * n, *[(K, dv)] * n, (K * G, dv)]
    made = [torch.randn(B, T, H, width, generator=generator, dtype=torch.float64) * scale for H, width in sizes]
    return [x.to(dtype).transpose(1, 2).requires_grad_() for x in made]


def difference(shape: tuple[int, ...], dtype: torch.dtype = torch.float64, scale: float = 1.0) -> list[Tensor]:
    """q, k, v, lam, and the gradient of the output."""
    B, K, G, T, d, dv, keys = shape
    generator = torch.Generator().manual_seed(sum(shape))
    sizes = [(B, K * G, 2, T, d), (B, K, keys, T, d), (B, K, T, dv), (B, K * G, T, 1), (B, K * G, T, dv)]
    made = [torch.randn(size, generator=generator, dtype=torch.float64) * scale for size in sizes]
    return [x.to(dtype if i != 3 or dtype == torch.float64 else torch.float32).requires_grad_() for i, x in enumerate(made)]


def run(inputs: list[Tensor]) -> list[Tensor]:
    """The kernel's output and gradients."""
    *inputs, grad = inputs
    if inputs[0].dim() == 5:
        out = cpu.attend_diff(*inputs)
    else:
        n = len(inputs) // 2
        out = cpu.attend(inputs[0], inputs[1 : 1 + n], inputs[1 + n :])
    return [out, *torch.autograd.grad(out, inputs, grad)]


def exact(inputs: list[Tensor]) -> list[Tensor]:
    """The N x N formulas in float64 for the same numbers."""
    *inputs, grad = [x.detach().double().requires_grad_() for x in inputs]
    T, n, h = inputs[0].shape[-2], len(inputs) // 2, inputs[0].shape[1]
    see, whole = (torch.ones(1, 1, T, T, dtype=torch.bool).tril(), [x.repeat_interleave(h // x.shape[1], 1) for x in inputs])
    if inputs[0].dim() == 5:
        out = reference.attend_diff(whole[0], whole[1].expand(-1, -1, 2, -1, -1), *whole[2:], see)
    else:
        keys, values = torch.cat(whole[1 : 1 + n], -2), torch.cat(whole[1 + n :], -2)
        out = reference.attend(whole[0], keys, values, see.repeat(1, 1, 1, n))
    return [out, *torch.autograd.grad(out, inputs, grad)]


@pytest.mark.parametrize(
    "inputs", [make(shape) for make in (union, difference) for shape in SHAPES], ids=lambda x: str(list(x[0].shape))
)
def test_in_float64_it_is_the_formula(inputs: list[Tensor]) -> None:
    for got, want in zip(run(inputs), exact(inputs), strict=True):
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("dtype", "tolerance", "scale"), ((torch.float32, 1e-6, 6.0), (torch.bfloat16, 2**-9, 0.1)))
def test_other_dtypes_are_rounded_once(dtype: torch.dtype, tolerance: float, scale: float) -> None:
    """In relative norm: bfloat16 costs what rounding an exact result costs, at most half of its last digit's 2^-8.

    The scores of scale 6 are of the order of 400: maps with one visible key.
    """
    for inputs in (union((2, 2, 2, 75, 32, 48, 2), dtype, scale), difference((2, 2, 2, 75, 32, 48, 2), dtype, scale)):
        for got, want in zip(run(inputs), exact(inputs), strict=True):
            error = (got.double() - want).norm() / want.norm()
            # The error of an exponential grows with its argument.
            assert error < tolerance * max(1, scale), (dtype, scale, list(got.shape))


def test_threads_change_no_bit() -> None:
    inputs, threads = difference((3, 2, 1, 75, 16, 32, 2), torch.float32), torch.get_num_threads()
    results = []
    for count in (2, 5, threads):
        torch.set_num_threads(count)
        results.append(run(inputs))
    assert all(torch.equal(one, other) for each in results for one, other in zip(each, results[0], strict=True))


def test_what_is_not_a_number_reaches_the_rows_that_see_it() -> None:
    for wrong in (float("nan"), float("inf")):
        q, k, v, _ = (x.detach() for x in union((1, 1, 1, 40, 16, 16, 1), torch.float32))
        k[0, 0, 37] = wrong
        out = cpu.attend(q.abs(), [k], [v])[0, 0]
        assert out[:37].isfinite().all() and out[37:].isnan().all()


@pytest.mark.parametrize("inputs", (union((1, 2, 1, 5, 8, 8, 1)), difference((1, 2, 1, 5, 8, 8, 2))), ids=("union", "diff"))
def test_a_second_derivative_is_refused(inputs: list[Tensor]) -> None:
    """The backward is an operator without a derivative: autograd would take its result for a constant."""
    *inputs, grad = inputs
    call = cpu.attend_diff if inputs[0].dim() == 5 else lambda q, k, v: cpu.attend(q, [k], [v])
    (dq,) = torch.autograd.grad(call(*inputs), inputs[0], grad, create_graph=True)
    with pytest.raises(ValueError, match="use model.backend=math"):
        dq.sum().backward()
    of_q = lambda q: call(q, *(x.detach() for x in inputs[1:])).square().sum()  # noqa: E731
    with pytest.raises(ValueError, match="use model.backend=math"):
        torch.func.jacrev(torch.func.grad(of_q))(inputs[0].detach())


def test_tensors_of_several_dtypes_or_shapes_are_not_read_as_if_they_fitted() -> None:
    q = torch.randn(2, 4, 8, 16)
    for keys, values in ((q[:1], q[:1]), (q[:, :2], q[:, :1]), (q, q[:, :, :3]), (q[..., :8], q), (q, q.bfloat16())):
        with pytest.raises(ValueError, match="do not fit each other in shape or dtype .q torch.float32"):
            cpu.attend(q, [keys], [values])
    # A norm in float32 makes such tensors under autocast. SDPA casts them.
    outputs = []
    for backend in ("auto", "math"):
        module = BaselineAttention(d_model=32, n_head=4, qk_norm=lambda width: Widening(), backend=backend)
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(module(torch.linspace(-1, 1, 2 * 9 * 32).view(2, 9, 32)))
    torch.testing.assert_close(*outputs, atol=1e-2, rtol=0)


class Widening(torch.nn.Module):
    """As the norm of transformers' Llama: a weight in float32 makes the product float32."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.ones(x.shape[-1])


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder and nothing loaded, as at the first use."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield tmp_path / "attention-noise"
    monkeypatch.undo()
    forget()


def forget() -> None:
    native.failure.cache_clear()
    native.library.cache_clear()


def test_it_is_compiled_once_and_kept_and_again_where_it_is_broken(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_, made = native._compile, []
    monkeypatch.setattr(native, "_compile", lambda *given: made.append(given) or compile_(*given))
    assert native.failure(loss.SOURCE) is None
    (kept,) = fresh.iterdir()
    forget()
    assert native.failure(loss.SOURCE) is None and list(fresh.iterdir()) == [kept] and len(made) == 1
    assert native.library(loss.SOURCE)._name == str(kept)  # the folder for temporary files may be mounted noexec
    broken = fresh / "other" / "attention-noise" / kept.name  # in a new folder: this process has loaded the first one
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"cut off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh / "other"))
    forget()
    assert native.failure(loss.SOURCE) is None and broken.stat().st_size > 1000
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept))  # a file where the folder should be costs only the time
    forget()
    assert native.failure(loss.SOURCE) is None


@pytest.mark.parametrize(("compiler", "says"), (("/nowhere/g++", "No such file"), ("false", "returned non-zero exit status 1")))
def test_without_a_compiler_auto_takes_torchs_kernel_and_the_name_is_refused(
    compiler: str, says: str, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    module, x = BaselineAttention(d_model=32, n_head=4), torch.randn(2, 9, 32)
    torch.testing.assert_close(module(x), BaselineAttention(d_model=32, n_head=4, backend="math")(x))
    with pytest.raises(ValueError, match=f"{says}.*install g.., or use model.backend=sdpa .in Python: backend='sdpa'.$"):
        BaselineAttention(d_model=32, n_head=4, backend="cpu")
    assert not fresh.exists()
