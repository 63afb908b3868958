"""A list of runs with their progress and losses: python -m eval.runs [runs=runs] [runs=[runs/A,runs/sweep]]

Each run folder at any depth below the given folders has one line: its name, the steps done of the planned steps,
training tokens, the training loss (mean of the last tenth of the logged steps), the last validation loss, the test loss
of eval.perplexity, and the evaluations that the run has.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs import command
from eval.report.runs import Run, read_run
from eval.report.tables import columns, si

HEAD = ["run", "step", "tokens", "loss", "val loss", "test loss", "evaluations"]


@dataclass
class RunsConfig:
    """The folders to search."""

    runs: Any = "runs"  # a folder to search, or a list of folders


def run_folders(roots: list[str]) -> list[Path]:
    """The run folders in `roots`, sorted by path: those with a config.yaml and a metrics.jsonl."""
    found = {path.parent for root in roots for path in Path(root).rglob("config.yaml")}
    return sorted(path for path in found if (path / "metrics.jsonl").is_file())


def described(folder: Path) -> list[str]:
    """The run's line; for a run that cannot be read, its name and the reason."""
    try:
        run = read_run(folder)
    except ValueError as error:
        return [str(folder), *[""] * (len(HEAD) - 2), str(error).split(": ")[0].removeprefix(f"{folder} ")]
    losses = [run.value(path) for path in ("train.loss", "train.val_loss", "perplexity.loss")]
    shown = ["" if loss is None else f"{loss:.4f}" for loss in losses]
    return [str(folder), steps(run), si(run.value("train.tokens")), *shown, " ".join(run.evals)]


def steps(run: Run) -> str:
    """ "100/300", or "300" for a finished run; ", diverged" is added if the run diverged."""
    done, planned = run.train[-1]["step"] if run.train else 0, run.config.get("steps")
    diverged = ", diverged" if run.diverged else ""
    return f"{done}{'' if done == planned else f'/{planned}'}{diverged}"


@command("runs", RunsConfig)
def main(cfg: RunsConfig) -> None:
    roots = [str(root) for root in (cfg.runs if isinstance(cfg.runs, list) else [cfg.runs])]
    if missing := [root for root in roots if not root or not Path(root).is_dir()]:
        raise ValueError(f"there is no folder {missing[0]}: give runs= a folder of runs (python train.py makes runs/)")
    lines = [described(folder) for folder in run_folders(roots)]
    if not lines:
        raise ValueError(f"there is no run in runs=[{','.join(roots)}]: train one with python train.py")
    print(columns([HEAD, *lines]))


if __name__ == "__main__":
    main()
