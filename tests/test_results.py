"""The tables of README.md and docs/RESULTS.md that say what one change gives, against the JSON that they are taken from."""

import json
import re
from typing import Any

import pytest

from eval.report.statistics import paired
from tests.conftest import ROOT

POINT = "10.5M"
COLUMNS = {
    "books": "books", "recalled tokens": "AR-Hit", "other tokens": "Others", "documentation": "docs", "textbooks": "textbooks",
}  # fmt: skip
TABLES = ("main", "main_controls", "main_paths")
RESULTS = {name: json.loads((ROOT / "docs/results" / name / "results.json").read_text())["results"] for name in TABLES}


def split(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def marked(page: str, name: str) -> list[dict[str, str]]:
    """The rows of the table between the marks `name` and `end`."""
    table = (ROOT / page).read_text().split(f"<!-- {name} -->\n")[1].split("\n<!-- end -->")[0].splitlines()
    return [dict(zip(split(table[0]), split(line), strict=True)) for line in table[2:]]


def difference(arm: str, other: str, metric: str) -> tuple[dict[str, Any], float]:
    """`arm` less `other`, and its p: for all arms at once against the baseline, else after Holm's correction for the pairs."""
    names = {"arm": f"{arm}-{POINT}", "other": f"{other}-{POINT}"}
    for results in RESULTS.values():
        if other == "baseline":
            effects = results["mixed"][metric][POINT]["effects"]
            values = [(effect, effect["p"]) for name, effect in effects.items() if name == names["arm"]]
        else:
            values = [(pair, pair["p_holm"]) for pair in results["pairs"][metric] if names.items() <= pair.items()]
        if values:
            return values[0]
    raise AssertionError(f"no table has {arm} less {other}")


def seeds(arm: str) -> int:
    entries = (entry for results in RESULTS.values() for entry in results["arms"] if entry["name"] == f"{arm}-{POINT}")
    return len(next(entries)["runs"])


def cell(column: str, arm: str, other: str) -> str:
    if column == "seeds":
        return str(min(seeds(arm), seeds(other)))
    value, p = difference(arm, other, COLUMNS[column])
    mean = f"{value['mean']:+.3f}"
    interval = f" ({value['low']:+.3f} to {value['high']:+.3f})" if column == "books" else ""
    return (f"**{mean}**" if p < 0.05 else mean) + interval


@pytest.mark.parametrize("row", marked("docs/RESULTS.md", "changes"), ids=lambda row: next(iter(row.values())))
def test_what_one_change_gives_is_in_the_json(row: dict[str, str]) -> None:
    other, arm = re.findall(r"`(\w+)`", row["from, to"])
    values = {column: value for column, value in row.items() if column == "seeds" or column in COLUMNS}
    assert values == {column: cell(column, arm, other) for column in values}


ANSWER = {  # README's row -> arm, other arm
    "differential attention (V1) less plain attention": ("diff", "baseline"),
    "plain attention with V1's norm per head, less plain attention": ("baseline_head_norm", "baseline"),
    "one map with V1's heads and norm, less plain attention": ("half_heads_norm", "baseline"),
    "V1 less the same heads and norm with one map": ("diff", "half_heads_norm"),
}


def test_the_answer_follows_from_the_runs() -> None:
    """The first table of README.md: five differences paired by seed, and their 95 % interval."""
    runs: dict[str, dict[int, dict[str, float]]] = {}
    for results in RESULTS.values():
        for arm in (arm for arm in results["arms"] if arm["point"] == POINT):
            runs.setdefault(arm["arm"], {}).update({run["seed"]: run["values"] for run in arm["runs"]})
    rows = marked("README.md", "answer")
    assert [row["loss, nats per token"] for row in rows] == list(ANSWER)
    for row, (arm, other) in zip(rows, ANSWER.values(), strict=True):
        for column, metric in (("books", "books"), ("documentation", "docs")):
            result = paired([runs[arm][seed][metric] - runs[other][seed][metric] for seed in range(1, 6)])
            digits = 3 if metric == "books" else 2
            text = f"{result.mean:+.{digits}f} ({result.low:+.{digits}f} to {result.high:+.{digits}f})"
            assert row[column] == text, f"{arm} less {other}, {metric}"
