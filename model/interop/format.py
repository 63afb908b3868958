"""A format is one architecture of transformers: tables of its names beside ours, which importing and exporting both read."""

import math
import re
from collections.abc import Callable, Collection, Iterator
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..attention import VARIANTS
from ..config import DecoderConfig
from ..decoder import Decoder, layer_letter
from .folder import SAVE_AGAIN, Weights, number


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
    options: ClassVar[dict[str, tuple]] = {}  # option of the variant: the values that the architecture can compute
    settings: ClassVar[dict[str, str]]  # number in config.json: field of DecoderConfig
    defaults: ClassVar[dict[str, float | None]]  # of the numbers that config.json may leave out; None: DecoderConfig's
    names: ClassVar[dict[str, str]]  # our module, or parameter: the foreign one
    blocks: ClassVar[str]  # prefix of their names in block {}
    block_names: ClassVar[dict[str, str]]  # our module, or parameter, in a block: the foreign one
    transposed: ClassVar[tuple[str, ...]] = ()  # ends of the names of their tensors that are (in, out)
    always_biased: ClassVar[tuple[str, ...]] = ()  # parts of the names of modules that have biases
    bias_keys: ClassVar[dict[str, tuple[str, ...]]] = {}  # key of config.json: the same, if it is true
    outdated: ClassVar[str] = ""  # regular expression of tensors that only older versions saved

    def our_config(self, config: dict[str, Any]) -> DecoderConfig:
        """Our configuration for a config.json. ValueError for a function that our decoder cannot compute."""
        fields = {ours: number(config, foreign, self.defaults, ours != "norm_eps") for foreign, ours in self.settings.items()}
        fields |= {field: allowed[0] for field, allowed in self.parts.items()}
        if self.options:
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
        allowed = self.parts | {f"{group}.{name}": values for name, values in self.options.items()}
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
        weights.tensors = {name: t for name, t in weights.tensors.items() if not re.fullmatch(self.outdated, name)}
        state: dict[str, Tensor] = {}
        for shapes, foreign in self._table(cfg, config):
            state |= self._rows(shapes, weights, foreign) if foreign else _zeros(shapes)
        if cfg.tie:
            state["head.weight"] = state["embedding.weight"]
            weights.drop_copies(state["head.weight"])
        weights.refuse_leftovers()
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


# ---------------------------------------- rows of published modules in our order


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

    Dimensions 0, 2, 4, .. then 1, 3, 5, .. of each head, of queries and keys alike, so every q k' is what it was.
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
