"""Tiny runs, as train.py and the evaluations leave them, and a way to call a command as a user does."""

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import yaml

from configs.files import write_atomic, write_json
from data.config import TokenizerConfig
from data.shards import write_shard
from data.tokenizer import Tokenizer, build_tokenizer
from eval import attention_noise, needle, perplexity
from model.config import DecoderConfig
from model.decoder import Decoder
from tests.conftest import Typed, assert_one_line_error
from training.checkpoint import save

TEXT = "It was a long road. Nobody knew where it began.\nThe rain had stopped, and the river was brown with mud. "


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return build_tokenizer(TokenizerConfig(name="bytes"))


@pytest.fixture
def shards(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """A prepared folder of bytes: 4,001 validation tokens."""
    folder = tmp_path / "shards"
    folder.mkdir()
    tokens = np.array([tokenizer.eot, *tokenizer.encode(TEXT * 60)][:4001])
    write_shard(folder / "val_000000.bin", tokens, vocab_size=tokenizer.vocab_size, fingerprint=tokenizer.fingerprint)
    tokenizer.save(folder)
    return folder


@pytest.fixture
def make_run(tmp_path: Path, tokenizer: Tokenizer, shards: Path) -> Callable[..., Path]:
    """make_run(name, layers="b") -> a run folder with an untrained checkpoint at step 4 of 4."""

    def make(name: str, layers: str = "b", seed: int = 1, tokenizer: Tokenizer = tokenizer, **data: object) -> Path:
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        cfg = DecoderConfig(layers=layers, n_layer=2, n_head=4, d_model=32, context=160, vocab_size=tokenizer.vocab_size)
        model = Decoder(cfg, seed=seed)
        save(folder, 4, model, [])
        described = {"name": "made-up", "source": "text", "dir": str(shards), "retrieval": {"weight": 50, "digits": 4}}
        config = {"model": asdict(model.cfg), "data": described | data, "seed": seed, "steps": 4}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        lines = [{"step": 0, "tokens": 0, "params": 20_000, "params_non_embedding": 12_000, "flops_per_token": 1e5}]
        for s in range(1, 5):
            lines.append({"step": s, "tokens": 640 * s, "loss": 5.6 - s / 10, "tokens_per_s": 900.0, "time_s": 0.7 * s})
        lines += [{"step": 4, "tokens": 2560, "val_loss": 5.3}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        tokenizer.save(folder)
        return folder

    return make


@pytest.fixture
def call(typed: Typed) -> Callable[..., str]:
    """call(module, "run=...") -> what a command printed, run as typed."""

    def type_in(module: ModuleType, *arguments: object) -> str:
        done = typed(module.__name__, *map(str, arguments))
        assert not done.returncode, done.stderr
        return done.stdout

    return type_in


@pytest.fixture
def refused(typed: Typed) -> Callable[..., str]:
    """refused(module, "run=...") -> the one line that says what is wrong; asserts that the exit code is 2."""

    def type_in(module: ModuleType, *arguments: object) -> str:
        done = typed(module.__name__, *map(str, arguments))
        assert_one_line_error(done, "")
        assert done.returncode == 2
        return done.stderr.strip()

    return type_in


@pytest.fixture
def dom(tmp_path: Path) -> Callable[[str], str]:
    """dom("file://...") -> the page after its scripts ran. Skips the test without a Chromium browser that reads tmp_path."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("needs a Chromium browser")
    options = "--headless --no-sandbox --disable-gpu --hide-scrollbars --virtual-time-budget=5000 --dump-dom".split()

    def show(page: str) -> str:
        return subprocess.run([browser, *options, page], capture_output=True, text=True, timeout=60, check=True).stdout

    tried = tmp_path / "tried.html"
    tried.write_text("<p id=a></p><script>a.textContent = 'shown'</script>")
    if "shown</p>" not in show(tried.as_uri()):  # as of Ubuntu's snap, which has another /tmp
        pytest.skip(f"needs a Chromium browser that reads {tmp_path}")
    return show


@pytest.fixture
def evaluated(make_run, call):
    """evaluated(name, layers) -> a run with all three evaluations."""

    def make(name: str, layers: str = "b", **more: object) -> Path:
        run = make_run(name, layers, **more)
        call(perplexity, f"run={run}", "tokens=640")
        call(needle, f"run={run}", "samples=2", "depths=[0,1]", "lengths=[160]")
        call(attention_noise, f"run={run}", "samples=2", "depths=[0,0.5]")
        return run

    return make


def edit(path: Path, key: str, value: object) -> None:
    """Change `a.b` of a YAML or JSON file."""
    content = yaml.safe_load(path.read_text())
    *parents, last = key.split(".")
    inner = content
    for parent in parents:
        inner = inner[parent]
    inner[last] = value
    path.write_text(json.dumps(content))  # JSON is YAML


@pytest.fixture
def seeded(make_run, call):
    """seeded("b", {1: 2.0, 2: 2.1}) -> runs that differ in seed and, by this much, in their test loss."""

    def make(layers: str, losses: dict[int, float], name: str = "") -> list[Path]:
        name = name or {"b": "baseline", "d": "diff", "i": "introspective"}[layers]
        first = make_run(f"{name}-s{min(losses)}", layers)
        call(perplexity, f"run={first}", "tokens=640")
        folders = []
        for seed, loss in losses.items():
            folder = first.with_name(f"{name}-s{seed}")
            if folder != first:
                shutil.copytree(first, folder)
            edit(folder / "config.yaml", "seed", seed)
            edit(folder / "eval" / "perplexity.json", "results.loss", loss)
            folders.append(folder)
        return folders

    return make


def further(run: Path, name: str, results: dict, **config: object) -> None:
    """Write eval/NAME.json as write_result does, and a figure, of which a page needs the header alone."""
    content = {"eval": name, "run": run.name, "config": {"run": str(run), **config}, "step": 4, "results": results}
    write_json(run / "eval" / f"{name}.json", content)
    write_atomic(run / "figures" / f"{name}.png", bytes(24))
