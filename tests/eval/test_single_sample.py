"""One sample has no standard error: none is printed, written or drawn, and the report still reads the result."""

import json
import math

import pytest

from eval import attention_noise, icl, needle, perplexity, quantization
from eval.common import mean_se, plus_minus
from eval.report import __main__ as report

ONE = ("samples=1", "depths=[0.5]")
COMMANDS = {
    perplexity: ("tokens=160",),
    needle: (*ONE, "lengths=[160]"),
    attention_noise: (*ONE, "windows=1"),
    icl: ("episodes=1", "shots=[2]", "orders=2"),
    quantization: (*ONE, "bits=[8]", "tokens=160"),
}


def test_the_error_of_a_mean_needs_two_values() -> None:
    assert mean_se([1.0, 3.0]) == (2.0, 1.0)
    mean, se = mean_se([2.0])
    assert mean == 2.0 and math.isnan(se)
    assert plus_minus(2.0, se) == "2.000" and plus_minus(0.5, 0.25, "+.2f") == "+0.50 ± 0.25"


@pytest.mark.parametrize("alone", [True, False], ids=["one run", "two seeds"])
def test_one_sample_has_no_error(alone: bool, make_run, call, capsys, tmp_path) -> None:
    runs = [make_run("one")] if alone else [make_run(f"seed{seed}", seed=seed) for seed in (1, 2)]
    for run in runs:
        for evaluation, options in COMMANDS.items():
            call(evaluation, f"run={run}", *options)
            said = capsys.readouterr().out
            assert "±" not in said and "nan" not in said, said
    results = json.loads((runs[0] / "eval" / "needle.json").read_text())["results"]
    assert results["se"] is None and results["cells"][0]["se"] is None
    recall = json.loads((runs[0] / "eval" / "perplexity.json").read_text())["results"]["recall"]
    assert recall["other"]["loss"] > 0 and recall["other"]["se"] is None
    call(report, f"runs=[{','.join(map(str, runs))}]", f"out={tmp_path}/report.html")
    page = (tmp_path / "report.html").read_text()
    assert "± nan" not in page and "None" not in page and (not alone or "± 0.0" not in page)
