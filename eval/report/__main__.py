"""One self-contained HTML page that compares runs: verdict, table, differences, curves, heatmaps, attention, all evaluations.

    python -m eval.report runs=[runs/A,runs/B] out=report.html [viewer=false]

Runs that differ in their seed alone are one arm, with paired differences to the first arm. Beside the page lie its figures
(figures/*.png), its numbers (the same name with .json), its tables (.md) and the attention viewer (..._viewer.html).
"""

import glob
import html
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from configs import command
from configs.files import write_atomic, write_json
from configs.provenance import machine, version
from eval.report.figures import short_labels
from eval.report.page import Content, draw_report, page
from eval.report.runs import arms_of, read_runs
from eval.report.statistics import PAIRED, Difference
from eval.report.tables import difference_lines, differences, headline_table, markdown, notes, sections, verdicts
from eval.viewer import ViewerConfig, viewer_of


@dataclass
class ReportConfig:
    runs: Any = MISSING  # run folders, folders of runs, or globs, as a list or one of them
    out: str = "report.html"  # the page; its figures and JSON are written beside it
    viewer: bool = True  # add the attention viewer


@command("report", ReportConfig)
def main(cfg: ReportConfig) -> None:
    out = Path(cfg.out)
    if out.suffix != ".html":
        raise ValueError(f"out={out} is not an .html file: use out=report.html")
    if any((out.parent / name).is_file() for name in ("config.yaml", "table.md")):
        wrong = f"{out.parent} is the folder of a run or of an ablation, whose figures the report's would replace"
        raise ValueError(f"{wrong}: use out={out.parent}/report/{out.name}")
    runs = read_runs(run_folders(cfg.runs if isinstance(cfg.runs, list) else [cfg.runs]))
    arms = arms_of(runs)
    for arm, short in zip(arms, short_labels([arm.name for arm in arms]), strict=True):
        arm.name = arm.arm = short
        arm.reference = arm.reference and arms[0].name  # which is short by now
    rows, parts = headline_table(arms), sections(arms)
    less_first = differences(arms, [*rows, *(row for part in parts for row in part.rows)])
    intervals = less_first if any(arm.several for arm in arms) else []  # a single seed has none
    content = Content(arms, rows, verdicts(arms, less_first), intervals, parts, notes(runs, arms))
    content.figures = draw_report(arms, intervals, out.parent / "figures")
    if cfg.viewer:
        add_viewer(content, out)
    write_json(out.with_suffix(".json"), as_json(content))
    write_atomic(out.with_suffix(".md"), as_markdown(content).encode())
    write_atomic(out, page(content, out).encode())
    print("\n".join([*content.verdicts, "", as_markdown(content), *(f"note: {remark}" for remark in content.notes)]))
    print(f"report  {out} (runs: {len(runs)}, arms: {len(arms)}, figures: {len(content.figures)})")


def run_folders(given: list[Any]) -> list[str]:
    """The run folders, each once: what globs match, and the runs in a folder of runs, baselines first; other names stay."""
    folders = []
    for name in map(str, given):
        matches = [Path(name)] if Path(name).exists() else map(Path, glob.glob(name))
        runs = {run for match in matches for run in (match, *match.glob("*")) if (run / "config.yaml").is_file()}
        folders += sorted(map(str, runs), key=lambda run: ("baseline" not in Path(run).name, run)) or [name]
    return list({Path(folder).resolve(): folder for folder in folders}.values())


def add_viewer(content: Content, out: Path) -> None:
    """Write the attention viewer of the first run of each arm beside `out`; if a run cannot be loaded, note why."""
    arms, beside = content.arms, out.with_name(f"{out.stem}_viewer.html")
    first = [(arm.name, str(arm.runs[0].folder)) for arm in arms]
    try:
        viewer, says = viewer_of(first, ViewerConfig(), [arm.colour for arm in arms])
    except (ValueError, OSError, RuntimeError) as error:
        content.notes.append(f"no attention viewer: {' '.join(str(error).split())[:200]}")
        return
    write_atomic(beside, viewer.encode())
    content.viewer = beside.name, says + " The first seed of each arm." * any(arm.several for arm in arms)


def as_json(content: Content) -> dict[str, Any]:
    runs = [run for arm in content.arms for run in arm.runs]
    return {
        "eval": "report",
        "machine": machine(),
        "version": version(),
        "runs": [{"run": run.label, "variant": run.variant, "config": run.config, "evals": run.evals} for run in runs],
        "arms": [{"arm": arm.name, "variant": arm.variant, "runs": [run.label for run in arm.runs],
                  "seeds": [run.seed for run in arm.runs]} for arm in content.arms],
        "verdicts": content.verdicts,
        "results": [asdict(row) for row in content.rows],
        "differences": [_difference(one) for one in content.contrasts],
        "evaluations": {part.name: [asdict(row) for row in part.rows] for part in content.sections},
    }  # fmt: skip


def _difference(one: Difference) -> dict[str, Any]:
    names = one.numbers("group", "better", "arm", "reference", "p_holm") | {"name": one.metric}
    return one.numbers(*PAIRED) | names | {"seeds": list(one.by_seed), "differences": list(one.by_seed.values())}


def as_markdown(content: Content) -> str:
    """The tables, and which run a short name stands for. Names are never markup."""
    arms, head = content.arms, f"difference to {content.arms[0].name} [95 % interval]"
    heads = [f"{arm.name} (n = {len(arm.runs)})" if arm.several else arm.name for arm in arms]
    numbers = [["", *heads]] + [[row.name, *(cell.text for cell in row.cells)] for row in content.rows]
    tables = numbers, difference_lines(arms, content.rows, content.contrasts, head)

    def plain(text: str) -> str:
        return html.escape(text, quote=False).replace("|", "\\|")

    parts = [markdown([[plain(cell) for cell in line] for line in lines]) for lines in tables if lines]
    short = [(arm.name, arm.runs[0].label) for arm in arms if not arm.several and arm.name != arm.runs[0].label]
    return "\n".join([*parts, *(f"- {plain(f'{name}: {label}')}\n" for name, label in short)])


if __name__ == "__main__":
    main()
