"""Token shards in the format of llm.c and modded-nanogpt; those that this project writes have more in their header.

A shard is 256 little-endian int32 of header, then the tokens. Header: [0] magic, [1] version, [2] token count. Magic
20240520 version 1 holds uint16 (llm.c's gpt-2 files); 20240801 version 7 holds uint32 (llm.c's llama-3 files).
Our writer also fills ints those readers ignore: [3] `EXTENDED`, [4] vocabulary size, [5] CRC-32 of the token bytes,
[6:10] first 16 bytes of the tokenizer's fingerprint. nanoGPT's train.bin and val.bin hold the tokens alone.
"""

import zlib
from pathlib import Path

import numpy as np

from configs.files import naming, read_json_object, write_atomic
from configs.provenance import ROOT

HEADER_BYTES = 256 * 4
FORMATS = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}  # magic -> version, type of the tokens
NANOGPT = ("train.bin", "val.bin")
EXTENDED = 0x44494646  # "DIFF"
META = "meta.json"
PROGRESS = "progress.json"
CHECK_BELOW = 64 * 2**20  # bytes; smaller files have their checksum verified whenever they are opened
AGAIN = "copy its folder again, or prepare the data again as another data.name=NAME"


def token_dtype(vocab_size: int) -> np.dtype:
    """The on-disk type for ids below `vocab_size`: uint16 up to 65,535 tokens, else uint32."""
    return np.dtype("<u2") if vocab_size <= 65_535 else np.dtype("<u4")


def write_shard(path: str | Path, *parts: np.ndarray, vocab_size: int, fingerprint: str) -> int:
    """Write tokens, in `parts` (n,), as one shard, atomically: the file is there whole or not at all. Returns its CRC-32."""
    assert all(part.max() < vocab_size for part in parts if len(part))
    dtype, crc = token_dtype(vocab_size), 0
    parts = [np.ascontiguousarray(part, dtype=dtype) for part in parts]
    for part in parts:
        crc = zlib.crc32(part, crc)
    magic = next(magic for magic, (_, of_format) in FORMATS.items() if of_format == dtype)
    header = np.zeros(256, dtype="<i4")
    header[0:5] = magic, FORMATS[magic][0], sum(map(len, parts)), EXTENDED, vocab_size
    header[5:6] = np.array([crc], dtype="<u4").view("<i4")
    header[6:10] = np.frombuffer(bytes.fromhex(fingerprint)[:16], dtype="<i4")
    write_atomic(Path(path), header.tobytes(), *(part.data for part in parts))
    return crc


class Shard:
    """One shard. Its file is open only while it is read, so a set may have more shards than a process may open files.

    `vocab_size` and `fingerprint` (hex) are those of the caller's tokenizer: a shard of this project with others is refused; of
    other projects' shards, only the ids are checked. `verify` forces the checksum. Raises FileNotFoundError or ValueError.
    """

    def __init__(
        self, path: str | Path, *, vocab_size: int | None = None, fingerprint: str | None = None, verify: bool = False
    ) -> None:
        self.path, self.vocab_size = Path(path), vocab_size
        header = self._read_header()
        self.crc32: int | None = None
        if int(header[3]) == EXTENDED:
            self.vocab_size, self.crc32 = int(header[4]), int(header[5:6].view("<u4")[0])
            differs = fingerprint is not None and fingerprint[:32] != header[6:10].tobytes().hex()
            if differs or vocab_size not in (None, self.vocab_size):
                fix = "use the tokenizer.json beside it, or prepare as another data.name=NAME"
                raise ValueError(f"{self.path} was written with another tokenizer (vocabulary {self.vocab_size}): {fix}")
        if verify or self._count * self.dtype.itemsize < CHECK_BELOW:
            if self.crc32 is not None and zlib.crc32(self.tokens) != self.crc32:
                raise ValueError(f"{self.path} is corrupted (checksum differs): {AGAIN}")
            self._check_ids(self.tokens)

    def __len__(self) -> int:
        return self._count

    @property
    def tokens(self) -> np.ndarray:
        """(count,) uint16 or uint32, memory-mapped anew: the file is open as long as the array exists."""
        return np.memmap(self.path, self.dtype, "r", self._first, (len(self),)) if len(self) else np.empty(0, self.dtype)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) as int64. ValueError: an id outside the vocabulary (large files are not scanned), or the file
        was truncated after it was opened (a memory map would end the process by SIGBUS).
        """
        start, stop, _ = slice(start, stop).indices(len(self))
        size = self.dtype.itemsize
        with naming(self.path), self.path.open("rb", buffering=0) as file:
            file.seek(self._first + start * size)
            content = file.read(max(stop - start, 0) * size)
        if len(content) < (stop - start) * size:
            raise ValueError(f"{self.path} is truncated: {AGAIN}")
        tokens = np.frombuffer(content, self.dtype).astype(np.int64)
        self._check_ids(tokens)
        return tokens

    def _read_header(self) -> np.ndarray:
        if not self.path.is_file():
            raise FileNotFoundError(f"shard {self.path} is missing: prepare the data again with python -m data.prepare")
        with naming(self.path), self.path.open("rb") as file:
            header = np.frombuffer(file.read(HEADER_BYTES).ljust(HEADER_BYTES, b"\0"), dtype="<i4")
        size = self.path.stat().st_size
        version, self.dtype = FORMATS.get(int(header[0]), (None, None))
        if version is None and self.path.name in NANOGPT:
            return self._without_header(size)
        if version is None or size < HEADER_BYTES:
            raise ValueError(f"{self.path} is not a token shard (no llm.c header): prepare the text with data.prepare")
        if header[1] != version:
            raise ValueError(f"{self.path} has shard version {header[1]}, not {version}: prepare it again")
        self._first, self._count = HEADER_BYTES, int(header[2])
        expected = HEADER_BYTES + self._count * self.dtype.itemsize
        if size != expected:
            what = "truncated" if size < expected else "longer than its header says"
            raise ValueError(f"{self.path} is {what} ({size} bytes, not {expected}): {AGAIN}")
        return header

    def _without_header(self, size: int) -> np.ndarray:
        """Read a file of nanoGPT: uint16, or uint32 for a large vocabulary; returns an empty header. ValueError: neither."""
        self.dtype = token_dtype(self.vocab_size or 0)
        self._first, self._count = 0, size // self.dtype.itemsize
        if size == 0 or size % self.dtype.itemsize:
            raise ValueError(f"{self.path} is empty or truncated: write it again")
        if self.vocab_size and len(self) > 1 and not self.tokens[1 : 2**20 : 2].any():  # the upper halves of wider integers
            raise ValueError(f"{self.path} holds wider integers than {self.dtype}: write it again as np.{self.dtype}")
        return np.zeros(256, dtype="<i4")

    def _check_ids(self, tokens: np.ndarray) -> None:
        if self.vocab_size is not None and len(tokens) and tokens.max() >= self.vocab_size:
            wrong = f"{self.path} holds token {tokens.max()}, outside the vocabulary of {self.vocab_size}"
            raise ValueError(f"{wrong}: set data.tokenizer.name to the tokenizer that wrote it")


class TextTokens:
    """Tokens (n,) in memory, read as a shard is. sha256: of their text; documents (n,): the number of each token's document."""

    def __init__(self, tokens: np.ndarray, sha256: str = "", documents: np.ndarray | None = None) -> None:
        self.tokens, self.sha256, self.documents = tokens, sha256, documents

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.tokens[start:stop].astype(np.int64)


def read_meta(folder: str | Path) -> dict | None:
    """`meta.json` of a prepared folder, or None for a folder without it (foreign shards). ValueError: it is damaged."""
    path = Path(folder) / META
    return read_json_object(path, AGAIN) if path.is_file() else None


def open_split(
    folder: str | Path, split: str, *, vocab_size: int | None = None, fingerprint: str | None = None, verify: bool = False
) -> list[Shard]:
    """The shards of one split of a prepared folder, in order; without meta.json, the .bin files whose names say the split (a
    name that says both is of the last: pretrain_val_000.bin). Raises FileNotFoundError or ValueError.
    """
    folder = Path(folder)
    if meta := read_meta(folder):
        paths = [folder / shard["file"] for shard in meta.get("splits", {}).get(split, {}).get("shards", [])]
        fingerprint = fingerprint or meta.get("tokenizer", {}).get("fingerprint")
        if not paths and split == "val":
            fix = "prepare as another data.name=NAME with a larger data.val_fraction"
            raise ValueError(f"{folder} was prepared without validation text: {fix}")
    elif (folder / PROGRESS).is_file():
        again = "run python -m data.prepare again, with the same overrides"
        raise ValueError(f"the preparation of {folder} is not finished: {again}")
    elif (folder / "meta.pkl").exists():
        raise ValueError(f"{folder} has characters as tokens (nanoGPT's meta.pkl): prepare its text with data=text path=FILE")
    else:
        named = [path for path in sorted(folder.glob("*.bin")) if split in path.stem]
        paths = [path for path in named if path.stem.rfind(split) == max(map(path.stem.rfind, ("train", "val")))]
    if not paths:
        known = (ROOT / "configs" / "data" / f"{folder.name}.yaml").is_file()
        source = f"data={folder.name}" if known else "data=text path=... data.name=NAME (docs/data.md)"
        raise FileNotFoundError(f"no {split} shards in {folder}: prepare it: python -m data.prepare {source}")
    return [Shard(path, vocab_size=vocab_size, fingerprint=fingerprint, verify=verify) for path in paths]
