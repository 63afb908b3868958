"""scripts/convert.py as a user types it: what it writes is read by everything else, and its last line trains on."""

import json
import shlex
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml

from configs import composing
from data.config import TokenizerConfig
from data.tokenizer import build_tokenizer, load_tokenizer
from data.tokenizer_export import export_tokenizer
from eval.perplexity import cut_windows, evaluate
from model.decoder import Decoder
from scripts import convert
from tests.conftest import run_command, train_arguments
from tests.eval.conftest import edit
from tests.scripts.conftest import Call
from tests.variants import stirred
from training.checkpoint import load_run, save

SCRIPT = "scripts/convert.py"


@pytest.fixture(scope="module")
def source(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A baseline with grouped keys, whose weights are random."""
    run = tmp_path_factory.mktemp("source") / "base line"  # a name that shells and Hydra want quoted
    options = ("model.n_kv_head=2", "model.context=32", "optim.lr=1e-2", "optim.beta2=0.9")
    config = convert.train_config(train_arguments(shards, Path("unused"), *options)[1:])
    tokenizer = load_tokenizer(shards)
    config.model.vocab_size = tokenizer.vocab_size
    model = stirred(Decoder(config.model), 0.05, 0)
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump(asdict(config) | {"model": asdict(model.cfg)}))
    tokenizer.save(run)
    save(run, 12, model, [])
    return run


@pytest.fixture
def call(call: Call) -> Call:
    """The fixture `call` on the CPU, with every value in Hydra's quotes."""
    return lambda *arguments: call("device=cpu", *(a if a.endswith("]") else composing.quoted(a) for a in arguments))


def printed_command(printed: str) -> list[str]:
    (line,) = [line for line in printed.splitlines() if line.startswith("train on ")]
    return shlex.split(line.split("python ", 1)[1])


def record_of(run: Path) -> dict:
    return json.loads((run / "conversion.json").read_text())


def loss(path: Path) -> float:
    run = load_run(path)
    windows = cut_windows(convert.evaluation_tokens(run, convert.TextEvalConfig(run=str(path))), 32, 640)
    return evaluate(run.model, windows, run.tokenizer.byte_lengths())["loss"]


def test_the_converted_run_is_a_run_and_its_last_line_trains_on(source: Path, tmp_path: Path, call: Call) -> None:
    out = tmp_path / "zero"
    printed = call(f"source={source}", f"run_dir={out}", "debug=true", "tokens=640", "prompt=the quick")
    record = record_of(out)
    assert record["change"]["max_logit"] < 1e-4 and record["exact"] and record["conversion"]["init"] == "zero"
    assert record["text"] == "text" and record["change"]["tokens"] == 640
    assert record["loss"][0] == pytest.approx(record["loss"][1], abs=1e-5)
    assert record["sample"][0] == record["sample"][1] and record["sample"][0].startswith("the quick")
    assert len(record["change"]["hidden"]) == 2 and {"machine", "version", "source"} <= record.keys()
    assert "perplexity" in printed and "at most" in printed and "changes the function" not in printed
    run = load_run(out)
    assert run.step == 0 and run.model.cfg.layers == "d" and run.config["model"]["diff"]["heads"] == "double"
    assert run.config["optim"]["lr"] == 1e-2 and run.config["init_from"] is None
    assert loss(out) == pytest.approx(loss(source), abs=1e-5)
    first = json.loads((out / "metrics.jsonl").read_text())
    assert first["step"] == 0 and first["params"] == record["parameters"][1] > record["parameters"][0]

    command, trained = printed_command(printed), tmp_path / "trained"
    assert command[0] == "train.py" and "model.diff.lambda_warmup=200" in command and "optim.beta2=0.9" in command
    assert "optim.lr=0.001" in command  # a tenth
    more = [f"run_dir={trained}", "steps=6", "model.diff.lambda_warmup=4", "optim.warmup=1", "device=cpu", "log_every=5"]
    done = run_command(*[a for a in command if not a.startswith(("steps=", "model.diff.lambda_w", "optim.warm"))], *more)
    assert done.returncode == 0, done.stderr
    assert loss(trained) < loss(source) - 0.05
    after = load_run(trained)
    assert all(block.attention.lam().item() != 0 for block in after.model.blocks)
    assert after.config["optim"] == run.config["optim"] | {"warmup": 1, "lr": 1e-3}


MODES = (["to=diff_v2"], ["heads=split"], ["to=same"], ["to=dex"], ["init=mirror"], ["sublayer_norm=true", "second=random"])


@pytest.mark.parametrize("options", MODES, ids=lambda options: options[0])
def test_every_mode_is_written(options: list[str], source: Path, tmp_path: Path, call) -> None:
    out = tmp_path / "run"
    printed = call(f"source={source}", f"run_dir={out}", "tokens=640", *options)
    record = record_of(out)
    assert record["exact"] == (options[0] in ("to=diff_v2", "to=same", "to=dex", "init=mirror"))
    # A mirrored lambda must not be warmed up: it would be missed.
    assert options[0] != "init=mirror" or not any("lambda_warmup" in word for word in printed_command(printed))
    assert ("changes the function" in printed) != record["exact"]
    assert (record["change"]["max_logit"] < 1e-4) == record["exact"]
    assert not [word for word in printed_command(printed) if word.startswith("model") and "lambda_warmup" not in word]


def test_without_its_text_random_tokens_are_compared_and_a_differential_run_is_kept(source, tmp_path, call) -> None:
    alone, one, two = (tmp_path / name for name in ("alone", "one", "two"))
    shutil.copytree(source, alone)
    edit(alone / "config.yaml", "data.dir", str(tmp_path / "gone"))
    call(f"source={alone}", f"run_dir={one}")
    record = record_of(one)
    assert record["text"] == "random tokens" and "loss" not in record and record["change"]["max_logit"] < 1e-4
    assert "model.layers=d is not a baseline" in call(f"source={one}", f"run_dir={two}")
    call(f"source={one}", f"run_dir={two}", "to=same")
    before, after = (load_run(run).model.state_dict() for run in (one, two))
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_axolotls_file_converts_and_is_written_back(source: Path, tmp_path: Path, call, typed) -> None:
    """Its default costs loss, which is printed; its model is exported for it, and read again with the same logits."""
    path, out, model = tmp_path / "config.yml", tmp_path / "run", tmp_path / "model"
    config = {"base_model": str(source), "output_dir": str(model), "diff_attn_warmup_steps": 7, "learning_rate": 3e-4}
    path.write_text(yaml.safe_dump(config | {"sublayer_norm": False, "datasets": []}))
    printed, record = call(f"axolotl={path}", f"run_dir={out}", "tokens=640"), record_of(out)
    assert record["conversion"]["init"] == "open" and record["conversion"]["second"] == "random"
    before, after = record["loss"]
    assert f"{before:.4f} -> {after:.4f} nats per token right after the conversion ({after - before:+.4f})" in printed
    assert after != pytest.approx(before, abs=1e-4)
    command = printed_command(printed)
    assert "model.diff.lambda_warmup=7" in command and "optim.lr=0.0003" in command
    written = yaml.safe_load((out / "axolotl_config.yml").read_text())
    assert written["base_model"] == str(model) and written["diff_attention"] is True and written["datasets"] == []
    (line,) = [line for line in printed.splitlines() if "scripts/export.py" in line]
    assert typed(*shlex.split(line.split("python ")[1].split(", then")[0])).returncode == 0
    call(f"axolotl={out / 'axolotl_config.yml'}", f"run_dir={tmp_path / 'again'}", "tokens=640")
    tokens = torch.randint(257, (2, 30), generator=torch.Generator().manual_seed(0))
    one, two = (load_run(tmp_path / name).model for name in ("run", "again"))
    with torch.no_grad():
        torch.testing.assert_close(two(tokens), one(tokens), rtol=1e-5, atol=1e-5)
    assert "leave out init" in call(f"axolotl={path}", f"run_dir={tmp_path / 'x'}", "init=mirror")


@pytest.mark.parametrize("options", [["init=mirror"], ["to=diff_v2"]], ids=lambda o: o[0])
def test_a_transformers_folder_keeps_its_logits(options: list[str], tmp_path: Path, call: Call) -> None:
    """What save_pretrained writes for a random Llama with grouped keys, in bfloat16, whose vocabulary is padded."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    folder, out = tmp_path / "hf", tmp_path / "llama"
    config = transformers.LlamaConfig(
        vocab_size=272, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, max_position_embeddings=64, initializer_range=0.3, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    llama = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    export_tokenizer(build_tokenizer(TokenizerConfig(name="bytes")), folder, 64)
    printed, run = call(f"source={folder}", f"run_dir={out}", *options), load_run(out)
    tokens = torch.randint(272, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = llama(tokens).logits
        assert want.abs().max() > 1 and (run.model(tokens) - want).abs().max() < 1e-4
    assert run.tokenizer.encode("the fox") == list(b"the fox")
    rebuilt = convert.train_config(printed_command(printed)[1:])
    assert rebuilt.optim.lr == 1e-4 and rebuilt.data.tokenizer.path == str(folder)
