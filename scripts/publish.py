"""Publish the numbers and the table of a report, an ablation, lambdas, n-grams, survival curves or a bench.

    python scripts/publish.py of=runs/quickstart            # report.{json,md} beside report.html
    python scripts/publish.py of=runs/ablate/main           # results.json and table.md; name=OTHER: under another name
    python scripts/publish.py of=runs/noise_lambdas         # of python -m ablation.lambdas, and so ngrams, survival, two_maps
    python scripts/publish.py of=runs/bench/train.json      # to docs/results/bench/, with the table beside it

No table is typed by hand: this command writes the table between `<!-- NAME table -->` and `<!-- end -->` in README.md
and docs/ (a bench's NAME is bench/train), and tests/test_readme.py compares the documents with docs/results/. Of the figures
it copies those that a page shows.
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
from configs.files import read_json_object, write_atomic, write_json

# Numbers and table, as the commands name them.
NAMES = ("report", "lambdas", "ngrams", "survival", "two_maps")
PAIRS = (("results.json", "table.md"), *((f"{name}.json", f"{name}.md") for name in NAMES))


@dataclass
class PublishConfig:
    of: str = MISSING  # a folder with numbers and a table, or a JSON of scripts/bench.py
    name: str | None = None  # its name under docs/results/, or of a bench under docs/results/bench/; None: that of the source


@command("publish", PublishConfig)
def main(cfg: PublishConfig) -> None:
    source = Path(cfg.of)
    if source.is_file():
        publish_bench(source, cfg.name or source.stem)
    else:
        publish_folder(source, cfg.name or source.resolve().name)


def publish_bench(source: Path, name: str) -> None:
    """Copy a bench's JSON, without this machine's folders, and its table."""
    table, target = source.with_suffix(".md"), ROOT / "docs" / "results" / "bench" / f"{name}.json"
    content = read_json_object(source, "give one that scripts/bench.py wrote") if source.suffix == ".json" else {}
    if "bench" not in content or not table.is_file():
        raise ValueError(f"{source} is not a bench with its table beside it: give one that scripts/bench.py wrote")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(table, target.with_suffix(".md"))
    write_json(target, {**content, "config": without_folders(content.get("config"))})
    print(f"{target}: {put_into_documents(f'bench/{name}', table)}")


def publish_folder(source: Path, name: str) -> None:
    """Copy the numbers, the table, the records of finished runs, and the figures that a page shows."""
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
        raise ValueError(f"{source} has no numbers with their table: run eval.report or scripts/ablate.py")
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(source / pair[1], target)
    content = json.loads((source / pair[0]).read_text())
    write_json(target / pair[0], without_curves(content, (target / PUBLISHED).is_file()), indent=0)
    figures = sorted((source / "figures").glob("*.png"))
    page = "".join(path.read_text() for path in target.glob("*.md"))
    shown = [path for path in figures if path.name in page or pages_with(f"results/{name}/{path.name}")]
    for path in shown:
        shutil.copy(path, target)
    print(f"{target}: {len(shown)} figures of {len(figures)}, as pages show; {put_into_documents(name, target / pair[1])}")


def without_curves(content: dict[str, Any], recorded: bool) -> dict[str, Any]:
    """A JSON without this machine's folders, and with no more of the curves and digits than the records have."""
    content |= {key: without_folders(content[key]) for key in ("config", "runs") if key in content}
    arms = content["results"]["arms"] if content.get("eval") == "ablation" else []
    for run in (run for arm in arms for run in arm["runs"]):
        if recorded:
            run.pop("curve"), run.pop("losses")
        elif "losses" in run:
            run["losses"] = thinned(run["losses"])
    return rounded(content) if recorded else content


def without_folders(config: Any) -> Any:
    """The configuration with the last part alone of every absolute path."""
    if isinstance(config, dict):
        return {key: without_folders(value) for key, value in config.items()}
    if isinstance(config, list):
        return [without_folders(value) for value in config]
    return Path(config).name if isinstance(config, str) and config.startswith("/") else config


def pages_with(text: str) -> list[Path]:
    """The pages of the project in which the text occurs."""
    return [path for path in (*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("*.md"))) if text in path.read_text()]


def put_into_documents(name: str, table: Path) -> str:
    """Replace the table `name` in all documents that have it; returns a text that names them."""
    block = f"<!-- {name} table -->\n{table.read_text()}<!-- end -->"
    marked = re.compile(rf"<!-- {re.escape(name)} table -->\n(?:(?!<!-- \S+ table -->).)*?<!-- end -->", flags=re.DOTALL)
    pages = pages_with(f"<!-- {name} table -->")
    for path in pages:
        text, places = marked.subn(lambda _: block, path.read_text())
        if not places:
            raise ValueError(f"{path}: the place of the table {name} has no end: add a line <!-- end --> after it")
        write_atomic(path, text.encode())
    names = " and ".join(path.relative_to(ROOT).as_posix() for path in pages)
    add = f"no document shows its table: add the lines <!-- {name} table --> and <!-- end --> to one of them"
    return f"its table is in {names}" if names else add


if __name__ == "__main__":
    main()
