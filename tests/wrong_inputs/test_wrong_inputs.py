"""What is typed wrongly: one line that names the fix, exit code 2, and nothing on disk changed. *.yaml list it."""

import shlex
from pathlib import Path

import numpy as np
import pytest
import yaml

from data.config import TokenizerConfig
from data.shards import write_shard
from data.tokenizer import build_tokenizer
from tests.conftest import Typed, assert_one_line_error
from tests.hostile.conftest import trained
from tests.test_help import COMMANDS

FILES = sorted(Path(__file__).parent.glob("*.yaml"))
TABLE = {command: cases for file in FILES for command, cases in yaml.safe_load(file.read_text()).items()}
TINY = "data=text data.name=tiny data.dir=shards data.tokenizer.name=bytes size=nano"  # $tiny
STUDY = """experiment=retrieval 'train=["data.dir=shards"]'"""  # $study
CASES = [(command, typed, says) for command, cases in TABLE.items() for typed, says in cases.items()]
MODULES = {command: module for module, command, _ in COMMANDS}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a prepared text, `shards`, a run on it, `run`, texts, and files that are nothing of the kind."""
    folder = tmp_path_factory.mktemp("world")
    tokenizer = build_tokenizer(TokenizerConfig("bytes"))
    tokens = np.array([tokenizer.eot, *tokenizer.encode("A text of some length, about the sea. " * 100)])
    (folder / "shards").mkdir()
    tokenizer.save(folder / "shards")
    for split in ("train", "val"):
        path = folder / "shards" / f"{split}_000000.bin"
        write_shard(path, tokens, vocab_size=tokenizer.vocab_size, fingerprint=tokenizer.fingerprint)
    trained(folder / "run", folder / "shards", tokenizer)
    (folder / "text.txt").write_text("Some text, about the sea. " * 200)
    (folder / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (folder / "empty.txt").write_text(" \n")
    (folder / "broken.jsonl").write_text('{"text": "fine"}\n\n\n{"text": "too"}\n{')
    return folder


def on_disk(folder: Path) -> dict[Path, object]:
    """Size and time of every file; False for a folder."""
    return {path: path.is_file() and (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


@pytest.mark.parametrize(("command", "arguments", "says"), CASES, ids=[f"{c} {a}" for c, a, _ in CASES])
def test_wrong_input(world: Path, command: str, arguments: str, says: str, typed: Typed, monkeypatch) -> None:
    monkeypatch.chdir(world)
    before = on_disk(world)
    done = typed(MODULES[command], *shlex.split(arguments.replace("$tiny", TINY).replace("$study", STUDY)))
    assert_one_line_error(done, says)
    assert done.returncode == 2 and "Traceback" not in done.stdout and on_disk(world) == before
