"""scripts/sample.py: texts are as typed, reproducible, and within their limits."""

import itertools
import json
import random
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from configs.composing import quoted
from data.config import TokenizerConfig
from data.tokenizer import build_tokenizer
from model.config import DecoderConfig
from model.decoder import Decoder
from scripts.sample import SampleConfig, as_typed
from tests.conftest import Typed
from tests.variants import stirred
from training import checkpoint
from training.checkpoint import save


def make_run(folder: Path, **more: object) -> Path:
    """A run whose model says something else after every text (its weights are large)."""
    tokenizer = build_tokenizer(TokenizerConfig(name="bytes"))
    cfg = {"n_layer": 2, "n_head": 4, "d_model": 32, "context": 64, "vocab_size": tokenizer.vocab_size} | more
    model = stirred(Decoder(DecoderConfig(**cfg)), 0.2, 3)
    save(folder, 4, model, [])
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": asdict(model.cfg)}))
    tokenizer.save(folder)
    return folder


@pytest.fixture
def call(typed: Typed) -> Typed:
    """call(run=..., prompt=...) -> what the command printed and its exit code."""
    return lambda **options: typed("scripts/sample.py", *(f"{key}={value}" for key, value in options.items()))


def test_texts_arrive_as_typed() -> None:
    """Through Hydra's grammar and OmegaConf's interpolations."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser, draw = OverridesParser.create(), random.Random(0)
    texts = ['Yes, it\'s "so"', "a: {b} [c] (d) = e", "${run}", "\\${x} \\", "null?", "12", "true", "1e3", "x\ny", "日本, é"]
    texts += ["".join(draw.choices("\\'\"${}x,=\n ", k=draw.randint(1, 8))) for _ in range(60)]
    for text in texts:
        for argument in (as_typed(f"prompt={text}"), quoted(f"prompt={text}")):
            cfg = OmegaConf.structured(SampleConfig)
            OmegaConf.update(cfg, "prompt", parser.parse_override(argument).value())
            assert cfg.prompt == text
    for argument in ("run=a,b", "prompt=null", "prompt=[a,b]", "--help", "prompt", "temperature=1"):
        assert as_typed(argument) == argument
    assert as_typed("prompt=[x] and [y]") == "prompt='[x] and [y]'"


def test_one_prompt_several_or_none(tmp_path: Path, call: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"run": make_run(tmp_path / "run"), "max_tokens": 6, "temperature": 0}
    one = call(prompt="It was\n", **options)
    assert one.returncode == 0 and one.stdout.startswith("It was\n") and len(one.stdout) > 8
    several = call(prompt='["It was\n","Nobody, here"]', **options).stdout
    assert several.startswith(f"--- 1 of 2, seed 0\n{one.stdout}--- 2 of 2, seed 0\nNobody, here")
    assert call(**options).stdout.strip()  # without a prompt, a document from its beginning
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert call(prompt="\x1b[2Ja", **options).stdout.startswith("\ufffd[2Ja")  # a terminal would obey this


@pytest.mark.parametrize("model", [{"layers": "i"}, {"position": "learned", "norm": "layernorm"}, {"layers": "v", "window": 8}])
def test_a_text_depends_on_its_prompt_and_seed_alone(model: dict, tmp_path: Path, call: Typed) -> None:
    """Batches, padding and neighbours change nothing; the text is what the model generates."""
    run, path = make_run(tmp_path / "run", **model), tmp_path / "deep" / "samples.json"
    sampling = {"temperature": 1.2, "top_k": 50, "top_p": 0.97}
    options = {"run": run, "prompt": '["Hello","It was a long, long road"]', "samples": 2, "max_tokens": 12, "seed": 5}
    options |= sampling
    printed = [call(batch=batch, **options).stdout for batch in (1, 3)]
    assert printed[0] == printed[1]
    loaded = checkpoint.load_run(run)
    texts = set()
    for i, prompt in enumerate(("Hello", "It was a long, long road")):
        for j in range(2):
            tokens = torch.tensor([[loaded.tokenizer.eot, *loaded.tokenizer.encode(prompt)]])
            new = loaded.model.generate(tokens, 12, **sampling, generator=torch.Generator().manual_seed(5 + j))
            new = [*itertools.takewhile(lambda token: token != loaded.tokenizer.eot, new[0, tokens.shape[1] :].tolist())]
            out = f"--- {2 * i + j + 1} of 4, seed {5 + j}\n{prompt}{loaded.tokenizer.decode(new)}\n"
            assert out in printed[0]
            texts.add(out)
    assert len(texts) == 4

    done = call(out=path, **options)
    content = json.loads(path.read_text())
    assert {"eval", "run", "step", "config", "machine", "version", "results"} == set(content)
    assert content["config"]["top_p"] == 0.97 and content["step"] == 4
    samples, speed = content["results"]["samples"], content["results"]["speed"]
    assert [s["seed"] for s in samples] == [5, 6, 5, 6] and all(f"{s['text']}\n" in done.stdout for s in samples)
    assert all(s["ended"] == ("length" if len(s["tokens"]) == 12 else "end of text") for s in samples)
    assert speed["new_tokens"] == sum(len(s["tokens"]) for s in samples) and "tokens/s" in done.stderr


def test_the_trained_context_is_the_limit(tmp_path: Path, call: Typed) -> None:
    rope, learned = make_run(tmp_path / "rope"), make_run(tmp_path / "learned", position="learned", norm="layernorm")
    both = call(run=rope, prompt=[">" * 60, ">"], temperature=0, out=tmp_path / "both.json")
    assert both.returncode == 0
    assert [len(s["tokens"]) for s in json.loads((tmp_path / "both.json").read_text())["results"]["samples"]] == [3, 62]
    assert call(run=rope, prompt="123456789", max_tokens=80).returncode == 0
    refused = call(run=learned, prompt="123456789", max_tokens=80)
    assert refused.returncode == 2 and "exceed the 64 learned positions" in refused.stderr
