"""Rows, curves and averages that a report is made of."""

from pathlib import Path

import numpy as np
import pytest

from eval.common import figure
from eval.report import figures
from eval.report.figures import band, short_labels, smooth
from eval.report.runs import Arm, Run, read_run, text_of
from eval.report.tables import headline_table, scalars, si, trained_on


def test_what_a_training_loss_is_of(make_run, tmp_path, monkeypatch):
    run = read_run(make_run("one"))
    arms = [Arm("one", runs=[run])]
    assert trained_on(arms) == "text mixed with 50 % synthetic retrieval documents"
    assert not any(row.name.startswith("training loss on") for row in headline_table(arms))
    for line in run.train:  # a run that logged the two apart
        line |= {"loss_text": 5.0, "loss_retrieval": 1.0}
    rows = {row.name: row for row in headline_table(arms)}
    assert rows["training loss on text, last tenth"].cells[0].value == 5.0
    assert rows["training loss on retrieval documents, last tenth"].cells[0].value == 1.0
    figures.draw_losses(tmp_path / "loss.png", arms)
    drawn, run.val = [], []  # trained with eval_every=0
    monkeypatch.setattr(figures, "_frame", lambda ax, shown: drawn.extend(shown))
    figures.draw_losses(tmp_path / "loss.png", arms)
    assert drawn and figures.training_loss(arms) == "loss_text"


def test_labels_are_what_differs_between_names_numbers_are_short_and_curves_smooth():
    assert [si(x) for x in (1_234_567, 999, 2.5e9, 17_000)] == ["1.23M", "999", "2.5G", "17k"]
    assert [si(x) for x in (999_499, 999_600, 999.7)] == ["999k", "1M", "1k"]  # rounded up to the next letter
    assert smooth([0.0, 3.0, 6.0, 9.0], 3).tolist() == pytest.approx([1.5, 3.0, 6.0, 7.5])
    rest = "nano-text-weight50-steps30-batch_tokens960-s1"
    assert short_labels(["one", "diff_v2"]) == ["one", "diff_v2"]
    assert short_labels([f"diff-lr1e-3-{rest}", f"diff-lr2e-3-{rest}", f"diff-{rest}"]) == ["lr1e-3", "lr2e-3", "diff"]
    assert short_labels([f"diff-{rest}"]) == [f"diff-{rest}"]
    twice = ["diff-" + "x-" * 30 + "x", "diff-" + "x-" * 31 + "x"]
    assert short_labels(twice) == twice  # no label stands for two


def test_bands_reach_from_the_lowest_to_the_highest_seed(tmp_path):
    with figure(tmp_path / "f.png", 3, 3) as axes:
        curves = [(np.array([0.0, 1, 2]), np.array([1.0, 2, 3])), (np.array([0.0, 2, 4]), np.array([3.0, 5, 9]))]
        runs = [Run(Path("x"), f"x-s{seed}", "baseline", {"seed": seed}, {}, [{"step": 1}], [], {}) for seed in (1, 2)]
        arm = Arm("both", runs=runs)
        assert band(axes[0, 0], arm, curves).tolist() == [2.0, 3.0, 4.0]
        (area,) = axes[0, 0].collections
        corners = area.get_paths()[0].vertices
        assert {tuple(corner) for corner in corners} >= {(0, 1), (1, 2), (2, 3), (0, 3), (1, 4), (2, 5)}


def test_scalars_of_nested_results() -> None:
    results = {"loss": 1.5, "by_position": [1.0], "ok": True, "tasks": {"a": {"acc": 1}}, "list": [1.0], "none": None}
    results |= {"se": {"signed": 0.01}, "layers": [{"layer": 1, "noise": 0.3}], "sink": {"se": 0.2}}
    assert dict(scalars(results)) == {"loss": 1.5, "tasks · a · acc": 1, "sink · se": 0.2}
    cells = [{"length": 8, "depth": d, "acc": d / 2, "more": {"se": 0.1}} for d in (0, 1)]
    parts = ((d, key, value) for d in (0, 1) for key, value in (("acc", d / 2), ("more · se", 0.1)))
    assert dict(scalars({"cells": cells})) == {f"length=8, depth={d} · {key}": value for d, key, value in parts}


def test_the_text_of_an_evaluation_in_words_and_both_orders_of_normalisation(make_run):
    run = read_run(make_run("one"))
    results = {"signed": {"mean": {"noise": 0.33}}, "signed_per_layer": {"mean": {"noise": 0.21, "noise_se": 0.02}}}
    run.evals["attention_noise"] = {"results": results, "config": {}}
    cells = {row.name: row.cells[0] for row in headline_table([Arm("one", runs=[run])])}
    assert cells["attention noise, signed"].value == 0.33
    assert cells["attention noise, signed per layer"].text == "0.210 ± 0.020"
    for config, results, text in (
        ({}, {"loss": 3.5}, "the validation documents of shards"),  # by the folder that data.dir= names
        ({"text": None}, {"text": "shards"}, "the validation documents of shards"),  # of an older version
        ({"text": "/there/essays.txt"}, {"text": "essays.txt"}, "essays.txt"),
    ):
        run.evals["perplexity"] = {"results": results, "config": config}
        assert text_of(run, "perplexity") == text
