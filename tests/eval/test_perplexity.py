"""eval/perplexity.py against models whose loss is known."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from data.config import TokenizerConfig
from data.shards import write_shard
from data.tokenizer import build_tokenizer
from eval import perplexity
from eval.common import TextTokens

V = 8
BYTES = np.array([1, 2, 3, 1, 2, 3, 4, 0])  # the last is the end of a text


class Uniform(nn.Module):
    def forward(self, tokens):
        return torch.zeros(*tokens.shape, V)


class Counting(nn.Module):
    """Gives the token after x, (x + 1) mod V, a logit of the position's number, all others 0."""

    def forward(self, tokens):
        logits = torch.zeros(*tokens.shape, V)
        positions = torch.arange(tokens.shape[1], dtype=torch.float32).expand(tokens.shape)
        return logits.scatter(2, ((tokens + 1) % V)[..., None], positions[..., None])


def test_a_uniform_model_has_the_entropy_of_its_vocabulary():
    windows = np.random.default_rng(0).integers(0, V, (5, 17))
    results = perplexity.evaluate(Uniform(), windows, BYTES, batch=2)
    assert results["loss"] == pytest.approx(math.log(V), rel=1e-6)
    assert results["ppl"] == pytest.approx(V, rel=1e-6)
    assert results["se"] == pytest.approx(0, abs=1e-6)
    assert results["by_position"] == pytest.approx([math.log(V)] * 16, rel=1e-6)
    n_bytes = BYTES[windows[:, 1:]].sum()
    assert results["bits_per_byte"] == pytest.approx(80 * 3 / n_bytes, rel=1e-6)  # log2(8) = 3
    assert (results["tokens"], results["bytes"], results["windows"]) == (80, n_bytes, 5)


def test_loss_by_position_and_standard_error_are_exact():
    right, wrong = np.arange(5) % V, np.zeros(5, dtype=int)  # always and never the token it counts on
    results = perplexity.evaluate(Counting(), np.stack((right, wrong)), BYTES)
    total = [math.log(math.exp(t) + V - 1) for t in range(4)]  # log of the softmax's denominator
    assert results["by_position"] == pytest.approx([z - t / 2 for t, z in enumerate(total)])
    losses = [np.mean(total) - 1.5, np.mean(total)]
    assert results["loss"] == pytest.approx(np.mean(losses))
    assert results["se"] == pytest.approx(np.std(losses, ddof=1) / math.sqrt(2))


def test_windows_are_disjoint_cover_the_text_and_thin_out_evenly():
    parts = [TextTokens(np.arange(100)), TextTokens(np.arange(200, 231))]
    windows = perplexity.cut_windows(parts, 10, limit=10_000)
    assert windows.shape == (9 + 3, 11)
    assert np.array_equal(windows[:9, 1:].ravel(), np.arange(1, 91))  # every target once
    assert windows[9, 0] == 200
    assert perplexity.cut_windows(parts, 10, limit=30)[:, 0].tolist() == [0, 60, 220]
    with pytest.raises(ValueError, match="use tokens=10"):
        perplexity.cut_windows(parts, 10, limit=9)


def test_position_buckets_are_a_partition():
    middles, means = perplexity.position_buckets(list(range(1, 257)))
    assert middles[0] == 1 and means[0] == 1
    assert np.all(np.diff(middles) > 0) and middles[-1] <= 256
    assert perplexity.position_buckets([2.5])[1].tolist() == [2.5]


def test_the_command_writes_json_and_figure(make_run, call, capsys, tokenizer):
    run = make_run("diff", "d")
    call(perplexity, f"run={run}")
    assert capsys.readouterr().out.startswith("perplexity  diff: loss ")
    content = json.loads((run / "eval" / "perplexity.json").read_text())
    assert {"eval", "run", "config", "machine", "version", "results"} <= content.keys()
    results = content["results"]
    assert (content["run"], content["step"], results["length"], len(results["by_position"])) == ("diff", 4, 160, 160)
    assert results["loss"] == pytest.approx(math.log(tokenizer.vocab_size), rel=0.05)  # untrained
    assert results["bits_per_byte"] == pytest.approx(results["loss"] / math.log(2), rel=1e-3)  # a byte a token
    assert (run / "figures" / "perplexity.png").stat().st_size > 10_000


def test_any_text_file_can_be_tested(make_run, call, tmp_path):
    run, text = make_run("a"), tmp_path / "notes.md"
    text.write_text("Wörter, words, mots. " * 20)
    call(perplexity, f"run={run}", f"text={text}", "length=50", "tokens=200")
    results = json.loads((run / "eval" / "perplexity.json").read_text())["results"]
    assert (results["windows"], results["length"], results["tokens"]) == (4, 50, 200)


def test_wrong_input_is_one_line(make_run, refused, tmp_path, shards):
    run = make_run("a")
    short, empty, binary = tmp_path / "short.txt", tmp_path / "empty.txt", tmp_path / "binary.txt"
    short.write_text("too short")
    empty.write_text(" \n")
    binary.write_bytes(b"\xff\xfe\x00")
    assert "python train.py" in refused(perplexity, f"run={tmp_path / 'nothing'}")
    assert "length=9" in refused(perplexity, f"run={run}", f"text={short}")
    assert "is empty" in refused(perplexity, f"run={run}", f"text={empty}")
    assert "UTF-8" in refused(perplexity, f"run={run}", f"text={binary}")
    assert "no text file" in refused(perplexity, f"run={run}", "text=missing.txt")
    assert "one of them" in refused(perplexity, f"run={run}", f"text={short}", f"shards={shards}")
    assert "python -m data.prepare" in refused(perplexity, f"run={run}", f"shards={tmp_path / 'none'}")
    assert "length=0" in refused(perplexity, f"run={run}", "length=0")
    assert "batch=32" in refused(perplexity, f"run={run}", "batch=0")
    assert "run=" in refused(perplexity)
    assert not (run / "eval").exists()


def test_another_tokenizer_is_refused(make_run, refused, tmp_path):
    run, folder = make_run("a"), tmp_path / "other"
    folder.mkdir()
    other = build_tokenizer(TokenizerConfig(name="bpe", vocab_size=262), ["the rain in the road " * 50])
    tokens = np.array(other.encode("the rain " * 400))
    write_shard(folder / "val_000000.bin", tokens, vocab_size=other.vocab_size, fingerprint=other.fingerprint)
    assert "another tokenizer" in refused(perplexity, f"run={run}", f"shards={folder}")
    other.save(folder)
    assert "another tokenizer" in refused(perplexity, f"run={run}", f"shards={folder}")
