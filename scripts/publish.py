"""Publish a report's numbers and tables: python scripts/publish.py report=runs/quickstart/report.html

No table is typed by hand: in README.md and docs/RESULTS.md, between `<!-- NAME table -->` and `<!-- end -->`, stands the
report's own, and tests/test_readme.py compares the two.
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


@dataclass
class PublishConfig:
    """report: a report.html that eval.report wrote. name: of the result, under docs/results/."""

    report: str = MISSING
    name: str = "quickstart"


@command("publish", PublishConfig)
def main(cfg: PublishConfig) -> None:
    report, target = Path(cfg.report), ROOT / "docs" / "results" / cfg.name
    if not report.with_suffix(".json").is_file():
        raise FileNotFoundError(f"{report} has no report.json beside it: run python -m eval.report out={report} first")
    target.mkdir(parents=True, exist_ok=True)
    for suffix in (".json", ".md"):
        shutil.copy(report.with_suffix(suffix), target / f"report{suffix}")
    for figure in (report.parent / "figures").glob("*.png"):
        shutil.copy(figure, target)
    block = f"<!-- {cfg.name} table -->\n{(target / 'report.md').read_text()}<!-- end -->"
    marked = re.compile(rf"<!-- {cfg.name} table -->\n.*?<!-- end -->", flags=re.DOTALL)
    for document in (ROOT / "README.md", ROOT / "docs" / "RESULTS.md"):
        document.write_text(marked.sub(lambda _: block, document.read_text()))
    print(f"{target}: {len(list(target.iterdir()))} files; README.md and docs/RESULTS.md updated")


if __name__ == "__main__":
    main()
