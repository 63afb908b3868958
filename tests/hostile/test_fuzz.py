"""Mutated files: every loader reads them or refuses them in one line. FUZZ=10000 sets the number of mutations."""

import gzip
import importlib.util
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.config import DataConfig
from data.shards import Shard, open_split
from data.sources import open_corpus
from data.tokenizer import load_tokenizer
from eval.report.runs import read_run
from model.interop.folder import Weights, read_config
from training.checkpoint import load_run

MUTATIONS = int(os.environ.get("FUZZ", "150"))
SLOW = 10.0  # seconds for one file: a hang
SPLICES = [b"", b"\x00", b"\xff\xff\xff\xff", b"[" * 3, b'"', b"}", b"-1", b"1e999", b"null", b"NaN", b"../", b"\n"]


def mutated(content: bytes, draw: random.Random) -> bytes:
    """`content` with one to four changes: bytes flipped, a part removed, doubled or replaced, the end cut off."""
    for _ in range(draw.randint(1, 4)):
        start = draw.randrange(len(content) + 1) if draw.random() < 0.5 else draw.randrange(min(len(content), 300) + 1)
        stop = min(len(content), start + draw.choice((1, 2, 8, 64, 1000)))
        kind = draw.randrange(5)
        if kind == 0:
            content = content[:start] + bytes(byte ^ 1 << draw.randrange(8) for byte in content[start:stop]) + content[stop:]
        elif kind == 1:
            content = content[:start] + content[stop:]
        elif kind == 2:
            content = content[:stop] + content[start:stop] + content[stop:]
        elif kind == 3:
            content = content[:start] + draw.choice(SPLICES) + content[stop:]
        else:
            content = content[:start]
    return content


def read_shard(path: Path) -> Any:
    shard = Shard(path)
    return shard.read(0, len(shard))


def read_text(path: Path) -> Any:
    return sum(map(len, open_corpus(DataConfig("mine", "text", str(path)))))


@pytest.fixture
def loaders(tmp_path: Path, shards: Path, make_run: Callable[[str], Path]) -> dict[Path, Callable[[], Any]]:
    """file -> what reads it."""
    run, model = make_run("a"), tmp_path / "model"
    (checkpoint,) = run.glob("checkpoints/*")
    model.mkdir()
    (model / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 16, "n": [1, 2.5, None]}))
    lines = "".join(json.dumps({"text": f"line {i} é", "n": i}) + "\n" for i in range(40)).encode()
    texts = {"a.jsonl": lines, "b.jsonl.gz": gzip.compress(lines), "c.txt": lines}
    for name, content in texts.items():
        (tmp_path / name).write_bytes(content)
    loaders: dict[Path, Callable[[], Any]] = {tmp_path / name: (lambda path=tmp_path / name: read_text(path)) for name in texts}
    if importlib.util.find_spec("pyarrow"):
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"text": [f"line {i}" for i in range(500)]}), tmp_path / "d.parquet")
        loaders[tmp_path / "d.parquet"] = lambda: read_text(tmp_path / "d.parquet")
    return loaders | {
        shards / "train_000000.bin": lambda: read_shard(shards / "train_000000.bin"),
        shards / "meta.json": lambda: open_split(shards, "train"),
        shards / "tokenizer.json": lambda: load_tokenizer(shards).encode_array("some text"),
        run / "config.yaml": lambda: read_run(run),
        run / "metrics.jsonl": lambda: read_run(run),
        run / "eval" / "perplexity.json": lambda: read_run(run),
        checkpoint / "state.json": lambda: load_run(run),
        checkpoint / "model.safetensors": lambda: load_run(run),
        model / "model.safetensors": lambda: Weights(model),
        model / "config.json": lambda: read_config(model),
    }


def test_mutated_files_are_read_or_refused_in_one_line(loaders):
    draw, refused = random.Random(0), 0
    for number in range(MUTATIONS):
        path = list(loaders)[number % len(loaders)]
        whole, began = path.read_bytes(), time.monotonic()
        change = mutated(whole, draw)
        path.write_bytes(change)
        try:
            loaders[path]()
        except (ValueError, OSError) as error:
            refused += 1
            assert "\n" not in str(error), f"{path.name}, mutation {number}: {error}"
        except BaseException as error:
            raise AssertionError(f"{path.name}, mutation {number}: {type(error).__name__}: {error}") from error
        finally:
            path.write_bytes(whole)
        assert time.monotonic() - began < SLOW, f"{path.name}, mutation {number} takes too long"
    print(f"{MUTATIONS} mutations of {len(loaders)} files: {refused} refused")
    assert refused > MUTATIONS / 3
