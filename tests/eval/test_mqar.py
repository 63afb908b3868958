"""Associative recall, measured: models whose answers and maps are known, and one run to the JSON."""

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor, nn

from data.mqar import Mqar, MqarConfig, Sample, mqar_tokenizer
from eval import icl, mqar, perplexity
from eval.mqar import BUCKETS, correlation, hits, lambda_zero, read_attention
from model.config import DecoderConfig
from model.decoder import Decoder
from training.checkpoint import save

TASK = MqarConfig(keys=16, values=8, noise=8, pairs=2, distractors=0.5)
LENGTH = 88


def decoder(layers: str) -> Decoder:
    vocabulary = mqar_tokenizer(TASK).vocab_size
    cfg = DecoderConfig(layers=layers, n_layer=2, n_head=4, d_model=32, context=LENGTH, vocab_size=vocabulary)
    return Decoder(cfg, seed=3).eval()


def drawn(share: float) -> list[Sample]:
    source = Mqar(replace(TASK, distractors=share), LENGTH)
    return [source.draw("eval", i, 0) for i in range(20)]


class Reader(nn.Module):
    """Answers with what stood behind the key when it was first seen; wrong where a question is behind position `until`."""

    def __init__(self, until: int) -> None:
        super().__init__()
        self.cfg, self.until = decoder("b").cfg, until

    def forward(self, tokens: Tensor, rows: Tensor) -> Tensor:
        logits = torch.zeros(*rows.shape, self.cfg.vocab_size)
        for b, row in enumerate(rows.tolist()):
            for r, t in enumerate(row):
                first = (tokens[b] == tokens[b, t]).nonzero()[0, 0]
                logits[b, r, tokens[b, first + 1] if t < self.until else 0] = 1
        return logits


def test_accuracy_of_known_readers() -> None:
    samples = drawn(0.5)
    whole, half = (hits(Reader(until), samples, 7) for until in (LENGTH, 60))
    assert whole.all() and whole.shape == (20, 2)
    assert (half == [[question < 60 for question in sample.questions] for sample in samples]).all()


@pytest.mark.parametrize("layers", ["b", "g", "d", "v", "i", "n", "bd"])
def test_attention_of_uniform_maps(layers: str) -> None:
    """Queries of zero look at all that they see alike: the share on n distractors is n / (position + 1)."""
    model = decoder(layers)
    for name, p in model.named_parameters():
        if ".q." in name or name.endswith("q.weight"):
            nn.init.zeros_(p)
    samples = drawn(0.8)
    read = read_attention(model, samples, 7)
    mean = statistics.mean(1 / (question + 1) for sample in samples for question in sample.questions)
    names = [name for name in ("map", "map_1", "map_2") if name in read]
    assert len(names) == (3 if set(layers) & set("dv") else 1) and len(read["layers"]) == 2
    for name in names:
        assert read[name]["distractors"] == pytest.approx(16 * mean, rel=1e-4)
        assert read[name]["key"] == read[name]["value"] == pytest.approx(mean, rel=1e-4)
        assert sum(read[name].values()) == pytest.approx(1, rel=1e-4) and set(read[name]) == set(BUCKETS)
    if "map_2" in read:
        assert read["correlation"] == pytest.approx(0, abs=1e-3)  # of constants: no correlation, not NaN


def test_correlation() -> None:
    a = torch.rand(2, 3, 2, 20)
    positions = torch.stack((torch.arange(5), torch.arange(10, 15)))
    assert correlation(a, 3 * a + 1, positions).tolist() == pytest.approx([1, 1])
    assert correlation(a, -a, positions).tolist() == pytest.approx([-1, -1])
    assert correlation(a, torch.zeros_like(a), positions).tolist() == [0, 0]


@pytest.mark.parametrize("layers", ["d", "v", "bd"])
def test_lambda_is_altered_and_comes_back(layers: str) -> None:
    model, tokens = decoder(layers), torch.randint(0, 30, (2, 40))
    with torch.inference_mode():
        before = model(tokens)
        with lambda_zero(model):
            assert not torch.equal(before, model(tokens))
            assert not model.blocks[-1].attention.lam(*[torch.ones(1, 1, model.cfg.d_model)] * (layers == "v")).any()
        assert torch.equal(before, model(tokens))


def test_the_command_writes_json_and_figure(tmp_path: Path, call: Callable[..., None], refused: Callable[..., str]) -> None:
    run, model = tmp_path / "run", decoder("d")
    save(run, 3, model, [])
    config = {"model": asdict(model.cfg), "data": {"source": "mqar", "mqar": vars(TASK)}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    mqar_tokenizer(TASK).save(run)
    call(mqar, f"run={run}", "samples=4")
    content = json.loads((run / "eval" / "mqar.json").read_text())
    results = content["results"]
    assert content["eval"] == "mqar" and content["step"] == 3 and (run / "figures" / "mqar.png").is_file()
    assert [row["percent"] for row in results["shares"]] == [0, 50, 80, 90, 95]
    assert set(results["altered"]) == {"lambda_zero"}
    assert set(results["attention"][4]["map_1"]) == set(BUCKETS) and "correlation" in results["attention"][4]
    assert "correlation" not in results["attention"][0]  # nothing to correlate over
    assert "must be different values: use shares=" in refused(mqar, f"run={run}", "shares=[0.5,0.501]")
    for evaluation in (perplexity, icl):
        assert "has no text: use eval.mqar" in refused(evaluation, f"run={run}")
