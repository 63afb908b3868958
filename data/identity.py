"""What a prepared set was made of, and whether its source and options are still the same."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from data.config import DataConfig
from data.tokenizer import BPE_TOKENS

WHOLE = 64 * 2**20  # bytes; files that together are no larger are read whole
BLOCK = 2**16  # bytes
BLOCKS = 18  # of a file in a larger source: its head, its tail and 16 between them
CONTENT, OF_TOKENIZER = "content", "tokenizer_content"  # the keys of `content_of` of the source and of a tokenizer's folder


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


def nanogpt_identity(cfg: DataConfig) -> dict:
    """The names, sizes and content of a nanoGPT folder's files. FileNotFoundError, ValueError: it cannot be imported."""
    folder = Path(cfg.path or "")
    if cfg.path is None or not folder.is_dir():
        raise FileNotFoundError("data=nanogpt needs the folder with train.bin and val.bin: add path=FOLDER")
    if (folder / "meta.pkl").exists():
        fix = "prepare its text instead with data=text path=FILE"
        raise ValueError(f"{folder} has a character table of its own (meta.pkl): {fix}")
    files = [folder / f"{name}.bin" for name in ("train", "val")]
    sizes = {file.name: file.stat().st_size if file.is_file() else None for file in files}
    return {"source": "nanogpt", **sizes, CONTENT: content_of([file for file in files if file.is_file()])}


def request_of(cfg: DataConfig, identity: dict) -> dict:
    """Everything that the shards depend on and that can be seen here, which the revision of a data set on the hub cannot."""
    tokenizer = {"tokenizer.name": cfg.tokenizer.name, "tokenizer.vocab_size": cfg.tokenizer.vocab_size}
    if cfg.tokenizer.path:
        files = sorted(Path(cfg.tokenizer.path).glob("tokenizer*.json"))
        tokenizer |= {"tokenizer.path": cfg.tokenizer.path} | ({OF_TOKENIZER: content_of(files)} if files else {})
    sizes = {key: getattr(cfg, key) for key in ("val_fraction", "shard_tokens", "max_tokens")}
    return {**identity, **tokenizer, **sizes}


def refuse_other_request(folder: Path, before: dict | None, now: dict) -> None:
    """ValueError: `folder` was prepared from another source, or with other options. `before` is the request of that time.

    A fact about the source or the tokenizer that one of the two versions of this code did not write down is not compared.
    """
    before = before if isinstance(before, dict) else {}
    for key in now | before:
        option = key.split(".")[0] in DataConfig.__dataclass_fields__
        if not option and not (key in before and key in now):
            continue
        then, ours = before.get(key), now.get(key)
        if key == "tokenizer.vocab_size" and now.get("tokenizer.name") == "bpe":
            then, ours = then or BPE_TOKENS, ours or BPE_TOKENS
        if then != ours:
            wrong = f"{folder} was prepared with data.{key}={then}, not {ours}"
            if not option:
                wrong = f"the source has changed since {folder} was prepared ({key} {then} then, {ours} now)"
            raise ValueError(f"{wrong}: use another data.name=NAME, or delete {folder}")
