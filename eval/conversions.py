"""scripts/convert.py what=compare: convert a model in several ways, train each result, and print one table of losses."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from omegaconf import MISSING

from configs.files import write_atomic, write_json
from configs.provenance import result_record
from eval.perplexity import evaluate
from model.attention.diff import DiffAttention
from model.attention.diff_v2 import DiffV2Attention
from model.conversion import Conversion
from model.decoder import Decoder
from training.checkpoint import LoadedRun, load_run

RECORD = "conversion.json"  # in a converted run's folder: its source, the conversion, and what changed
ARMS = {
    "baseline": Conversion(to="same"),
    "zero": Conversion(),
    "zero_random": Conversion(second="random"),
    "mirror": Conversion(init="mirror"),
    "open": Conversion(init="open", second="random"),
    "split": Conversion(heads="split"),
    "zero_norm": Conversion(second="random", sublayer_norm=True),
    "mirror_norm": Conversion(init="mirror", sublayer_norm=True),
    "split_norm": Conversion(heads="split", sublayer_norm=True),
    "diff_v2": Conversion(to="diff_v2"),
    "diff_v2_random": Conversion(to="diff_v2", second="random"),
}


@dataclass
class CompareConfig(Conversion):
    """The conversions to compare, and how each arm is trained."""

    source: str | None = None  # a run, a transformers folder, or a name on the hub
    run_dir: str = MISSING  # folder of the new run, or of the comparison
    seed: Annotated[int, "[0, 4294967295]"] = 0  # seed of random values in a conversion, and of what=compare's training
    device: str = "auto"  # auto | cpu | cuda
    steps: int = 200  # training steps per arm of what=compare
    arms: list[str] = field(default_factory=lambda: list(ARMS))  # the conversions that what=compare tries
    train: list[str] = field(default_factory=list)  # overrides of train.py for all arms of what=compare

    def check(self) -> None:
        """Raise ValueError as `Conversion.check` does, and for wrong arms or steps."""
        super().check()
        if unknown := [name for name in self.arms if name not in ARMS]:
            raise ValueError(f"arms has no '{unknown[0]}': use {', '.join(ARMS)}")
        if min(self.steps, len(self.arms)) < 1:
            raise ValueError("steps is below 1, or arms is empty: use steps=200, and leave arms out for all arms")


def compare(
    cfg: CompareConfig, source: LoadedRun, windows: np.ndarray, convert_run: Callable[..., dict[str, Any]],
    train_overrides: Callable[[LoadedRun, Conversion, dict[str, Any]], list[str]],
) -> None:  # fmt: skip
    """Train every arm for cfg.steps steps on the same samples; write results.json and table.md into cfg.run_dir.

    windows (n, T + 1): the text to test on. convert_run: makes and measures a converted run. train_overrides: the
    overrides with which train.py continues such a run. An interrupted comparison continues where it was. ValueError if
    a training fails, or if the folder has another comparison.
    """

    def loss(model: Decoder) -> float:
        return evaluate(model, windows, source.tokenizer.byte_lengths())["loss"]

    folder, rows = Path(cfg.run_dir), []
    for name in dict.fromkeys(cfg.arms):
        how, start, trained = ARMS[name], folder / name, folder / f"{name}-{cfg.steps}"
        record = read_record(start, how, source, cfg) or convert_run(how, source, windows, start, cfg)
        run = load_run(start)
        overrides = [*train_overrides(run, how, shared_values(how, trained, cfg)), *cfg.train]
        train_on(overrides, trained, cfg.steps, folder / "logs" / f"{name}.log")
        final = load_run(trained).model
        row = {"arm": name, "parameters": record["parameters"][1], "max_logit": record["change"]["max_logit"]}
        row["before"] = rows[0]["before"] if rows else loss(source.model)
        row |= {"start": loss(run.model), "end": loss(final), "lambda": lambdas(final)}
        rows.append(row)
        print(f"compare    {name}: loss {row['start']:.4f} at step 0, {row['end']:.4f} after {cfg.steps}", flush=True)
    table = compare_table(rows, cfg)
    results = {"arms": rows, "windows": len(windows), "length": windows.shape[1] - 1, "steps": cfg.steps}
    write_json(folder / "results.json", result_record("conversion", folder.name, cfg, results))
    write_atomic(folder / "table.md", table.encode())
    print(f"{table}compare    {folder / 'table.md'}")


def read_record(start: Path, how: Conversion, source: LoadedRun, cfg: CompareConfig) -> dict[str, Any] | None:
    """The record of this arm from an earlier, interrupted comparison; None if the arm does not exist yet."""
    if not start.exists():
        return None
    record = json.loads((start / RECORD).read_text()) if (start / RECORD).is_file() else {}
    wanted = {"source": str(source.path), "conversion": asdict(how), "seed": cfg.seed}
    if any(record.get(key) != value for key, value in wanted.items()):
        raise ValueError(f"{start} is not this arm of this comparison: choose another run_dir=..., or delete it")
    return record


def shared_values(how: Conversion, run_dir: Path, cfg: CompareConfig) -> dict[str, Any]:
    """Overrides of train.py that depend on the comparison and not on the source model."""
    warmup = max(1, cfg.steps // 10)
    values = {"steps": cfg.steps, "optim.warmup": warmup, "eval_every": 0}
    values |= {"seed": cfg.seed + 1000}  # another order of samples than the source's
    values |= {"model.diff.lambda_warmup": warmup} if how.waits else {}
    return values | {"run_dir": run_dir, "resume": True, "device": cfg.device}


def train_on(overrides: list[str], run_dir: Path, steps: int, log: Path) -> None:
    """Run train.py with `overrides`, from where an earlier call was interrupted. ValueError if training fails."""
    line = f"$ python train.py {shlex.join(overrides)}\n"
    if log.is_file() and log.read_text().startswith(line) and (run_dir / f"checkpoints/step_{steps:08d}").is_dir():
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        print(line, end="", file=file, flush=True)
        train = Path(__file__).parent.parent / "train.py"
        done = subprocess.run([sys.executable, str(train), *overrides], stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        last = (log.read_text().strip().splitlines() or ["no output"])[-1].removeprefix("error: ")
        raise ValueError(f"training of {run_dir.name} failed: {last} (see {log})")


@torch.no_grad()
def lambdas(model: Decoder) -> list[float]:
    """lambda of every differential layer. In diff_v2, the mean over heads of sigmoid(bias), without a token's input."""
    found = []
    for attention in (block.attention for block in model.blocks):
        if isinstance(attention, DiffAttention):
            found.append(attention.lam().item())
        elif isinstance(attention, DiffV2Attention):
            found.append(attention.lambda_logits.bias.sigmoid().mean().item())
    return found


def compare_table(rows: list[dict[str, Any]], cfg: CompareConfig) -> str:
    """The table in Markdown. "against": loss minus the first arm's, both after training. lambda: mean over layers."""
    heads = ["arm", "parameters", "largest logit change", "loss at step 0", "cost", f"loss after {cfg.steps} steps"]
    heads += [f"against {rows[0]['arm']}", "lambda"]
    lines = [f"| {' | '.join(heads)} |", "| --- |" + " ---: |" * (len(heads) - 1)]
    for row in rows:
        mean = f"{np.mean(row['lambda']):.4f}" if row["lambda"] else "-"
        cost, left = row["start"] - row["before"], row["end"] - rows[0]["end"]
        lines.append(
            f"| {row['arm']} | {row['parameters']:,} | {row['max_logit']:.1e} | {row['start']:.4f} | {cost:+.4f} | "
            f"{row['end']:.4f} | {left:+.4f} | {mean} |"
        )
    note = f"Source: {cfg.source}, loss {rows[0]['before']:.4f}; one seed, the same samples for every arm."
    return "\n".join([*lines, "", note]) + "\n"
