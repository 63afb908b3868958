import errno
import json
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from data.shards import META, PROGRESS, Shard, open_split, write_shard

FINGERPRINT = "0123456789abcdef" * 4


def write(path, tokens, vocab_size=300, fingerprint=FINGERPRINT):
    return write_shard(path, np.asarray(tokens), vocab_size=vocab_size, fingerprint=fingerprint)


def patch(path, position, content: bytes):
    data = bytearray(path.read_bytes())
    data[position : position + len(content)] = content
    path.write_bytes(data)


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "train_000000.bin"
    write(path, np.arange(256))
    return path


def broken_disk(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_wrong_files_are_refused_in_one_line(shard, tmp_path, monkeypatch):
    def refused(match, error=ValueError, path=shard, **options):
        with pytest.raises(error, match=match) as caught:
            Shard(path, **options)
        assert "\n" not in str(caught.value)

    refused("missing", FileNotFoundError, tmp_path / "no.bin")
    refused("another tokenizer", fingerprint="f" * 64)
    refused("another tokenizer", vocab_size=50257)
    whole = shard.read_bytes()
    for size in (0, 100, 1023):
        shard.write_bytes(whole[:size])
        refused("not a token shard")
    for size in (1024, 1200, len(whole) - 1):
        shard.write_bytes(whole[:size])
        refused("truncated")
    shard.write_bytes(whole + b"x")
    refused("longer than its header")
    shard.write_bytes(whole)
    patch(shard, 4, b"\x02")
    refused("version 2")
    patch(shard, 0, b"\x00")
    refused("not a token shard")
    shard.write_bytes(whole)
    opened = Shard(shard)
    with monkeypatch.context() as broken, pytest.raises(OSError, match=f"the disk has failed.*{shard}"):
        broken.setattr(Path, "open", broken_disk)
        opened.read(0, 256)
    os.truncate(shard, 1100)
    with pytest.raises(ValueError, match="is truncated"):
        opened.read(0, 256)


def test_foreign_shards_are_of_the_split_that_their_name_says(tmp_path):
    for number, (train, val) in enumerate((
        ("pretrain_train_000", "pretrain_val_000"), ("fineweb_train_000001", "fineweb_val_000000"),
        ("tiny_shakespeare_train", "tiny_shakespeare_val"), ("train1 train2", "val"),
        ("openwebtext-train-00", "validation-00"), ("trainset", "valset"), ("pretrain_0", "pretrain_val_0"),
        ("retrieval_train train", ""),
    )):  # fmt: skip  # a name that says both is of the last
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in f"{train} {val}".split():
            write(folder / f"{name}.bin", [1])
        assert [shard.path.stem for shard in open_split(folder, "train")] == train.split()
        if val:
            assert [shard.path.stem for shard in open_split(folder, "val")] == val.split()
        else:
            with pytest.raises(FileNotFoundError, match="no val shards"):
                open_split(folder, "val")


def test_open_split_and_meta_decides_what_belongs_to_it(tmp_path):
    folder = tmp_path / "mine"
    with pytest.raises(FileNotFoundError, match="prepare it: python -m data.prepare data=stdlib$"):
        open_split(tmp_path / "stdlib", "train")
    folder.mkdir()
    with pytest.raises(FileNotFoundError, match="no train shards"):
        open_split(folder, "train")
    for number in (1, 0):
        write(folder / f"train_00000{number}.bin", [number] * 5)
    write(folder / "val_000000.bin", [7])
    assert [shard.tokens[0] for shard in open_split(folder, "train")] == [0, 1] and len(open_split(folder, "val")) == 1
    (folder / PROGRESS).write_text("{}")
    with pytest.raises(ValueError, match="not finished: run python -m data.prepare again, with the same overrides"):
        open_split(folder, "train")
    meta = {"tokenizer": {"fingerprint": FINGERPRINT}, "splits": {"train": {"shards": [{"file": "train_000001.bin"}]}}}
    (folder / META).write_text(json.dumps(meta))
    assert [shard.tokens[0] for shard in open_split(folder, "train")] == [1]
    meta["splits"]["val"] = {"shards": []}
    (folder / META).write_text(json.dumps(meta))
    with pytest.raises(ValueError, match=r"without validation text: .*data\.name=NAME with a larger data\.val_fraction"):
        open_split(folder, "val")
    other = json.dumps(meta | {"tokenizer": {"fingerprint": "f" * 64}})
    for content, says in ((other, "another tokenizer"), ("{", "damaged")):
        (folder / META).write_text(content)
        with pytest.raises(ValueError, match=says):
            open_split(folder, "train")


def test_more_shards_than_a_process_may_open_files(tmp_path):
    for number in range(40):
        write(tmp_path / f"train_{number:06d}.bin", [number] * 5)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 20, hard))
    try:
        assert [shard.read(0, 9)[0] for shard in open_split(tmp_path, "train")] == list(range(40))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_files_of_llm_c_and_nanogpt_are_read_as_they_are(tmp_path):
    """llm.c's are written by hand, as its dev/data/data_common.py and modded-nanogpt's data/fineweb.py do."""
    for magic, version, dtype in ((20240520, 1, "<u2"), (20240801, 7, "<u4")):
        header = np.zeros(256, dtype=np.int32)
        header[:3] = magic, version, 5
        tokens = np.array([50256, 0, 1, 2, 50000], dtype=dtype)
        (tmp_path / "fineweb_train_000001.bin").write_bytes(header.tobytes() + tokens.tobytes())
        [shard] = open_split(tmp_path, "train", vocab_size=50257, fingerprint=FINGERPRINT)
        assert shard.crc32 is None and (shard.tokens == tokens).all()
        with pytest.raises(ValueError, match="token 50256, outside the vocabulary of 50000"):
            open_split(tmp_path, "train", vocab_size=50000)

    folder = tmp_path / "nanogpt"
    folder.mkdir()
    path = folder / "val.bin"
    np.arange(10, dtype=np.uint16).tofile(path)
    [shard] = open_split(folder, "val", vocab_size=10, fingerprint=FINGERPRINT)
    assert shard.read(0, 99).tolist() == shard.tokens.tolist() == list(range(10)) and shard.crc32 is None
    with pytest.raises(ValueError, match="token 9, outside the vocabulary of 9"):
        Shard(path, vocab_size=9)
    np.array([69_999, 7], dtype=np.uint32).tofile(path)
    assert Shard(path, vocab_size=70_000).tokens.tolist() == [69_999, 7]
    np.arange(1, 10, dtype=np.int64).tofile(path)
    assert Shard(path).crc32 is None  # the width of its integers is not known without the vocabulary
    with pytest.raises(ValueError, match="wider integers than uint16: write it again"):
        Shard(path, vocab_size=10)
    for content in (b"", b"123"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is empty or truncated"):
            Shard(path)
    (folder / "meta.pkl").write_bytes(b"")
    with pytest.raises(ValueError, match="has characters as tokens"):
        open_split(folder, "val")
