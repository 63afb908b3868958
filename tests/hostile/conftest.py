"""Small honest files and what reads each of them; tests make hostile ones of them."""

import gzip
import importlib.util
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from data.config import DataConfig, TokenizerConfig
from data.prepare import prepare
from data.shards import Shard, open_split
from data.sources import open_corpus
from data.tokenizer import Tokenizer, load_tokenizer
from eval.report.runs import read_run
from model.config import DecoderConfig
from model.decoder import Decoder
from model.interop.format import Weights, read_config
from training.checkpoint import load_run, save

TEXT = "A text of some length, about the sea. " * 40
LINES = "".join(json.dumps({"text": f"line {i} é", "n": i}) + "\n" for i in range(40)).encode()


def read_text(path: Path) -> int:
    return sum(map(len, open_corpus(DataConfig("mine", "text", str(path)))))


def read_shard(path: Path) -> Any:
    shard = Shard(path, vocab_size=270)
    return shard.read(0, len(shard))


def trained(folder: Path, shards: Path, tokenizer: Tokenizer) -> Path:
    """A run folder with a checkpoint, metrics and an evaluation."""
    cfg = DecoderConfig(n_layer=1, n_head=2, d_model=16, context=64, vocab_size=tokenizer.vocab_size)
    save(folder, 4, Decoder(cfg, seed=1), [])
    tokenizer.save(folder)
    data = {"name": "made-up", "source": "text", "dir": str(shards)}
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": asdict(cfg), "data": data, "seed": 1, "steps": 4}))
    lines = [{"step": step, "tokens": 64 * step, "loss": 5.0, "time_s": 0.1} for step in range(5)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "eval").mkdir()
    result = {"eval": "perplexity", "run": "run", "config": {}, "results": {"loss": 5.0, "sha256": "0"}}
    (folder / "eval" / "perplexity.json").write_text(json.dumps(result))
    return folder


@pytest.fixture(scope="session")
def loaders(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Callable[[], Any]]:
    """file -> what reads it. A test that changes a file restores it."""
    folder = tmp_path_factory.mktemp("hostile")
    shards, model = folder / "shards", folder / "model"
    (folder / "text.txt").write_text(TEXT)
    how = {"tokenizer": TokenizerConfig("bpe", 270), "val_fraction": 0.5}
    prepare(DataConfig("mine", "text", str(folder / "text.txt"), dir=str(shards), **how))
    run = trained(folder / "run", shards, load_tokenizer(shards))
    (checkpoint,) = run.glob("checkpoints/*")
    model.mkdir()
    (model / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 16, "n": [1, 2.5, None]}))
    texts = {"a.jsonl": LINES, "b.jsonl.gz": gzip.compress(LINES), "c.txt": LINES}
    for name, content in texts.items():
        (folder / name).write_bytes(content)
    if importlib.util.find_spec("pyarrow"):
        import pyarrow
        from pyarrow import parquet

        texts["d.parquet"] = b""
        parquet.write_table(pyarrow.table({"text": [f"line {i}" for i in range(500)]}), folder / "d.parquet")
    made = {folder / name: (lambda path=folder / name: read_text(path)) for name in texts} | {
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
    for read in made.values():  # which reads the honest file
        read()
    return made
