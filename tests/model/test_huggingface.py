"""Folders that transformers makes, read; and our models, exported and run by transformers: logits and generation compared."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.config import decoder_config
from model.decoder import Decoder
from model.interop.huggingface import export, read_folder
from tests.variants import stirred

transformers = pytest.importorskip("transformers", reason="needs the package transformers")
pytestmark = pytest.mark.usefixtures("remote_code")
EXACT = 1e-5  # of float32 logits of order 5, summed in another order
V = 61

GPT2 = {"vocab_size": V, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
LLAMA = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 32, "eos_token_id": None,
}  # fmt: skip
OTHER_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}

# A window of which every query position is in, and the frequencies of Llama 3 in all of their three ranges.
GROUPED = LLAMA | {"num_key_value_heads": 2, "bos_token_id": None, "pad_token_id": None}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip

SOURCES: dict[str, tuple[str, dict]] = {
    "gpt2": ("GPT2", GPT2),
    "gpt2, exact gelu, untied, width": (
        "GPT2", GPT2 | {"activation_function": "gelu", "tie_word_embeddings": False, "n_inner": 40},
    ),
    "llama": ("Llama", LLAMA),
    "llama, tied": ("Llama", LLAMA | {"tie_word_embeddings": True}),
    "llama, grouped, head_dim, rope base": (
        "Llama", LLAMA | OTHER_ROPE | {"num_key_value_heads": 2, "head_dim": 12, "rms_norm_eps": 1e-3},
    ),
    "llama, feed-forward biases, linear rope": (
        "Llama", LLAMA | {"mlp_bias": True, "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4}},
    ),
    "diffllama": ("DiffLlama", LLAMA),
    "diffllama, grouped, head_dim, biases, tied": (
        "DiffLlama",
        LLAMA | OTHER_ROPE
        | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6, "attention_bias": True}
        | {"tie_word_embeddings": True, "rms_norm_eps": 1e-3},
    ),
    "llama, scaled as Llama 3": ("Llama", GROUPED | {"rope_parameters": LLAMA3, "head_dim": 16}),
    "mistral, window": ("Mistral", GROUPED | {"sliding_window": 7, "head_dim": 12}),
    "qwen2": ("Qwen2", GROUPED | {"tie_word_embeddings": True}),
    "qwen3, biases, scaled": ("Qwen3", GROUPED | {"head_dim": 16, "attention_bias": True, "rope_parameters": LLAMA3}),
    "olmo2": ("Olmo2", GROUPED | {"rms_norm_eps": 1e-3}),
    "phi3, window": ("Phi3", GROUPED | {"sliding_window": 7, "num_key_value_heads": 1}),
}  # fmt: skip


def source_model(name: str) -> torch.nn.Module:
    """A transformers model in which no parameter is a zero or a one."""
    family, options = SOURCES[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**options))
    return stirred(model, 0.1, 0).eval()


def loaded(folder: Path) -> Decoder:
    cfg, state = read_folder(folder)
    model = Decoder(cfg)
    model.load_state_dict(state, strict=True)
    return model.eval()


def tokens(vocab: int = V) -> torch.Tensor:
    return torch.randint(vocab, (2, 29), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def apart(model: torch.nn.Module, ours: Decoder, vocab: int = V) -> float:
    """The largest difference of a logit."""
    x = tokens(vocab)
    return (model(x).logits - ours(x)).abs().max().item()


def generated(model: torch.nn.Module, x: torch.Tensor, **options: object) -> torch.Tensor:
    mask = options.pop("attention_mask", torch.ones_like(x))
    return model.generate(x, attention_mask=mask, max_new_tokens=4, pad_token_id=0, do_sample=False, **options)


@pytest.mark.parametrize("name", SOURCES)
def test_a_folder_of_transformers_computes_the_same_logits(name: str, tmp_path: Path) -> None:
    model, family = source_model(name), SOURCES[name][0].lower()
    model.save_pretrained(tmp_path)
    ours = loaded(tmp_path)
    assert apart(model, ours) < EXACT
    x = tokens()[:, :9]
    assert torch.equal(generated(model, x), ours.generate(x, 4))
    cfg = ours.cfg
    assert None not in (cfg.n_kv_head, cfg.head_dim, cfg.d_ff) and cfg.vocab_size == V and cfg.context == 32
    exported = export(ours, family)
    if family in ("gpt2", "llama", "diffllama", "qwen3", "olmo2"):  # the only ones that compute this
        assert export(ours).format == family
    torch.testing.assert_close(exported.tensors, load_file(tmp_path / "model.safetensors"), rtol=0, atol=0)
    config = json.loads((tmp_path / "config.json").read_text())
    may_differ = {"bos_token_id", "eos_token_id", "n_inner"}  # the run's tokens; a width that was left to its default
    may_differ |= {"embd_pdrop", "resid_pdrop", "attn_pdrop"}
    may_differ |= {"max_window_layers", "rope_parameters", "sliding_window", "original_max_position_embeddings"}  # defaults
    assert {key for key in exported.config.keys() & config.keys() if exported.config[key] != config[key]} <= may_differ
    write(ours, tmp_path / "again", family)
    assert read_folder(tmp_path / "again")[0] == cfg


@pytest.mark.parametrize(("name", "dtype"), (("gpt2", torch.float16), ("llama, tied", torch.bfloat16)))
def test_sharded_and_half_precision_folders(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source_model(name).to(dtype).save_pretrained(tmp_path, max_shard_size="15KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ours = loaded(tmp_path)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    assert apart(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), ours) < EXACT


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def test_older_folders(tmp_path: Path) -> None:
    """transformers 4 wrote rope_theta and rope_scaling, left out defaults, and saved frequencies; GPT-2's, the causal mask."""
    model = source_model("llama, grouped, head_dim, rope base")
    model.save_pretrained(tmp_path)
    edit(tmp_path, rope_parameters=..., rope_theta=500.0, rope_scaling=None, attention_bias=..., mlp_bias=...)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}, tmp_path / "model.safetensors")
    assert apart(model, loaded(tmp_path)) < EXACT
    model = source_model("gpt2")
    model.save_pretrained(tmp_path)
    weights = {key.removeprefix("transformer."): value for key, value in load_file(tmp_path / "model.safetensors").items()}
    save_file(weights | {"h.0.attn.bias": torch.ones(1, 1, 32, 32)}, tmp_path / "model.safetensors")
    assert apart(model, loaded(tmp_path)) < EXACT


GPT2_STYLE = {"norm": "layernorm", "mlp": "gelu", "position": "learned", "match": "none"}


def diff(**options: object) -> dict:
    return {"layers": "d", "diff": options}


NATIVE: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {}),
    "llama, interleaved, biases, untied": ("llama", {"rope_layout": "interleaved", "bias": True, "tie": False}),
    "llama, grouped, head_dim": ("llama", {"n_kv_head": 2, "head_dim": 10, "rope_theta": 300.0, "norm_eps": 1e-3}),
    "gpt2, biases, untied": ("gpt2", GPT2_STYLE | {"mlp": "gelu_tanh", "bias": True, "tie": False}),
    "diffllama": ("diffllama", diff()),
    "diffllama, interleaved, grouped": (
        "diffllama", diff() | {"rope_layout": "interleaved", "n_kv_head": 4, "head_dim": 6, "norm_eps": 1e-3},
    ),
    "diffllama, fixed lambda": ("diffllama", diff(lambda_form="fixed", lambda_init=0.3)),
    "diffllama, unfinished warm-up": ("diffllama", diff(lambda_warmup=100)),
    "mistral": ("mistral", {"window": 8}),
    "qwen3, interleaved": ("qwen3", {"baseline": {"qk_norm": "head"}, "n_kv_head": 4, "rope_layout": "interleaved"}),
    "olmo2, interleaved": ("olmo2", {"baseline": {"qk_norm": "all"}, "norm_place": "after", "rope_layout": "interleaved"}),
}  # fmt: skip


def ours(changes: dict) -> Decoder:
    """A float32 decoder in which no parameter is a zero or a one."""
    base = {"n_layer": 2, "n_head": 8, "d_model": 32, "context": 32, "vocab_size": V}
    model = stirred(Decoder(decoder_config(base | changes)), 0.1, 3)
    model.set_step(30)
    return model.eval()


def write(model: Decoder, folder: Path, to: str | None = None) -> str:
    """The export without a tokenizer; returns its format."""
    exported = export(model, to)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(exported.tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(exported.config))
    for name, text in exported.files.items():
        (folder / name).write_text(text)
    return exported.format


@pytest.mark.parametrize("name", NATIVE)
def test_transformers_own_models_compute_our_logits(name: str, tmp_path: Path) -> None:
    form, changes = NATIVE[name]
    model = ours(changes)
    first = export(model)
    assert write(model, tmp_path) == first.format == form
    exported, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(exported).__name__.lower().startswith(form) and not any(map(len, report.values()))
    assert apart(exported.eval(), model) < EXACT
    x = tokens()[:, :9]
    assert torch.equal(generated(exported, x), model.generate(x, 4))
    back = loaded(tmp_path)
    assert apart(exported, back) < EXACT
    second = export(back)
    assert (second.format, second.config) == (first.format, first.config)
    torch.testing.assert_close(second.tensors, first.tensors, rtol=0, atol=0)


REFUSED: dict[str, tuple[str, dict, str]] = {
    "a hybrid": ("llama", {"layers": "bd"}, "layers=bd are not b throughout"),
    "a window": ("llama", {"window": 8}, "a window of 8 keys"),
    "documents": ("llama", {"document_mask": True, "eot": 3}, "its tokens see no other document"),
    "gpt2 with rope": ("gpt2", {"norm": "layernorm", "mlp": "gelu"}, "position=rope; the format allows learned"),
    "double heads": ("diffllama", diff(heads="double"), "diff.heads=double; the format allows half"),
    "feed-forward biases": ("diffllama", diff() | {"bias": True}, "mlp.gate.bias, for which this format has no place"),
    "axolotl's version 2": ("axolotl", {"layers": "v"}, "layers=v are not d throughout"),
    "axolotl's width": ("axolotl", diff(heads="double") | {"head_dim": 6}, "its heads do not make up its width"),
    "axolotl's norms": ("axolotl", diff(heads="double", qk_norm=True), "diff.qk_norm=True; the format allows False"),
    "phi3 with scaled rope": ("phi3", {"rope_scaling": {"kind": "linear"}}, "rope_scaling.kind=linear; the format allows none"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_counterpart_is_refused_with_the_reason(name: str) -> None:
    to, changes, message = REFUSED[name]
    model = ours(changes)
    with pytest.raises(ValueError, match=re.escape(message) + ".*: use to=remote"):
        export(model, to)
    assert export(model).format != to
