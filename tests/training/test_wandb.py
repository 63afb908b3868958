"""wandb: what an offline run holds, in wandb's file, and what an online one is started with."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.files import read_json_lines
from tests.conftest import run_command, train_arguments
from training import tracking
from training.metrics import Metrics

SECRETS = {"WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567", "HF_TOKEN": "hf_notToBeSeenAnywhere"}


class WandbStub:
    """Stands in for the package, sends nothing and remembers what was sent."""

    class Error(Exception):
        """The base class of wandb's errors."""

    Settings = staticmethod(dict)

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []  # options of every init
        self.logged: list[Any] = []  # what was logged, and "finished"
        self.summary: dict[str, Any] = {}
        self.config: dict[str, Any] = {}

    def init(self, **options: Any) -> SimpleNamespace:
        self.started.append(options)
        return SimpleNamespace(
            summary=self.summary,
            config=SimpleNamespace(update=lambda values, allow_val_change: self.config.update(values)),
            log=self.logged.append,
            define_metric=lambda *given, **options: None,
            finish=lambda: self.logged.append("finished"),
        )


def records(folder: Path) -> Iterator[Any]:
    """The records of an offline run's .wandb file: protocol buffers in LevelDB's log format, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("run-*.wandb")
    content, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # no header fits the block's end
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield Record.FromString(whole)
            whole = b""


def items(part: Any) -> dict[str, Any]:
    """key -> value of a history, a configuration or a summary."""
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in part}


def test_an_offline_run_holds_configuration_history_and_summary_and_no_secret(shards: Path, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    offline = tmp_path / "trial" / "diff-s1"
    arguments = train_arguments(shards, offline, "model=diff", "steps=2", "monitor.every=1", "wandb=offline")
    done = run_command(*arguments, env={"WANDB_SILENT": "true", **SECRETS})
    assert done.returncode == 0, done.stderr
    files = [path for path in offline.rglob("*") if path.is_file()]
    assert len(files) > 8
    for path in files:
        assert not any(secret.encode() in path.read_bytes() for secret in SECRETS.values()), path

    (folder,) = (offline / "wandb").glob("offline-run-*")
    first = list(records(folder))
    (run,) = (record.run for record in first if record.HasField("run"))
    assert (run.project, run.run_group, run.job_type) == ("attention-noise", "trial", "diff")
    assert run.display_name == "diff-s1" and list(run.tags) == ["seed 1"]
    config = items(run.config.update)
    assert config["model"]["layers"] == "d" and config["seed"] == 1 and config["steps"] == 2
    later = [items(record.config.update) for record in first if record.HasField("config")]
    assert any("version" in update and update["machine"]["cores"] for update in later)
    history = [items(record.history.item) for record in first if record.HasField("history")]
    lines = [line for line in read_json_lines(offline / "metrics.jsonl") if "continued" not in line]
    assert len(history) == len(lines) and any("monitor/layer_1/lambda" in row for row in history)
    for line in lines:
        numbers = {k: v for k, v in line.items() if isinstance(v, (int, float)) and not k.endswith(("_s", "_gb"))}
        assert any(numbers.items() <= row.items() for row in history), line
    summary = {key: value for record in first for key, value in items(record.summary.update).items()}
    assert summary["best_val_loss"] == next(line["val_loss"] for line in lines if "val_loss" in line)
    metrics = {record.metric.name or record.metric.glob_name for record in first if record.HasField("metric")}
    assert metrics == {"step", "*"}


def test_an_online_run_is_resumed_by_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub, run_dir = WandbStub(), tmp_path / "trial" / "gated-s7"
    run_dir.mkdir(parents=True)
    monkeypatch.setitem(sys.modules, "wandb", stub)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_RUN_GROUP", "ours")
    for first in (0, 2):
        log = Metrics(run_dir, "online", {"seed": 7}, first)
        for step, loss in ((first, 3.0 - first), (first + 1, 5.0)):
            log.write(step=step, tokens=step, val_loss=loss, machine={"cpu": "x"}, mfu=None)
        log.write(step=first + 1, skipped="loss is nan")
        log.close()
    one, two = stub.started
    assert one == two and one["resume"] == "allow" and one["mode"] == "online" and len(one["id"]) == 8
    assert (one["project"], one["group"], one["job_type"], one["tags"]) == ("mine", "ours", "gated", ["seed 7"])
    assert one["settings"]["disable_git"] and one["settings"]["disable_code"]
    assert stub.logged[0] == {"step": 0, "tokens": 0, "val_loss": 3.0} and stub.logged.count("finished") == 2
    assert stub.config == {"machine": {"cpu": "x"}} and stub.summary == {"best_val_loss": 1.0}

    copy, moved = tmp_path / "copy", tmp_path / "moved"
    (run_dir / "wandb_id.txt").write_text("older123")  # by an earlier version, without the folder
    assert tracking.run_id(run_dir) == tracking.run_id(run_dir) == "older123"
    shutil.copytree(run_dir, copy)  # a copied folder is another run, and a moved one is not
    assert tracking.run_id(copy) == tracking.run_id(copy) != "older123"
    run_dir.rename(moved)
    assert tracking.run_id(moved) == "older123"


def test_a_wandb_that_does_not_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = WandbStub()

    def no_key(**options: object) -> None:
        raise stub.Error("No API key configured.\nUse `wandb login` to log in.")

    monkeypatch.setattr(stub, "init", no_key)
    for package, mode, says in (
        (stub, "online", "wandb does not start .No API key configured..: run `wandb login`, or use wandb=off"),
        (None, "offline", "pip install wandb"),
    ):
        monkeypatch.setitem(sys.modules, "wandb", package)
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
        with pytest.raises(ValueError, match=says):
            Metrics(tmp_path, mode, {}, 0)
        assert package or (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 2.0}\n'
