"""First derivatives from a formula. A second derivative is refused: autograd would silently take the first for constants."""

import torch
from torch import Tensor


def once(inputs: tuple[Tensor | None, ...], gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The `gradients` that a custom backward returns, from `inputs`; ValueError where they are differentiated again."""
    # An ordinary backward pass runs without grad mode, and a compiled graph refuses second derivatives by itself.
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return gradients
    return _Once.apply(len(inputs), *inputs, *gradients)


class _Once(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(inputs: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(gradient.view_as(gradient) for gradient in tensors[inputs:])

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: tuple) -> None:  # noqa: ANN001
        """Nothing is kept."""

    @staticmethod
    def backward(ctx, *grads: Tensor) -> None:  # noqa: ANN001
        fix = "use model.backend=math (in Python: backend='math') and, for the loss, F.cross_entropy of model(tokens)"
        raise ValueError(f"this gradient cannot be differentiated again: {fix}")
