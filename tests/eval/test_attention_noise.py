"""eval/attention_noise.py on attention written by hand, and on real models."""

import json
import math

import numpy as np
import pytest
import torch

from eval import attention_noise as an
from eval.needle_text import Query
from model.attention.probe import probe
from model.config import DecoderConfig
from model.decoder import Decoder


def query(needle: tuple[int, int], question: int, length: int) -> Query:
    return Query(np.arange(length) % 7, needle, question, [])


def test_buckets_of_a_row_written_by_hand():
    row = torch.tensor([[0.30, 0.05, 0.10, 0.20, 0.15, 0.08, 0.12], [1.0, -0.5, 0.5, 0.25, 0.25, -0.25, -0.25]])
    sums = an.bucket_sums(row, query((3, 5), question=6, length=7))
    assert sums[0].tolist() == pytest.approx([0.30, 0.15, 0.35, 0.08, 0.12])
    assert sums[1].tolist() == pytest.approx([1.0, 0.0, 0.5, -0.25, -0.25])
    first = an.bucket_sums(torch.tensor([[0.4, 0.3, 0.2, 0.1]]), query((0, 2), 3, 4))  # the first token is in one bucket
    assert first[0].tolist() == pytest.approx([0.4, 0.0, 0.3, 0.2, 0.1])


def test_maps_are_averaged_before_they_are_normalised():
    # Two layers of one head: a softmax row (sum 1), and a differential row (sum 0.2). (samples, readings, heads, 5)
    softmax = np.array([0.5, 0.2, 0.1, 0.1, 0.1])
    signed, absolute = np.array([0.1, 0.1, 0.3, -0.1, -0.2]), np.array([0.1, 0.3, 0.3, 0.1, 0.2])
    masses = np.array([[[softmax, signed], [softmax, absolute]]])
    shares = an.normalised(masses)
    assert shares[0, 0] == pytest.approx(np.array([0.6, 0.3, 0.4, 0.0, -0.1]) / 1.2)
    assert shares[0, 1] == pytest.approx(np.array([0.6, 0.5, 0.4, 0.2, 0.3]) / 2.0)
    results = an.summarise(masses[None], [1, 1], ["0.5"])
    assert results["signed"]["depths"]["0.5"]["answer"] == pytest.approx(1 / 3)
    assert results["noise"]["signed"]["0.5"] == pytest.approx(0.25)
    assert results["absolute"]["mean"]["noise"] == pytest.approx(0.35)
    assert results["per_layer_head"]["signed"]["0.5"]["after"] == [[0.1], [-0.1]]
    other = results["signed_per_layer"]  # each layer by its sum: 1 and 0.2
    assert other.keys() == results["signed"].keys() and other["mean"].keys() == results["signed"]["mean"].keys()
    assert other["depths"]["0.5"]["answer"] == pytest.approx((0.1 + 1.5) / 2)
    assert other["mean"]["noise"] == pytest.approx((0.2 + 0.5 + 0.1 - 0.5) / 2)
    assert sum(other["depths"]["0.5"].values()) == pytest.approx(1)


@pytest.mark.parametrize("layers", ["b", "d", "i"])
def test_masses_of_a_real_model(layers):
    model = Decoder(DecoderConfig(layers=layers, n_layer=2, n_head=4, d_model=32, context=30, vocab_size=9)).eval()
    queries = [query((5, 9), 20, 26), query((2, 6), 12, 17), query((10, 14), 24, 30)]
    masses, _, heads = an.head_rows(model, queries, batch=2)
    alone = [an.head_rows(model, [one], batch=1)[0] for one in queries]
    assert masses == pytest.approx(np.concatenate(alone), abs=1e-6)  # padding is never looked at
    assert an.normalised(masses).sum(-1) == pytest.approx(np.ones((3, 2)))
    signed, absolute = masses[:, 0, heads[0] :].sum(-1), masses[:, 1, heads[0] :].sum(-1)  # (samples, heads)
    if layers == "d":
        lam = model.blocks[1].attention.lam().item()
        assert signed == pytest.approx(np.full((3, 2), 1 - lam), abs=1e-5)
        assert np.all(absolute >= np.abs(signed) - 1e-6)
    else:
        assert signed == pytest.approx(np.ones_like(signed), abs=1e-5)
        assert absolute == pytest.approx(signed)


def full_maps(model, tokens):
    """Every layer's whole map, (heads, T, T)."""
    with probe(model, torch.arange(len(tokens))) as maps, torch.no_grad():
        model(torch.from_numpy(tokens)[None])
    return [layer[0].double().numpy() for layer in maps.layers]


@pytest.mark.parametrize("layers", ["b", "d"])
def test_entropy_of_a_real_model_is_that_of_its_whole_map(layers):
    model = Decoder(DecoderConfig(layers=layers, n_layer=2, n_head=4, d_model=32, context=30, vocab_size=9)).eval()
    for block in model.blocks:
        block.attention.q.weight.data *= 500  # sharp maps, whose differences have negative weights
    queries = [query((5, 9), 20, 26), query((2, 6), 12, 17)]
    _, shapes, _ = an.head_rows(model, queries, batch=2)
    for one, shape in zip(queries, shapes, strict=True):
        row = np.concatenate([layer[:, -1] for layer in full_maps(model, one.prompt)])  # (heads of all layers, P)
        mass = np.abs(row) / np.abs(row).sum(-1, keepdims=True)
        assert shape[0] == pytest.approx(-(mass * np.log(np.maximum(mass, 1e-300))).sum(-1), abs=1e-5)
        assert shape[1] == pytest.approx(np.where(row < 0, mass, 0).sum(-1), abs=1e-5)
    assert (shapes[:, 1].max() > 0.1) == (layers == "d")


@pytest.mark.parametrize("layers", ["b", "d"])
def test_sinks_are_those_of_the_authors_definition(layers):
    # sail-sg/Attention-Sink: importance of key k = sum over queries of A[q, k] / (T - k); sink if it exceeds epsilon.
    model = Decoder(DecoderConfig(layers=layers, n_layer=2, n_head=4, d_model=32, context=64, vocab_size=9)).eval()
    for weight in (block.attention.q.weight.data for block in model.blocks):
        weight *= torch.linspace(1, 120, len(weight))[:, None]  # heads of different sharpness: some are sinks, some are not
    hay, T = np.random.default_rng(0).integers(0, 9, 300), 20
    measured = an.sinks(model, hay, T, windows=5, batch=2)
    assert an.sinks(model, hay[:39], T, windows=100, batch=8)["windows"] == 1  # windows do not overlap
    mass = []
    for start in (0, 70, 140, 210, 280):
        maps = [np.abs(layer) for layer in full_maps(model, hay[start : start + T])]
        mass.append([sum(head[q, 0] / head[q].sum() for q in range(T)) / T for layer in maps for head in layer])
    mass = np.array(mass)
    share = (mass > 0.3).mean(axis=1)
    assert 0 < share.mean() < 1
    assert measured["share"] == pytest.approx(share.mean()) and measured["heads"] == (mass.mean(axis=0) > 0.3).mean()
    assert measured["se"] == pytest.approx(share.std(ddof=1) / math.sqrt(5))
    assert [x for layer in measured["per_layer_head"] for x in layer] == pytest.approx(mass.mean(axis=0).tolist(), abs=1e-5)


def test_no_logits_but_of_one_row():
    model = Decoder(DecoderConfig(n_layer=2, n_head=2, d_model=16, context=64, vocab_size=9)).eval()
    seen = []
    model.head.register_forward_hook(lambda module, given, out: seen.append(tuple(out.shape)))
    an.head_rows(model, [query((5, 9), 20, 26), query((2, 6), 12, 17)], batch=2)
    an.sinks(model, np.zeros(128, dtype=np.int64), 64, windows=2, batch=2)
    assert seen == [(2, 1, 9), (2, 1, 9)]


def test_no_share_of_a_sum_that_may_be_zero(make_run, call):
    run = make_run("picky", "bp")
    printed = call(an, f"run={run}", "samples=2", "depths=[0,1]", "windows=2")
    assert "picky: signed and signed_per_layer are left out: rows may sum to zero" in printed
    assert "absolute answer" in printed and printed.count("signed") == 2
    results = json.loads((run / "eval" / "attention_noise.json").read_text())["results"]
    assert results["signed"] is results["signed_per_layer"] is results["se"]["signed"] is results["noise"]["signed"] is None
    assert sum(results["absolute"]["depths"]["1.0"].values()) == pytest.approx(1)
    assert len(results["per_layer_head"]["signed"]["0.0"]["first"]) == 2  # masses, which nothing divides
