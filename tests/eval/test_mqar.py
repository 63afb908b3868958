"""Associative recall, measured: models whose answers and maps are known, and one run from training to the JSON."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from data.mqar import Mqar, MqarConfig, Sample, mqar_tokenizer
from eval import icl, mqar, outliers, perplexity
from eval.mqar import (
    ALTERED,
    BUCKETS,
    MqarEvalConfig,
    correlation,
    evaluate,
    hits,
    lambda_times,
    read_attention,
    uniform_second_map,
)
from eval.report.sections import scalars
from model.attention import probe as attention
from model.config import DecoderConfig
from model.decoder import Decoder
from tests.conftest import run_command
from training.checkpoint import LoadedRun

TASK = MqarConfig(keys=16, values=8, noise=8, pairs=2, distractors=0.5)
LENGTH = 88


def decoder(layers: str, **options: object) -> Decoder:
    vocabulary = mqar_tokenizer(TASK).vocab_size
    cfg = DecoderConfig(layers=layers, n_layer=2, n_head=4, d_model=32, context=LENGTH, vocab_size=vocabulary)
    for name, value in options.items():
        setattr(cfg.diff, name, value)
    return Decoder(cfg, seed=3).eval()


def drawn(share: float, count: int = 20) -> list[Sample]:
    source = Mqar(MqarConfig(**{**vars(TASK), "distractors": share}), LENGTH)
    return [source.draw("eval", i, 0) for i in range(count)]


class Reader(nn.Module):
    """Answers with what stood behind the key when it was first seen; wrong where a question is behind position `until`."""

    def __init__(self, until: int = LENGTH) -> None:
        super().__init__()
        self.cfg, self.until = decoder("b").cfg, until

    def forward(self, tokens: Tensor, rows: Tensor) -> Tensor:
        logits = torch.zeros(*rows.shape, self.cfg.vocab_size)
        for b, row in enumerate(rows.tolist()):
            for r, t in enumerate(row):
                first = (tokens[b] == tokens[b, t]).nonzero()[0, 0]
                logits[b, r, tokens[b, first + 1] if t < self.until else 0] = 1
        return logits


@pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
def test_accuracy_of_known_readers(share: float) -> None:
    samples = drawn(share)
    assert hits(Reader(), samples, 7).all() and hits(Reader(), samples, 7).shape == (20, 2)
    half = hits(Reader(60), samples, 7)
    assert (half == [[asked < 60 for asked in sample.questions] for sample in samples]).all()


@pytest.mark.parametrize("layers", ["b", "g", "d", "v", "i", "n", "bd"])
def test_attention_of_uniform_maps(layers: str) -> None:
    """Queries of zero look at all that they see alike: the share on n distractors is n / (position + 1)."""
    model = decoder(layers)
    for name, p in model.named_parameters():
        if ".q." in name or name.endswith("q.weight"):
            nn.init.zeros_(p)
    samples = drawn(0.8)
    found = read_attention(model, samples, 7)
    wanted = [1 / (asked + 1) for sample in samples for asked in sample.questions]
    mean = sum(wanted) / len(wanted)
    names = [name for name in ("map", "map_1", "map_2") if name in found]
    assert len(names) == (3 if set(layers) & set("dv") else 1) and len(found["layers"]) == 2
    for name in names:
        assert found[name]["distractors"] == pytest.approx(16 * mean, rel=1e-4)
        assert found[name]["key"] == found[name]["value"] == pytest.approx(mean, rel=1e-4)
        assert sum(found[name].values()) == pytest.approx(1, rel=1e-4) and set(found[name]) == set(BUCKETS)
    if "map_2" in found:
        assert found["correlation"] == pytest.approx(0, abs=1e-3)  # of constants: no correlation, not NaN


def test_maps_are_those_of_the_formula() -> None:
    """map = map_1 - lambda map_2, each of the two a softmax."""
    model, sample = decoder("d"), drawn(0.8)[:3]
    tokens, asked = mqar._tensors(sample, torch.device("cpu"), "tokens", "asked")
    with torch.inference_mode(), attention.probe(model, asked, apart=True) as seen:
        model(tokens[:, :-1], rows=asked)
        for whole, (first, second), block in zip(seen.layers, seen.pairs, model.blocks, strict=True):
            torch.testing.assert_close(whole, first - block.attention.lam() * second, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(second.sum(-1), torch.ones(second.shape[:-1]))
            for b, row in enumerate(asked):
                for r, t in enumerate(row):
                    assert not first[b, :, r, t + 1 :].any()  # causal


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
        for factor, same in ((0.0, False), (-1.0, False), (1.0, True)):
            with lambda_times(model, factor):
                assert torch.equal(before, model(tokens)) == same
        assert torch.equal(before, model(tokens))
    assert [ALTERED[name].keywords["factor"] for name in ("lambda_zero", "lambda_turned")] == [0.0, -1.0]


def test_lambda_zero_is_no_subtraction() -> None:
    model, tokens = decoder("d", head_norm="none"), torch.randint(0, 30, (2, 40))
    plain = decoder("d", head_norm="none", lambda_form="fixed", lambda_init=0.0)
    plain.load_state_dict(model.state_dict(), strict=False)
    for block, other in zip(plain.blocks, model.blocks, strict=True):
        block.attention.after = other.attention.after  # whose scale 1 - lambda_init stays
    with torch.inference_mode(), lambda_times(model, 0.0):
        torch.testing.assert_close(model(tokens), plain(tokens))


def test_a_uniform_second_map() -> None:
    """It changes nothing where the second map is uniform already, something elsewhere, and nothing in plain layers."""
    tokens = torch.randint(0, 30, (2, 40))
    model, plain = decoder("d"), decoder("b")
    with torch.inference_mode():
        before, other = model(tokens), plain(tokens)
        with uniform_second_map(model):
            assert not torch.allclose(before, model(tokens), atol=1e-5)
        with uniform_second_map(plain):
            torch.testing.assert_close(plain(tokens), other)
        for block in model.blocks:
            block.attention.q.weight.unflatten(0, (-1, 2, block.attention.width))[:, 1] = 0
        before = model(tokens)
        with uniform_second_map(model):
            torch.testing.assert_close(model(tokens), before)


def test_absent_keys_of_plain_models() -> None:
    config = {"data": {"source": "mqar", "mqar": vars(TASK)}}
    run = LoadedRun(decoder("b"), mqar_tokenizer(TASK), config, 1, Path("none"))
    results = evaluate(run, MqarEvalConfig(run="none", samples=4, shares=[0.0, 0.95]))
    assert "altered" not in results and "map_2" not in results["attention"][1]
    assert [row["percent"] for row in results["shares"]] == [0, 95] and results["chance"] == 1 / 8
    names = set(dict(scalars(results)))
    assert {"percent=95 · accuracy", "percent=95 · map · first"} <= names and not any("layers" in name for name in names)
    assert not any("share" in name or "{" in name for name in names)


def test_whole_maps_are_made_of_few_contexts_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes = decoder("d"), []
    model.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])) if attention.logits_visitor else None)
    monkeypatch.setattr(outliers, "LOGITS_IN_MEMORY", 0)
    config = {"data": {"source": "mqar", "mqar": vars(TASK)}}
    run = LoadedRun(model, mqar_tokenizer(TASK), config, 1, Path("none"))
    evaluate(run, MqarEvalConfig(run="none", samples=4, shares=[0.5]))
    assert sizes == [1] * 4


def test_from_training_to_the_json(tmp_path: Path, call: Callable[..., None], refused: Callable[..., str]) -> None:
    run = tmp_path / "run"
    task = ("data=mqar", "data.mqar.keys=16", "data.mqar.values=8", "data.mqar.noise=8", "data.mqar.pairs=2")
    shape = ("size=nano", "model.n_layer=2", "model.n_head=4", "model.d_model=32", "model.context=88")
    rest = "steps=3 batch_tokens=880 eval_tokens=880 optim=muon device=cpu dtype=float32 monitor.every=2".split()
    done = run_command("train.py", "model=diff", *task, *shape, *rest, f"run_dir={run}")
    assert done.returncode == 0, done.stderr
    call(mqar, f"run={run}", "samples=8")
    content = json.loads((run / "eval" / "mqar.json").read_text())
    results = content["results"]
    assert content["eval"] == "mqar" and content["step"] == 3 and (run / "figures" / "mqar.png").is_file()
    assert [row["percent"] for row in results["shares"]] == [0, 50, 80, 90, 95]
    assert set(results["altered"]) == {"lambda_zero", "lambda_turned", "map_2_uniform"}
    assert set(results["attention"][4]["map_1"]) == set(BUCKETS) and "correlation" in results["attention"][4]
    assert "correlation" not in results["attention"][0]  # nothing to correlate over
    call(mqar, f"run={run}", "samples=2", "kind=pairs", "shares=[0.5]")
    assert "key 'text'" in refused(mqar, f"run={run}", "text=x")
    assert "shares= must be different numbers" in refused(mqar, f"run={run}", "shares=[0.5,0.501]")
    (tmp_path / "text.txt").write_text("These words are no tokens of the task. " * 50)
    for evaluation, more in ((perplexity, [f"text={tmp_path}/text.txt"]), (icl, []), (perplexity, [])):
        assert "has no text: use eval.mqar" in refused(evaluation, f"run={run}", *more)
    again = run_command("train.py", "model=diff", *task, *shape, *rest, f"run_dir={tmp_path / 'n'}", "needle_every=1")
    assert again.returncode == 2 and "use needle_every=0" in again.stderr
