"""One self-contained HTML page that compares runs: table, loss curves, needle heatmaps, attention, loss by position.

    python -m eval.report runs=[runs/A,runs/B] out=report.html

It shows what eval.perplexity, eval.needle and eval.attention_noise have measured; what a run lacks is said.
Beside the page it writes its figures (figures/*.png) and its numbers (the same name, .json; the table alone also as
.md), and it prints the table.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from omegaconf import MISSING

from configs import command
from configs.provenance import machine, version
from eval.common import write_atomically
from eval.comparison import Row, Run, notes, read_runs, table
from eval.page import draw_all, page


@dataclass
class ReportConfig:
    """runs: run folders. out: the page; its figures and JSON are written beside it."""

    runs: list[str] = MISSING
    out: str = "report.html"


def write_report(folders: list[str], out: str | Path) -> list[Row]:
    """Compare the runs: write the page, its JSON and its figures, print the table and return it."""
    out = Path(out)
    if out.suffix != ".html":
        raise ValueError(f"out={out} is not an .html file: use out=report.html")
    runs = read_runs(folders)
    rows, remarks = table(runs), notes(runs)
    figures = draw_all(runs, out.parent / "figures")
    content = {
        "eval": "report",
        "runs": [{"run": run.label, "variant": run.variant, "config": run.config, "evals": run.evals} for run in runs],
        "machine": machine(),
        "version": version(),
        "results": [asdict(row) for row in rows],
    }
    write_atomically(out.with_suffix(".json"), json.dumps(content, indent=1).encode())
    write_atomically(out.with_suffix(".md"), markdown(runs, rows).encode())
    write_atomically(out, page(runs, rows, figures, remarks, out).encode())
    print_table(runs, rows)
    for remark in remarks:
        print(f"note: {remark}")
    print(f"report  {out} ({len(runs)} runs, {len(figures)} figures)")
    return rows


def print_table(runs: list[Run], rows: list[Row]) -> None:
    """The table for the terminal."""
    lines = [["", *(run.label for run in runs)]] + [[row.name, *(cell.text for cell in row.cells)] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        first, *others = (
            text.ljust(w) if i == 0 else text.rjust(w) for i, (text, w) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join([first, *others]))


def markdown(runs: list[Run], rows: list[Row]) -> str:
    """The table for a README."""
    lines = [["", *(run.label for run in runs)], ["---", *("---:" for _ in runs)]]
    lines += [[row.name, *(cell.text for cell in row.cells)] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


@command("report", ReportConfig)
def main(cfg: ReportConfig) -> None:
    write_report(cfg.runs, cfg.out)


if __name__ == "__main__":
    main()
