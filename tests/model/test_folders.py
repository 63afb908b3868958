"""Folders that are damaged or contradict themselves: read as transformers reads them, or refused."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from model.interop.format import HUB_FILES
from model.interop.huggingface import read_folder
from tests.model.test_huggingface import EXACT, apart, edit, loaded, source_model, transformers


def drop(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors")


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no model.safetensors: load it with"),
    "another architecture": (lambda folder: edit(folder, architectures=["BertForMaskedLM"]), "is a BertForMaskedLM"),
    "half a scaled rope": (
        lambda folder: edit(folder, rope_parameters={"rope_type": "llama3", "factor": 8.0}), "says low_freq_factor=None",
    ),
    "yarn": (lambda folder: edit(folder, rope_scaling={"rope_type": "yarn", "factor": 2.5}), "has yarn RoPE"),
    "a rope that is a list": (lambda folder: edit(folder, rope_parameters=[1]), "says [1] of its RoPE"),
    "layers with a window": (
        lambda folder: edit(folder, architectures=["Qwen2ForCausalLM"], use_sliding_window=True), "use_sliding_window=True",
    ),
    "part of the width rotated": (lambda folder: edit(folder, partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
    "a tensor too few": (drop, "lacks the tensor model.layers.1.mlp.up_proj.weight"),
    "a tensor too many": (lambda folder: edit(folder, num_hidden_layers=2), "does not ask for (model.layers.2"),
    "no number": (lambda folder: edit(folder, hidden_size="wide"), "says hidden_size=wide, not a whole number"),
    "a billion layers": (
        lambda folder: edit(folder, architectures=["Qwen2ForCausalLM"], num_hidden_layers=10**9), "n_layer=1000000000 is out",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    source_model("llama").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", WRONG)
def test_wrong_folders_are_refused_in_one_line(name: str, llama_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(llama_folder, folder)
    change, message = WRONG[name]
    change(folder)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_folder(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    source_model("gpt2").save_pretrained(tmp_path, max_shard_size="15KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ValueError, match=f"{gone.name} cannot be read"):
        read_folder(tmp_path)
    source_model("gpt2").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")  # left by an earlier save in parts
    assert read_folder(tmp_path)[0].n_layer == 2


def test_names_of_the_hub(llama_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    def download(name: str, allow_patterns: list[str]) -> str:
        if name != "somebody/small-model" or allow_patterns != HUB_FILES:
            raise OSError("no network\nat all")
        return str(llama_folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert read_folder("somebody/small-model")[0].n_layer == 3
    with pytest.raises(ValueError, match="nor did the hub give it .OSError: no network at all"):
        read_folder("somebody/other-model")
    for name in (tmp_path / "none", "a/b/c", llama_folder / "config.json"):
        with pytest.raises(ValueError, match="is not a folder"):
            read_folder(name)


def test_a_head_beside_a_tied_embedding_is_read_only_if_it_is_a_copy(tmp_path: Path) -> None:
    model = source_model("llama, tied")
    model.save_pretrained(tmp_path)
    weights, embedding = load_file(tmp_path / "model.safetensors"), model.get_input_embeddings().weight.detach()
    save_file(weights | {"lm_head.weight": embedding.clone()}, tmp_path / "model.safetensors")
    assert apart(model, loaded(tmp_path)) < EXACT
    save_file(weights | {"lm_head.weight": embedding.flip(0)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match='differs from the embedding.*: write "tie_word_embeddings": false'):
        read_folder(tmp_path)
    edit(tmp_path, tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert apart(model, loaded(tmp_path)) < EXACT
