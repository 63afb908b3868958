"""scripts/bench.py: every `what` at tiny sizes. What is asserted is the bookkeeping and the work done, never a speed."""

import json
import math
from pathlib import Path

import pytest
import torch

from bench import attention, data, models, timing
from bench.attention import AttentionArm
from bench.timing import Row, paired_ratios, table
from model.attention import backends, diff
from scripts import bench
from scripts.bench import Decoding
from tests.conftest import run_command
from tests.scripts.bench_tools import CPU, row_of, tiny

pytestmark = pytest.mark.usefixtures("one_call_per_timing")


def test_attention_has_a_row_per_length_variant_and_backend() -> None:
    backends_asked = ["auto", "math", "sdpa", "two_calls"]  # the last is a route for differences of maps alone
    cfg = tiny("attention", variants=["baseline", "diff"], lengths=[8, 24], backends=backends_asked)
    rows = bench.attention(cfg, CPU)
    assert [tuple(row.labels.values()) for row in rows[:7]] == [
        *((8, "baseline", backend) for backend in ("auto", "math", "sdpa")),
        *((8, "diff", backend) for backend in backends_asked),
    ]
    assert len(rows) == 14 and not any(row.not_measured for row in rows)
    for row in rows:
        assert list(row.seconds) == list(row.ratio) == list(AttentionArm.MEASURES)
        assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in row.seconds.values())
        assert row.facts["memory (MB)"] == 1.5
        assert row.facts["error"] < 1e-5  # float32 sums over at most 24 keys, outputs of order 1: a few 1e-7
    assert row_of(rows, length=24, variant="baseline", backend="auto").ratio["op forward"] == 1


def test_memory_is_the_peak_of_the_op_alone() -> None:
    held = torch.ones(50_000_000)  # 200 MB of this process, which the op has nothing to do with
    cfg = tiny("attention", heads=8, width=32, batch=4)
    score = 4 * 8 * 512 * 512 * 4 / 1e6  # one N x N map of all heads, in MB: 34
    whole = attention.op_memory(cfg, "baseline", "math", 512, CPU)
    assert 2 * score < whole < 8 * score  # at least the scores and the weights
    lean = attention._op_memory(cfg, "baseline", "sdpa", 512, CPU)  # in this process, to save the time of another
    assert 0 < lean < score / 2  # never N x N: outputs and gradients of 2 MB each
    assert held.sum() > 0


def test_what_a_backend_cannot_do_is_a_row_that_says_why() -> None:
    rows = bench.attention(tiny("attention", variants=["diff"], lengths=[8], backends=["auto", "fused"]), CPU)
    row = row_of(rows, backend="fused")
    assert set(row.not_measured) == set(AttentionArm.MEASURES) and not row.seconds
    line = next(line for line in table(rows).splitlines() if "fused" in line)
    assert "| not measured: the fused kernel needs a CUDA GPU" in line


def test_a_missing_backward_leaves_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward_only(q: torch.Tensor, *rest: object) -> torch.Tensor:
        if torch.is_grad_enabled():
            raise ValueError("no backward here")
        return original(q, *rest)

    original = backends.sdpa
    monkeypatch.setattr(backends, "sdpa", lambda q, *rest, **options: forward_only(q, *rest))
    rows = bench.attention(tiny("attention", variants=["baseline"], lengths=[8], backends=["sdpa"]), CPU)
    assert set(rows[0].seconds) == {"op forward", "module forward"}
    assert "op forward+backward, module forward+backward not measured: no backward here" in table(rows)


@pytest.mark.parametrize("variant", models.names())
def test_the_op_is_what_the_module_hands_to_the_facade(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = tiny("attention", heads=8)
    if models.mixed(cfg, variant):
        with pytest.raises(ValueError, match="several variants"):
            AttentionArm(cfg, variant, "auto", 12, CPU)
        return
    arm = AttentionArm(cfg, variant, "auto", 12, CPU)
    seen = []
    with torch.no_grad(), attention.facade(lambda name, f: lambda *a, **o: seen.append(f(*a, **o)) or seen[-1]):
        arm.module(arm.x, *arm.rest)
    outputs = arm.op()
    assert len(outputs) == len(seen) > 0
    for ours, its in zip(outputs, seen, strict=True):
        torch.testing.assert_close(ours, its, rtol=0, atol=0)
    assert diff.attend_diff is backends.attend_diff  # the facade is whole again
    for measure in AttentionArm.MEASURES:
        arm.run(measure)


@pytest.mark.parametrize("row", (0, 13, 19))
def test_the_error_is_seen_in_every_row(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "ERROR_ROWS", 7)
    arm = AttentionArm(tiny("attention"), "baseline", "sdpa", 20, CPU)

    attend, planted = backends.attend, [0.25, float("nan")]

    def wrong(*args: object, **options: object) -> torch.Tensor:
        y = attend(*args, **options)
        return y if options["backend"] == "math" else y + planted[0] * (torch.arange(y.shape[-2]) == row)[:, None]

    monkeypatch.setattr(backends, "attend", wrong)
    assert arm.largest_error() == pytest.approx(0.25, abs=1e-5)  # float32: a few 1e-7
    planted.pop(0)
    assert math.isnan(arm.largest_error())


def test_ratios_are_medians_of_paired_rounds() -> None:
    # The machine slows down threefold after the first round; the ratio of medians would be 2.
    first, second = (Row({}, seconds={"m": s}) for s in ([1.0, 3.0, 3.0], [2.0, 6.0, 9.0]))
    assert bench.median(paired_ratios(second, first, "m")) == 2.0
    first.amount = second.amount = 10.0
    assert bench.median(paired_ratios(second, first, "m")) == 0.5  # of speeds
    second.amount = 20.0
    assert bench.median(paired_ratios(second, first, "m")) == 1.0


def test_rows_are_timed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    rows = [Row({"name": name}) for name in "AB"] + [Row({"name": "C"})]
    works = [lambda: calls.append("A"), lambda: calls.append("B"), "out of order"]
    timing.time_in_turn("m", rows, works, 3, CPU.device)
    assert "".join(calls) == "AA" + "BB" + "AB" * 3  # warm-up, then the rounds
    assert rows[2].not_measured == {"m": "out of order"} and "m" not in rows[2].seconds


def test_a_work_that_fails_in_a_later_round_leaves_the_others_their_times() -> None:
    calls = iter(range(100))

    def fails() -> None:
        if next(calls) >= 3:  # after two calls to warm up and one round
            raise RuntimeError("out of memory")

    rows = [Row({"name": name}) for name in "AB"]
    timing.time_in_turn("m", rows, [fails, lambda: None], 3, CPU.device)
    assert rows[0].not_measured == {"m": "out of memory"} and not rows[0].seconds and not rows[0].ratio
    assert len(rows[1].seconds["m"]) == 3 and rows[1].ratio == {"m": 1.0}


def test_an_error_of_triton_makes_its_row_unavailable_and_a_bug_ends_the_bench() -> None:
    """Triton's OutOfResources is no RuntimeError."""
    own = type("OutOfResources", (Exception,), {"__module__": "triton.runtime.errors"})

    def fail(error: Exception) -> None:
        raise error

    row = Row({})
    timing.time_in_turn("m", [row], [lambda: fail(own("out of resource: shared memory"))], 1, CPU.device)
    assert row.not_measured == {"m": "out of resource: shared memory"}
    with pytest.raises(KeyError):
        timing.attempt(lambda: fail(KeyError("a bug")))


def test_train_takes_optimizer_steps_and_counts_their_tokens() -> None:
    cfg = tiny("train", variants=["baseline", "diff"])
    rows = bench.train(cfg, CPU)
    assert [row.labels["model"] for row in rows] == ["baseline", "diff"]
    assert rows[0].amount == 2 * 128 and rows[0].ratio == {"tokens/s": 1.0}
    assert rows[1].facts["parameters"] == pytest.approx(rows[0].facts["parameters"], rel=0.005)
    assert rows[0].facts["mfu"] is None  # of a CPU
    step = bench.TrainingStep(cfg, "diff", 2, CPU)
    before = {name: p.clone() for name, p in step.model.named_parameters()}
    step()
    assert all((p != before[name]).any() for name, p in step.model.named_parameters())


@pytest.mark.parametrize("variant", models.names())
def test_decoding_gives_the_same_token_with_and_without_cache(variant: str) -> None:
    decoding = Decoding(tiny("decode"), variant, 40, CPU)
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
    assert [tuple(row.labels.values()) for row in rows[4:]] == [
        (20, model, cache) for model in ("baseline", "diff_v2") for cache in ("yes", "no")
    ]
    assert "nothing to cache" in rows[0].not_measured["token"] and not rows[0].facts
    for cached, uncached in zip(rows[4::2], rows[5::2], strict=True):
        assert cached.facts == {"faster than without": bench.median(paired_ratios(uncached, cached, "token"))}
        assert not uncached.facts
    assert "token (ms)" in table(rows) and rows[4].ratio["token"] == 1


def test_loader_reads_both_widths_and_retrieval_documents() -> None:
    cfg = tiny("loader")
    cfg.model.context = 256  # of bytes: a retrieval document needs so many
    rows = bench.loader(cfg, CPU)
    assert [row.labels["source"] for row in rows] == ["text, uint16", "text, uint32", "retrieval documents"]
    assert all(len(row.seconds["tokens/s"]) == 2 and row.amount == 2 * 256 for row in rows)
    assert all(0 < row.facts["of a step (%)"] < 100 and row.facts["wait (ms)"] > 0 for row in rows)


def test_tokenizer_says_which_vocabulary_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str) -> None:
        raise OSError("no network")

    monkeypatch.setattr("data.tokenizer.tiktoken.get_encoding", offline)
    monkeypatch.setattr(data, "sample_text", lambda: (models.CONFIG_DIR / "__init__.py").read_text() * 20)
    monkeypatch.setattr(data, "VOCABULARY", 400)
    rows = bench.tokenizer(tiny("tokenizer"), CPU)
    ways = ("tiktoken alone", "our tokenizer", "data.prepare")
    assert [tuple(row.labels.values()) for row in rows[:-1]] == [(name, way) for name in ("bytes", "bpe") for way in ways]
    assert all(len(row.seconds["MB/s"]) == 2 for row in rows[:-1]) and rows[0].facts["bytes/token"] == 1
    assert rows[0].ratio["MB/s"] == rows[3].ratio["MB/s"] == 1  # of each tokenizer, to tiktoken alone
    assert "TIKTOKEN_CACHE_DIR" in row_of(rows, tokenizer="gpt2").not_measured["MB/s"]


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    out = tmp_path / "train.json"
    done = run_command(
        "scripts/bench.py", "what=train", "size=nano", "variants=[baseline,diff]", "batch=1", "rounds=2",
        "device=cpu", "dtype=float32", f"out={out}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("| model ") and "tokens/s" in lines[0] and lines[1].startswith("| ---")
    assert "n = 2 rounds" in lines[-2] and str(out) in lines[-1]
    assert out.with_suffix(".md").read_text().splitlines() == lines[:-1]
    content = json.loads(out.read_text())
    assert {"bench", "config", "machine", "version", "results"} <= set(content)
    assert content["config"]["model"]["d_model"] == 128 and content["machine"]["threads"] == 1
    first = content["results"]["rows"][0]
    assert first["labels"]["model"] == "baseline" and len(first["seconds"]["tokens/s"]) == 2


def test_the_help_names_every_bench() -> None:
    assert all(f"\n    {what} " in f"{bench.__doc__} " for what in bench.BENCHES)


def test_probe_has_a_row_per_length_and_variant_with_the_memory_of_its_own_process() -> None:
    held = torch.ones(150_000_000)  # 600 MB that no other process should be charged with
    rows = bench.probe(tiny("probe", variants=["baseline", "diff"], lengths=[40], rounds=1, batch=1), CPU)
    assert [tuple(row.labels.values()) for row in rows] == [(40, "baseline"), (40, "diff")]
    for row in rows:
        assert len(row.seconds["rows"]) == 1 and not row.not_measured
        assert 50 < row.facts["peak memory (MB)"] < timing.peak_of_process(CPU.device) - 300
    assert row_of(rows, length=40, variant="baseline").ratio["rows"] == 1
    assert held.sum() > 0


def test_a_probe_that_fails_in_a_later_round_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def once(_: object, cfg: object, variant: str, *others: object) -> tuple[float, float]:
        tried.append(variant)
        if tried[-1] == "diff" and tried.count("diff") == 2:
            raise ValueError("killed")
        return 1.0, 50.0

    monkeypatch.setattr(bench, "in_own_process", once)
    rows = bench.probe(tiny("probe", variants=["baseline", "diff"], lengths=[40], rounds=3, batch=1), CPU)
    assert len(rows[0].seconds["rows"]) == 3 and rows[0].ratio["rows"] == 1
    assert rows[1].not_measured["rows"] == "killed" and not rows[1].seconds and tried.count("diff") == 2


def test_grouped_keys_and_windows_reach_every_arm() -> None:
    cfg = tiny("attention", variants=["diff"], backends=["sdpa"], lengths=[12])
    cfg.model.n_kv_head = 2
    assert all(row.facts["error"] < 1e-5 for row in bench.attention(cfg, CPU))  # float32: a few 1e-7
    cfg.model.window = 4
    rows = bench.attention(cfg, CPU)
    assert rows[0].facts["error"] < 1e-5


def test_monitor_states_its_share_of_a_step() -> None:
    rows = bench.monitor(tiny("monitor", variants=["baseline", "diff"]), CPU)
    for row in rows:
        assert list(row.seconds) == ["step", "step and look"] and all(len(s) == 2 for s in row.seconds.values())
        assert 0 < row.facts["look (ms)"] < 1e3 * max(row.seconds["step and look"])
        share = row.facts["look (ms)"] / 1e3 / 100 / bench.median(row.seconds["step"])
        assert row.facts["share at every=100 (%)"] == pytest.approx(100 * share)


def test_a_checkpoint_states_its_share_of_a_step() -> None:
    (row,) = bench.checkpoint(tiny("checkpoint", variants=["baseline"]), CPU)
    parameters = bench.TrainingStep(tiny("checkpoint"), "baseline", 1, CPU).model.num_params()
    assert row.facts["checkpoint (MB)"] > 12e-6 * parameters  # float32: weights, and AdamW's two moments
    share = bench.median(row.seconds["checkpoint"]) / bench.median(row.seconds["step"])
    assert row.facts["share at every=100 (%)"] == pytest.approx(share) and share > 0
