"""`make gpu` on a machine without a card: the stand-ins of every stage, the plan for a card, and what goes wrong."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from configs import CONFIG_DIR
from scripts import gpu
from tests.conftest import run_command

TINY = {**gpu.DEFAULTS, "tiny": "true"}


def visit(tmp_path: Path, **options: str) -> gpu.Visit:
    work = tmp_path / "work"
    (work / "logs").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    return gpu.Visit({**TINY, "out": str(tmp_path / "out"), **options}, work)


def python(job: gpu.Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a line of the plan be code for Python."""
    start = lambda what, name, code: job.running.append(gpu.Job(what, name, ["-c", code], job))  # noqa: E731
    monkeypatch.setattr(job, "begin", start)


def test_the_stand_ins_run_and_leave_three_files(tmp_path: Path) -> None:
    """All stages but attention, whose bench test_bench.py runs. A stopped run is resumed; every arm has its seeds."""
    done = run_command("-m", "scripts.gpu", "tiny=true", f"out={tmp_path}", "stages=kernel,mfu,training", timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs.tar.gz", "rows.jsonl", "table.md"]
    rows = {(row["what"], row["name"]): row for row in map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())}
    assert rows["environment", "machine"]["torch"] == torch.__version__
    assert all(rows["training", f"{arm}-s{seed}"]["val_loss"] > 0 for arm in ("diff", "half_heads_norm") for seed in (1, 2))
    assert rows["process", "resume diff stopped"]["code"] == 143 and rows["resume", "diff-s1"]["resumed_at"] >= 20
    assert rows["mfu", "adamw diff"]["tokens/s"] > 0
    assert done.stdout.endswith((tmp_path / "table.md").read_text())
    assert "| less baseline |" in done.stdout and " tests, 0 failed" in done.stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["mintues=3"], "'mintues=3' is not an option: use minutes=, out="),
        (["minutes=0"], "minutes=0 is not a positive number: use minutes=25"),
        (["minutes=nan"], "minutes=nan is not a positive number"),
        (["stages=kernels"], "stages has no 'kernels': use kernel, attention, mfu, training"),
        (["data=nowhere"], "data=nowhere has no shards"),
        (["tiny=true", f"out={__file__}"], "File exists"),
        ([], "torch finds no CUDA card: use a machine with one, or try the script on the CPU with tiny=true"),
    ],
)
def test_a_wrong_option_is_refused_in_a_line(
    options: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(options) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_a_machine_without_hydra_is_told_the_three_wheels(tmp_path: Path) -> None:
    missing = ("hydra", "omegaconf", "antlr4", "wandb", "datasets")
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({missing!r}))\n")
    done = run_command("-m", "scripts.gpu", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "pip install hydra-core==1.3.8 omegaconf==2.3.1 antlr4-python3-runtime==4.9.3 (without network" in done.stderr
    assert run_command("-m", "scripts.gpu", "--help", env={"PYTHONPATH": str(tmp_path)}).returncode == 0


def test_the_plan_of_a_card_has_tests_and_arms_that_exist() -> None:
    plan = OmegaConf.to_container(OmegaConf.load(CONFIG_DIR / "gpu" / "card.yaml"), resolve=True)
    for arguments in (plan["kernel"] | plan["kernel_more"]).values():
        file, _, selection = gpu.shlex.split(arguments)
        names = [word for word in selection.split() if word not in ("or", "and")]
        assert all(name in (gpu.ROOT / file).read_text() for name in names if name not in ("V1", "V2")), arguments
    assert list(plan["training"]) == list(plan["warm"])
    assert list(plan["training"]) == ["baseline", "diff", "diff_v2", "half_heads_norm", "baseline_head_norm"]
    found = gpu.overrides("half_heads_norm", plan["tier"])
    assert {"model.n_head=8", "model.head_dim=64", "model.baseline.head_norm=affine", "steps=916", "optim=muon"} <= set(found)
    assert not any(option.startswith("data") for option in found)
    assert gpu.HYDRA[0] in (gpu.ROOT / "requirements.txt").read_text()


def test_time_that_is_over_ends_processes_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ignores SIGTERM is killed; a process that fails by itself says its last line; jobs that wait do not begin."""
    mine = visit(tmp_path)
    python(mine, monkeypatch)
    monkeypatch.setattr(gpu, "ENDING", 0.5)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    jobs = [("x", "bad", "raise SystemExit('no card')"), ("x", "deaf", deaf), ("x", "never", "")]
    begin = time.monotonic()
    mine.run(jobs[:1], 1, begin + 60)
    mine.run(jobs[1:], 1, time.monotonic() + 3)
    assert time.monotonic() - begin < 60 and not mine.running
    assert mine.rows["process", "x bad"]["failed"] == "no card" and mine.rows["process", "x bad"]["code"] == 1
    assert mine.rows["process", "x deaf"]["stopped"] and ("process", "x never") not in mine.rows


def test_a_wrong_kernel_gives_exit_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    line = "tests/model/test_kernels.py::test_long[V1-2] {} [ 50%]"

    def stage(end: str) -> None:
        def carry_out(mine: gpu.Visit) -> None:
            python(mine, monkeypatch)
            mine.run([("kernel", "long", f"print({line.format(end)!r})")], 1, time.monotonic() + 60)

        monkeypatch.setattr(gpu.Visit, "carry_out", carry_out)

    for end, code in (("PASSED", 0), ("FAILED", 1), ("SKIPPED", 1)):  # no test of the kernel ran: it is not checked
        stage(end)
        assert gpu.main(["tiny=true", "stages=kernel", f"out={tmp_path}"]) == code, end
    assert "kernel: 1 tests, 1 failed test_long[V1-2]" in capsys.readouterr().out
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 3 + 2 + 3  # visits add their rows


def test_rows_of_a_bench_and_differences_of_arms(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    row = {"labels": {"length": 64, "variant": "diff", "backend": "auto"}, "amount": None, "facts": {"error": 0.1},
           "seconds": {"op": [0.002, 0.001, 0.003]}, "not_measured": {"module": "too large"}}  # fmt: skip
    path.write_text(json.dumps({"results": {"rows": [row]}}))
    assert gpu.bench_rows(path, "T=64") == {"T=64 diff auto": {"op": 2.0, "error": 0.1, "no module": "too large"}}
    losses = {"baseline-s1": 3.0, "baseline-s2": 4.0, "diff-s1": 2.5, "diff-s3": 9.0}
    table = gpu.table({("training", name): {"val_loss": loss} for name, loss in losses.items()})
    assert table.splitlines()[0] == "| training | s1 | s2 | less baseline | s3 |"
    assert table.splitlines()[3] == "| diff | 2.5 | - | -0.5 | 9 |"


def test_a_signal_ends_the_command_and_its_processes(tmp_path: Path) -> None:
    out = (tmp_path / "out").resolve()
    command = [sys.executable, "-m", "scripts.gpu", "tiny=true", f"out={out}", "stages=kernel"]
    with subprocess.Popen(command, cwd=gpu.ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().startswith("kernel: at most")
        time.sleep(1)
        process.terminate()
        printed = process.stdout.read()
    assert process.returncode == 143 and "| kernel half precision |" in printed
    assert (out / "table.md").is_file() and (out / "logs.tar.gz").is_file()
