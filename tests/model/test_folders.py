"""Folders whose config.json contradicts itself or the weights: read as transformers reads them, or refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.interop.huggingface import read_folder
from tests.model.test_huggingface import EXACT, apart, edit, loaded, theirs, transformers


def test_a_scaling_beside_rope_parameters_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    theirs("llama").save_pretrained(tmp_path)
    edit(tmp_path, rope_scaling={"rope_type": "linear", "factor": 2.5})
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert model.config.rope_parameters["factor"] == loaded(tmp_path).cfg.rope_scaling.factor == 2.5
    assert apart(model, loaded(tmp_path)) < EXACT
    edit(tmp_path, rope_scaling={"rope_type": "yarn", "factor": 2.5})
    with pytest.raises(ValueError, match="asks for yarn RoPE"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "embedding"), [("llama, tied", "model.embed_tokens.weight"), ("gpt2", "transformer.wte.weight")]
)
def test_a_head_beside_a_tied_embedding_is_read_only_if_it_is_a_copy(name: str, embedding: str, tmp_path: Path) -> None:
    model = theirs(name)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"lm_head.weight": weights[embedding].clone()}, file)
    assert apart(model, loaded(tmp_path)) < EXACT
    for head in (weights[embedding].flip(0), torch.ones(70, 32)):
        save_file(weights | {"lm_head.weight": head}, file)
        with pytest.raises(ValueError, match='differs from the embedding.*: write "tie_word_embeddings": false') as error:
            read_folder(tmp_path)
        assert "\n" not in str(error.value)
    save_file(weights | {"lm_head.weight": weights[embedding].flip(0)}, file)
    edit(tmp_path, tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert apart(model, loaded(tmp_path)) < EXACT
