"""Folders whose config.json contradicts itself or the weights: read as transformers reads them, or refused."""

from pathlib import Path

import pytest

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
