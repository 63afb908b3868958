"""The cross-entropy of a linear output head, without all logits in memory at once."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # a target that is not scored, as torch has it
PIECES = 8  # maximum number of pieces of the tokens
LOGITS = 2**21  # minimum in a piece: smaller products are slow
ALIGNED = 64  # tensor cores take vocabularies in multiples of this


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats of the logits x weight' (N, V) at targets (N,); x (N, D), weight (V, D).

    Under autocast the products have autocast's precision, the softmax is in float32, and the weight's gradient is summed up in
    the weight's own type. A target of -100 is not scored; without scored targets the result is NaN. Logits are made for a
    part of the tokens at a time. If gradients are wanted, they are computed together with the logits, so no product is
    computed twice (Hsu et al., Liger Kernel, arXiv 2410.10989, section 3.2).
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    narrow = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    count = (targets != IGNORED).sum()
    with torch.autocast(x.device.type, enabled=False):
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            total = _LinearCrossEntropy.apply(x, weight, targets, narrow, wide)[0]
        else:
            pieces = _pieces(x, weight, targets, narrow, wide)
            total = sum(F.cross_entropy(*piece[2:], reduction="sum", ignore_index=IGNORED) for piece in pieces)
        return total / count


class _LinearCrossEntropy(torch.autograd.Function):
    """The summed loss of the scored tokens. Forward computes the gradients too, and backward only scales them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, targets: Tensor, narrow: torch.dtype, wide: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        total, dx, dw = 0.0, [], None
        for rows, head, logits, part in _pieces(x, weight, targets, narrow, wide):
            losses, maps = _losses(logits, part)
            scored = (part != IGNORED).unsqueeze(-1)  # (n, 1)
            total = total + losses.sum()
            at = part.clamp(min=0).unsqueeze(-1)
            below = (maps.gather(-1, at) - 1).to(narrow)
            grad = maps.to(narrow).scatter_(-1, at, below)  # (n, V)
            dx.append((grad @ head * scored).to(x.dtype))
            product = (grad.mT @ (rows * scored))[: len(weight)]  # (V, D)
            dw = product.to(weight.dtype) if dw is None else dw.add_(product)
        return total, torch.cat(dx), dw

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: tuple) -> None:  # noqa: ANN001
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output[1:])

    @staticmethod
    def backward(ctx, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN001
        dx, dw = ctx.saved_tensors
        return dx * grad.to(dx.dtype), dw * grad.to(dw.dtype), None, None, None


def _pieces(
    x: Tensor, weight: Tensor, targets: Tensor, narrow: torch.dtype, wide: torch.dtype
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """For each piece: rows (n, D) of x and the weight (V, D), both in `narrow`, logits (n, V) in `wide`, and targets (n,).

    In half precision V is padded to a multiple of 64 with logits of -inf.
    """
    V, head = len(weight), weight.to(narrow)
    if narrow.itemsize == 2 and V % ALIGNED:
        head = F.pad(head, (0, 0, 0, -V % ALIGNED))
    for rows, part in zip(x.split(_rows(len(x), V)), targets.split(_rows(len(x), V)), strict=True):
        rows = rows.to(narrow)
        logits = (rows @ head.mT).to(wide)
        logits[:, V:] = float("-inf")
        yield rows, head, logits, part


def _rows(N: int, V: int) -> int:
    """Tokens of a piece."""
    return max(-(-N // PIECES), -(-LOGITS // V))


def _losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropies (n,), 0 for targets that are not scored, and the softmax (n, V).

    The log-sum-exp is the largest logit minus the log of the largest probability, which is exact because this probability is
    at least 1 / V. One softmax pass is cheaper than two passes, log_softmax and its exponential.
    """
    maps = logits.softmax(-1)
    log_sum = logits.amax(-1) - maps.amax(-1).log()  # (n,)
    losses = log_sum - logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return losses * (targets != IGNORED), maps
