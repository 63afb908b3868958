"""The published packages that install, transformers' DiffLlama and timm's differential attention, against our modules with
their weights: outputs and gradients on random configurations, drawn anew every day (PARITY_SEED repeats a day's)."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from model.attention.mask import Mask
from model.rotary import Rope
from tests.parity.comparing import CLOSE, DRAWS, assert_same_function, choices, imported, randomize, rope_of
from tests.parity.layouts import import_attention


@pytest.mark.parametrize("draw", DRAWS)
def test_equals_transformers_diffllama(draw: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    from transformers.models.diffllama import DiffLlamaConfig
    from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention, DiffLlamaRotaryEmbedding

    pick = choices(f"diffllama/{draw}")
    pairs, layer, T, eps = pick(1, 2, 3, 4, 6), pick(*range(12)), pick(1, 2, 17, 33), pick(1e-6, 1e-4, 1e-2)
    n_head, n_kv_head = 2 * pairs, 2 * pick(*(n for n in range(1, pairs + 1) if pairs % n == 0))
    width, backend, implementation = pick(2, 4, 8, 10), pick("math", "sdpa", "auto"), pick("eager", "sdpa")
    hidden = pick(n_head * width, 24, 40)
    config = DiffLlamaConfig(
        hidden_size=hidden, num_attention_heads=n_head, num_key_value_heads=n_kv_head, head_dim=width,
        attention_bias=pick(True, False), rms_norm_eps=eps, attn_implementation=implementation,
    )  # fmt: skip
    published = DiffLlamaAttention(config, layer_idx=layer).eval()
    randomize(published)
    heads = {"n_head": n_head, "n_kv_head": n_kv_head, "norm_eps": eps}
    ours, overrides = imported(published.state_dict(), "diffllama", layer, backend, **heads)
    x = torch.randn(2, T, hidden, generator=torch.Generator().manual_seed(1))
    positions = DiffLlamaRotaryEmbedding(config)(x, torch.arange(T)[None])
    hide = torch.full((T, T), float("-inf")).triu(1)[None, None] if implementation == "eager" else None
    rope = Rope(*(table.float() for table in rope_of(overrides, T)[:2]), interleaved=False)
    assert_same_function(lambda x: ours(x, rope, Mask()), lambda x: published(x, positions, hide)[0], x)
    # The map of the weights is a permutation, so the gradients go through it like the weights.
    source = {key: p.grad for key, p in published.named_parameters()}
    _, grads = import_attention(source, "diffllama", layer=layer, **heads)
    for key, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, grads[key], **CLOSE, msg=lambda text, key=key: f"{key}: {text}")


@pytest.fixture
def timm_attention(monkeypatch: pytest.MonkeyPatch) -> type[nn.Module]:
    """From its file alone: timm's __init__ imports all its models, and those torchvision."""
    spec = importlib.util.find_spec("timm") or pytest.skip("timm is not installed: pip install --no-deps timm")
    for name in ("timm", "timm.layers"):
        package = ModuleType(name)
        package.__path__ = [str(Path(spec.origin).parent.joinpath(*name.split(".")[1:]))]
        monkeypatch.setitem(sys.modules, name, package)
    return importlib.import_module("timm.layers.diff_attention").DiffAttention


@pytest.mark.parametrize("draw", DRAWS)
def test_equals_timm(draw: str, timm_attention: type[nn.Module]) -> None:
    pick = choices(f"timm/{draw}")
    n_head, width, layer, T = pick(1, 2, 3, 4), pick(2, 3, 4, 8), pick(*range(12)), pick(1, 2, 9, 17)
    flags = {name: pick(True, False) for name in ("qkv_bias", "proj_bias", "qk_norm", "scale_norm", "dual_lambda")}
    published = timm_attention(2 * n_head * width, num_heads=n_head, depth=layer, **flags).eval()
    published.fused_attn = pick(True, False)
    randomize(published)
    x = torch.randn(2, T, 2 * n_head * width, generator=torch.Generator().manual_seed(1))
    keys = torch.rand(2, T, generator=torch.Generator().manual_seed(2)) < 0.7
    keys[:, 0] = True
    mask, given = pick(
        (Mask(), {"is_causal": True}),
        (Mask(causal=False), {}),
        (Mask(causal=False, keys=keys), {"attn_mask": keys[:, None, None].expand(2, 1, T, T)}),
    )
    ours, _ = imported(published.state_dict(), "timm", layer, pick("math", "sdpa", "auto"), n_head=n_head)
    assert_same_function(lambda x: ours(x, None, mask), lambda x: published(x, **given), x)
    # Weights that were scaled by s because of timm's other eps have 1/s of its gradient, and were imported with s of it.
    source = {key: p.grad for key, p in published.named_parameters()}
    _, grads = import_attention(source, "timm", n_head=n_head, layer=layer)
    scaled = ("q.", "k.") if "q_norm.weight" in source else ()
    scaled += ("head_norm.",) if "norm.weight" in source else ()
    absent = {"qkv.bias": ("q.bias", "k.bias", "v.bias"), "proj.bias": ("out.bias",)}
    zeros = {name for key, names in absent.items() if key not in source for name in names}
    for key, p in ours.named_parameters():
        if key not in zeros:
            want = grads[key] / 10 if key.startswith(scaled) else grads[key]
            torch.testing.assert_close(p.grad, want, **CLOSE, msg=lambda text, key=key: f"{key}: {text}")
