"""Our models in folders with their own code, run by transformers: logits, generation, caches, beams and padding."""

import json
import re
from pathlib import Path

import pytest
import torch

from model.config import DecoderConfig, decoder_config
from model.decoder import Decoder
from model.interop.huggingface import export
from model.interop.remote import flattened
from tests.model.test_huggingface import EXACT, apart, generated, loaded, tokens, write
from tests.variants import VARIANTS, config, randomized

transformers = pytest.importorskip("transformers", reason="needs the package transformers")
pytestmark = pytest.mark.usefixtures("remote_code")


def remote(model: Decoder) -> torch.nn.Module:
    """The model behind transformers' interface, from the repository's module, with the model's weights."""
    from model.interop.modeling import VariantConfig, VariantForCausalLM

    found = export(model, "remote")
    wrapped = VariantForCausalLM(VariantConfig(**found.config))
    wrapped.load_state_dict(found.tensors, strict=not model.cfg.tie)
    return wrapped.eval()


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_generates_in_transformers_with_its_cache(name: str) -> None:
    model = randomized(name).float().eval()
    wrapped = remote(model)
    assert apart(wrapped, model, vocab=50) < EXACT
    x = tokens(vocab=50)[:, :9]
    assert torch.equal(generated(wrapped, x), model.generate(x, 8))


@pytest.mark.parametrize("name", ("diff_v2", "introspective_sequence", "gpt2"))
def test_a_folder_with_its_own_code(name: str, tmp_path: Path) -> None:
    model = randomized(name, backend="sdpa").float().eval()  # what the folder's `auto` is: our own kernels stay here
    assert write(model, tmp_path / name, "remote") == "remote"
    load = transformers.AutoModelForCausalLM.from_pretrained
    exported, report = load(tmp_path / name, trust_remote_code=True, output_loading_info=True)
    assert not any(map(len, report.values())) and "repository" not in type(exported).__module__
    assert type(exported).__module__.startswith("transformers_modules")
    assert apart(exported.eval(), model, vocab=50) == 0
    x = tokens(vocab=50)[:, :9]
    assert torch.equal(generated(exported, x), model.generate(x, 8))
    exported.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again", trust_remote_code=True).eval()
    assert apart(again, model, vocab=50) == 0
    assert apart(exported, loaded(tmp_path / "again"), vocab=50) < EXACT
    half = load(tmp_path / name, trust_remote_code=True, dtype=torch.bfloat16).eval()
    assert half(x).logits.dtype == torch.bfloat16 and generated(half, x).shape == (2, 17)


def test_the_exported_code_stands_alone() -> None:
    files = flattened()
    assert {"modeling.py", "decoder.py", "attention_diff_v2.py", "attention_reference.py"} <= files.keys()
    for name, text in files.items():
        assert not re.search(r"^\s*(from|import) (model|data|training|triton)\b", text, re.MULTILINE), name
        for module in re.findall(r"^\s*from \.(\w+) import", text, re.MULTILINE):
            assert f"{module}.py" in files, (name, module)
        if name != "modeling.py":  # transformers copies what modeling.py names
            assert f"from .{name.removesuffix('.py')} import" in files["modeling.py"]


@pytest.mark.parametrize("name", ("baseline", "introspective", "hybrid"))
def test_padding_on_the_left_beams_and_the_loss(name: str) -> None:
    model = randomized(name, window=6).float().eval()
    wrapped = remote(model)
    x = tokens(vocab=50)[:, :9]
    mask = torch.ones_like(x)
    mask[0, :4] = 0
    both = generated(wrapped, x, attention_mask=mask)
    alone = generated(wrapped, x[:1, 4:])
    assert torch.equal(both[0, 9:], alone[0, 5:])
    assert torch.equal(generated(wrapped, x, num_beams=3), generated(wrapped, x, num_beams=3, use_cache=False))
    labels = x.clone()
    labels[0, :3] = -100
    want = model(x[:, :-1], labels[:, 1:])
    torch.testing.assert_close(wrapped(x, labels=labels).loss, want)
    assert wrapped(x, logits_to_keep=2).logits.shape == (2, 2, 50)


def test_document_masks_follow_the_beams() -> None:
    model = randomized("diff_v2", document_mask=True, eot=7).float().eval()
    wrapped = remote(model)
    x = tokens(vocab=50)[:, :9]
    x[:, 5] = 7
    assert torch.equal(generated(wrapped, x), model.generate(x, 8))
    assert torch.equal(generated(wrapped, x, num_beams=4), generated(wrapped, x, num_beams=4, use_cache=False))


def test_what_the_exported_code_cannot_do_is_said() -> None:
    wrapped = remote(randomized("gpt2").float())
    x = tokens(vocab=50)[:, :9]
    mask = torch.ones_like(x)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="shifts learned positions"):
        wrapped(x, attention_mask=mask)
    with pytest.raises(ValueError, match="leave out 4-D masks"):
        wrapped(x, attention_mask=torch.zeros(2, 1, 9, 9))
    with pytest.raises(ValueError, match="leave out inputs_embeds"):
        wrapped(x, inputs_embeds=torch.zeros(2, 9, 64))
    with pytest.raises(ValueError, match="leave out cache_implementation"):
        generated(wrapped, x, cache_implementation="static")


def test_a_configuration_survives_json() -> None:
    from dataclasses import asdict

    for name in VARIANTS:
        cfg = config(name).filled()
        assert decoder_config(json.loads(json.dumps(asdict(cfg)))) == cfg
    with pytest.raises(ValueError, match="model has no option no_such_key"):
        decoder_config({"no_such_key": 1})
    assert isinstance(decoder_config({}), DecoderConfig)
    dropouts = {"dropout": 0.1, "attention_dropout": 0.2, "projection_dropout": 0.3}
    stack = export(randomized("diff", **dropouts), "remote").config["stack"]
    assert {name: stack[name] for name in dropouts} == dict.fromkeys(dropouts, 0.0)
