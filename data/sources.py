"""Where text comes from. A `Corpus` is an ordered stream of documents that can be read again from the start.

Documents are not shuffled: the same configuration gives the same documents in the same order, so an interrupted
preparation can continue.
"""

from __future__ import annotations

import bz2
import contextlib
import glob
import gzip
import hashlib
import http.client
import io
import itertools
import json
import lzma
import os
import platform
import re
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from data.config import DataConfig
from data.identity import CONTENT, content_of
from data.stdlib import stdlib_texts
from data.tokenizer import EOT, import_optional

TEXT_LIMIT = 16 * 2**20  # characters; a longer .txt is cut into several documents so that memory stays bounded
ALWAYS_ALLOWED = 2**26  # bytes that any compressed file may unpack to
NETWORK_TIMEOUT = 10  # seconds
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


class Corpus:
    """A stream of documents (non-blank strings). Iterate it as often as needed; it always starts at the beginning.

    `identity` describes the documents; it tells whether an earlier preparation read the same ones. The progress bar
    shows `done` of `total` `unit`s (`total` None: unknown).
    """

    def __init__(
        self, identity: dict, documents: Callable[[Corpus], Iterator[str]], total: int | None, unit: str = "B"
    ) -> None:
        self.identity, self._documents, self.total, self.unit = identity, documents, total, unit
        self.done = 0

    def __iter__(self) -> Iterator[str]:
        self.done = 0
        for text in self._documents(self):
            if text.strip():
                yield text


def open_corpus(cfg: DataConfig) -> Corpus:
    """The documents that `cfg` names. ValueError or FileNotFoundError: a source, file or option is missing or wrong."""
    sources = {"stdlib": stdlib, "shakespeare": shakespeare, "text": text_files, "hf": hugging_face}
    if cfg.source == "mqar":
        raise ValueError("data=mqar is generated in training: there is nothing to prepare, run train.py data=mqar")
    if cfg.source not in sources:
        raise ValueError(f"unknown data.source '{cfg.source}': use one of {', '.join(sources)}, nanogpt")
    if cfg.path is not None and cfg.source in ("stdlib", "hf"):
        fix = f"use data=text path={cfg.path or 'FILE'}, or leave path= out"
        raise ValueError(f"data.source={cfg.source} reads no path: {fix}")
    return sources[cfg.source](cfg)


def stdlib(cfg: DataConfig) -> Corpus:
    """The English of the Python installation (data/stdlib.py), parsed once however often it is read."""
    texts: list[str] = []

    def documents(corpus: Corpus) -> Iterator[str]:
        texts.extend([] if texts else stdlib_texts())
        corpus.total = len(texts)
        for corpus.done, text in enumerate(texts, 1):
            yield text

    return Corpus({"source": "stdlib", "python": platform.python_version()}, documents, None, "document")


# --- shakespeare ----------------------------------------------------------------------------------------------------


def shakespeare(cfg: DataConfig) -> Corpus:
    """char-rnn's tinyshakespeare (1,115,394 characters, one document), downloaded, or a text file `cfg.path`."""
    if cfg.path is not None:
        return text_files(cfg)
    identity = {"source": "shakespeare", "sha256": SHAKESPEARE_SHA256}
    return Corpus(identity, lambda corpus: iter([_download_shakespeare()]), None)


def _download_shakespeare() -> str:
    try:
        with urllib.request.urlopen(SHAKESPEARE_URL, timeout=NETWORK_TIMEOUT) as response:
            content = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(f"cannot download tinyshakespeare ({_brief(error)}): give a copy with path=FILE") from None
    if hashlib.sha256(content).hexdigest() != SHAKESPEARE_SHA256:
        raise ValueError(f"{SHAKESPEARE_URL} no longer has tinyshakespeare's content: give a local copy with path=FILE")
    return content.decode()


# --- text: local files ----------------------------------------------------------------------------------------------

KINDS = (".txt", ".jsonl", ".parquet")
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")


def text_files(cfg: DataConfig) -> Corpus:
    """Local .txt and .jsonl files, plain or .gz, .bz2, .xz, .zst, and .parquet files, in order of name. `cfg.path` is a
    file, a folder (with everything below it) or a glob; `cfg.column` is the key or column that holds the text.

    A .txt file is one document, or several that <|endoftext|> separates; a document of over 16M characters is cut.
    """
    if cfg.path is None:
        raise ValueError("data=text needs a file, folder or glob: add path=FILE")
    paths = _find(cfg.path)
    sizes = [path.stat().st_size for path in paths]
    if not any(sizes):
        raise ValueError(f"{cfg.path} is empty: give path= a file with text in it")
    files = [{"name": p.name, "bytes": size, "head": _head(p)} for p, size in zip(paths, sizes, strict=True)]
    digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()

    def documents(corpus: Corpus) -> Iterator[str]:
        before = 0
        for path, size in zip(paths, sizes, strict=True):
            with path.open("rb") as raw, _readable(path):
                for text in _documents_of(path, raw, cfg):
                    corpus.done = before + min(raw.tell(), size)
                    yield text
            before += size

    identity = {"source": "text", "column": cfg.column, "files": len(files), "bytes": sum(sizes), "sha256": digest}
    return Corpus(identity | {CONTENT: content_of(paths)}, documents, sum(sizes))


def _find(path: str) -> list[Path]:
    files = _matching(path)
    if not files:
        raise FileNotFoundError(f"no file, folder or glob {path}: correct path=")
    known = sorted({file for file in files if is_text(file)})
    if not known:
        raise ValueError(f"no text in {path}: path= takes {', '.join(KINDS)} files, plain or {', '.join(COMPRESSIONS)}")
    return known


def _matching(path: str, hidden: bool = False) -> list[Path]:
    """The file `path`, or all files below the folder `path`, or all files that match the glob `path`.

    Below a folder, names that begin with a dot are left out without `hidden`: editors and systems keep copies and notes
    there (.ipynb_checkpoints, ._text.txt).
    """
    found = [path] if os.path.exists(path) else glob.glob(path, recursive=True)
    known: set[str] = set()
    files = [file for item in found for file in (_below(item, hidden, known) if os.path.isdir(item) else [item])]
    return [Path(file) for file in files if os.path.isfile(file)]


def _below(folder: str, hidden: bool, known: set[str]) -> Iterator[str]:
    """All files below a folder, also behind symbolic links. known: the folders that are already read, which grows."""
    for root, folders, names in os.walk(folder, followlinks=True):
        if os.path.realpath(root) in known:  # a link to a folder above would be followed for ever
            folders.clear()
            continue
        known.add(os.path.realpath(root))
        folders[:] = sorted(name for name in folders if hidden or not name.startswith("."))
        yield from (os.path.join(root, name) for name in names if hidden or not name.startswith("."))


def is_text(path: Path) -> bool:
    """Whether the name of a file ends in .txt or .jsonl, with or without the suffix of a compression, or in .parquet."""
    return _kind(path) in KINDS and not (_kind(path) == ".parquet" != path.suffix.lower())


def _kind(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return "".join(suffixes[-2:-1] if suffixes and suffixes[-1] in COMPRESSIONS else suffixes[-1:])


def _head(path: Path) -> str:
    """Digest of the first MiB. Only sets prepared before CONTENT existed need it."""
    with path.open("rb") as file:
        return hashlib.sha256(file.read(2**20)).hexdigest()


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what decompressors and decoders raise into one line that names the file."""
    try:
        yield
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text: convert it first, e.g. iconv -f latin1 -t utf-8 FILE > NEW") from None
    except Exception as error:
        broken = isinstance(error, OSError) and error.errno is None  # only errors of gzip and bz2 have no number
        foreign = type(error).__module__.split(".")[0] == "pyarrow"
        if not (broken or foreign or isinstance(error, (EOFError, zlib.error, lzma.LZMAError))):
            raise
        raise ValueError(f"{path} is truncated or not of the format that its suffix names: copy it again") from None


def _documents_of(path: Path, raw: BinaryIO, cfg: DataConfig) -> Iterator[str]:
    most = max(ALWAYS_ALLOWED, cfg.expansion * path.stat().st_size)
    if _kind(path) == ".parquet":
        return _parquet(path, raw, cfg, most)
    stream = _decompressed(path, raw, most)
    return _jsonl(path, stream, cfg) if _kind(path) == ".jsonl" else _plain(stream)


def _decompressed(path: Path, raw: BinaryIO, most: int) -> BinaryIO:
    suffix = path.suffix.lower()
    if suffix not in COMPRESSIONS:
        return raw
    if suffix == ".zst":
        stream = import_optional("pyarrow", f"reading {path.name}").CompressedInputStream(raw, "zstd")
    else:
        stream = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}[suffix](raw, "rb")
    return io.BufferedReader(_Bounded(stream, path, most), 2**20)


class _Bounded(io.RawIOBase):
    """The bytes that `stream` unpacks. ValueError once they are more than `most`."""

    def __init__(self, stream: BinaryIO, path: Path, most: int) -> None:
        self.stream, self.path, self.left = stream, path, most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        block = self.stream.read(len(buffer))
        buffer[: len(block)] = block
        self.left -= len(block)
        if self.left < 0:
            raise _bomb(self.path)
        return len(block)


def _bomb(path: Path) -> ValueError:
    return ValueError(
        f"{path} unpacks to far more than its size, as a decompression bomb does: raise data.expansion= if you trust it"
    )


def _plain(stream: BinaryIO) -> Iterator[str]:
    reader = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    buffer, separated = "", False
    while block := reader.read(TEXT_LIMIT // 4):
        *parts, buffer = (buffer + block).split(EOT)
        separated = separated or bool(parts)
        yield from (part.strip("\r\n") for part in parts)
        if len(buffer) > TEXT_LIMIT:
            cut = buffer.rfind("\n") + 1 or TEXT_LIMIT
            yield buffer[:cut]
            buffer = buffer[cut:]
    yield buffer.strip("\r\n") if separated else buffer


def _jsonl(path: Path, stream: BinaryIO, cfg: DataConfig) -> Iterator[str]:
    for number in itertools.count(1):
        where = f"{path} line {number}"
        line = stream.readline(cfg.longest_line + 1)
        if not line:
            return
        if len(line) > cfg.longest_line:
            raise _too_long(where, cfg, "bytes")
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except UnicodeDecodeError:
            raise
        except (ValueError, RecursionError):  # RecursionError: nested too deeply
            raise ValueError(f"{where} is not JSON: correct the line, or give another path=") from None
        keys = record if isinstance(record, dict) else {}
        text = keys.get(cfg.column)
        if text is None and cfg.column in keys:  # no document, as in a column
            continue
        if not isinstance(text, str):
            has = f"a value of type {type(text).__name__}" if cfg.column in keys else _brief(", ".join(keys) or "no keys")
            raise ValueError(f"{where} has no text under '{cfg.column}' (it has {has}): use data.column=KEY")
        yield text


def _too_long(where: str, cfg: DataConfig, unit: str) -> ValueError:
    return ValueError(f"{where} is longer than {cfg.longest_line:,} {unit}: split it, or raise data.longest_line=")


def _parquet(path: Path, raw: BinaryIO, cfg: DataConfig, most: int) -> Iterator[str]:
    parquet = import_optional("pyarrow.parquet", f"reading {path.name}")
    try:
        file = parquet.ParquetFile(raw)
    except Exception as error:  # pyarrow's exceptions share no base class of Python's
        raise ValueError(f"{path} is not a parquet file ({_brief(error)}): copy it again") from error
    names = file.schema_arrow.names
    if cfg.column not in names:
        raise ValueError(f"{path} has no column '{cfg.column}': use data.column= one of {_brief(', '.join(names))}")
    _refuse_other_types(str(path), str(file.schema_arrow.field(cfg.column).type), cfg)
    if sum(file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)) > most:
        raise _bomb(path)
    file = parquet.ParquetFile(raw, read_dictionary=[cfg.column])  # keeps a repeated text in memory once
    for batch in file.iter_batches(batch_size=1024, columns=[cfg.column]):
        for cell in batch.column(0):
            text = cell.as_py() or ""
            most -= len(text)
            if most < 0:
                raise _bomb(path)
            if len(text) > cfg.longest_line:
                raise _too_long(f"a row of {path}", cfg, "characters")
            yield text


def _refuse_other_types(where: str, kind: str, cfg: DataConfig) -> None:
    if not re.fullmatch(r"(large_)?string(_view)?|dictionary<values=(large_)?string.*", kind):
        raise ValueError(f"column '{cfg.column}' of {where} holds {_brief(kind)}, not text: use data.column=NAME")


# --- hf: the Hugging Face hub ---------------------------------------------------------------------------------------


def hugging_face(cfg: DataConfig) -> Corpus:
    """A data set of the package `datasets`: of the Hugging Face hub (`cfg.dataset`, `cfg.subset`, `cfg.split`), a folder
    saved with save_to_disk, or `cfg.data_files` for a builder (json, parquet). Local data sets need no network.
    """
    if not cfg.dataset:
        raise ValueError("data=hf needs a data set: add data.dataset=OWNER/NAME, or a folder")

    def documents(corpus: Corpus) -> Iterator[str]:
        rows = _load(cfg)
        info = rows.info.splits or {}
        corpus.total = info[cfg.split].num_examples if cfg.split in info else None
        rows = rows.select_columns(cfg.column)
        try:
            for number, row in enumerate(rows, 1):
                corpus.done = number
                yield row[cfg.column] or ""
        except Exception as error:  # the libraries have no common class, see _load
            raise ValueError(f"reading {cfg.dataset} failed ({_brief(error)}): repeat this command to resume") from error

    identity = {"source": "hf", "dataset": cfg.dataset, "subset": cfg.subset, "split": cfg.split, "column": cfg.column}
    folder = cfg.dataset if Path(cfg.dataset).is_dir() else ""
    if local := os.path.join(folder, cfg.data_files or ""):
        paths = sorted(path for path in _matching(local, hidden=True) if not path.name.startswith("cache-"))
        listed = json.dumps([(path.name, path.stat().st_size) for path in paths])
        digest, shown = hashlib.sha256(listed.encode()).hexdigest(), set(_matching(local))
        content = content_of([path for path in paths if path in shown])
        identity |= {"data_files": cfg.data_files, "sha256": digest, CONTENT: content}
    return Corpus(identity, documents, None, "document")


def _load(cfg: DataConfig) -> Any:
    datasets = import_optional("datasets", f"data.dataset={cfg.dataset}")
    offline = os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")
    # Files beside OWNER/NAME lie on the hub; those beside a builder, such as json or parquet, are local.
    local = Path(cfg.dataset).is_dir() or (cfg.data_files is not None and "/" not in cfg.dataset)
    if not offline and not local:
        _reach_hub()
    instead = "or use local files: data=text path=FILE"
    try:
        if any(Path(cfg.dataset, name).is_file() for name in ("dataset_dict.json", "state.json")):
            if cfg.subset or cfg.data_files:
                raise ValueError("a folder of save_to_disk has neither subsets nor data_files")
            saved = datasets.load_from_disk(cfg.dataset)
            if cfg.split != "train" and not isinstance(saved, dict):
                raise ValueError("it was saved without splits")
            rows = saved[cfg.split] if isinstance(saved, dict) else saved
        else:
            files = {"data_files": {cfg.split: cfg.data_files}} if cfg.data_files else {}
            rows = datasets.load_dataset(cfg.dataset, cfg.subset, split=cfg.split, streaming=cfg.streaming, **files)
    except Exception as error:  # the classes of the datasets, hub and http libraries have no common one
        what = f"cannot load data set {cfg.dataset} ({_brief(error)})"
        raise ValueError(f"{what}: check data.dataset, data.subset and data.split, {instead}") from error
    names = rows.column_names
    if names is not None and cfg.column not in names:
        names = _brief(", ".join(names))
        raise ValueError(f"{cfg.dataset} has no column '{cfg.column}': use data.column= one of {names}")
    if rows.features:
        _refuse_other_types(cfg.dataset, str(getattr(rows.features[cfg.column], "dtype", "a list")), cfg)
    return rows


def _reach_hub() -> None:
    """ValueError if the hub does not answer within NETWORK_TIMEOUT; the libraries would retry for minutes."""
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=NETWORK_TIMEOUT).close()
    except urllib.error.HTTPError:
        pass  # the hub answered
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ValueError(
            f"cannot reach {endpoint} ({_brief(error)}): use local files with data=text path=FILE, "
            "or set HF_HUB_OFFLINE=1 if the data set is already downloaded"
        ) from None


# --- nanogpt: token files of another project ---------------------------------------------------------------------------


def nanogpt_identity(cfg: DataConfig) -> dict:
    """The names, sizes and content of a nanoGPT folder's files. FileNotFoundError, ValueError: it cannot be imported."""
    folder = Path(cfg.path or "")
    if cfg.path is None or not folder.is_dir():
        raise FileNotFoundError("data=nanogpt needs the folder with train.bin and val.bin: add path=FOLDER")
    if (folder / "meta.pkl").exists():
        raise ValueError(
            f"{folder} has a character table of its own (meta.pkl): prepare its text instead with data=text path=FILE"
        )
    files = [folder / f"{name}.bin" for name in ("train", "val")]
    sizes = {file.name: file.stat().st_size if file.is_file() else None for file in files}
    return {"source": "nanogpt", **sizes, CONTENT: content_of([file for file in files if file.is_file()])}


# --- shared ---------------------------------------------------------------------------------------------------------


def _brief(error: BaseException | str) -> str:
    """First line of an error or text, for quoting inside another."""
    reason = getattr(error, "reason", None) or error
    lines = str(reason).strip().splitlines()
    return lines[0][:160] if lines else type(error).__name__
