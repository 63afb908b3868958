"""Tokenize text into shards: python -m data.prepare data=NAME [path=FILE] [key=value ...]

  python -m data.prepare data=stdlib                          the Python installation's own English, no download
  python -m data.prepare data=shakespeare [path=FILE]         tinyshakespeare, as bytes
  python -m data.prepare data=text path=FILE data.name=mine   .txt, .jsonl, .parquet; a file, a folder or a 'glob'
  python -m data.prepare data=fineweb_edu                     or openwebtext, from the Hugging Face hub
  python -m data.prepare data=hf data.dataset=OWNER/NAME      any other data set of the hub
  python -m data.prepare data=nanogpt path=FOLDER             nanoGPT's train.bin and val.bin, without tokenizing again

Run the same command again to continue after an interruption; verify=true checks every checksum of a finished set.
The result is shards/NAME/ with train_*.bin, val_*.bin, tokenizer.json and meta.json (data.name=, data.dir= change it).
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from omegaconf import MISSING

from configs import command
from configs.files import write_atomic
from data.config import DataConfig
from data.shards import (
    META,
    PROGRESS,
    Shard,
    open_nanogpt,
    open_split,
    read_meta,
    token_dtype,
    write_shard,
)
from data.sources import Corpus, open_corpus
from data.tokenizer import FILE as TOKENIZER
from data.tokenizer import Tokenizer, build_tokenizer, load_tokenizer

VERSION = 1  # of the layout of meta.json
BPE_SAMPLE = 100_000_000  # characters of training text that a bpe vocabulary is trained on
PIECE = 2**20  # characters; longer documents are tokenized in pieces, so that all threads share one book
LONE_NEWLINE = re.compile(r"(?<=\S)\n(?=\S)")
SPLITS = ("train", "val")


@dataclass
class PrepareConfig:
    """What to prepare."""

    path: str | None = None  # short for data.path
    verify: bool = False  # check every checksum of a set that is finished
    data: DataConfig = MISSING


class Document(NamedTuple):
    text: str
    split: str
    bytes: int
    starts: bool = True  # False: continues the document before it, so no end-of-text token goes in front


class Item(NamedTuple):
    """The tokens of one document (or chunk), in the order of the source."""

    number: int
    split: str
    ids: np.ndarray | None  # None: lies wholly in shards already written
    documents: int
    bytes: int


@dataclass
class Split:
    """One split being written: the shards finished, and the tokens waiting for the next one."""

    name: str
    shards: list[dict] = field(default_factory=list)  # {"file", "tokens", "crc32", "end", "documents", "bytes"}
    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    last: tuple[int, int] = (-1, 0)  # item number in the source, tokens of it taken
    waiting: list[np.ndarray] = field(default_factory=list)
    room: int = 0  # tokens the next shard still takes

    def behind(self, shards: list[dict]) -> None:
        """Stand where the last of these finished shards ended."""
        self.shards = shards
        self.tokens = sum(shard["tokens"] for shard in shards)
        if shards:
            self.documents, self.bytes = shards[-1]["documents"], shards[-1]["bytes"]
            self.last = tuple(shards[-1]["end"])

    def summary(self) -> dict:
        shards = [{key: shard[key] for key in ("file", "tokens", "crc32")} for shard in self.shards]
        return {"tokens": self.tokens, "documents": self.documents, "bytes": self.bytes, "shards": shards}


def prepare(cfg: DataConfig, *, verify: bool = False, quiet: bool = False) -> dict:
    """Tokenize what `cfg` names into `cfg.dir` and return its meta.json; a finished set is checked and left as it is.

    Raises ValueError or FileNotFoundError in one line. Shards finished before an error or an interruption are kept, and
    the same call continues behind them.
    """
    _check(cfg)
    corpus = None if cfg.source == "nanogpt" else open_corpus(cfg)
    identity = corpus.identity if corpus else _nanogpt_identity(cfg)
    request = _request(cfg, identity)
    folder = Path(cfg.dir)
    meta = read_meta(folder)
    if meta is not None:
        _same_request(folder, meta.get("request", {}), request)
        check_folder(folder, verify=verify)
        if not quiet:
            print(f"{folder} is already prepared{' and verified' if verify else ''}: {_describe(meta)}")
        return meta
    meta = Preparation(cfg, folder, request, quiet).run(corpus)
    if not quiet:
        print(f"{folder}: {_describe(meta)}")
    return meta


def check_folder(folder: str | Path, *, verify: bool = False) -> None:
    """Open every shard that meta.json lists and compare it with what is written there; `verify` reads all of them."""
    meta = read_meta(folder)
    for split, content in meta["splits"].items():
        if not content["shards"]:
            continue
        for shard, listed in zip(open_split(folder, split, verify=verify), content["shards"], strict=True):
            if (len(shard), shard.crc32) != (listed["tokens"], listed["crc32"]):
                raise ValueError(f"{shard.path} is not the shard that {META} lists: delete {folder} and prepare again")


class Preparation:
    """One folder being filled. progress.json holds what is finished, and is replaced by meta.json at the end."""

    def __init__(self, cfg: DataConfig, folder: Path, request: dict, quiet: bool) -> None:
        self.cfg, self.folder, self.request, self.quiet = cfg, folder, request, quiet
        self.workers = cfg.workers or os.cpu_count() or 1
        self.splits = {name: Split(name, room=cfg.shard_tokens) for name in SPLITS}
        self.tokenizer: Tokenizer | None = None
        self._resume()

    def run(self, corpus: Corpus | None) -> dict:
        with ThreadPoolExecutor(self.workers) as pool:
            try:
                items = self._corpus_items(corpus, pool) if corpus else self._nanogpt_items()
                with _bar(corpus, self.cfg, self.splits, self.quiet) as tick:
                    for item in items:
                        self._add(item)
                        tick()
                        if corpus and self._enough(item):
                            break
                return self._finish()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                self._withdraw()
                raise

    # from text to items

    def _corpus_items(self, corpus: Corpus, pool: ThreadPoolExecutor) -> Iterator[Item]:
        if self.tokenizer is None:
            if self.cfg.tokenizer.name == "bpe" and not self.quiet:
                print("reading the text and training a bpe vocabulary on it", flush=True)
            self.tokenizer = build_tokenizer(self.cfg.tokenizer, _sample(corpus, self.cfg.val_fraction))
        documents = hold_out(corpus, self.cfg.val_fraction)
        first = next(documents, None)
        if first is None:
            raise ValueError(f"there is no text in {self.cfg.path or self.cfg.name}: give a source with text in it")
        self._start()
        queue: deque[tuple[Item, list]] = deque()  # tokenized by the threads, bounded in bytes, taken in order
        ahead = 0
        for number, document in enumerate(itertools.chain([first], documents)):
            item = Item(number, document.split, None, int(document.starts), document.bytes)
            queue.append((item, self._submit(pool, number, document)))
            ahead += item.bytes + 4096
            while ahead > self.workers * 4 * PIECE:
                ahead -= queue[0][0].bytes + 4096
                yield _collect(*queue.popleft())
        while queue:
            yield _collect(*queue.popleft())

    def _submit(self, pool: ThreadPoolExecutor, number: int, document: Document) -> list:
        """Start tokenizing a document; an empty list if it lies in finished shards."""
        split = self.splits[document.split]
        if number < split.last[0] or self._full(split):
            return []
        eot = [np.array([self.tokenizer.eot], dtype=np.uint32)] if document.starts else []
        return eot + [pool.submit(self.tokenizer.encode_array, piece) for piece in pieces(document.text)]

    def _nanogpt_items(self) -> Iterator[Item]:
        if self.tokenizer is None:
            self.tokenizer = build_tokenizer(self.cfg.tokenizer)
        lengths = self.tokenizer.byte_lengths()
        files = {name: open_nanogpt(Path(self.cfg.path) / f"{name}.bin", self.tokenizer.vocab_size) for name in SPLITS}
        self._start()
        for name, tokens in files.items():
            for number, start in enumerate(range(0, len(tokens), PIECE)):
                ids = tokens[start : start + PIECE]
                yield Item(number, name, ids, int((ids == self.tokenizer.eot).sum()), int(lengths[ids].sum()))

    # from items to shards

    def _full(self, split: Split) -> bool:
        return split.name == "train" and self.cfg.max_tokens is not None and split.tokens >= self.cfg.max_tokens

    def _enough(self, item: Item) -> bool:
        """max_tokens are there; reading goes on only until validation has a document too."""
        train, val = self.splits["train"], self.splits["val"]
        return self._full(train) and item.number >= train.last[0] and bool(val.tokens or not self.cfg.val_fraction)

    def _add(self, item: Item) -> None:
        """Append an item to its split, but for what a resumed split already holds or max_tokens leaves out."""
        split = self.splits[item.split]
        number, taken = split.last
        if item.number < number or self._full(split):
            return
        taken = taken if item.number == number else 0
        limit = self.cfg.max_tokens if split.name == "train" and self.cfg.max_tokens else sys.maxsize
        ids, cut = np.split(item.ids[taken:], [limit - split.tokens])
        if item.number > number:
            split.documents += item.documents
            split.bytes += item.bytes - (int(self.tokenizer.byte_lengths()[cut].sum()) if len(cut) else 0)
        while len(ids):
            part, ids = ids[: split.room], ids[split.room :]
            taken += len(part)
            self._append(split, part, (item.number, taken))

    def _append(self, split: Split, ids: np.ndarray, last: tuple[int, int]) -> None:
        split.waiting.append(ids.astype(token_dtype(self.tokenizer.vocab_size)))
        split.tokens += len(ids)
        split.room -= len(ids)
        split.last = last
        if split.room == 0:
            self._close_shard(split)

    def _close_shard(self, split: Split) -> None:
        tokens = np.concatenate(split.waiting)
        name = f"{split.name}_{len(split.shards):06d}.bin"
        vocab_size, fingerprint = self.tokenizer.vocab_size, self.tokenizer.fingerprint
        crc = write_shard(self.folder / name, tokens, vocab_size=vocab_size, fingerprint=fingerprint)
        counts = {"documents": split.documents, "bytes": split.bytes}
        split.shards.append({"file": name, "tokens": len(tokens), "crc32": crc, "end": split.last, **counts})
        split.waiting, split.room = [], self.cfg.shard_tokens
        self._save_progress()

    # the folder

    def _resume(self) -> None:
        """Take over what an interrupted preparation finished. ValueError if the folder is somebody else's."""
        path = self.folder / PROGRESS
        if not path.is_file():
            if any(self.folder.glob("*.bin")) or (self.folder / TOKENIZER).exists():
                raise ValueError(f"{self.folder} holds shards of another origin: prepare as another data.name=NAME")
            return
        try:
            progress = json.loads(path.read_text())
            request, finished = progress["request"], {name: progress["splits"][name] for name in SPLITS}
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} is damaged: delete {self.folder} and prepare the data again") from None
        _same_request(self.folder, request, self.request)
        for leftover in self.folder.glob(".*.part"):
            leftover.unlink()
        for name, shards in finished.items():
            self.splits[name].behind(list(itertools.takewhile(lambda s: (self.folder / s["file"]).is_file(), shards)))
        count = sum(len(split.shards) for split in self.splits.values())
        if count:
            self.tokenizer = load_tokenizer(self.folder)
            for shard in self.splits["train"].shards + self.splits["val"].shards:
                Shard(self.folder / shard["file"], fingerprint=self.tokenizer.fingerprint)
        if not self.quiet:
            print(f"continuing {self.folder} behind {count} finished shard{'s' if count != 1 else ''}")

    def _start(self) -> None:
        """The first thing written, once there is a tokenizer and text for it."""
        if not any(split.shards for split in self.splits.values()):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._save_progress()
            self.tokenizer.save(self.folder)

    def _save_progress(self) -> None:
        content = {"request": self.request, "splits": {name: split.shards for name, split in self.splits.items()}}
        write_atomic(self.folder / PROGRESS, _json(content))

    def _finish(self) -> dict:
        for split in self.splits.values():
            if split.waiting:
                self._close_shard(split)
        meta = {
            "version": VERSION,
            "name": self.cfg.name,
            "source": self.cfg.source,
            "tokenizer": {key: getattr(self.tokenizer, key) for key in ("name", "vocab_size", "eot", "fingerprint")},
            "splits": {name: split.summary() for name, split in self.splits.items()},
            "request": self.request,
        }
        write_atomic(self.folder / META, _json(meta))
        (self.folder / PROGRESS).unlink()
        return meta

    def _withdraw(self) -> None:
        """After an error: a folder without a single finished shard is of no use, so none is left behind."""
        if (self.folder / PROGRESS).is_file() and not any(split.shards for split in self.splits.values()):
            for name in (PROGRESS, TOKENIZER):
                (self.folder / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.folder.rmdir()


# --- documents ------------------------------------------------------------------------------------------------------


def hold_out(texts: Iterable[str], fraction: float) -> Iterator[Document]:
    """Send whole documents to train or val, by a hash of the document alone: neither order nor company matters.

    Where that would leave one of the two empty, the last document goes there. A single document is cut in two: val is
    its end, after the first int((1 - fraction) * characters) (nanoGPT's split of tinyshakespeare).
    """
    counts = dict.fromkeys(SPLITS, 0)
    held: Document | None = None
    for text in texts:
        if held:
            counts[held.split] += 1
            yield held
        content = text.encode("utf-8", "replace")
        held = Document(text, "val" if _share(content) < fraction else "train", len(content))
    if held is None:
        return
    empty = next((name for name in SPLITS if not counts[name] and (name == "train" or fraction > 0)), None)
    if sum(counts.values()) and empty:
        held = held._replace(split=empty)
    yield from [held] if sum(counts.values()) or not fraction else _cut(held.text, fraction)


def _share(content: bytes) -> float:
    """A number in [0, 1) that depends on the document alone."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8]) / 2**64


def _cut(text: str, fraction: float) -> list[Document]:
    first = int((1 - fraction) * len(text))
    if not text[:first].strip() or not text[first:].strip():
        raise ValueError(f"the only document has {len(text)} characters, too few to hold some out: give more text")
    sizes = [len(part.encode("utf-8", "replace")) for part in (text[:first], text[first:])]
    return [Document(text[:first], "train", sizes[0]), Document(text[first:], "val", sizes[1], starts=False)]


def pieces(text: str, size: int = PIECE) -> Iterator[str]:
    """Cut a long document where no tokenizer's split pattern can see it: after a lone newline within text.

    The tokens of the pieces, put together, are the tokens of the whole.
    """
    start = 0
    while len(text) - start > size:
        lone = LONE_NEWLINE.search(text, start + size)
        if lone is None:
            break
        yield text[start : lone.end()]
        start = lone.end()
    if start < len(text):
        yield text[start:]


def _sample(corpus: Corpus, fraction: float) -> Iterator[str]:
    """Training documents for a bpe vocabulary, up to BPE_SAMPLE characters."""
    characters = 0
    for document in hold_out(corpus, fraction):
        if characters < BPE_SAMPLE and document.split == "train":
            characters += len(document.text)
            yield document.text
        elif characters >= BPE_SAMPLE:
            return


def _collect(item: Item, parts: list) -> Item:
    """Wait for the tokens of an item. `parts` are arrays and futures of arrays."""
    arrays = [part if isinstance(part, np.ndarray) else part.result() for part in parts]
    return item._replace(ids=np.concatenate(arrays)) if arrays else item


# --- the request ----------------------------------------------------------------------------------------------------


def _check(cfg: DataConfig) -> None:
    if not 0 <= cfg.val_fraction < 1:
        raise ValueError(f"data.val_fraction={cfg.val_fraction} is not a share: use 0 <= data.val_fraction < 1")
    for name in ("shard_tokens", "max_tokens", "workers"):
        value = getattr(cfg, name)
        if value is not None and value < 1:
            raise ValueError(f"data.{name}={value} must be at least 1: leave it out or use data.{name}=1 or more")


def _request(cfg: DataConfig, identity: dict) -> dict:
    """Everything the shards depend on. Two preparations with equal requests write equal bytes."""
    tokenizer = {"tokenizer.name": cfg.tokenizer.name, "tokenizer.vocab_size": cfg.tokenizer.vocab_size}
    if cfg.tokenizer.path:
        tokenizer["tokenizer.path"] = cfg.tokenizer.path
    sizes = {key: getattr(cfg, key) for key in ("val_fraction", "shard_tokens", "max_tokens")}
    return {**identity, **tokenizer, **sizes}


def _same_request(folder: Path, before: dict, now: dict) -> None:
    for key in now | before:
        if before.get(key) != now.get(key):
            raise ValueError(
                f"{folder} was prepared with {key}={before.get(key)}, not {now.get(key)}: "
                f"use another data.name=NAME, or delete {folder}"
            )


def _nanogpt_identity(cfg: DataConfig) -> dict:
    folder = Path(cfg.path or "")
    if cfg.path is None or not folder.is_dir():
        raise FileNotFoundError("data=nanogpt needs the folder with train.bin and val.bin: add path=FOLDER")
    if (folder / "meta.pkl").exists():
        raise ValueError(
            f"{folder} has a character table of its own (meta.pkl): prepare its text instead with data=text path=FILE"
        )
    files = [folder / f"{name}.bin" for name in SPLITS]
    return {"source": "nanogpt"} | {file.name: file.stat().st_size if file.is_file() else None for file in files}


# --- the command ----------------------------------------------------------------------------------------------------


def _json(content: dict) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()


def _describe(meta: dict) -> str:
    parts = [
        f"{name} {split['tokens']:,} tokens, {split['bytes']:,} bytes, {split['documents']:,} documents"
        for name, split in meta["splits"].items()
    ]
    return f"{'; '.join(parts)} ({meta['tokenizer']['name']}, vocabulary {meta['tokenizer']['vocab_size']:,})"


@contextlib.contextmanager
def _bar(corpus: Corpus | None, cfg: DataConfig, splits: dict[str, Split], quiet: bool) -> Iterator[Callable[[], None]]:
    """A progress bar over max_tokens, or else over what the source can count; yields what moves it."""
    from tqdm import tqdm

    by_tokens = corpus is None or cfg.max_tokens is not None
    unit = "token" if by_tokens else corpus.unit
    total = cfg.max_tokens if by_tokens else corpus.total
    with tqdm(total=total, unit=unit, unit_scale=True, desc=cfg.name, disable=quiet or None) as bar:

        def tick() -> None:
            tokens = sum(split.tokens for split in splits.values())
            if not by_tokens:
                bar.total = corpus.total
                bar.set_postfix_str(f"{tokens / 1e6:.1f}M tokens", refresh=False)
            bar.update((splits["train"].tokens if by_tokens else corpus.done) - bar.n)

        yield tick


@command("prepare", PrepareConfig)
def main(cfg: PrepareConfig) -> None:
    try:
        prepare(cfg.data, verify=cfg.verify)
    except KeyboardInterrupt:
        print(
            f"\ninterrupted; finished shards stay in {cfg.data.dir}: run the same command to continue", file=sys.stderr
        )
        sys.exit(130)


if __name__ == "__main__":
    main()
