"""eval/outliers.py against sorted values, and against a model whose logits and hidden states are recorded by hand."""

import numpy as np
import pytest
import torch

from eval import outliers
from model.config import DecoderConfig
from model.decoder import Decoder
from model.rotary import rotate

RANKS = (1, 2, 3, 10, 100)


def streamed(values: torch.Tensor, parts: int) -> outliers.Magnitudes:
    magnitudes = outliers.Magnitudes()
    for part in values.chunk(parts):
        magnitudes.add(part)
    return magnitudes


@pytest.mark.parametrize("spread", [0.0, 3.0, 20.0])
def test_top_k_is_exact_and_the_median_within_its_resolution(spread):
    generator = torch.Generator().manual_seed(0)
    normal, sizes = (torch.randn(30_001, generator=generator) for _ in range(2))
    values = normal * torch.exp(spread * sizes.clamp(-3, 3))
    summary = outliers.summary([streamed(values, 13)])
    ordered = values.abs().sort(descending=True).values
    assert [summary[f"top{k}"] for k in RANKS] == [ordered[k - 1].item() for k in RANKS]
    assert summary["median"] == pytest.approx(values.abs().median().item(), rel=2**-11)
    assert summary["count"] == 30_001


def test_few_values_and_values_that_are_not_finite():
    few = outliers.summary([streamed(torch.tensor([3.0, -1.0]), 1)])
    assert (few["top1"], few["top2"], few["top3"], few["top100"]) == (3.0, 1.0, None, None)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="diverged"):
            outliers.summary([streamed(torch.tensor([1.0, bad] + [2.0] * 300), 2)])


def recorded(model: Decoder, tokens: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Visible |q.k| / sqrt(d) and |outputs| of each layer, from each layer's input, for heads of q, k of equal number."""
    inputs, hidden = [], []
    for block in model.blocks:
        block.attention.register_forward_pre_hook(lambda module, args: inputs.append((module, *args[:2])))
        block.register_forward_hook(lambda module, args, output: hidden.append(output.abs().flatten()))
    model(tokens)
    logits, T = [], tokens.shape[1]
    for attention, x, rope in inputs:
        q, k = (rotate(p(x).unflatten(-1, (-1, 8)).transpose(1, 2), rope) for p in (attention.q, attention.k))
        scores = q @ k.mT / 8**0.5  # (B, maps, T, T): diff's rows 2i and 2i + 1 are the maps of head i
        logits.append(scores[..., torch.tril(torch.ones(T, T)).bool()].abs().flatten())
    return logits, hidden


@pytest.mark.parametrize("layers", ["b", "d"])
@torch.inference_mode()
def test_a_real_model_by_layer_and_in_all(layers):
    cfg = DecoderConfig(layers=layers, n_layer=2, n_head=4, d_model=32, context=20, vocab_size=30)
    model = Decoder(cfg, seed=2).eval()
    windows = np.random.default_rng(0).integers(0, 30, (7, 21))
    results = outliers.evaluate(model, windows, batch=3)
    logits, hidden = recorded(model, torch.from_numpy(windows[:, :-1]))
    for kind, values in (("logits", logits), ("hidden", hidden)):
        for part, want in [*((results["per_layer"][i][kind], values[i]) for i in (0, 1)), (results[kind], torch.cat(values))]:
            ordered = want.sort(descending=True).values
            assert part["count"] == len(want)
            # float32 products in another order: 1e-5
            assert [part[f"top{k}"] for k in RANKS] == pytest.approx([ordered[k - 1].item() for k in RANKS], rel=1e-5)
            assert part["median"] == pytest.approx(want.median().item(), rel=2**-10)
    assert results["logits"]["count"] == 7 * 2 * 4 * 20 * 21 // 2  # windows, layers, maps, visible pairs
