"""Preparation: what is written, the same bytes after a kill, and validation's share."""

import errno
import hashlib
import json
import os
import random
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiktoken

from configs import files
from data import prepare as module
from data.config import DataConfig, TokenizerConfig
from data.holdout import Document, measure
from data.prepare import prepare
from data.shards import META, PROGRESS, Shard, open_split
from data.tokenizer import Tokenizer, build_tokenizer, load_tokenizer

RNG = random.Random(0)
WORDS = "the of and to in is that for it was on are as with his they at be this from have or by one had not".split()
DOCUMENTS = [f"Document {i}. " + " ".join(RNG.choices(WORDS, k=RNG.randint(5, 400))) for i in range(120)]


class Killed(BaseException):
    """Stands for the end of the process."""


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def tokens(folder: Path, split: str) -> list[int]:
    return [int(token) for shard in open_split(folder, split, verify=True) for token in shard.tokens]


@pytest.fixture
def cfg(tmp_path) -> DataConfig:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    sizes = {"val_fraction": 0.2, "shard_tokens": 5000, "workers": 2}
    return DataConfig("mine", "text", str(path), tokenizer=TokenizerConfig("bytes"), dir=str(tmp_path / "shards"), **sizes)


def test_what_is_written_and_max_tokens_is_exact(cfg, tmp_path, monkeypatch):
    meta = prepare(cfg)
    folder = Path(cfg.dir)
    assert meta == json.loads((folder / META).read_text())
    names = [shard["file"] for split in meta["splits"].values() for shard in split["shards"]]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*names, META, "tokenizer.json"])
    assert meta["tokenizer"]["fingerprint"] == load_tokenizer(folder).fingerprint
    held = {split: [d.text for d in hold_out(DOCUMENTS, 0.2) if d.split == split] for split in ("train", "val")}
    for split, texts in held.items():
        written = meta["splits"][split]
        expected = [token for text in texts for token in (256, *text.encode())]
        assert tokens(folder, split) == expected
        assert (written["tokens"], written["documents"]) == (len(expected), len(texts))
        assert written["bytes"] == sum(len(text.encode()) for text in texts)
        assert [shard["tokens"] for shard in written["shards"]][:-1] == [5000] * (len(written["shards"]) - 1)
        assert sum(shard["tokens"] for shard in written["shards"]) == len(expected)

    some = replace(cfg, dir=str(tmp_path / "some"), max_tokens=12_345)
    written = prepare(some)["splits"]["train"]
    assert written["tokens"] == 12_345 < meta["splits"]["train"]["tokens"]
    assert tokens(Path(some.dir), "train") == tokens(folder, "train")[:12_345]
    assert written["bytes"] == 12_345 - written["documents"]
    few = replace(cfg, dir=str(tmp_path / "few"), max_tokens=10)  # reads on until validation has a document
    assert prepare(few)["splits"]["val"]["documents"] == 1

    path = folder / "train_000002.bin"  # verify finds a changed byte
    content = bytearray(path.read_bytes())
    content[3000] ^= 1
    path.write_bytes(content)
    for limit, options in ((None, {}), (0, {"verify": True})):
        if limit is not None:
            monkeypatch.setattr("data.shards.CHECK_BELOW", limit)
            prepare(cfg)
        with pytest.raises(ValueError, match=r"train_000002\.bin is corrupted"):
            prepare(cfg, **options)


def kill_after(monkeypatch, writes: int) -> None:
    """Let the process end when it is about to write a file, `writes` files after the start."""
    real, count = files.write_atomic, iter(range(10**6))

    def write(*args):
        if next(count) >= writes:
            raise Killed
        real(*args)

    monkeypatch.setattr(files, "write_atomic", write)
    monkeypatch.setattr("data.shards.write_atomic", write)


def test_resume_after_a_kill_at_any_point_is_byte_identical(cfg, tmp_path, monkeypatch):
    """On another number of threads, too; and a lost shard is made again with those after it."""
    cfg = replace(cfg, max_tokens=30_001, shard_tokens=14_000, tokenizer=TokenizerConfig("bpe", 280))
    whole = replace(cfg, dir=str(tmp_path / "whole"), workers=5)
    prepare(whole)
    for writes in range(100):
        killed = replace(cfg, dir=str(tmp_path / f"killed{writes}"))
        with monkeypatch.context() as patched:
            kill_after(patched, writes)
            try:
                prepare(killed)
                break
            except Killed:
                pass
        folder = Path(killed.dir)
        before = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.bin")}
        finished = json.loads((folder / PROGRESS).read_text())["splits"] if (folder / PROGRESS).exists() else {}
        names = [shard["file"] for split in finished.values() for shard in split]
        if writes == 6:
            (folder / names.pop()).unlink()
        prepare(killed)
        assert contents(folder) == contents(Path(whole.dir))
        assert all((folder / name).stat().st_mtime_ns == before[name] for name in names), "finished shards stay as they are"
    assert writes > 6


def test_a_set_is_continued_and_repeated_only_as_it_began(cfg, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(Killed):
        kill_after(patched, 8)
        prepare(cfg)
    with pytest.raises(ValueError, match="not finished"):
        open_split(cfg.dir, "train")
    changes = [{"tokenizer": TokenizerConfig("bpe", 300)}, {"column": "body"}, {"val_fraction": 0.3}]
    for _ in range(2):
        before = contents(Path(cfg.dir))
        for change in [*changes, {"source": "stdlib", "path": None}]:
            with pytest.raises(ValueError, match=r"was prepared with .* not .*: use another data\.name") as caught:
                prepare(replace(cfg, **change))
            assert "\n" not in str(caught.value)
        assert contents(Path(cfg.dir)) == before
        prepare(cfg)
    with Path(cfg.path).open("a") as file:
        file.write(json.dumps({"text": "more"}) + "\n")
    with pytest.raises(ValueError, match=r"^the source has changed since .* was prepared \(bytes \d+ then, \d+ now\): use"):
        prepare(cfg)


def test_a_full_or_failing_disk_is_named_and_a_second_preparation_is_refused(cfg, monkeypatch):
    """Finished shards are kept."""
    sync, replace_file = os.fsync, os.replace

    def fail_at_third(descriptor):
        if (Path(cfg.dir) / "train_000001.bin").exists():
            raise OSError(code, os.strerror(code))
        sync(descriptor)

    def replaced(old, new):
        if Path(new).name == "train_000001.bin":
            with pytest.raises(ValueError, match="is in use: another process prepares it"):
                prepare(cfg)
            refused.append(new)
        replace_file(old, new)

    refused = []
    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(os, "fsync", fail_at_third)
    for code, fix in ((errno.ENOSPC, "free some space and repeat"), (errno.EIO, "the disk has failed")):  # noqa: B007
        with pytest.raises(OSError, match=f"{fix}.*{cfg.dir}/"):
            prepare(cfg)
    assert len(Shard(Path(cfg.dir) / "train_000001.bin")) == 5000 and len(refused) == 1


def hold_out(texts: list[str], fraction: float) -> Iterator[Document]:
    return measure(texts, fraction).documents(texts)


def test_many_documents_are_held_out_by_their_hash_alone():
    """So the split of a document depends on no other; shards stay what they were before documents were cut."""
    texts = [f"document {i}" for i in range(3000)]
    held = [text for text in texts if int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64 < 0.1]
    for order in (texts, texts * 2):
        assert [document.text for document in hold_out(order, 0.1) if document.split == "val"] == held * (len(order) // 3000)
    assert all(document.starts for document in hold_out(texts, 0.1))
    read = []
    assert measure((read.append(text) or text for text in texts * 10), 0.1).below == 0.1
    assert len(read) < 25_000, "so many documents of one length cannot miss the share: the rest need not be read"


def test_of_few_documents_validation_gets_its_share_and_no_split_stays_empty():
    """Seven books: by whole ones, validation would have none of the text, or a seventh, or two."""
    for count, fraction in ((2, 0.005), (2, 0.5), (40, 0.005), (40, 0.5)):
        draw = random.Random(count)
        books = [f"{i} " + " ".join(draw.choices(WORDS, k=draw.randint(500, 3000))) for i in range(count)]
        documents = list(hold_out(books, fraction))
        held = sum(len(document.text) for document in documents if document.split == "val")
        assert held == pytest.approx(fraction * sum(map(len, books)), rel=0.2)
        assert sum(not document.starts for document in documents) <= 1
        assert sorted(hold_out(draw.sample(books, count), fraction)) == sorted(documents)
    text = "".join(RNG.choices("abc \n", k=1115394 // 10))  # one document is cut as nanoGPT cuts
    train, val = hold_out([text], 0.1)
    assert (train.text, val.text) == (text[: int(len(text) * 0.9)], text[int(len(text) * 0.9) :])
    assert (train.split, train.starts, val.split, val.starts) == ("train", True, "val", False)
    assert list(hold_out(["whole"], 0)) == [Document("whole", "train")] and list(hold_out([], 0.1)) == []
    for fraction in (1e-9, 0.999999):
        assert [document.split for document in hold_out(["a", "b", "c"], fraction)].count("val") in (1, 2)


def test_long_documents_are_tokenized_whole_in_the_memory_of_a_chunk(cfg, tmp_path, monkeypatch):
    for name, value in {"data.tokenizer.PIECE": 2**13, "data.prepare.PIECE": 2**13, "data.sources.TEXT_LIMIT": 2**16}.items():
        monkeypatch.setattr(name, value)
    monkeypatch.setattr(module.pieces, "__defaults__", (2**13,))
    book = tmp_path / "book.txt"
    book.write_text("To be, or not to be, that is the question.\n" * 75_000)  # 3 MB
    tracemalloc.start()
    meta = prepare(replace(cfg, path=str(book), shard_tokens=250_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert meta["splits"]["val"]["bytes"] / book.stat().st_size == pytest.approx(0.2, rel=0.2)
    assert peak < book.stat().st_size / 2, f"{peak:,} bytes"
    assert sum(split["bytes"] for split in meta["splits"].values()) == book.stat().st_size


def test_large_vocabularies_are_uint32_and_odd_documents_stop_nothing_or_are_named(cfg, monkeypatch, capsys, gpt2):
    base, special = gpt2.encoding, {"<|endoftext|>": 100_000}
    wide = tiktoken.Encoding("gpt2", pat_str=base._pat_str, mergeable_ranks=base._mergeable_ranks, special_tokens=special)
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: wide)
    with Path(cfg.path).open("a") as file:
        file.write('{"text": null}\n{"text": " "}\n\n{"text": "a\\ud800b"}\n')
    cfg = replace(cfg, tokenizer=TokenizerConfig("gpt2"))
    prepare(cfg)
    [shard, *_] = open_split(cfg.dir, "train")
    assert shard.tokens.dtype == np.uint32 and shard.tokens[0] == 100_000
    assert "left out 2 documents without text" in capsys.readouterr().out
    prepare(replace(cfg, dir=f"{cfg.dir}3", tokenizer=TokenizerConfig("bpe", 300)))  # a lone surrogate stops no training of it

    def fail(self, text):
        raise ValueError("too many steps")

    monkeypatch.setattr(Tokenizer, "encode_array", fail)
    with pytest.raises(ValueError, match=r"document 1 cannot be tokenized \(too many steps\): .*data\.tokenizer\.name=bytes"):
        prepare(replace(cfg, dir=f"{cfg.dir}2"))


def test_the_command(tmp_path, typed, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "input.txt").write_text("To be, or not to be.\n" * 100)
    options = ["data=shakespeare", "path=~/input.txt", "data.dir='~/out'"]
    first, second = (typed("data.prepare", *options, more) for more in ("verify=false", "verify=true"))
    assert first.returncode == second.returncode == 0
    assert "train 1,891 tokens" in first.stdout and "a part of a document" in first.stdout
    assert "already prepared and verified" in second.stdout
    assert build_tokenizer(TokenizerConfig("bytes")).fingerprint == load_tokenizer(tmp_path / "out").fingerprint
    assert bytes(tokens(tmp_path / "out", "val")) == (tmp_path / "input.txt").read_bytes()[1890:]
