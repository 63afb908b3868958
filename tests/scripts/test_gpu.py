"""`make gpu` on a machine without a card: every stage's stand-in, what a second visit repeats, and what goes wrong."""

import itertools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from configs import CONFIG_DIR
from configs.files import FolderLock
from scripts import gpu, gpu_stages, gpu_tiles, gpu_tools
from tests.conftest import run_command

MISSING = ("hydra", "omegaconf", "yaml", "wandb", "datasets", "tiktoken", "tokenizers", "transformers")
no_card = pytest.mark.skipif(torch.cuda.is_available(), reason="the stages' stand-ins are for machines without a card")


def rows(path: Path) -> dict[str, dict]:
    content = json.loads(path.read_text())
    assert {"eval", "machine", "version", "results"} <= set(content)
    return content["results"]


def in_this_process(monkeypatch: pytest.MonkeyPatch, out: Path) -> list[gpu.Ended]:
    """Run stages without a process of their own. A stage ends at once as the first of the returned list, if it has any."""
    ends: list[gpu.Ended] = []

    def run(command: list[str], *_: object) -> gpu.Ended:
        stage = next(option.removeprefix("run=") for option in command if option.startswith("run="))
        return ends[0] if ends else gpu.Ended(gpu.run_stage(stage, out, "", 60), 1.0, "")

    monkeypatch.setattr(gpu, "in_process", run)
    return ends


@no_card
@pytest.mark.parametrize("stage", [name for name in gpu_stages.STAGES if name not in ("compiled", "environment")])
def test_every_stage_runs_without_a_card(stage: str, tmp_path: Path) -> None:
    if stage in ("kernel", "tiles", "attention"):
        pytest.importorskip("triton", reason="the fused kernel needs the package triton")
    assert gpu.run_stage(stage, tmp_path, "", 600) == 0
    found = rows(tmp_path / f"{stage}.json")
    failed = {name: row["failed"] for name, row in found.items() if "failed" in row and "flex" not in name}
    assert found and not failed
    if stage == "kernel":
        assert all(row["right"] for row in found.values()), found
    if stage == "training":
        assert all(0 < row["val_loss"] < 10 for row in found.values()), found


@no_card
def test_the_command_needs_only_torch_and_skips_what_is_done(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    without = tmp_path / "without"
    without.mkdir()
    (without / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({MISSING!r}))\n")
    options = ("minutes=5", f"out={tmp_path}", "stages=environment")
    done = run_command("-m", "scripts.gpu", *options, env={"PYTHONPATH": str(without)})
    assert done.returncode == 0 and "environment: 9 rows, 0 failed" in done.stdout, done.stdout + done.stderr
    assert rows(tmp_path / "environment.json")["versions"]["torch"] == torch.__version__
    assert gpu.main(list(options)) == 0 and "done before" in capsys.readouterr().out


def test_two_commands_do_not_measure_at_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    lock = FolderLock(tmp_path, "measures for it")
    assert gpu.main([f"out={tmp_path}", "stages=environment"]) == 2
    assert f"{tmp_path} is in use" in capsys.readouterr().err and not list(tmp_path.glob("*.json"))
    lock.release()


def test_a_row_that_fails_stops_nothing_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> dict:
        raise RuntimeError("CUDA error: an illegal memory access")

    measured = []
    parts = {"bad": lambda: 1 / 0, "good": lambda: measured.append(1) or {"ms": 1.0}, "sick": broken, "last": lambda: {}}
    monkeypatch.setattr(gpu_stages, "rows_of", lambda stage, data: list(parts.items()))
    assert gpu.run_stage("mfu", tmp_path, "", 60) == gpu.DEVICE_BROKEN
    assert list(rows(tmp_path / "mfu.json")) == ["bad", "good", "sick"]
    assert gpu.run_stage("mfu", tmp_path, "", 60) == 0  # a new process goes on behind the row that broke the card
    found = rows(tmp_path / "mfu.json")
    assert list(found) == list(parts) and measured == [1]
    assert found["bad"]["failed"].startswith("ZeroDivisionError") and "illegal" in found["sick"]["failed"]
    assert gpu.table(json.loads((tmp_path / "mfu.json").read_text())).count("\n") == 5


def test_a_row_that_kills_its_process_is_said_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    started: list[str] = []

    def killed() -> dict:
        started.append("killed")
        raise SystemExit  # like a signal, it ends the process within the row

    def process(*_: object) -> gpu.Ended:
        try:
            return gpu.Ended(gpu.run_stage("mfu", tmp_path, "", 60), 1.0, "")
        except SystemExit:
            return gpu.Ended(-9, 1.0, "")

    parts = {"good": dict, "deadly": killed, "last": dict}
    monkeypatch.setattr(gpu_stages, "rows_of", lambda stage, data: list(parts.items()))
    monkeypatch.setattr(gpu, "in_process", process)
    gpu.start_stage("mfu", tmp_path, "", 5)
    assert "2 rows, 1 failed (not all: run the command again): exit code -9: no message" in capsys.readouterr().out
    gpu.start_stage("mfu", tmp_path, "", 5)
    found = rows(tmp_path / "mfu.json")
    assert list(found) == list(parts) and len(started) == 1
    assert found["deadly"]["failed"] == "the process ended in this row, exit code -9: no message"
    assert "3 rows, 1 failed\n" in capsys.readouterr().out


def test_a_row_that_hangs_is_given_up_and_the_next_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "mfu.json"

    def process(*_: object) -> gpu.Ended:
        try:
            return gpu.Ended(gpu.run_stage("mfu", tmp_path, "", 60), 1.0, "")
        except SystemExit:
            return gpu.Ended(None, 0.6 * gpu.PATIENCE, "")

    def hangs() -> dict:
        raise SystemExit  # in_process ends a process that hangs

    parts = {"good": dict, "hangs": hangs, "last": dict}
    monkeypatch.setattr(gpu_stages, "rows_of", lambda stage, data: list(parts.items()))
    monkeypatch.setattr(gpu, "in_process", process)
    monkeypatch.setattr(gpu, "RETRIES", 1)
    assert gpu.start_stage("mfu", tmp_path, "", 5)
    assert list(rows(path)) == ["good"] and gpu.read(path)["unfinished"] == {"hangs": 180.0}  # it may only need more time
    assert "hangs was not done after 180 s" in capsys.readouterr().out
    gpu.start_stage("mfu", tmp_path, "", 5)
    assert rows(path)["hangs"]["failed"] == 'not done after 360 s: delete this row and "complete" to try it again'
    gpu.start_stage("mfu", tmp_path, "", 5)
    assert set(rows(path)) == set(parts) and gpu.read(path)["complete"]


def test_a_card_that_breaks_again_and_again_is_given_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process ends after its first row; only processes without a new row count as tries."""

    def process(*_: object) -> gpu.Ended:
        content = gpu.read(tmp_path / "mfu.json") or {"results": {}}
        if len(content["results"]) == 7:
            return gpu.Ended(gpu.DEVICE_BROKEN, 1.0, "")
        content["results"][f"row {len(content['results'])}"] = {"failed": "CUDA error"}
        (tmp_path / "mfu.json").write_text(json.dumps(content))
        return gpu.Ended(gpu.DEVICE_BROKEN, 1.0, "")

    monkeypatch.setattr(gpu, "in_process", process)
    gpu.start_stage("mfu", tmp_path, "", 60)
    assert len(gpu.read(tmp_path / "mfu.json")["results"]) == 7


def test_a_process_whose_row_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "PATIENCE", 0.1)
    hung = gpu.in_process([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "mfu.json", "mfu", 600)
    assert hung.returncode is None and 0.1 < hung.seconds < 300
    monkeypatch.setattr(gpu, "PATIENCE", 300)
    died = gpu.in_process([sys.executable, "-c", "raise SystemExit('no card')"], tmp_path / "mfu.json", "mfu", 600)
    assert died.returncode == 1 and died.said == "no card\n"


@pytest.mark.parametrize(
    ("error", "broken"),
    [
        ("CUDA error: an illegal memory access was encountered", True),
        ("Triton Error [CUDA]: an illegal memory access was encountered", True),
        ("Triton Error [CUDA]: out of memory", False),
        ("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`", False),
        ("out of resource: shared memory, Required: 300000", False),
    ],
)
def test_only_errors_that_break_the_card_end_the_process(error: str, broken: bool) -> None:
    def fails() -> dict:
        raise RuntimeError(error)

    assert gpu.attempt(fails) == ({"failed": f"RuntimeError: {error}"}, broken)


def test_a_named_stage_has_all_the_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, float] = {}
    monkeypatch.setattr(gpu, "start_stage", lambda stage, out, data, seconds: given.setdefault(stage, seconds) > 0)
    assert gpu.main(["minutes=25", "stages=tiles", f"out={tmp_path}"]) == 0 and 1490 < given.pop("tiles") <= 1500
    gpu.main(["minutes=25", "stages=tiles,mfu", f"out={tmp_path}"])
    assert 740 < given.pop("tiles") <= 750 and 1490 < given.pop("mfu") <= 1500
    gpu.main(["minutes=25", f"out={tmp_path}"])
    assert given["tiles"] == 120


def test_a_wrong_kernel_and_a_dead_stage_are_said_and_give_exit_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    parts: dict[str, Callable] = {"good": lambda: {"right": True}, "wrong": lambda: {"out": math.nan, "right": False}}
    monkeypatch.setattr(gpu_stages, "rows_of", lambda stage, data: list(parts.items()))
    ends = in_this_process(monkeypatch, tmp_path)
    for _ in ("measured", "done before"):
        assert gpu.main(["stages=kernel", f"out={tmp_path}"]) == 1
        assert "kernel: 2 rows, 0 failed, 1 WRONG (first: wrong)" in capsys.readouterr().out
    parts = {"good": dict, "bad": lambda: 1 / 0}
    assert gpu.main(["stages=mfu", f"out={tmp_path}"]) == 0  # a row that does not fit the card is no defect
    (tmp_path / "kernel.json").unlink()
    assert gpu.main(["stages=kernel", f"out={tmp_path}"]) == 1  # but a check that did not run is
    ends[:] = [gpu.Ended(1, 1.0, "ImportError: no")]
    assert gpu.main(["stages=nccl,mfu", f"out={tmp_path}"]) == 1  # though the stage after it is done
    assert "exit code 1: ImportError: no" in capsys.readouterr().out
    assert gpu.main(["stages=attention", "minutes=1e-9", f"out={tmp_path}"]) == 0
    assert "no time was left" in capsys.readouterr().out


def test_rows_of_other_sources_are_measured_again_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    path, measured, tree = tmp_path / "out" / "mfu.json", [], tmp_path / "tree"
    monkeypatch.setattr(gpu_stages, "rows_of", lambda stage, data: [("row", lambda: measured.append(1) or {"ms": 1.0})])
    monkeypatch.setattr(gpu, "ROOT", tree)
    in_this_process(monkeypatch, path.parent)
    (tree / "model" / "kernels").mkdir(parents=True)
    source = tree / "model" / "kernels" / "diff.py"
    source.write_text("a = 1\n")
    gpu.start_stage("mfu", path.parent, "", 5)
    (tree / "model" / "NOTES.md").write_text("numbers of the first visit\n")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": "of another commit"}))
    gpu.start_stage("mfu", path.parent, "", 5)
    assert len(measured) == 1 and "done before" in capsys.readouterr().out
    source.write_text("a = 2\n")
    gpu.start_stage("mfu", path.parent, "", 5)
    assert len(measured) == 2 and "mfu_1.json have another code\n" in capsys.readouterr().out
    assert json.loads(path.with_name("mfu_1.json").read_text())["version"] == "of another commit"
    assert gpu.read(path)["code"] != gpu.read(path.with_name("mfu_1.json"))["code"]


def test_a_training_run_on_another_text_has_another_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [np.zeros(8, np.uint8), np.ones(8, np.uint8)]
    monkeypatch.setattr(gpu_stages, "library", lambda: texts[0])
    first = gpu.origin(gpu.record_of("training", "", {}))
    assert first == gpu.origin(gpu.record_of("training", "", {}))
    texts.reverse()
    other = gpu.origin(gpu.record_of("training", "", {}))
    assert [key for key in first if first[key] != other[key]] == ["text"]
    (tmp_path / "train_0.bin").write_bytes(b"a" * 2000)
    shards = gpu.text_digest(str(tmp_path))
    (tmp_path / "train_0.bin").write_bytes(b"a" * 2001)
    assert gpu.text_digest(str(tmp_path)) != shards
    assert gpu.origin(gpu.record_of("mfu", "", {}))["text"] is None


def test_time_that_is_over_ends_a_stage_between_rows(tmp_path: Path) -> None:
    assert gpu.run_stage("mfu", tmp_path, "", -1) == 0
    content = json.loads((tmp_path / "mfu.json").read_text())
    assert content["results"] == {} and content["complete"] is False


def test_sizes_and_schedule_are_those_of_the_configuration() -> None:
    sizes = {name: yaml.safe_load((CONFIG_DIR / "size" / f"{name}.yaml").read_text()) for name in ("30m", "124m")}
    for name, wanted in sizes.items():
        own = gpu_stages.SIZES[name]
        assert {key: own[key] for key in ("n_layer", "d_model", "context", "n_head")} == {
            key: wanted[key] for key in ("n_layer", "d_model", "context", "n_head")
        }
    tier = yaml.safe_load((CONFIG_DIR / "ablations" / "tier" / "gpu.yaml").read_text())
    assert (tier["n_head"], tier["head_dim"]) == tuple(gpu_stages.SIZES["30m"][key] for key in ("n_head", "head_dim"))
    assert {"steps=2288", "batch_tokens=32768", "optim.schedule=wsd", "optim.decay=0.2"} <= set(tier["train"])
    assert tier["horizons"]["75M"] == ["steps=2288"]
    arms = yaml.safe_load((CONFIG_DIR / "ablations" / "experiment" / "main.yaml").read_text())["arms"]
    assert set(gpu_stages.ARMS) <= set(arms)


def test_tiles_in_use_come_first_and_those_that_cannot_fit_never(monkeypatch: pytest.MonkeyPatch) -> None:
    diff = pytest.importorskip("model.attention.kernels.diff", reason="the fused kernel needs the package triton")
    monkeypatch.setattr(gpu_tiles, "ON_CARD", True)
    for capability, shared in (((9, 0), 232448), ((8, 9), 101376)):
        found = list(gpu_tiles.in_order(capability, shared))
        assert len(set(found)) == len(found) > 100
        own = {
            (version, d, back): tuple(diff.table(d, 2 * d if version == "V1" else d, torch.bfloat16, back, capability))
            for (version, d), back in itertools.product(gpu_tiles.SHAPES, (True, False))
        }
        assert {(*shape, tile) for shape, tile in own.items()} == set(found[: len(own)])
        distances = [gpu_tiles.steps(own[tuple(shape)], tile) for *shape, tile in found]
        assert distances == sorted(distances) and distances[len(own)] == 1
        assert len({tuple(shape) for *shape, _ in found[8:16]}) == 8  # the shapes in turn
        assert all(gpu_tiles.operand_bytes(*row) <= shared for row in found)


def test_no_kernel_needs_less_shared_memory_than_its_operands() -> None:
    content = json.loads((gpu.ROOT / "docs" / "results" / "gpu" / "compiled.json").read_text())
    kernels = [kernel for row in content["results"].values() for kernel in row.get("kernels", ()) if kernel.get("tile")]
    for kernel in kernels:
        shape = (kernel["version"], kernel["width"], kernel["kernel"] == "backward", kernel["tile"])
        assert gpu_tiles.operand_bytes(*shape) <= kernel["shared"], kernel
    assert len(kernels) > 50


@no_card
def test_a_fast_wrong_tile_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    diff = pytest.importorskip("model.attention.kernels.diff", reason="the fused kernel needs the package triton")
    own, used = gpu_tiles.backends.attend_diff, []

    def wrong(*call: object) -> torch.Tensor:
        used.append(diff.blocks(torch.device("cpu"), 64, 128, torch.float32, backward=False))
        return own(*call) * (2 if used[-1] == (32, 64, 4, 1, True) else 1)

    monkeypatch.setattr(gpu_tiles.backends, "attend_diff", wrong)
    row = gpu_tiles.time_tile("V2", 64, (32, 64, 4, 1, True), False)
    assert row["error"] == pytest.approx(1) and row["right"] is False


def test_a_measurement_queues_calls_and_waits_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(gpu_tools, "ON_CARD", True)
    monkeypatch.setattr(gpu_tools, "synchronize", lambda: calls.append("wait"))
    monkeypatch.setattr(gpu_tools.time, "perf_counter", lambda: 0.01 * calls.count("work"))  # 10 ms a call
    assert gpu_tools.milliseconds(lambda: calls.append("work"), least=1.0) == pytest.approx(10)
    assert calls.count("work") == 2 + 100 and calls.count("wait") == 2 * (2 + 5)


@no_card
def test_speed_of_training_leaves_out_compiling_and_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    now, update = [0.0], gpu_stages.update

    def step(*parts: object) -> torch.Tensor:
        now[0] += 30.5 if not now[0] else 0.5
        return update(*parts)

    def validation(*_: object) -> float:
        now[0] += 1000
        return 1.0

    monkeypatch.setattr(gpu_stages, "update", step)
    monkeypatch.setattr(gpu_stages, "validation_loss", validation)
    monkeypatch.setattr(gpu_stages, "library", lambda: np.arange(40000, dtype=np.int64).astype(np.uint8))
    monkeypatch.setattr(gpu_stages.time, "perf_counter", lambda: now[0])
    for steps in (3, 25):
        now[0] = 0.0
        row = gpu_stages.train(gpu_stages.ARMS["baseline"], 0.02, 1, steps, None)
        assert row["tokens_per_s"] == pytest.approx(4 * 32 / 0.5) and row["compile_s"] == pytest.approx(30)


def test_clocks_are_read_and_a_machine_without_nvidia_smi_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list(gpu_stages.nvidia_smi()) == ["nvidia_smi"]
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho '550.1, 1755 MHz, 1980 MHz, 2619 MHz, 700.00 W'\n")
    script.chmod(0o755)
    found = gpu_stages.nvidia_smi()
    assert (found["clocks.sm"], found["clocks.max.sm"]) == ("1755 MHz", "1980 MHz")
