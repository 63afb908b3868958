"""The ablation engine: toy experiments trained, compared, repeated, interrupted and broken."""

import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ablation.records import PUBLISHED
from eval.report.runs import DIVERGED
from tests.conftest import ROOT, TINY, WORDS
from tests.faults.ends import until
from tests.scripts.conftest import quoted

SCRIPT = "scripts/ablate.py"


def toy(shards: Path, runs: Path, arms: dict[str, list[str]], *more: str) -> list[str]:
    """Arguments of a toy experiment: 16 steps of two small layers, judged by train.py's own validation loss."""
    train = (
        *TINY,
        f"data.dir={shards}",
        "data.tokenizer.name=bytes",  # the tier's is bpe
        "model.head_dim=8",
        "steps=16",
        "eval_every=8",
        "eval_tokens=2048",
        "optim=adamw",
        "optim.lr=1e-2",
        "checkpoint.every=4",
    )
    listed = ",".join(f"{name}:{quoted(*overrides)}" for name, overrides in arms.items())
    return [
        "experiment=retrieval", "~arms", "~common", f"+arms={{{listed}}}", f"runs={runs}", "name=toy",
        f"train={quoted(*train)}", "evaluations=[]", "~metrics", "+metrics={valid:train.val_loss}", *more,
    ]  # fmt: skip


def test_a_crippled_arm_is_found_a_twin_is_not_a_diverged_one_is_counted(
    shards: Path, tmp_path: Path, call: Callable[..., str]
) -> None:
    arms = {
        "baseline": ["model=baseline"],
        "crippled": ["model=baseline", "optim.lr=0"],
        "diverging": ["model=baseline", "optim.lr=1e30", "optim.clip=0"],
        "twin": ["model=baseline", "model.diff.lambda_init=0.3"],  # an option that a baseline does not read
    }
    arguments = toy(shards, tmp_path, arms, "seeds=2", "jobs=2", "+pairs.training=[twin,crippled]")
    printed = call(*arguments)
    assert "toy: 8 of 8 runs" in printed and "eta" in printed
    content = json.loads((tmp_path / "toy" / "results.json").read_text())
    assert content["seeds"] == [1, 2] and content["config"]["seeds"] == 2 and {"machine", "version"} <= content.keys()
    baseline, crippled, diverging, twin = content["results"]["arms"]
    found = crippled["metrics"]["valid"]
    assert found["difference"]["n"] == 2 and found["difference"]["low"] > 0.2 and found["p_holm"] < 0.05
    assert twin["metrics"]["valid"]["difference"] | {"mean": 0.0, "p": 1.0} == twin["metrics"]["valid"]["difference"]
    (pair,) = content["results"]["pairs"]["valid"]  # the twin is the baseline: the pair's difference is the crippled arm's
    assert pair["mean"] == pytest.approx(-found["difference"]["mean"]) and "| part | arms | n | valid |" in printed
    assert "diverging-s2 diverged" in printed and diverging["metrics"]["valid"]["n"] == 0
    assert "the loss is " in diverging["runs"][0]["diverged"]
    assert len(baseline["runs"][0]["losses"]) == 16 and len(baseline["runs"][0]["curve"]) == 2
    assert "| crippled |" in (tmp_path / "toy" / "table.md").read_text()
    assert (tmp_path / "toy" / "figures" / "difference.png").is_file()

    # Repeated: nothing is trained again, not even what diverged.
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "toy").rglob("state.json")}
    assert "8 of them finished" in call(*arguments)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "toy").rglob("state.json")} == stamps
    wrong = call(*[a.replace("optim.lr=1e-2", "optim.lr=2e-2") for a in arguments])
    assert "baseline-s1 was started with optim.lr=0.01 (now 0.02)" in wrong and wrong.endswith("start anew with name=OTHER")
    wrong = call(*[a.replace("eval_tokens=2048", "eval_tokens=1024") for a in arguments])
    assert "measures itself with eval_tokens=2048 (now 1024): repeat its overrides, or start anew with name=OTHER" in wrong

    # A diverged run without its file is trained again; a damaged record is written again; an old figure is not left.
    (tmp_path / "toy" / "diverging-s1" / DIVERGED).unlink()
    record, old = tmp_path / "toy" / "records" / "twin-s1.jsonl", tmp_path / "toy" / "figures" / "gap_old.png"
    whole = record.read_text()
    record.write_text(whole[:99])
    old.touch()
    assert "8 runs, 7 of them finished" in (printed := call(*arguments, "+metrics.odd=train.tokens_to_0.5"))
    assert "Without a column, because no run has a number there: odd (train.tokens_to_0.5)." in printed
    assert (tmp_path / "toy" / "diverging-s1" / DIVERGED).is_file() and record.read_text() == whole and not old.exists()


def test_interrupted_it_goes_on_and_ends_the_same(shards: Path, tmp_path: Path, call: Callable[..., str]) -> None:
    arguments = toy(shards, tmp_path, {"baseline": ["model=baseline"]}, "seeds=1", 'evaluations=["perplexity tokens=512"]')
    arguments = [argument.replace("steps=16", "steps=200") for argument in arguments]  # so that the signal comes in time
    log = tmp_path / "toy" / "logs" / "baseline-s1.log"
    process = subprocess.Popen(
        [sys.executable, "scripts/ablate.py", *arguments],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    until(lambda: log.is_file() and "step   2/200" in log.read_text(), limit=600)
    process.send_signal(signal.SIGTERM)
    assert "stopped; repeat the command to continue" in process.communicate()[0] and process.returncode == 143
    run = tmp_path / "toy" / "baseline-s1"
    assert list((run / "checkpoints").glob("step_*")) and not (run / "eval").exists()
    call(*arguments)
    assert "stopped by SIGTERM" in log.read_text() and log.read_text().count("$ python") == 3  # train, train, evaluate
    assert json.loads((run / "eval" / "perplexity.json").read_text())["results"]["tokens"] == 512
    # The evaluation's settings change: it alone is repeated.
    call(*[a.replace("perplexity tokens=512", "perplexity tokens=256") for a in arguments])
    assert log.read_text().count("$ python") == 4
    assert json.loads((run / "eval" / "perplexity.json").read_text())["results"]["tokens"] == 256
    # A damaged result is written again.
    (run / "eval" / "perplexity.json").write_text('{"step": 200, "config": null}')
    call(*[a.replace("perplexity tokens=512", "perplexity tokens=256") for a in arguments])
    assert json.loads((run / "eval" / "perplexity.json").read_text())["results"]["tokens"] == 256


def tuned(shards: Path, runs: Path, text: Path, arms: dict[str, list[str]], *more: str) -> list[str]:
    """A toy experiment whose arms are tuned over optim.lr and compared on text that the tuning does not read."""
    return [
        *toy(shards, runs, arms, "tune=rates", "tune.keys=[optim.lr]", "tune.values=[[1e-3,1e-2]]"),
        "tune.refine=[]", "tune.widen=0", 'tune.train=["steps=8","eval_every=0"]', f"+texts.other={text}", "~metrics",
        "+metrics={valid: perplexity_other.loss}", f"records={runs}", *more,
    ]  # fmt: skip


@pytest.fixture(scope="session")
def other_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text in the words of the training text, but not in their order."""
    draw = random.Random(1)
    path = tmp_path_factory.mktemp("other") / "other.txt"
    path.write_text("\n".join(" ".join(draw.choices(WORDS, k=60)) for _ in range(40)))
    return path


def publish_alone(folder: Path, records: str) -> None:
    """Leave nothing of a study but its published records."""
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / PUBLISHED).write_bytes(gzip.compress(records.encode()))


def records_suffice(folder: Path, alone: list[str], content: dict, call: Callable[..., str]) -> None:
    """Without the data and the texts the same table is made, and a record with another evaluation counts as not finished."""
    assert "3 runs, 3 of them finished" in (printed := call(*alone, "run=false"))
    assert "Made from records alone" in printed and "epochs" not in printed
    again = json.loads((folder / "results.json").read_text())["results"]
    assert [arm["metrics"] for arm in again["arms"]] == [arm["metrics"] for arm in content["arms"]]
    stale = call(*alone, "run=false", "text_tokens=512")
    assert "3 runs, 0 of them finished" in stale and "3 recorded runs count as not finished and would be trained again" in stale
    assert "the record of baseline-s1 has perplexity_other with tokens=1000000 instead of tokens=512" in stale
    assert "toy: 3 runs left: about " in stale and " minutes, one at a time, as measured in 6 runs" in stale
    assert "the record of baseline-s1 lacks needle" in call(*alone, "run=false", "evaluations=[needle]")
    assert "spikes counted with spikes.window=50 spikes.over=0.5" in call(*alone, "run=false", "spikes.over=0.2")


def test_tuning_makes_equal_arms_equal(shards: Path, other_text: Path, tmp_path: Path, call: Callable[..., str]) -> None:
    """An arm that is crippled at its default rate, and equal at its best one, is not called worse; a twin is a twin."""
    arms = {"baseline": ["model=baseline"], "slow": ["model=baseline", "optim.lr=1e-7"], "gated": ["model=gated"]}
    arguments = tuned(shards, tmp_path, other_text, arms, "seeds=1")
    printed = call(*arguments)
    content = json.loads((tmp_path / "toy" / "results.json").read_text())["results"]
    baseline, slow, gated = content["arms"]
    assert slow["metrics"]["valid"]["difference"]["mean"] == 0.0 != gated["metrics"]["valid"]["difference"]["mean"]
    found = content["tuning"]
    assert (tmp_path / "toy" / "tune-baseline-lr0.001-s101").is_dir()
    assert found["baseline"]["trials"] == found["slow"]["trials"] and found["slow"]["best"] == {"optim.lr": 0.01}
    assert found["baseline"]["edge"] == ["optim.lr"] and "is at an end of the tried values" in printed
    assert "| chosen for | optim.lr | points tried |" in printed and "| slow | 0.01 | 2 |" in printed
    start = "toy: 9 runs left (6 of them or more for the tuning): their time is not known before the first is finished"
    assert start in printed and "toy: 3 runs left: about 0 minutes, one at a time" in printed
    assert content["title"] == "toy, tuned with one seed and by trials of 50% of the runs' length"
    assert (tmp_path / "toy" / "figures" / "tuning.png").is_file()
    assert "untuned" in call(*toy(shards, tmp_path, {"baseline": ["model=baseline"]}, "name=other", "seeds=1"))
    assert "was trained before its learning rates were tuned" in call(*arguments, "name=other")  # refused before any trial
    assert not list((tmp_path / "other").glob("tune-*"))

    # The runs' folders are gone, their records are published: nothing is trained again, the numbers are the same.
    records = "".join(path.read_text() for path in sorted((tmp_path / "toy" / "records").glob("*.jsonl")))
    publish_alone(tmp_path / "toy", records)
    assert "3 runs, 3 of them finished" in call(*arguments)
    again = json.loads((tmp_path / "toy" / "results.json").read_text())["results"]
    assert [arm["metrics"] for arm in again["arms"]] == [arm["metrics"] for arm in content["arms"]]
    assert again["tuning"] == found and not list((tmp_path / "toy").rglob("checkpoints"))

    # An arm whose trials are finished and whose run is not: the table is partial, and the figure of the tuning has the arm.
    lines = [line for line in records.splitlines(keepends=True) if '"run":"gated-s1"' not in line]
    publish_alone(tmp_path / "toy", "".join(lines))
    assert "partial: 1 run is missing" in call(*arguments, "run=false")
    assert (tmp_path / "toy" / "figures" / "tuning.png").is_file()
    (tmp_path / "toy" / PUBLISHED).write_bytes(gzip.compress(records.encode()))

    # On a machine without the data the table comes from the records alone, but not with other evaluations than theirs.
    alone = [a.replace(str(shards), "nowhere").replace(str(other_text), "gone/other.txt") for a in arguments]
    records_suffice(tmp_path / "toy", alone, content, call)

    # An arm without trials: its run is missing, too.
    untuned = call(*arguments, "run=false", '+arms.extra=["model=diff"]')
    assert "3 runs, 3 of them finished (not counted: 1 run of arms that are not tuned yet)" in untuned
    assert "partial: 1 run is missing" in untuned

    # Nothing of another study is there: run=false says so, and trains nothing.
    nothing = call(*arguments, "name=nothing", "run=false")
    assert "under way: 0 trials" in nothing and not list((tmp_path / "nothing").rglob("checkpoints"))

    # Another seed: only it is left, and run=false writes the table of the rest and says so.
    partial = call(*[a.replace("seeds=1", "seeds=2") for a in arguments], "run=false")
    assert "6 runs, 3 of them finished" in partial and "partial: 3 runs are missing" in partial


def test_shorter_horizons_branch_off_the_longest_run(shards: Path, tmp_path: Path, call: Callable[..., str]) -> None:
    grid = '+grid={short:["steps=8"],long:["steps=16"]}'
    arguments = toy(shards, tmp_path, {"baseline": ["model=baseline"]}, "seeds=1", "branch=true", grid)
    arguments = [a.replace('"optim.lr=1e-2"', '"optim.lr=1e-2","optim.schedule=wsd"') for a in arguments]
    arguments = [a.replace('"steps=16","eval', '"eval') for a in arguments]  # the points of the grid set the steps
    call(*arguments)
    log = (tmp_path / "toy" / "logs" / "baseline-short-s1.log").read_text()
    assert "branch_from=" in log and "step 7/8" in log and "step 1/8" not in log
    content = json.loads((tmp_path / "toy" / "results.json").read_text())["results"]
    assert [arm["name"] for arm in content["arms"]] == ["baseline-short", "baseline-long"]


@pytest.mark.parametrize(
    ("more", "says"),
    (
        (("+metrics.other=train.val_loss",), "reads the text that the learning rates are chosen on"),
        (("+metrics.other=perplexity_books.loss",), "give texts.books=FILE"),
        (("evaluations=['perplexity name=own']", "+metrics.other=perplexity_own.ppl"), "learning rates are chosen on"),
        (("evaluations=[quantization]", "+metrics.other=quantization.bits.4.loss"), "learning rates are chosen on"),
        (("+metrics.other=needle.accuracy",), "add needle to evaluations"),
        (("tune.seeds=[1]",), "seeds of the comparison"),
        (("tune.at=nowhere",), "tune.at has 'nowhere', which is not in grid: use no tune.at"),
        (("tune.each=true",), "leave it out without a grid"),
        (("tune.each=true", "+grid={a:[],b:[]}", "branch=true"), "leave out tune.at and branch beside it"),
        (("tune.metric=needle.accuracy",), "is not a metric of training: use train.val_loss"),
        (("tune.metric=train.loss_text", "+metrics.other=train.loss_text"), "that the learning rates are chosen on"),
    ),
)
def test_studies_that_would_not_say_the_truth_are_refused(
    more: tuple[str, ...], says: str, shards: Path, other_text: Path, tmp_path: Path, call: Callable[..., str]
) -> None:
    assert says in call(*tuned(shards, tmp_path, other_text, {"baseline": ["model=baseline"]}, "seeds=1"), *more)
    assert not list(tmp_path.rglob("checkpoints"))


def test_a_text_that_was_trained_on_is_no_test(shards: Path, text_file: Path, tmp_path: Path, call: Callable[..., str]) -> None:
    refused = call(*tuned(shards, tmp_path, text_file, {"baseline": ["model=baseline"]}, "seeds=1"))
    assert "texts.other" in refused and "give a text that is not part of the training text" in refused


def test_a_failed_run_is_named_and_the_others_are_kept(shards: Path, tmp_path: Path, call: Callable[..., str]) -> None:
    broken = tmp_path / "shards"
    shutil.copytree(shards, broken)
    (broken / "val_000000.bin").unlink()
    arguments = toy(broken, tmp_path, {"baseline": ["model=baseline"]}, "seeds=1")
    error = call(*arguments)
    assert "val_000000.bin" in error and "baseline-s1.log" in error and "repeat this command" in error
    assert not (tmp_path / "toy" / "results.json").exists()
