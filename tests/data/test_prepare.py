import errno
import hashlib
import json
import os
import random
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from configs import files
from data import prepare as module
from data.config import DataConfig, TokenizerConfig
from data.holdout import Document, measure
from data.prepare import check_folder, prepare
from data.shards import META, PROGRESS, Shard, open_split
from data.tokenizer import build_tokenizer, load_tokenizer

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


def test_what_is_written(cfg):
    meta = prepare(cfg)
    folder = Path(cfg.dir)
    assert meta == json.loads((folder / META).read_text())
    files = [shard["file"] for split in meta["splits"].values() for shard in split["shards"]]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*files, META, "tokenizer.json"])
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
    assert len(meta["splits"]["train"]["shards"]) > 5


def test_workers_do_not_change_the_bytes(cfg, tmp_path):
    bpe = TokenizerConfig("bpe", 300)
    one, many = (replace(cfg, workers=w, dir=str(tmp_path / f"w{w}"), tokenizer=bpe) for w in (1, 5))
    prepare(one)
    prepare(many)
    assert contents(Path(one.dir)) == contents(Path(many.dir))


def kill_after(monkeypatch, writes: int) -> None:
    """Let the process end when it is about to write a file, `writes` files after the start."""
    real, count = files.write_atomic, iter(range(10**6))

    def write(*args):
        if next(count) >= writes:
            raise Killed
        real(*args)

    monkeypatch.setattr(files, "write_atomic", write)
    monkeypatch.setattr("data.shards.write_atomic", write)
    monkeypatch.setattr(module.Preparation, "_remove_if_empty", lambda self: None)  # a killed process tidies nothing


@pytest.mark.parametrize("max_tokens", [None, 15_001])
def test_resume_after_a_kill_at_any_point_is_byte_identical(cfg, tmp_path, monkeypatch, max_tokens):
    cfg = replace(cfg, max_tokens=max_tokens, shard_tokens=9000, tokenizer=TokenizerConfig("bpe", 280))
    whole = replace(cfg, dir=str(tmp_path / "whole"))
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
        before = {path: path.stat().st_mtime_ns for path in folder.glob("*.bin")}
        finished = json.loads((folder / PROGRESS).read_text())["splits"] if (folder / PROGRESS).exists() else {}
        prepare(killed)
        assert contents(folder) == contents(Path(whole.dir))
        for shard in [*finished.get("train", []), *finished.get("val", [])]:
            path = folder / shard["file"]
            assert path.stat().st_mtime_ns == before[path], "a finished shard was written again"
    assert writes > 4


def test_an_interruption_says_how_to_continue(typed, monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "prepare", interrupted)
    done = typed("data.prepare", "data=stdlib", "data.dir=nowhere")
    assert done.returncode == 130 and "no shard was finished: run the same command to continue" in done.stderr


def test_a_lost_shard_is_made_again(cfg, tmp_path, monkeypatch):
    prepare(replace(cfg, dir=str(tmp_path / "whole")))
    with monkeypatch.context() as patched, pytest.raises(Killed):
        kill_after(patched, 12)
        prepare(cfg)
    (Path(cfg.dir) / "train_000001.bin").unlink()
    prepare(cfg)
    assert contents(Path(cfg.dir)) == contents(tmp_path / "whole")


def test_a_finished_set_is_left_alone(cfg, capsys):
    prepare(cfg)
    before = contents(Path(cfg.dir))
    prepare(cfg, verify=True)
    assert "already prepared and verified" in capsys.readouterr().out
    changes: list[dict] = [
        {"tokenizer": TokenizerConfig("bpe", 300)},
        {"column": "body"},
        {"val_fraction": 0.3},
        {"source": "stdlib", "path": None},
    ]
    for change in changes:
        with pytest.raises(ValueError, match=r"was prepared with .* not .*: use another data\.name") as caught:
            prepare(replace(cfg, **change))
        assert "\n" not in str(caught.value)
    assert contents(Path(cfg.dir)) == before


def test_a_changed_source_is_said(cfg):
    prepare(cfg)
    with Path(cfg.path).open("a") as file:
        file.write(json.dumps({"text": "more"}) + "\n")
    with pytest.raises(ValueError, match=r"^the source has changed since .* was prepared \(bytes \d+ then, \d+ now\): use"):
        prepare(cfg)


def test_a_second_preparation_is_refused_and_disturbs_nothing(cfg, tmp_path, monkeypatch):
    prepare(replace(cfg, dir=str(tmp_path / "whole")))
    real: Callable = os.replace
    refused = []

    def replaced(old, new):
        if Path(new).name == "train_000001.bin":
            with pytest.raises(ValueError, match="is in use: another process prepares it"):
                prepare(cfg)
            refused.append(new)
        real(old, new)

    monkeypatch.setattr(os, "replace", replaced)
    prepare(cfg)
    assert len(refused) == 1
    assert contents(Path(cfg.dir)) == contents(tmp_path / "whole")


def test_an_interrupted_set_is_not_continued_differently(cfg, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(Killed):
        kill_after(patched, 8)
        prepare(cfg)
    before = contents(Path(cfg.dir))
    with pytest.raises(ValueError, match=r"tokenizer\.name=bytes, not bpe"):
        prepare(replace(cfg, tokenizer=TokenizerConfig("bpe", 300)))
    assert contents(Path(cfg.dir)) == before
    with pytest.raises(ValueError, match="not finished"):
        open_split(cfg.dir, "train")


def test_verify_finds_a_changed_byte(cfg, monkeypatch):
    prepare(cfg)
    path = Path(cfg.dir) / "train_000002.bin"
    content = bytearray(path.read_bytes())
    content[3000] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"train_000002\.bin is corrupted"):
        prepare(cfg)
    monkeypatch.setattr("data.shards.CHECK_BELOW", 0)
    prepare(cfg)
    with pytest.raises(ValueError, match=r"train_000002\.bin is corrupted"):
        prepare(cfg, verify=True)
    path.write_bytes((path.with_name("train_000001.bin")).read_bytes())
    with pytest.raises(ValueError, match="not the shard that"):
        check_folder(cfg.dir)


# --- hold-out -------------------------------------------------------------------------------------------------------


def hold_out(texts: list[str], fraction: float) -> Iterator[Document]:
    return measure(texts, fraction).documents(texts)


def split_of(texts: list[str], fraction: float) -> dict[str, str]:
    return {document.text: document.split for document in hold_out(texts, fraction)}


def test_hold_out_is_by_whole_documents_and_ignores_order():
    texts = [f"document {i}" for i in range(3000)]
    splits = split_of(texts, 0.1)
    assert set(splits) == set(texts) and 200 < list(splits.values()).count("val") < 400
    shuffled = RNG.sample(texts, len(texts))
    assert split_of(shuffled, 0.1) == splits
    fewer = split_of(texts[:1500], 0.1)
    assert all(splits[text] == split for text, split in fewer.items())
    assert all(document.starts for document in hold_out(texts, 0.1))
    twice = [(document.text, document.split) for document in hold_out(texts * 2, 0.1)]
    assert twice[3000:] == twice[:3000]


def test_few_documents_leave_neither_split_empty():
    for fraction in (1e-9, 0.999999):
        assert [d.split for d in hold_out(["a", "b", "c"], fraction)].count("val") in (1, 2)
    assert [d.split for d in hold_out(["a", "b", "c"], 1e-9)].count("val") == 1
    assert [d.split for d in hold_out(["a", "b", "c"], 0)] == ["train"] * 3
    assert list(hold_out([], 0.1)) == []


@pytest.mark.parametrize("count", [2, 7, 40])
@pytest.mark.parametrize("fraction", [0.005, 0.5])
def test_of_few_documents_validation_gets_its_share(count, fraction):
    """Seven books: by whole ones, validation would have none of the text, or a seventh, or two."""
    draw = random.Random(count)
    books = [f"{i} " + " ".join(draw.choices(WORDS, k=draw.randint(500, 9000))) for i in range(count)]
    documents = list(hold_out(books, fraction))
    held = sum(len(document.text) for document in documents if document.split == "val")
    assert held == pytest.approx(fraction * sum(map(len, books)), rel=0.2)
    assert "".join(document.text for document in documents) == "".join(books)
    assert sum(not document.starts for document in documents) <= 1
    shuffled = draw.sample(books, count)
    assert sorted(hold_out(shuffled, fraction)) == sorted(documents)


def test_many_documents_are_held_out_by_their_hash_alone():
    """The very documents that were held out before documents were cut: shards stay as they are."""
    texts = [f"document {i}" for i in range(3000)]
    held = [text for text in texts if int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64 < 0.1]
    assert [document.text for document in hold_out(texts, 0.1) if document.split == "val"] == held
    read = []
    assert measure((read.append(text) or text for text in texts * 10), 0.1).below == 0.1
    assert len(read) < 25_000, "so many documents of one length cannot miss the share: the rest need not be read"


def test_a_single_document_is_cut_as_nanogpt_cuts():
    text = "".join(RNG.choices("abc \n", k=1115394 // 10))
    train, val = hold_out([text], 0.1)
    assert (train.text, val.text) == (text[: int(len(text) * 0.9)], text[int(len(text) * 0.9) :])
    assert (train.split, train.starts, val.split, val.starts) == ("train", True, "val", False)
    assert list(hold_out(["whole"], 0)) == [Document("whole", "train")]
    with pytest.raises(ValueError, match="too few to hold some out"):
        list(hold_out(["a"], 0.1))


# --- tokens ---------------------------------------------------------------------------------------------------------


def test_long_documents_are_tokenized_whole(cfg, tmp_path, monkeypatch):
    monkeypatch.setattr("data.tokenizer.PIECE", 1000)
    monkeypatch.setattr(module.pieces, "__defaults__", (1000,))
    texts = ["\n".join(DOCUMENTS[:60]), "\n".join(DOCUMENTS[60:])]
    (tmp_path / "a.txt").write_text(texts[0])
    (tmp_path / "b.txt").write_text(texts[1])
    prepare(replace(cfg, path=f"{tmp_path}/?.txt", val_fraction=0))
    assert tokens(Path(cfg.dir), "train") == [256, *texts[0].encode(), 256, *texts[1].encode()]


def test_max_tokens_is_exact(cfg, tmp_path):
    everything = prepare(cfg)
    some = replace(cfg, dir=str(tmp_path / "some"), max_tokens=12_345)
    meta = prepare(some)
    assert meta["splits"]["train"]["tokens"] == 12_345 < everything["splits"]["train"]["tokens"]
    assert tokens(Path(some.dir), "train") == tokens(Path(cfg.dir), "train")[:12_345]
    assert meta["splits"]["train"]["bytes"] == 12_345 - meta["splits"]["train"]["documents"]
    few = replace(cfg, dir=str(tmp_path / "few"), max_tokens=10)  # reads on until validation has a document
    assert prepare(few)["splits"]["val"]["documents"] == 1


def test_a_long_document_takes_the_memory_of_a_chunk(cfg, tmp_path, monkeypatch):
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


def test_progress_is_printed_in_lines_where_there_is_no_terminal(cfg, capsys, monkeypatch):
    monkeypatch.setattr(module, "LINE_EVERY", 0.0)
    prepare(cfg)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("mine: ") and "tokens, " in line for line in lines) > 20
    assert "held out 22.11%" in lines[-1] and "of the bytes (data.val_fraction=0.2)" in lines[-1]


def test_large_vocabularies_are_uint32(cfg, monkeypatch, gpt2):
    import tiktoken

    base = gpt2.encoding
    wide = tiktoken.Encoding(
        "gpt2", pat_str=base._pat_str, mergeable_ranks=base._mergeable_ranks, special_tokens={"<|endoftext|>": 100_000}
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: wide)
    prepare(replace(cfg, tokenizer=TokenizerConfig("gpt2")))
    [shard, *_] = open_split(cfg.dir, "train")
    assert shard.tokens.dtype == np.uint32 and shard.tokens[0] == 100_000


def test_nanogpt_import(cfg, tmp_path, gpt2):
    folder = tmp_path / "openwebtext"
    folder.mkdir()
    ids = np.array([token for text in DOCUMENTS for token in (*gpt2.encode(text), gpt2.eot)], dtype=np.uint16)
    ids[1000:].tofile(folder / "train.bin")
    ids[:1000].tofile(folder / "val.bin")
    cfg = replace(cfg, source="nanogpt", path=str(folder), tokenizer=TokenizerConfig("gpt2"))
    meta = prepare(cfg)
    assert tokens(Path(cfg.dir), "train") == ids[1000:].tolist() and tokens(Path(cfg.dir), "val") == ids[:1000].tolist()
    documents = sum(split["documents"] for split in meta["splits"].values())
    assert documents == len(DOCUMENTS)
    assert "of the bytes (val.bin)" in module._describe(meta)  # data.val_fraction decides nothing here
    assert sum(split["bytes"] for split in meta["splits"].values()) == sum(len(text) for text in DOCUMENTS)
    (folder / "meta.pkl").write_bytes(b"")
    with pytest.raises(ValueError, match="character table of its own"):
        prepare(replace(cfg, dir=str(tmp_path / "other")))


# --- wrong input ----------------------------------------------------------------------------------------------------


def test_errors_leave_no_folder_behind(cfg, tmp_path):
    (tmp_path / "blank.txt").write_text(" \n\n")
    (tmp_path / "tiny.txt").write_text("x")
    (tmp_path / "broken.jsonl").write_text(json.dumps({"text": "fine"}) + "\n" * 3 + json.dumps({"text": "too"}) + "\n{")
    cases: list[tuple[dict, str]] = [
        ({"path": str(tmp_path / "blank.txt")}, "there is no text in"),
        ({"path": str(tmp_path / "blank.txt"), "tokenizer": TokenizerConfig("bpe", 300)}, "there is no text in"),
        ({"path": str(tmp_path / "tiny.txt")}, "too few to hold some out"),
        ({"path": str(tmp_path / "broken.jsonl")}, "line 5 is not JSON"),
        ({"tokenizer": TokenizerConfig("bpe", 60_000)}, "too small for 60000"),
        ({"source": "nanogpt", "path": str(tmp_path)}, "missing, empty or truncated"),
        ({"name": "../x"}, "leaves the folder of prepared sets"),
        ({"name": "/x"}, "leaves the folder of prepared sets"),
    ]
    for change, match in cases:
        with pytest.raises((ValueError, FileNotFoundError), match=match) as caught:
            prepare(replace(cfg, **change))
        assert "\n" not in str(caught.value)
        assert not Path(cfg.dir).exists()


@pytest.mark.parametrize(("code", "fix"), [(errno.ENOSPC, "free some space and repeat"), (errno.EIO, "the disk has failed")])
def test_a_full_or_failing_disk_is_named_and_finished_shards_are_kept(cfg, tmp_path, monkeypatch, code, fix):
    prepare(replace(cfg, dir=str(tmp_path / "whole")))
    real: Callable = os.fsync

    def fail_at_third(descriptor):
        if (Path(cfg.dir) / "train_000001.bin").exists():
            raise OSError(code, os.strerror(code))
        real(descriptor)

    with monkeypatch.context() as patched, pytest.raises(OSError, match=f"{fix}.*{cfg.dir}/"):
        patched.setattr(os, "fsync", fail_at_third)
        prepare(cfg)
    assert len(Shard(Path(cfg.dir) / "train_000001.bin")) == 5000
    prepare(cfg)
    assert contents(Path(cfg.dir)) == contents(tmp_path / "whole")


def test_the_command(tmp_path, typed, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "input.txt").write_text("To be, or not to be.\n" * 100)
    options = ["data=shakespeare", "path=~/input.txt", "data.dir='~/out'"]
    first, second = (typed("data.prepare", *options, more) for more in ("verify=false", "verify=true"))
    assert first.returncode == second.returncode == 0
    assert "train 1,891 tokens" in first.stdout and "already prepared and verified" in second.stdout
    assert build_tokenizer(TokenizerConfig("bytes")).fingerprint == load_tokenizer(tmp_path / "out").fingerprint
    assert bytes(tokens(tmp_path / "out", "val")) == (tmp_path / "input.txt").read_bytes()[1890:]


def test_documents_without_text_are_counted(cfg, capsys):
    with Path(cfg.path).open("a") as file:
        file.write('{"text": null}\n{"text": " "}\n\n')
    prepare(replace(cfg, tokenizer=TokenizerConfig("bpe", 300)))
    assert "left out 2 documents without text" in capsys.readouterr().out


def test_the_lock_leaves_what_a_link_points_to(cfg, tmp_path):
    Path(cfg.dir).mkdir()
    (tmp_path / "precious").write_text("kept")
    (Path(cfg.dir) / ".lock").symlink_to(tmp_path / "precious")
    prepare(cfg)
    assert (tmp_path / "precious").read_text() == "kept"


def test_a_document_that_the_split_pattern_cannot_split_is_named(cfg, monkeypatch):
    def fail(self, text):
        raise ValueError("too many steps")

    monkeypatch.setattr("data.tokenizer.Tokenizer.encode_array", fail)
    with pytest.raises(ValueError, match=r"document 1 cannot be tokenized \(too many steps\): .*data\.tokenizer\.name=bytes"):
        prepare(cfg)
