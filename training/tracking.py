"""Weights & Biases, if the user asks for it: every training run is a run there.

Sent are the configuration, the numbers, and what wandb records by itself (host, command line, installed packages, terminal
output); no environment variables, no code, and no git remote, whose address may hold a token.
"""

import os
import secrets
from pathlib import Path
from typing import Any

from configs.files import write_atomic
from data.tokenizer import import_optional

ID_FILE = "wandb_id.txt"  # the id of a run folder's wandb run, and the folder


def start_wandb(mode: str, run_dir: Path, config: dict[str, Any]) -> Any | None:
    """The wandb run of the training run `run_dir`: a new one, or on a resume the same one; None for mode off."""
    if (wandb := import_wandb(mode)) is None:
        return None
    seed = config.get("seed")
    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "attention-noise"),
            # Grouped by folder and job type, each curve in wandb is the mean over the seeds of an arm.
            group=os.environ.get("WANDB_RUN_GROUP", run_dir.resolve().parent.name),
            job_type=run_dir.name.removesuffix(f"-s{seed}"),
            name=run_dir.name,
            tags=[f"seed {seed}"],
            dir=run_dir,
            mode=mode,
            id=run_id(run_dir),
            resume="allow" if mode == "online" else None,  # offline, `wandb sync` joins the parts of one id
            config=config,
            reinit="finish_previous",  # a diverged trial of a sweep left its run open
            settings=wandb.Settings(disable_git=True, disable_code=True),
        )
    except wandb.Error as error:  # no key, or no network
        why = str(error).strip().split("\n")[0]
        raise ValueError(f"wandb does not start ({why}): run `wandb login`, or use wandb=offline or wandb=off") from None
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")
    return run


def run_id(run_dir: Path) -> str:
    """The id of the folder's wandb run; a copy of a folder that still stands elsewhere gets another one."""
    path, here = run_dir / ID_FILE, str(run_dir.resolve())
    known, _, folder = path.read_text().partition("\n") if path.is_file() else ("", "", "")
    if not known or (folder not in ("", here) and Path(folder, ID_FILE).is_file()):  # an older file has no folder
        known = secrets.token_hex(4)
    write_atomic(path, f"{known}\n{here}".encode())
    return known


def import_wandb(mode: str) -> Any | None:
    """The package wandb; None for mode off."""
    return None if mode == "off" else import_optional("wandb", f"wandb={mode}")


def mirror(run: Any, line: dict[str, Any]) -> None:
    """Send a line of metrics.jsonl: numbers to the history; the machine, where a run begins or goes on, to the config."""
    numbers = {key: value for key, value in line.items() if isinstance(value, (int, float))}
    if "continued" not in line:
        run.log(numbers)
    if line["step"] == 0 or "continued" in line:
        run.config.update({key: value for key, value in line.items() if key not in numbers}, allow_val_change=True)
