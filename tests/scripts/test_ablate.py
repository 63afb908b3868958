"""The ablation engine: toy experiments trained, compared, repeated, interrupted and broken."""

import json
import math
import os
import random
import shutil
import signal
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from ablation import jobs
from ablation.records import PUBLISHED, records_of, write_records
from ablation.results import Results
from ablation.study import PlannedRun
from configs.files import write_json
from eval.report.runs import DIVERGED
from tests.conftest import TINY, WORDS
from tests.processes import Command
from tests.scripts.conftest import Call, quoted

SCRIPT = "scripts/ablate.py"


def toy(shards: Path, runs: Path, arms: dict[str, list[str]], *more: str) -> list[str]:
    """Arguments of a toy experiment: 8 steps of a small layer, judged by train.py's validation loss."""
    train = (
        *TINY, f"data.dir={shards}", "data.tokenizer.name=bytes", "model.head_dim=8", "steps=8", "eval_every=4",
        "model.n_layer=1", "eval_tokens=2048", "optim=adamw", "optim.lr=1e-2", "checkpoint.every=4",
    )  # fmt: skip
    listed = ",".join(f"{name}:{quoted(*overrides)}" for name, overrides in arms.items())
    return [
        "experiment=retrieval", "~arms", "~common", f"+arms={{{listed}}}", f"runs={runs}", "name=toy",
        f"train={quoted(*train)}", "evaluations=[]", "~metrics", "+metrics={valid:train.val_loss}", *more,
    ]  # fmt: skip


def in_words(arguments: list[str], before: str, after: str) -> list[str]:
    return [argument.replace(before, after) for argument in arguments]


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """No figures are drawn."""
    monkeypatch.setattr(Results, "draw", lambda self, folder: [])


def test_a_crippled_arm_is_worse_a_twin_is_not_a_diverged_one_is_counted(shards: Path, tmp_path: Path, call: Call) -> None:
    arms = {
        "baseline": ["model=baseline"],
        "crippled": ["model=baseline", "optim.lr=0"],
        "diverging": ["model=baseline", "optim.lr=1e30", "optim.clip=0"],
        "twin": ["model=baseline", "model.diff.lambda_init=0.3"],  # an option that a baseline does not read
    }
    arguments = toy(shards, tmp_path, arms, "seeds=1", "jobs=2", "+pairs.training=[twin,crippled]")
    printed, folder = call(*arguments), tmp_path / "toy"
    assert "toy: 4 of 4 runs" in printed and "diverging-s1 diverged" in printed
    content = json.loads((folder / "results.json").read_text())
    assert content["seeds"] == [1] and content["config"]["seeds"] == 1 and {"machine", "version"} <= content.keys()
    baseline, crippled, diverging, twin = content["results"]["arms"]
    worse = crippled["metrics"]["valid"]["difference"]["mean"]
    assert worse > 0.2 and twin["metrics"]["valid"]["difference"]["mean"] == 0
    (pair,) = content["results"]["pairs"]["valid"]  # the twin is the baseline: the pair's difference is the crippled arm's
    assert pair["mean"] == pytest.approx(-worse) and "| part | arms | n | valid |" in printed
    assert diverging["metrics"]["valid"]["n"] == 0 and "the loss is " in diverging["runs"][0]["diverged"]
    assert len(baseline["runs"][0]["losses"]) == 8 and len(baseline["runs"][0]["curve"]) == 2
    assert "| crippled |" in (folder / "table.md").read_text() and (folder / "figures" / "difference.png").is_file()

    # Repeated: nothing is trained again, not even what diverged; but it is without its file, and a damaged record is written.
    stamps = {path: path.stat().st_mtime_ns for path in folder.rglob("state.json")}
    (folder / "diverging-s1" / DIVERGED).unlink()
    record, old = folder / "records" / "twin-s1.jsonl", [folder / "figures" / name for name in ("gap_old.png", "plane.png")]
    whole = record.read_text()
    record.write_text(whole[:99])
    for path in old:
        path.touch()
    assert "4 runs, 3 of them finished" in (printed := call(*arguments, "+metrics.odd=train.tokens_to_0.5"))
    assert "because no run has numbers there: odd (train.tokens_to_0.5)." in printed
    assert (folder / "diverging-s1" / DIVERGED).is_file() and record.read_text() == whole
    assert not any(path.exists() for path in old)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("state.json")} == stamps
    wrong = call(*in_words(arguments, "optim.lr=1e-2", "optim.lr=2e-2"))
    assert "baseline-s1 was started with optim.lr=0.01 (now 0.02)" in wrong and wrong.endswith("start anew with name=OTHER")


@pytest.mark.usefixtures("unseen")
def test_interrupted_it_goes_on_and_repeats_what_is_stale(shards: Path, tmp_path: Path, call: Call, typed, monkeypatch) -> None:
    arguments = toy(shards, tmp_path, {"baseline": ["model=baseline"]}, "seeds=1", 'evaluations=["perplexity tokens=512"]')

    with monkeypatch.context() as patch:
        patch.setattr(jobs.subprocess, "Popen", lambda *a, **o: (Command(*a, **o), os.kill(os.getpid(), signal.SIGTERM))[0])
        done = typed(SCRIPT, *arguments)
    assert "stopped; repeat the command to continue" in done.stdout and done.returncode == 143
    log, result = (tmp_path / "toy" / name for name in ("logs/baseline-s1.log", "baseline-s1/eval/perplexity.json"))
    assert not result.exists()
    call(*arguments)
    assert log.read_text().count("$ python") == 3  # train, train, evaluate
    assert json.loads(result.read_text())["results"]["tokens"] == 512
    # The evaluation's settings change: it alone is repeated. A damaged result counts as none.
    fewer = in_words(arguments, "perplexity tokens=512", "perplexity tokens=256")
    call(*fewer)
    assert log.read_text().count("$ python") == 4 and json.loads(result.read_text())["results"]["tokens"] == 256
    result.write_text('{"step": 8, "config": null}')
    assert "1 runs, 0 of them finished" in call(*fewer, "run=false")


def tuned(shards: Path, runs: Path, text: Path, arms: dict[str, list[str]], *more: str) -> list[str]:
    """A toy experiment whose arms are tuned over optim.lr and compared on text that the tuning does not read."""
    return [
        *toy(shards, runs, arms, "tune=rates", "tune.keys=[optim.lr]", "tune.values=[[1e-3,1e-2]]"),
        "tune.refine=[]", "tune.widen=0", 'tune.train=["steps=4","eval_every=0"]', f"+texts.other={text}", "~metrics",
        "+metrics={valid: perplexity_other.loss}", f"records={runs}", "seeds=1", *more,
    ]  # fmt: skip


def made_up(run: PlannedRun, shards: Path) -> None:
    """What train.py and the evaluations leave of a run: losses that only the rate and the gate decide; best at 0.02."""
    loss = 3 + abs(math.log(run.config.optim.lr / 0.02)) + 0.1 * ("gated" in run.arm)
    (run.folder / "checkpoints" / f"step_{run.config.steps:08d}").mkdir(parents=True)
    shutil.copy(shards / "tokenizer.json", run.folder)
    (run.folder / "config.yaml").write_text(yaml.safe_dump(asdict(run.config)))
    end = {"step": run.config.steps, "tokens": 512 * run.config.steps, "loss": loss, "val_loss": loss, "time_s": 1.0}
    (run.folder / "metrics.jsonl").write_text('{"step": 0, "tokens": 0}\n' + json.dumps(end) + "\n")
    for one in run.evaluations:
        content = {"eval": one.name, "step": run.config.steps, "config": one.settings, "results": {"loss": loss}}
        write_json(run.folder / "eval" / f"{one.file}.json", content)


@pytest.mark.usefixtures("unseen")
def test_tuning_makes_equal_arms_equal(shards: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """An arm that is crippled at its default rate, and equal at its best one, is not called worse."""
    draw, other_text = random.Random(1), tmp_path / "other.txt"  # in the words of the training text, but not in their order
    other_text.write_text("\n".join(" ".join(draw.choices(WORDS, k=60)) for _ in range(40)))
    monkeypatch.setattr(jobs.Pool, "carry_out", lambda pool, run, env: run.left() and made_up(run, shards))
    arms = {"baseline": ["model=baseline"], "slow": ["model=baseline", "optim.lr=1e-7"], "gated": ["model=gated"]}
    arguments, folder = tuned(shards, tmp_path, other_text, arms), tmp_path / "toy"
    printed = call(*arguments)
    content = json.loads((folder / "results.json").read_text())["results"]
    baseline, slow, gated = content["arms"]
    assert slow["metrics"]["valid"]["difference"]["mean"] == 0.0 != gated["metrics"]["valid"]["difference"]["mean"]
    tuning = content["tuning"]
    assert (folder / "tune-baseline-lr0.001-s101").is_dir()
    assert tuning["baseline"]["trials"] == tuning["slow"]["trials"] and tuning["slow"]["best"] == {"optim.lr": 0.01}
    assert tuning["baseline"]["edge"] == ["optim.lr"] and "is at an end of the tried values" in printed
    assert "| chosen for | optim.lr | points tried |" in printed and "| slow | 0.01 | 2 |" in printed
    start = "toy: 9 runs left (6 of them or more for the tuning): their time is not known before the first is finished"
    assert start in printed and "toy: 3 runs left: about 0 minutes, one at a time" in printed
    assert content["title"] == "toy, tuned with one seed and by trials of 50% of the longest runs' length"

    # The runs' folders are gone, their records are published; without data and texts the same table is made.
    records = list(records_of(folder).values())
    shutil.rmtree(folder)
    write_records(folder / PUBLISHED, records)
    assert "1 of 1 runs | slow-s1 done" in call(*arguments, "only=slow-s1") and not (folder / "records").exists()
    alone = in_words(in_words(arguments, str(shards), "nowhere"), str(other_text), "gone/other.txt")
    assert "3 runs, 3 of them finished" in (printed := call(*alone, "run=false"))
    assert "Made from records alone" in printed and "epochs" not in printed
    again = json.loads((folder / "results.json").read_text())["results"]
    assert [arm["metrics"] for arm in again["arms"]] == [arm["metrics"] for arm in content["arms"]]
    assert again["tuning"] == tuning and not list(folder.rglob("checkpoints"))
    # A record with another evaluation counts as not finished.
    stale = call(*alone, "run=false", "text_tokens=512")
    assert "3 runs, 0 of them finished" in stale and "3 recorded runs would be trained again" in stale
    assert "the record of baseline-s1 has perplexity_other with another tokens than 512" in stale
    assert "toy: 3 runs left: about " in stale and " minutes, one at a time, as measured in 6 runs" in stale

    # An arm without trials, and one whose run is not there: the table is partial.
    write_records(folder / PUBLISHED, (record for record in records if record["run"] != "gated-s1"))
    partial = call(*arguments, "run=false", '+arms.extra=["model=diff"]')
    assert "3 runs (and 1 of arms that are not tuned yet), 2 of them finished" in partial
    assert "partial: 2 runs are missing" in partial
    # Nothing of another study is there: run=false trains nothing.
    assert "9 runs left" in call(*arguments, "name=nothing", "run=false")
    assert not list((tmp_path / "nothing").rglob("metrics.jsonl"))


def test_a_failed_run_is_named_and_a_text_that_was_trained_on_is_no_test(shards, text_file, tmp_path, call: Call) -> None:
    refused = call(*tuned(shards, tmp_path, text_file, {"baseline": ["model=baseline"]}))
    assert "texts.other" in refused and "give a text that is not part of the training text" in refused
    broken = tmp_path / "shards"
    shutil.copytree(shards, broken)
    (broken / "val_000000.bin").unlink()
    error = call(*toy(broken, tmp_path, {"baseline": ["model=baseline"]}, "seeds=1"))
    assert "val_000000.bin" in error and "baseline-s1.log" in error and "repeat this command" in error
    assert not (tmp_path / "toy" / "results.json").exists()
