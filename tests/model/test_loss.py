"""The loss of the output head: equal to that of whole logits, which it never makes."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model import loss
from model.loss import linear_cross_entropy

needs_compiler = pytest.mark.skipif(loss._missing(), reason="no C++ compiler with OpenMP")


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that any operation made, and how many of that size were in memory at once."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.at_once, self.made = 0, 0, []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        results = operation(*args, **(kwargs or {}))
        made = [x for x in (results if isinstance(results, (tuple, list)) else (results,)) if isinstance(x, Tensor)]
        self.elements = max(self.elements, *(x.numel() for x in made), 0)
        self.made = [x for x in self.made if x() is not None] + [weakref.ref(x) for x in made]
        alive = {x().data_ptr() for x in self.made if x().numel() == self.elements}
        self.at_once = max(self.at_once, len(alive))
        return results


@pytest.fixture(params=("torch", pytest.param("kernel", marks=needs_compiler)))
def inputs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor, Tensor]:
    """For torch's operations, which a GPU and a machine without a compiler use, and for the C++ kernel."""
    monkeypatch.setattr(loss, "LOGITS", 1000)
    if request.param == "torch":
        monkeypatch.setattr(loss, "KERNELS", {})
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(203, 32, generator=generator), 0.3 * torch.randn(100, 32, generator=generator)
    targets = torch.randint(100, (203,), generator=generator)
    targets[::5] = loss.IGNORED
    return x.requires_grad_(), weight.requires_grad_(), targets


@pytest.mark.parametrize(("half", "tolerance"), ((False, 1e-5), (True, 5e-3)))
def test_it_is_that_of_whole_logits(half: bool, tolerance: float, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    """Values and gradients; in bfloat16 100 ids are padded to 128, and gradients agree to its precision."""
    x, weight, targets = inputs
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        want = F.cross_entropy(F.linear(x, weight).float(), targets)
        got = linear_cross_entropy(*inputs)
        with torch.no_grad():
            torch.testing.assert_close(linear_cross_entropy(*inputs), want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    for one, other in zip(*(torch.autograd.grad(3 * each, (x, weight)) for each in (got, want)), strict=True):
        assert (one - other).norm() < tolerance * other.norm()


def test_certain_and_hopeless_predictions_have_finite_losses() -> None:
    """Of logits 2,000 apart: log(0) of the probability would be infinite."""
    x, weight = torch.tensor([[1.0]]), torch.tensor([[1000.0], [-1000.0]])
    assert linear_cross_entropy(x, weight, torch.tensor([0])).item() == 0
    assert linear_cross_entropy(x, weight, torch.tensor([1])).item() == 2000


@pytest.mark.parametrize(("wrong", "half"), ((-1, False), (100, False), (105, True)))
def test_a_target_outside_of_the_vocabulary_fails(wrong: int, half: bool, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    """In half precision the head is padded to 128 logits, of which the last 28 are no tokens."""
    x, weight, targets = inputs
    targets[3] = wrong
    for leaf in (x, x.detach()):  # with and without gradients
        with torch.autocast("cpu", torch.bfloat16, half), pytest.raises((RuntimeError, IndexError), match="out of bounds"):
            linear_cross_entropy(leaf, weight.detach(), targets)


def test_targets_of_another_type_or_number_are_refused() -> None:
    for targets, says in ((torch.zeros(4, dtype=torch.int32), "int32 .4,."), (torch.zeros(2).long(), "int64 .2,.")):
        with pytest.raises(ValueError, match=f"the targets are torch.{says}: give int64 numbers, one for each of the 4 rows"):
            linear_cross_entropy(torch.randn(4, 8, requires_grad=True), torch.randn(50, 8), targets)


def test_no_tensor_is_as_large_as_the_logits(inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight = (each[:, :4].detach().requires_grad_() for each in inputs[:2])  # smaller than a piece's logits
    with Largest() as largest:
        linear_cross_entropy(x, weight, inputs[2]).backward()
    assert largest.at_once == 2  # the logits and the probabilities of one piece
    (piece, _), *_ = loss._pieces(x, weight, inputs[2])
    assert largest.elements == len(piece) * 100 < 203 * 100 / 7


def test_a_second_derivative_is_refused_and_compiling_keeps_one_graph(inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    """The gradients are made in the forward pass: for autograd they would be constants, and their derivatives zero."""
    x, weight, targets = inputs
    of_x = lambda x: linear_cross_entropy(x, weight.detach(), targets)  # noqa: E731
    (grad,) = torch.autograd.grad(of_x(x), x, create_graph=True)
    torch.testing.assert_close(torch.func.grad(of_x)(x.detach()), grad)
    with pytest.raises(ValueError, match="differentiated again: use model.backend=math"):
        grad.sum().backward()
    with pytest.raises(ValueError, match="differentiated again"):
        torch.func.jacrev(torch.func.grad(of_x))(x.detach())
    if loss.KERNELS:  # the next test compiles what runs without them
        compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
        assert torch.equal(torch.autograd.grad(compiled(*inputs), x)[0], grad)


@pytest.mark.parametrize("inputs", ("torch",), indirect=True)
def test_compiled_without_the_kernel_it_has_the_same_bits(
    inputs: tuple[Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA. The gradient of the logits is then made without scatter_, which would cost a pass of its own."""
    monkeypatch.setattr(loss, "_missing", lambda: "no compiler")
    x, weight, targets = inputs
    x, weight = (tensor.detach().bfloat16().requires_grad_() for tensor in (x, weight))
    results = []
    for call in (linear_cross_entropy, torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")):
        total = call(x, weight, targets)
        results.append([total.detach(), *torch.autograd.grad(total, (x, weight))])
    torch.testing.assert_close(*results, rtol=0, atol=0)


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "tolerance"), ((torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 4e-3)), ids=("64", "32", "16")
)
@pytest.mark.parametrize("width", (1, 15, 16, 17, 4097))
def test_the_kernel_equals_the_formula(width: int, dtype: torch.dtype, tolerance: float) -> None:
    """Against float64, with columns behind the vocabulary, which count for nothing, and for any number of threads."""
    generator = torch.Generator().manual_seed(width)
    logits = (4 * torch.randn(37, width + 7, generator=generator)).to(dtype)
    targets = torch.randint(width, (37,), generator=generator)
    targets[::4] = loss.IGNORED
    exact = logits[:, :width].double().requires_grad_()
    want = F.cross_entropy(exact, targets, reduction="none")
    want.sum().backward()
    results = []
    for threads in (3, torch.get_num_threads()):
        torch.set_num_threads(threads)
        results.append(loss.CROSS_ENTROPY(logits, targets, width))
    (losses, grad), again = results
    assert torch.equal(losses, again[0]) and torch.equal(grad, again[1])
    assert losses.dtype == loss.KERNELS[dtype] and grad.dtype == dtype
    close = {"rtol": 1e-13, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 2e-6, "atol": 2e-6}
    torch.testing.assert_close(losses.double(), want, **close)
    assert (grad[:, :width].double() - exact.grad).abs().max() < tolerance
    assert not grad[:, width:].any() and not grad[::4].any() and not losses[::4].any()


@needs_compiler
def test_the_kernel_passes_on_what_is_not_finite() -> None:
    """So that training sees a model that has diverged."""
    logits = torch.zeros(3, 40)
    logits[1, 33], logits[2, 33] = float("nan"), float("inf")
    losses, grad = loss.CROSS_ENTROPY(logits, torch.tensor([3, 3, 3]), 40)
    assert losses.isfinite().tolist() == grad.isfinite().all(1).tolist() == [True, False, False]


def test_a_micro_batch_without_scored_targets_adds_no_gradient() -> None:
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    total = loss.linear_cross_entropy(x, weight, torch.full((6,), loss.IGNORED))
    total.backward()
    assert total.isnan() and not x.grad.any() and not weight.grad.any()
