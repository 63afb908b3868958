"""eval/quantization.py: the rounding by hand, and its effect on real models."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from eval import quantization as qu
from model.config import DecoderConfig
from model.decoder import Decoder


def test_absmax_by_hand_and_its_scale_is_of_one_head_of_one_window():
    assert torch.equal(qu.absmax(torch.zeros(1, 4, 4), torch.ones(4, 4).bool(), 4), torch.zeros(1, 4, 4))
    logits = torch.tensor([[7.0, 99.0], [-3.4, 1.6]])[None, None]
    see = torch.tensor([[True, False], [True, True]])
    rounded = qu.absmax(logits, see, bits=4)[0, 0]  # 7 steps on either side; the hidden 99 has no say
    assert rounded[0, 0] == 7.0 and rounded[1].tolist() == [-3.0, 2.0]
    assert qu.absmax(logits, see, bits=2)[0, 0][1].tolist() == [0.0, 0.0]  # -7, 0 or 7
    generator = torch.Generator().manual_seed(0)
    logits, see = torch.randn(2, 3, 2, 9, 9, generator=generator), torch.ones(9, 9, dtype=torch.bool).tril()
    alone = qu.absmax(logits[:1, 1:2, :1], see, 6)
    larger = logits.clone()
    larger[1], larger[0, 0], larger[0, 1, 1] = 100, 100, 100
    assert torch.equal(qu.absmax(larger, see, 6)[:1, 1:2, :1], alone)


@pytest.mark.parametrize("layers", ["b", "d", "v", "i"])
def test_fewer_bits_change_the_loss_more_and_a_float_not_at_all(layers):
    model = Decoder(DecoderConfig(layers=layers, n_layer=2, n_head=4, d_model=32, context=24, vocab_size=30)).eval()
    model = model.double()  # a float32 product may round to another side in another batch
    for p in model.parameters():
        p.data.mul_(8 if p.dim() > 1 else 1)  # sharper maps
    windows = np.random.default_rng(0).integers(0, 30, (4, 25))
    plain, changes = qu.window_losses(model, windows, 4, 30).mean(1).numpy(), []
    for bits in (None, 16, 8, 3):
        with qu.quantized(model, bits):
            losses = qu.window_losses(model, windows, 4, 30).mean(1).numpy()
            alone = np.concatenate([qu.window_losses(model, window[None], 1, 30).mean(1).numpy() for window in windows])
        assert losses == pytest.approx(alone, abs=1e-6)  # a window does not depend on its batch
        changes.append(np.abs(losses - plain).mean())
    assert 0 == changes[0] < changes[1] < changes[2] < changes[3]


def test_changes_are_paired(monkeypatch):
    losses = iter(torch.tensor([[1.0, 2.0, 9.0], [1.5, 2.5, 9.6]], dtype=torch.float64)[..., None])
    monkeypatch.setattr(qu, "window_losses", lambda *_: next(losses))
    monkeypatch.setattr(qu, "quantized", lambda model, bits: nullcontext())
    model = Decoder(DecoderConfig(n_layer=1, n_head=2, d_model=16, context=4, vocab_size=9))
    results = qu.evaluate(model, np.zeros((3, 5), int), qu.QuantizationConfig(bits=[4]))
    assert results["bits"][0]["loss_change"] == pytest.approx(0.5333333) and results["loss"] == 4
    assert results["bits"][0]["loss_change_se"] == pytest.approx(0.1 / 3)  # windows differ by 9, their changes by 0.1
