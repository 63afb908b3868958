"""`make gpu` on a machine without a card: the stand-ins of every stage, the plan for a card, and what goes wrong."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from pytest import CaptureFixture, MonkeyPatch

from configs import CONFIG_DIR
from scripts import gpu
from tests.conftest import run_command
from tests.faults.ends import until
from tests.processes import Command


def test_the_stand_ins_run_and_leave_their_files(tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture) -> None:
    """All stages but mfu, whose bench test_bench.py runs. A stopped run is resumed; every arm has its seeds."""
    monkeypatch.setattr(gpu, "subprocess", SimpleNamespace(Popen=Command, run=subprocess.run))
    code = gpu.main(["tiny=true", f"out={tmp_path}", "stages=kernel,attention,training"])
    printed = capsys.readouterr().out
    assert code == 0, printed
    visit = json.loads((tmp_path / "visit.json").read_text())
    assert visit["machine"]["torch"] == torch.__version__ and set(visit["kernel"].values()) == {"PASSED"}
    runs = [f"{arm}-s{seed}" for arm in ("baseline", "half_heads_norm") for seed in (1, 2)]
    assert all(visit["training"][run]["val_loss"] > 0 for run in runs)
    assert visit["processes"]["resume diff stopped"]["code"] == 143 and visit["resume"]["diff-s1"]["resumed_at"] >= 20
    assert visit["benches"]["attention_T_64"]["results"]["rows"][0]["seconds"]
    assert "==== training baseline\n" in (tmp_path / "visit.log").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"visit.json", "table.md", "visit.log"}
    assert printed.strip().endswith((tmp_path / "table.md").read_text().strip())
    assert "| less baseline |" in printed and " tests, 0 failed" in printed and "| variant " in printed


def test_a_wrong_option_is_refused_in_a_line(monkeypatch: MonkeyPatch, capsys: CaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for options, says in (
        (["mintues=3"], "'mintues=3' is not an option: use minutes=, out="),
        (["minutes"], "'minutes' is not an option"),
        (["minutes=nan"], "minutes=nan is not a positive number: use minutes=25"),
        (["stages=mfu,kernels"], "stages has no 'kernels': use kernel, attention, mfu, training"),
        (["tiny=true", f"out={__file__}"], "File exists"),
        ([], "torch finds no CUDA card: use a machine with one, or try the script on the CPU with tiny=true"),
    ):
        assert gpu.main(options) == 2
        error = capsys.readouterr().err
        assert says in error and error.startswith("error: ") and error.count("\n") == 1


def test_a_machine_without_hydra_is_told_the_three_wheels(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules.update(dict.fromkeys(('hydra', 'omegaconf')))\n")
    done = run_command("-m", "scripts.gpu", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "pip install hydra-core==1.3.8 omegaconf==2.3.1 antlr4-python3-runtime==4.9.3 " in done.stderr


def test_the_plan_of_a_card_has_tests_and_arms_that_exist() -> None:
    plan = OmegaConf.to_container(OmegaConf.load(CONFIG_DIR / "gpu" / "card.yaml"), resolve=True)
    for arguments in (plan["kernel"] | plan["kernel_more"]).values():
        file, _, selection = gpu.shlex.split(arguments)
        names = [word for word in selection.split() if word not in ("or", "and")]
        assert all(name in (gpu.ROOT / file).read_text() for name in names if name not in ("V1", "V2")), arguments
    arms = ["baseline", "diff", "diff_v2", "half_heads_norm", "baseline_head_norm"]
    assert list(plan["training"]) == list(plan["warm"]) == arms
    options = gpu.overrides("half_heads_norm", plan["tier"])
    assert {"model.n_head=8", "model.head_dim=64", "model.baseline.head_norm=affine", "steps=916", "optim=muon"} <= set(options)
    assert not any(option.startswith("data") for option in options)
    assert gpu.PACKAGES.split()[0] in (gpu.ROOT / "requirements.txt").read_text()


@pytest.fixture
def visit(tmp_path: Path, monkeypatch: MonkeyPatch) -> gpu.Visit:
    """A visit whose plan is code for Python."""
    monkeypatch.setattr(gpu.Visit, "command", lambda self, what, name, code: ["-c", code])
    (tmp_path / "work").mkdir()
    return gpu.Visit({**gpu.DEFAULTS, "tiny": "true", "out": str(tmp_path)}, tmp_path / "work")


def test_time_that_is_over_ends_processes_and_says_so(visit: gpu.Visit, monkeypatch: MonkeyPatch) -> None:
    """One that ignores SIGTERM is killed; a process that fails by itself says its last line; jobs that wait do not begin."""
    monkeypatch.setattr(gpu, "ENDING", 0.5)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    jobs = [("x", "bad", "raise SystemExit('no card')"), ("x", "deaf", deaf), ("x", "never", "")]
    begin = time.monotonic()
    visit.run(jobs[:1], 1, begin + 60)
    visit.run(jobs[1:], 1, time.monotonic() + 2)
    assert time.monotonic() - begin < 60 and not visit.running
    assert visit.processes["x bad"]["failed"] == "no card" and visit.processes["x bad"]["code"] == 1
    assert visit.processes["x deaf"]["stopped"] and "x never" not in visit.processes


def test_a_wrong_kernel_gives_exit_status_1(visit: gpu.Visit, tmp_path: Path, monkeypatch: MonkeyPatch, capsys) -> None:
    for end, code in (("PASSED", 0), ("FAILED", 1), ("SKIPPED", 1)):  # skipped: nothing is checked
        jobs = [("kernel", "long", f"print('tests/model/test_kernels.py::test_long[V1-2] {end} [ 50%]')")]
        monkeypatch.setattr(gpu.Visit, "carry_out", lambda self, jobs=jobs: self.run(jobs, 1, time.monotonic() + 60))
        assert gpu.main(["tiny=true", "stages=kernel", f"out={tmp_path}"]) == code
        assert ("1 failed test_long[V1-2]" in capsys.readouterr().out) == (end == "FAILED")


def test_arms_are_compared_over_common_seeds() -> None:
    losses = {"baseline-s1": 3.0, "baseline-s2": 4.0, "diff-s1": 2.5, "diff-s3": 9.0}
    lines = gpu.table("training", gpu.compared({name: {"val_loss": loss} for name, loss in losses.items()})).splitlines()
    assert lines[:2] == ["| training | less baseline | seeds |", "| --- | --- | --- |"]
    assert lines[2:] == ["| baseline | 0.0 | 2 |", "| diff | -0.5 | 1 |"]


def test_a_signal_ends_the_command_and_its_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.gpu", "tiny=true", f"out={tmp_path}", "stages=kernel"]
    with (tmp_path / "log").open("w") as log:
        process = Command(command, dict(os.environ), log)
    until(lambda: "kernel: at most" in (tmp_path / "log").read_text())
    time.sleep(0.5)
    process.terminate()
    assert process.wait(60) == 143 and "| kernel half precision |" in (tmp_path / "log").read_text()
    assert (tmp_path / "table.md").is_file()
