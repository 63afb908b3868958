"""What is read off a finished ablation, beside its own results: KIND.json, a table KIND.md and figures/KIND.png."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from configs.files import write_atomic, write_json
from configs.provenance import result_record
from eval.common import say


@dataclass
class FindingsConfig:
    """ablation: the folder of an ablation's results. out: folder for the results; None: the ablation's folder."""

    ablation: str = MISSING
    out: str | None = None


def write_findings(kind: str, cfg: FindingsConfig, results: dict[str, Any], table: str, draw: Callable[[Path], None]) -> None:
    """Print the table read off an ablation; write KIND.json, KIND.md with the table, and figures/KIND.png."""
    out = Path(cfg.out or cfg.ablation)
    say(f"{table}\n{kind}  {out / f'{kind}.md'}")
    write_json(out / f"{kind}.json", result_record(kind, Path(cfg.ablation).name, cfg, results))
    write_atomic(out / f"{kind}.md", table.encode())
    draw(out / "figures" / f"{kind}.png")
