"""Variants of one map against public code that holds the same formula: gpt-oss in transformers, and lucidrains' x-transformers
where it is installed (pip install --no-deps x-transformers einx einops loguru). Outputs and all gradients, float64."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from model.attention import VARIANTS
from model.attention.mask import Mask
from tests.parity.comparing import randomize

H, T, D = 3, 9, 12
Reference = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # q, k, v (B, H, T, d), x (B, T, D) -> (B, H, T, d)


def compare(variant: str, reference: Callable[[nn.Module], Reference], **options: object) -> None:
    """Our module against its own projections around `reference(module)`: output, and gradients of input and parameters."""
    kind = next(kind for kind in VARIANTS.values() if kind.name == variant)
    module = kind(n_head=H, d_model=D, position="none", **options).double()
    randomize(module)
    x = torch.randn(2, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def published(x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (H, -1)).transpose(1, 2) for part in (module.q, module.k, module.v))
        return module.out(reference(module)(q, k, v, x).transpose(1, 2).flatten(2))

    results = []
    for function in (lambda x: module(x, mask=Mask()), published):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        (y * x.flip(1)).sum().backward()
        results.append({"y": y.detach(), "x": leaf.grad, **{name: p.grad for name, p in module.named_parameters()}})
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)


def test_sink_is_that_of_gpt_oss() -> None:
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss", reason="pip install transformers")

    def reference(module: nn.Module) -> Reference:
        shape = SimpleNamespace(num_key_value_groups=1, sinks=module.sink, training=False)
        hide = torch.full((T, T), float("-inf"), dtype=torch.float64).triu(1)
        return lambda q, k, v, x: gpt_oss.eager_attention_forward(shape, q, k, v, hide, D**-0.5 * H**0.5)[0].transpose(1, 2)

    compare("sink", reference)


def x_transformers(
    gates: Callable[[nn.Module], dict[str, Tensor]] | None = None, **flags: bool
) -> Callable[[nn.Module], Reference]:
    """Its Attend with our module's parameters: gates(module) -> name in Attend: value."""
    attend = pytest.importorskip("x_transformers.attend", reason="pip install --no-deps x-transformers einx einops loguru")

    def reference(module: nn.Module) -> Reference:
        call = attend.Attend(heads=H, causal=True, qk_norm=True, **flags).double()  # qk_norm: no float32 softmax, nothing else
        values = gates(module) if gates else {}
        return lambda q, k, v, x: torch.func.functional_call(call, values, (q, k, v), strict=False)[0]

    return reference


def conv(mixing: Tensor) -> Tensor:
    return mixing[0, :, :, None, None]


def test_sink_cog_and_selective_are_those_of_x_transformers() -> None:
    compare("sink", x_transformers(lambda m: {"head_attn_sink": m.sink}, head_learned_sink=True))
    compare("cog", x_transformers(cog_signed=True))
    compare("selective", x_transformers(selective=True))


def test_talking_heads_are_those_of_x_transformers() -> None:
    after = {"post_softmax_talking_heads.weight": lambda m: conv(m.mixing)}
    compare("talking_heads", x_transformers(lambda m: {k: f(m) for k, f in after.items()}, post_talking_heads=True))
    # It adds the mixed scores to the scores.
    both = after | {"pre_softmax_talking_heads.weight": lambda m: conv(m.scores_mixing - torch.eye(H, dtype=torch.float64))}
    gates = x_transformers(lambda m: {k: f(m) for k, f in both.items()}, pre_talking_heads=True, post_talking_heads=True)
    compare("talking_heads", gates, before=True)


def test_forgetting_is_that_of_x_transformers() -> None:
    package = pytest.importorskip(
        "x_transformers.x_transformers", reason="pip install --no-deps x-transformers einx einops loguru"
    )
    attend = package.Attend(heads=H, causal=True, qk_norm=True)

    def reference(module: nn.Module) -> Reference:
        gates = package.DataDependentAlibi(D, H).double()
        values = {f"to_forget_gates.0.{name}": p for name, p in module.forget.named_parameters()}
        return lambda q, k, v, x: attend(q, k, v, attn_bias=torch.func.functional_call(gates, values, (x,)))[0]

    compare("forgetting", reference)
