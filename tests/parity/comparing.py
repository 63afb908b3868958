"""Our modules with the weights of published ones, and how two functions are held against each other."""

import os
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from model.attention import VARIANTS
from model.attention.mask import Mask
from model.config import DecoderConfig
from model.rotary import Rope
from tests.parity.layouts import import_attention
from tests.reference import published as formulas

# Both sides compute in float32: sums of up to 64 products of order 1, in different orders, differ by a few 1e-6.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
DRAWS = [f"{os.environ['PARITY_SEED']}-{i}" for i in range(8)]  # random configurations; tests/conftest.py sets the seed


def choices(name: str) -> Callable[..., Any]:
    """pick(a, b, ..) -> one of its arguments; what is picked depends on `name` alone."""
    draw = random.Random(name)
    return lambda *options: draw.choice(options)


def random_weights(shapes: dict[str, tuple], depth: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """A float64 state dict in which nothing is a zero or a one; a stored lambda_init has the schedule's value."""
    generator = torch.Generator().manual_seed(seed)
    w = {key: 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64) for key, shape in shapes.items()}
    return w | ({"lambda_init": torch.tensor(formulas.lambda_init(depth), dtype=torch.float64)} if "lambda_init" in w else {})


def rope_of(overrides: dict, length: int = 7) -> Rope | None:
    """float64 rotations for the imported module; None where its layout has no positions."""
    if overrides.get("position") == "none":
        return None
    d = overrides["head_dim"]
    angle = torch.arange(length).double()[:, None] * formulas.THETA ** (-torch.arange(0, d, 2).double() / d)
    return Rope(angle.cos(), angle.sin(), overrides["rope_layout"] == "interleaved")


def imported(source: dict[str, Tensor], layout: str, layer: int, backend: str = "math", **options) -> tuple[nn.Module, dict]:
    """Our module with the source's weights, in the source's dtype."""
    overrides, state = import_attention(source, layout, layer=layer, **options)
    cfg = DecoderConfig(**overrides, backend=backend).filled()
    module = VARIANTS[cfg.layers](cfg, layer).to(next(iter(source.values())).dtype)
    module.load_state_dict(state, strict=True)
    return module, overrides


def assert_equals_formula(w: dict[str, Tensor], module: nn.Module, rope: Rope | None, formula: Callable, T: int = 7) -> None:
    """Output, and its gradient with respect to x along a direction, which the formula gives by an imaginary step."""
    generator = torch.Generator().manual_seed(1)
    D = module.q.in_features
    x = torch.randn(1, T, D, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(1, T, D, generator=generator, dtype=torch.float64)
    module.cfg = replace(module.cfg, position="rope" if rope else "none")  # a module without rotations makes some
    y = module(x, rope, Mask())
    (grad,) = torch.autograd.grad((y * weight).sum(), x)
    arrays = {key: value.numpy() for key, value in w.items()}
    want = np.stack([formula(arrays, each) for each in x.detach().numpy()])
    # Both sides are float64 and of order 1; they differ by the order of their sums.
    np.testing.assert_allclose(y.detach().numpy(), want, rtol=1e-9, atol=1e-11)
    direction = torch.randn(1, T, D, generator=generator, dtype=torch.float64)
    step = x.detach().numpy() + 1e-30j * direction.numpy()
    slope = sum((formula(arrays, each) * g).sum().imag for each, g in zip(step, weight.numpy(), strict=True)) / 1e-30
    assert (grad * direction).sum().item() == pytest.approx(slope, rel=1e-9, abs=1e-9)


def assert_same_function(ours: Callable[[Tensor], Tensor], published: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Outputs and gradients with respect to x; parameters keep their gradients."""
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(3)) / 8  # gradients of order 1
    results = []
    for function in (ours, published):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        (y * weight).sum().backward()
        results.append((y.detach(), leaf.grad))
    torch.testing.assert_close(*results, **CLOSE)


def randomize(module: nn.Module) -> None:
    """Norm weights too, which start at one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * (0.2 if p.dim() == 2 else 0.5))
