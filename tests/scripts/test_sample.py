"""scripts/sample.py: the text that streams out is the text decoded whole, as typed, reproducible, and within its limits."""

import io
import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from configs.composing import quoted
from data.config import TokenizerConfig
from data.tokenizer import Tokenizer, build_tokenizer
from model.config import DecoderConfig
from model.decoder import Decoder
from scripts import sample
from scripts.sample import SampleConfig, Screen, Text, as_typed
from tests.conftest import Typed
from training import checkpoint
from training.saver import save


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer(TokenizerConfig(name="bytes"))


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    words = "the rain had stopped über naïve 日本語 🙂🙂 and so on and on\n" * 30
    return build_tokenizer(TokenizerConfig("bpe", 300), [words])


@pytest.fixture
def make_run(tmp_path: Path, tokenizer: Tokenizer) -> Callable[..., Path]:
    """make_run(layers="d") -> a run whose model says something else after every text (its weights are large)."""

    def make(name: str = "run", **more: object) -> Path:
        folder = tmp_path / name
        cfg = {"n_layer": 2, "n_head": 4, "d_model": 32, "context": 64, "vocab_size": tokenizer.vocab_size} | more
        model, generator = Decoder(DecoderConfig(**cfg)), torch.Generator().manual_seed(3)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape, generator=generator) * 0.2)
        save(folder, 4, model, [])
        (folder / "config.yaml").write_text(yaml.safe_dump({"model": asdict(model.cfg)}))
        tokenizer.save(folder)
        return folder

    return make


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, typed: Typed) -> Typed:
    """call(run=..., prompt=...) -> what the command printed and its exit code."""

    def type_in(stdin: bytes = b"", **options: object) -> subprocess.CompletedProcess:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        return typed("scripts/sample.py", *(f"{key}={value}" for key, value in options.items()))

    return type_in


def before_first_stop(text: str, stops: list[str]) -> str:
    """`text` before the stop string that is complete first, found letter by letter."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)]
    return text


@pytest.mark.parametrize("cut", ("bytes", "bpe"))
def test_streamed_text_is_the_text_decoded_whole(cut: str, tokenizer: Tokenizer, bpe: Tokenizer) -> None:
    """Random tokens and stop strings: whatever is shown stays, and in the end it is the whole, up to the stop."""
    tokenizer, draw = {"bytes": tokenizer, "bpe": bpe}[cut], random.Random(0)
    letters, ended = "and é日本\n", 0
    for _ in range(200):
        tokens = tokenizer.encode("".join(draw.choices(letters, k=draw.randint(1, 30))))
        if draw.random() < 0.3:  # bytes that are no UTF-8
            tokens = [draw.choice((token, draw.randrange(256))) for token in tokens]
        stops = ["".join(draw.choices(letters, k=draw.randint(1, 3))) for _ in range(draw.randint(0, 3))]
        text, shown = Text(tokenizer, stops), [""]
        for token in tokens:
            if text.ended is None:
                text.add(token)
                assert text.text.startswith(shown[-1])
                shown.append(text.text)
        text.end("length")
        assert text.text == before_first_stop(tokenizer.decode(tokens), stops)
        assert text.ended == ("stop" if text.text != tokenizer.decode(tokens) else "length")
        ended += text.ended == "stop"
    assert 25 < ended < 175


def test_nothing_is_shown_before_it_is_certain(tokenizer: Tokenizer) -> None:
    text = Text(tokenizer, ["END", "\n\n"])
    shown = []
    for byte in "é🙂 EEN\n🙂".encode():
        text.add(byte)
        shown.append(text.text)
    certain = ["", "é", "é", "é", "é", "é🙂", "é🙂 ", "é🙂 ", "é🙂 E", "é🙂 E"]  # E may begin END
    assert shown == [*certain, *["é🙂 EEN"] * 4, "é🙂 EEN\n🙂"]  # and a newline two of them
    text.add("é".encode()[0])
    text.end("length")
    assert text.text == "é🙂 EEN\n🙂\ufffd"  # half a character at the end


def test_the_end_of_text_token_ends_a_text_and_is_not_shown(tokenizer: Tokenizer) -> None:
    text = Text(tokenizer, ["bc"])
    for token in (97, tokenizer.vocab_size + 5, 98, tokenizer.eot):  # one of them has no text
        text.add(token)
    text.end("length")
    assert (text.text, text.ended, len(text.tokens)) == ("ab", "end of text", 3)


def test_texts_come_in_order_the_first_unfinished_one_as_it_grows(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [Text(tokenizer), Text(tokenizer), Text(tokenizer)]
    screen, seen = Screen(["1:", "2:", "3:"], texts), []
    for letters in ("ax", "by", "c."):
        for text, letter in zip(texts, letters, strict=False):
            text.add(ord(letter))
        screen.update()
        seen.append(capsys.readouterr().out)
    texts[1].end("stop")
    texts[0].end("stop")
    screen.update()
    assert [*seen, capsys.readouterr().out] == ["1:a", "b", "c", "\n2:xy.\n3:"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for code in (27, 0xC2, 0x9B):  # ESC, and the two bytes of U+009B, which means ESC and [
        texts[2].add(code)
    screen.update()
    assert capsys.readouterr().out == "\ufffd\ufffd"  # a terminal would obey these


def test_texts_arrive_as_typed() -> None:
    """Through Hydra's grammar and OmegaConf's interpolations."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser, draw = OverridesParser.create(), random.Random(0)
    texts = [
        'Yes, it\'s "so"',
        "a: {b} [c] (d) = e",
        "${run}",
        "\\${x} \\",
        "null?",
        "12",
        "true",
        "1e3",
        "nan",
        "x\ny",
        "日本, é",
    ]
    texts += ["".join(draw.choices("\\'\"${}x,=\n ", k=draw.randint(1, 8))) for _ in range(60)]
    for text in texts:
        for argument in (as_typed(f"prompt={text}"), quoted(f"prompt={text}")):
            cfg = OmegaConf.structured(SampleConfig)
            OmegaConf.update(cfg, "prompt", parser.parse_override(argument).value())
            assert cfg.prompt == text
    for argument in ("run=a,b", "prompt=null", "prompt=[a,b]", "--help", "prompt", "temperature=1"):
        assert as_typed(argument) == argument
    assert as_typed("prompt=[x] and [y]") == "prompt='[x] and [y]'"


def test_prompts_stops_and_files(tmp_path: Path, make_run: Callable[..., Path], call: Callable) -> None:
    run, file = make_run(), tmp_path / "prompt.txt"
    file.write_text("It was\n\n", encoding="utf-8")
    options = {"run": run, "max_tokens": 6, "temperature": 0}
    typed = call(prompt="It was\n", **options)
    assert typed.returncode == 0 and typed.stdout.startswith("It was\n") and len(typed.stdout) > 8
    assert call(file=file, **options).stdout == typed.stdout  # one newline at the end is the file's
    assert call(file="-", stdin=b"It was\n\n", echo="false", **options).stdout == typed.stdout.removeprefix("It was\n")
    several = call(prompt='["It was\n","Nobody, here"]', **options).stdout
    assert several.startswith(f"--- 1 of 2, seed 0\n{typed.stdout}--- 2 of 2, seed 0\nNobody, here")
    assert call(**options).stdout.strip()  # without a prompt, a document from its beginning


@pytest.mark.parametrize("model", [{"layers": "i"}, {"position": "learned", "norm": "layernorm"}, {"layers": "v", "window": 8}])
def test_a_text_depends_on_its_prompt_and_seed_alone(model: dict, make_run: Callable[..., Path], call: Callable) -> None:
    """Batches, padding and neighbours change nothing; the text is what the model generates."""
    run, out = make_run(**model), None
    options = {"run": run, "prompt": '["Hello","It was a long, long road"]', "samples": 2, "max_tokens": 12, "seed": 5}
    options |= {"temperature": 1.2, "top_k": 50, "top_p": 0.97}
    printed = [call(batch=batch, **options).stdout for batch in (1, 3)]
    assert printed[0] == printed[1]
    loaded = checkpoint.load_run(run)
    texts = set()
    for i, prompt in enumerate(("Hello", "It was a long, long road")):
        for j in range(2):
            tokens = torch.tensor([[loaded.tokenizer.eot, *loaded.tokenizer.encode(prompt)]])
            generator = torch.Generator().manual_seed(5 + j)
            new = loaded.model.generate(tokens, 12, temperature=1.2, top_k=50, top_p=0.97, generator=generator)
            new = new[0, tokens.shape[1] :].tolist()
            new = new[: new.index(loaded.tokenizer.eot)] if loaded.tokenizer.eot in new else new
            out = f"--- {2 * i + j + 1} of 4, seed {5 + j}\n{prompt}{loaded.tokenizer.decode(new)}\n"
            assert out in printed[0]
            texts.add(out)
    assert len(texts) == 4


def test_out_holds_texts_settings_and_speed(tmp_path: Path, make_run: Callable[..., Path], call: Callable) -> None:
    run, out = make_run(), tmp_path / "deep" / "samples.json"
    done = call(run=run, prompt="a", samples=3, max_tokens=20, stop="e", top_p=0.9, out=out, seed=11)
    content = json.loads(out.read_text())
    assert {"eval", "run", "step", "config", "machine", "version", "results"} == set(content)
    assert content["config"]["top_p"] == 0.9 and content["step"] == 4
    samples, speed = content["results"]["samples"], content["results"]["speed"]
    assert [s["seed"] for s in samples] == [11, 12, 13]
    for s in samples:
        assert f"a{s['text']}\n" in done.stdout and "e" not in s["text"]
        assert s["ended"] in ("stop", "length", "end of text") and (s["ended"] == "stop" or len(s["tokens"]) == 20)
    assert speed["prompt_tokens"] == 6 and speed["new_tokens"] == sum(len(s["tokens"]) - 1 for s in samples)
    assert all(part in done.stderr for part in (f"{speed['new_tokens']} tokens after", "tokens/s", "step 4, cpu"))


def test_the_trained_context_is_the_limit(tmp_path: Path, make_run: Callable[..., Path], call: Callable) -> None:
    rope, learned = make_run("rope"), make_run("learned", position="learned", norm="layernorm")
    for run in (rope, learned):
        model = checkpoint.load_run(run).model
        assert sample.new_tokens(SampleConfig(run=""), model, 10) == 54
        assert sample.new_tokens(SampleConfig(run="", max_tokens=54), model, 10) == 54
        refused = call(run=run, prompt="x" * 64)
        assert "the prompt has 65 tokens, but the trained context has 64: shorten" in refused.stderr
    both = call(run=rope, prompt=[">" * 60, ">"], temperature=0, out=tmp_path / "both.json")
    assert both.returncode == 0
    assert [len(s["tokens"]) for s in json.loads((tmp_path / "both.json").read_text())["results"]["samples"]] == [3, 62]
    beyond = call(run=rope, prompt="123456789", max_tokens=80)
    assert beyond.returncode == 0
    assert "note: 10 + 80 tokens exceed the trained context" in beyond.stderr
    refused = call(run=learned, prompt="123456789", max_tokens=80)
    assert refused.returncode == 2 and refused.stderr.strip().endswith("use max_tokens=54")


def test_an_interruption_leaves_what_is_there(
    make_run: Callable[..., Path], call: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> object:
        steps = original(*arguments)
        yield next(steps)
        yield next(steps)
        raise KeyboardInterrupt

    original = sample.decode
    monkeypatch.setattr(sample, "decode", interrupted)
    done = call(run=make_run(), prompt="Hello")
    assert done.returncode == 0 and done.stdout.startswith("Hello")
    assert "1 tokens after each text's first in" in done.stderr
