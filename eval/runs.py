"""A list of runs with their progress and losses: python -m eval.runs [runs=runs] [runs=[runs/A,runs/sweep]]

Each run folder at any depth below the given folders has one line: its name, the steps done of the planned steps,
training tokens, the training loss (mean of the last tenth of the logged steps), the last validation loss, the test loss
of eval.perplexity, and the evaluations that the run has.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs import command
from eval.common import say
from eval.report.runs import read_run
from eval.report.tables import columns, si

HEAD = ["run", "step", "tokens", "loss", "val loss", "test loss", "evaluations"]


@dataclass
class RunsConfig:
    """The folders to search."""

    runs: Any = "runs"  # a folder to search, or a list of folders


def described(folder: Path) -> list[str]:
    """The run's line, with steps as 100/300, or 300 for a finished run; for a run that cannot be read, the reason."""
    try:
        run = read_run(folder)
    except ValueError as error:
        return [str(folder), *[""] * (len(HEAD) - 2), str(error).split(": ")[0].removeprefix(f"{folder} ")]
    planned = run.config.get("steps")
    steps = f"{run.step}{'' if run.step == planned else f'/{planned}'}{', diverged' if run.diverged else ''}"
    losses = [run.value(path) for path in ("train.loss", "train.val_loss", "perplexity.loss")]
    shown = ["" if loss is None else f"{loss:.4f}" for loss in losses]
    return [str(folder), steps, si(run.value("train.tokens")), *shown, " ".join(run.evals)]


@command("runs", RunsConfig)
def main(cfg: RunsConfig) -> None:
    given = [str(root) for root in (cfg.runs if isinstance(cfg.runs, list) else [cfg.runs])]
    roots = [Path(root) for root in given]
    if missing := [root for text, root in zip(given, roots, strict=True) if not text or not root.is_dir()]:
        raise ValueError(f"there is no folder {missing[0]}: give runs= a folder of runs (python train.py makes runs/)")
    folders = {path.parent for root in roots for path in root.rglob("config.yaml")}
    lines = [described(folder) for folder in sorted(folders) if (folder / "metrics.jsonl").is_file()]
    if not lines:
        raise ValueError(f"there is no run in runs=[{','.join(given)}]: train one with python train.py")
    say(columns([HEAD, *lines]))


if __name__ == "__main__":
    main()
