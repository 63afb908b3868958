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
import itertools
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from omegaconf import MISSING

from configs import check_ranges, command
from configs.files import LOCK, FolderLock, read_json_object, remove_leftovers, write_json
from data.config import DataConfig
from data.holdout import Document, HoldOut, measure
from data.identity import refuse_other_request, request_of
from data.shards import META, PROGRESS, Shard, open_nanogpt, open_split, read_meta, token_dtype, write_shard
from data.sources import Corpus, nanogpt_identity, open_corpus
from data.tokenizer import FILE as TOKENIZER
from data.tokenizer import PIECE, Tokenizer, build_tokenizer, load_tokenizer, pieces

VERSION = 1  # of the layout of meta.json
BPE_SAMPLE = 100_000_000  # characters of training text that a bpe vocabulary is trained on
SPLITS = ("train", "val")
MEASURED = 2**26  # bytes of text that are always measured before it is split
LINE_EVERY = 10.0  # seconds between two lines of progress if the output is not a terminal


@dataclass
class PrepareConfig:
    """What to prepare."""

    path: str | None = None  # short for data.path
    verify: bool = False  # check every checksum of a set that is finished
    data: DataConfig = MISSING


class Item(NamedTuple):
    """The tokens of a document or of its next piece, in the order of the source."""

    number: int  # of the document; of nanoGPT's files: of the piece
    split: str
    ids: np.ndarray


@dataclass
class Split:
    """One split being written: the shards finished, and the tokens waiting for the next one."""

    name: str
    shards: list[dict] = field(default_factory=list)  # {"file", "tokens", "crc32", "end", "documents", "bytes"}
    tokens: int = 0
    documents: int = 0
    bytes: int = 0
    end: tuple[int, int] = (-1, 0)  # number of the last document, and how many of its tokens are taken
    waiting: list[np.ndarray] = field(default_factory=list)
    held: int = 0  # tokens of that document which the finished shards hold, and which a resumed preparation meets again

    def resume_after(self, shards: list[dict]) -> None:
        """Continue after the last of these finished shards."""
        if shards:
            self.shards, last = shards, shards[-1]
            self.tokens = sum(shard["tokens"] for shard in shards)
            self.documents, self.bytes, self.end = last["documents"], last["bytes"], tuple(last["end"])
            self.held = self.end[1]

    def summary(self) -> dict:
        shards = [{key: shard[key] for key in ("file", "tokens", "crc32")} for shard in self.shards]
        return {"tokens": self.tokens, "documents": self.documents, "bytes": self.bytes, "shards": shards}


def prepare(cfg: DataConfig, *, verify: bool = False) -> dict:
    """Tokenize what `cfg` names into `cfg.dir` and return its meta.json; a finished set is checked and left as it is.

    Raises ValueError or FileNotFoundError in one line. Shards finished before an error or an interruption are kept, and
    the same call continues after them.
    """
    check_ranges(cfg, "data")
    corpus = None if cfg.source == "nanogpt" else open_corpus(cfg)
    identity = corpus.identity if corpus else nanogpt_identity(cfg)
    request = request_of(cfg, identity)
    folder = Path(cfg.dir)
    meta, before = read_meta(folder), ""
    if meta is None:
        meta = Preparation(cfg, folder, request).run(corpus)
    else:
        refuse_other_request(folder, meta.get("request"), request)
        check_folder(folder, verify=verify)
        before = " is already prepared and verified" if verify else " is already prepared"
    print(f"{folder}{before}: {_describe(meta)}")
    return meta


def check_folder(folder: str | Path, *, verify: bool = False) -> None:
    """Open every shard that meta.json lists and compare it with its entry; `verify` reads every shard whole."""
    meta = read_meta(folder)
    for split, content in meta["splits"].items():
        shards = open_split(folder, split, verify=verify) if content["shards"] else []
        for shard, listed in zip(shards, content["shards"], strict=True):
            if (len(shard), shard.crc32) != (listed["tokens"], listed["crc32"]):
                raise ValueError(f"{shard.path} is not the shard that {META} lists: delete {folder} and prepare again")


class Preparation:
    """Fills one folder. progress.json lists the finished shards; meta.json replaces it at the end."""

    def __init__(self, cfg: DataConfig, folder: Path, request: dict) -> None:
        self.cfg, self.folder, self.request = cfg, folder, request
        self.workers = cfg.workers or os.cpu_count() or 1
        self.splits = {name: Split(name) for name in SPLITS}
        self.tokenizer: Tokenizer | None = None
        self.lock: FolderLock | None = None
        self._resume()

    def run(self, corpus: Corpus | None) -> dict:
        with ThreadPoolExecutor(self.workers) as pool:
            try:
                items = self._corpus_items(corpus, pool) if corpus else self._nanogpt_items()
                with _progress(corpus, self.cfg, self.splits) as tick:
                    for item in items:
                        self._add(item)
                        tick()
                        if corpus and self._enough(item.number):
                            break
                return self._finish()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                self._remove_if_empty()
                raise
            finally:
                if self.lock:
                    self.lock.release()

    # from text to items

    def _corpus_items(self, corpus: Corpus, pool: ThreadPoolExecutor) -> Iterator[Item]:
        print("reading the text to choose the validation documents", flush=True)
        # A token of English has about four bytes; a long text is measured no further than max_tokens tokens reach.
        limit = max(MEASURED, 4 * self.cfg.max_tokens) if self.cfg.max_tokens else math.inf
        split: HoldOut = measure(corpus, self.cfg.val_fraction, limit)
        documents = split.documents(corpus)
        first = next(documents, None)
        if first is None:
            raise ValueError(f"there is no text in {self.cfg.path or self.cfg.name}: give a source with text in it")
        if self.tokenizer is None:
            if self.cfg.tokenizer.name == "bpe":
                print("training a bpe vocabulary on the text", flush=True)
            self.tokenizer = build_tokenizer(self.cfg.tokenizer, _sample(split.documents(corpus)))
        self._start()
        queue: deque[tuple] = deque()  # the threads tokenize these; `ahead` bounds their characters
        ahead = 0
        for number, document in enumerate(itertools.chain([first], documents)):
            split = self.splits[document.split]
            known = number < split.end[0] or self._full(split)  # then an item without tokens stands for it
            for index, text in enumerate([""] if known else pieces(document.text)):
                begins = document.starts and not known and index == 0
                queue.append((len(text) + 4096, number, document.split, pool.submit(self._tokenize, number, text, begins)))
                ahead += queue[-1][0]
                while ahead > self.workers * 4 * PIECE:
                    size, *item, ids = queue.popleft()
                    ahead -= size
                    yield Item(*item, ids.result())
        yield from (Item(*item, ids.result()) for _, *item, ids in queue)

    def _tokenize(self, number: int, text: str, begins: bool) -> np.ndarray:
        try:
            ids = self.tokenizer.encode_array(text)
        except ValueError as error:  # the split pattern failed, on a million blanks for instance
            wrong = f"document {number + 1} cannot be tokenized ({error})"
            raise ValueError(f"{wrong}: take it out of the source, or use data.tokenizer.name=bytes") from None
        return np.concatenate((np.array([self.tokenizer.eot], ids.dtype), ids)) if begins else ids

    def _nanogpt_items(self) -> Iterator[Item]:
        if self.tokenizer is None:
            self.tokenizer = build_tokenizer(self.cfg.tokenizer)
        files = {name: open_nanogpt(Path(self.cfg.path) / f"{name}.bin", self.tokenizer.vocab_size) for name in SPLITS}
        self._start()
        for name, tokens in files.items():
            for number, start in enumerate(range(0, len(tokens), PIECE)):
                yield Item(number, name, tokens[start : start + PIECE])

    # from items to shards

    def _full(self, split: Split) -> bool:
        return split.name == "train" and self.cfg.max_tokens is not None and split.tokens >= self.cfg.max_tokens

    def _enough(self, number: int) -> bool:
        """Whether training has max_tokens and validation has a document, once document `number` is read."""
        known = number >= max(split.end[0] for split in self.splits.values())  # finished shards hold nothing of later ones
        return self._full(self.splits["train"]) and known and bool(self.splits["val"].tokens or not self.cfg.val_fraction)

    def _add(self, item: Item) -> None:
        """Append an item to its split, without tokens that a resumed split already holds or that exceed max_tokens."""
        split = self.splits[item.split]
        if item.number < split.end[0] or self._full(split):
            return
        ids = item.ids[split.held :]
        split.held -= len(item.ids) - len(ids)
        if split.name == "train" and self.cfg.max_tokens:
            ids = ids[: self.cfg.max_tokens - split.tokens]
        taken = split.end[1] if item.number == split.end[0] else 0
        while len(ids):
            part, ids = np.split(ids, [self.cfg.shard_tokens - split.tokens % self.cfg.shard_tokens])
            taken += len(part)
            split.waiting.append(part.astype(token_dtype(self.tokenizer.vocab_size)))
            split.tokens += len(part)
            split.documents += int((part == self.tokenizer.eot).sum())
            split.bytes += int(self.lengths[part].sum())
            split.end = item.number, taken
            if split.tokens % self.cfg.shard_tokens == 0:
                self._close_shard(split)

    def _close_shard(self, split: Split) -> None:
        name = f"{split.name}_{len(split.shards):06d}.bin"
        vocab_size, fingerprint = self.tokenizer.vocab_size, self.tokenizer.fingerprint
        crc = write_shard(self.folder / name, *split.waiting, vocab_size=vocab_size, fingerprint=fingerprint)
        counts = {"documents": split.documents, "bytes": split.bytes}
        tokens = sum(map(len, split.waiting))
        split.shards.append({"file": name, "tokens": tokens, "crc32": crc, "end": split.end, **counts})
        split.waiting = []
        self._save_progress()

    # the folder

    def _resume(self) -> None:
        """Take over the shards that an interrupted preparation finished. ValueError: the folder has another origin."""
        path = self.folder / PROGRESS
        if not path.is_file():
            if any(self.folder.glob("*.bin")) or (self.folder / TOKENIZER).exists():
                raise ValueError(f"{self.folder} holds shards of another origin: prepare as another data.name=NAME")
            return
        progress = read_json_object(path, f"delete {self.folder} and prepare the data again")
        refuse_other_request(self.folder, progress.get("request"), self.request)
        for name, split in self.splits.items():
            there = itertools.takewhile(lambda shard: (self.folder / shard["file"]).is_file(), progress["splits"][name])
            split.resume_after(list(there))
        count = sum(len(split.shards) for split in self.splits.values())
        if count:
            self.tokenizer = load_tokenizer(self.folder)
            for shard in self.splits["train"].shards + self.splits["val"].shards:
                Shard(self.folder / shard["file"], fingerprint=self.tokenizer.fingerprint)
        self._take_lock(META)
        print(f"continuing {self.folder} after {count} finished shard{'s' if count != 1 else ''}", flush=True)

    def _take_lock(self, *files: str) -> None:
        """Keep other processes out of the folder. ValueError if one prepares it, or has meanwhile written one of `files`."""
        lock = FolderLock(self.folder, "prepares it")
        if any((self.folder / name).exists() for name in files):
            raise ValueError(f"another process has prepared {self.folder} meanwhile: run the same command again")
        remove_leftovers(self.folder)
        self.lock = lock

    def _start(self) -> None:
        """Write progress.json and the tokenizer, once there is a tokenizer and a first text."""
        if not self.lock:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._take_lock(META, PROGRESS)
        self.lengths = self.tokenizer.byte_lengths()
        if not any(split.shards for split in self.splits.values()):
            self._save_progress()
            self.tokenizer.save(self.folder)

    def _save_progress(self) -> None:
        content = {"request": self.request, "splits": {name: split.shards for name, split in self.splits.items()}}
        write_json(self.folder / PROGRESS, content)

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
        write_json(self.folder / META, meta)
        (self.folder / PROGRESS).unlink()
        (self.folder / LOCK).unlink()
        return meta

    def _remove_if_empty(self) -> None:
        """After an error, remove the folder if it has no finished shard."""
        if self.lock and not any(split.shards for split in self.splits.values()):
            for name in (PROGRESS, TOKENIZER, LOCK):
                (self.folder / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.folder.rmdir()


def _sample(documents: Iterable[Document]) -> Iterator[str]:
    """Training documents for a bpe vocabulary, up to BPE_SAMPLE characters."""
    characters = 0
    for document in documents:
        if characters >= BPE_SAMPLE:
            return
        if document.split == "train":
            characters += len(document.text)
            yield document.text


# --- the command ----------------------------------------------------------------------------------------------------


def _describe(meta: dict) -> str:
    splits, tokenizer = meta["splits"], meta["tokenizer"]
    parts = [
        f"{name} {split['tokens']:,} tokens, {split['bytes']:,} bytes, {split['documents']:,} documents"
        for name, split in splits.items()
    ]
    share = splits["val"]["bytes"] / max(1, sum(split["bytes"] for split in splits.values()))
    request = meta["request"]
    by = "val.bin" if request["source"] == "nanogpt" else f"data.val_fraction={request['val_fraction']:g}"
    parts.append(f"held out {share:.2%} of the bytes ({by}) ({tokenizer['name']}, vocabulary {tokenizer['vocab_size']:,})")
    return "; ".join(parts)


@contextlib.contextmanager
def _progress(corpus: Corpus | None, cfg: DataConfig, splits: dict[str, Split]) -> Iterator[Callable[[], None]]:
    """A progress bar over max_tokens, or else over the source's unit; lines of text if the output is not a terminal.

    Yields the function that updates it.
    """
    from tqdm import tqdm

    by_tokens = corpus is None or cfg.max_tokens is not None
    unit, printed = "token" if by_tokens else corpus.unit, time.monotonic()
    with tqdm(total=0, unit=unit, unit_scale=True, desc=cfg.name, disable=None) as bar:

        def tick() -> None:
            nonlocal printed
            tokens = sum(split.tokens for split in splits.values())
            done, total = (splits["train"].tokens, cfg.max_tokens) if by_tokens else (corpus.done, corpus.total)
            if not bar.disable:
                bar.total = total
                bar.set_postfix_str(f"{tokens / 1e6:.1f}M tokens", refresh=False)
                bar.update(done - bar.n)
            elif time.monotonic() - printed >= LINE_EVERY:
                printed = time.monotonic()
                print(f"{cfg.name}: {tokens:,} tokens" + (f", {done / total:.0%} done" if total else ""), flush=True)

        yield tick


@command("prepare", PrepareConfig)
def main(cfg: PrepareConfig) -> None:
    try:
        prepare(cfg.data, verify=cfg.verify)
    except KeyboardInterrupt:
        kept = f"finished shards stay in {cfg.data.dir}" if Path(cfg.data.dir).is_dir() else "no shard was finished"
        print(f"\ninterrupted; {kept}: run the same command to continue", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
