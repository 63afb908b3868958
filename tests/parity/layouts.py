"""Weights of one published differential attention module, in any of the published layouts, as weights of our module.

LAYOUTS says what each system does; tests/reference/published.py has those that do not install as formulas. Sources:
microsoft/unilm, Diff-Transformer and Diff-Transformer-V2; vasqu/multihead-sdpadiff (the package); timm's DiffAttention;
transformers' DiffLlamaAttention; axolotl-ai-cloud/diff-transformer (its two modes); the companion code of "Understanding
Differential Attention" (the post itself has neither a causal mask nor an output projection).
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.attention.diff import VECTORS, DiffConfig, lambda_init
from model.attention.diff_v2 import DiffV2Config
from model.interop.format import change_rows, heads_in_pairs, keep_lambda
from model.interop.llama import LLAMA

SCALARS = ("lambda_a", "lambda_b")
TIMM_EPS = 1e-6  # of timm's q_norm, k_norm and norm; its sub_norm has 1e-5


class Layout(NamedTuple):
    """What the module of one system holds and computes. It has h heads, each with two maps c = 0, 1 of width d."""

    keys: dict[str, str]  # name of its parameter: names of our parameters whose rows it holds, in order
    options: tuple[dict[str, str], ...] = ()  # groups of optional parameters, each present as a whole or not at all
    rope: str | None = "interleaved"  # interleaved | half; None: the module has no positions
    queries: bool = False  # num_heads counts the 2h query heads, instead of the h heads
    halves: bool = False  # map c of head i is query head i + c h, instead of 2i + c; values lie in two halves likewise
    double: bool = False  # values have width d, instead of 2d
    pairings: tuple[str, ...] = ()  # how it pairs and repeats grouped keys, its default first; (): no grouped keys
    scaled: bool = True  # heads are scaled by 1 - lambda_init
    unweighted: str = "none"  # the head norm of a module without a norm weight: none | plain
    eps: float = 1e-5  # of its head norm, unless the caller gives norm_eps


def _linears(kind: str, **holds: str) -> dict[str, str]:
    return {f"{name}.{kind}": " ".join(f"{each}.{kind}" for each in ours.split()) for name, ours in holds.items()}


MICROSOFT = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "out_proj": "out"}
BLOG = {"wq": "q", "wk": "k", "wv": "v", "out_proj": "out"}
LAMBDAS = {name: name for name in VECTORS}
SUBLN = {"subln.weight": "head_norm.weight"}
AXOLOTL = Layout(
    _linears("weight", **LLAMA) | LAMBDAS | {"lambda_init": "lambda_init"}, (SUBLN, _linears("bias", **LLAMA)),
    rope="half", halves=True, pairings=("pair_first",), scaled=False, eps=1e-6,
)  # fmt: skip

LAYOUTS = {
    # The flash modules pair, then repeat; the naive module repeats, then pairs: two functions of the same weights.
    "microsoft": Layout(
        _linears("weight", **MICROSOFT) | LAMBDAS | SUBLN, pairings=("pair_first", "repeat_first")
    ),
    "vasqu": Layout(
        _linears("weight", **MICROSOFT) | LAMBDAS | SUBLN, queries=True, pairings=("repeat_first",)
    ),
    "timm": Layout(
        _linears("weight", qkv="q k v", proj="out") | LAMBDAS | {"sub_norm.weight": "head_norm.weight"},
        (
            _linears("bias", qkv="q k v"), _linears("bias", proj="out"), {"norm.weight": "scale_norm.weight"},
            {"q_norm.weight": "q_norm.weight", "k_norm.weight": "k_norm.weight"},
        ), rope=None,
    ),
    "diffllama": Layout(
        _linears("weight", **LLAMA) | LAMBDAS, (_linears("bias", **LLAMA),),
        rope="half", queries=True, halves=True, pairings=("pair_first",), unweighted="plain",
    ),
    "axolotl_split": AXOLOTL._replace(queries=True),
    "axolotl_double": AXOLOTL._replace(double=True),
    "blog": Layout(_linears("weight", **BLOG) | LAMBDAS | {"sublayer_norm.weight": "head_norm.weight"}, scaled=False),
    "microsoft_v2": Layout(
        _linears("weight", **LLAMA, lambda_proj="lambda_logits"), double=True, pairings=("pair_first",)
    ),
}  # fmt: skip


def import_attention(
    source: Mapping[str, Tensor], layout: str, *, n_head: int, n_kv_head: int | None = None, layer: int,
    gqa_pairing: str | None = None, norm_eps: float | None = None,
) -> tuple[dict[str, Any], dict[str, Tensor]]:  # fmt: skip
    """The state dict `source` of one attention module of `layout`: overrides of DecoderConfig and a state dict of our module.

    n_head, n_kv_head: as the source counts them (differential heads for microsoft, timm, blog and axolotl_double; output heads
    for microsoft_v2; the baseline's heads for vasqu, diffllama and axolotl_split). layer: the depth, from 0 (blog: 1 where the
    module was given no depth). gqa_pairing: of microsoft's grouped keys, pair_first (its flash modules; the default) or
    repeat_first (its naive module): then every head gets its own copy of its keys and values. norm_eps: None is the source's.
    """
    form = LAYOUTS[layout]
    if layout == "timm" and any(name in source for name in SCALARS):  # dual_lambda=True
        form = form._replace(keys={k: v for k, v in form.keys.items() if k not in VECTORS} | {k: k for k in SCALARS})
    heads, kv_heads = (count // (2 if form.queries else 1) for count in (n_head, n_kv_head or n_head))
    state = _renamed(source, form)
    width = len(state["q.weight"]) // (2 * heads)
    eps = form.eps if norm_eps is None else norm_eps
    if form.halves:
        for name in ("q", "k") if form.double else ("q", "k", "v"):
            change_rows(state, name, lambda rows: heads_in_pairs(rows, width))
    if (gqa_pairing or (*form.pairings, None)[0]) == "repeat_first" and kv_heads < heads:
        repeat = lambda rows, d: rows.unflatten(0, (-1, d)).repeat_interleave(heads // kv_heads, 0).flatten(0, 1)  # noqa: E731
        change_rows(state, "k", lambda rows: repeat(rows, width))
        change_rows(state, "v", lambda rows: repeat(rows, 2 * width))
        kv_heads = heads
    if layout == "timm":
        _fold_timm_eps(state, eps)
    if not form.scaled:
        state["out.weight"] = _scaled(state["out.weight"], 1 / (1 - lambda_init(layer)))
    if "lambda_init" in state:
        keep_lambda(state, lambda_init(layer))
    overrides = _overrides(state, form, layout)
    unit = 1 if form.double else 2  # of our heads in one differential head
    overrides |= {"n_head": unit * heads, "n_kv_head": unit * kv_heads, "head_dim": width, "norm_eps": eps}
    if overrides["bias"]:  # the source may have them on some projections only
        for name in ("q", "k", "v", "out"):
            state.setdefault(f"{name}.bias", torch.zeros_like(state[f"{name}.weight"][:, 0]))
    if layout != "microsoft_v2":
        state["lambda_mix"] = torch.ones(())  # of a finished warm-up
    return overrides, state


def _renamed(source: Mapping[str, Tensor], form: Layout) -> dict[str, Tensor]:
    """Copies of the source's parameters under our names."""
    groups = [group for group in form.options if not group.keys().isdisjoint(source)]
    keys = form.keys | {key: ours for group in groups for key, ours in group.items()}
    assert keys.keys() == source.keys()
    state = {}
    for key, ours in keys.items():
        names = ours.split()
        value = source[key].detach()
        parts = value.tensor_split(len(names)) if len(names) > 1 and value.dim() else (value,) * len(names)
        state |= {name: part.clone() for name, part in zip(names, parts, strict=True)}
    return state


def _scaled(weight: Tensor, factor: float) -> Tensor:
    """weight * factor in float32 or better, not rounded to bfloat16."""
    return (weight.double() * factor).to(torch.promote_types(weight.dtype, torch.float32))


def _fold_timm_eps(state: dict[str, Tensor], eps: float) -> None:
    """Scale the inputs of timm's other norms by s, which gives these norms TIMM_EPS = eps / s^2.

    s x / sqrt(mean((s x)^2) + eps) = x / sqrt(mean(x^2) + eps / s^2).
    """
    s = math.sqrt(eps / TIMM_EPS)
    if "q_norm.weight" in state:
        change_rows(state, "q", lambda rows: _scaled(rows, s))
        change_rows(state, "k", lambda rows: _scaled(rows, s))
    if "scale_norm.weight" in state:
        state["head_norm.weight"] = _scaled(state["head_norm.weight"], s)


def _overrides(state: dict[str, Tensor], form: Layout, layout: str) -> dict[str, Any]:
    """The fields of DecoderConfig that the parameters decide; the caller adds widths and head counts."""
    position = {"rope_layout": form.rope} if form.rope else {"position": "none"}
    common = {"d_model": state["q.weight"].shape[1], "bias": any(key.endswith(".bias") for key in state), **position}
    if layout == "microsoft_v2":
        return {"layers": "v", "diff_v2": DiffV2Config(), **common}
    diff = DiffConfig(
        heads="double" if form.double else "half",
        lambda_form="dual_scalar" if SCALARS[0] in state else "vectors",
        head_norm="affine" if "head_norm.weight" in state else form.unweighted,
        qk_norm="q_norm.weight" in state,
        scale_norm="scale_norm.weight" in state,
    )
    return {"layers": "d", "diff": diff, **common}
