"""scripts/bench.py: training steps beside nanoGPT, beside other processes, by their parts, and as they grow."""

import math
import os
from functools import partial
from pathlib import Path

import pytest
import torch

from bench import processes, shares, timing, training
from bench.timing import table
from scripts import bench
from tests.scripts.bench_tools import CPU, tiny

pytestmark = pytest.mark.usefixtures("one_call_per_timing")


NANOGPT = """
import torch
from torch import nn

class GPTConfig:
    def __init__(self, **shape):
        self.__dict__.update(shape)

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


class Here:
    """Stands for `Elsewhere` without the process: builds the work in this one."""

    made: list[tuple] = []

    def __init__(self, environment: dict[str, str], build: object, *arguments: object) -> None:
        self.work = build(*arguments)
        Here.made.append((arguments, environment))

    def __call__(self) -> None:
        self.work()

    def ask(self, function: object, *arguments: object) -> object:
        return function(self.work, *arguments)

    def close(self) -> None:
        pass


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    monkeypatch.setattr(processes, "Elsewhere", Here)
    monkeypatch.setattr(training, "peak_growth", lambda step, device: step() or 100.0)
    monkeypatch.setattr(Here, "made", [])
    return Here.made


def test_nanogpt_and_the_gpt2_stack_are_timed_in_every_mode(
    tmp_path: Path, in_this_process: list[tuple], capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "model.py").write_text(NANOGPT)
    cfg = tiny("train", peer=str(tmp_path), rounds=6, compile=False, dtype="auto")
    cfg.model.vocab_size, cfg.model.context = 96, 16
    rows = bench.train(cfg, CPU)
    dtypes = dict.fromkeys(["float32", str(training.pick_dtype("auto", CPU.device)).removeprefix("torch.")])
    assert [tuple(row.labels.values()) for row in rows] == [
        (code, "eager", dtype) for dtype in dtypes for code in ("nanoGPT", "gpt2")
    ]
    assert not any(variables for _, variables in in_this_process)
    assert not capsys.readouterr().out  # the peer's own lines do not stand in our table
    for its, ours in zip(rows[::2], rows[1::2], strict=True):
        ratios = sorted(a / b for a, b in zip(its.seconds["tokens/s"], ours.seconds["tokens/s"], strict=True))
        assert ours.amount == its.amount == 2 * 16 and its.facts["parameters"] == 2 * 96 * 64
        assert ours.facts["speed / nanoGPT, same mode"] == pytest.approx(bench.median(ratios))
        assert (ours.facts["low"], ours.facts["high"]) == pytest.approx((ratios[0], ratios[-1]))
        # nanoGPT's state is its parameters and AdamW's two moments of each, beside steps counted in one float per tensor
        assert its.facts["memory (MB)"] == pytest.approx(100 + 3 * 4 * 2 * 96 * 64 / 1e6, abs=1e-4)
        assert ours.facts["memory / nanoGPT"] == ours.facts["memory (MB)"] / its.facts["memory (MB)"]
    best = min((row for row in rows[::2]), key=lambda row: bench.median(row.seconds["tokens/s"]))
    of_best = bench.median(timing.paired_ratios(rows[1], best, "tokens/s"))
    assert rows[1].facts["speed / nanoGPT, fastest mode"] == pytest.approx(of_best)
    assert "speed / nanoGPT, same mode" in table(rows)


@pytest.mark.parametrize("text", [None, "", "GPT = GPTConfig = 1", "import no_such_module_1"])
def test_a_peer_that_is_no_nanogpt_is_refused_with_what_to_type(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "model.py").write_text(text)
    with pytest.raises(ValueError, match="is not a nanoGPT checkout.*git clone https://github.com/karpathy/nanoGPT") as info:
        bench.train(tiny("train", peer=str(tmp_path)), CPU)
    assert "\n" not in str(info.value)


def test_an_own_process_has_its_variables_and_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEED_A", "1")
    builds = [(partial, map, os.getenv, ("SPEED_A", "SPEED_B")), (int, "no number")]
    with processes.elsewhere(builds, [{"SPEED_B": "2"}, {}]) as (work, none):
        assert work.ask(texts_of) == ["1", "2"] and "no number" in none
        assert work() is None and "SPEED_B" not in os.environ


def texts_of(work: partial) -> list[str]:
    return list(work())


def test_busy_times_every_way_to_wait_beside_each_number_of_processes(
    in_this_process: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = []
    monkeypatch.setattr(processes.subprocess, "Popen", lambda command: others.append(Other()) or others[-1])
    rows = bench.busy(tiny("busy", neighbours=[0, 2]), CPU)
    assert [row.labels["busy"] for row in rows] == [0] * len(training.WAITS) + [2] * len(training.WAITS)
    assert [variables for _, variables in in_this_process] == list(training.WAITS.values())
    assert len(others) == 2 and all(other.ended == ["kill", "wait"] for other in others)
    speeds = [row.facts["speed / fastest without neighbours"] for row in rows]
    seconds = [bench.median(row.seconds["tokens/s"]) for row in rows]
    assert max(speeds[: len(training.WAITS)]) == 1
    assert speeds[-1] == pytest.approx(min(seconds[: len(training.WAITS)]) / seconds[-1])


class Other:
    """A process that another one starts."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def kill(self) -> None:
        self.ended.append("kill")

    def wait(self) -> None:
        self.ended.append("wait")


def test_growth_fits_exponents_over_context_and_over_parameters(
    in_this_process: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "SIZES", ((1, 64), (1, 128)))
    monkeypatch.setattr(training, "GROWTH_TOKENS", 32)
    rows = bench.growth(tiny("growth", lengths=[16, 32]), CPU)
    names = ("baseline", "diff")
    assert [tuple(row.labels.values()) for row in rows] == [("context", v, T) for T in (16, 32, "fit") for v in names]
    assert all(row.amount == 32 for row in rows if row.seconds)
    rows = bench.growth(tiny("growth", lengths=[16, 48], variants=["baseline"]), CPU)
    assert [row.amount for row in rows] == [48, 48, None]  # the longest context counts where it is longer
    rows = bench.growth(tiny("growth", lengths=[16, 32], over="parameters"), CPU)
    assert [tuple(row.labels.values()) for row in rows] == [("parameters", v, T) for T in (16, 16, "fit") for v in names]
    small, large = rows[0].facts, rows[2].facts
    expected = math.log(large["memory (MB)"] / small["memory (MB)"]) / math.log(large["parameters"] / small["parameters"])
    assert rows[4].facts["memory exponent"] == pytest.approx(expected) and "time exponent" in table(rows)


def test_shares_of_a_step_are_of_its_parts_and_make_up_the_whole() -> None:
    rows = bench.shares(tiny("shares", variants=["baseline", "diff"]), CPU)
    assert [row.labels["model"] for row in rows] == ["baseline", "diff"]
    for row in rows:
        assert list(row.facts) == [f"{part} (%)" for part in (*shares.PARTS, shares.REST)]
        assert sum(row.facts.values()) == pytest.approx(100) and min(row.facts.values()) > 0


@pytest.mark.parametrize(("given", "whether"), [(None, False), (False, False), (True, True)])
def test_shares_are_those_of_an_uncompiled_step_by_default(
    given: bool | None, whether: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None means compiled on CUDA elsewhere; a compiled step has no operation named after the loss."""
    seen = []
    monkeypatch.setattr(shares, "training_steps", lambda cfg, *rest: seen.append(cfg.compile) or ([], []))
    bench.shares(tiny("shares", compile=given), CPU)
    assert seen == [whether]


def test_clipping_is_a_part_of_the_optimizer() -> None:
    step = training.TrainingStep(tiny("shares"), "baseline", 1, CPU)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        step()
    norms = [event for event in found.events() if event.name in ("aten::_foreach_norm", "aten::linalg_vector_norm")]
    assert norms and {shares.part_of(event) for event in norms} == {"optimizer"}


def test_an_operation_belongs_to_the_part_of_its_outermost_caller() -> None:
    class Event:
        def __init__(self, name: str, cpu_parent: "Event | None" = None) -> None:
            self.name, self.cpu_parent = name, cpu_parent

    loss, step = Event("_LinearCrossEntropyBackward"), Event("Optimizer.step#Muon.step")
    cases = {
        "head and loss": Event("aten::mm", loss),
        "optimizer": Event("aten::bmm", Event("aten::matmul", step)),
        "attention": Event("aten::bmm", Event("model_attention_kernels_cpu::attend", Event("block"))),
        "products": Event("aten::mm", Event("MmBackward0")),
        "casts and copies": Event("aten::copy_", Event("aten::to")),
        shares.REST: Event("aten::mul", Event("MulBackward0")),
    }
    assert {part: shares.part_of(event) for part, event in cases.items()} == {part: part for part in cases}
    assert shares.part_of(Event("diffattn::forward")) == "attention"  # our operator of the fused kernel


def test_choices_are_two_ways_of_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    monkeypatch.setattr(shares, "layer", lambda cfg, world, tokens, outputs: lambda: done.append(sum(outputs)))
    rows = bench.choices(tiny("choices", dtype="bfloat16"), CPU)
    assert [tuple(row.labels.values()) for row in rows] == [
        ("q/k/v", "3 products"), ("q/k/v", "1 product"), ("gate/up", "2 products"), ("gate/up", "1 product"),
        ("residual", "float32"), ("residual", "bfloat16"),
    ]  # fmt: skip
    assert len(set(done)) == 2 and all(done.count(each) == len(done) / 2 for each in done)
    monkeypatch.undo()
    rows = bench.choices(tiny("choices"), CPU)
    assert all(len(row.seconds["tokens/s"]) == 2 for row in rows) and rows[2].ratio["tokens/s"] == 1


def test_an_exponent_is_the_slope_in_logarithms() -> None:
    rows = [
        timing.Row({"context": T}, tokens, {"tokens/s": [1e-6 * tokens] * 6}, facts={"memory (MB)": T})
        for T, tokens in ((1500, 3000), (2048, 4096), (4096, 4096))
    ]
    fitted = training.fit("context", "baseline", rows).facts  # the same time per token at every length
    assert fitted["time exponent"] == pytest.approx(0, abs=1e-9) and fitted["memory exponent"] == pytest.approx(1)
    assert training.exponent([256, 512, 4096], [3 * x**0.7 for x in (256, 512, 4096)]) == pytest.approx(0.7)


@pytest.mark.parametrize(("n", "low", "high"), [(5, None, None), (6, 1, 6), (10, 2, 9), (20, 6, 15), (30, 10, 21)])
def test_the_interval_of_a_median_is_that_of_the_tables(n: int, low: int | None, high: int | None) -> None:
    """Ranks of the order statistics, as in tables of the sign test (Conover, table A3)."""
    assert timing.median_interval([*range(n, 0, -1)]) == (low, high)
