"""One self-contained HTML page that compares runs: table, differences, curves, heatmaps, attention, all evaluations.

    python -m eval.report runs=[runs/A,runs/B] out=report.html [ablation=runs/ablate/NAME] [viewer=false] [wandb=online]

Runs that differ in their seed alone are one arm: means and standard deviations over seeds, curves with bands, and paired
differences to the first arm with 95 % intervals. It shows what the evaluations have measured; what a run lacks is said.
Beside the page it writes its figures (figures/*.png), its numbers (the same name, .json; the tables alone also as .md)
and the attention viewer (..._viewer.html), and it prints the tables.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from configs import command
from configs.provenance import machine, version
from eval.common import write_atomically
from eval.comparison import (
    Arm,
    Contrast,
    Row,
    arms_of,
    as_json,
    contrasts,
    notes,
    read_ablation,
    read_runs,
    sections,
    table,
)
from eval.page import Content, draw_all, page
from eval.viewer import Viewer, viewer_of
from training.tracking import import_wandb, log_report


@dataclass
class ReportConfig:
    """runs: run folders. out: the page; its figures and JSON are written beside it. viewer: add the attention viewer.

    ablation: the folder of an ablation (scripts/ablate.py), shown as well. wandb: off, online or offline; sends the page,
    its figures and numbers, and those of the runs.
    """

    runs: list[str] = MISSING
    out: str = "report.html"
    ablation: str | None = None
    viewer: bool = True
    wandb: str = "off"


def write_report(
    folders: list[str], out: str | Path, viewer: bool = True, ablation: str | None = None, wandb: str = "off"
) -> list[Row]:
    """Compare the runs: write the page, its JSON, figures and viewer, print the tables and return the headline one."""
    out = Path(out)
    if out.suffix != ".html":
        raise ValueError(f"out={out} is not an .html file: use out=report.html")
    import_wandb(wandb)  # what is wrong with it is said before the work
    ablated = read_ablation(Path(ablation)) if ablation else None
    runs = read_runs(folders)
    arms = arms_of(runs)
    rows, parts, remarks = table(arms), sections(arms), notes(runs, arms)
    found = contrasts(arms, [*rows, *(row for part in parts for row in part.rows)])
    seen = _look(arms, remarks) if viewer else None
    figures = draw_all(arms, found, out.parent / "figures")
    content = Content(arms, rows, found, figures, parts, remarks, ablation=ablated)
    if seen:
        beside = out.with_name(f"{out.stem}_viewer.html")
        write_atomically(beside, seen.html.encode())
        first = " Of several seeds, the first." if any(arm.several for arm in arms) else ""
        content.viewer = (beside.name, seen.says + first)
    numbers = {"eval": "report", "machine": machine(), "version": version(), **as_json(arms, rows, found, parts)}
    write_atomically(out.with_suffix(".json"), json.dumps(numbers, indent=1).encode())
    write_atomically(out.with_suffix(".md"), markdown(arms, rows, found).encode())
    write_atomically(out, page(content, out).encode())
    print_report(arms, rows, found, remarks)
    print(f"report  {out} ({len(runs)} runs, {len(arms)} arms, {len(figures)} figures)")
    own = [path for drawn in figures for path in drawn.images if path.parent == out.parent / "figures"]
    log_report(
        wandb,
        out,
        {f"figures/{path.stem}": path for path in own},
        {run.label: run.folder for run in runs},
        _values(arms, rows),
    )
    return rows


def _values(arms: list[Arm], rows: list[Row]) -> dict[str, Any]:
    """The headline table as ARM/ROW -> number."""
    cells = ((arm, row, cell) for row in rows for arm, cell in zip(arms, row.cells, strict=True))
    return {f"{arm.label}/{row.name}": cell.value for arm, row, cell in cells if cell.value is not None}


def _look(arms: list[Arm], remarks: list[str]) -> Viewer | None:
    """The attention viewer of the first run of each arm; where one cannot be loaded, a note says why."""
    try:
        return viewer_of([(arm.label, str(arm.runs[0].folder)) for arm in arms])
    except (ValueError, OSError, RuntimeError) as error:
        remarks.append(f"no attention viewer: {' '.join(str(error).split())[:200]}")
        return None


def print_report(arms: list[Arm], rows: list[Row], found: list[Contrast], remarks: list[str]) -> None:
    """Tables and notes for the terminal."""
    _print_columns([["", *map(_named, arms)]] + [[row.name, *(cell.text for cell in row.cells)] for row in rows])
    if lines := _differences(arms, rows, found):
        print(f"\ndifference to {arms[0].label}, mean over seeds [95 % interval]")
        _print_columns([["", *(arm.label for arm in arms[1:])], *lines])
    for remark in remarks:
        print(f"note: {remark}")


def _print_columns(lines: list[list[str]]) -> None:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        first, *others = (
            text.ljust(w) if i == 0 else text.rjust(w) for i, (text, w) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join([first, *others]))


def _named(arm: Arm) -> str:
    return f"{arm.label} (n = {len(arm.runs)})" if arm.several else arm.label


def _differences(arms: list[Arm], rows: list[Row], found: list[Contrast]) -> list[list[str]]:
    """Lines of the headline rows' differences, a column per arm after the first."""
    by_place = {(contrast.name, contrast.arm): contrast.text for contrast in found}
    lines = [[row.name, *(by_place.get((row.name, arm.label), "") for arm in arms[1:])] for row in rows]
    return [line for line in lines if any(line[1:])]


def markdown(arms: list[Arm], rows: list[Row], found: list[Contrast]) -> str:
    """The tables for a README."""
    text = _markdown_table(["", *map(_named, arms)], [[row.name, *(cell.text for cell in row.cells)] for row in rows])
    if lines := _differences(arms, rows, found):
        heads = [f"difference to {arms[0].label} [95 % interval]", *(arm.label for arm in arms[1:])]
        text += "\n" + _markdown_table(heads, lines)
    return text


def _markdown_table(heads: list[str], lines: list[list[Any]]) -> str:
    lines = [heads, ["---", *("---:" for _ in heads[1:])], *lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


@command("report", ReportConfig)
def main(cfg: ReportConfig) -> None:
    write_report(cfg.runs, cfg.out, cfg.viewer, cfg.ablation, cfg.wandb)


if __name__ == "__main__":
    main()
