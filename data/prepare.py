"""Tokenize text into shards: python -m data.prepare data=NAME [path=FILE] [key=value ...]

  python -m data.prepare data=stdlib                          the English of the Python installation, no download
  python -m data.prepare data=shakespeare [path=FILE]         tinyshakespeare, as bytes
  python -m data.prepare data=text path=FILE data.name=mine   .txt, .jsonl, .parquet; a file, a folder or a 'glob'
  python -m data.prepare data=fineweb_edu                     or openwebtext, from the Hugging Face hub
  python -m data.prepare data=hf data.dataset=OWNER/NAME      any other data set of the hub

Run the same command again to continue after an interruption; verify=true checks every checksum of a finished set.
The result is shards/NAME/ with train_*.bin, val_*.bin, tokenizer.json and meta.json (data.name=, data.dir= change it).
"""

import contextlib
import itertools
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from omegaconf import MISSING

from configs import command
from configs.files import LOCK, lock_folder, read_json_object, remove_leftovers, write_json
from data.config import DataConfig
from data.holdout import Document, measure
from data.shards import AGAIN, META, PROGRESS, Shard, open_split, read_meta, token_dtype, write_shard
from data.sources import Corpus, content_of, open_corpus
from data.tokenizer import FILE as TOKENIZER
from data.tokenizer import PIECE, UNSET, Tokenizer, build_tokenizer, check_bytes, load_tokenizer, pieces

VERSION = 1  # of the layout of meta.json
BPE_SAMPLE = 100_000_000  # characters of training text that a bpe vocabulary is trained on
SPLITS = ("train", "val")
MEASURED = 2**26  # bytes of text that are always measured before it is split
LINE_EVERY = 5.0  # seconds between two lines of progress


@dataclass
class PrepareConfig:
    """What to prepare."""

    path: str | None = None  # short for data.path
    verify: bool = False  # check every checksum of a set that is finished
    data: DataConfig = MISSING


@dataclass
class Split:
    """One split being written: the shards finished, and the tokens waiting for the next one."""

    shards: list[dict] = field(default_factory=list)  # {"file", "tokens", "crc32", "end", "documents", "bytes"}
    tokens: int = 0
    documents: int = 0
    bytes: int = 0
    end: tuple[int, int] = (-1, 0)  # number of the last document, and how many of its tokens are taken
    waiting: list[np.ndarray] = field(default_factory=list)
    held: int = 0  # after a resume: tokens of that document in the finished shards, to skip when it is tokenized again


def _resumed(folder: Path, shards: list[dict]) -> Split:
    """A split to continue after the last of these shards that is still there, as all before it are."""
    shards = list(itertools.takewhile(lambda shard: (folder / shard["file"]).is_file(), shards))
    if not shards:
        return Split()
    tokens, last = sum(shard["tokens"] for shard in shards), shards[-1]
    return Split(shards, tokens, last["documents"], last["bytes"], tuple(last["end"]), held=last["end"][1])


def prepare(cfg: DataConfig, *, verify: bool = False) -> dict:
    """Tokenize what `cfg` names into `cfg.dir` and return its meta.json; a finished set is checked and left as it is."""
    if Path(cfg.name).is_absolute() or ".." in Path(cfg.name).parts:
        raise ValueError(f"data.name={cfg.name} leaves the folder of prepared sets: use a plain name and data.dir=FOLDER")
    corpus, folder = open_corpus(cfg), Path(cfg.dir)
    request = request_of(cfg, corpus.identity)
    meta, state = read_meta(folder), ""
    if meta is None:
        meta = Preparation(cfg, folder, request).run(corpus)
    else:
        refuse_other_request(folder, meta.get("request", {}), request)
        for split, content in meta["splits"].items():
            if content["shards"]:
                open_split(folder, split, verify=verify)
        state = " is already prepared and verified" if verify else " is already prepared"
    print(f"{folder}{state}: {_describe(meta)}")
    return meta


def request_of(cfg: DataConfig, identity: dict) -> dict:
    """Everything that the shards depend on and that can be seen here, which the revision of a data set on the hub cannot."""
    tokenizer = {"tokenizer.name": cfg.tokenizer.name, "tokenizer.vocab_size": cfg.tokenizer.vocab_size}
    if cfg.tokenizer.path:
        files = sorted(Path(cfg.tokenizer.path).glob("tokenizer*.json"))
        tokenizer |= {"tokenizer.path": cfg.tokenizer.path} | ({"tokenizer_content": content_of(files)} if files else {})
        tokenizer |= {"tokenizer.special": True} if cfg.tokenizer.special else {}
    sizes = {key: getattr(cfg, key) for key in ("val_fraction", "shard_tokens", "max_tokens")}
    return {**identity, **tokenizer, **sizes}


def refuse_other_request(folder: Path, before: dict, now: dict) -> None:
    """ValueError: `folder` was prepared from another source, or with other options. `before` is the request of that time.

    A fact about the source or the tokenizer that one of the two versions of this code did not write down is not compared.
    """
    for key in now | before:
        option = key.split(".")[0] in DataConfig.__dataclass_fields__
        then, ours = (UNSET.get(key) if (value := request.get(key)) is None else value for request in (before, now))
        if then == ours or not (option or (key in before and key in now)):
            continue
        wrong = f"the source has changed since {folder} was prepared ({key} {then} then, {ours} now)"
        if option:
            wrong = f"{folder} was prepared with data.{key}={then}, not {ours}"
        raise ValueError(f"{wrong}: use another data.name=NAME")


class Preparation:
    """Fills one folder. progress.json lists the finished shards; meta.json replaces it at the end."""

    def __init__(self, cfg: DataConfig, folder: Path, request: dict) -> None:
        self.cfg, self.folder, self.request = cfg, folder, request
        self.workers = cfg.workers or os.cpu_count() or 1
        self.splits = {name: Split() for name in SPLITS}
        self.tokenizer: Tokenizer | None = None
        self._resume()
        folder.mkdir(parents=True, exist_ok=True)
        self.lock = lock_folder(folder, "prepares it")
        remove_leftovers(folder)

    def run(self, corpus: Corpus) -> dict:
        """Write the shards of `corpus` that are missing, then meta.json; returns its content."""
        pool, printed = ThreadPoolExecutor(self.workers), time.monotonic()
        try:
            for number, split, ids in self._items(corpus, pool):
                self._add(number, split, ids)
                if time.monotonic() - printed >= LINE_EVERY:
                    printed = time.monotonic()
                    print(f"{self.cfg.name}: {sum(split.tokens for split in self.splits.values()):,} tokens", flush=True)
                if self._enough(number):
                    break
            if corpus.blank:
                print(f"left out {corpus.blank:,} documents without text", flush=True)
            return self._finish()
        finally:
            pool.shutdown(cancel_futures=True)
            self.lock.close()
            if not self._finished():  # an error before the first shard leaves no folder
                for name in (PROGRESS, TOKENIZER, LOCK):
                    (self.folder / name).unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    self.folder.rmdir()

    def _items(self, corpus: Corpus, pool: ThreadPoolExecutor) -> Iterator[tuple[int, str, np.ndarray]]:
        """(number of the document, its split, its next tokens), in order."""
        print("reading the text to choose the validation documents", flush=True)
        # A token of English has about four bytes; a long text is measured no further than max_tokens tokens reach.
        limit = max(MEASURED, 4 * self.cfg.max_tokens) if self.cfg.max_tokens else math.inf
        hold_out = measure(corpus, self.cfg.val_fraction, limit)
        documents = hold_out.documents(corpus)
        first = next(documents, None)
        if first is None:
            raise ValueError(f"there is no text in {self.cfg.path or self.cfg.name}: give a source with text in it")
        self.tokenizer = self.tokenizer or self._build_tokenizer(first.text[:PIECE], hold_out.documents(corpus))
        self.lengths = self.tokenizer.byte_lengths()
        queue: deque[tuple] = deque()  # the threads tokenize these; `ahead` bounds their characters
        ahead = 0
        for number, document in enumerate(itertools.chain([first], documents)):
            known = number < self.splits[document.split].end[0] or self._full(document.split)
            for index, text in enumerate([""] if known else pieces(document.text)):
                begins = document.starts and not known and index == 0
                queue.append((number, document.split, len(text), pool.submit(self._tokenize, number, text, begins)))
                ahead += len(text) + 4096
                while ahead > self.workers * 4 * PIECE:
                    done, split, size, ids = queue.popleft()
                    ahead -= size + 4096
                    yield done, split, ids.result()
        yield from ((done, split, ids.result()) for done, split, _, ids in queue)

    def _build_tokenizer(self, text: str, documents: Iterable[Document]) -> Tokenizer:
        if self.cfg.tokenizer.name == "bpe":
            print("training a bpe vocabulary on the text", flush=True)
        tokenizer = build_tokenizer(self.cfg.tokenizer, _sample(documents))
        if tokenizer.name == "hf":
            check_bytes(tokenizer, text)
            if tokenizer.decode(tokenizer.encode(text)).strip() != text.strip():
                print("note: this tokenizer changes the text, for example its case: a model will not see the original")
        return tokenizer

    def _tokenize(self, number: int, text: str, begins: bool) -> np.ndarray:
        try:
            ids = self.tokenizer.encode_array(text)
        except ValueError as error:  # the split pattern failed, on a million blanks for instance
            wrong = f"document {number + 1} cannot be tokenized ({error})"
            raise ValueError(f"{wrong}: take it out of the source, or use data.tokenizer.name=bytes") from None
        return np.concatenate((np.array([self.tokenizer.eot], ids.dtype), ids)) if begins else ids

    def _full(self, split: str) -> bool:
        return split == "train" and self.cfg.max_tokens is not None and self.splits[split].tokens >= self.cfg.max_tokens

    def _enough(self, number: int) -> bool:
        """Whether training has max_tokens and validation has a document, once document `number` is read."""
        known = number >= max(split.end[0] for split in self.splits.values())  # finished shards hold nothing of later ones
        return self._full("train") and known and bool(self.splits["val"].tokens or not self.cfg.val_fraction)

    def _add(self, number: int, name: str, ids: np.ndarray) -> None:
        """Append tokens to a split, without those that a finished shard already holds or that exceed max_tokens."""
        split = self.splits[name]
        held, split.held = split.held, max(0, split.held - len(ids))
        ids = ids[held:]
        if name == "train" and self.cfg.max_tokens:
            ids = ids[: self.cfg.max_tokens - split.tokens]
        taken = split.end[1] if number == split.end[0] else 0
        while len(ids):
            part, ids = np.split(ids, [self.cfg.shard_tokens - split.tokens % self.cfg.shard_tokens])
            taken += len(part)
            split.waiting.append(part.astype(token_dtype(self.tokenizer.vocab_size)))
            split.tokens += len(part)
            split.documents += int((part == self.tokenizer.eot).sum())
            split.bytes += int(self.lengths[part].sum())
            split.end = number, taken
            if split.tokens % self.cfg.shard_tokens == 0:
                self._close_shard(name)

    def _close_shard(self, name: str) -> None:
        split, of = self.splits[name], self.tokenizer
        if not self._finished():
            self._save_progress()
            of.save(self.folder)
        file = f"{name}_{len(split.shards):06d}.bin"
        crc = write_shard(self.folder / file, *split.waiting, vocab_size=of.vocab_size, fingerprint=of.fingerprint)
        counts = {"tokens": sum(map(len, split.waiting)), "documents": split.documents, "bytes": split.bytes}
        split.shards.append({"file": file, "crc32": crc, "end": split.end, **counts})
        split.waiting = []
        self._save_progress()

    def _resume(self) -> None:
        """Take over the shards that an interrupted preparation finished. ValueError: the folder has another origin."""
        path = self.folder / PROGRESS
        if path.is_file():
            progress = read_json_object(path, AGAIN)
            refuse_other_request(self.folder, progress.get("request", {}), self.request)
            self.splits = {name: _resumed(self.folder, progress["splits"][name]) for name in SPLITS}
            shards = self._finished()
            self.tokenizer = load_tokenizer(self.folder) if shards else None
            for shard in shards:
                Shard(self.folder / shard["file"], fingerprint=self.tokenizer.fingerprint)
            print(f"continuing {self.folder}: {len(shards)} shards are finished", flush=True)
        elif any(self.folder.glob("*.bin")) or (self.folder / TOKENIZER).exists():
            raise ValueError(f"{self.folder} holds shards of another origin: prepare as another data.name=NAME")

    def _finished(self) -> list[dict]:
        return [shard for split in self.splits.values() for shard in split.shards]

    def _save_progress(self) -> None:
        content = {"request": self.request, "splits": {name: split.shards for name, split in self.splits.items()}}
        write_json(self.folder / PROGRESS, content)

    def _finish(self) -> dict:
        splits = {}
        for name, split in self.splits.items():
            if split.waiting:
                self._close_shard(name)
            splits[name] = {key: getattr(split, key) for key in ("tokens", "documents", "bytes")}
            splits[name]["shards"] = [{key: shard[key] for key in ("file", "tokens", "crc32")} for shard in split.shards]
        meta = {
            "version": VERSION,
            "name": self.cfg.name,
            "source": self.cfg.source,
            "tokenizer": {key: getattr(self.tokenizer, key) for key in ("name", "vocab_size", "eot", "fingerprint")},
            "splits": splits,
            "request": self.request,
        }
        write_json(self.folder / META, meta)
        (self.folder / PROGRESS).unlink()
        (self.folder / LOCK).unlink()
        return meta


def _sample(documents: Iterable[Document]) -> Iterator[str]:
    """Training documents for a bpe vocabulary, up to BPE_SAMPLE characters."""
    characters = 0
    for text in (document.text for document in documents if document.split == "train"):
        if characters >= BPE_SAMPLE:
            return
        characters += len(text)
        yield text


def _describe(meta: dict) -> str:
    splits, tokenizer = meta["splits"], meta["tokenizer"]
    sizes = "; ".join(
        f"{name} {split['tokens']:,} tokens, {split['bytes']:,} bytes, "
        + (f"{split['documents']:,} documents" if split["documents"] or not split["tokens"] else "a part of a document")
        for name, split in splits.items()
    )
    share = splits["val"]["bytes"] / max(1, sum(split["bytes"] for split in splits.values()))
    return f"{sizes}; held out {share:.2%} of the bytes ({tokenizer['name']}, vocabulary {tokenizer['vocab_size']:,})"


@command("prepare", PrepareConfig)
def main(cfg: PrepareConfig) -> None:
    try:
        prepare(cfg.data, verify=cfg.verify)
    except KeyboardInterrupt:
        print("\ninterrupted: run the same command to continue after the finished shards", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
