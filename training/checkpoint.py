"""Checkpoints: finding, checking and reading them. Nothing is unpickled; the newest whole one is used.

A checkpoint is a folder of safetensors files and state.json. A process that holds a whole model writes model.safetensors and
optimizer.safetensors. Processes that share a model write files of their pieces (model-part1.safetensors), whose headers say
where in the whole tensors each piece begins, as torch.distributed.checkpoint does. training/saver.py writes them.
"""

import hashlib
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor

from configs.files import read_run_config
from data.tokenizer import Tokenizer, load_tokenizer
from model.attention import VARIANTS
from model.config import decoder_config
from model.decoder import Decoder
from model.rotary import RopeScaling
from training.guard import Guard
from training.optim import load_state, state_shapes

STATE = "state.json"
OLDER_PARTS = "shard-*.safetensors"  # of an older format, whose tensors are named model/NAME and optimizer/NAME/KEY

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
    background: bool = False  # write a copy in main memory while training goes on
    sharded: bool = False  # the older name of background
    at: Annotated[list[int], "[1, inf)"] = field(default_factory=list)  # steps of extra checkpoints, kept to branch off


def folder_name(step: int) -> str:
    """The name of the checkpoint of `step`; names sort as their steps do."""
    return f"step_{step:08d}"


def of_step(run_dir: Path, step: int) -> Path:
    """Where the run's checkpoint of `step` is, or would be."""
    return run_dir / "checkpoints" / folder_name(step)


def own_weights(model: Decoder) -> Tensors:
    """The tensors of `model` that a checkpoint needs: all but a tied head, which is the embedding."""
    return {name: p for name, p in model.state_dict().items() if not (model.cfg.tie and name == "head.weight")}


def checkpoints(run_dir: Path) -> list[Path]:
    """The run's checkpoint folders, oldest first."""
    there = (run_dir / "checkpoints").glob("step_*")
    return sorted(path for path in there if re.fullmatch(r"step_\d{8}", path.name) and path.is_dir())


def load(
    folder: Path, model: Decoder, optimizers: list[torch.optim.Optimizer] | None = None, guard: Guard | None = None
) -> int:
    """Fill `model`, and the optimizers and the guard where given, from a checkpoint folder; returns its step.

    Each process reads its pieces, whatever processes wrote the checkpoint; all must call it together. Nothing is filled before
    all files are checked. ValueError for a folder that is not a whole checkpoint, and for a checkpoint of another architecture,
    whose differences it names.
    """
    state, own = read_state(folder), own_weights(model)
    _refuse_other_model(folder, state["model"], asdict(model.cfg))
    _refuse_damaged(folder, state["sha256"], weights_only=optimizers is None)
    tensors = _read(folder, own, state_shapes(optimizers or []))
    if bad := not_finite(tensors):
        raise NotFinite(f"{folder}: {bad} is not finite")
    load_state(optimizers or [], {name: tensor for name, tensor in tensors.items() if name not in own})
    model.load_state_dict({name: tensors[name] for name in own}, strict=False)  # a tied head is not in the checkpoint
    if guard:
        guard.load(state.get("guard", {}))
    return state["step"]


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
    if not typed or folder_name(state["step"]) != folder.name or checksum not in (None, state_checksum(state)):
        raise ValueError(wrong)
    return state


def state_checksum(state: dict[str, Any]) -> str:
    """Checksum of the content of state.json."""
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


def _refuse_damaged(folder: Path, expected: dict[str, str], weights_only: bool) -> None:
    """ValueError on all processes if a file has a wrong checksum. All must call it together; each checks some files."""
    names = sorted(expected.keys() | {path.name for path in folder.glob("*.safetensors")})
    if weights_only:
        names = [name for name in names if not name.startswith("optimizer")]
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine = (folder / name for name in names[rank::size])
    damaged = [path.name for path in mine if not path.is_file() or sha256(path) != expected.get(path.name)]
    everybody = [damaged] * size
    if size > 1:
        dist.all_gather_object(everybody, damaged)
    if wrong := sorted(sum(everybody, [])):
        path = folder / wrong[0]
        raise ValueError(f"{path} is damaged (its checksum differs): delete {folder} to use the checkpoint before it")


def sha256(path: Path) -> str:
    """Checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(folder: Path, own: Tensors, state: Shapes) -> Tensors:
    """Weights by NAME, each split as in `own`, and optimizer state of the shapes `state` by NAME/KEY, if the folder has any."""
    reader = HuggingFaceStorageReader(str(folder))
    with _one_line(folder):
        about = reader.read_metadata().state_dict_metadata
    older = any(folder.glob(OLDER_PARTS))
    there = {key.split("/", 1)[1] if older else key: (one.size, one.properties.dtype) for key, one in about.items()}
    weights = {name: shape for name, shape in there.items() if "/" not in name}
    if len(there) == len(weights):
        state = {}  # an optimizer that never stepped remembers nothing
    elif state and state.keys() != there.keys() - weights.keys():
        wrong = "its optimizer state belongs to other parameters"
        raise ValueError(f"{folder}: {wrong}: use init_from=RUN to take only the weights")
    shapes = {name: (p.shape, p.dtype) for name, p in own.items()} | state
    _refuse_other_shapes(folder, there if state else weights, shapes)
    tensors = {}
    for name, (size, dtype) in shapes.items():
        like = own[name.partition("/")[0]]
        whole = like.shape != size  # a single number beside a tensor that may be split
        tensors[name] = torch.empty(size, dtype=dtype, device=like.device) if whole else torch.empty_like(like, dtype=dtype)
    with _one_line(folder):
        prefixes = ("model/", "optimizer/") if older else ("", "")
        dcp.load({prefixes["/" in name] + name: t for name, t in tensors.items()}, storage_reader=reader, no_dist=True)
    return tensors


def _refuse_other_shapes(folder: Path, there: Shapes, shapes: Shapes) -> None:
    if there != shapes:
        key = min(set(there.items()) ^ set(shapes.items()), key=lambda item: item[0])[0]
        theirs, ours = (f"{list(s[0])} {s[1]}" if s else "missing" for s in (there.get(key), shapes.get(key)))
        wrong = f"{folder}: {key} is {theirs} in the checkpoint, but {ours} in this model"
        raise ValueError(f"{wrong}: delete this checkpoint to use the one before it")


@contextmanager
def _one_line(folder: Path) -> Iterator[None]:
    try:
        with warnings.catch_warnings(action="ignore"):  # that each process reads for itself
            yield
    except (SafetensorError, dcp.api.CheckpointException, OSError, LookupError, TypeError, AttributeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{folder} is damaged ({reason}): delete it to use the checkpoint before it") from None


def not_finite(tensors: Tensors) -> str | None:
    """The name of a tensor with a NaN or an infinity in it on any process, or None. All processes must call it together."""
    if not tensors:
        return None
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors.values())
    finite = torch.stack([t.isfinite().all() for t in local]).int()  # the host waits for the device once
    if dist.is_initialized():
        dist.all_reduce(finite, dist.ReduceOp.MIN)
    return None if finite.all() else list(tensors)[int((finite == 0).nonzero()[0])]
