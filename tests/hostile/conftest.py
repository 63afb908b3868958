"""Small honest files, of which tests make hostile ones."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import yaml

from data.config import TokenizerConfig
from data.shards import META, write_shard
from data.tokenizer import Tokenizer, build_tokenizer
from model.config import DecoderConfig
from model.decoder import Decoder
from training.saver import save

TEXT = "A text of some length, about the sea. " * 40


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return build_tokenizer(TokenizerConfig("bpe", 270), [TEXT])


@pytest.fixture
def shards(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """A prepared folder as data.prepare leaves it."""
    folder = tmp_path / "shards"
    folder.mkdir()
    tokenizer.save(folder)
    tokens, splits = np.array([tokenizer.eot, *tokenizer.encode(TEXT)]), {}
    for split in ("train", "val"):
        file = f"{split}_000000.bin"
        crc = write_shard(folder / file, tokens, vocab_size=tokenizer.vocab_size, fingerprint=tokenizer.fingerprint)
        listed = [{"file": file, "tokens": len(tokens), "crc32": crc}]
        splits[split] = {"tokens": len(tokens), "documents": 1, "bytes": len(TEXT), "shards": listed}
    named = {key: getattr(tokenizer, key) for key in ("name", "vocab_size", "eot", "fingerprint")}
    meta = {"version": 1, "name": "mine", "source": "text", "tokenizer": named, "splits": splits, "request": {}}
    (folder / META).write_text(json.dumps(meta))
    return folder


@pytest.fixture
def make_run(tmp_path: Path, tokenizer: Tokenizer, shards: Path) -> Callable[[str], Path]:
    """make_run(name) -> a run folder with a checkpoint, metrics and an evaluation."""

    def make(name: str) -> Path:
        folder = tmp_path / "runs" / name
        cfg = DecoderConfig(n_layer=1, n_head=2, d_model=16, context=64, vocab_size=tokenizer.vocab_size)
        save(folder, 4, Decoder(cfg, seed=1), [])
        tokenizer.save(folder)
        data = {"name": "made-up", "source": "text", "dir": str(shards)}
        (folder / "config.yaml").write_text(yaml.safe_dump({"model": asdict(cfg), "data": data, "seed": 1, "steps": 4}))
        lines = [{"step": step, "tokens": 64 * step, "loss": 5.0, "time_s": 0.1} for step in range(5)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "eval").mkdir()
        result = {"eval": "perplexity", "run": name, "config": {}, "results": {"loss": 5.0, "sha256": "0"}}
        (folder / "eval" / "perplexity.json").write_text(json.dumps(result))
        return folder

    return make
