"""Where text comes from. A `Corpus` is an ordered stream of documents that can be read again from the start.

Documents are not shuffled: the same configuration gives the same documents in the same order, so an interrupted
preparation can continue.
"""

from __future__ import annotations

import bz2
import contextlib
import functools
import glob
import gzip
import hashlib
import http.client
import io
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
NETWORK_TIMEOUT = 10  # seconds
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
READ = ".txt, .jsonl, each plain or .gz, .bz2, .xz, .zst, and .parquet"
TEXT_NAME = re.compile(r".+(\.txt|\.jsonl)(\.gz|\.bz2|\.xz|\.zst)?|.+(\.parquet)", re.IGNORECASE | re.DOTALL)

Reader = Callable[["Corpus"], Iterator[tuple[int, str]]]


class Corpus:
    """A stream of documents (non-blank strings). Iterate it as often as needed; it always starts at the beginning.

    identity: describes the documents; it tells whether an earlier preparation read the same ones. read: yields documents, each
    with the number of units read so far. total: units of all documents, None: unknown.
    """

    def __init__(self, identity: dict, read: Reader, total: int | None = None, unit: str = "document") -> None:
        self.identity, self._read, self.total, self.unit = identity, read, total, unit
        self.done = 0

    def __iter__(self) -> Iterator[str]:
        for done, text in self._read(self):
            self.done = done
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
    texts = functools.cache(stdlib_texts)
    return Corpus({"source": "stdlib", "python": platform.python_version()}, lambda _: enumerate(texts(), 1))


# --- shakespeare ----------------------------------------------------------------------------------------------------


def shakespeare(cfg: DataConfig) -> Corpus:
    """char-rnn's tinyshakespeare (1,115,394 characters, one document), downloaded, or a text file `cfg.path`."""
    if cfg.path is not None:
        return text_files(cfg)
    text = functools.cache(_download_shakespeare)
    return Corpus({"source": "shakespeare", "sha256": SHAKESPEARE_SHA256}, lambda _: iter([(1, text())]))


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


def text_files(cfg: DataConfig) -> Corpus:
    """Local .txt and .jsonl files, plain or .gz, .bz2, .xz, .zst, and .parquet files, in order of name. `cfg.path` is a
    file, a folder (with everything below it) or a glob; `cfg.column` is the key or column that holds the text.

    A .txt file is one document, or several that <|endoftext|> separates; a document of over 16M characters is cut.
    """
    if cfg.path is None:
        raise ValueError("data=text needs a file, folder or glob: add path=FILE")
    paths = _texts_in(cfg.path)
    sizes = [path.stat().st_size for path in paths]
    if not any(sizes):
        raise ValueError(f"{cfg.path} is empty: give path= a file with text in it")
    heads = [{"name": path.name, "bytes": size, "head": _head(path)} for path, size in zip(paths, sizes, strict=True)]
    digest = hashlib.sha256(json.dumps(heads).encode()).hexdigest()

    def read(_: Corpus) -> Iterator[tuple[int, str]]:
        before = 0
        for path, size in zip(paths, sizes, strict=True):
            with path.open("rb") as file, _readable(path):
                for text in _documents_of(path, file, cfg.column):
                    yield before + file.tell(), text
            before += size

    identity = {"source": "text", "column": cfg.column, "files": len(paths), "bytes": sum(sizes), "sha256": digest}
    return Corpus(identity | {CONTENT: content_of(paths)}, read, sum(sizes), "B")


def _texts_in(path: str) -> list[Path]:
    files = _files_in(path)
    if not files:
        raise FileNotFoundError(f"no file, folder or glob {path}: correct path=")
    texts = [file for file in files if is_text(file)]
    if not texts:
        raise ValueError(f"no text in {path}: path= takes {READ} files")
    unpacked: dict[Path, Path] = {}  # a file without the suffix of its compression -> the file
    for file in texts:
        name = file.with_suffix("") if TEXT_NAME.fullmatch(file.name)[2] else file
        if name in unpacked:
            wrong = f"{unpacked[name]} and {file.name} look like one text twice"
            raise ValueError(f"{wrong}: remove or rename one, or give path= a glob that matches one")
        unpacked[name] = file
    return texts


def _files_in(path: str, hidden: bool = False) -> list[Path]:
    """The file `path`, or all files below the folder `path` or below what the glob `path` matches, in order of name.

    Below a folder, names that begin with a dot are left out without `hidden`: editors and systems keep copies and notes
    there (.ipynb_checkpoints, ._text.txt). Symbolic links are followed.
    """
    files: set[str] = set()
    folders_read: set[str] = set()  # a link to a folder above would be followed for ever
    for root in [path] if os.path.exists(path) else glob.glob(path, recursive=True):
        files.add(root)
        for folder, folders, names in os.walk(root, followlinks=True):
            if os.path.realpath(folder) in folders_read:
                folders.clear()
                continue
            folders_read.add(os.path.realpath(folder))
            folders[:] = sorted(name for name in folders if hidden or not name.startswith("."))
            files |= {os.path.join(folder, name) for name in names if hidden or not name.startswith(".")}
    return sorted(Path(file) for file in files if os.path.isfile(file))


def is_text(path: Path) -> bool:
    """Whether the name of a file ends in .txt or .jsonl, with or without the suffix of a compression, or in .parquet."""
    return TEXT_NAME.fullmatch(path.name) is not None


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


def _documents_of(path: Path, file: BinaryIO, column: str) -> Iterator[str]:
    text, packed, parquet = (suffix and suffix.lower() for suffix in TEXT_NAME.fullmatch(path.name).groups())
    if parquet:
        return _parquet(path, file, column)
    if packed == ".zst":
        pyarrow = import_optional("pyarrow", f"reading {path.name}")
        file = io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"), 2**20)
    elif packed:
        file = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}[packed](file, "rb")
    return _jsonl(path, file, column) if text == ".jsonl" else _plain(file)


def _plain(file: BinaryIO) -> Iterator[str]:
    reader = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
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


def _jsonl(path: Path, file: BinaryIO, column: str) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        try:
            record = json.loads(line) if line.strip() else {column: None}
        except UnicodeDecodeError:
            raise
        except ValueError:
            raise ValueError(f"{path} line {number} is not JSON: correct the line, or give another path=") from None
        record = record if isinstance(record, dict) else {}
        text = record.get(column, 0)
        if not isinstance(text, str | None):
            has = f"a value of type {type(text).__name__}" if column in record else _brief(", ".join(record) or "no keys")
            raise ValueError(f"{path} line {number} has no text under '{column}' (it has {has}): use data.column=KEY")
        yield text or ""  # null is no document, as in a column


def _parquet(path: Path, file: BinaryIO, column: str) -> Iterator[str]:
    table = import_optional("pyarrow.parquet", f"reading {path.name}").ParquetFile(file)
    _check_column(str(path), column, {field.name: str(field.type) for field in table.schema_arrow})
    for batch in table.iter_batches(batch_size=1024, columns=[column]):
        yield from (text or "" for text in batch.column(0).to_pylist())


def _check_column(where: str, column: str, types: dict[str, str]) -> None:
    """ValueError if `types` (column -> type) lacks the column, or another type than text."""
    if column not in types:
        raise ValueError(f"{where} has no column '{column}': use data.column= one of {_brief(', '.join(types))}")
    if not re.fullmatch(r"(large_)?string(_view)?|dictionary<values=(large_)?string.*", types[column]):
        raise ValueError(f"column '{column}' of {where} holds {_brief(types[column])}, not text: use data.column=NAME")


# --- hf: the Hugging Face hub ---------------------------------------------------------------------------------------


def hugging_face(cfg: DataConfig) -> Corpus:
    """A data set of the package `datasets`: of the Hugging Face hub (`cfg.dataset`, `cfg.subset`, `cfg.split`), a folder
    saved with save_to_disk, or `cfg.data_files` for a builder (json, parquet). Local data sets need no network.
    """
    if not cfg.dataset:
        raise ValueError("data=hf needs a data set: add data.dataset=OWNER/NAME, or a folder")

    def read(corpus: Corpus) -> Iterator[tuple[int, str]]:
        rows = _load(cfg)
        splits = rows.info.splits or {}
        corpus.total = splits[cfg.split].num_examples if cfg.split in splits else None
        try:
            for number, row in enumerate(rows.select_columns(cfg.column), 1):
                yield number, row[cfg.column] or ""
        except Exception as error:  # the libraries have no common class, see _load
            raise ValueError(f"reading {cfg.dataset} failed ({_brief(error)}): repeat this command to resume") from error

    identity = {"source": "hf", "dataset": cfg.dataset, "subset": cfg.subset, "split": cfg.split, "column": cfg.column}
    folder = cfg.dataset if Path(cfg.dataset).is_dir() else ""
    if local := os.path.join(folder, cfg.data_files or ""):
        paths = [path for path in _files_in(local, hidden=True) if not path.name.startswith("cache-")]
        listed = json.dumps([(path.name, path.stat().st_size) for path in paths])
        digest, shown = hashlib.sha256(listed.encode()).hexdigest(), set(_files_in(local))
        content = content_of([path for path in paths if path in shown])
        identity |= {"data_files": cfg.data_files, "sha256": digest, CONTENT: content}
    return Corpus(identity, read)


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
    if rows.features:  # a stream may not know them
        types = {name: str(getattr(feature, "dtype", "a list")) for name, feature in rows.features.items()}
        _check_column(cfg.dataset, cfg.column, types)
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
    """First line of a text, or of an error and of the error that caused it, for quoting inside another."""
    cause = error
    while getattr(cause, "__cause__", None):
        cause = cause.__cause__
    texts = [str(getattr(part, "reason", None) or part).strip() or type(part).__name__ for part in (error, cause)]
    return ": ".join(dict.fromkeys(text.splitlines()[0][:160] for text in texts))
