"""What is typed wrongly: one line that names the fix, exit code 2, and nothing on disk changed. *.yaml list it."""

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra

from data.config import TokenizerConfig
from data.shards import write_shard
from data.tokenizer import build_tokenizer
from model.config import DecoderConfig
from model.decoder import Decoder
from tests.conftest import run_command
from training.checkpoint import save

ROOT = Path(__file__).parents[2]
FILES = sorted(Path(__file__).parent.glob("*.yaml"))
TABLE = {command: cases for file in FILES for command, cases in yaml.safe_load(file.read_text()).items()}
TINY = "data=text data.name=tiny data.dir=shards data.tokenizer.name=bytes size=nano"  # $tiny
CASES = [(command, typed.replace("$tiny", TINY), says) for command, cases in TABLE.items() for typed, says in cases.items()]
MODULES = {"train": "train", "prepare": "data.prepare", "report": "eval.report.__main__"}
MODULES |= {name: f"ablation.{name}" for name in ("lambdas", "ngrams", "survival", "two_maps")}
SCRIPTS = ("ablate", "bench", "convert", "export", "publish", "sample")


def module_of(command: str) -> str:
    return MODULES.get(command, f"scripts.{command}" if command in SCRIPTS else f"eval.{command}")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a prepared text, `shards`, a run on it, `run`, texts, and files that are nothing of the kind."""
    folder = tmp_path_factory.mktemp("world")
    tokenizer = build_tokenizer(TokenizerConfig("bytes"))
    tokens = np.array([tokenizer.eot, *tokenizer.encode("A text of some length, about the sea. " * 100)])
    for place in ("shards", "run"):
        (folder / place).mkdir()
        tokenizer.save(folder / place)
    for split in ("train", "val"):
        path = folder / "shards" / f"{split}_000000.bin"
        write_shard(path, tokens, vocab_size=tokenizer.vocab_size, fingerprint=tokenizer.fingerprint)
    cfg = DecoderConfig(n_layer=1, n_head=2, d_model=16, context=64, vocab_size=tokenizer.vocab_size)
    save(folder / "run", 4, Decoder(cfg, seed=1), [])
    data = {"name": "made-up", "source": "text", "dir": str(folder / "shards"), "retrieval": {"weight": 0, "digits": 4}}
    config = {"model": asdict(cfg), "data": data, "seed": 1, "steps": 4}
    (folder / "run" / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [{"step": step, "tokens": 64 * step, "loss": 5.0, "time_s": 0.1} for step in range(5)]
    (folder / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "text.txt").write_text("Some text, about the sea. " * 200)
    (folder / "list.json").write_text("[1]")
    (folder / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (folder / "empty.txt").write_text(" \n")
    return folder


def on_disk(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize(("command", "typed", "says"), CASES, ids=[f"{c} {t}" for c, t, _ in CASES])
def test_wrong_input(world, command, typed, says, monkeypatch, capsys):
    main = importlib.import_module(module_of(command)).main
    monkeypatch.chdir(world)
    monkeypatch.setattr(sys, "argv", [command, *typed.split()])
    before = on_disk(world)
    with pytest.raises(SystemExit) as stopped:
        main()
    GlobalHydra.instance().clear()
    out, error = capsys.readouterr()
    assert error.startswith("error: ") and error.strip().count("\n") == 0, error + out
    assert says in error and stopped.value.code == 2 and "Traceback" not in out
    assert on_disk(world) == before


def test_wrong_input_in_a_shell() -> None:
    done = run_command("train.py", "steps=-1")
    assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: steps=-1 is out of range: use a number in ")
