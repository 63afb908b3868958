"""Files that were made to harm: each gives one line, without a traceback, a hang or a flood of memory."""

import bz2
import gzip
import json
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from data.config import DataConfig
from data.shards import META, PROGRESS, Shard, open_split
from data.sources import open_corpus
from data.tokenizer import FILE, load_tokenizer
from eval.common import TextEvalConfig, evaluation_tokens, open_run
from eval.report.runs import read_run
from model.interop.folder import Weights, read_config
from training.checkpoint import load_run

DEEP = "[" * 100_000 + "]" * 100_000
MOST = 200e6  # bytes of memory that refusing a file may take


def refused(act: Callable[[], Any], says: str = "", most: float = MOST) -> None:
    """`act` raises one line, and takes no more than `most` bytes of memory (Python's and numpy's; no other's counts)."""
    tracemalloc.start()
    try:
        with pytest.raises((ValueError, OSError)) as caught:
            act()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value) and says in str(caught.value), str(caught.value)
    assert len(str(caught.value)) < 1000 and peak < most, f"{peak:,} bytes"


# ---------------------------------------- texts


def read(path: Path, **options: Any) -> int:
    return sum(1 for _ in open_corpus(DataConfig("mine", "text", str(path), **options)))


def damaged(content: bytes, at: float = 0.5) -> bytes:
    middle = int(len(content) * at)
    return content[:middle] + b"\xff\x00\xaa\x55" * 8 + content[middle + 32 :]


RANDOM = np.random.default_rng(0).bytes(200_000).hex().encode()
TEXTS: dict[str, tuple[bytes | Callable[[], bytes], str]] = {
    "damaged.txt.gz": (lambda: damaged(gzip.compress(RANDOM)), "truncated or not"),
    "cut.txt.bz2": (lambda: bz2.compress(RANDOM)[:-100], "truncated or not"),
    "no.txt.xz": (b"this is plain text", "truncated or not"),
    "nul.txt": (b"\xff\xfe\x00\x00" * 100, "UTF-8"),
    "latin.jsonl": (b'{"text": "\xe9t\xe9"}\n', "UTF-8"),
    "huge-number.jsonl": (b'{"text": ' + b"9" * 10_000 + b"}\n", "line 1"),
    "number.jsonl": (b'{"text": 5}\n', "no text under 'text'"),
    "array.jsonl": (b'["text"]\n', "no text under 'text'"),
    "keys.jsonl": (json.dumps({f"key{i}": 1 for i in range(50_000)}).encode() + b"\n", "no text under 'text'"),
    "newlines.jsonl": (json.dumps({"a\nb": 1}).encode() + b"\n", "no text under 'text'"),
    "no.parquet": (b"PAR1 this is none", "truncated or not"),
    "empty.parquet": (b"", "is empty"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text(tmp_path, name):
    content, says = TEXTS[name]
    (tmp_path / name).write_bytes(content() if callable(content) else content)
    refused(lambda: read(tmp_path / name), says)


def parquet_file(path: Path, column: list, **options: Any) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": column}), path, **options)
    return path


@pytest.mark.parametrize("column", [[1, 2], [1.5], [True], [["a"]], [b"\xff"], [{"a": "b"}]])
def test_parquet_without_text(tmp_path, column):
    path = parquet_file(tmp_path / "a.parquet", column)
    refused(lambda: read(path), "has no text under 'text'")


@pytest.mark.parametrize("at", [0.1, 0.9])
def test_damaged_parquet(tmp_path, at):
    draw = np.random.default_rng(0)
    path = parquet_file(tmp_path / "a.parquet", [draw.bytes(50).hex() for _ in range(3000)], compression="gzip")
    path.write_bytes(damaged(path.read_bytes(), at))
    refused(lambda: read(path), "")


# ---------------------------------------- prepared text

META_LIES: dict[str, Callable[[dict], Any]] = {
    "missing": lambda meta: meta["splits"]["train"]["shards"][0].update(file="train_000009.bin"),
    "other fingerprint": lambda meta: meta["tokenizer"].update(fingerprint="00" * 32),
    "deep": lambda meta: DEEP,
    "a list": lambda meta: "[]",
    "binary": lambda meta: "\udcff",
}


@pytest.mark.parametrize("lie", META_LIES)
def test_meta_that_lies(shards, lie):
    meta = json.loads((shards / META).read_text())
    text = META_LIES[lie](meta)
    text = text if isinstance(text, str) and text[0] in "[\udcff" else json.dumps(meta)
    (shards / META).write_bytes(text.encode("utf-8", "surrogateescape"))
    refused(lambda: open_split(shards, "train"))


def header(**ints: int) -> bytes:
    values = np.zeros(256, dtype="<i4")
    values[:3] = 20240520, 1, 1000
    for name, value in ints.items():
        values[int(name[1:])] = value
    return values.tobytes() + bytes(2000)


SHARDS = {
    "count": header(i2=2**31 - 1),
    "version": header(i1=99),
    "magic": header(i0=7),
    "vocabulary": header(i3=0x44494646, i4=-1),
    "checksum": header(i3=0x44494646, i4=300, i5=1),
    "half": header()[:1500],
    "pickle": pickle.dumps([1] * 2000),
    "empty": b"",
}


@pytest.mark.parametrize("name", SHARDS)
def test_shard(tmp_path, name):
    (tmp_path / "train_0.bin").write_bytes(SHARDS[name])
    refused(lambda: Shard(tmp_path / "train_0.bin", vocab_size=300).read(0, 10))


TOKENIZERS: dict[str, Callable[[dict], Any]] = {
    "unknown name": lambda c: c.update(name="../../etc/passwd"),
    "fingerprint": lambda c: c.update(fingerprint="00"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizer(shards, name):
    content = json.loads((shards / FILE).read_text())
    TOKENIZERS[name](content)
    (shards / FILE).write_text(json.dumps(content))
    refused(lambda: load_tokenizer(shards))


@pytest.mark.parametrize("text", [DEEP, "[]", "{"])
def test_tokenizer_that_is_none(shards, text):
    (shards / FILE).write_text(text)
    refused(lambda: load_tokenizer(shards), "prepare the data again")


@pytest.mark.parametrize("text", ['{"request": {}, "splits": 5}', '{"splits": {}}', DEEP, "[]"])
def test_progress(tmp_path, text):
    from data.prepare import prepare

    (tmp_path / "text.txt").write_text("some text")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / PROGRESS).write_text(text)
    refused(lambda: prepare(DataConfig("mine", "text", str(tmp_path / "text.txt"), dir=str(tmp_path / "out"))))


# ---------------------------------------- runs


@pytest.mark.parametrize("text", ["{}", "[]", '{"results": 5}', DEEP, "{", "\x00"])
def test_evaluation_without_results(make_run, text):
    run = make_run("a")
    (run / "eval" / "needle.json").write_text(text)
    refused(lambda: read_run(run), "repeat the evaluation")


def test_needle_results_without_cells(make_run):
    run = make_run("a")
    (run / "eval" / "needle.json").write_text('{"results": {"accuracy": 1}}')
    refused(lambda: read_run(run), "no results")


@pytest.mark.parametrize(
    "text", ["", "[]", "a: [", "model: 5\ndata: {}", "model: {}", "!!python/object/apply:os.system [true]"]
)
def test_run_config(make_run, text):
    run = make_run("a")
    (run / "config.yaml").write_text(text)
    refused(lambda: read_run(run), "is damaged")
    cfg = TextEvalConfig(run=str(run), device="cpu")
    refused(lambda: evaluation_tokens(open_run(cfg), cfg), "is damaged")


@pytest.mark.parametrize("line", ["[}", "5}", '{"a": }', '{"loss":' + DEEP + "}"])
def test_metrics(make_run, line):
    run = make_run("a")
    (run / "metrics.jsonl").write_text('{"loss": 1}\n' + line + "\n")
    refused(lambda: read_run(run), "line 2 is not a JSON object")


# ---------------------------------------- weights


def safetensors_header(length: int, content: bytes = b"{}") -> bytes:
    return struct.pack("<Q", length) + content


BAD_WEIGHTS = {
    "huge header": safetensors_header(2**63),
    "header of a gigabyte": safetensors_header(2**30),
    "header past the end": safetensors_header(5000),
    "header of garbage": safetensors_header(4, b"\xff\x00\xff\x00"),
    "deep header": safetensors_header(len(DEEP), DEEP.encode()),
    "offsets past the end": safetensors_header(72, b'{"a":{"dtype":"F32","shape":[9999,9999],"data_offsets":[0,399920004]}}  '),
    "negative shape": safetensors_header(63, b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}        ') + bytes(4),
    "unknown type": safetensors_header(63, b'{"a":{"dtype":"X99","shape":[1],"data_offsets":[0,4]}}         ') + bytes(4),
    "pickle": pickle.dumps({"a": 1}),
    "empty": b"",
}


@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_weights(tmp_path, name):
    (tmp_path / "model.safetensors").write_bytes(BAD_WEIGHTS[name])
    refused(lambda: Weights(tmp_path), "copy the folder again")


def test_weights_of_a_run(make_run):
    run = make_run("a")
    (file,) = run.glob("checkpoints/*/model.safetensors")
    file.write_bytes(BAD_WEIGHTS["offsets past the end"])
    refused(lambda: load_run(run))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(tmp_path, number):
    save_file({"a": torch.full((2,), number)}, tmp_path / "model.safetensors")
    refused(lambda: Weights(tmp_path), "NaN")


@pytest.mark.parametrize(
    "text", [DEEP, "[]", "{", '{"weight_map": 5}', '{"weight_map": {"a": 5}}', '{"weight_map": {"a": "../../b"}}']
)
def test_index(tmp_path, text):
    folder = tmp_path / "x" / "y"
    folder.mkdir(parents=True)
    save_file({"a": torch.ones(2)}, tmp_path / "b")  # sound, so only its place is wrong
    (folder / "model.safetensors.index.json").write_text(text)
    refused(lambda: Weights(folder))


@pytest.mark.parametrize("text", [DEEP, "[]", "{", "\x00"])
def test_model_config(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    refused(lambda: read_config(tmp_path))


def test_pickled_weights_are_not_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))
    refused(lambda: Weights(tmp_path), "which can run code")
