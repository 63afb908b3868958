"""scripts/bench.py: every `what` at tiny sizes. What is asserted is the bookkeeping and the work done, never a speed."""

import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from bench import attention, data, models, timing, training
from bench.attention import AttentionArm
from bench.decoding import Decoding
from bench.models import BenchConfig
from bench.timing import Row, paired_ratios, table
from configs import CONFIG_DIR
from model.attention import backends, diff, sdpa
from model.config import DecoderConfig
from scripts import bench
from tests.conftest import Typed
from tests.processes import SERVER
from training.distributed import World

CPU = World(0, 1, torch.device("cpu"))
TINY = {"rounds": 2, "device": "cpu", "dtype": "float32", "heads": 4, "width": 8, "batch": 2}
NANOGPT = """
from types import SimpleNamespace as GPTConfig
import torch
from torch import nn
class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        print("parameters: many")
        self.embedding = nn.Embedding(c.vocab_size, c.n_embd)
        self.head = nn.Linear(c.n_embd, c.vocab_size, bias=c.bias)

    def forward(self, idx, targets):
        logits = self.head(self.embedding(idx))
        return logits, nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=learning_rate, betas=betas, weight_decay=weight_decay)
"""


def tiny(what: str, **changes: object) -> BenchConfig:
    return BenchConfig(what=what, model=DecoderConfig(n_layer=2, n_head=8, d_model=64, context=128), **TINY | changes)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call per timing, and processes that have imported torch when they start."""
    monkeypatch.setattr(timing, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(timing, "PROCESSES", SERVER)


def test_rows_are_timed_in_turn_and_a_work_may_be_missing_or_fail_later() -> None:
    calls: list[str] = []

    def call(name: str, times: int) -> None:
        calls.append(name)
        if calls.count(name) > times:
            raise RuntimeError("out of memory")

    rows = [Row({"name": name}) for name in "ABC"]
    timing.time_in_turn("m", rows, [lambda: call("A", 9), lambda: call("B", 3), "out of order"], 3, CPU.device)
    assert "".join(calls) == "AABB" + "ABABA"  # warm-up, then the rounds
    assert len(rows[0].seconds["m"]) == 3 and rows[0].ratio == {"m": 1.0}
    assert [row.not_measured for row in rows] == [{}, {"m": "out of memory"}, {"m": "out of order"}]
    assert not any(row.seconds or row.ratio for row in rows[1:])
    with pytest.raises(KeyError):
        timing.attempt(lambda: {}["a bug"])
    for n, low, high in ((5, None, None), (6, 1, 6), (20, 6, 15)):  # as in tables of the sign test (Conover, table A3)
        assert timing.median_interval([*range(n, 0, -1)]) == (low, high)


def test_attention_has_a_row_per_length_variant_and_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward_only(*given: object, **options: object) -> torch.Tensor:
        if torch.is_grad_enabled():
            raise ValueError("no backward here")
        return original(*given, **options)

    original = sdpa.sdpa
    monkeypatch.setattr(sdpa, "sdpa", forward_only)
    monkeypatch.setattr(attention, "op_memory", lambda *which: 1.5)
    names = ["math", "two_calls", "fused", "sdpa"]  # the second is a route for differences of maps alone
    rows = attention.attention(tiny("attention", variants=["baseline", "diff"], lengths=[8, 24], backends=names), CPU)
    expected = [("baseline", "math"), ("baseline", "fused"), ("baseline", "sdpa"), *(("diff", backend) for backend in names)]
    assert [tuple(row.labels.values()) for row in rows] == [(length, *pair) for length in (8, 24) for pair in expected]
    for row in (rows[0], rows[3], rows[-4]):
        assert list(row.seconds) == list(row.ratio) == list(AttentionArm.MEASURES) and not row.not_measured
        assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in row.seconds.values())
        assert row.facts["memory (MB)"] == 1.5
    assert rows[0].ratio["op forward"] == 1
    assert set(rows[1].not_measured) == set(AttentionArm.MEASURES) and not rows[1].seconds
    assert set(rows[2].seconds) == {"op forward", "module forward"}
    lines = table(rows).splitlines()
    assert "| not measured: the fused kernel needs a CUDA GPU" in lines[3] and "not measured: no backward here" in lines[4]


def test_memory_is_the_peak_of_the_op_alone() -> None:
    _held = torch.ones(50_000_000)  # 200 MB of this process, which the op has nothing to do with
    cfg = tiny("attention", heads=8, width=32, batch=4)
    score = 4 * 8 * 512 * 512 * 4 / 1e6  # one N x N map of all heads, in MB: 34
    whole = attention.op_memory(cfg, "baseline", "math", 512, CPU)
    assert 2 * score < whole < 8 * score  # at least the scores and the weights
    lean = attention.memory_here(cfg, "baseline", "sdpa", 512, CPU)  # in this process, to save the time of another
    assert 0 < lean < score / 2  # never N x N: outputs and gradients of 2 MB each


@pytest.mark.parametrize("variant", models.model_files())
def test_the_op_is_what_the_module_hands_to_the_facade(variant: str) -> None:
    cfg, seen = tiny("attention", heads=8), []
    if models.mixed(cfg, variant):
        with pytest.raises(ValueError, match="several variants"):
            AttentionArm(cfg, variant, "auto", 12, CPU)
        return
    arm = AttentionArm(cfg, variant, "auto", 12, CPU)
    with torch.no_grad(), attention.facade(lambda f: lambda *a, **o: seen.append(f(*a, **o)) or seen[-1]):
        arm.module(arm.x, *arm.rest)
    assert len(seen) > 0
    for ours, its in zip((call() for call in arm.calls), seen, strict=True):
        torch.testing.assert_close(ours, its, rtol=0, atol=0)
    assert diff.attend_diff is backends.attend_diff  # the facade is whole again
    for measure in AttentionArm.MEASURES:
        arm.run(measure)


def here(processes: object, build: Callable, *arguments: object) -> Callable:
    """Stands for `remote_step` without the process: the step is made in this one."""
    step = build(*arguments)
    return lambda function=training.TrainingStep.__call__, *given: function(step, *given)


def test_nanogpt_and_the_gpt2_stack_are_timed_in_every_mode(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(training, "remote_step", here)
    monkeypatch.setattr(training, "peak_growth", lambda step, device: step() or 100.0)
    cfg = tiny("train", peer=str(tmp_path), rounds=6, compile=False, dtype="auto")
    (tmp_path / "model.py").write_text("GPT = GPTConfig = 1")
    with pytest.raises(ValueError, match="not a nanoGPT checkout"):  # a folder without the file: tests/wrong_inputs
        training.train(cfg, CPU)
    (tmp_path / "model.py").write_text(NANOGPT)
    cfg.model.vocab_size, cfg.model.context = 96, 16
    rows = training.train(cfg, CPU)
    dtypes = dict.fromkeys(["float32", str(training.pick_dtype("auto", CPU.device)).removeprefix("torch.")])
    wanted = [(code, "eager", dtype) for dtype in dtypes for code in ("nanoGPT", "gpt2")]
    assert [tuple(row.labels.values()) for row in rows] == wanted
    assert not capsys.readouterr().out  # the lines that the peer prints do not stand in our table
    for its, ours in zip(rows[::2], rows[1::2], strict=True):
        ratios = sorted(a / b for a, b in zip(its.seconds["tokens/s"], ours.seconds["tokens/s"], strict=True))
        assert ours.amount == its.amount == 2 * 16 and its.facts["parameters"] == 2 * 96 * 64
        assert ours.facts["speed / nanoGPT, same mode"] == pytest.approx(timing.median(ratios))
        assert (ours.facts["low"], ours.facts["high"]) == pytest.approx((ratios[0], ratios[-1]))
        # nanoGPT's state is its parameters and AdamW's two moments of each, beside steps counted in one float per tensor
        assert its.facts["memory (MB)"] == pytest.approx(100 + 3 * 4 * 2 * 96 * 64 / 1e6, abs=1e-4)
        assert ours.facts["memory / nanoGPT"] == ours.facts["memory (MB)"] / its.facts["memory (MB)"]
    best = min(rows[::2], key=lambda row: timing.median(row.seconds["tokens/s"]))
    of_best = timing.median(paired_ratios(rows[1], best, "tokens/s"))
    assert rows[1].facts["speed / nanoGPT, fastest mode"] == pytest.approx(of_best)


@pytest.mark.parametrize("variant", models.model_files())
def test_decoding_gives_the_same_token_with_and_without_cache(variant: str) -> None:
    decoding = Decoding(tiny("decode"), variant, 20, CPU)
    for p in decoding.model.parameters():  # far from the initial values, at which a token predicts itself
        p.data.normal_(std=0.3, generator=torch.Generator().manual_seed(p.numel()))
    decoding.model.double()  # in float32 two equally likely tokens may change places
    decoding.cache.slots, decoding.cache.length = {}, 0
    with torch.no_grad():
        decoding.model(decoding.tokens[:, :-1], cache=decoding.cache)
    token = decoding.cached()
    assert token.shape == (2,) and not torch.equal(token, decoding.tokens[:, -1])
    assert torch.equal(token, decoding.uncached()) and torch.equal(token, decoding.cached())


def test_decode_compares_with_and_without_cache() -> None:
    rows = bench.decode(tiny("decode", variants=["baseline", "diff_v2"], lengths=[1, 20]), CPU)
    models_and_caches = [(model, cache) for model in ("baseline", "diff_v2") for cache in ("yes", "no")]
    assert [tuple(row.labels.values()) for row in rows[4:]] == [(20, *pair) for pair in models_and_caches]
    assert "nothing to cache" in rows[0].not_measured["token"] and not rows[0].facts
    for cached, uncached in zip(rows[4::2], rows[5::2], strict=True):
        assert cached.facts == {"faster than without": timing.median(paired_ratios(uncached, cached, "token"))}
        assert not uncached.facts
    assert "token (ms)" in table(rows) and rows[4].ratio["token"] == 1


def test_loader_reads_both_widths_and_retrieval_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "SHARD_TOKENS", 20_000)
    cfg = tiny("loader")
    cfg.model.context = 256  # of bytes: a retrieval document needs so many
    rows = data.loader(cfg, CPU)
    assert [row.labels["source"] for row in rows] == ["text, uint16", "text, uint32", "retrieval documents"]
    assert all(len(row.seconds["tokens/s"]) == 2 and row.amount == 2 * 256 for row in rows)
    assert all(0 < row.facts["of a step (%)"] < 100 and row.facts["wait (ms)"] > 0 for row in rows)


def test_tokenizer_says_which_vocabulary_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.tokenizer.tiktoken.get_encoding", Mock(side_effect=OSError("no network")))
    for name, value in (("TEXT", (CONFIG_DIR / "__init__.py").read_text()), ("COPIES", 2), ("VOCABULARY", 400)):
        monkeypatch.setattr(data, name, value)
    rows = data.tokenizer(tiny("tokenizer"), CPU)
    ways = ("tiktoken alone", "our tokenizer", "data.prepare")
    assert [tuple(row.labels.values()) for row in rows[:-1]] == [(name, way) for name in ("bytes", "bpe") for way in ways]
    assert all(len(row.seconds["MB/s"]) == 2 for row in rows[:-1]) and rows[0].facts["bytes/token"] == 1
    assert rows[-1].labels["tokenizer"] == "gpt2" and "TIKTOKEN_CACHE_DIR" in rows[-1].not_measured["MB/s"]


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path, typed: Typed) -> None:
    out = tmp_path / "train.json"
    shape = ("size=nano", "model.n_layer=1", "model.context=32", "batch=1", "rounds=2", "device=cpu", "dtype=float32")
    done = typed("scripts/bench.py", "what=train", "variants=[baseline,diff]", *shape, f"out={out}")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("| model ") and "tokens/s" in lines[0] and lines[1].startswith("| ---")
    assert "n = 2 rounds" in lines[-2] and str(out) in lines[-1]
    assert out.with_suffix(".md").read_text().splitlines() == lines[:-1]
    content = json.loads(out.read_text())
    assert {"bench", "config", "machine", "version", "results"} <= set(content)
    assert content["config"]["model"]["d_model"] == 128 and content["machine"]["threads"] == 1
    first, second = content["results"]["rows"]
    assert first["labels"]["model"] == "baseline" and len(first["seconds"]["tokens/s"]) == 2
    assert first["amount"] == 32 and first["ratio"] == {"tokens/s": 1.0}
    assert second["facts"]["parameters"] == pytest.approx(first["facts"]["parameters"], rel=0.005)
    assert first["facts"]["mfu"] is None  # of a CPU
