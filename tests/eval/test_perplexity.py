"""eval/perplexity.py against models whose loss is known."""

import gzip
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from data.config import TokenizerConfig
from data.shards import TextTokens, write_shard
from data.tokenizer import build_tokenizer
from eval import common, perplexity
from eval.recall import ngram_codes, recall_hits
from model.config import DecoderConfig
from model.decoder import Decoder
from tests.variants import stirred

V = 8
BYTES = np.array([1, 2, 3, 1, 2, 3, 4, 0])  # the last is the end of a text


class Uniform(nn.Module):
    head = staticmethod(lambda logits: logits)  # of these two models, the hidden states are the logits

    def hidden(self, tokens, cache=None):
        return torch.zeros(*tokens.shape, V)


class Counting(Uniform):
    """Gives the token after x, (x + 1) mod V, a logit of the position's number, all others 0."""

    def hidden(self, tokens, cache=None):
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
    assert results["cumulative"] == pytest.approx(np.cumsum(results["by_position"]) / np.arange(1, 5))
    losses = [np.mean(total) - 1.5, np.mean(total)]
    assert results["loss"] == pytest.approx(np.mean(losses))
    assert results["se"] == pytest.approx(np.std(losses, ddof=1) / math.sqrt(2))


def test_recall_splits_the_loss():
    windows = np.random.default_rng(2).integers(0, 3, (7, 20))
    frequent = np.array([V * 1 + 2, V * 2 + 2])  # the bigrams (1, 2) and (2, 2)
    results, split = (perplexity.evaluate(Counting(), windows, BYTES, 3, known) for known in (None, frequent))
    losses = perplexity.token_losses(Counting(), torch.from_numpy(windows), V).numpy()
    hits, known = recall_hits(windows, V), np.isin(ngram_codes(windows, 2, V), frequent)
    recall = results["recall"]
    assert recall.keys() == {"ngram", "hit", "other"} and recall["ngram"] == 2
    assert [split["recall"][kind] for kind in ("hit", "other")] == [recall[kind] for kind in ("hit", "other")]
    kinds = {"hit": hits, "other": ~hits, "rare_hit": hits & ~known, "frequent_hit": hits & known}
    for kind, chosen in kinds.items():
        assert split["recall"][kind]["tokens"] == chosen.sum() > 0
        assert split["recall"][kind]["loss"] == pytest.approx(losses[chosen].mean(), rel=1e-6)
    spans = {"1-3": slice(0, 3), "4-7": slice(3, 7), "8-19": slice(7, 19)}
    others = {name: losses[:, span][~hits[:, span]].mean() for name, span in spans.items()}
    assert recall["other"]["by_octave"] == pytest.approx(others, rel=1e-6)


def test_the_standard_error_of_a_ratio_is_that_of_its_repetitions():
    rng = np.random.default_rng(0)
    counts = rng.integers(5, 30, (4000, 50))
    sums = rng.normal(3, 1, (4000, 50)) * counts + rng.normal(0, 4, (4000, 50))
    parts = [perplexity.ratio_se(s, c) for s, c in zip(sums, counts, strict=True)]
    spread = np.std([part["loss"] for part in parts])
    # 4000 repetitions know the spread to 1.1 %; linearising 50 windows costs a few percent more.
    assert np.mean([part["se"] for part in parts]) == pytest.approx(spread, rel=0.05)
    assert perplexity.ratio_se(np.zeros(3), np.zeros(3, dtype=int)) == {"loss": None, "se": None, "tokens": 0}


def test_logits_are_never_whole_and_losses_keep_their_bits(monkeypatch):
    """The largest tensor of logits has 2^16 elements however many windows a batch has; the whole has 15 times those."""
    vocabulary, length, sizes = 1000, 96, []
    cfg = DecoderConfig(layers="bd", n_layer=2, n_head=4, d_model=32, context=length, vocab_size=vocabulary)
    model = stirred(Decoder(cfg).eval(), 0.3, 0)
    windows = torch.randint(vocabulary, (10, length + 1), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(windows[:, :-1])
        whole = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="none")
        model.head.register_forward_hook(lambda module, given, out: sizes.append(out.numel()))
        monkeypatch.setattr(common, "LOGITS_IN_CACHE", 2**16)
        parts = perplexity.token_losses(model, windows, vocabulary)
    assert max(sizes) <= 2**16 and sum(sizes) == 10 * length * vocabulary
    assert torch.equal(parts.flatten(), whole)


def test_windows_are_disjoint_cover_the_text_and_thin_out_evenly():
    parts = [TextTokens(np.arange(100)), TextTokens(np.arange(200, 231))]
    windows = perplexity.cut_windows(parts, 10, limit=10_000)
    assert windows.shape == (9 + 3, 11)
    assert np.array_equal(windows[:9, 1:].ravel(), np.arange(1, 91))  # every target once
    assert windows[9, 0] == 200
    assert perplexity.cut_windows(parts, 10, limit=30)[:, 0].tolist() == [0, 60, 220]


def test_octaves_are_a_partition() -> None:
    for length, names in (
        (1, ["1"]), (2, ["1-2"]), (4, ["1-4"]), (5, ["1-3", "4-5"]), (16, ["1-3", "4-7", "8-16"]), (191, ["64-127", "128-191"]),
        (190, ["32-63", "64-190"]), (256, ["64-127", "128-256"]),
    ):  # fmt: skip
        octaves = perplexity.by_octave(3 * np.arange(1, length + 1), np.full(length, 3))
        assert list(octaves)[-len(names) :] == names
        spans = [[int(end) for end in name.split("-")] for name in octaves]
        assert [first for first, *_ in spans] == [1, *(span[-1] + 1 for span in spans[:-1])] and spans[-1][-1] == length
        assert list(octaves.values()) == [(span[0] + span[-1]) / 2 for span in spans]


def test_a_text_is_a_file_a_folder_or_a_glob(tmp_path):
    pages = [f"Page {i} of a book about the sea. " for i in range(4)]
    content = "".join(json.dumps({"text": page}) + "\n" for page in pages)
    (tmp_path / "one.v2.jsonl.gz").write_bytes(gzip.compress(content.encode()))
    (tmp_path / "two.md").write_text("Of another kind.")
    for text in ("one.v2.jsonl.gz", "", "*.gz"):  # a folder's texts are .txt, .jsonl, ...
        assert common.read_documents(str(tmp_path / text)) == pages


def test_losses_by_document(make_run, call, tokenizer, tmp_path):
    """The end-of-text token before a document is the document's."""
    run, text, pages = make_run("a"), tmp_path / "three.jsonl", ["a" * 200, "b" * 300, "c" * 298]
    text.write_text("".join(json.dumps({"text": page}) + "\n" for page in pages))
    call(perplexity, f"run={run}", f"text={text}")
    tokens = np.concatenate([[tokenizer.eot, *page.encode()] for page in pages])  # 801: five windows of 160
    model = common.open_run(common.EvalConfig(run=str(run))).model
    losses = perplexity.window_losses(model, perplexity.cut_windows([TextTokens(tokens)], 160, 801), 4, 257).numpy()
    means = {str(i): part.mean() for i, part in enumerate(np.split(losses.ravel(), [200, 501]), 1)}
    results = json.loads((run / "eval" / "perplexity_three.json").read_text())["results"]
    assert results["by_document"] == pytest.approx(means, rel=1e-6)
    assert perplexity.by_document(losses, np.ones((5, 160), int)) == {}


def test_frequent_bigrams_are_counted_in_the_training_shards(make_run, call, refused, shards, tokenizer, tmp_path):
    """And shards of another tokenizer are refused."""
    run, other = make_run("a"), tmp_path / "other"
    train = np.array(tokenizer.encode("th" * 1252))  # "th" occurs 1,252 times, "ht" once less
    write_shard(shards / "train_000000.bin", train, vocab_size=tokenizer.vocab_size, fingerprint=tokenizer.fingerprint)
    assert "frequent_hit " in call(perplexity, f"run={run}", "tokens=1600").splitlines()[-1]
    result = run / "eval" / "perplexity.json"
    recall = json.loads(result.read_text())["results"]["recall"]
    counts = {kind: recall[kind]["tokens"] for kind in ("hit", "rare_hit", "frequent_hit")}
    assert recall["rare_at_most"] == 1250 and counts["frequent_hit"] > 0
    assert counts["rare_hit"] == counts["hit"] - counts["frequent_hit"]
    call(perplexity, f"run={run}", "tokens=1600", "training_counts=false")
    assert "rare_hit" not in json.loads(result.read_text())["results"]["recall"]
    other.mkdir()
    build_tokenizer(TokenizerConfig("bpe", 260), ["some text to learn from " * 20]).save(other)
    assert "has another tokenizer than the run" in refused(perplexity, f"run={run}", f"shards={other}")
