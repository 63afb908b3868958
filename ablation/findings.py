"""What is read off a finished ablation, beside its own results: KIND.json, a table KIND.md and figures/KIND.png."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from ablation.records import Record, records_of
from configs.files import write_atomic, write_json
from configs.provenance import result_record
from eval.common import say
from eval.report.runs import ablation_in


@dataclass
class FindingsConfig:
    """ablation: the folder of an ablation's results. out: folder for the results; None: the ablation's folder."""

    ablation: str = MISSING
    out: str | None = None


@dataclass
class RecordedConfig(FindingsConfig):
    records: str = "docs/results"  # runs whose folders are gone are read from NAME/records.jsonl.gz in this folder


def read_study(cfg: RecordedConfig) -> tuple[dict[str, Any], dict[str, Record]]:
    """The ablation's JSON, and the records of its runs by name, those of the studies in its `records_of` first."""
    folder = Path(cfg.ablation)
    study = ablation_in(folder)
    names = (*(study["config"].get("records_of") or ()), folder.name)
    return study, records_of(folder, *(Path(cfg.records) / name for name in names))


def write_findings(kind: str, cfg: FindingsConfig, results: dict[str, Any], table: str, draw: Callable[[Path], None]) -> None:
    """Print the table read off an ablation; write KIND.json, KIND.md with the table, and figures/KIND.png."""
    out = Path(cfg.out or cfg.ablation)
    say(f"{table}\n{kind}  {out / f'{kind}.md'}")
    write_json(out / f"{kind}.json", result_record(kind, Path(cfg.ablation).name, cfg, results))
    write_atomic(out / f"{kind}.md", table.encode())
    draw(out / "figures" / f"{kind}.png")
