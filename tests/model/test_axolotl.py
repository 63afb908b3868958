"""axolotl's config.yml as a conversion, and its model folders: read, written, and held against its published formula."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from model.attention.base import rope_of
from model.attention.mask import Mask
from model.config import decoder_config
from model.conversion import Conversion
from model.decoder import Decoder
from model.interop.axolotl import PLUGIN, read_settings, written_settings
from tests.model.test_huggingface import loaded, write
from tests.reference import published
from tests.variants import stirred

CONFIGS = {
    "axolotl's default": ({}, Conversion(init="open", second="random", sublayer_norm=True)),
    "zero": ({"zero_init": True, "sublayer_norm": False}, Conversion()),
    "mirror": ({"mirror_weights": True, "sublayer_norm": False}, Conversion(init="mirror")),
    "mirror, norm": ({"mirror_weights": True}, Conversion(init="mirror", sublayer_norm=True)),
    "split, mirror ignored": (
        {"split_heads": True, "mirror_weights": True}, Conversion(heads="split", init="open", sublayer_norm=True),
    ),
    "converted already": ({"diff_attention": True, "zero_init": True, "sublayer_norm": None}, Conversion(to="same")),
}  # fmt: skip


@pytest.mark.parametrize(("flags", "how"), CONFIGS.values(), ids=CONFIGS)
def test_flags_of_the_file_are_options_of_the_conversion(flags: dict, how: Conversion) -> None:
    config = {"base_model": "some/model", "datasets": []} | flags
    settings = read_settings(config)
    settings.how.check()
    assert (settings.config, settings.source, settings.how, settings.training) == (config, "some/model", how, {})


def test_numbers_of_the_file_are_fields_of_training() -> None:
    config = {"base_model": "m", "learning_rate": "1e-4", "seed": 7, "diff_attn_warmup_steps": 50, "diff_attn_log_every": 20}
    config |= {"diff_attn_num_monitor_layers": 3}
    others = {"monitor.every": 20, "monitor.layers": 3, "optim.lr": 1e-4, "seed": 7}
    assert read_settings(config).training == {"model.diff.lambda_warmup": 50} | others
    assert read_settings(config | {"mirror_weights": True}).training == others  # W makes up for all of lambda


def test_the_file_that_is_written_back_is_axolotls() -> None:
    config = {"base_model": "m", "plugins": ["other.Plugin", PLUGIN], "zero_init": True, "val_set_size": 0.1}
    want = {"base_model": "out", "plugins": ["other.Plugin", PLUGIN], "val_set_size": 0.1, "diff_attention": True}
    assert written_settings(config, "out") == want
    assert written_settings({"base_model": "m"}, "out")["plugins"] == [PLUGIN]
    assert read_settings(want).how == Conversion(to="same")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ([], "names no base_model: add base_model"),
        ({"base_model": "m", "zero_init": "yes"}, "zero_init: yes: use a bool"),
        ({"base_model": "m", "zero_init": True, "split_heads": True}, "zero_init beside split_heads"),
        ({"base_model": "m", "learning_rate": "fast"}, "learning_rate: fast: use a number"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(config: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_settings(config)


MODELS = {
    "double, norm": {"heads": "double"},
    "double, no norm": {"heads": "double", "head_norm": "none", "lambda_init": 0.4},
    "half, scalars, plain norm": {"lambda_form": "dual_scalar", "head_norm": "plain"},
    "half, fixed lambda 0": {"lambda_form": "fixed", "lambda_init": 0.0},
}


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_a_folder_computes_axolotls_formula_and_is_read_back(name: str, tmp_path: Path) -> None:
    base = {"layers": "d", "n_layer": 2, "n_head": 8, "n_kv_head": 4, "d_model": 32, "context": 32, "vocab_size": 61}
    model = stirred(Decoder(decoder_config(base | {"diff": MODELS[name], "norm_eps": 1e-6})), 0.1, 3).eval()
    write(model, tmp_path, "axolotl")
    tensors = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    formula = partial(published.axolotl, split=config["split_heads"], num_heads=8, num_kv_heads=4, depth=1)
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(1))
    prefix = "model.layers.1.self_attn."
    w = {key.removeprefix(prefix): value.double().numpy() for key, value in tensors.items() if key.startswith(prefix)}
    ours = model.blocks[1].attention(x[None], rope_of(model.cfg, 7, x.device, 0), Mask())[0]
    torch.testing.assert_close(ours.double(), torch.from_numpy(formula(w, x.double().numpy())), rtol=1e-4, atol=1e-5)
    tokens = torch.randint(61, (2, 20), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(loaded(tmp_path)(tokens), model(tokens), rtol=1e-5, atol=1e-5)
