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
TABLES = ("answer", "main", "main_controls", "main_paths", "main_42m")
RESULTS = {name: json.loads((ROOT / "docs/results" / name / "results.json").read_text())["results"] for name in TABLES}


def split(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def marked(page: str, name: str) -> list[dict[str, str]]:
    """The rows of the table between the marks `name` and `end`."""
    table = (ROOT / page).read_text().split(f"<!-- {name} -->\n")[1].split("\n<!-- end -->")[0].splitlines()
    return [dict(zip(split(table[0]), split(line), strict=True)) for line in table[2:]]


def seeds(results: dict[str, Any], arm: str) -> int:
    return sum(len(entry["runs"]) for entry in results["arms"] if entry["name"] == f"{arm}-{POINT}")


def difference(arm: str, other: str, metric: str) -> tuple[int, dict[str, Any], float]:
    """Where most seeds have both: their number, the difference, and its p (all arms at once, or after Holm's correction)."""
    names, found = {"arm": f"{arm}-{POINT}", "other": f"{other}-{POINT}"}, []
    for results in RESULTS.values():
        if other == "baseline":
            effects = results["mixed"][metric][POINT]["effects"]
            values = [(effect, effect["p"]) for name, effect in effects.items() if name == names["arm"]]
        else:
            values = [(pair, pair["p_holm"]) for pair in results["pairs"][metric] if names.items() <= pair.items()]
        found += [(min(seeds(results, arm), seeds(results, other)), *value) for value in values]
    return max(found, key=lambda one: one[0])


def cell(column: str, arm: str, other: str) -> str:
    count, value, p = difference(arm, other, COLUMNS.get(column, "books"))
    if column == "seeds":
        return str(count)
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


def losses(study: str, arm: str, metric: str, point: str) -> dict[int, float]:
    (entry,) = (entry for entry in RESULTS[study]["arms"] if entry["name"] == f"{arm}-{point}")
    return {run["seed"]: run["values"][metric] for run in entry["runs"]}


def test_the_answer_follows_from_the_runs() -> None:
    """The first table of README.md: differences paired by seed, and their 95 % interval."""
    rows = marked("README.md", "answer")
    assert [row["loss, nats per token"] for row in rows] == list(ANSWER)
    for row, (arm, other) in zip(rows, ANSWER.values(), strict=True):
        for column, study, point, n in (("10.5M", "answer", "10.5M", 10), ("42M", "main_42m", "42M", 5)):
            for text, metric, digits in (("books", "books", 3), ("documentation", "docs", 2)):
                of_arm, of_other = (losses(study, name, metric, point) for name in (arm, other))
                assert len(of_arm) == len(of_other) == n
                result = paired([of_arm[seed] - of_other[seed] for seed in of_arm])
                wanted = f"{result.mean:+.{digits}f} ({result.low:+.{digits}f} to {result.high:+.{digits}f})"
                assert row[f"{text}, {column}"] == wanted, f"{arm} less {other}, {metric}"
