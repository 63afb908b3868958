"""What a prepared set was made of, and whether its source and options are still the same."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from data.config import DataConfig

WHOLE = 64 * 2**20  # bytes; files that together are no larger are read whole
BLOCK = 2**16  # bytes
BLOCKS = 18  # of a file in a larger source: its head, its tail and 16 between them
CONTENT = "content"  # the key of `content_of` in an identity; sets that earlier versions prepared lack it


def content_of(paths: Sequence[Path]) -> str:
    """Digest (32 hex digits) of what local files hold: of all bytes, or of BLOCKS blocks per file of a large source.

    The blocks have even distances, so a set of 100 GB is compared in seconds. A small edit between them, which leaves the
    size of a large file as it was, is not seen.
    """
    sizes = [path.stat().st_size for path in paths]
    whole, digest = sum(sizes) <= WHOLE, hashlib.sha256()
    for path, size in zip(paths, sizes, strict=True):
        digest.update(b"%d\n" % size)
        with path.open("rb") as file:
            for start in _starts(size, whole):
                file.seek(start)
                digest.update(file.read(BLOCK))
    return digest.hexdigest()[:32]


def _starts(size: int, whole: bool) -> Sequence[int]:
    if whole or size <= BLOCKS * BLOCK:
        return range(0, size, BLOCK)
    return [(size - BLOCK) * i // (BLOCKS - 1) for i in range(BLOCKS)]


def request_of(cfg: DataConfig, identity: dict) -> dict:
    """Everything the shards depend on. Two preparations with equal requests write equal bytes."""
    tokenizer = {"tokenizer.name": cfg.tokenizer.name, "tokenizer.vocab_size": cfg.tokenizer.vocab_size}
    if cfg.tokenizer.path:
        tokenizer["tokenizer.path"] = cfg.tokenizer.path
    sizes = {key: getattr(cfg, key) for key in ("val_fraction", "shard_tokens", "max_tokens")}
    return {**identity, **tokenizer, **sizes}


def refuse_other_request(folder: Path, before: dict | None, now: dict) -> None:
    """ValueError: `folder` was prepared from another source, or with other options. `before` is the request of that time.

    A set of an earlier version, without CONTENT, is compared by names, sizes and heads alone, as that version did.
    """
    before = before if isinstance(before, dict) else {}
    for key in now | before:
        if key == CONTENT and key not in before:
            continue
        if before.get(key) != now.get(key):
            wrong = f"{folder} was prepared with {key}={before.get(key)}, not {now.get(key)}"
            if key.split(".")[0] not in DataConfig.__dataclass_fields__:  # no option, but a fact about the source
                wrong = f"the source has changed since {folder} was prepared ({key} {before.get(key)} then, {now.get(key)} now)"
            raise ValueError(f"{wrong}: use another data.name=NAME, or delete {folder}")
