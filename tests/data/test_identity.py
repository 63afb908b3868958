import json
from dataclasses import replace
from pathlib import Path

import pytest

from data import sources
from data.config import DataConfig, TokenizerConfig
from data.prepare import prepare
from data.shards import META
from tests.data.test_shards import patch

LINES = "".join(json.dumps({"text": f"Document {i}. " + "word " * 2000}) + "\n" for i in range(120))  # over a MiB


@pytest.mark.parametrize("source", ["text", "hf"])
def test_another_text_of_the_same_size_is_not_already_prepared(tmp_path, source, monkeypatch):
    """A set of an earlier version, whose meta.json does not say the content, is compared by what it says."""
    path, sizes = tmp_path / "mine.jsonl", {"dir": str(tmp_path / "shards"), "val_fraction": 0.2}
    path.write_text(LINES)
    cfg = DataConfig("mine", "text", tokenizer=TokenizerConfig("bytes"), path=str(path), **sizes)
    if source == "hf":
        datasets = pytest.importorskip("datasets", reason="optional package datasets is not installed")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        cfg = replace(cfg, source="hf", dataset="json", data_files=str(path), path=None)
    meta = prepare(cfg)
    assert prepare(cfg) == meta
    changed = path.read_bytes()
    patch(path, len(changed) - 10, b"B")  # in the last text
    with pytest.raises(ValueError, match=r"the source has changed since .* \(content \w{32} then, \w{32} now\)"):
        prepare(cfg)
    del meta["request"]["content"]
    (Path(cfg.dir) / META).write_text(json.dumps(meta))
    assert prepare(cfg) == meta


def test_of_a_large_source_blocks_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "WHOLE", 0)
    path, size = tmp_path / "large.bin", 3 * 2**20
    path.write_bytes(bytes(size))
    before = sources.content_of([path])
    step = (size - sources.BLOCK) // (sources.BLOCKS - 1)
    between = sources.BLOCK + (step - sources.BLOCK) // 2
    for position, seen in ((0, True), (step, True), (9 * step + 100, True), (size - 1, True), (between, False)):
        patch(path, position, b"\x01")
        assert (sources.content_of([path]) != before) == seen, position
        patch(path, position, b"\x00")
    monkeypatch.undo()
    before = sources.content_of([path])
    patch(path, between, b"\x01")
    assert sources.content_of([path]) != before
