"""What is typed wrongly: one line that names the fix, exit code 2, and nothing on disk changed. *.yaml list it."""

import importlib
import json
import os
import subprocess
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
from training.saver import save

ROOT = Path(__file__).parents[2]
FILES = sorted(Path(__file__).parent.glob("*.yaml"))
TABLE = {command: cases for file in FILES for command, cases in yaml.safe_load(file.read_text()).items()}
CASES = [(command, typed, says) for command, cases in TABLE.items() for typed, says in cases.items()]
MODULES = {"train": "train", "prepare": "data.prepare", "report": "eval.report.__main__"}
MODULES |= {name: f"ablation.{name}" for name in ("lambdas", "survival", "two_maps")}
SCRIPTS = ("ablate", "bench", "convert", "export", "gpu", "publish", "sample")
# One case of a command of each folder is typed in a shell, too: a process takes seconds to import torch.
SHELL = [next(case for case in CASES if case[0] == command) for command in ("train", "prepare", "perplexity", "sample")]


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


def assert_refused(code: int, out: str, error: str, says: str) -> None:
    lines = error.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), error + out
    assert says in lines[0], lines[0]
    assert code == 2 and "Traceback" not in out


@pytest.mark.parametrize(("command", "typed", "says"), CASES, ids=[f"{c} {t}" for c, t, _ in CASES])
def test_wrong_input(world, command, typed, says, monkeypatch, capsys):
    main = importlib.import_module(module_of(command)).main
    monkeypatch.chdir(world)
    monkeypatch.setattr(sys, "argv", [command, *typed.split()])
    before = on_disk(world)
    with pytest.raises(SystemExit) as stopped:
        raise SystemExit(main(typed.split()) if command == "gpu" else main())  # gpu works without Hydra
    GlobalHydra.instance().clear()
    captured = capsys.readouterr()
    assert_refused(stopped.value.code, captured.out, captured.err, says)
    assert on_disk(world) == before


@pytest.mark.parametrize(("command", "typed", "says"), SHELL, ids=[c for c, _, _ in SHELL])
def test_wrong_input_in_a_shell(world, command, typed, says):
    before = on_disk(world)
    typed_in = [sys.executable, "-m", module_of(command), *typed.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(typed_in, cwd=world, env=environment, capture_output=True, text=True, timeout=120)
    assert_refused(done.returncode, done.stdout, done.stderr, says)
    assert on_disk(world) == before


def test_the_page_counts_the_rows_of_the_table() -> None:
    assert f"{len(CASES)} wrong inputs of {len(TABLE)} commands" in (ROOT / "docs" / "RELIABILITY.md").read_text()
