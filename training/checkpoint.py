"""Checkpoints: written whole or not at all, checked when read, never unpickled; the newest whole one is found."""

import errno
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from configs.files import json_text, read_run_config, whole_folder
from data.tokenizer import Tokenizer, load_tokenizer
from model.attention import VARIANTS
from model.config import decoder_config
from model.decoder import Decoder
from model.rotary import RopeScaling
from training import sharded
from training.guard import Diverged, Guard
from training.optim import load_state, state_shapes, state_tensors
from training.parallel import gathered, split_as

WEIGHTS, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"

Tensors = dict[str, torch.Tensor]
Shapes = dict[str, tuple[torch.Size, torch.dtype]]
Found = TypeVar("Found")


class NotFinite(ValueError):
    """A checkpoint with a NaN or an infinity in a tensor."""


class OtherModel(ValueError):
    """A checkpoint of another architecture."""


@dataclass
class CheckpointConfig:
    """When to write checkpoints, in steps; one is always written at the end."""

    every: Annotated[int, "[0, inf)"] = 500  # steps between checkpoints; 0: only at the end
    keep: Annotated[int, "[0, inf)"] = 2  # number of newest checkpoints that stay; 0: all
    sharded: bool = False  # each process writes its own part, while training goes on; scripts/consolidate.py joins them
    at: Annotated[list[int], "[1, inf)"] = field(default_factory=list)  # steps of extra checkpoints, kept to branch off


def folder_name(step: int) -> str:
    """The name of the checkpoint of `step`; names sort as their steps do."""
    return f"step_{step:08d}"


def of_step(run_dir: Path, step: int) -> Path:
    """Where the run's checkpoint of `step` is, or would be."""
    return run_dir / "checkpoints" / folder_name(step)


def save(
    run_dir: Path,
    step: int,
    model: Decoder,
    optimizers: list[torch.optim.Optimizer],
    keep: int,
    staying: Sequence[int] = (),
    guard: dict[str, Any] | None = None,
    main: bool = True,
) -> Path:
    """Write `checkpoints/step_NNNNNNNN/` atomically: a folder of that name is always whole.

    Then delete all checkpoints but the newest `keep` (0: delete none) and those of the steps `staying`. guard: state of
    training.guard.Guard. Where the model is split over processes, all processes must call it; the process with `main` writes.
    Raises Diverged for a tensor that is not finite, and ValueError on a full disk; then no checkpoint is written.
    """
    folder = of_step(run_dir, step)
    weights = gathered(own_weights(model), keep=main)
    remembered = gathered(state_tensors(optimizers), keep=main)
    if main:
        write(folder, weights, remembered, {"step": step, "model": asdict(model.cfg), "guard": guard or {}})
        prune(run_dir, step, keep, staying)
    return folder


def prune(run_dir: Path, step: int, keep: int, staying: Sequence[int]) -> None:
    """Among the checkpoints up to `step`, delete all but the newest `keep` (0: delete none) and those of the steps `staying`.

    Checkpoints of later steps are damaged, because the run was resumed from an earlier step. They do not count as newest, and
    the run replaces them when it reaches their steps.
    """
    written = [folder for folder in checkpoints(run_dir) if folder.name <= folder_name(step)]
    for old in written[:-keep] if keep else []:
        if old.name not in map(folder_name, staying):
            shutil.rmtree(old)


def own_weights(model: Decoder) -> Tensors:
    """The tensors of `model` that a checkpoint needs: all but a tied head, which is the embedding."""
    return {name: p for name, p in model.state_dict().items() if not (model.cfg.tie and name == "head.weight")}


def all_tensors(model: Decoder, optimizers: list[torch.optim.Optimizer]) -> Tensors:
    """Weights and optimizer state as one dictionary: `model/NAME` and `optimizer/NAME/KEY`."""
    weights = {f"model/{name}": p for name, p in own_weights(model).items()}
    return weights | {f"optimizer/{name}": t for name, t in state_tensors(optimizers).items()}


def write(folder: Path, weights: Tensors, optimizer: Tensors, state: dict[str, Any]) -> None:
    """Write a checkpoint of these tensors as `folder`; a damaged or sharded one that has this name is replaced."""
    if bad := sharded.not_finite(weights | optimizer, anywhere=False):
        raise Diverged(f"{bad} is not finite at step {state['step']}, so no checkpoint is written: lower optim.lr")
    try:
        with whole_folder(folder) as partial:
            save_file({name: t.contiguous() for name, t in weights.items()}, partial / WEIGHTS)
            save_file({name: t.contiguous() for name, t in optimizer.items()}, partial / OPTIMIZER)
            complete(partial, state, [partial / WEIGHTS, partial / OPTIMIZER])
    except (OSError, SafetensorError) as error:
        raise not_written(folder, error) from None
    flush(folder.parent)


def complete(partial: Path, state: dict[str, Any], files: Sequence[Path]) -> None:
    """Write the state file, with the checksums of `files`, and wait until the whole folder is on the disk."""
    state = state | {"sha256": sharded.checksums(files)}
    (partial / STATE).write_text(json_text(state | {"checksum": _checksum(state)}, indent=1))
    for path in (*partial.iterdir(), partial):
        flush(path)


def not_written(folder: Path, reason: object) -> ValueError:
    """The error to raise if a checkpoint could not be written."""
    # By the text, because safetensors and the errors of other processes keep no number.
    full = any(os.strerror(code) in str(reason) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
    kept = "; the checkpoint before it is kept" if checkpoints(folder.parent.parent) else ""
    fix = "free space" if full else "correct that"
    return ValueError(f"{folder} could not be written ({reason}){kept}: {fix}, then use resume=true")


def checkpoints(run_dir: Path) -> list[Path]:
    """The run's checkpoint folders, oldest first."""
    found = (run_dir / "checkpoints").glob("step_*")
    return sorted(path for path in found if re.fullmatch(r"step_\d{8}", path.name) and path.is_dir())


def load(
    folder: Path, model: Decoder, optimizers: list[torch.optim.Optimizer] | None = None, guard: Guard | None = None
) -> int:
    """Fill `model`, and the optimizers and the guard where given, from a checkpoint folder; returns its step.

    Nothing is filled before all files are checked. ValueError for a folder that is not a whole checkpoint, and for a
    checkpoint of another architecture, whose differences it names.
    """
    state = read_state(folder)
    _refuse_other_model(folder, state["model"], asdict(model.cfg))
    own, remembered = own_weights(model), {}
    if sharded.shards(folder):
        weights, remembered = _read_shards(folder, state, own, state_shapes(optimizers or []))
    else:
        weights = _read(folder, WEIGHTS, state, {name: (p.shape, p.dtype) for name, p in own.items()})
        if optimizers is not None:
            remembered = _read(folder, OPTIMIZER, state, state_shapes(optimizers))
    load_state(optimizers or [], remembered)
    # strict=False: a tied head is not in the checkpoint
    model.load_state_dict({name: split_as(tensor, own[name]) for name, tensor in weights.items()}, strict=False)
    if guard:
        guard.load(state.get("guard", {}))
    return state["step"]


def _read_shards(folder: Path, state: dict[str, Any], own: Tensors, remembered: Shapes) -> tuple[Tensors, Tensors]:
    """Weights like `own` and optimizer state of the shapes `remembered`, from shards that any number of processes wrote.

    Each process reads its own part.
    """
    sharded.refuse_damaged(folder, state["sha256"])
    there = sharded.sizes(folder)
    if not any(key.startswith("optimizer/") for key in there):
        remembered = {}  # an optimizer that never stepped remembers nothing
    wanted = {f"model/{name}": torch.empty_like(p, requires_grad=False) for name, p in own.items()}
    for name, (size, dtype) in remembered.items():
        wanted[f"optimizer/{name}"] = sharded.empty_as(own[name.rsplit("/", 1)[0]], size, dtype)
    shapes = {key: (tensor.shape, tensor.dtype) for key, tensor in wanted.items()}
    found = {key: (about.size, about.properties.dtype) for key, about in there.items() if key in shapes}
    _refuse_other_shapes(folder, found, shapes)
    sharded.fill(folder, wanted)
    if bad := sharded.not_finite(wanted):
        raise NotFinite(f"{folder}: {bad} is not finite")
    weights = {name: wanted[f"model/{name}"] for name in own}
    return weights, {name: wanted[f"optimizer/{name}"] for name in remembered}


def newest(
    run_dir: Path, use: Callable[[Path], Found], say: bool = True, fatal: tuple[type[ValueError], ...] = ()
) -> Found | None:
    """Call `use(folder)`, newest checkpoint first, until no ValueError comes; return its value (None: no checkpoints).

    say: print one warning if an older checkpoint is used. ValueError if `use` raises one for every checkpoint, or a `fatal`
    one.
    """
    errors: list[ValueError] = []
    for folder in reversed(checkpoints(run_dir)):
        try:
            found = use(folder)
        except fatal:
            raise
        except ValueError as error:
            errors.append(error)
            continue
        if errors and say:
            print(f"warning: {errors[0]}; the older checkpoint {folder} is used instead", file=sys.stderr, flush=True)
        return found
    if errors and all(isinstance(error, OtherModel) for error in errors):
        raise errors[0]  # the checkpoints are sound
    if errors:
        raise ValueError(f"{errors[0]}; no older checkpoint can be used: delete {run_dir / 'checkpoints'} to start again")
    return None


@dataclass(frozen=True)
class LoadedRun:
    """A finished or running run, ready to be evaluated: the model in float32 and eval mode."""

    model: Decoder
    tokenizer: Tokenizer
    config: dict[str, Any]
    step: int
    path: Path


def load_run(run: str | Path, device: str | torch.device = "cpu", step: int | None = None) -> LoadedRun:
    """The newest whole checkpoint of `runs/NAME` (or that of `step`) with its tokenizer and configuration.

    ValueError if the newest checkpoint has weights that are not finite. An older checkpoint does not replace it, because
    its weights are not the result of the training.
    """
    path = Path(run)
    if not (path / "config.yaml").exists():
        raise FileNotFoundError(f"{path} is not a run: give run=runs/NAME of a training run (python train.py makes one)")
    if not checkpoints(path) or (step is not None and not of_step(path, step).is_dir()):
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise FileNotFoundError(f"{path} has {what}: let the training finish, or continue it with resume=true")
    config = read_run_config(path, groups=())

    def use(folder: Path) -> tuple[Decoder, int]:
        model = Decoder(decoder_config(read_state(folder)["model"]))
        return model, load(folder, model)

    try:
        model, step = newest(path, use, fatal=(NotFinite,)) if step is None else use(of_step(path, step))
    except NotFinite as error:
        fix = "train again with a lower optim.lr, or delete that checkpoint to evaluate the one before it"
        raise ValueError(f"{error}: {fix}") from None
    return LoadedRun(model.to(device).eval(), load_tokenizer(path), config, step, path)


def read_state(folder: Path) -> dict[str, Any]:
    """A checkpoint's state.json: step, the model's configuration, checksums. ValueError if invalid or edited."""
    wrong = f"{folder} is not a checkpoint of this project, or damaged: delete it to use the checkpoint before it"
    try:
        state = json.loads((folder / STATE).read_text())
        checksum = state.pop("checksum", None)  # older checkpoints have none
        typed = [type(state[key]) for key in ("step", "model", "sha256")] == [int, dict, dict]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(wrong) from None
    if not typed or folder_name(state["step"]) != folder.name or checksum not in (None, _checksum(state)):
        raise ValueError(wrong)
    return state


def _checksum(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


# Options that the weights do not depend on: a run with init_from may change them, to lengthen the context or to warm
# lambda up again.
FREE = (
    "backend", "dropout", "attention_dropout", "projection_dropout", "match", "baseline_d_ff", "context", "rope_theta",
    "window", "document_mask", "eot", *(f"rope_scaling.{one.name}" for one in fields(RopeScaling)),
    *(f"{v.name}.{option}" for v in VARIANTS.values() for option in v.free_options),
)  # fmt: skip


def _refuse_other_model(folder: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    theirs, ours = flatten(asdict(decoder_config(theirs))), flatten(ours)
    free = [key for key in FREE if key != "context" or ours["position"] != "learned"]
    differ = [key for key in ours if key not in free and theirs[key] != ours[key]]
    differ.sort(key=lambda key: "." in key)  # the options of single variants last
    if differ:
        what = ", ".join(f"{key} ({theirs[key]} there, {ours[key]} here)" for key in differ[:4])
        raise OtherModel(f"{folder} holds another architecture: {what}: use the same model= and size= overrides")


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _read(folder: Path, name: str, state: dict[str, Any], shapes: Shapes) -> Tensors:
    """The tensors of a checkpoint's file, which must have these names, shapes and types and be finite."""
    path, fix = folder / name, f"delete {folder} to use the checkpoint before it"
    if not path.is_file() or sharded.checksums([path])[name] != state["sha256"].get(name):
        raise ValueError(f"{path} is damaged (its checksum differs): {fix}")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is not a safetensors file ({error}): {fix}") from None
    found = {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()}
    owners, own = ({key.rpartition("/")[0] for key in keys} for keys in (found, shapes))
    if name == OPTIMIZER and found and owners != own:
        raise ValueError(
            f"{folder}: its optimizer state belongs to other parameters: use init_from=RUN to take only the weights"
        )
    if found or name != OPTIMIZER:  # an optimizer that never stepped remembers nothing
        _refuse_other_shapes(path, found, shapes)
    if bad := sharded.not_finite(tensors, anywhere=False):
        raise NotFinite(f"{path}: {bad} is not finite")
    return tensors


def _refuse_other_shapes(path: Path, found: Shapes, shapes: Shapes) -> None:
    if found != shapes:
        key = min(set(found.items()) ^ set(shapes.items()), key=lambda item: item[0])[0]
        theirs, ours = (f"{list(s[0])} {s[1]}" if s else "missing" for s in (found.get(key), shapes.get(key)))
        wrong = f"{path}: {key} is {theirs} in the checkpoint, but {ours} in this model"
        raise ValueError(f"{wrong}: delete this checkpoint to use the one before it")


def flush(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk."""
    if os.name == "nt" and path.is_dir():  # Windows opens no folders
        return
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
