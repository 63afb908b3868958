"""eval/attention_noise.py on attention written by hand, and on real models."""

import json

import numpy as np
import pytest
import torch

from data.retrieval import Query
from eval import attention_noise as an
from model.config import DecoderConfig
from model.decoder import Decoder


def query(needle: tuple[int, int], question: int, length: int) -> Query:
    nothing = np.zeros(1, dtype=np.int64)
    return Query(np.arange(length) % 7, nothing, needle, needle, question, [nothing])


def test_buckets_of_a_row_written_by_hand():
    row = torch.tensor([[0.30, 0.05, 0.10, 0.20, 0.15, 0.08, 0.12], [1.0, -0.5, 0.5, 0.25, 0.25, -0.25, -0.25]])
    sums = an.bucket_sums(row, query((3, 5), question=6, length=7))
    assert sums[0].tolist() == pytest.approx([0.30, 0.15, 0.35, 0.08, 0.12])
    assert sums[1].tolist() == pytest.approx([1.0, 0.0, 0.5, -0.25, -0.25])


def test_a_token_is_in_one_bucket_whatever_the_depth():
    row = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    assert an.bucket_sums(row, query((1, 3), 3, 4))[0].tolist() == pytest.approx([0.4, 0.0, 0.5, 0.0, 0.1])
    assert an.bucket_sums(row, query((0, 2), 3, 4))[0].tolist() == pytest.approx([0.4, 0.0, 0.3, 0.2, 0.1])
    assert an.bucket_sums(row, query((2, 3), 3, 4))[0].tolist() == pytest.approx([0.4, 0.3, 0.2, 0.0, 0.1])


def test_maps_are_averaged_before_they_are_normalised():
    # Two layers of one head: a softmax row (sum 1), and a differential row (sum 0.2). (samples, readings, heads, 5)
    softmax = np.array([0.5, 0.2, 0.1, 0.1, 0.1])
    signed, absolute = np.array([0.1, 0.1, 0.3, -0.1, -0.2]), np.array([0.1, 0.3, 0.3, 0.1, 0.2])
    layers = [np.array([[[softmax], [softmax]]]), np.array([[[signed], [absolute]]])]
    shares = an.normalised(layers)
    assert shares[0, 0] == pytest.approx(np.array([0.6, 0.3, 0.4, 0.0, -0.1]) / 1.2)
    assert shares[0, 1] == pytest.approx(np.array([0.6, 0.5, 0.4, 0.2, 0.3]) / 2.0)
    results = an.summarise({"0.5": shares}, {"0.5": layers})
    assert results["signed"]["depths"]["0.5"]["answer"] == pytest.approx(1 / 3)
    assert results["noise"]["signed"]["0.5"] == pytest.approx(0.25)
    assert results["absolute"]["mean"]["noise"] == pytest.approx(0.35)
    assert results["per_layer_head"]["signed"]["0.5"]["after"] == [[0.1], [-0.1]]


@pytest.mark.parametrize("layers", ["b", "d", "i"])
def test_masses_of_a_real_model(layers):
    model = Decoder(DecoderConfig(layers=layers, n_layer=2, n_head=4, d_model=32, context=30, vocab_size=9)).eval()
    queries = [query((5, 9), 20, 26), query((2, 6), 12, 17), query((10, 14), 24, 30)]
    masses = an.head_masses(model, queries, batch=2)
    alone = [an.head_masses(model, [one], batch=1) for one in queries]
    for layer, parts in enumerate(zip(*alone, strict=True)):
        assert masses[layer] == pytest.approx(np.concatenate(parts), abs=1e-6)  # padding is never looked at
    assert an.normalised(masses).sum(-1) == pytest.approx(np.ones((3, 2)))
    signed, absolute = masses[1][:, 0].sum(-1), masses[1][:, 1].sum(-1)  # (samples, heads)
    if layers == "d":
        lam = model.blocks[1].attention.lam().item()
        assert signed == pytest.approx(np.full((3, 2), 1 - lam), abs=1e-5)
        assert np.all(absolute >= np.abs(signed) - 1e-6)
    else:
        assert signed == pytest.approx(np.ones_like(signed), abs=1e-5)
        assert absolute == pytest.approx(signed)


def test_the_command_writes_json_and_figure(make_run, call, capsys):
    run = make_run("a", "d")
    call(an, f"run={run}", "samples=2")
    results = json.loads((run / "eval" / "attention_noise.json").read_text())["results"]
    for reading in ("signed", "absolute"):
        depths = results[reading]["depths"]
        assert list(depths) == ["0.0", "0.25", "0.5", "0.75", "1.0"]
        assert all(list(shares) == ["first", "before", "answer", "after", "query"] for shares in depths.values())
        assert all(sum(shares.values()) == pytest.approx(1) for shares in depths.values())
        assert depths["0.0"]["before"] == 0 and depths["1.0"]["after"] == 0
    assert (results["samples"], results["length"]) == (2, 160)
    assert len(results["per_layer_head"]["signed"]["0.5"]["answer"]) == 2  # layers
    assert capsys.readouterr().out.count("attention_noise  a: ") == 2
    assert (run / "figures" / "attention_noise.png").stat().st_size > 10_000


def test_wrong_input_is_one_line(make_run, refused):
    run = make_run("a")
    assert "depths=[0,0.5,1]" in refused(an, f"run={run}", "depths=[50]")
    assert "longer length" in refused(an, f"run={run}", "length=20")
    assert not (run / "eval").exists()
