"""eval/quantization.py: the rounding by hand, and its effect on real models."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eval import quantization as qu
from eval.needle_text import Query
from model.config import DecoderConfig
from model.decoder import Decoder


def test_absmax_by_hand():
    assert torch.equal(qu.absmax(torch.zeros(1, 4, 4), torch.ones(4, 4).bool(), 4), torch.zeros(1, 4, 4))
    logits = torch.tensor([[7.0, 99.0], [-3.4, 1.6]])[None, None]
    see = torch.tensor([[True, False], [True, True]])
    rounded = qu.absmax(logits, see, bits=4)[0, 0]  # 7 steps on either side; the hidden 99 has no say
    assert rounded[0, 0] == 7.0 and rounded[1].tolist() == [-3.0, 2.0]
    assert qu.absmax(logits, see, bits=2)[0, 0][1].tolist() == [0.0, 0.0]  # -7, 0 or 7


def test_a_scale_is_of_one_head_of_one_window():
    generator = torch.Generator().manual_seed(0)
    logits, see = torch.randn(2, 3, 2, 9, 9, generator=generator), torch.ones(9, 9, dtype=torch.bool).tril()
    alone = qu.absmax(logits[:1, 1:2, :1], see, 6)
    larger = logits.clone()
    larger[1], larger[0, 0], larger[0, 1, 1] = 100, 100, 100
    assert torch.equal(qu.absmax(larger, see, 6)[:1, 1:2, :1], alone)


@pytest.mark.parametrize("layers", ["b", "d", "v", "g", "n", "i"])
def test_fewer_bits_change_the_loss_more_and_a_float_not_at_all(layers):
    model = Decoder(DecoderConfig(layers=layers, n_layer=2, n_head=4, d_model=32, context=24, vocab_size=30)).eval()
    model = model.double()  # a float32 product may round to another side in another batch
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8 if p.dim() > 1 else 1)  # sharper maps
    windows = np.random.default_rng(0).integers(0, 30, (8, 25))
    plain = qu.window_losses(model, windows, batch=8)
    with qu.quantized(model, None):
        assert np.array_equal(qu.window_losses(model, windows, batch=8), plain)
    changes = {}
    for bits in (16, 8, 3):
        with qu.quantized(model, bits):
            changes[bits] = np.abs(qu.window_losses(model, windows, batch=8) - plain).mean()
            again = qu.window_losses(model, windows, batch=3)  # a window does not depend on its batch
        assert again == pytest.approx(qu_losses(model, windows, bits), abs=1e-6)
    assert 0 < changes[16] < changes[8] < changes[3]


def qu_losses(model: Decoder, windows: np.ndarray, bits: int) -> np.ndarray:
    with qu.quantized(model, bits):
        return np.concatenate([qu.window_losses(model, window[None], batch=1) for window in windows])


def test_a_hit_is_what_greedy_decoding_gives():
    model = Decoder(DecoderConfig(layers="bd", n_layer=2, n_head=4, d_model=32, context=40, vocab_size=50), seed=3).eval()
    rng, queries = np.random.default_rng(0), []
    for i, length in enumerate((9, 20, 14)):
        prompt = rng.integers(0, 50, length)
        answer = model.generate(torch.from_numpy(prompt)[None], 4)[0, length:].numpy()
        answer = answer if i != 1 else np.concatenate((answer[:-1], (answer[-1:] + 1) % 50))
        queries.append(Query(prompt, answer, (0, 1), 1, [answer]))
    assert qu.needle_hits(model, queries, batch=2).tolist() == [1.0, 0.0, 1.0]


def test_changes_are_paired(monkeypatch):
    losses = iter([np.array([1.0, 2.0, 9.0]), np.array([1.5, 2.5, 9.6])])
    monkeypatch.setattr(qu, "window_losses", lambda model, windows, batch: next(losses))
    monkeypatch.setattr(qu, "quantized", lambda model, bits: nullcontext())
    results = qu.evaluate(SimpleNamespace(model=None), np.zeros((3, 5), int), [], qu.QuantizationConfig(bits=[4]))
    assert results["bits"][0]["loss_change"] == pytest.approx(0.5333333) and results["loss"] == 4
    assert results["bits"][0]["loss_change_se"] == pytest.approx(0.1 / 3)  # windows differ by 9, their changes by 0.1


def test_the_command_writes_json_and_figure(make_run, call, capsys):
    run = make_run("a", "d")
    call(qu, f"run={run}", "tokens=1600", "bits=[8,3]", "samples=2", "depths=[0,1]")
    results = json.loads((run / "eval" / "quantization.json").read_text())["results"]
    assert [row["bits"] for row in results["bits"]] == [8, 3] and results["windows"] == 10 and results["needles"] == 4
    for row in results["bits"]:
        assert row["loss"] == pytest.approx(results["loss"] + row["loss_change"])
        assert row["accuracy"] == pytest.approx(results["accuracy"] + row["accuracy_change"])
    assert capsys.readouterr().out.count("quantization  a: ") == 2
    assert (run / "figures" / "quantization.png").stat().st_size > 10_000
