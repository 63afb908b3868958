"""Checkpoints: written whole or not at all, checked when read, never unpickled."""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

from data.tokenizer import Tokenizer, load_tokenizer
from model.attention import VARIANTS
from model.config import decoder_config
from model.decoder import Decoder
from training import sharded
from training.optim import load_state, state_tensors
from training.parallel import gathered, split_as

WEIGHTS, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"


@dataclass
class CheckpointConfig:
    """When to write checkpoints, in steps; one is always written at the end."""

    every: int = 500  # steps between checkpoints; 0: only at the end
    keep: int = 2  # the newest so many stay; 0: all
    sharded: bool = (
        False  # every process writes its own part, while training goes on; scripts/consolidate.py joins them
    )
    at: list[int] = field(
        default_factory=list
    )  # also at these steps, and those stay (where a shorter run branches off)


def folder_name(step: int) -> str:
    """The name of the checkpoint of `step`; names sort as their steps do."""
    return f"step_{step:08d}"


def save(
    run_dir: Path,
    step: int,
    model: Decoder,
    optimizers: list[torch.optim.Optimizer],
    keep: int,
    staying: Sequence[int] = (),
    main: bool = True,
) -> Path:
    """Write `checkpoints/step_NNNNNNNN/` atomically: a folder of that name is always whole.

    Then delete all but the newest `keep` (0: none) and those of the steps `staying`. Where several processes share the
    model, all call it, and that with `main` writes.
    """
    folder = run_dir / "checkpoints" / folder_name(step)
    if folder.exists():
        return folder
    weights = gathered(own_weights(model), keep=main)
    remembered = gathered(state_tensors(optimizers), keep=main)
    if not main:
        return folder
    partial = folder.with_name(f".partial_{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file({name: p.contiguous() for name, p in weights.items()}, partial / WEIGHTS)
    save_file({name: t.contiguous() for name, t in remembered.items()}, partial / OPTIMIZER)
    files = {name: _sha256(partial / name) for name in (WEIGHTS, OPTIMIZER)}
    state = {"step": step, "model": asdict(model.cfg), "sha256": files}
    (partial / STATE).write_text(json.dumps(state, indent=1))
    publish(partial, folder)
    prune(run_dir, keep, staying)
    return folder


def publish(partial: Path, folder: Path) -> None:
    """Give a written folder its name, once the disk has it."""
    for path in (*partial.iterdir(), partial):
        _flush(path)
    os.replace(partial, folder)
    _flush(folder.parent)


def prune(run_dir: Path, keep: int, staying: Sequence[int]) -> None:
    """Delete all checkpoints but the newest `keep` (0: none) and those of the steps `staying`."""
    for old in checkpoints(run_dir)[:-keep] if keep else []:
        if old.name not in map(folder_name, staying):
            shutil.rmtree(old)


def own_weights(model: Decoder) -> dict[str, torch.Tensor]:
    """The tensors of `model` that a file needs: a tied head is the embedding."""
    return {name: p for name, p in model.state_dict().items() if not (model.cfg.tie and name == "head.weight")}


def all_tensors(model: Decoder, optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Weights and optimizer state as one dictionary: `model/NAME` and `optimizer/NAME/KEY`."""
    weights = {f"model/{name}": p for name, p in own_weights(model).items()}
    return weights | {f"optimizer/{name}": t for name, t in state_tensors(optimizers).items()}


def checkpoints(run_dir: Path) -> list[Path]:
    """The run's checkpoint folders, oldest first."""
    return sorted((run_dir / "checkpoints").glob("step_*"))


def load(folder: Path, model: Decoder, optimizers: list[torch.optim.Optimizer] | None = None) -> int:
    """Fill `model`, and the optimizers where given, from a checkpoint folder; returns its step.

    Raises ValueError for a damaged file or for another architecture, naming what differs.
    """
    state = read_state(folder)
    _refuse_other_model(folder, state["model"], asdict(model.cfg))
    if sharded.shards(folder):
        _load_sharded(folder, state, model, optimizers)
        return state["step"]
    own, weights = model.state_dict(), _read(folder, WEIGHTS, state)
    if model.cfg.tie:
        weights["head.weight"] = weights["embedding.weight"]
    model.load_state_dict({name: split_as(t, own[name]) if name in own else t for name, t in weights.items()})
    if optimizers is not None:
        load_state(optimizers, _read(folder, OPTIMIZER, state))
    return state["step"]


def _load_sharded(
    folder: Path, state: dict[str, Any], model: Decoder, optimizers: list[torch.optim.Optimizer] | None
) -> None:
    """Fill model and optimizers from parts that any number of processes wrote; each process reads what it holds."""
    sharded.refuse_damaged(folder, state["sha256"])
    weights = own_weights(model)
    wanted, there = {f"model/{name}": p for name, p in weights.items()}, sharded.sizes(folder)
    if optimizers is not None:
        params = dict(model.named_parameters())
        for key, about in there.items():
            name = key.removeprefix("optimizer/").rsplit("/", 1)[0]
            if key.startswith("optimizer/") and name in params:
                wanted[key] = sharded.empty_as(params[name], about.size, about.properties.dtype)
    sharded.fill(folder, wanted)
    model.load_state_dict(weights, strict=False)  # they are filled: what follows a loading is made
    if optimizers is not None:
        prefix = "optimizer/"
        load_state(optimizers, {key.removeprefix(prefix): t for key, t in wanted.items() if key.startswith(prefix)})


@dataclass(frozen=True)
class LoadedRun:
    """A finished or running run, ready to be evaluated: the model in float32 and eval mode."""

    model: Decoder
    tokenizer: Tokenizer
    config: dict[str, Any]
    step: int
    path: Path


def load_run(run: str | Path, device: str | torch.device = "cpu", step: int | None = None) -> LoadedRun:
    """The newest checkpoint of `runs/NAME` (or that of `step`) with its tokenizer and configuration."""
    path = Path(run)
    if not (path / "config.yaml").exists():
        raise FileNotFoundError(
            f"{path} is not a run: give run=runs/NAME of a training run (python train.py makes one)"
        )
    found = checkpoints(path)
    if step is not None:
        found = [folder for folder in found if folder.name == folder_name(step)]
    if not found:
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise FileNotFoundError(f"{path} has {what}: let the training finish, or continue it with resume=true")
    config = yaml.safe_load((path / "config.yaml").read_text())
    state = read_state(found[-1])
    model = Decoder(decoder_config(state["model"]))
    load(found[-1], model)
    return LoadedRun(model.to(device).eval(), load_tokenizer(path), config, state["step"], path)


def read_state(folder: Path) -> dict[str, Any]:
    """A checkpoint's state.json: step, the model's configuration, checksums."""
    try:
        return json.loads((folder / STATE).read_text())
    except (OSError, ValueError):
        raise ValueError(
            f"{folder} is not a checkpoint of this project, or damaged: delete it to use the one before"
        ) from None


# What the weights do not depend on: init_from may change it, to lengthen the context or warm lambda up again.
FREE = (
    "backend", "dropout", "attention_dropout", "match", "baseline_d_ff", "context", "rope_theta", "window",
    "document_mask", "eot", *(f"{v.name}.{option}" for v in VARIANTS.values() for option in v.free_options),
)  # fmt: skip


def _refuse_other_model(folder: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    theirs, ours = _flat(asdict(decoder_config(theirs))), _flat(ours)
    free = [key for key in FREE if key != "context" or ours["position"] != "learned"]
    differ = [key for key in ours if key not in free and theirs[key] != ours[key]]
    if differ:
        what = ", ".join(f"{key} ({theirs[key]} there, {ours[key]} here)" for key in differ[:4])
        raise ValueError(f"{folder} holds another architecture: {what}: use the same model= and size= overrides")


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """{"diff": {"heads": 1}} -> {"diff.heads": 1}."""
    nested = {key: value for key, value in config.items() if isinstance(value, dict)}
    inner = {f"{group}.{key}": value for group, part in nested.items() for key, value in part.items()}
    return {key: value for key, value in config.items() if key not in nested} | inner


def _read(folder: Path, name: str, state: dict[str, Any]) -> dict[str, torch.Tensor]:
    path = folder / name
    if not path.exists() or _sha256(path) != state["sha256"][name]:
        raise ValueError(f"{path} is damaged (its checksum differs): delete {folder} to use the checkpoint before it")
    return load_file(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
