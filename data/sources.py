"""Where text comes from. The same configuration gives the same documents in the same order."""

import ast
import bz2
import codecs
import contextlib
import functools
import glob
import gzip
import hashlib
import http.client
import inspect
import io
import json
import lzma
import os
import platform
import re
import sysconfig
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from configs.files import naming
from data.config import DataConfig
from data.tokenizer import EOT, import_optional

WHOLE = 64 * 2**20  # bytes; files that together are no larger are compared whole
BLOCK = 2**16  # bytes
BLOCKS = 18  # of a file in a larger source: its head, its tail and 16 between them
TEXT_LIMIT = 16 * 2**20  # characters; a longer .txt is cut into several documents so that memory stays bounded
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
READ = ".txt, .jsonl, .ndjson, each plain or .gz, .bz2, .xz, .zst, and .parquet"
TEXT_NAME = re.compile(r".+(\.txt|\.jsonl|\.ndjson)(\.gz|\.bz2|\.xz|\.zst)?|.+(\.parquet)", re.IGNORECASE | re.DOTALL)
OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
BUILDERS = {".csv": "csv", ".json": "json"}  # suffixes that the package `datasets` reads
SAVED = ("dataset_dict.json", "state.json")  # what save_to_disk writes
UNREADABLE = (EOFError, OSError, zlib.error, lzma.LZMAError)  # what decompressors raise for a damaged file
SKIPPED = set("test tests idlelib idle_test site-packages dist-packages lib2to3 turtledemo __pycache__".split())


@dataclass
class Corpus:
    """A stream of documents (non-blank strings). Iterate it as often as needed; it always starts at the beginning."""

    identity: dict  # describes the documents; it tells whether an earlier preparation read the same ones
    read: Callable[[], Iterator[str]]
    blank: int = 0  # documents without text that the latest iteration has left out

    def __iter__(self) -> Iterator[str]:
        blank = 0
        for text in self.read():
            if text.strip():
                self.blank = blank
                yield text
            else:
                blank += 1
        self.blank = blank


def open_corpus(cfg: DataConfig) -> Corpus:
    """The documents that `cfg` names. ValueError or FileNotFoundError: a source, file or option is missing or wrong."""
    sources = {"stdlib": stdlib, "shakespeare": shakespeare, "text": text_files, "hf": hugging_face}
    if cfg.source == "mqar":
        raise ValueError("data=mqar is generated in training: there is nothing to prepare, run train.py data=mqar")
    if cfg.source not in sources:
        raise ValueError(f"unknown data.source '{cfg.source}': use one of {', '.join(sources)}")
    if cfg.path is not None and cfg.source in ("stdlib", "hf"):
        raise ValueError(f"data.source={cfg.source} reads no path: use data=text path={cfg.path or 'FILE'}, or leave path= out")
    return sources[cfg.source](cfg)


def stdlib(cfg: DataConfig) -> Corpus:
    """The English of the Python installation, about 2 MB, parsed once however often it is read."""
    texts = functools.cache(_stdlib_texts)
    return Corpus({"source": "stdlib", "python": platform.python_version()}, lambda: iter(texts()))


def shakespeare(cfg: DataConfig) -> Corpus:
    """char-rnn's tinyshakespeare (1,115,394 characters, one document), downloaded, or a text file `cfg.path`."""
    if cfg.path is not None:
        return text_files(cfg)
    text = functools.cache(_download_shakespeare)
    return Corpus({"source": "shakespeare", "sha256": SHAKESPEARE_SHA256}, lambda: iter([text()]))


def _download_shakespeare() -> str:
    try:
        with urllib.request.urlopen(SHAKESPEARE_URL, timeout=10) as response:
            content = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(f"cannot download tinyshakespeare ({_brief(error)}): give a copy with path=FILE") from None
    if hashlib.sha256(content).hexdigest() != SHAKESPEARE_SHA256:
        raise ValueError(f"{SHAKESPEARE_URL} no longer has tinyshakespeare's content: give a local copy with path=FILE")
    return content.decode()


def text_files(cfg: DataConfig) -> Corpus:
    """Local files: `cfg.path` is a file, folder or glob. A .txt file is one document, or several that <|endoftext|> separates.
    A single .csv or .json file, and a folder of save_to_disk, are read as `hugging_face` reads them.
    """
    if cfg.path is None:
        raise ValueError("data=text needs a file, folder or glob: add path=FILE")
    path = Path(cfg.path)
    if path.is_file() and path.suffix.lower() in BUILDERS:
        return hugging_face(replace(cfg, dataset=BUILDERS[path.suffix.lower()], data_files=cfg.path))
    if any((path / name).is_file() for name in SAVED):
        return hugging_face(replace(cfg, dataset=cfg.path))
    files = _files_in(cfg.path)
    if not files:
        raise FileNotFoundError(f"there is no file at or below {path} (hidden files do not count): correct path=")
    texts = [file for file in files if TEXT_NAME.fullmatch(file.name)]
    if not texts:
        raise ValueError(f"no text in {path}: path= takes {READ} files, or one .csv or .json file")
    _refuse_copies(texts)
    size = sum(text.stat().st_size for text in texts)

    def read() -> Iterator[str]:
        for text in texts:
            with _readable(text), text.open("rb") as file:
                yield from _documents_of(text, file, cfg.column)

    identity = {"source": "text", "column": cfg.column, "files": len(texts), "bytes": size, "content": content_of(texts)}
    return Corpus(identity, read)


def _files_in(path: str) -> list[Path]:
    """The file `path`, or all files below the folder `path` or below what the glob `path` matches, in order of name.

    Below a folder, names that begin with a dot are left out. A file that several names lead to is read once.
    """
    roots = [path] if os.path.exists(path) else glob.glob(path, recursive=True)
    below = [name for root in roots for name in glob.iglob(f"{glob.escape(root)}/**", recursive=True)]
    files: dict[str, Path] = {}
    for file in sorted(Path(name) for name in {*roots, *below} if os.path.isfile(name)):
        files.setdefault(os.path.realpath(file), file)
    return list(files.values())


def content_of(paths: Sequence[Path]) -> str:
    """Digest (32 hex digits) of what local files hold: of all bytes, or of BLOCKS even blocks per file of a large source."""
    sizes = [path.stat().st_size for path in paths]
    whole, digest = sum(sizes) <= WHOLE, hashlib.sha256()
    for path, size in zip(paths, sizes, strict=True):
        digest.update(b"%d\n" % size)
        starts: Iterable[int] = ((size - BLOCK) * i // (BLOCKS - 1) for i in range(BLOCKS))
        if whole or size <= BLOCKS * BLOCK:
            starts = range(0, size, BLOCK)
        with path.open("rb") as file:
            for start in starts:
                file.seek(start)
                digest.update(file.read(BLOCK))
    return digest.hexdigest()[:32]


def _refuse_copies(texts: list[Path]) -> None:
    """ValueError: a file and its compressed copy are both among the `texts`."""
    unpacked: dict[Path, Path] = {}  # a file without the suffix of its compression -> the file
    for file in texts:
        name = file.with_suffix("") if TEXT_NAME.fullmatch(file.name)[2] else file
        if name in unpacked:
            wrong = f"{unpacked[name]} and {file.name} look like one text twice"
            raise ValueError(f"{wrong}: remove or rename one, or give path= a glob that matches one")
        unpacked[name] = file


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what decompressors and decoders raise into one line that names the file."""
    try:
        with naming(path):
            yield
    except UnicodeDecodeError as error:
        encoding = "utf-16" if error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "latin1"
        fix = f"convert it first, e.g. iconv -f {encoding} -t utf-8 FILE > NEW"
        raise ValueError(f"{path} is not UTF-8 text: {fix}") from None
    except Exception as error:
        broken = isinstance(error, UNREADABLE) or type(error).__module__.startswith("pyarrow")
        if not broken or getattr(error, "errno", None):  # an error of the system has a number
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
        file = OPENERS[packed](file, "rb")
    return _plain(file) if text == ".txt" else _jsonl(path, file, column)


def _plain(file: BinaryIO) -> Iterator[str]:
    reader = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    buffer, separated = "", False
    while block := reader.read(TEXT_LIMIT // 4):
        if 4 * block.count("\0") > len(block):  # UTF-16 without its mark is UTF-8, too, with a NUL beside every letter
            raise UnicodeDecodeError("utf-8", codecs.BOM_UTF16_LE, 0, 1, "it is UTF-16")
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
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except UnicodeDecodeError:
            raise
        except ValueError:
            raise ValueError(f"{path} line {number} is not JSON: correct the line, or give another path=") from None
        yield _text_of(record, column, f"{path} line {number}")


def _parquet(path: Path, file: BinaryIO, column: str) -> Iterator[str]:
    table = import_optional("pyarrow.parquet", f"reading {path.name}").ParquetFile(file)
    columns = [column] if column in table.schema_arrow.names else None
    for batch in table.iter_batches(batch_size=1024, columns=columns):
        yield from (_text_of(row, column, str(path)) for row in batch.to_pylist())


def _text_of(row: Any, column: str, where: str) -> str:
    """The text of a row; null is a document without text. ValueError: the row has none under `column`."""
    row = row if isinstance(row, dict) else {}
    text = row.get(column, 0)
    if isinstance(text, str | None):
        return text or ""
    has = f"a value of type {type(text).__name__}" if column in row else _short(", ".join(row) or "no keys")
    raise ValueError(f"{where} has no text under '{column}' (it has {has}): use data.column=NAME")


def hugging_face(cfg: DataConfig) -> Corpus:
    """A data set of the package `datasets`: of the Hugging Face hub (`cfg.dataset`, `cfg.subset`, `cfg.split`), a folder
    saved with save_to_disk, or `cfg.data_files` for a builder (json, parquet). Local data sets need no network.
    """
    if not cfg.dataset:
        raise ValueError("data=hf needs a data set: add data.dataset=OWNER/NAME, or a folder")
    builder = cfg.data_files and cfg.dataset in ("arrow", "csv", "json", "parquet", "text")  # datasets prefers it to a folder
    folder = cfg.dataset if not builder and Path(cfg.dataset).is_dir() else ""
    # Files beside OWNER/NAME lie on the hub; those beside a builder, such as json or parquet, are local.
    local = os.path.join(folder, cfg.data_files or "") if folder or "/" not in cfg.dataset else ""

    options = ("dataset", "subset", "split", "column", "data_files")
    identity = {"source": "hf"} | {option: getattr(cfg, option) for option in options}
    if local:
        paths = _files_in(local)
        _refuse_copies([path for path in paths if TEXT_NAME.fullmatch(path.name)])
        identity["content"] = content_of([path for path in paths if not path.name.startswith("cache-")])
    return Corpus(identity, lambda: (_text_of(row, cfg.column, cfg.dataset) for row in _rows(cfg, local)))


def _rows(cfg: DataConfig, local: str) -> Iterator[dict]:
    datasets = import_optional("datasets", f"data.dataset={cfg.dataset}")
    try:  # the classes of the datasets, hub and http libraries have no common one
        if any(Path(cfg.dataset, name).is_file() for name in SAVED):
            saved = datasets.load_from_disk(cfg.dataset)
            rows = saved[cfg.split] if isinstance(saved, dict) else saved
        else:
            files = {"data_files": {cfg.split: cfg.data_files}} if cfg.data_files else {}
            rows = datasets.load_dataset(cfg.dataset, cfg.subset, split=cfg.split, streaming=cfg.streaming, **files)
    except Exception as error:
        fix = f"check data.dataset, data.subset and data.split, or use local files: data=text path={local or 'FILE'}"
        raise ValueError(f"cannot load data set {cfg.dataset} ({_brief(error)}): {fix}") from error
    if cfg.column in (rows.column_names or ()):  # a stream may not know them
        rows = rows.select_columns(cfg.column)
    try:
        yield from rows
    except Exception as error:
        fix = f"correct the file, or read it with data=text path={local}" if local else "repeat this command to resume"
        raise ValueError(f"reading {cfg.dataset} failed ({_brief(error)}): {fix}") from error


def _brief(error: BaseException) -> str:
    """The first lines of an error and of the error at its root, for quoting inside another."""
    root = error
    while root.__cause__:
        root = root.__cause__
    texts = [_short(str(getattr(part, "reason", None) or part).strip() or type(part).__name__) for part in (error, root)]
    return ": ".join(dict.fromkeys(texts))


def _short(text: str) -> str:
    return text.splitlines()[0][:160]


def _stdlib_texts() -> list[str]:
    """The language reference in pydoc_data, a document per topic, and the docstrings of the standard library, a document
    per module. Sources are parsed, never imported; the text depends only on the Python version.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in root.rglob("*.py") if SKIPPED.isdisjoint(path.relative_to(root).parts))
    texts: list[str] = []
    seen: set[str] = set()
    for path in paths:
        source = path.read_bytes()
        if path.parent.name != "pydoc_data":
            texts.append(_docstrings(source, root, path, seen))
        elif path.name == "topics.py":  # comments, then one dictionary
            topics = ast.literal_eval(source.decode().partition("topics = ")[2])
            texts += _without_excerpts([clean(text) for _, text in sorted(topics.items())])
    return texts


def _without_excerpts(texts: list[str]) -> list[str]:
    """`texts` without those of which longer ones repeat a quarter or more: both splits would hold it (`if` in `compound`)."""
    seen: set[str] = set()
    kept = set()
    for text in sorted(texts, key=lambda text: (-len(text), text)):
        paragraphs = [paragraph.strip() for paragraph in text.split("\n\n")]
        if sum(len(p) for p in paragraphs if p in seen) < len(text) / 4:
            kept.add(text)
        seen.update(paragraphs)
    return [text for text in dict.fromkeys(texts) if text in kept]


def _docstrings(source: bytes, root: Path, path: Path, seen: set[str]) -> str:
    """One document: the docstrings of a module in the order of its source, each under its signature."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a template, for example
        return ""
    name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    parts = []
    for title, node in _definitions(tree, name):
        text = clean(ast.get_docstring(node) or "")
        if text and text not in seen:
            seen.add(text)
            parts.append(f"{title}\n\n{text}")
    return "\n\n".join(parts)


def _definitions(node: ast.AST, name: str) -> Iterator[tuple[str, ast.AST]]:
    """(title, node) of a module, its classes and functions, nested ones after the one that holds them."""
    yield name + (f"({ast.unparse(node.args)})" if hasattr(node, "args") else ""), node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _definitions(child, f"{name}.{child.name}")


def clean(text: str) -> str:
    """Common indentation, trailing blanks, ruled lines (`====`) and runs of empty lines removed."""
    text = inspect.cleandoc(text.replace("\x08", "").replace("\x0c", ""))
    text = "\n".join(line.rstrip() for line in text.split("\n") if not re.fullmatch(r"\s*([*=~^#+\-_])\1{3,}\s*", line))
    return re.sub(r"\n{3,}", "\n\n", text).strip()
