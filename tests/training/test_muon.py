"""Muon's iteration: the same rounding on every processor, whether or not it can multiply bfloat16."""

import pytest
import torch
from torch import Tensor

from training import muon
from training.distributed import slow_bfloat16

OPTIONS = ((3.4445, -4.7750, 2.0315), 5, 1e-7)


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().double()


def independent(x: Tensor) -> Tensor:
    """Newton-Schulz in float64 on one matrix after the other, every product rounded to bfloat16 and nothing else."""
    (a, b, c), steps, eps = OPTIONS
    results = []
    for matrix in x:
        y = (matrix / matrix.norm().clamp(min=eps)).double()  # the iteration begins with the bfloat16 quotient
        for _ in range(steps):
            gram = rounded(y @ y.T)
            y = rounded(a * y + rounded(b * gram + c * gram @ gram) @ y)
        results.append(y)
    return torch.stack(results)


@pytest.mark.parametrize("slow", (False, True))
def test_every_product_is_rounded_to_bfloat16(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "slow_bfloat16", lambda device: slow)
    x = torch.randn(3, 7, 19, generator=torch.Generator().manual_seed(0)).bfloat16()
    result, expected = muon.orthogonalized(x, *OPTIONS), independent(x)
    assert result.dtype == torch.bfloat16
    assert (result.double() - expected).norm() / expected.norm() < 2e-3  # unrounded products are 0.02 away


def test_bfloat16_is_slow_where_onednn_cannot_multiply_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    for supported in (False, True):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda supported=supported: supported)
        assert slow_bfloat16(torch.device("cpu")) == (not supported)
    assert not slow_bfloat16(torch.device("cuda"))  # a card decides for itself
