"""scripts/export.py as a user calls it, on runs made here."""

import json
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from data.config import TokenizerConfig
from data.tokenizer import SAMPLE, build_tokenizer
from model.decoder import Decoder
from scripts import export
from tests.variants import config
from training.checkpoint import save

transformers = pytest.importorskip("transformers", reason="needs the package transformers")
pytestmark = pytest.mark.usefixtures("remote_code")
SCRIPT = "scripts/export.py"


def make_run(path: Path, variant: str) -> Decoder:
    """A run directory with two checkpoints of a model of the variant; returns the newest."""
    path.mkdir()
    (path / "config.yaml").write_text("data: {}\n")
    build_tokenizer(TokenizerConfig("bytes")).save(path)
    for step in (0, 10):
        model = Decoder(config(variant, vocab_size=257), seed=step).eval()
        save(path, step, model, [])
    return model


@torch.no_grad()
def logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()(tokens).logits


@pytest.mark.parametrize(
    ("variant", "to", "form"),
    [("interleaved", ("to=llama",), "llama"), ("diff", (), "diffllama"), ("introspective", (), "remote")],
)
def test_a_run_becomes_a_folder_of_transformers(variant: str, to: tuple, form: str, call, tmp_path: Path) -> None:
    model, out = make_run(tmp_path / "run", variant), tmp_path / "out" / "folder"
    printed = call(f"run={tmp_path}/run", f"out={out}", *to)
    assert f"at step 10 as {form}; logits differ from the run's by at most " in printed
    assert ("trust_remote_code=True" in printed) == (form == "remote") and "AutoTokenizer" in printed
    assert [path.name for path in out.parent.iterdir()] == ["folder"]  # and nothing half written beside it
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in out.iterdir()}
    x = torch.arange(30)[None]
    torch.testing.assert_close(logits(out, x), model(x).detach(), rtol=0, atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    assert set(tokenizer("a")) == {"input_ids", "attention_mask"}  # generate() refuses what the model does not take
    assert tokenizer(SAMPLE)["input_ids"] == list(SAMPLE.encode()) and tokenizer.eos_token_id == tokenizer.pad_token_id == 256
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 256


def test_an_older_step_without_a_tokenizer(call, tmp_path: Path) -> None:
    make_run(tmp_path / "run", "diff_v2")
    printed = call(f"run={tmp_path}/run", f"out={tmp_path}/out", "step=0", "tokenizer=false", "check=false")
    assert "at step 0 as remote; not compared" in printed and "okenizer" not in printed
    files = {file.name: file.stat().st_mode for file in (tmp_path / "out").iterdir()}
    assert {"README.md", "modeling.py"} <= files.keys() and not files.keys() & {"tokenizer.json", "tokenizer_config.json"}
    assert len(set(files.values())) == 1  # as the umask says
    first, x = Decoder(config("diff_v2", vocab_size=257, backend="sdpa"), seed=0).eval(), torch.arange(30)[None]
    assert torch.equal(logits(tmp_path / "out", x), first(x))


def test_the_card_says_what_the_model_is(call, tmp_path: Path) -> None:
    model = make_run(tmp_path / "run", "diff")
    values = {"model": {"layers": "d", "n_layer": 2}, "seed": 3, "steps": 10, "batch_tokens": 512}
    values |= {"data": {"name": "tiny", "source": "text", "dir": "/home/me/shards", "path": "/home/me/text"}}
    (tmp_path / "run" / "config.yaml").write_text(json.dumps(values))
    lines = [{"step": 0, "tokens": 0, "version": "abc"}, {"step": 10, "tokens": 5120, "loss": 2.5, "val_loss": 2.625}]
    lines += [{"step": 20, "tokens": 9999, "loss": 1.0}]  # after the exported step
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    call(f"run={tmp_path}/run", f"out={tmp_path}/out", "check=false")
    card = (tmp_path / "out" / "README.md").read_text()
    for line in (
        "library_name: transformers", "- diff\n", "diff (layers=d), written as diffllama", "| tokens | 5,120 |",
        f"| parameters | {model.num_params(non_embedding=False):,} ({model.num_params():,} without",
        "| training loss | 2.5000", "| validation loss | 2.6250", "tiny (source text), tokenizer bytes",
        "| code version | abc |", "| seed | 3 |",
        "AutoModelForCausalLM.from_pretrained('out')",
    ):  # fmt: skip
        assert line in card, (line, card)
    assert "/home/me" not in card and str(tmp_path) not in card and "9,999" not in card


def test_a_folder_is_pushed_and_the_token_is_not_shown(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    make_run(tmp_path / "run", "diff")
    run, hub, seen = f"run={tmp_path}/run", Mock(), []
    hub.upload_folder.side_effect = lambda folder_path, **options: seen.extend(path.name for path in folder_path.iterdir())
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    printed = call(run, f"out={tmp_path}/one", "check=false", "push=me/small.model")
    assert "uploaded to https://huggingface.co/me/small.model" in printed and "README.md" in seen
    hub.create_repo.assert_called_once_with("me/small.model", private=True, exist_ok=True)
    assert "from_pretrained('me/small.model')" in (tmp_path / "one" / "README.md").read_text()
    hub.upload_folder.side_effect = RuntimeError("403 for Authorization: Bearer hf_secret")
    printed = call(run, f"out={tmp_path}/two", "check=false", "push=me/small")
    assert "the upload failed (RuntimeError): type `hf auth login`" in printed and "secret" not in printed
    assert (tmp_path / "two" / "model.safetensors").is_file()


def test_a_folder_that_computes_something_else_is_not_left_behind(call, tmp_path: Path, monkeypatch) -> None:
    make_run(tmp_path / "run", "baseline")
    run, out, whole = f"run={tmp_path}/run", f"out={tmp_path}/out", export.export

    def broken(*arguments: object) -> tuple:
        exported = whole(*arguments)
        exported.tensors["model.norm.weight"] = 1.01 * exported.tensors["model.norm.weight"]
        return exported

    monkeypatch.setattr(export, "export", broken)
    assert "the exported model's logits differ from the run's by" in call(run, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    model, plain = (Decoder(config("baseline", vocab_size=257, context=256, window=w)).eval() for w in (70, None))
    plain.load_state_dict(model.state_dict())  # agrees on 64 tokens: the check sees past the window
    assert export.compared(model, model).endswith("280 random tokens)")
    with pytest.raises(ValueError, match="the exported model's logits differ from the run's"):
        export.compared(plain, model)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "as llama; not compared: transformers is not installed" in call(run, out)
