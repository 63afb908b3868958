"""Publish the numbers and tables of a report, an ablation or a comparison of conversions.

    python scripts/publish.py of=runs/quickstart            # report.{json,md} beside report.html
    python scripts/publish.py of=runs/ablate/main           # results.json and table.md; name=OTHER: under another name

No table is typed by hand: this command writes the table between `<!-- NAME table -->` and `<!-- end -->` in README.md
and docs/RESULTS.md, and tests/test_readme.py compares the documents with docs/results/.
"""

import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from configs import command  # noqa: E402
from configs.files import write_atomic  # noqa: E402
from eval.records import records_of, write_records  # noqa: E402

PAIRS = (("report.json", "report.md"), ("results.json", "table.md"))  # numbers and table, as the commands name them
DOCUMENTS = ("README.md", "docs/RESULTS.md")


@dataclass
class PublishConfig:
    """of: a folder that eval.report, scripts/ablate.py or scripts/convert.py wrote. name: the folder's name under
    docs/results/, by default its own name.
    """

    of: str = MISSING
    name: str | None = None


@command("publish", PublishConfig)
def main(cfg: PublishConfig) -> None:
    source, name = Path(cfg.of), cfg.name or Path(cfg.of).resolve().name
    target = ROOT / "docs" / "results" / name
    records = list((source / "records").glob("*.jsonl"))
    if records:
        known = records_of(source, target)
        write_records(target / "records.jsonl", known.values())
        print(f"{target / 'records.jsonl'}: {len(known)} finished runs")
    pair = next((pair for pair in PAIRS if all((source / file).is_file() for file in pair)), None)
    if pair is None and records:
        return  # a study without a table yet
    if pair is None:
        raise ValueError(
            f"{source} has neither report.json nor results.json with its table: run eval.report or scripts/ablate.py"
        )
    target.mkdir(parents=True, exist_ok=True)
    for path in (*(source / file for file in pair), *(source / "figures").glob("*.png")):
        shutil.copy(path, target)
    block = f"<!-- {name} table -->\n{(target / pair[1]).read_text()}<!-- end -->"
    marked = re.compile(rf"<!-- {re.escape(name)} table -->\n.*?<!-- end -->", flags=re.DOTALL)
    changed = []
    for document in DOCUMENTS:
        text, count = marked.subn(lambda _: block, (ROOT / document).read_text())
        if count:
            write_atomic(ROOT / document, text.encode())
            changed.append(document)
    where = f"its table is in {' and '.join(changed)}" if changed else f"no document has a line <!-- {name} table -->"
    print(f"{target}: {len(list(target.iterdir()))} files; {where}")


if __name__ == "__main__":
    main()
