"""Which runs are one arm, which differences a report takes between arms, and which runs it refuses to compare."""

from pathlib import Path

import pytest

from eval.common import command_of
from eval.report import __main__ as report
from eval.report.runs import Run, arms_of, labels, measured, read_runs
from eval.report.tables import at, differences, row_of
from tests.eval.conftest import edit, further


def made_up(label: str, seed: int, loss: float, config: dict) -> Run:
    config = {"seed": seed, "steps": 1, "model": {}, "data": {}, "optim": {}} | config
    return Run(Path(label), label, "diff", config, {}, [{"step": 1, "loss": loss, "tokens": 1}], [], {})


def test_arms_are_what_differs_in_more_than_the_seed(seeded):
    folders = seeded("b", {1: 2.0, 2: 2.1}) + seeded("b", {1: 2.2, 2: 2.3}, "slow") + seeded("b", {1: 3.0}, "again")
    edit(folders[2] / "config.yaml", "optim", {"lr": 0.1})
    edit(folders[3] / "config.yaml", "optim", {"lr": 0.1})
    edit(folders[1] / "config.yaml", "dtype", "float32")  # auto means another one on another processor
    arms = arms_of(read_runs([str(folder) for folder in folders]))
    # The last has the seed and the settings of the first: a repetition is no further seed.
    assert [(arm.name, len(arm.runs)) for arm in arms] == [("baseline", 2), ("slow", 2), ("again-s1", 1)]
    assert len({arm.colour for arm in arms}) == 3 and arms[0].colour == "#0072B2"  # that of its variant


def test_arms_of_one_label_have_names_and_differences():
    losses = {1e-3: 3.0, 2e-3: 3.1, 3e-3: 3.5}
    runs = [made_up(f"diff/s{seed}", seed, loss, {"optim": {"lr": lr}}) for lr, loss in losses.items() for seed in (1, 2)]
    arms = arms_of(runs)
    assert [arm.name for arm in arms] == ["diff", "diff (2)", "diff (3)"]
    assert labels(["/a/x/n", "/b/x/n", "/b/y/n", "/b/y/m"]) == ["a/x/n", "b/x/n", "b/y/n", "b/y/m"]
    assert len(labels(["/a/n", "/a/n"])) == 2
    rows = [row_of(arms, "Loss", "training loss", at("train.loss"), better="lower")]
    assert [(one.arm, round(one.mean, 3)) for one in differences(arms, rows)] == [("diff (2)", 0.1), ("diff (3)", 0.5)]


def test_what_makes_two_runs_one_arm():
    """Seeds may be read from elsewhere, or start from one run each; a name has no part of a seed, and a null is no key."""
    for label, configs, names in (
        ("diff-s1{}", [{"data": {"path": f"{disk}/b", "streaming": disk == "a"}} for disk in "ac"], ["diff"]),
        ("x-s{}", [{"init_from": f"runs/pretrain-s{seed}"} for seed in (1, 2)], ["diff"]),
        ("x-s{}", [{"init_from": f"runs/a/seed={seed}"} for seed in (1, 2)], ["diff"]),
        ("x-s{}", [{"init_from": f"runs/steps{steps}"} for steps in (100, 200)], ["x-s1", "x-s2"]),
        ("x-s{}", [{"optim": {"newer": newer}} for newer in ({"option": None}, {})], ["diff"]),
    ):
        arms = arms_of([made_up(label.format(seed), seed, 3.0, config) for seed, config in enumerate(configs, 1)])
        assert [arm.name for arm in arms] == names


def test_what_was_measured_is_compared_and_not_only_the_settings(seeded):
    folders = seeded("b", {1: 2.0, 2: 2.1, 3: 2.2})
    for name, first, second, differ in (
        ("outliers", {"length": 128, "windows": 7}, {"length": 256, "windows": 7}, "length"),
        ("quantization", {"sha256": "a"}, {"sha256": "b"}, "the text"),
        ("icl", {"shots": [{"shots": 1}, {"shots": 8}]}, {"shots": [{"shots": 1}, {"shots": 4}]}, "shots"),
        ("needle_passkey", {"cells": [{"length": 128, "depth": 0}]}, {"cells": [{"length": 256, "depth": 0}]}, "cells"),
    ):
        for folder, results in zip(folders, ({}, first, first), strict=True):  # an older result does not say it
            further(folder, name, results)
        read_runs([str(folder) for folder in folders])
        further(folders[2], name, second)
        says = f"s2 and .*s3 ran eval.{command_of(name)} on different text.*; they differ in {differ}$"
        with pytest.raises(ValueError, match=says):
            read_runs([str(folder) for folder in folders])
        further(folders[2], name, first)
    digits = [{"data": {"retrieval": {"digits": number}}} for number in (4, 6)]  # of the numbers to find
    assert len({str(measured("needle_books", {"results": {}}, config)) for config in digits}) == 2


def test_a_file_under_two_spellings_is_one_file(seeded):
    folders = seeded("b", {1: 2.0, 2: 2.1})
    for name, *settings in (
        ("multiple_choice_q", {"file": "/there/q.jsonl"}, {"file": "q.jsonl"}),
        ("harness", {"include_path": "tasks/", "tasks": ["a", "b"]}, {"include_path": "/x/tasks", "tasks": ["b", "a"]}),
        ("perplexity_b", {"out": "runs/a", "training_counts": False}, {"out": "runs/b"}),
        ("icl_t", {"examples": "/there/t.label", "test": "x/e.label"}, {"examples": "t.label", "test": "e.label"}),
    ):
        for folder, given in zip(folders, settings, strict=True):
            further(folder, name, {"loss": 1.0, "sha256": "a"}, **given)
    read_runs([str(folder) for folder in folders])
    further(folders[1], "icl_t", {"loss": 1.0, "sha256": "b"}, **given)
    with pytest.raises(ValueError, match=r"ran eval\.icl on different text"):
        read_runs([str(folder) for folder in folders])


def test_runs_that_cannot_be_compared_are_refused(evaluated, refused, tmp_path):
    one, two = evaluated("one"), evaluated("two", "d")
    for file, key, value, says in (
        ("tokenizer.json", "fingerprint", "f" * 64, "different tokenizers"),
        ("config.yaml", "data.name", "another", "different data"),
        ("config.yaml", "data.retrieval", {"digits": 6}, "eval.attention_noise on different"),
        ("eval/perplexity.json", "results.sha256", "0", "eval.perplexity on different text"),
        ("eval/needle.json", "config.samples", 7, "eval.needle on different"),
        ("tokenizer.json", None, "{", "damaged: copy it from"),
    ):
        original = (two / file).read_text()
        if key:
            edit(two / file, key, value)
        else:
            (two / file).write_text(value)
        assert says in refused(report, f"runs=[{one},{two}]", f"out={tmp_path / 'r.html'}"), key
        (two / file).write_text(original)
    (two / "metrics.jsonl").write_text('{"step": 0, "params": 1}\n{"step": 1, "lo')
    assert "no training metrics" in refused(report, f"runs=[{two}]")
    assert not (tmp_path / "r.html").exists() and not (tmp_path / "figures").exists()
