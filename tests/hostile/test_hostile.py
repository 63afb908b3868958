"""Files that were made to harm: each gives one line, without a traceback or a hang."""

import gzip
import json
import pickle
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from data.config import DataConfig
from data.prepare import prepare
from data.shards import PROGRESS
from model.interop.format import Weights
from tests.hostile.conftest import read_text


def refused(act: Callable[[], Any], says: str = "") -> None:
    """`act` raises one line."""
    with pytest.raises((ValueError, OSError)) as caught:
        act()
    line = str(caught.value)
    assert "\n" not in line and says in line and len(line) < 1000, line


def damaged(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + b"\xff\x00\xaa\x55" * 8 + content[middle + 32 :]


def lying(change: Callable[[dict], object], content: bytes) -> bytes:
    """A JSON file with a change."""
    whole = json.loads(content)
    change(whole)
    return json.dumps(whole).encode()


def header(**ints: int) -> bytes:
    values = np.zeros(256, dtype="<i4")
    values[:3] = 20240520, 1, 1000
    for name, value in ints.items():
        values[int(name[1:])] = value
    return values.tobytes() + bytes(2000)


RANDOM = np.random.default_rng(0).bytes(100_000).hex().encode()
NO_JSON = [b"[]", b"{", b"\x00"]
WEIGHTS = [
    *(struct.pack("<Q", length) + b"{}" for length in (2**63, 2**30, 5000)),
    struct.pack("<Q", 4) + b"\xff\x00\xff\x00",
    struct.pack("<Q", 72) + b'{"a":{"dtype":"F32","shape":[9999,9999],"data_offsets":[0,399920004]}}  ',
    struct.pack("<Q", 63) + b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}        ' + bytes(4),
    struct.pack("<Q", 63) + b'{"a":{"dtype":"X99","shape":[1],"data_offsets":[0,4]}}         ' + bytes(4),
    pickle.dumps({"a": 1}),
    b"",
]
# file of `loaders` -> what the one line says -> contents, or what makes them of the honest content
FILES: dict[str, dict[str, list[bytes | Callable[[bytes], bytes]]]] = {
    "shards/train_000000.bin": {
        "": [header(i2=2**31 - 1), header(i3=0x44494646, i4=-1), header(i3=0x44494646, i4=270, i5=1), pickle.dumps([1] * 2000)],
    },
    "shards/meta.json": {
        "": [
            partial(lying, lambda meta: meta["splits"]["train"]["shards"][0].update(file="train_000009.bin")),
            partial(lying, lambda meta: meta["tokenizer"].update(fingerprint="00" * 32)), b"[]", b"\xdc\xff",
        ],
    },
    "shards/tokenizer.json": {
        "": [partial(lying, lambda c: c.update(name="../../etc/passwd")), partial(lying, lambda c: c.update(fingerprint="00"))],
        "prepare the data again": [b"[]", b"{"],
    },
    "run/eval/perplexity.json": {"repeat the evaluation": [b"{}", b'{"results": 5}', *NO_JSON]},
    "run/config.yaml": {
        "is damaged": [b"", b"[]", b"a: [", b"model: 5\ndata: {}", b"model: {}", b"!!python/object/apply:os.system [true]"],
    },
    "run/metrics.jsonl": {"line 2 is not a JSON object": [b'{"loss": 1}\n[}', b'{"loss": 1}\n5}', b'{"loss": 1}\n{"a": }']},
    "run/checkpoints/step_00000004/model.safetensors": {"": [WEIGHTS[4]]},
    "model/model.safetensors": {"copy the folder again": WEIGHTS},
    "model/config.json": {"": NO_JSON},
}  # fmt: skip
CASES = [(file, says, i) for file, lies in FILES.items() for says, contents in lies.items() for i in range(len(contents))]


@pytest.mark.parametrize(("file", "says", "number"), CASES)
def test_a_file(loaders, file, says, number):
    path = next(path for path in loaders if str(path).endswith(f"/{file}"))
    honest, content = path.read_bytes(), FILES[file][says][number]
    path.write_bytes(content(honest) if callable(content) else content)
    try:
        refused(loaders[path], says)
    finally:
        path.write_bytes(honest)


TEXTS: dict[str, tuple[bytes, str]] = {
    "damaged.txt.gz": (damaged(gzip.compress(RANDOM)), "truncated or not"),
    "no.txt.xz": (b"this is plain text", "truncated or not"),
    "latin.jsonl": (b'{"text": "\xe9t\xe9"}\n', "UTF-8"),
    "huge-number.jsonl": (b'{"text": ' + b"9" * 10_000 + b"}\n", "line 1"),
    "array.jsonl": (b'["text"]\n', "no text under 'text'"),
    "keys.jsonl": (json.dumps({f"key{i}": 1 for i in range(5000)}).encode() + b"\n", "no text under 'text'"),
    "newlines.jsonl": (json.dumps({"a\nb": 1}).encode() + b"\n", "no text under 'text'"),
    "no.parquet": (b"PAR1 this is none", "truncated or not"),
    "empty.parquet": (b"", "truncated or not of the format"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text(tmp_path, name):
    (tmp_path / name).write_bytes(TEXTS[name][0])
    refused(lambda: read_text(tmp_path / name), TEXTS[name][1])


@pytest.mark.parametrize("column", [[1, 2], [["a"]], [b"\xff"], ["damaged" * i for i in range(3000)]])
def test_parquet(tmp_path, column):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": column}), path, compression="gzip")
    if len(column) > 2:
        path.write_bytes(damaged(path.read_bytes()))
    refused(lambda: read_text(path), "has no text under 'text'" if len(column) <= 2 else "")


@pytest.mark.parametrize("text", ['{"request": {}, "splits": 5}', '{"splits": {}}', "[]"])
def test_progress(tmp_path, text):
    (tmp_path / "text.txt").write_text("some text")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / PROGRESS).write_text(text)
    refused(lambda: prepare(DataConfig("mine", "text", str(tmp_path / "text.txt"), dir=str(tmp_path / "out"))))


def test_weights_that_are_no_numbers_and_pickled_weights_are_not_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))
    refused(lambda: Weights(tmp_path), "which can run code")
    for number in (float("nan"), float("inf")):
        save_file({"a": torch.full((2,), number)}, tmp_path / "model.safetensors")
        refused(lambda: Weights(tmp_path), "NaN")


@pytest.mark.parametrize("text", ["[]", '{"weight_map": 5}', '{"weight_map": {"a": 5}}', '{"weight_map": {"a": "../../b"}}'])
def test_index(tmp_path, text):
    folder = tmp_path / "x" / "y"
    folder.mkdir(parents=True)
    save_file({"a": torch.ones(2)}, tmp_path / "b")  # sound, so only its place is wrong
    (folder / "model.safetensors.index.json").write_text(text)
    refused(lambda: Weights(folder))
