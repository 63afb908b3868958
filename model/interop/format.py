"""A format is one architecture of transformers: tables of its names beside ours, which importing and exporting both read."""

import json
import math
import re
from collections.abc import Callable, Collection, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..attention import VARIANTS
from ..config import DecoderConfig
from ..decoder import Decoder, layer_letter

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
    """The number that config.json has for `key`, or else its default. ValueError: neither, or with `whole` a fraction."""
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


class Format:
    """The tables of one architecture, read both ways. `to_ours` and `to_theirs` rearrange rows that lie in another order.

    "Ours" are names of our decoder, "foreign" ones those of the architecture. An entry with several of our names, with blanks
    between them, is one foreign tensor that holds their rows in that order.
    """

    architecture: ClassVar[str]  # the class that config.json names
    also: ClassVar[str] = ""  # another class name of the same architecture
    model_type: ClassVar[str]
    letter: ClassVar[str] = "b"  # of our attention variant
    parts: ClassVar[dict[str, tuple[str, ...]]]  # field of DecoderConfig: the values that the architecture can compute
    options: ClassVar[dict[str, tuple]]  # option of the variant: the values that the architecture can compute
    scalings: ClassVar[tuple[str, ...]] = ("none", "linear", "llama3")  # kinds of scaled RoPE
    settings: ClassVar[dict[str, str]]  # number in config.json: field of DecoderConfig
    defaults: ClassVar[dict[str, float | None]]  # of the numbers that config.json may leave out; None: DecoderConfig's
    names: ClassVar[dict[str, str]]  # our module, or parameter: the foreign one
    blocks: ClassVar[str]  # prefix of their names in block {}
    block_names: ClassVar[dict[str, str]]  # our module, or parameter, in a block: the foreign one
    transposed: ClassVar[tuple[str, ...]] = ()  # ends of the names of their tensors that are (in, out)
    always_biased: ClassVar[tuple[str, ...]] = ()  # parts of the names of modules that have biases
    bias_keys: ClassVar[dict[str, tuple[str, ...]]] = {}  # key of config.json: such parts, if its value is true
    outdated: ClassVar[str] = ""  # regular expression of tensors that only older versions saved

    def our_config(self, config: dict[str, Any]) -> DecoderConfig:
        """Our configuration for a config.json. ValueError for a function that our decoder cannot compute."""
        fields = {ours: number(config, foreign, self.defaults, ours != "norm_eps") for foreign, ours in self.settings.items()}
        fields |= {field: allowed[0] for field, allowed in self.parts.items()}
        variant = VARIANTS[self.letter]
        fields[variant.name] = variant.Options(**{name: allowed[0] for name, allowed in self.options.items()})
        return DecoderConfig(layers=self.letter, match="none", **fields)

    def their_config(self, cfg: DecoderConfig) -> dict[str, Any]:
        """The content of config.json for a configuration whose derived fields are filled in."""
        about = {"architectures": [self.architecture], "model_type": self.model_type, "tie_word_embeddings": cfg.tie}
        return about | {foreign: getattr(cfg, ours) for foreign, ours in self.settings.items()}

    def refusal(self, model: Decoder) -> str | None:
        """Why this format cannot hold the function of `model`; None if it can."""
        cfg = model.cfg
        if {layer_letter(cfg, layer) for layer in range(cfg.n_layer)} != {self.letter}:
            return f"its layers={cfg.layers} are not {self.letter} throughout"
        if cfg.window is not None and "window" not in self.settings.values():
            return f"its queries see a window of {cfg.window} keys"
        if cfg.document_mask:
            return "its tokens see no other document"
        group = VARIANTS[self.letter].name
        options = {f"{group}.{name}": values for name, values in self.options.items()}
        allowed = self.parts | options | {"rope_scaling.kind": self.scalings}
        for field, values in allowed.items():
            if (value := attrgetter(field)(cfg)) not in values:
                return f"it has {field}={value}; the format allows {' or '.join(map(str, values))}"
        state = model.state_dict()
        for shapes, foreign in self._table(cfg, self.their_config(cfg)):
            if foreign is None and any(state[name].any() for name in shapes):
                return f"it has {', '.join(shapes)}, for which this format has no place"
        return None

    def biased(self, config: dict[str, Any]) -> tuple[str, ...]:
        """Parts of names: a foreign module has biases if its name contains one of these."""
        return (*self.always_biased, *(part for key, parts in self.bias_keys.items() if config.get(key) for part in parts))

    def to_ours(self, state: dict[str, Tensor], cfg: DecoderConfig) -> dict[str, Tensor]:
        """Tensors with our names and shapes, from the architecture's order of rows to ours."""
        return state

    def to_theirs(self, model: Decoder) -> dict[str, Tensor]:
        """The tensors of `model` under our names, in the architecture's order of rows."""
        return model.state_dict()

    def read(self, config: dict[str, Any], weights: Weights) -> tuple[DecoderConfig, dict[str, Tensor]]:
        """Our configuration and state dict. ValueError if the tensors are not those that config.json asks for."""
        cfg = self.our_config(config).filled()
        left = weights.tensors = {name: t for name, t in weights.tensors.items() if not re.fullmatch(self.outdated, name)}
        state: dict[str, Tensor] = {}
        for shapes, foreign in self._table(cfg, config):
            state |= self._rows(shapes, weights, foreign) if foreign else _zeros(shapes)
        if cfg.tie:
            state["head.weight"] = state["embedding.weight"]
            for name in left.keys() & {"lm_head.weight", "decoder.head.weight"}:  # copies of the embedding
                if not left.pop(name).equal(state["head.weight"]):
                    wrong = f"{weights.path} holds {name}, which differs from the embedding, but its config.json ties the two"
                    raise ValueError(f'{wrong}: write "tie_word_embeddings": false into config.json')
        if left:
            wrong = f"{len(left)} tensors that its config.json does not ask for ({min(left)}, ..)"
            raise ValueError(f"{weights.path} holds {wrong}: {SAVE_AGAIN}")
        return cfg, self.to_ours(state, cfg)

    def write(self, model: Decoder) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The content of config.json, and the tensors of `model`."""
        config, state = self.their_config(model.cfg), self.to_theirs(model)
        tensors: dict[str, Tensor] = {}
        for shapes, foreign in self._table(self.our_config(config).filled(), config):
            if foreign:
                rows = [state.get(name, zeros) for name, zeros in _zeros(shapes).items()]
                tensor = torch.cat(rows) if len(rows) > 1 else rows[0]
                tensors[foreign] = tensor.T if foreign.endswith(self.transposed) else tensor
        return config, tensors

    def modules(self, cfg: DecoderConfig) -> Iterator[tuple[list[str], str]]:
        """Our names of every module or parameter, and the foreign ones."""
        for ours, foreign in self.names.items():
            yield ours.split(), foreign
        for layer in range(cfg.n_layer):
            for ours, foreign in self.block_names.items():
                yield [f"blocks.{layer}.{name}" for name in ours.split()], self.blocks.format(layer) + foreign

    def _table(self, cfg: DecoderConfig, config: dict[str, Any]) -> Iterator[tuple[dict[str, torch.Size], str | None]]:
        """Our tensors with their shapes, and the architecture's tensor that holds their rows; None: it has no such tensor."""
        ours, biased = tensor_shapes(cfg), self.biased(config)
        for modules, foreign in self.modules(cfg):
            for kind in ("", ".weight", ".bias"):  # "" is for the name of a parameter
                shapes = {module + kind: ours[module + kind] for module in modules if module + kind in ours}
                if shapes and not (cfg.tie and "head.weight" in shapes):
                    absent = kind == ".bias" and not any(text in foreign for text in biased)
                    yield shapes, None if absent else foreign + kind

    def _rows(self, shapes: dict[str, torch.Size], weights: Weights, foreign: str) -> dict[str, Tensor]:
        """Our tensors of these shapes, of which the tensor `foreign` holds the rows. ValueError if the shapes differ."""
        tensor = weights.take(foreign)
        tensor = tensor.transpose(0, -1) if foreign.endswith(self.transposed) else tensor
        first, *more = shapes.values()
        whole = (sum(shape[0] for shape in shapes.values()), *first[1:]) if more else first
        if tensor.shape != whole:
            wrong = f"{' with '.join(shapes)} is {tuple(tensor.shape)}, not {tuple(whole)}"
            raise ValueError(f"{weights.path} does not fit its config.json: {wrong}: correct config.json, or {SAVE_AGAIN}")
        parts = tensor.split([shape[0] for shape in shapes.values()]) if more else (tensor,)
        return {name: part.contiguous() for name, part in zip(shapes, parts, strict=True)}


def tensor_shapes(cfg: DecoderConfig) -> dict[str, torch.Size]:
    """The shapes of our decoder's tensors."""
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in Decoder(cfg).state_dict().items()}


def _zeros(shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


def change_rows(state: dict[str, Tensor], parts: Collection[str], change: Callable[[Tensor], Tensor]) -> None:
    """Change in `state` the rows of weights and biases of the modules named in `parts`."""
    for name in state:
        if name.endswith((".weight", ".bias")) and name.split(".")[-2] in parts:
            state[name] = change(state[name])


def heads_in_pairs(rows: Tensor, width: int) -> Tensor:
    """Heads 0..h-1, h..2h-1 in the order 0, h, 1, h + 1, ..: the two heads of a pair become neighbours."""
    return rows.unflatten(0, (2, -1, width)).transpose(0, 1).flatten(0, 2)


def heads_in_halves(rows: Tensor, width: int) -> Tensor:
    """Heads 0, 1, 2, 3, .. in the order 0, 2, .., 1, 3, ..: the inverse of `heads_in_pairs`."""
    return rows.unflatten(0, (-1, 2, width)).transpose(0, 1).flatten(0, 2)


def half_from_interleaved(weight: Tensor, width: int) -> Tensor:
    """Query or key rows (heads * width, ...) for RoPE in the half-split layout, from rows for the interleaved one.

    Dimensions 0, 2, 4, .. then 1, 3, 5, .. of each head, of queries and keys alike, so no q k' changes.
    """
    rows = weight.unflatten(0, (-1, width))  # (H, d, ...)
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1).flatten(0, 1)


def keep_lambda(state: dict[str, Tensor], ours: float) -> None:
    """Replace a stored lambda_init by ours; one vector moves, so that exp(q1.k1) - exp(q2.k2) + lambda_init stays."""
    change = state.pop("lambda_init").double().item() - ours  # by which exp(q1.k1) - exp(q2.k2) must grow
    if not math.isfinite(change):
        raise ValueError("lambda_init is not finite, so the source's checkpoint is damaged: give an undamaged one")
    if abs(change) < 1e-7:  # the schedule's value, rounded to float32
        return
    # One of the two exponentials can always take up the difference and remain positive.
    first, second = ((state[f"lambda_q{c}"].double() @ state[f"lambda_k{c}"].double()).exp().item() for c in (1, 2))
    c, exponential = (1, first + change) if first + change > second - change else (2, second - change)
    q, k = state[f"lambda_q{c}"].double(), state[f"lambda_k{c}"].double()
    if not k.any():
        k[0] = 1.0
    q = q + (math.log(exponential) - q @ k) * k / (k @ k)  # the nearest q with this q.k
    dtype = torch.promote_types(state[f"lambda_q{c}"].dtype, torch.float32)
    state |= {f"lambda_q{c}": q.to(dtype), f"lambda_k{c}": k.to(dtype)}
