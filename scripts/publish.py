"""Publish the numbers and tables of a report, an ablation, conversions, lambdas, survival curves or a bench.

    python scripts/publish.py of=runs/quickstart            # report.{json,md} beside report.html
    python scripts/publish.py of=runs/ablate/main           # results.json and table.md; name=OTHER: under another name
    python scripts/publish.py of=runs/compare               # conversions.{json,md}; the ablation is in its folder trained
    python scripts/publish.py of=runs/noise_lambdas         # lambdas.{json,md} of python -m ablation.lambdas
    python scripts/publish.py of=runs/emergence_survival    # survival.{json,md}, in the same way
    python scripts/publish.py of=runs/noise_two_maps        # two_maps.{json,md}, in the same way
    python scripts/publish.py of=runs/bench/train.json      # to docs/results/bench/, with the table beside it

No table is typed by hand: this command writes the table between `<!-- NAME table -->` and `<!-- end -->` in README.md
and docs/ (a bench's NAME is bench/train), and tests/test_readme.py compares the documents with docs/results/.
"""

import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from ablation.records import PUBLISHED, records_of, rounded, thinned, write_records
from configs import command
from configs.files import write_atomic, write_json

# Numbers and table, as the commands name them.
NAMES = ("report", "conversions", "lambdas", "survival", "two_maps")
PAIRS = (("results.json", "table.md"), *((f"{name}.json", f"{name}.md") for name in NAMES))
DIFFERENCES = "differences.md"  # an ablation's, with a mark of its own in the documents: NAME/differences


@dataclass
class PublishConfig:
    """of: a folder that eval.report, scripts/ablate.py, scripts/convert.py or ablation.lambdas, .survival or .two_maps wrote,
    or a file of scripts/bench.py. name: its name under docs/results/ (of a bench under docs/results/bench/), by default its own
    name.
    """

    of: str = MISSING
    name: str | None = None


@command("publish", PublishConfig)
def main(cfg: PublishConfig) -> None:
    source = Path(cfg.of)
    if source.is_file():
        publish_bench(source, cfg.name or source.stem)
    else:
        publish_folder(source, cfg.name or source.resolve().name)


def publish_bench(source: Path, name: str) -> None:
    """Copy a bench's JSON, without this machine's folders, and its table."""
    table = source.with_suffix(".md")
    if source.suffix != ".json" or not table.is_file():
        raise ValueError(f"{source} is not a JSON file with its table beside it: give one that scripts/bench.py wrote")
    target = ROOT / "docs" / "results" / "bench" / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(table, target.with_suffix(".md"))
    content = json.loads(source.read_text())
    write_json(target, {**content, "config": without_folders(content.get("config"))})
    print(f"{target}: {put_into_documents(f'bench/{name}', table)}")


def publish_folder(source: Path, name: str) -> None:
    """Copy the numbers, the table, the figures and the records of finished runs."""
    target = ROOT / "docs" / "results" / name
    records = list((source / "records").glob("*.jsonl"))
    if records:
        known = records_of(source, target)
        write_records(target / PUBLISHED, map(rounded, known.values()))
        print(f"{target / PUBLISHED}: {len(known)} finished runs")
    pair = next((pair for pair in PAIRS if all((source / file).is_file() for file in pair)), None)
    if pair is None and records:
        return  # a study without a table yet
    if pair is None:
        known = ", ".join(file for file, _ in PAIRS)
        raise ValueError(f"{source} has none of {known} with its table: run eval.report or scripts/ablate.py")
    target.mkdir(parents=True, exist_ok=True)
    for path in (*(source / file for file in pair), *(source / "figures").glob("*.png")):
        shutil.copy(path, target)
    shorten(target / pair[0], leave_out_curves=(target / PUBLISHED).is_file())
    if (source / DIFFERENCES).is_file() and documents_with(f"{name}/differences"):
        shutil.copy(source / DIFFERENCES, target)
        print(f"{target / DIFFERENCES}: {put_into_documents(f'{name}/differences', target / DIFFERENCES)}")
    print(f"{target}: {len(list(target.iterdir()))} files; {put_into_documents(name, target / pair[1])}")


def shorten(path: Path, leave_out_curves: bool) -> None:
    """Take this machine's folders out of a JSON's configuration, and shorten what it says of the course of training.

    Records have the curves already, and seven digits of every number; without records a run keeps as many points of its
    training loss as a record has. The JSON is written without indentation, which would be up to a third of it.
    """
    content = json.loads(path.read_text())
    for key in ("config", "runs"):  # a report has the configurations of its runs
        if key in content:
            content[key] = without_folders(content[key])
    arms = content["results"]["arms"] if content.get("eval") == "ablation" else []
    for run in (run for arm in arms for run in arm["runs"]):
        if leave_out_curves:
            run.pop("curve"), run.pop("losses")
        elif "losses" in run:
            run["losses"] = thinned(run["losses"], run["run"])
    if leave_out_curves:
        content = rounded(content)
    write_json(path, content, indent=0)


def without_folders(config: Any) -> Any:
    """The configuration with the last part alone of every absolute path: the folders say more of a machine than of a result."""
    if isinstance(config, dict):
        return {key: without_folders(value) for key, value in config.items()}
    if isinstance(config, list):
        return [without_folders(value) for value in config]
    return Path(config).name if isinstance(config, str) and config.startswith("/") else config


def documents_with(name: str) -> list[Path]:
    """The documents that have a place for the table `name`."""
    paths = (*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("*.md")))
    return [path for path in paths if f"<!-- {name} table -->" in path.read_text()]


def put_into_documents(name: str, table: Path) -> str:
    """Replace the table `name` in all documents that have it; returns a text that names them."""
    block = f"<!-- {name} table -->\n{table.read_text()}<!-- end -->"
    marked = re.compile(rf"<!-- {re.escape(name)} table -->\n(?:(?!<!-- \S+ table -->).)*?<!-- end -->", flags=re.DOTALL)
    changed = documents_with(name)
    for path in changed:
        text, places = marked.subn(lambda _: block, path.read_text())
        if not places:
            raise ValueError(f"{path}: the place of the table {name} has no end: add a line <!-- end --> after it")
        write_atomic(path, text.encode())
    names = " and ".join(path.relative_to(ROOT).as_posix() for path in changed)
    add = f"no document shows its table: add the lines <!-- {name} table --> and <!-- end --> to one of them"
    return f"its table is in {names}" if names else add


if __name__ == "__main__":
    main()
