"""Where text comes from. A `Corpus` is an ordered stream of documents that can be read again from the start.

Nothing here shuffles: the same configuration gives the same documents in the same order, which is what lets an
interrupted preparation continue.
"""

from __future__ import annotations

import ast
import bz2
import contextlib
import glob
import gzip
import hashlib
import importlib
import inspect
import io
import json
import lzma
import os
import platform
import re
import sysconfig
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from data.config import DataConfig
from data.tokenizer import EOT

TEXT_LIMIT = 64 * 2**20  # characters; a longer .txt is cut into several documents so that memory stays bounded
NETWORK_TIMEOUT = 10  # seconds
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


class Corpus:
    """A stream of documents (non-blank strings). Iterate it as often as needed; it always starts at the beginning.

    `identity` says what the documents are, for recognising an earlier preparation. `done` of `total` `unit`s have been
    read so far (`total` None: unknown), for the progress bar.
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
    """The documents `cfg` names. ValueError or FileNotFoundError, in one line, for what is missing or misnamed."""
    sources = {"stdlib": stdlib, "shakespeare": shakespeare, "text": text_files, "hf": hugging_face}
    if cfg.source not in sources:
        raise ValueError(f"unknown data.source '{cfg.source}': use one of {', '.join(sources)}, nanogpt")
    return sources[cfg.source](cfg)


# --- stdlib: the English of the Python installation -----------------------------------------------------------------

SKIPPED = {
    "test",
    "tests",
    "idlelib",
    "idle_test",
    "site-packages",
    "dist-packages",
    "lib2to3",
    "turtledemo",
    "__pycache__",
}


def stdlib(cfg: DataConfig) -> Corpus:
    """The English of the Python installation, about 2 MB: the language reference in pydoc_data, a document per topic,
    and the docstrings of the standard library, a document per module. Sources are parsed, never imported; the text
    depends only on the Python version.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(
        (path for path in root.rglob("*.py") if SKIPPED.isdisjoint(path.relative_to(root).parts)),
        key=lambda path: path.relative_to(root).parts,
    )
    texts: list[str] = []  # parsed once: a bpe vocabulary reads them twice

    def documents(corpus: Corpus) -> Iterator[str]:
        seen: set[str] = set()
        corpus.done = len(paths)
        for path in [] if texts else paths:
            source = path.read_bytes()
            topics = path.parent.name == "pydoc_data"
            texts.extend(_topics(source) if topics else [_docstrings(source, root, path, seen)])
        yield from texts

    return Corpus({"source": "stdlib", "python": platform.python_version()}, documents, len(paths), "file")


def _topics(source: bytes) -> list[str]:
    """Values of the `topics` dictionary in pydoc_data/topics.py, without those that mostly repeat a longer one."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "topics":
            return _without_excerpts([clean(text) for _, text in sorted(ast.literal_eval(node.value).items())])
    return []


def _without_excerpts(texts: list[str]) -> list[str]:
    """`if` is a section of `compound`: keeping both would put the same text on both sides of the split."""
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
    except (SyntaxError, ValueError):  # templates and the like
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


# --- shakespeare ----------------------------------------------------------------------------------------------------


def shakespeare(cfg: DataConfig) -> Corpus:
    """char-rnn's tinyshakespeare (1,115,394 characters, one document), from `cfg.path` or downloaded."""
    if cfg.path is None:
        return Corpus(_shakespeare_identity(SHAKESPEARE_SHA256), lambda corpus: iter([_download_shakespeare()]), None)
    path = Path(cfg.path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: give path=FILE, or leave it out to download")
    content = path.read_bytes()
    text = _decode(content, path)
    return Corpus(_shakespeare_identity(hashlib.sha256(content).hexdigest()), lambda corpus: iter([text]), None)


def _shakespeare_identity(sha256: str) -> dict:
    return {"source": "shakespeare", "sha256": sha256}


def _download_shakespeare() -> str:
    try:
        with urllib.request.urlopen(SHAKESPEARE_URL, timeout=NETWORK_TIMEOUT) as response:
            content = response.read()
    except OSError as error:
        raise ValueError(
            f"cannot download tinyshakespeare ({_brief(error)}): give a local copy with path=FILE"
        ) from None
    if hashlib.sha256(content).hexdigest() != SHAKESPEARE_SHA256:
        raise ValueError(f"{SHAKESPEARE_URL} is not tinyshakespeare any more: give a local copy with path=FILE")
    return content.decode()


# --- text: local files ----------------------------------------------------------------------------------------------

KINDS = (".txt", ".jsonl", ".parquet")
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")


def text_files(cfg: DataConfig) -> Corpus:
    """Local .txt, .jsonl and .parquet files, plain or .gz, .bz2, .xz, .zst, in order of name. `cfg.path` is a file, a
    folder (with everything below it) or a glob; `cfg.column` is the key or column that holds the text.

    A .txt file is one document, or several where it has <|endoftext|> between them; one beyond 64M characters is cut.
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
                for text in _documents_of(path, raw, cfg.column):
                    corpus.done = before + min(raw.tell(), size)
                    yield text
            before += size

    identity = {"source": "text", "column": cfg.column, "files": len(files), "bytes": sum(sizes), "sha256": digest}
    return Corpus(identity, documents, sum(sizes))


def _find(path: str) -> list[Path]:
    found = [Path(path)] if Path(path).exists() else [Path(name) for name in glob.glob(path, recursive=True)]
    files = [
        file for item in found for file in (sorted(item.rglob("*")) if item.is_dir() else [item]) if file.is_file()
    ]
    if not files:
        raise FileNotFoundError(f"no file, folder or glob {path}: correct path=")
    known = sorted({file for file in files if is_text(file)})
    if not known:
        raise ValueError(f"no text in {path}: path= takes {', '.join(KINDS)} files, plain or {', '.join(COMPRESSIONS)}")
    return known


def is_text(path: Path) -> bool:
    """Whether a file's name is that of a text we read: .txt, .jsonl or .parquet, plain or compressed."""
    return _kind(path) in KINDS


def _kind(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return "".join(suffixes[-2:-1] if suffixes and suffixes[-1] in COMPRESSIONS else suffixes[-1:])


def _head(path: Path) -> str:
    """Digest of the first MiB: tells two files of one name and size apart."""
    with path.open("rb") as file:
        return hashlib.sha256(file.read(2**20)).hexdigest()


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what decompressors and decoders raise into one line that names the file."""
    try:
        yield
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile):
        raise ValueError(f"{path} is truncated or not what its name says: copy it again") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text: convert it first, e.g. with iconv -t utf-8") from None


def _documents_of(path: Path, raw: BinaryIO, column: str) -> Iterator[str]:
    if _kind(path) == ".parquet":
        return _parquet(path, raw, column)
    stream = _decompressed(path, raw)
    return _jsonl(path, stream, column) if _kind(path) == ".jsonl" else _plain(stream)


def _decompressed(path: Path, raw: BinaryIO) -> BinaryIO:
    suffix = path.suffix.lower()
    if suffix == ".zst":
        zstandard = need("zstandard", f"reading {path.name}")
        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True))
    opener = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.get(suffix)
    return opener(raw, "rb") if opener else raw


def _plain(stream: BinaryIO) -> Iterator[str]:
    reader = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    buffer, separated = "", False
    while block := reader.read(2**22):
        *parts, buffer = (buffer + block).split(EOT)
        separated = separated or bool(parts)
        yield from (part.strip("\r\n") for part in parts)
        if len(buffer) > TEXT_LIMIT:
            cut = buffer.rfind("\n") + 1 or TEXT_LIMIT
            yield buffer[:cut]
            buffer = buffer[cut:]
    yield buffer.strip("\r\n") if separated else buffer


def _jsonl(path: Path, stream: BinaryIO, column: str) -> Iterator[str]:
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            raise ValueError(f"{path} line {number} is not JSON: mend it, or give another path=") from None
        keys = record if isinstance(record, dict) else {}
        text = keys.get(column)
        if not hasattr(text, "strip"):
            raise ValueError(
                f"{path} line {number} has no text under '{column}' (it has {', '.join(keys) or 'no keys'}): "
                "use data.column=KEY"
            )
        yield text


def _parquet(path: Path, raw: BinaryIO, column: str) -> Iterator[str]:
    parquet = need("pyarrow.parquet", f"reading {path.name}")
    try:
        file = parquet.ParquetFile(raw)
    except Exception as error:  # pyarrow's own hierarchy
        raise ValueError(f"{path} is not a parquet file ({_brief(error)}): copy it again") from error
    names = file.schema_arrow.names
    if column not in names:
        raise ValueError(f"{path} has no column '{column}': use data.column= one of {', '.join(names)}")
    for batch in file.iter_batches(batch_size=1024, columns=[column]):
        yield from (text for text in batch.column(0).to_pylist() if text)


# --- hf: the Hugging Face hub ---------------------------------------------------------------------------------------


def hugging_face(cfg: DataConfig) -> Corpus:
    """Any data set of the Hugging Face hub: `cfg.dataset`, `cfg.subset`, `cfg.split`, `cfg.column`, streamed or not."""
    if not cfg.dataset:
        raise ValueError("data=hf needs a data set: add data.dataset=OWNER/NAME")

    def documents(corpus: Corpus) -> Iterator[str]:
        rows = _load(cfg)
        info = rows.info.splits or {}
        corpus.total = info[cfg.split].num_examples if cfg.split in info else None
        rows = rows.select_columns(cfg.column)
        try:
            for number, row in enumerate(rows, 1):
                corpus.done = number
                yield row[cfg.column] or ""
        except Exception as error:  # as in _load
            raise ValueError(f"lost {cfg.dataset} ({_brief(error)}): run the same command again to resume") from error

    identity = {"source": "hf", "dataset": cfg.dataset, "subset": cfg.subset, "split": cfg.split, "column": cfg.column}
    return Corpus(identity, documents, None, "document")


def _load(cfg: DataConfig):
    datasets = need("datasets", f"data.dataset={cfg.dataset}")
    offline = os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")
    if not offline:
        _reach_hub()
    instead = "or use local files: data=text path=FILE"
    try:
        rows = datasets.load_dataset(cfg.dataset, cfg.subset, split=cfg.split, streaming=cfg.streaming)
    except Exception as error:  # datasets, hub and http libraries each have their own hierarchy
        what = f"cannot load data set {cfg.dataset} ({_brief(error)})"
        raise ValueError(f"{what}: check data.dataset, data.subset and data.split, {instead}") from error
    names = rows.column_names
    if names is not None and cfg.column not in names:
        raise ValueError(f"{cfg.dataset} has no column '{cfg.column}': use data.column= one of {', '.join(names)}")
    return rows


def _reach_hub() -> None:
    """The libraries below retry an unreachable hub for minutes; ask once, quickly, first."""
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=NETWORK_TIMEOUT).close()
    except urllib.error.HTTPError:
        pass  # it answered
    except (OSError, ValueError) as error:
        raise ValueError(
            f"cannot reach {endpoint} ({_brief(error)}): use local files with data=text path=FILE, "
            "or HF_HUB_OFFLINE=1 for a data set already downloaded"
        ) from None


# --- shared ---------------------------------------------------------------------------------------------------------


def need(module: str, what: str):
    """Import an optional package where it is used; ValueError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".")[0]
        raise ValueError(f"{what} needs the package '{package}': pip install {package}") from None


def _decode(content: bytes, path: Path) -> str:
    with _readable(path):
        text = content.decode("utf-8-sig")
    if not text.strip():
        raise ValueError(f"{path} is empty: give path= a file with text in it")
    return text


def _brief(error: BaseException) -> str:
    """First line of an error, for quoting inside another."""
    reason = getattr(error, "reason", None) or error
    lines = str(reason).strip().splitlines()
    return lines[0][:160] if lines else type(error).__name__
