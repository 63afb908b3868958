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
from model.config import DecoderConfig
from model.decoder import Decoder

V = 8
BYTES = np.array([1, 2, 3, 1, 2, 3, 4, 0])  # the last is the end of a text


class Uniform(nn.Module):
    def forward(self, tokens, cache=None):
        return torch.zeros(*tokens.shape, V)


class Counting(nn.Module):
    """Gives the token after x, (x + 1) mod V, a logit of the position's number, all others 0."""

    def forward(self, tokens, cache=None):
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


def test_cumulative_loss_is_the_mean_up_to_each_position():
    windows = np.random.default_rng(0).integers(0, V, (3, 9))
    results = perplexity.evaluate(Counting(), windows, BYTES)
    for t in range(8):
        assert results["cumulative"][t] == pytest.approx(sum(results["by_position"][: t + 1]) / (t + 1))
    assert results["cumulative"][-1] == pytest.approx(results["loss"])


def slow_hits(windows: np.ndarray, n: int, frequent: tuple = ()) -> np.ndarray:
    hits = np.zeros((len(windows), windows.shape[1] - 1), dtype=bool)
    for row, window in zip(hits, windows.tolist(), strict=True):
        seen = set()
        for end in range(n - 1, len(window)):
            ngram = tuple(window[end - n + 1 : end + 1])
            row[end - 1] = ngram in seen and ngram not in frequent
            seen.add(ngram)
    return hits


@pytest.mark.parametrize("n", (2, 3, 5))
def test_recall_hits_end_an_ngram_seen_before(n):
    assert perplexity.recall_hits(np.array([[1, 2, 3, 1, 2, 2, 2]]), 2, V).tolist() == [[0, 0, 0, 1, 0, 1]]
    windows = np.random.default_rng(n).integers(0, 3, (6, 60))
    windows[0, :] = 1
    found = perplexity.recall_hits(windows, n, 4)
    assert np.array_equal(found, slow_hits(windows, n)) and 0 < found.mean() < 1


def test_ngrams_frequent_in_training_are_no_hits():
    windows = np.random.default_rng(1).integers(0, 4, (5, 40))
    parts = [TextTokens(np.random.default_rng(i).integers(0, 4, size)) for i, size in enumerate((3000, 1, 500))]
    counts: dict[tuple[int, ...], int] = {}
    for part in parts:
        tokens = part.tokens.tolist()
        for ngram in zip(tokens, tokens[1:], tokens[2:], strict=False):
            counts[ngram] = counts.get(ngram, 0) + 1
    most = sorted(counts.values())[len(counts) // 2]
    frequent = perplexity.frequent_ngrams(parts, windows, 3, V, most)
    expected = slow_hits(windows, 3, tuple(ngram for ngram, count in counts.items() if count > most))
    found = perplexity.recall_hits(windows, 3, V, frequent)
    assert np.array_equal(found, expected) and 0 < found.sum() < slow_hits(windows, 3).sum()


def test_counting_in_parts_counts_every_ngram_once(monkeypatch):
    windows, part = np.random.default_rng(1).integers(0, 4, (5, 40)), TextTokens(np.arange(1000) ** 2 % 7)
    whole = [perplexity.frequent_ngrams([part], windows, 3, V, most).tolist() for most in range(0, 200, 20)]
    monkeypatch.setattr(perplexity, "CHUNK", 13)
    assert whole == [perplexity.frequent_ngrams([part], windows, 3, V, most).tolist() for most in range(0, 200, 20)]
    assert whole[0] and whole[0] != whole[-1]


def test_recall_splits_the_loss():
    windows = np.random.default_rng(2).integers(0, 3, (7, 20))
    results = perplexity.evaluate(Counting(), windows, BYTES, batch=3)
    losses = perplexity.token_losses(Counting(), torch.from_numpy(windows), V).numpy()
    hits = slow_hits(windows, 2)
    recall = results["recall"]
    assert recall["ngram"] == 2 and recall["hit"]["tokens"] == hits.sum()
    assert recall["hit"]["loss"] == pytest.approx(losses[hits].mean(), rel=1e-6)
    assert recall["other"]["loss"] == pytest.approx(losses[~hits].mean(), rel=1e-6)
    parts = [part["loss"] * part["tokens"] for part in (recall["hit"], recall["other"])]
    assert sum(parts) / results["tokens"] == pytest.approx(results["loss"])


def test_the_standard_error_of_a_ratio_is_that_of_its_repetitions():
    rng = np.random.default_rng(0)
    counts = rng.integers(5, 30, (4000, 50))
    sums = rng.normal(3, 1, (4000, 50)) * counts + rng.normal(0, 4, (4000, 50))
    found = [perplexity.ratio_se(s, c) for s, c in zip(sums, counts, strict=True)]
    spread = np.std([part["loss"] for part in found])
    # 4000 repetitions know the spread to 1.1 %; linearising 50 windows costs a few percent more.
    assert np.mean([part["se"] for part in found]) == pytest.approx(spread, rel=0.05)
    assert perplexity.ratio_se(np.zeros(3), np.zeros(3, dtype=int)) == {"loss": None, "se": None, "tokens": 0}


@pytest.mark.parametrize("layers", ("bd", "i"))
def test_windows_too_long_for_memory_are_read_in_parts(monkeypatch, layers):
    model = Decoder(DecoderConfig(layers=layers, n_layer=2, n_head=4, d_model=32, context=50, vocab_size=V)).eval()
    windows = torch.randint(V, (2, 51), generator=torch.Generator().manual_seed(0))
    shapes = []
    model.head.register_forward_hook(lambda module, given, out: shapes.append(tuple(out.shape)))
    with torch.no_grad():
        whole = perplexity.token_losses(model, windows, V)
        monkeypatch.setattr(perplexity, "LOGITS_IN_MEMORY", 2 * V * 12)
        parts = perplexity.token_losses(model, windows, V)
    assert shapes == [(2, 50, V)] + [(2, 12, V)] * 4 + [(2, 2, V)]
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-5)  # float32 rounding at losses of about 2


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
    assert results["recall"]["frequent"] is None and results["recall"]["hit"]["tokens"] > 1000
    assert (run / "figures" / "perplexity.png").stat().st_size > 10_000


def test_frequent_ngrams_are_counted_in_the_training_shards(make_run, call, refused, shards, tokenizer):
    run = make_run("a")
    assert "leave out frequent=" in refused(perplexity, f"run={run}", "frequent=5")
    train = np.array(tokenizer.encode("th" * 9))
    write_shard(shards / "train_000000.bin", train, vocab_size=tokenizer.vocab_size, fingerprint=tokenizer.fingerprint)
    hits = []
    for most in (9, 8):
        call(perplexity, f"run={run}", f"frequent={most}")
        recall = json.loads((run / "eval" / "perplexity.json").read_text())["results"]["recall"]
        hits.append(recall["hit"]["tokens"])
        assert recall["frequent"] == most
    assert hits[1] < hits[0]  # nine times "th", eight times "ht"


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
    assert "ngram=2" in refused(perplexity, f"run={run}", "ngram=1")
    assert "ngram=2" in refused(perplexity, f"run={run}", "ngram=8")  # 257^8 > 2^63
    assert "frequent=1250" in refused(perplexity, f"run={run}", "frequent=-1")
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
