"""Finds, checks and reads checkpoints, which training/saver.py writes. Nothing is unpickled; the newest whole one is used.

A checkpoint is a folder of safetensors files and state.json. Processes that share a model write files of their pieces
(model-part1.safetensors), whose headers say where in the whole tensors each piece begins.
"""

import hashlib
import json
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from configs import flatten
from configs.files import read_run_config
from data.tokenizer import Tokenizer, load_tokenizer
from model.attention import VARIANTS
from model.config import decoder_config
from model.decoder import Decoder
from model.rotary import RopeScaling
from training.distributed import local
from training.guard import Guard
from training.optim import load_state, state_shapes

STATE = "state.json"

Tensors = dict[str, torch.Tensor]
Loaded = TypeVar("Loaded")


@dataclass
class CheckpointConfig:
    """When to write checkpoints, in steps; one is always written at the end."""

    every: Annotated[int, "[0, inf)"] = 500  # steps between checkpoints; 0: only at the end
    keep: Annotated[int, "[0, inf)"] = 2  # number of newest checkpoints that stay; 0: all
    background: bool = False  # write a copy in main memory while training goes on
    at: Annotated[list[int], "[1, inf)"] = field(default_factory=list)  # steps of extra checkpoints, kept to branch off


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def of_step(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / folder_name(step)


def own_weights(model: Decoder) -> Tensors:
    """The tensors of `model` that a checkpoint needs: all but a tied head, which is the embedding."""
    return {name: p for name, p in model.state_dict().items() if not (model.cfg.tie and name == "head.weight")}


def checkpoints(run_dir: Path) -> list[Path]:
    """The run's checkpoint folders, oldest first."""
    paths = (run_dir / "checkpoints").glob("step_*")
    return sorted(path for path in paths if re.fullmatch(r"step_\d{8}", path.name) and path.is_dir())


def load(
    folder: Path, model: Decoder, optimizers: list[torch.optim.Optimizer] | None = None, guard: Guard | None = None
) -> int:
    """Fill `model`, and optimizers and guard where given, from a checkpoint folder; returns its step. ValueError if it is not a
    whole checkpoint of this model, before anything is filled. All processes must call it together.
    """
    state, weights = read_state(folder), own_weights(model)
    _refuse_other_model(folder, state["model"], asdict(model.cfg))
    _refuse_damaged(folder, state["sha256"], weights_only=optimizers is None)
    tensors = _read(folder, weights, state_shapes(optimizers or []))
    if bad := not_finite(tensors):
        raise ValueError(f"{folder}: {bad} is not finite: train again with a lower optim.lr")
    load_state(optimizers or [], {name: tensor for name, tensor in tensors.items() if name not in weights})
    model.load_state_dict({name: tensors[name] for name in weights}, strict=False)  # a tied head is not in the checkpoint
    if guard:
        guard.load(state.get("guard", {}))
    return state["step"]


def newest(run_dir: Path, use: Callable[[Path], Loaded], say: bool = True, resumes: bool = False) -> Loaded | None:
    """Call `use(folder)`, newest checkpoint first, until no ValueError comes; return its value (None: no checkpoints)."""
    errors: list[ValueError] = []
    for folder in reversed(checkpoints(run_dir)):
        try:
            loaded = use(folder)
            if errors and say:
                print(f"warning: {errors[0]}; the older checkpoint {folder} is used instead", file=sys.stderr, flush=True)
            return loaded
        except ValueError as error:
            if not folder.is_dir():  # a process that trains this run has replaced it by a newer one
                return newest(run_dir, use, say, resumes)
            errors.append(error)
    if errors:
        fix = f"delete {run_dir / 'checkpoints'} to start again" if resumes else "copy that run again, or give another one"
        raise ValueError(f"{errors[0]}; no older checkpoint can be used: {fix}")
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
    """The newest whole checkpoint of `runs/NAME` (or that of `step`) with its tokenizer and configuration."""
    path = Path(run)
    if not (path / "config.yaml").exists():
        raise FileNotFoundError(f"{path} is not a run: give run=runs/NAME of a training run (python train.py makes one)")
    config = read_run_config(path, groups=())

    def use(folder: Path) -> tuple[Decoder, int]:
        model = Decoder(decoder_config(read_state(folder)["model"]))
        return model, load(folder, model)

    if step is not None and not of_step(path, step).is_dir():
        raise FileNotFoundError(f"{path} has no checkpoint of step {step}: let the training write it")
    loaded = newest(path, use) if step is None else use(of_step(path, step))
    if loaded is None:
        raise FileNotFoundError(f"{path} has no checkpoint: let the training finish, or continue it with resume=true")
    return LoadedRun(loaded[0].to(device).eval(), load_tokenizer(path), config, loaded[1], path)


def read_state(folder: Path) -> dict[str, Any]:
    """A checkpoint's state.json: step, the model's configuration, checksums. ValueError if invalid or edited."""
    try:
        state = json.loads((folder / STATE).read_text())
        whole = state.pop("checksum") == state_checksum(state) and folder_name(state["step"]) == folder.name
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise ValueError(f"{folder} is not a checkpoint of this project, or damaged")
    return state


def state_checksum(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


# Options that the weights do not depend on: a run with init_from may change them, to lengthen the context or to warm
# lambda up again.
FREE = (
    "backend", "residual", "dropout", "attention_dropout", "projection_dropout", "match", "baseline_d_ff", "context",
    "rope_theta", "window", "document_mask", "eot", *(f"rope_scaling.{one.name}" for one in fields(RopeScaling)),
    *(f"{v.name}.{option}" for v in VARIANTS.values() for option in v.free_options),
)  # fmt: skip


def _refuse_other_model(folder: Path, saved: dict[str, Any], ours: dict[str, Any]) -> None:
    saved, ours = flatten(asdict(decoder_config(saved))), flatten(ours)
    free = [key for key in FREE if key != "context" or ours["position"] != "learned"]
    differ = [key for key in ours if key not in free and saved[key] != ours[key]]
    differ.sort(key=lambda key: "." in key)  # the options of single variants last
    if differ:
        what = ", ".join(f"{key} ({saved[key]} there, {ours[key]} here)" for key in differ[:4])
        raise ValueError(f"{folder} holds another architecture: {what}: use the same model= and size= overrides")


def _refuse_damaged(folder: Path, checksums: dict[str, str], weights_only: bool) -> None:
    """ValueError on all processes if a file has a wrong checksum. All must call it together; each checks some files."""
    names = sorted(checksums.keys() | {path.name for path in folder.glob("*.safetensors")})
    if weights_only:
        names = [name for name in names if not name.startswith("optimizer")]
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine = (folder / name for name in names[rank::size])
    damaged = [path.name for path in mine if not path.is_file() or sha256(path) != checksums.get(path.name)]
    everybody = [damaged] * size
    if size > 1:
        dist.all_gather_object(everybody, damaged)
    if wrong := sorted(sum(everybody, [])):
        raise ValueError(f"{folder / wrong[0]} is damaged (its checksum differs)")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(folder: Path, weights: Tensors, state: dict[str, tuple[torch.Size, torch.dtype]]) -> Tensors:
    """Tensors like `weights` by NAME, each split as there, and optimizer state of the shapes `state` by NAME/KEY, if any."""
    try:
        reader = HuggingFaceStorageReader(str(folder))
        metadata = reader.read_metadata().state_dict_metadata
        saved = {name: (one.size, one.properties.dtype) for name, one in metadata.items()}
        if not any("/" in name for name in saved):
            state = {}  # an optimizer that never stepped remembers nothing
        if not state:  # or nobody asks for it
            saved = {name: shape for name, shape in saved.items() if "/" not in name}
        elif state.keys() != saved.keys() - weights.keys():
            raise ValueError(f"{folder}: its optimizer state is of other parameters: use init_from=RUN to take the weights")
        wanted = {name: (p.shape, p.dtype) for name, p in weights.items()} | state
        if saved != wanted:
            name = min(name for name, _ in set(saved.items()) ^ set(wanted.items()))
            raise ValueError(f"{folder}: {name} is {saved.get(name)} in the checkpoint, but {wanted.get(name)} in this model")
        tensors = {}
        for name, (size, dtype) in wanted.items():
            like = weights[name.partition("/")[0]]
            whole = like.shape != size  # a single number beside a tensor that may be split
            tensors[name] = torch.empty(size, dtype=dtype, device=like.device) if whole else torch.empty_like(like, dtype=dtype)
        with warnings.catch_warnings(action="ignore"):  # that each process reads for itself
            dcp.load(tensors, storage_reader=reader, no_dist=True)
    except (SafetensorError, dcp.api.CheckpointException, OSError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} is damaged ({str(error).splitlines()[0]})") from None
    except RuntimeError:
        if folder.is_dir():
            raise
        raise ValueError(f"{folder} was deleted while it was read") from None
    return tensors


def not_finite(tensors: Tensors) -> str | None:
    """The name of a tensor with a NaN or an infinity in it on any process, or None. All processes must call it together."""
    if not tensors:
        return None
    finite = torch.stack([local(t).isfinite().all() for t in tensors.values()]).int()  # the host waits for the device once
    if dist.is_initialized():
        dist.all_reduce(finite, dist.ReduceOp.MIN)
    return None if finite.all() else list(tensors)[int((finite == 0).nonzero()[0])]
