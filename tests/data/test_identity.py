import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data import identity
from data.config import DataConfig, TokenizerConfig
from data.prepare import prepare
from data.shards import META

LINES = "".join(json.dumps({"text": f"Document {i}. " + "word " * 2000}) + "\n" for i in range(120))  # over a MiB


@pytest.fixture
def cfg(tmp_path: Path) -> DataConfig:
    return DataConfig("mine", "text", tokenizer=TokenizerConfig("bytes"), dir=str(tmp_path / "shards"), val_fraction=0.2)


def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict, Path]:
    path = tmp_path / "mine.jsonl"
    path.write_text(LINES)
    return {"path": str(path)}, path


def hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict, Path]:
    datasets = pytest.importorskip("datasets", reason="optional package datasets is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    _, path = text(tmp_path, monkeypatch)
    return {"source": "hf", "dataset": "json", "data_files": str(path)}, path


def nanogpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict, Path]:
    for split in ("train", "val"):
        np.full(1000, 65, dtype=np.uint16).tofile(tmp_path / f"{split}.bin")
    return {"source": "nanogpt", "path": str(tmp_path)}, tmp_path / "train.bin"


def patch(path: Path, position: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(content)


@pytest.mark.parametrize("source", [text, hugging_face, nanogpt])
def test_another_text_of_the_same_size_is_not_already_prepared(cfg, tmp_path, source, monkeypatch):
    options, path = source(tmp_path, monkeypatch)
    cfg = replace(cfg, **options)
    meta = prepare(cfg)
    assert prepare(cfg) == meta
    changed = path.read_bytes()
    patch(path, len(changed) - 10, b"B")  # in the last text; nanoGPT: another token
    with pytest.raises(ValueError, match=r"the source has changed since .* \(content \w{32} then, \w{32} now\)"):
        prepare(cfg)
    path.write_bytes(changed)
    assert prepare(cfg) == meta


@pytest.mark.parametrize("source", [text, nanogpt])
def test_sets_of_earlier_versions_stay_prepared(cfg, tmp_path, source, monkeypatch):
    """Their meta.json does not say the content; what it says must agree, as before."""
    options, path = source(tmp_path, monkeypatch)
    cfg = replace(cfg, **options)
    meta = prepare(cfg)
    del meta["request"]["content"]
    (Path(cfg.dir) / META).write_text(json.dumps(meta))
    assert prepare(cfg) == meta
    with path.open("ab") as file:
        file.write(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="the source has changed since"):
        prepare(cfg)


def test_of_a_large_source_blocks_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "WHOLE", 0)
    path, size = tmp_path / "large.bin", 3 * 2**20
    path.write_bytes(bytes(size))
    before = identity.content_of([path])
    step = (size - identity.BLOCK) // (identity.BLOCKS - 1)
    between = identity.BLOCK + (step - identity.BLOCK) // 2
    for position, seen in ((0, True), (step, True), (9 * step + 100, True), (size - 1, True), (between, False)):
        patch(path, position, b"\x01")
        assert (identity.content_of([path]) != before) == seen, position
        patch(path, position, b"\x00")
    monkeypatch.undo()
    before = identity.content_of([path])
    patch(path, between, b"\x01")
    assert identity.content_of([path]) != before
