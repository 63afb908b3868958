"""Lambda at the end of training: the last reading of each layer and run, and what the table counts."""

import json
from collections.abc import Callable
from pathlib import Path

from ablation import lambdas
from ablation.lambdas import rows_of, table
from configs.files import read_json_lines
from training.monitor import last_lambdas


def write(folder: Path, *readings: dict[str, float]) -> Path:
    folder.mkdir(parents=True)
    lines = [{"step": 0, "loss": 5.0}, *({"step": 100 * i, **reading} for i, reading in enumerate(readings, 1))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "metrics.jsonl"


def of(first: float, second: float) -> dict[str, float]:
    """A reading of the monitor; names that only begin with lambda and the means over layers are not lambda of a layer."""
    other = {"monitor/layer_0/lambda_init": 0.2, "monitor/layer_0/lambda_std": 9.0, "monitor/mean/lambda": 9.0}
    return {"monitor_s": 0.1, **other, "monitor/layer_0/lambda": first, "monitor/layer_10/lambda": second}


def test_the_last_reading_counts_and_rows_count_what_adds_and_what_outweighs(tmp_path: Path) -> None:
    for seed, reading in enumerate([of(-0.3, 1.4), of(0.5, 0.2), of(-4e8, 1.0)], 1):
        path = write(tmp_path / f"diff-s{seed}", of(0.1, 0.2), reading)
    assert last_lambdas(read_json_lines(path)) == {0: -4e8, 10: 1.0}
    diverged = write(tmp_path / "diverged", of(0.1, 0.2), {"monitor_s": 0.1, "monitor/layer_10/lambda": 0.4})
    assert last_lambdas(read_json_lines(diverged)) == {10: 0.4}
    assert last_lambdas(read_json_lines(tmp_path / "none")) == {}
    write(tmp_path / "baseline-s1", {"monitor/layer_0/entropy": 2.0})
    seeds = {"baseline": [1], "diff": [1, 2, 3, 4]}
    arms = [{"name": arm, "runs": [{"run": f"{arm}-s{seed}"} for seed in seeds[arm]]} for arm in seeds]
    low, high = rows_of(arms, tmp_path, {})  # none of the baseline; the missing folder of seed 4 is no value
    assert (low["arm"], low["layer"], low["n"], low["median"]) == ("diff", 0, 3, -0.3)
    assert (low["below_0"], low["above_1"]) == (2, 0)
    assert (high["layer"], high["below_0"], high["above_1"]) == (10, 0, 1)
    assert low["lambda"] == {"diff-s1": -0.3, "diff-s2": 0.5, "diff-s3": -4e8}
    assert "| diff | 0 | 3 | -0.3 | -4e+08 | 0.5 | 2 of 3 | 0 of 3 |" in table("noise", [low, high])
    low, _ = rows_of(arms, tmp_path, {f"diff-s{seed}": {"lambda": {"0": 0.25}} for seed in (1, 4)})
    assert low["lambda"] == {"diff-s1": -0.3, "diff-s2": 0.5, "diff-s3": -4e8, "diff-s4": 0.25}


def test_the_command(tmp_path: Path, call: Callable[..., None], refused: Callable[..., str]) -> None:
    arms = [{"name": "diff", "arm": "diff", "point": "", "variant": "diff", "runs": [{"run": "diff-s1"}]}]
    (tmp_path / "results.json").write_text(json.dumps({"eval": "ablation", "config": {}, "results": {"arms": arms}}))
    assert "monitor.every=100" in refused(lambdas, f"ablation={tmp_path}")
    write(tmp_path / "diff-s1", of(0.3, -0.2))
    call(lambdas, f"ablation={tmp_path}", f"out={tmp_path / 'out'}")
    content = json.loads((tmp_path / "out" / "lambdas.json").read_text())
    assert [row["lambda"] for row in content["results"]["rows"]] == [{"diff-s1": 0.3}, {"diff-s1": -0.2}]
    assert content["eval"] == "lambdas" and content["machine"]
    assert (tmp_path / "out" / "figures" / "lambdas.png").is_file() and (tmp_path / "out" / "lambdas.md").is_file()
