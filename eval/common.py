"""What all evaluations share: opening a run, the tokens to test on, the result's files and the style of the figures."""

import functools
import hashlib
import io
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import yaml
from omegaconf import MISSING
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from configs import CONFIG_DIR
from configs.files import flatten, read_json_object, read_run_config, say, write_atomic, write_json
from configs.provenance import result_record
from data.config import DataConfig
from data.retrieval import as_one_document
from data.shards import Shard, TextTokens, open_split
from data.sources import open_corpus
from data.tokenizer import Tokenizer, load_tokenizer
from model.attention import VARIANTS
from training.checkpoint import LoadedRun, load_run
from training.distributed import pick_device

Axes = Any  # matplotlib's, which is imported where a figure is drawn
FLOATS_IN_MEMORY = 2**28  # most floats that one forward pass may hold: 1 GB
LOGITS_AT_ONCE = 2**24  # floats that the output head makes at a time: 64 MB
LOGITS_IN_CACHE = 2**20  # the same on a CPU: 4 MB stay in its cache, and the next operations take half the time
HAYSTACK_TOKENS = 20_000_000  # enough text for needle contexts, and small in memory
READ_AT_ONCE = 2**22  # tokens of a text that is read from beginning to end: 32 MB
# The modules of eval/ that evaluate one run: python -m eval.NAME run=runs/NAME
OF_A_RUN = ("attention_noise", "harness", "icl", "mqar", "needle", "outliers", "perplexity", "quantization")
INPUTS = ("text", "shards", "examples", "test", "file")  # settings that name something else to measure on


@dataclass
class EvalConfig:
    """run: the run's folder. batch: sequences per forward pass, or fewer where their activations would not fit in memory."""

    run: str = MISSING
    device: str = "auto"  # auto | cpu | cuda
    batch: Annotated[int, "[1, inf)"] = 32
    out: str | None = None  # folder that gets eval/ and figures/ with the result; None: the run's


@dataclass
class TextEvalConfig(EvalConfig):
    """The settings of an evaluation that reads text."""

    text: str | None = None  # use this text instead of the run's validation shards: a file, a folder or a 'glob'
    shards: str | None = None  # use the validation shards of this folder instead of the run's
    name: str | None = None  # name of the result, in place of the text's name


def open_run(cfg: EvalConfig, task: bool = False) -> LoadedRun:
    """The run's model (evaluation mode, float32, on the chosen device), tokenizer and configuration.

    task: also runs of data=mqar, whose tokens are no text. ValueError for such a run where text is read.
    """
    run = load_run(cfg.run, device=pick_device(cfg.device))
    if not task and read_run_config(run.path)["data"].get("source") == "mqar":  # ValueError without data
        raise ValueError(f"{run.path} was trained on data=mqar, which has no text: use eval.mqar")
    return run


def evaluation_tokens(run: LoadedRun, cfg: TextEvalConfig) -> list[Shard | TextTokens]:
    """The tokens to test on: of the text `text`, else of the validation shards in `shards` or in the run's data."""
    if cfg.text and cfg.shards:
        raise ValueError("text= and shards= are both given: give one of them")
    return tokens_of(run.tokenizer, cfg.text, cfg.shards or run.config["data"]["dir"])


def tokens_of(tokenizer: Tokenizer, text: str | None, shards: str | None) -> list[Shard | TextTokens]:
    """The tokens of a text, else of the validation shards in a folder. ValueError for shards of another tokenizer."""
    if text:
        documents = read_documents(text)  # the end-of-text token is before each, as in shards of data.prepare
        encoded = [np.array((tokenizer.eot, *tokenizer.encode(document))) for document in documents]
        numbers = np.repeat(np.arange(1, len(encoded) + 1), [len(tokens) for tokens in encoded])
        sha256 = hashlib.sha256("\0".join(documents).encode(errors="replace")).hexdigest()  # of lone surrogates
        return [TextTokens(np.concatenate(encoded), sha256, numbers)]
    folder = Path(shards)
    if (folder / "tokenizer.json").is_file() and load_tokenizer(folder).fingerprint != tokenizer.fingerprint:
        raise ValueError(
            f"{folder} has another tokenizer than the run: use text=FILE, or shards prepared with the run's tokenizer"
        )
    return open_split(folder, "val", vocab_size=tokenizer.vocab_size, fingerprint=tokenizer.fingerprint)


def read_documents(text: str) -> list[str]:
    """The documents of a file, folder or glob, as data.prepare reads them."""
    try:
        documents = list(open_corpus(DataConfig(name="text", source="text", path=text)))
    except (FileNotFoundError, ValueError) as error:
        wrong, column, _ = str(error).partition(": use data.column=")
        fix = ": give text= a file that has its texts under 'text'" if column else ""
        raise type(error)(wrong.replace("path=", "text=") + fix) from None
    if not documents:
        raise ValueError(f"{text} is empty: give text= a file with text in it")
    return documents


def haystack(run: LoadedRun, parts: Sequence[Shard | TextTokens]) -> np.ndarray:
    """(n,) token ids of the text `parts`, to hide needles in; one document for a model with a document mask."""
    text = np.empty(0, dtype=np.int64)
    for part in parts:
        text = np.concatenate((text, part.read(0, HAYSTACK_TOKENS - len(text))))
    return as_one_document(text, run.tokenizer) if run.model.cfg.document_mask else text


def batches(rows: Sequence[Any], size: int, floats: int) -> Iterator[Sequence[Any]]:
    """Cut `rows` into parts of at most `size` rows, or fewer where `floats` numbers per row exceed the memory."""
    size = max(1, min(size, FLOATS_IN_MEMORY // floats))
    return (rows[start : start + size] for start in range(0, len(rows), size))


def logits_in_parts(
    head: torch.nn.Module, hidden: torch.Tensor, wanted: torch.Tensor, vocab_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Float32 logits (n, V) of the hidden states (B, T, D) with their `wanted` tokens (n,), in order, part by part.

    All parts but the last have the same n, a multiple of 64: then a row's logits have the bits of one product of all rows.
    """
    floats = LOGITS_IN_CACHE if hidden.device.type == "cpu" else LOGITS_AT_ONCE
    rows = max(1, floats // (64 * vocab_size)) * 64
    parts = zip(hidden.flatten(0, 1).split(rows), wanted.flatten().split(rows), strict=True)
    return ((head(states).float(), tokens) for states, tokens in parts)


def check_finite(values: torch.Tensor) -> None:
    """ValueError if numbers that a model computed are not finite: an argmax over NaN would pass as an answer."""
    if not values.isfinite().all():
        raise ValueError("the model's activations are not finite: its training diverged, so evaluate another run")


def pad_right(sequences: Sequence[np.ndarray], device: torch.device | str) -> torch.Tensor:
    """Stack sequences as (B, longest), with zeros after their ends, which a causal model does not see."""
    return pad_sequence([torch.as_tensor(row, dtype=torch.long) for row in sequences], batch_first=True).to(device)


def pad_left(prompts: Sequence[Sequence[int]], device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Prompts as tokens (B, longest), with zeros before them, and a key mask (B, longest), or None without padding."""
    rows = [torch.as_tensor(prompt, dtype=torch.long) for prompt in prompts]
    tokens = pad_sequence(rows, batch_first=True, padding_side="left")
    keys = pad_sequence([torch.ones_like(row, dtype=torch.bool) for row in rows], batch_first=True, padding_side="left")
    return tokens.to(device), None if keys.all() else keys.to(device)


def check_different(key: str, values: Sequence[Any] | None, example: str) -> None:
    """ValueError for a setting that is an empty list, or a list with a value twice."""
    if values is not None and len(set(map(str, values))) < max(1, len(values)):
        raise ValueError(f"{key}={values} must be different values: use {key}={example}")


def device_of(model: torch.nn.Module) -> torch.device:
    """Where the model's parameters are (the CPU for a model without any)."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def progress(what: str, total: int, items: Iterable[Any] | None = None) -> tqdm:
    """A progress bar with the time left, of `items` or to be updated; silent where the output is not a terminal."""
    return tqdm(items, total=total, desc=what, leave=False, disable=None, dynamic_ncols=True)


def mean_se(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Mean and its standard error (nan, which is null in JSON, for a single value)."""
    values = np.asarray(values, dtype=np.float64)
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def plus_minus(value: float, se: float, form: str = ".3f") -> str:
    """`value` ± `se` in the format `form`, or the value alone where its error is not known (nan)."""
    return f"{value:{form}}" if math.isnan(se) else f"{value:{form}} ± {se:{form.removeprefix('+')}}"


def given_input(settings: Mapping[str, Any]) -> str | None:
    """The text, folder or file that an evaluation was given to measure on; None for the run's text."""
    return next((settings[key] for key in INPUTS if settings.get(key)), None)


def result_name(evaluation: str, settings: Mapping[str, Any]) -> str:
    """The name of the result's files: EVALUATION, then name= or, for a given input, its name without suffixes."""
    name, given = settings.get("name"), given_input(settings)
    if name is None and given is None:
        return evaluation
    name = Path(given).name.split(".")[0] if name is None else name
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):  # a dot would end it in a metric's path
        raise ValueError(f"'{name}' names no result: give name= with letters, digits, '_' and '-', as in name=books")
    return f"{evaluation}_{name}"


def command_of(result: str) -> str:
    """The evaluation that writes this result: perplexity of perplexity_books."""
    return next((name for name in OF_A_RUN if result == name or result.startswith(f"{name}_")), result)


def claim_result(evaluation: str, cfg: EvalConfig, content: Iterable[bytes | np.ndarray] = ()) -> tuple[str, dict[str, str]]:
    """The name of the result's files, and what its results say of a given input: its name and the digest of its `content`.

    ValueError if it cannot be written, or if its file has the result of another input and name= is not given.
    """
    settings, folder = vars(cfg), Path(cfg.out or cfg.run)
    for part in (folder / "eval", folder / "figures"):
        place = next(place for place in (part, *part.resolve().parents) if place.exists())
        if not os.access(place, os.W_OK):
            raise ValueError(f"the result cannot be written into {place}: give out=FOLDER, another place for it")
    name, given = result_name(evaluation, settings), given_input(settings)
    if not given:
        return name, {}
    digest = hashlib.sha256()
    for part in content:
        digest.update(part)
    path = folder / "eval" / f"{name}.json"
    if settings.get("name") is None and path.is_file():
        before = read_json_object(path, "move it away").get("results", {}).get("input_sha256")
        if before != digest.hexdigest():
            raise ValueError(f"eval/{path.name} is of another text or file: give this one a name with name=NAME")
    return name, {"text": Path(os.path.abspath(given)).name, "input_sha256": digest.hexdigest()}


def content_of(parts: Iterable[Shard | TextTokens]) -> Iterator[np.ndarray]:
    """The tokens of texts as int64, a part at a time."""
    for part in parts:
        for start in range(0, len(part), READ_AT_ONCE):
            yield part.read(start, start + READ_AT_ONCE)


def write_result(
    run: LoadedRun,
    cfg: EvalConfig,
    name: str,
    results: dict[str, Any],
    lines: Iterable[str],
    draw: Callable[[Path, dict, str, str], None] | None = None,
) -> None:
    """Print `lines`, write results to eval/NAME.json, and have figures/NAME.png drawn by draw(path, results, title, colour)."""
    folder, title = Path(cfg.out or cfg.run), Path(cfg.run).resolve().name
    for line in lines:
        say(f"{name}  {title}: {line}")
    record = result_record(name, title, cfg, results, step=run.step, run_config=run.config)
    write_json(folder / "eval" / f"{name}.json", record)
    if draw:
        draw(folder / "figures" / f"{name}.png", results, title, colour(variant(run.config)))


INK, GREY, FAINT = "#1f2328", "#6b7280", "#d9dde3"
# Mostly Okabe and Ito's palette, which suits the common kinds of colour blindness. A variant has one colour everywhere.
COLOURS = {name: colour for cls in VARIANTS.values() for name, colour in cls.colours.items()}


def colour(variant: str) -> str:
    """The variant's colour; INK for a variant without a colour (a hybrid stack, a new variant)."""
    return COLOURS.get(variant, INK)


def variant(config: dict[str, Any]) -> str:
    """A model's name: the most specific file of configs/model that fits it, or its layer pattern where no file fits."""
    ours, groups = flatten(config["model"]), model_files()
    fitting = [name for name in groups if all(ours.get(key) == value for key, value in flatten(groups[name]).items())]
    return max(fitting, key=lambda name: len(str(groups[name])), default=f"layers={config['model'].get('layers')}")


@functools.cache
def model_files() -> dict[str, Any]:
    """Name -> content of each file of configs/model."""
    files = sorted((CONFIG_DIR / "model").glob("*.yaml"))
    return {path.stem: yaml.safe_load(path.read_text()) or {} for path in files}


@contextmanager
def figure(path: Path, width: float, height: float, columns: int = 1, rows: int = 1, grid: str = "y") -> Iterator[np.ndarray]:
    """A context that gives axes (rows, columns) in the project's style and then writes the PNG. grid: x, y or "" for none."""
    import matplotlib
    from matplotlib.figure import Figure

    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # matplotlib logs that it builds its font cache
    style = {
        "font.family": "sans-serif", "font.size": 11, "text.color": INK, "axes.labelcolor": INK,
        "axes.edgecolor": GREY, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 12,
        "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.grid": bool(grid), "axes.grid.axis": grid or "y",
        "axes.axisbelow": True, "grid.color": FAINT, "grid.linewidth": 0.8, "xtick.color": GREY, "ytick.color": GREY,
        "xtick.labelcolor": INK, "ytick.labelcolor": INK, "legend.frameon": False, "lines.linewidth": 1.8,
    }  # fmt: skip
    with matplotlib.rc_context(style):
        drawing = Figure(figsize=(width, height), layout="constrained")
        drawing.get_layout_engine().set(h_pad=0.08)
        yield drawing.subplots(rows, columns, squeeze=False)
        image = io.BytesIO()
        drawing.savefig(image, dpi=160, format="png")
        write_atomic(path, image.getvalue())
