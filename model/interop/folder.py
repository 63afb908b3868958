"""Reading a model folder, for every format: its place, its config.json, its safetensors, and the errors."""

import json
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
HUB_FILES = ["*.json", "model*.safetensors"]  # nothing pickled, no code
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
SAVE_AGAIN = "load it with transformers and save it again with save_pretrained(FOLDER)"


def local_folder(name: str | Path) -> Path:
    """The folder `name`, or a download of the model of that name on the Hugging Face hub. ValueError if there is neither."""
    path = Path(name)
    if path.is_dir():
        return path
    if path.exists() or not HUB_NAME.fullmatch(str(name)):
        raise ValueError(f"{name} is not a folder: give a folder with config.json and model.safetensors, or a name of the hub")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(name), allow_patterns=HUB_FILES))
    except Exception as error:  # the errors of the hub and of the http library have no common class
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ValueError(f"there is no folder {name}, nor did the hub give it ({reason}): correct the name") from None


def read_config(path: Path) -> dict[str, Any]:
    """The content of the folder's config.json. ValueError if it is missing or damaged."""
    file = path / "config.json"
    if not file.is_file():
        raise ValueError(f"{path} has no config.json: give what save_pretrained wrote")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise ValueError(f"{file} is not JSON, or not a JSON object: {SAVE_AGAIN}")
    return config


def number(config: dict[str, Any], key: str, defaults: dict[str, float | None], whole: bool = False) -> Any:
    """The number that config.json has for `key`, or else its default. ValueError if there is neither, or it must be whole."""
    value = config.get(key)
    if value is None and key in defaults:
        return defaults[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300 or (whole and value % 1):
        kind = "a whole number" if whole else "a finite number"
        raise ValueError(f"config.json says {key}={value}, not {kind}: copy the model's config.json into the folder")
    return int(value) if whole else value


def allow_only(config: dict[str, Any], **allowed: tuple) -> None:
    """ValueError where config.json has one of these keys with a value that our decoder cannot compute."""
    for key, values in allowed.items():
        if key in config and config[key] not in values:
            known = " or ".join(map(str, values))
            raise ValueError(f"config.json says {key}={config[key]}, but our decoder has only {known}: use another model")


class Weights:
    """The tensors of a folder as float32, each to be taken once. ValueError: missing, pickled or damaged files."""

    def __init__(self, path: Path) -> None:
        self.path, self.tensors = path, {}
        for file in _weight_files(path):
            try:
                tensors = load_file(file)
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file} cannot be read ({error}): copy the folder again") from None
            # torch.compile puts _orig_mod before the names of what it compiles.
            self.tensors |= {name.replace("_orig_mod.", ""): tensor.float() for name, tensor in tensors.items()}
        for name, tensor in self.tensors.items():
            if not tensor.isfinite().all():
                raise ValueError(f"{path} holds NaN or infinity in the tensor {name}: use another model")

    def take(self, name: str) -> Tensor:
        """Remove the tensor `name` and return it. ValueError if the folder lacks it."""
        if name not in self.tensors:
            raise ValueError(f"{self.path} lacks the tensor {name} that its config.json asks for: {SAVE_AGAIN}")
        return self.tensors.pop(name)

    def drop_copies(self, embedding: Tensor) -> None:
        """Remove output heads beside a tied embedding. ValueError for one that is not the embedding."""
        for name in self.tensors.keys() & {"lm_head.weight", "decoder.head.weight"}:
            if not self.tensors.pop(name).equal(embedding):
                wrong = f"{self.path} holds {name}, which differs from the embedding, but its config.json ties the two"
                raise ValueError(f'{wrong}: write "tie_word_embeddings": false into config.json')

    def refuse_leftovers(self) -> None:
        """ValueError if a tensor was not taken."""
        if self.tensors:
            wrong = f"{len(self.tensors)} tensors that its config.json does not ask for ({min(self.tensors)}, ..)"
            raise ValueError(f"{self.path} holds {wrong}: {SAVE_AGAIN}")


def _weight_files(path: Path) -> list[Path]:
    if (path / WEIGHTS).is_file():  # beside an index that a save in parts left, transformers reads this file, too
        return [path / WEIGHTS]
    if not (path / INDEX).is_file():
        pickled = [file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern)]
        wrong = f"only pickled weights ({pickled[0]}), which can run code when loaded" if pickled else f"no {WEIGHTS}"
        raise ValueError(f"{path} has {wrong}: {SAVE_AGAIN}")
    try:
        names = set(json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        return [path / Path(name).name for name in sorted(names)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path / INDEX} is damaged: {SAVE_AGAIN}") from None
