"""Survival of "has not arrived yet": against examples worked by hand and published ones."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from ablation import survival
from ablation.records import PUBLISHED, write_records
from ablation.survival import arrival, kaplan_meier, log_rank, two_tests
from configs.files import read_json_lines

# Freireich et al. 1963, weeks of remission under 6-MP and placebo; + is censored. The textbook example of both methods.
MP_TIMES = [6, 6, 6, 6, 7, 9, 10, 10, 11, 13, 16, 17, 19, 20, 22, 23, 25, 32, 32, 34, 35]
MP_SEEN = [1, 1, 1, 0, 1, 0, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0]
PLACEBO_TIMES = [1, 1, 2, 2, 3, 4, 4, 5, 5, 8, 8, 8, 8, 11, 11, 12, 12, 15, 17, 22, 23]
MP, PLACEBO = list(zip(MP_TIMES, map(bool, MP_SEEN), strict=True)), [(time, True) for time in PLACEBO_TIMES]


def test_kaplan_meier_by_hand_log_rank_and_arrival() -> None:
    """Times 1, 2, 2+, 3, 4+: at risk 5, 4, 2, so 4/5, 4/5 * 3/4, 3/5 * 1/2."""
    curve = kaplan_meier([(1, True), (2, True), (2, False), (3, True), (4, False)])
    assert (curve["n"], curve["arrived"], curve["times"]) == (5, 3, [1, 2, 3])
    assert curve["share"] == pytest.approx([4 / 5, 3 / 5, 3 / 10])
    assert curve["median"] == 3
    nobody = kaplan_meier([(5, False), (5, False)])
    assert nobody["median"] is None and nobody["times"] == []
    assert log_rank([(5, False)], [(6, False)]) == {"chi_square": 0.0, "p": 1.0}
    test = log_rank(MP, PLACEBO)  # of the textbook
    assert test["chi_square"] == pytest.approx(16.79, abs=0.005) and test["p"] == pytest.approx(4.17e-5, rel=0.01)
    # Wilson by hand for 3 of 5 (z^2 = 3.8415), and the tea tasting: 3 of 4 against 1 of 4, p = (16 + 1) * 2 / 70
    assert (curve["arrived_low"], curve["arrived_high"]) == (pytest.approx(0.2307, abs=1e-4), pytest.approx(0.8824, abs=1e-4))
    tea = [[(1, cup < right) for cup in range(4)] for right in (3, 1)]
    assert two_tests(*tea)["p_fisher"] == pytest.approx(34 / 70)
    losses = [{"tokens": 100 * i, "val_loss": loss} for i, loss in enumerate([2.0, 0.3, 0.04, 0.06])]
    assert [arrival(losses, level, "val_loss") for level in (0.05, 0.01)] == [(200, True), (300, False)]
    lines = [{"tokens": 100 * i, "needle_acc": share} for i, share in enumerate([0, 0.2, 0.5, 0.4, 0.95])]
    assert [arrival(lines, level) for level in (0.5, 0.9, 0.99)] == [(200, True), (400, True), (400, False)]
    # Greenwood by hand at time 2: 1/(5*4) + 1/(4*3) = 2/15; on the log-log scale
    reach = 1.959964 * math.sqrt(2 / 15) / -math.log(3 / 5)
    assert curve["share_low"][1] == pytest.approx((3 / 5) ** math.exp(reach))
    assert curve["share_high"][1] == pytest.approx((3 / 5) ** math.exp(-reach))
    assert all(low <= s <= high for low, s, high in zip(curve["share_low"], curve["share"], curve["share_high"], strict=True))


def test_the_command(tmp_path: Path, call: Callable[..., None], refused: Callable[..., str]) -> None:
    arms = []
    for arm, at, reference in (("baseline", 4, None), ("sooner", 2, "baseline")):
        runs = [f"{arm}-s{seed}" for seed in (1, 2, 3)]
        for seed, run in enumerate(runs):
            accuracies = [0.0] * (at + seed) + [0.9] * 4
            lines = [{"step": i, "tokens": 100 * i, "needle_acc": share} for i, share in enumerate(accuracies)]
            (tmp_path / run).mkdir()
            text = "".join(json.dumps(line) + "\n" for line in ({"step": 0, "tokens": 0, "params": 1}, *lines))
            (tmp_path / run / "metrics.jsonl").write_text(text)
        about = {"name": arm, "arm": arm, "point": "", "variant": "diff" if reference else "baseline"}
        arms.append(about | {"reference": reference, "runs": [{"run": run} for run in runs]})
    pairs = {"subtraction": ["sooner", "baseline"], "of an arm that was left out": ["sooner", "absent"]}
    study = {"eval": "ablation", "config": {"pairs": pairs}, "results": {"arms": arms}}
    (tmp_path / "results.json").write_text(json.dumps(study))
    for levels in ("[]", "[0]", "[1.5]"):
        assert "must be accuracies above 0" in refused(survival, f"ablation={tmp_path}", f"levels={levels}")
    call(survival, f"ablation={tmp_path}", "levels=[0.5]")
    content = json.loads((tmp_path / "survival.json").read_text())
    first, second = content["results"]["levels"]["0.5"]
    assert (first["median"], second["median"]) == (500, 300) and 0 < second["p"] == second["p_holm"] < 0.2
    (pair,) = content["results"]["pairs"]["0.5"]
    assert (pair["part"], pair["p"], pair["p_holm"]) == ("subtraction", second["p"], second["p"])
    assert (first["until"], second["until"]) == (900, 700)  # each curve ends at its own arm's last check
    shown = (tmp_path / "survival.md").read_text()
    assert "| baseline | 3 of 3 (0.44 to 1.00) | 0.00 (0.00 to -) |" in shown and "| sooner, baseline |" in shown
    assert (tmp_path / "figures" / "survival.png").is_file() and content["eval"] == "survival" and content["machine"]

    # The same from records alone, as docs/results keeps them
    kept, records = tmp_path / "kept" / tmp_path.name, []
    for run in (run["run"] for arm in arms for run in arm["runs"]):
        lines = read_json_lines(tmp_path / run / "metrics.jsonl")
        records.append({"run": run, "train": [], "val": [], "needle": [line for line in lines if "needle_acc" in line]})
        (tmp_path / run / "metrics.jsonl").unlink()
    assert "has no needle_acc: train with" in refused(survival, f"ablation={tmp_path}")
    write_records(kept / PUBLISHED, records)
    call(survival, f"ablation={tmp_path}", "levels=[0.5]", f"records={kept.parent}", f"out={tmp_path / 'out'}")
    assert json.loads((tmp_path / "out" / "survival.json").read_text())["results"] == content["results"]
