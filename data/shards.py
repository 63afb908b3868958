"""Token shards in the format of llm.c and modded-nanogpt; those that this project writes have more in their header.

A shard is 256 little-endian int32 of header, then the tokens. Header: [0] magic, [1] version, [2] token count. Magic
20240520 version 1 holds uint16 (llm.c's gpt-2 files); 20240801 version 7 holds uint32 (llm.c's llama-3 files).
Our writer also fills ints those readers ignore: [3] `EXTENDED`, [4] vocabulary size, [5] CRC-32 of the token bytes,
[6:10] first 16 bytes of the tokenizer's fingerprint.
"""

from __future__ import annotations

import contextlib
import re
import zlib
from pathlib import Path

import numpy as np

from configs.files import read_json_object, write_atomic
from configs.provenance import ROOT

HEADER_BYTES = 256 * 4
FORMATS = {np.dtype("<u2"): (20240520, 1), np.dtype("<u4"): (20240801, 7)}
EXTENDED = 0x44494646  # "DIFF"
META = "meta.json"
PROGRESS = "progress.json"
WORDS = {"train": "train", "val": "val|valid|validation"}  # what names a split in the file names of foreign shards
CHECK_BELOW = 64 * 2**20  # bytes; smaller files have their checksum verified whenever they are opened
MAX_TOKENS = 2**31 - 1  # the count is one int32


def token_dtype(vocab_size: int) -> np.dtype:
    """The on-disk type for ids below `vocab_size`: uint16 up to 65,535 tokens, else uint32."""
    return np.dtype("<u2") if vocab_size <= 65_535 else np.dtype("<u4")


def write_shard(path: str | Path, *parts: np.ndarray, vocab_size: int, fingerprint: str) -> int:
    """Write tokens, in `parts` (n,), as one shard, atomically: the file is there whole or not at all. Returns its CRC-32."""
    path = Path(path)
    count, largest = sum(map(len, parts)), max((int(part.max()) for part in parts if len(part)), default=0)
    if count > MAX_TOKENS:
        raise ValueError(f"a shard holds at most {MAX_TOKENS} tokens, not {count}: use a smaller data.shard_tokens")
    if largest >= vocab_size:
        raise ValueError(f"{path.name}: token {largest} is outside the vocabulary of {vocab_size}: use its tokenizer")
    dtype, crc = token_dtype(vocab_size), 0
    parts = [np.ascontiguousarray(part, dtype=dtype) for part in parts]
    for part in parts:
        crc = zlib.crc32(part, crc)
    header = np.zeros(256, dtype="<i4")
    header[0:2] = FORMATS[dtype]
    header[2:5] = count, EXTENDED, vocab_size
    header[5:6] = np.array([crc], dtype="<u4").view("<i4")
    header[6:10] = np.frombuffer(bytes.fromhex(fingerprint)[:16], dtype="<i4")
    write_atomic(path, header.tobytes(), *(part.data for part in parts))
    return crc


class Shard:
    """One shard, memory-mapped: `tokens` is (count,) uint16 or uint32, nothing is read before it is used.

    `vocab_size` and `fingerprint` (hex) are those of the caller's tokenizer. A shard that this project wrote is refused if it
    has others. Shards of other projects record neither, so only their ids are checked. `verify` forces the checksum.
    Raises FileNotFoundError or ValueError.
    """

    def __init__(
        self, path: str | Path, *, vocab_size: int | None = None, fingerprint: str | None = None, verify: bool = False
    ) -> None:
        self.path = Path(path)
        header, dtype = self._read_header()
        count = int(header[2])
        self._check_size(count, dtype)
        self.extended: bool = int(header[3]) == EXTENDED
        self.vocab_size: int | None = int(header[4]) if self.extended else vocab_size
        self.fingerprint: str | None = header[6:10].tobytes().hex() if self.extended else None
        self.crc32: int | None = int(header[5:6].view("<u4")[0]) if self.extended else None
        self._check_tokenizer(vocab_size, fingerprint)
        mapped = np.memmap(self.path, dtype, "r", offset=HEADER_BYTES, shape=(count,)) if count else ()
        self.tokens = np.asarray(mapped, dtype)  # a plain view of the map, whose slices are made twice as fast
        if verify or self.tokens.nbytes < CHECK_BELOW:
            if self.crc32 is not None and zlib.crc32(self.tokens) != self.crc32:
                raise ValueError(f"{self.path} is corrupted (checksum differs): delete its folder and prepare again")
            self._check_ids(self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) as int64. ValueError for an id outside the vocabulary (large files are not scanned).

        The file's size is checked before every read: reading beyond the end of a file that was truncated after it was
        opened would end the process by SIGBUS.
        """
        with contextlib.suppress(FileNotFoundError):  # the content of a deleted file stays mapped
            self._check_size(len(self), self.tokens.dtype)
        tokens = self.tokens[start:stop].astype(np.int64)
        self._check_ids(tokens)
        return tokens

    def _read_header(self) -> tuple[np.ndarray, np.dtype]:
        if not self.path.is_file():
            raise FileNotFoundError(f"shard {self.path} is missing: prepare the data again with python -m data.prepare")
        with self.path.open("rb") as file:
            start = file.read(HEADER_BYTES)
        header = np.frombuffer(start.ljust(HEADER_BYTES, b"\0"), dtype="<i4")
        dtypes = [dtype for dtype, (magic, _) in FORMATS.items() if header[0] == magic and len(start) == HEADER_BYTES]
        if not dtypes:
            fix = "for nanoGPT's .bin use python -m data.prepare data=nanogpt path=FOLDER"
            raise ValueError(f"{self.path} is not a token shard (no llm.c header): {fix}")
        if header[1] != FORMATS[dtypes[0]][1]:
            raise ValueError(f"{self.path} has shard version {header[1]}, not {FORMATS[dtypes[0]][1]}: prepare it again")
        return header, dtypes[0]

    def _check_size(self, count: int, dtype: np.dtype) -> None:
        expected = HEADER_BYTES + count * dtype.itemsize
        if (found := self.path.stat().st_size) != expected:
            what = "truncated" if found < expected else "longer than its header says"
            wrong = f"{self.path} is {what} ({found} bytes, not {expected})"
            raise ValueError(f"{wrong}: delete its folder and prepare again")

    def _check_tokenizer(self, vocab_size: int | None, fingerprint: str | None) -> None:
        differs = fingerprint is not None and fingerprint[:32] != self.fingerprint
        if self.extended and (differs or vocab_size not in (None, self.vocab_size)):
            fix = "use the tokenizer.json beside it, or prepare as another data.name=NAME"
            raise ValueError(f"{self.path} was written with another tokenizer (vocabulary {self.vocab_size}): {fix}")

    def _check_ids(self, tokens: np.ndarray) -> None:
        if self.vocab_size is not None and len(tokens):
            _check_largest(self.path, int(tokens.max()), self.vocab_size, "use the tokenizer it was written with")


def _check_largest(path: Path, token: int, vocab_size: int, fix: str) -> None:
    if token >= vocab_size:
        raise ValueError(f"{path} holds token {token}, outside the vocabulary of {vocab_size}: {fix}")


class TextTokens:
    """Tokens (n,) in memory, with the methods that read a shard."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.tokens[start:stop].astype(np.int64)


def read_meta(folder: str | Path) -> dict | None:
    """`meta.json` of a prepared folder, or None for a folder without it (foreign shards). ValueError: it is damaged."""
    path, fix = Path(folder) / META, f"delete {folder} and prepare the data again"
    if not path.is_file():
        return None
    meta = read_json_object(path, fix)
    try:
        bytes.fromhex(meta["tokenizer"]["fingerprint"])
        [Path(shard["file"]) for split in meta["splits"].values() for shard in split["shards"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is damaged: {fix}") from None
    return meta


def open_split(
    folder: str | Path, split: str, *, vocab_size: int | None = None, fingerprint: str | None = None, verify: bool = False
) -> list[Shard]:
    """The shards of one split of a prepared folder, in order; without meta.json, the .bin files whose names say the split.

    Raises FileNotFoundError or ValueError, in one line, for a missing folder, split or shard and as `Shard` does.
    """
    folder = Path(folder)
    known = (ROOT / "configs" / "data" / f"{folder.name}.yaml").is_file()
    source = f"data={folder.name}" if known else "data=text path=... data.name=NAME (docs/data.md)"
    fix = f"prepare it: python -m data.prepare {source}"
    meta = read_meta(folder)
    if meta:
        paths = [folder / shard["file"] for shard in meta["splits"].get(split, {}).get("shards", [])]
        fingerprint = fingerprint or meta["tokenizer"]["fingerprint"]
        if not paths and split == "val":
            fix = "prepare as another data.name=NAME with a larger data.val_fraction"
            raise ValueError(f"{folder} was prepared without validation text: {fix}")
    elif not folder.is_dir():
        raise FileNotFoundError(f"no prepared data in {folder}: {fix}")
    elif (folder / PROGRESS).is_file():
        again = "run python -m data.prepare again, with the same overrides, to resume it"
        raise ValueError(f"the preparation of {folder} is not finished: {again}")
    else:
        paths = _foreign(folder, split)
    if not paths:
        raise FileNotFoundError(f"no {split} shards in {folder}: {fix}")
    return [Shard(path, vocab_size=vocab_size, fingerprint=fingerprint, verify=verify) for path in paths]


def _foreign(folder: Path, split: str) -> list[Path]:
    """Shards of another project: those with the split as a word of their name, as in pretrain_val_000.bin.

    If no name has the word, names that have its letters within a longer word count (trainset.bin), but not those with the
    word of the other split (retrieval_train_000.bin is not validation). ValueError: a name has the words of both splits.
    """
    files = sorted(folder.glob("*.bin"))
    named = {
        name: [file for file in files if re.search(rf"(?<![A-Za-z])({words})(?![A-Za-z])", file.stem)]
        for name, words in WORDS.items()
    }
    if both := sorted(set(named["train"]) & set(named["val"])):
        fix = "rename it so that its name says one split"
        raise ValueError(f"the name of {both[0]} says train and val, so its split is not known: {fix}")
    within = [file for file in files if split in file.stem and file not in named["train"] + named["val"]]
    return named[split] or within


def open_nanogpt(path: str | Path, vocab_size: int) -> np.ndarray:
    """nanoGPT's headerless uint16 `.bin`, memory-mapped, (count,). ValueError: another format, or no file."""
    path = Path(path)
    size = path.stat().st_size if path.is_file() else 0
    if size == 0 or size % 2:
        raise ValueError(f"{path} is missing, empty or truncated: give path= the folder with nanoGPT's train.bin and val.bin")
    tokens = np.memmap(path, dtype="<u2", mode="r")
    if size >= 4 and tokens[:2].tobytes() in [np.array([magic], "<i4").tobytes() for magic, _ in FORMATS.values()]:
        raise ValueError(f"{path} already has an llm.c header: train on it as it is with data.dir={path.parent}")
    largest = max(int(tokens[i : i + 2**24].max()) for i in range(0, len(tokens), 2**24))
    _check_largest(path, largest, vocab_size, "set data.tokenizer.name to the tokenizer that wrote it")
    return tokens
