"""What training and validation read: prepared text, or a task whose rows are generated when they are read."""

import hashlib
import json
from pathlib import Path

from data.config import DataConfig
from data.loader import Mixture, Source, Windows
from data.mqar import Mqar, mqar_tokenizer
from data.retrieval import RetrievalSource
from data.shards import open_split
from data.tokenizer import Tokenizer, load_tokenizer


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
