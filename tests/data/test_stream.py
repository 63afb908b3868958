"""A run's text: options that training would ignore, and shards or tokenizers that are not those of the run, are refused."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from configs.files import read_json_lines
from data.config import DataConfig, MqarConfig, TokenizerConfig
from data.prepare import prepare
from data.stream import refuse_ignored_options, text_digest
from data.tokenizer import build_tokenizer
from tests.conftest import Typed, assert_one_line_error, train_arguments

STEPS = (
    "model.n_layer=1", "steps=6", "checkpoint.at=[2]", "checkpoint.every=0", "monitor.every=0", "optim.schedule=wsd",
    "optim.warmup=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def other(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards as those of `shards`, from the same text but for one document."""
    folder = tmp_path_factory.mktemp("other")
    first, *lines = text_file.read_text().splitlines(keepends=True)
    (folder / "text.jsonl").write_text("".join(lines))
    how = {"tokenizer": TokenizerConfig("bytes"), "val_fraction": 0.1}
    prepare(DataConfig("tiny", "text", path=str(folder / "text.jsonl"), dir=str(folder / "shards"), **how))
    return folder / "shards"


def tiny(shards: Path, **changes: object) -> DataConfig:
    return DataConfig("tiny", "text", dir=str(shards), **({"tokenizer": TokenizerConfig("bytes")} | changes))


def test_an_option_that_training_would_ignore_is_refused_if_it_was_typed_and_differs(shards: Path, tmp_path: Path) -> None:
    for override, changes, says in (
        ("data.val_fraction=0.2", {"val_fraction": 0.2}, "data.val_fraction=0.1, not 0.2"),
        ("data.val_fraction=0.005", {}, "val_fraction=0.1, not 0.005"),
        ("data.max_tokens=5", {"max_tokens": 5}, "data.max_tokens=None, not 5: set data.max_tokens=null, or"),
        ("++data.shard_tokens=9000", {"shard_tokens": 9000}, "data.shard_tokens=100000000, not 9000"),
        ("data.tokenizer={name: bpe}", {"tokenizer": TokenizerConfig("bpe")}, "set data.tokenizer.name=bytes, or prepare as"),
        ("data.tokenizer.path=x", {"tokenizer": TokenizerConfig("bytes", path="x")}, "data.tokenizer.path=None, not x"),
        ("data.tokenizer.vocab_size=300", {"tokenizer": TokenizerConfig("bytes", 300)}, "vocab_size=4096, not 300"),
        ("data.tokenizer.special=true", {"tokenizer": TokenizerConfig("bytes", special=True)}, "set data.tokenizer.special=f"),
    ):
        with pytest.raises(ValueError, match=re.escape(says)):
            refuse_ignored_options(tiny(shards, **changes), [override])
    refuse_ignored_options(tiny(shards), ["data=text", "steps=3", "optim.lr=1e-3"])
    refuse_ignored_options(tiny(shards, val_fraction=0.1), ["data.val_fraction=0.1", "data.tokenizer={name: bytes}"])
    default = TokenizerConfig("bytes", vocab_size=4096)  # what null means
    refuse_ignored_options(tiny(shards, tokenizer=default), ["data.tokenizer.vocab_size=4096"])
    (tmp_path / "val.bin").touch()  # a folder of another project has no meta.json
    refuse_ignored_options(DataConfig("x", "text", dir=str(tmp_path)), ["data.val_fraction=0.005"])
    refuse_ignored_options(DataConfig("mqar", "mqar", dir=str(shards)), ["data.val_fraction=0.005"])


def test_a_run_goes_on_with_its_own_text(shards: Path, other: Path, tmp_path: Path, typed: Typed) -> None:
    moved = shutil.copytree(shards, tmp_path / "moved")  # a digest tells texts apart and not folders
    digests = [text_digest(tiny(folder)) for folder in (shards, moved, other)]
    assert digests[0] == digests[1] != digests[2] and text_digest(DataConfig("mqar", "mqar", mqar=MqarConfig())) is None
    run, branch = tmp_path / "run", tmp_path / "branch"
    assert typed(*train_arguments(shards, run, *STEPS)).returncode == 0
    resume = train_arguments(other, run, *STEPS, "resume=true")
    branching = [*train_arguments(other, branch, *STEPS, f"branch_from={run}"), "steps=3"]
    for arguments in (resume, branching):
        assert_one_line_error(typed(*arguments), f"{run} was trained on other shards than those in {other}")
    assert not branch.exists()

    metrics = run / "metrics.jsonl"
    first, *lines = read_json_lines(metrics)
    assert first.pop("text_digest")
    metrics.write_text("".join(json.dumps(line) + "\n" for line in (first, *lines)))  # as of an older run
    assert "already done" in typed(*resume).stdout
    assert typed(*branching).returncode == 0

    build_tokenizer(TokenizerConfig("bpe", 260), ["a text about the sea"]).save(run)
    shutil.rmtree(branch)
    assert_one_line_error(typed(*branching), f"{run} was trained with another tokenizer")
    assert not branch.exists()
    assert "text_digest" not in yaml.safe_load((run / "config.yaml").read_text())  # recorded configurations stay comparable
