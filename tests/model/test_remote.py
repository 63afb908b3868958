"""Our models in folders with their code, run by transformers: logits, generation, caches, beams and padding."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.decoder import Decoder
from model.interop.huggingface import export
from model.interop.remote import flattened
from tests.model.test_huggingface import EXACT, apart, generated, loaded, tokens, transformers, write
from tests.variants import VARIANTS, randomized

pytestmark = pytest.mark.usefixtures("remote_code")
load = partial(transformers.AutoModelForCausalLM.from_pretrained, trust_remote_code=True)


def remote(model: Decoder) -> torch.nn.Module:
    """The model behind transformers' interface, from the repository's module, with the model's weights."""
    from model.interop.modeling import VariantConfig, VariantForCausalLM

    exported = export(model, "remote")
    wrapped = VariantForCausalLM(VariantConfig(**exported.config))
    wrapped.load_state_dict(exported.tensors, strict=not model.cfg.tie)
    return wrapped.eval()


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_generates_in_transformers_with_its_cache(name: str, tmp_path: Path) -> None:
    """And its folder is read back to the bit."""
    model = randomized(name).float().eval()
    wrapped, x = remote(model), tokens(vocab=50)[:, :9]
    assert apart(wrapped, model, vocab=50) < EXACT
    assert torch.equal(generated(wrapped, x), model.generate(x, 4))
    write(model, tmp_path, "remote")
    back = loaded(tmp_path)
    assert back.cfg == model.cfg
    torch.testing.assert_close(back.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(randomized("diff", backend="sdpa").float(), tmp_path, "remote")
    return tmp_path


def test_a_folder_with_its_own_code(tmp_path: Path) -> None:
    # what the folder's `auto` is: our kernels stay here
    model = randomized("introspective_sequence", backend="sdpa", attention_dropout=0.2).float().eval()
    write(model, tmp_path / "first", "remote")
    assert export(model, "remote").config["stack"]["attention_dropout"] == 0  # dropout stays here
    exported, report = load(tmp_path / "first", output_loading_info=True)
    assert not any(map(len, report.values())) and "repository" not in type(exported).__module__
    assert type(exported).__module__.startswith("transformers_modules")
    assert apart(exported.eval(), model, vocab=50) == 0
    x = tokens(vocab=50)[:, :9]
    assert torch.equal(generated(exported, x), model.generate(x, 4))
    exported.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again").eval()
    assert apart(again, model, vocab=50) == 0
    assert apart(exported, loaded(tmp_path / "again"), vocab=50) < EXACT
    half = load(tmp_path / "first", dtype=torch.bfloat16).eval()
    assert half(x).logits.dtype == torch.bfloat16 and generated(half, x).shape == (2, 13)


def test_the_exported_code_stands_alone() -> None:
    files = flattened()
    assert {"modeling.py", "decoder.py", "attention_diff_v2.py", "attention_reference.py"} <= files.keys()
    for name, text in files.items():
        assert not re.search(r"^\s*(from|import) (model|data|training|triton)\b", text, re.MULTILINE), name
        for module in re.findall(r"^\s*from \.(\w+) import", text, re.MULTILINE):
            assert f"{module}.py" in files, (name, module)
        if name != "modeling.py":  # transformers copies what modeling.py names
            assert f"from .{name.removesuffix('.py')} import" in files["modeling.py"]


@pytest.mark.parametrize(
    ("name", "changes"), [("introspective", {"window": 6}), ("diff_v2", {"document_mask": True, "eot": 7})]
)
def test_padding_on_the_left_beams_and_the_loss(name: str, changes: dict) -> None:
    model = randomized(name, **changes).float().eval()
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


@pytest.mark.parametrize("changes", ({}, {"document_mask": True, "eot": 7}))
def test_packed_documents_do_not_see_each_other(changes: dict) -> None:
    """Row and positions as DataCollatorWithFlattening makes them."""
    model = randomized("diff", **changes).float().eval()
    x = tokens(vocab=50)[:1, :12]
    x[0, 8] = 7
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    wrapped = remote(model)
    parts = torch.cat([model(x[:, :5]), model(x[:, 5:])], dim=1)
    torch.testing.assert_close(wrapped(x, position_ids=positions).logits, parts, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="leave out use_cache"):
        wrapped(x, position_ids=positions, use_cache=True)


def test_new_tokens_are_saved_with_the_others(folder: Path, tmp_path: Path) -> None:
    model, x = load(folder).eval(), tokens(vocab=50)
    before = model(x).logits
    for size, mean in ((53, True), (55, False)):
        model.resize_token_embeddings(size, mean_resizing=mean)
        model.save_pretrained(tmp_path / str(size))
        for wider in (model(x).logits, load(tmp_path / str(size)).eval()(x).logits):
            assert wider.shape[-1] == size and torch.equal(wider[..., :50], before)


def test_gradient_checkpointing_and_tuples() -> None:
    wrapped, x = remote(randomized("diff").float()).train(), tokens(vocab=50)
    plain = wrapped(x, labels=x, return_dict=False)
    wrapped.activation_checkpointing_enable()
    assert wrapped.decoder.gradient_checkpointing and isinstance(plain, tuple)
    assert torch.equal(wrapped(x, labels=x).loss, plain[0])
    wrapped.activation_checkpointing_disable()
    assert not wrapped.decoder.gradient_checkpointing


def test_what_the_exported_code_cannot_do_is_said() -> None:
    wrapped = remote(randomized("gpt2").float())
    x = tokens(vocab=50)[:, :9]
    mask, packed = torch.ones_like(x), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    mask[0, 0] = 0
    for options, says in (
        ({"input_ids": x, "attention_mask": mask}, "shifts learned positions"),
        ({"input_ids": x, "attention_mask": torch.zeros(2, 1, 9, 9)}, "leave out 4-D masks"),
        ({"input_ids": x, "position_ids": packed}, "with learned positions, give rows of one document"),
        ({"inputs_embeds": torch.zeros(2, 9, 64)}, "leave out inputs_embeds"),
        ({"input_ids": x, "output_attentions": True}, "leave out output_attentions"),
        ({"input_ids": x, "output_hidden_states": True}, "leave out output_hidden_states"),
    ):
        with pytest.raises(ValueError, match=says):
            wrapped(**options)
    with pytest.raises(ValueError, match="leave out cache_implementation"):
        generated(wrapped, x, cache_implementation="static")


def test_tie_word_embeddings_alone_decides_whether_weights_are_tied(folder: Path, tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True, tie_word_embeddings=False)
    untied = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True).eval()
    torch.nn.init.normal_(untied.get_output_embeddings().weight, std=0.1)
    untied.save_pretrained(tmp_path / "untied")
    assert apart(load(tmp_path / "untied").eval(), loaded(tmp_path / "untied"), vocab=50) < EXACT


def test_weights_that_a_folder_lacks_are_no_random_numbers(folder: Path) -> None:
    with pytest.raises(ValueError, match="lacks weights of decoder.head: leave out tie_word_embeddings"):
        load(folder, tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    compiled = {name.replace("decoder.", "decoder._orig_mod."): tensor for name, tensor in weights.items()}
    save_file(compiled, folder / "model.safetensors", metadata={"format": "pt"})  # as torch.compile names them
    loaded(folder)
    with pytest.raises(ValueError, match="the checkpoint lacks weights of decoder"):
        load(folder)
