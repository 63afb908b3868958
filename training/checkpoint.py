"""Writes checkpoints, whole or not at all; finds, checks and reads them. Nothing is unpickled; the newest whole one is used.

A checkpoint is a folder of safetensors files and state.json. Processes that share a model write files of their pieces
(model-part1.safetensors), whose headers say where in the whole tensors each piece begins.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor

from configs.files import flatten, json_text, read_run_config, remove, replace_folder
from data.tokenizer import Tokenizer, load_tokenizer
from model.attention import VARIANTS
from model.config import decoder_config
from model.decoder import Decoder
from model.rotary import RopeScaling
from training.distributed import World, local
from training.optim import Diverged, Guard, load_state, state_shapes, state_tensors

STATE = "state.json"

Tensors = dict[str, torch.Tensor]
Pieces = tuple[Tensors, dict[str, str] | None]  # what a process writes into a file, and the file's header
Loaded = TypeVar("Loaded")


@dataclass
class CheckpointConfig:
    """When to write checkpoints, in steps; one is always written at the end."""

    every: Annotated[int, "[0, inf)"] = 500  # steps between checkpoints; 0: only at the end
    keep: Annotated[int, "[0, inf)"] = 2  # number of newest checkpoints that stay; 0: all
    background: bool = False  # training waits for a copy in main memory alone, not for its writing
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
    """Fill `model`, and optimizers and guard where given, from a checkpoint folder; returns the step. ValueError, before
    anything is filled: no whole checkpoint of this model, or a tensor is not finite. All processes must call `load` together.
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
        guard.in_a_row = state.get("guard", {}).get("row", 0)  # a conversion writes no guard
    return state["step"]


def newest(run_dir: Path, use: Callable[[Path], Loaded], say: bool = True, resumes: bool = False) -> Loaded | None:
    """The value of `use(folder)` for the newest whole checkpoint; None without checkpoints. ValueError if none is whole.

    say: warn of newer ones that cannot be read. resumes: the caller continues this run, which decides the error's advice.
    """
    errors: list[Exception] = []
    for folder in reversed(checkpoints(run_dir)):
        try:
            loaded = use(folder)
            if errors and say:
                print(f"warning: {errors[0]}; the older checkpoint {folder} is used instead", file=sys.stderr, flush=True)
            return loaded
        except (ValueError, OSError) as error:
            if not folder.is_dir():  # a process that trains this run has replaced it by a newer one
                return newest(run_dir, use, say, resumes)
            errors.append(error)
    if errors:
        fix = "start again with another run_dir=" if resumes else "copy that run again, or give another one"
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
    """The checkpoint's tensors NAME, split as those in `weights` are, and NAME/KEY, the optimizer state listed in `state`."""
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
            whole = like.shape != size  # a scalar of the optimizer state, such as AdamW's step, is never split
            tensors[name] = torch.empty(size, dtype=dtype, device=like.device) if whole else torch.empty_like(like, dtype=dtype)
        with warnings.catch_warnings(action="ignore"):  # torch warns that each process reads by itself
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
    finite = torch.stack([local(t).isfinite().all() for t in tensors.values()]).int()  # the host waits for the device once
    if dist.is_initialized():
        dist.all_reduce(finite, dist.ReduceOp.MIN)
    return None if finite.all() else list(tensors)[int((finite == 0).nonzero()[0])]


class Saver:
    """Writes checkpoints into `run_dir`/checkpoints; a whole one gets its final name. All processes call a method together."""

    def __init__(
        self, run_dir: Path, cfg: CheckpointConfig, model: Decoder, optimizers: list[torch.optim.Optimizer], world: World
    ) -> None:
        self.run_dir, self.cfg, self.model, self.optimizers, self.world = run_dir, cfg, model, optimizers, world
        # A group of its own, because training uses the default group while a thread writes files.
        self.group = dist.new_group(backend="gloo") if world.size > 1 else None
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.writing: Future | None = None

    def save(self, step: int, guard: Guard | None = None) -> None:
        """Write a checkpoint (in a thread: `cfg.background`) and delete old ones. Diverged: a tensor is not finite."""
        self.finish()
        tensors = {"model": own_weights(self.model), "optimizer": state_tensors(self.optimizers)}
        if bad := not_finite(tensors["model"] | tensors["optimizer"]):
            raise Diverged(f"{bad} is not finite at step {step}, so no checkpoint is written: lower optim.lr")
        state = {"step": step, "model": asdict(self.model.cfg), "guard": {"row": guard.in_a_row} if guard else {}}
        part = f"-part{self.world.rank + 1}" if any(isinstance(p, DTensor) for p in self.model.parameters()) else ""
        files = {
            f"{kind}{part}.safetensors": pieces(named, self.world.main, copy=self.cfg.background)
            for kind, named in tensors.items()
        }
        if self.cfg.background:
            self.writing = self.thread.submit(self._write, step, files, state)
        else:
            self._write(step, files, state)

    def finish(self) -> None:
        """Wait until the checkpoint that was begun is on the disk."""
        writing, self.writing = self.writing, None
        if writing:
            writing.result()

    def _write(self, step: int, files: dict[str, Pieces], state: dict[str, Any]) -> None:
        folder = of_step(self.run_dir, step)
        partial = folder.with_name(f".{folder.name}.part")

        def begin() -> None:
            folder.parent.mkdir(exist_ok=True)  # without parents: the run's folder may have been moved away
            partial.mkdir()

        def write() -> None:
            for name, (tensors, header) in files.items():
                if tensors:
                    write_tensors(partial / name, tensors, header)

        def publish() -> None:
            state["sha256"] = {path.name: sha256(path) for path in sorted(partial.iterdir())}
            (partial / STATE).write_text(json_text(state | {"checksum": state_checksum(state)}, indent=1))
            for path in (*partial.iterdir(), partial):
                flush(path)
            replace_folder(folder, partial)
            flush(folder.parent)  # before other checkpoints are deleted
            self._prune(step)

        try:
            self._together(folder, begin, main=True)
            self._together(folder, write)
            self._together(folder, publish, main=True)
        finally:
            if self.world.main:
                shutil.rmtree(partial, ignore_errors=True)  # half written on a full disk

    def _together(self, folder: Path, work: Callable[[], None], main: bool = False) -> None:
        """Do `work` on all processes (main: on the main one); ValueError on all if a file cannot be written."""
        reason = ""
        try:
            if self.world.main or not main:
                work()
        except (OSError, SafetensorError) as error:
            reason = f"process {self.world.rank}: {error}" if self.group else str(error)
        reasons = [reason] * self.world.size
        if self.group:
            dist.all_gather_object(reasons, reason, self.group)
        if reason := next(filter(None, reasons), ""):
            kept = "; the checkpoint before it is kept" if checkpoints(self.run_dir) else ""
            raise ValueError(f"{folder} could not be written ({reason}){kept}: correct that, then use resume=true")

    def _prune(self, step: int) -> None:
        """Delete the checkpoints up to `step`, except the newest `cfg.keep` (0: keep all) and those of the steps `cfg.at`."""
        # Checkpoints of later steps do not count: they were damaged, so the run went on before them and will replace them.
        written = [folder for folder in checkpoints(self.run_dir) if folder.name <= folder_name(step)]
        for old in written[: -self.cfg.keep] if self.cfg.keep else []:
            if old.name not in map(folder_name, self.cfg.at):
                try:
                    # A checkpoint disappears at once: an evaluation that reads it never sees a part of it.
                    remove(old.rename(old.with_name(f".{old.name}.old.part")))
                except OSError as error:  # a file that another program holds open: the next start tries again
                    print(f"{old}: an old checkpoint could not be deleted ({error}); training goes on", flush=True)


def save(run_dir: Path, step: int, model: Decoder, optimizers: list[torch.optim.Optimizer]) -> Path:
    """Make `run_dir` where it is not there, write a checkpoint from a single process and return its folder. See `Saver`."""
    run_dir.mkdir(parents=True, exist_ok=True)
    Saver(run_dir, CheckpointConfig(keep=0), model, optimizers, World(0, 1, torch.device("cpu"))).save(step)
    return of_step(run_dir, step)


def write_tensors(path: Path, tensors: Tensors, header: dict[str, str] | None) -> None:
    """Write a safetensors file with the permissions of any new file, because `save_file` lets only the owner read its files."""
    path.touch()
    rights = path.stat().st_mode
    save_file(tensors, path, header)
    path.chmod(rights)


def pieces(tensors: Tensors, main: bool, copy: bool) -> Pieces:
    """What this process writes, in main memory, and its header: pieces of split tensors and, if `main`, all whole tensors."""
    kept, begins, split = {}, {}, False
    for name, tensor in tensors.items():
        mine, begin = main, [0] * tensor.dim()
        if isinstance(tensor, DTensor):
            split, begin = True, list(tensor.__create_chunk_list__()[0].offsets)
            places = zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
            first_copy = all(rank == 0 for rank, place in places if place.is_replicate())  # hsdp has several copies
            tensor = tensor.to_local()
            mine = first_copy and tensor.numel() > 0  # a tensor may have fewer rows than there are processes
        if mine:
            kept[name], begins[name] = tensor.detach().to("cpu", copy=copy).contiguous(), {"saved_offsets": begin}
    return kept, {"DCP_SHARDING_INFO": json.dumps(begins)} if split else None


def flush(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):  # CIFS and others sync no folders
            raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(handle)
