"""Weights & Biases, if the user asks for it: every training run and every report (with its files) is a run there.

Sent are the configuration, the numbers, and what wandb records by itself (host, command line, installed packages, terminal
output); no environment variables, no code, and no git remote, whose address may hold a token.
"""

import os
import re
import secrets
from pathlib import Path
from typing import Any

from configs.files import write_atomic
from model.attention.base import check_choice

ID_FILE = "wandb_id.txt"  # the id of a run folder's wandb run, and the folder


def start_wandb(mode: str, run_dir: Path, config: dict[str, Any]) -> Any | None:
    """The wandb run of the training run `run_dir`: a new one, or on a resume the same one; None for mode off."""
    if import_wandb(mode) is None:
        return None
    seed, resume = config.get("seed"), "allow" if mode == "online" else None  # offline, `wandb sync` joins parts of one id
    # Grouped by folder and job type, each curve in wandb is the mean over the seeds of an arm.
    names = {"name": run_dir.name, "job_type": run_dir.name.removesuffix(f"-s{seed}"), "tags": [f"seed {seed}"]}
    run = _started(mode, run_dir, run_dir, id=run_id(run_dir), resume=resume, config=config, **names)
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")
    return run


def run_id(run_dir: Path) -> str:
    """The id of the folder's wandb run; a copy of a folder that still stands elsewhere gets another one."""
    path, here = run_dir / ID_FILE, str(run_dir.resolve())
    known, folder = [*(path.read_text() if path.is_file() else "").split("\n"), here][:2]  # an older file has no folder
    if not known or (folder != here and Path(folder, ID_FILE).is_file()):
        known = secrets.token_hex(4)
    write_atomic(path, f"{known}\n{here}".encode())
    return known


def import_wandb(mode: str) -> Any | None:
    """The package wandb; None for mode off."""
    check_choice("wandb", mode, ("off", "online", "offline"))
    if mode == "off":
        return None
    try:
        import wandb
    except ImportError:
        raise ValueError("wandb logging needs the package 'wandb': pip install wandb, or use wandb=off") from None
    return wandb


def _started(mode: str, folder: Path, run_dir: Path, **options: Any) -> Any:
    """A wandb run with its files in `folder`, in the group of the parent of `run_dir`."""
    wandb = import_wandb(mode)
    try:
        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", "attention-noise"),
            group=os.environ.get("WANDB_RUN_GROUP", run_dir.resolve().parent.name),
            dir=folder,
            mode=mode,
            reinit="finish_previous",  # a diverged trial of a sweep left its run open
            settings=wandb.Settings(disable_git=True, disable_code=True),
            **options,
        )
    except wandb.Error as error:  # no key, or no network
        why = str(error).strip().split("\n")[0]
        raise ValueError(f"wandb does not start ({why}): run `wandb login`, or use wandb=offline or wandb=off") from None


def mirror(run: Any, line: dict[str, Any]) -> None:
    """Send a line of metrics.jsonl: numbers to the history; the machine, where a run begins or goes on, to the config."""
    numbers = {key: value for key, value in line.items() if isinstance(value, (int, float))}
    if "continued" not in line:
        run.log(numbers)
    if line["step"] == 0 or "continued" in line:
        run.config.update({key: value for key, value in line.items() if key not in numbers}, allow_val_change=True)


def log_report(mode: str, page: Path, figures: dict[str, Path], folders: dict[str, Path], summary: dict[str, Any]) -> None:
    """Log a report as a run: page, figures (name -> PNG), summary, and its files and those of the runs (label -> folder)."""
    if (wandb := import_wandb(mode)) is None:
        return
    beside = [page, page.with_suffix(".json"), page.with_suffix(".md"), page.with_name(f"{page.stem}_viewer.html")]
    files = {path.name: path for path in beside if path.is_file()}
    files |= {f"{name}.png": path for name, path in figures.items()}
    for label, folder in folders.items():
        paths = [*folder.glob("figures/*.png"), *folder.glob("eval/*.json"), folder / "config.yaml"]
        files |= {f"runs/{label}/{path.relative_to(folder)}": path for path in paths}
    first = next(iter(folders.values()))
    run = _started(mode, page.parent, first, name=page.stem, job_type="report", config={"runs": list(folders)})
    group = re.sub(r"[^\w.-]+", "-", run.group)
    artifact = wandb.Artifact(f"report-{group}", type="report")
    for name, path in files.items():
        artifact.add_file(str(path), name=name)
    run.log_artifact(artifact)
    run.log({"report": wandb.Html(str(page)), **{name: wandb.Image(str(path)) for name, path in figures.items()}})
    run.summary.update(summary)
    run.finish()
