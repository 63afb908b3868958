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
from eval.recall import ends_one_of, recall_hits
from model.config import DecoderConfig
from model.decoder import Decoder

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
    results = perplexity.evaluate(Counting(), windows, BYTES, batch=3)
    losses = perplexity.token_losses(Counting(), torch.from_numpy(windows), V).numpy()
    hits = recall_hits(windows, 2, V)
    recall = results["recall"]
    assert recall["ngram"] == 2 and recall["hit"]["tokens"] == hits.sum()
    assert recall["hit"]["loss"] == pytest.approx(losses[hits].mean(), rel=1e-6)
    assert recall["other"]["loss"] == pytest.approx(losses[~hits].mean(), rel=1e-6)
    parts = [part["loss"] * part["tokens"] for part in (recall["hit"], recall["other"])]
    assert sum(parts) / results["tokens"] == pytest.approx(results["loss"])
    assert recall.keys() == {"ngram", "hit", "other"}
    spans = {"1-3": slice(0, 3), "4-7": slice(3, 7), "8-19": slice(7, 19)}
    others = {name: losses[:, span][~hits[:, span]].mean() for name, span in spans.items()}
    assert recall["other"]["by_octave"] == pytest.approx(others, rel=1e-6)


def test_hits_are_split_by_what_is_frequent_in_training():
    windows = np.random.default_rng(2).integers(0, 3, (7, 20))
    losses = perplexity.token_losses(Counting(), torch.from_numpy(windows), V).numpy()
    hits = recall_hits(windows, 2, V)
    known = ends_one_of(np.array([V * 1 + 2, V * 2 + 2]), windows, 2, V)  # the bigrams (1, 2) and (2, 2)
    plain = perplexity.evaluate(Counting(), windows, BYTES)["recall"]
    split = perplexity.evaluate(Counting(), windows, BYTES, 3, 2, np.array([V * 1 + 2, V * 2 + 2]))["recall"]
    assert (split["hit"], split["other"]) == (plain["hit"], plain["other"])
    for kind, mask in (("rare_hit", hits & ~known), ("frequent_hit", hits & known)):
        assert split[kind]["tokens"] == mask.sum() > 0
        assert split[kind]["loss"] == pytest.approx(losses[mask].mean(), rel=1e-6)


def test_the_standard_error_of_a_ratio_is_that_of_its_repetitions():
    rng = np.random.default_rng(0)
    counts = rng.integers(5, 30, (4000, 50))
    sums = rng.normal(3, 1, (4000, 50)) * counts + rng.normal(0, 4, (4000, 50))
    found = [perplexity.ratio_se(s, c) for s, c in zip(sums, counts, strict=True)]
    spread = np.std([part["loss"] for part in found])
    # 4000 repetitions know the spread to 1.1 %; linearising 50 windows costs a few percent more.
    assert np.mean([part["se"] for part in found]) == pytest.approx(spread, rel=0.05)
    assert perplexity.ratio_se(np.zeros(3), np.zeros(3, dtype=int)) == {"loss": None, "se": None, "tokens": 0}


def head_sizes(model: Decoder) -> list[int]:
    """The elements of every tensor of logits that the model's head makes from now on."""
    sizes: list[int] = []
    model.head.register_forward_hook(lambda module, given, out: sizes.append(out.numel()))
    return sizes


@pytest.mark.parametrize(("vocabulary", "length"), [(1000, 96), (333, 75)])
def test_logits_are_never_whole_and_losses_keep_their_bits(monkeypatch, vocabulary, length):
    """The largest tensor of logits has 2^16 elements however many windows a batch has; the whole has 3 to 15 times those."""
    cfg = DecoderConfig(layers="bd", n_layer=2, n_head=4, d_model=32, context=length, vocab_size=vocabulary)
    model = Decoder(cfg).eval()
    for p in model.parameters():
        p.data.normal_(std=0.3, generator=torch.Generator().manual_seed(p.numel()))
    windows = torch.randint(vocabulary, (10, length + 1), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(windows[:, :-1])
        whole = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="none")
        sizes = head_sizes(model)
        monkeypatch.setattr(common, "LOGITS_IN_CACHE", 2**16)
        parts = perplexity.token_losses(model, windows, vocabulary)
    assert max(sizes) <= max(2**16, 64 * vocabulary) < sum(sizes) / 3 == 10 * length * vocabulary / 3
    assert torch.equal(parts.flatten(), whole)


def test_windows_are_disjoint_cover_the_text_and_thin_out_evenly():
    parts = [TextTokens(np.arange(100)), TextTokens(np.arange(200, 231))]
    windows = perplexity.cut_windows(parts, 10, limit=10_000)
    assert windows.shape == (9 + 3, 11)
    assert np.array_equal(windows[:9, 1:].ravel(), np.arange(1, 91))  # every target once
    assert windows[9, 0] == 200
    assert perplexity.cut_windows(parts, 10, limit=30)[:, 0].tolist() == [0, 60, 220]
    with pytest.raises(ValueError, match="use tokens=10"):
        perplexity.cut_windows(parts, 10, limit=9)


@pytest.mark.parametrize(
    ("length", "names"),
    [(1, ["1"]), (2, ["1-2"]), (4, ["1-4"]), (5, ["1-3", "4-5"]), (16, ["1-3", "4-7", "8-16"]), (191, ["64-127", "128-191"]),
     (190, ["32-63", "64-190"]), (256, ["64-127", "128-256"])],
)  # fmt: skip
def test_octaves_are_a_partition(length: int, names: list[str]) -> None:
    found = perplexity.by_octave(3 * np.arange(1, length + 1), np.full(length, 3))
    assert list(found)[-len(names) :] == names
    spans = [[int(end) for end in name.split("-")] for name in found]
    assert [first for first, *_ in spans] == [1, *(span[-1] + 1 for span in spans[:-1])] and spans[-1][-1] == length
    assert list(found.values()) == [(span[0] + span[-1]) / 2 for span in spans]


def test_the_command_writes_json_and_figure(make_run, call, capsys, tokenizer):
    run = make_run("diff", "d")
    call(perplexity, f"run={run}")
    assert capsys.readouterr().out.startswith("perplexity  diff: loss ")
    content = json.loads((run / "eval" / "perplexity.json").read_text())
    assert {"eval", "run", "config", "machine", "version", "results"} <= content.keys()
    results = content["results"]
    assert (content["run"], content["step"], results["length"], len(results["by_position"])) == ("diff", 4, 160, 160)
    assert results["loss"] == pytest.approx(math.log(tokenizer.vocab_size), rel=0.05)  # untrained
    octaves = perplexity.by_octave(np.array(results["by_position"]), np.ones(160))
    assert results["by_octave"] == pytest.approx(octaves) and len(octaves) == 6
    assert results["bits_per_byte"] == pytest.approx(results["loss"] / math.log(2), rel=1e-3)  # a byte a token
    assert results["recall"]["rare_at_most"] is None and results["recall"]["hit"]["tokens"] > 1000
    assert (run / "figures" / "perplexity.png").stat().st_size > 10_000


def results_of(run, file: str = "perplexity") -> dict:
    return json.loads((run / "eval" / f"{file}.json").read_text())["results"]


def test_a_text_is_a_file_a_folder_or_a_glob(make_run, call, tmp_path):
    run, folder = make_run("a"), tmp_path / "books"
    folder.mkdir()
    lines = [json.dumps({"text": f"Page {i} of a book about the sea. " * 9}) + "\n" for i in range(4)]
    (folder / "one.v2.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    (folder / "two.md").write_text("Wörter, in one piece. " * 40)
    texts = {"one": "one.v2.jsonl.gz", "books": "", "glob": "*.gz", "two": "two.md"}
    for name, text in texts.items():
        call(perplexity, f"run={run}", f"text='{folder / text}'", "length=50", f"name={name}")
    one, all_of_it, glob, plain = (results_of(run, f"perplexity_{name}") for name in texts)
    assert one["sha256"] == glob["sha256"] == all_of_it["sha256"] != plain["sha256"]  # a folder's texts are .txt, .jsonl, ...
    assert (one["length"], one["tokens"]) == (50, 50 * one["windows"]) and glob["text"] == "*.gz" and plain["text"] == "two.md"


def test_frequent_ngrams_are_counted_in_the_training_shards(make_run, call, refused, shards, tokenizer, capsys):
    run = make_run("a")
    assert "leave out frequent=" in refused(perplexity, f"run={run}", "frequent=5")
    call(perplexity, f"run={run}")
    assert "rare_hit" not in results_of(run)["recall"] and results_of(run)["recall"]["rare_at_most"] is None
    hits = results_of(run)["recall"]["hit"]["tokens"]
    train = np.array(tokenizer.encode("th" * 1252))
    write_shard(shards / "train_000000.bin", train, vocab_size=tokenizer.vocab_size, fingerprint=tokenizer.fingerprint)
    for most, given in ((1252, "frequent=1252"), (1250, "frequent=null")):
        call(perplexity, f"run={run}", given)
        recall = results_of(run)["recall"]
        counts = {kind: recall[kind]["tokens"] for kind in ("hit", "rare_hit", "frequent_hit")}
        assert recall["rare_at_most"] == most and (counts["frequent_hit"] > 0) == (most == 1250)  # 1,252 times "th"
        assert counts["rare_hit"] == counts["hit"] - counts["frequent_hit"] and counts["hit"] == hits
    assert "frequent_hit " in capsys.readouterr().out.splitlines()[-1]
    call(perplexity, f"run={run}", "training_counts=false")
    assert "rare_hit" not in results_of(run)["recall"]
    assert "one of them" in refused(perplexity, f"run={run}", "training_counts=false", "frequent=9")


def test_a_text_that_is_no_file_names_its_own_option(make_run, refused):
    wrong = refused(perplexity, f"run={make_run('a')}", "text=/dev/null")
    assert wrong.endswith("correct text=") and "path=" not in wrong


def test_another_tokenizer_is_refused(make_run, refused, tmp_path):
    run, folder = make_run("a"), tmp_path / "other"
    folder.mkdir()
    other = build_tokenizer(TokenizerConfig(name="bpe", vocab_size=262), ["the rain in the road " * 50])
    tokens = np.array(other.encode("the rain " * 400))
    write_shard(folder / "val_000000.bin", tokens, vocab_size=other.vocab_size, fingerprint=other.fingerprint)
    assert "another tokenizer" in refused(perplexity, f"run={run}", f"shards={folder}")
    other.save(folder)
    assert "another tokenizer" in refused(perplexity, f"run={run}", f"shards={folder}")
