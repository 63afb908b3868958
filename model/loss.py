"""The cross-entropy of a linear output head, without all logits in memory at once."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from . import native

IGNORED = -100  # a target that is not scored, as torch has it
SOURCE = Path(__file__).with_suffix(".cpp")
KERNELS = {torch.bfloat16: torch.float32, torch.float32: torch.float32, torch.float64: torch.float64}  # of logits -> of losses
PIECES = 8  # maximum number of pieces of the tokens
LOGITS = 2**21  # minimum in a piece: smaller products are slow
ALIGNED = 64  # tensor cores take vocabularies in multiples of this


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats of the logits x weight' (N, V) at targets (N,) int64; x (N, D), weight (V, D).

    Under autocast the products have autocast's precision, the softmax is in float32. A target of -100 is not scored; without
    scored targets the result is NaN, and its gradients are 0. Gradients are computed together with the logits of a part of the
    tokens, so no product is computed twice (Hsu et al., Liger Kernel, arXiv 2410.10989, section 3.2).
    """
    if targets.dtype != torch.long or targets.shape != x.shape[:1]:
        wrong = f"the targets are {targets.dtype} {tuple(targets.shape)}"
        raise ValueError(f"{wrong}: give int64 numbers, one for each of the {len(x)} rows")
    wide = torch.promote_types(x.dtype, torch.float32)  # of the softmax and the losses
    # of the matrix products
    narrow = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    count = (targets != IGNORED).sum()
    with torch.autocast(x.device.type, enabled=False):
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            total = _LinearCrossEntropy.apply(x, weight, targets, narrow, wide)[0]
        else:
            head = _head(weight, narrow)
            total = 0.0
            for rows, part in _pieces(x, weight, targets):
                logits = (rows.to(narrow) @ head.mT)[:, : len(weight)].to(wide)
                total = total + F.cross_entropy(logits, part, reduction="sum", ignore_index=IGNORED)
        return torch.where(count > 0, total / count.clamp(min=1), torch.nan)


class _LinearCrossEntropy(torch.autograd.Function):
    """The summed loss of the scored tokens. Forward computes the gradients too, and backward only scales them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, targets: Tensor, narrow: torch.dtype, wide: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        total, dx, dw, head = 0.0, [], None, _head(weight, narrow)
        for rows, part in _pieces(x, weight, targets):
            rows = rows.to(narrow)
            if dx and torch.compiler.is_compiling() and x.is_cuda:
                rows = AFTER(rows, dx[-1])
            loss, dx_part, dw_part = _piece(rows, part, head, weight, wide)
            total = total + loss
            dx.append(dx_part.to(x.dtype))
            dw = dw_part.to(weight.dtype) if dw is None else dw.add_(dw_part)
        return total, torch.cat(dx), dw

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: tuple) -> None:  # noqa: ANN001
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN001
        total, dx, dw = ctx.saved_tensors
        return *native.first_derivatives_only((total,), (dx * grad.to(dx.dtype), dw * grad.to(dw.dtype))), None, None, None


def _piece(rows: Tensor, targets: Tensor, head: Tensor, weight: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss of rows (n, D), and its gradients with respect to the rows and to the weight (V, D)."""
    logits, scored = rows @ head.mT, targets != IGNORED  # (n, V), and the padding of `head`; (n,)
    if logits.device.type == "cpu" and KERNELS.get(logits.dtype) == wide and not _missing():
        losses, grad = CROSS_ENTROPY(logits, targets, len(weight))
    else:
        logits = logits.to(wide)
        logits[:, len(weight) :] = float("-inf")  # those that the padding of the head adds
        maps = logits.softmax(-1)  # one pass is cheaper than log_softmax and its exponential
        log_sum = logits.amax(-1) - maps.amax(-1).log()  # (n,); exact, because the largest probability is at least 1 / V
        # 0 stands for a target that is not scored; other negative targets, and those of V or more, fail in `gather`.
        at = targets.masked_fill(~scored, 0).unsqueeze(-1)  # (n, 1)
        losses = (log_sum - logits[:, : len(weight)].gather(-1, at).squeeze(-1)) * scored
        if torch.compiler.is_compiling():  # one pass with the softmax; after scatter_ another pass would copy from `wide`
            grad = torch.where(torch.arange(maps.shape[-1], device=maps.device) == at, maps - 1, maps).to(rows.dtype)  # (n, V)
        else:
            grad = maps.scatter_(-1, at, maps.gather(-1, at) - 1).to(rows.dtype)
    scored = scored.unsqueeze(-1)  # (n, 1)
    return losses.sum(), grad @ head * scored, (grad.mT @ (rows * scored))[: len(weight)]


def _pieces(x: Tensor, weight: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows (n, D) of x with their targets (n,)."""
    n = max(-(-len(x) // PIECES), -(-LOGITS // len(weight)))
    return zip(x.split(n), targets.split(n), strict=True)


# rows (n, D) of a piece once the piece before has its gradient: torch.compile would else make the logits of all pieces first.
AFTER = native.operator(
    "after",
    "(Tensor rows, Tensor gradient) -> Tensor",
    lambda rows, gradient: rows.clone(),
    lambda rows, gradient: torch.empty_like(rows),
    on="default",
)


def _head(weight: Tensor, narrow: torch.dtype) -> Tensor:
    """The weight (V, D) in `narrow`. In half precision, zeros pad V to a multiple of 64."""
    head = weight.to(narrow)
    return F.pad(head, (0, 0, 0, -len(weight) % ALIGNED)) if narrow.itemsize == 2 and len(weight) % ALIGNED else head


@native.constant
def _missing() -> bool:
    return native.failure(SOURCE) is not None


def _cross_entropy(logits: Tensor, targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Losses (n,) of logits (n, V), of which the first `width` count, and the gradient (n, V) of their sum."""
    if (outside := targets[(targets != IGNORED) & ((targets < 0) | (targets >= width))]).numel():
        raise IndexError(f"target {outside[0]} is out of bounds for {width} logits")
    logits, targets = logits.contiguous(), targets.contiguous()
    losses, grad = _empty(logits, targets, width)
    tensors = (ctypes.c_void_p(x.data_ptr()) for x in (logits, targets, losses, grad))
    sizes = map(ctypes.c_int64, (len(logits), width, logits.shape[1], IGNORED, torch.get_num_threads()))
    kind = str(logits.dtype).removeprefix("torch.")
    getattr(native.library(SOURCE), f"cross_entropy_{kind}")(*tensors, *sizes)
    return losses, grad


def _empty(logits: Tensor, targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
    return logits.new_empty(len(logits), dtype=KERNELS[logits.dtype]), torch.empty_like(logits)


# An exported folder has no loss.cpp.
CROSS_ENTROPY = SOURCE.is_file() and native.operator(
    "cross_entropy", "(Tensor logits, Tensor targets, int width) -> (Tensor, Tensor)", _cross_entropy, _empty
)
