"""What training and validation read: prepared text, or a task whose rows are generated when they are read.

Refused are a text that was prepared with other options than the command line has, and one that changed since a run began.
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from configs.composing import overrides_of
from configs.files import flatten, read_json_lines
from data.config import DataConfig
from data.loader import Mixture, Source, Windows
from data.mqar import Mqar, mqar_tokenizer
from data.retrieval import RetrievalSource
from data.shards import open_split, read_meta
from data.tokenizer import UNSET, Tokenizer, load_tokenizer

# Options that only data.prepare reads, as meta.json names them.
PREPARING = set("dataset subset split data_files column val_fraction max_tokens shard_tokens".split())
PREPARING |= {"tokenizer.name", "tokenizer.path", "tokenizer.vocab_size", "tokenizer.special"}


def is_task(cfg: DataConfig) -> bool:
    """Whether rows are generated when they are read, without shards."""
    return cfg.source == "mqar"


def open_tokenizer(cfg: DataConfig) -> Tokenizer:
    """The tokenizer of the prepared folder, or that of a task."""
    return mqar_tokenizer(cfg.mqar) if is_task(cfg) else load_tokenizer(Path(cfg.dir), cfg.tokenizer)


def open_sources(
    cfg: DataConfig, tokenizer: Tokenizer, context: int, document_mask: bool = False
) -> tuple[Source, Windows | Mqar]:
    """What training reads (the text, or a mixture with retrieval documents made from it) and the windows of validation.

    Rows of `context` + 1 tokens. document_mask: of the model; a retrieval document then has no end-of-text token inside.
    """
    weight = cfg.retrieval.weight
    if is_task(cfg):
        if weight:
            raise ValueError("data=mqar cannot be mixed with retrieval documents: use data.retrieval.weight=0")
        task = Mqar(cfg.mqar, context)
        return task, task
    same = {"vocab_size": tokenizer.vocab_size, "fingerprint": tokenizer.fingerprint}
    text, val = (Windows(open_split(Path(cfg.dir), split, **same), context) for split in ("train", "val"))
    if not weight:
        return text, val
    retrieval = RetrievalSource(cfg.retrieval, text, tokenizer, context, document_mask)
    return Mixture([(text, 100 - weight), (retrieval, weight)]), val


def text_digest(cfg: DataConfig) -> str | None:
    """A digest of the shards: their numbers of tokens and checksums (of our shards), in order. None for a task."""
    if is_task(cfg):
        return None
    splits = {split: open_split(Path(cfg.dir), split) for split in ("train", "val")}
    content = {split: [(len(shard), shard.crc32) for shard in shards] for split, shards in splits.items()}
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def refuse_ignored_options(cfg: DataConfig, overrides: Sequence[str]) -> None:
    """ValueError if an override of the command line gives an option of the preparation another value than `cfg.dir` has."""
    prepared = None if is_task(cfg) else (read_meta(cfg.dir) or {}).get("request")
    if not isinstance(prepared, dict):  # shards of another project
        return
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    typed = flatten({override.key_or_group: override.value() for override in parsed})
    prepared = UNSET | {option: value for option, value in prepared.items() if value is not None or option not in UNSET}
    for option, ours in flatten(asdict(cfg)).items():
        ours = UNSET.get(option) if ours is None else ours
        if option in PREPARING and f"data.{option}" in typed and option in prepared and prepared[option] != ours:
            wrong = f"{cfg.dir} was prepared with data.{option}={prepared[option]}, not {ours}"
            (fix,) = overrides_of({f"data.{option}": prepared[option]})
            raise ValueError(f"{wrong}: set {fix}, or prepare as another data.name=NAME")


def refuse_other_text(run: Path, cfg: DataConfig) -> None:
    """ValueError if `run` was trained on other shards than those of `cfg`."""
    if trained_on(run) not in (None, text_digest(cfg)):
        wrong = f"{run} was trained on other shards than those in {cfg.dir}"
        raise ValueError(f"{wrong}: set data.dir= to the folder that it was trained on, or start a new run")


def trained_on(run: Path) -> str | None:
    """The digest of the shards that `run` was trained on; None if the run does not say it."""
    return next(read_json_lines(run / "metrics.jsonl"), {}).get("text_digest")


def text_read(data: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """Name, source and options of the text that a run reads: of its shards, as data.dir= may point to another data=NAME."""
    folder, made = Path(data.get("dir") or "none"), None
    with contextlib.suppress(ValueError):  # damaged by now
        made = read_meta(folder)
    if made is None and any(folder.glob("*.bin")):
        return folder.resolve().name, "shards of another project", {}
    made = made or data
    return made["name"], made.get("source", "unknown"), made.get("request") or {}


def refuse_other_tokenizer(run: Path, tokenizer: Tokenizer, shards: str) -> None:
    """ValueError if `run` has another tokenizer: weights fit the token ids of one tokenizer only."""
    of_run = load_tokenizer(run)
    if of_run.fingerprint != tokenizer.fingerprint:
        here = f"{shards} ({tokenizer.name}, {tokenizer.vocab_size})"
        wrong = f"{run} was trained with another tokenizer ({of_run.name}, {of_run.vocab_size} tokens) than that of {here}"
        raise ValueError(f"{wrong}: use data prepared with the run's tokenizer (data=mqar: with its keys, values and noise)")
