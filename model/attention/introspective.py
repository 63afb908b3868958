"""Introspective attention: several paths per layer, each of which sees those before it (docs/METHODS.md, section 2)."""

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cache import LayerCache
from ..layers import fill_normal, make_norm
from ..rotary import rotate
from .backends import attend_union
from .base import Attention, AttentionConfig, Carry, Heads, Ropes, split
from .mask import Mask


@dataclass
class IntrospectiveConfig:
    """Options of `introspective`: several attention paths per layer, of which each reads those before (docs/METHODS.md)."""

    mode: Annotated[str, ("feature", "sequence")] = "feature"  # earlier paths add to keys and values, or their keys are read
    paths: Annotated[int, "[1, 100]"] = 3  # number of paths
    heads: Annotated[int | None, "[0, inf)"] = None  # heads per path; None: n_head / 2; 0: n_head, as in the published code
    memory: Annotated[str, ("ka", "kv", "kva")] = "ka"  # what the feature mode reads: keys, values and output (a)
    own_path: bool = True  # whether path i > 0 has keys, too (published code), or earlier paths' only (the text)
    repeated: bool = False  # whether path j < i counts 2^(i-1-j) times (sequence mode; the published naive and flash 1 code)
    path_weight: Annotated[str, ("affine", "literal", "sigmoid", "softmax_input")] = "affine"  # see `weights`
    path_norm: Annotated[str, ("rmsnorm", "layernorm")] = "rmsnorm"  # over each path's output and over their sum
    alpha: bool = True  # whether alpha X, alpha a learned scalar, is added to the sum of the paths


class IntrospectiveAttention(Attention):
    """W_o RMSNorm(sum_i lambda_i A_i + alpha X), A_i = RMSNorm(merged heads of path i), X the sub-layer's input.

    feature: M_i = concat over j < i of (K_j, A_j), per token; path i attends with keys K_i + M_i U_i and values V_i + M_i W_i,
    RoPE after the projection; without own_path they are M_i U_i and M_i W_i. sequence: one softmax over the keys of all paths
    j <= i at all positions s <= t. Source: the formula of cognitivecomputations/introspective-attention.
    """

    name = "introspective"
    joins_calls = True
    Options = IntrospectiveConfig
    undecayed = ("path_logits",)
    colours = {"introspective": "#009E73", "introspective_sequence": "#56B4E9"}

    def head_shape(self, cfg: AttentionConfig) -> Heads:
        heads = max(1, cfg.n_head // 2) if self.options.heads is None else self.options.heads or cfg.n_head
        kv_heads = max(1, heads * cfg.n_kv_head // cfg.n_head)
        _check(self.options)
        group = cfg.n_head // cfg.n_kv_head if cfg.n_kv_head > 1 else 1  # query heads that share keys
        if cfg.d_model % heads:
            raise ValueError(f"heads={heads} of each path do not divide d_model={cfg.d_model}: set introspective.heads")
        if heads % group or heads % kv_heads:
            wrong = f"heads={heads} of each path are no multiple of {group}, the heads that share keys"
            raise ValueError(f"{wrong}: set introspective.heads, or use n_kv_head=1")
        return Heads(heads, kv_heads, cfg.head_dim, cfg.d_model // heads)  # a path's output is as wide as X, which is added

    def make_parameters(self, cfg: AttentionConfig, layer: int) -> None:
        opt, D = self.options, cfg.d_model
        self.mode, self.own_path, self.path_weight, self.paths = opt.mode, opt.own_path, opt.path_weight, opt.paths
        # With own_path=false no path reads the last path's keys, and the feature mode reads the first path's keys only.
        sets = self.paths if self.own_path else max(1, self.paths - 1) if self.mode == "sequence" else 1
        self.q = self._per_path(cfg, self.paths, self.heads * self.width)
        self.k = self._per_path(cfg, sets, self.kv_heads * self.width)
        self.v = self._per_path(cfg, sets, self.kv_heads * self.value_width)
        self.path_norms = nn.ModuleList(make_norm(opt.path_norm, D, cfg.bias, cfg.norm_eps) for _ in range(self.paths))
        if self.mode == "feature":
            self.memory_k = self._memory_projections(self.width)
            self.memory_v = self._memory_projections(self.value_width)
        if self.path_weight == "softmax_input":
            self.path_logits = nn.Linear(D, self.paths, bias=False)
        else:
            self.w = nn.Parameter(torch.empty(self.paths))
        if self.path_weight == "affine":
            self.path_gain, self.path_bias = (nn.Parameter(torch.empty(self.paths)) for _ in range(2))
        self.alpha = nn.Parameter(torch.ones(())) if opt.alpha else None
        self.norm = make_norm(opt.path_norm, D, cfg.bias, cfg.norm_eps)
        self.out = nn.Linear(D, D, bias=cfg.projection_bias)

    def _per_path(self, cfg: AttentionConfig, paths: int, width: int) -> nn.ModuleList:
        return nn.ModuleList(nn.Linear(cfg.d_model, width, bias=cfg.qkv_bias) for _ in range(paths))

    def _memory_projections(self, width: int) -> nn.ParameterList:
        """One (Hkv, m_i, width) projection for each path i > 0; m_i is the width of M_i per key/value head."""
        group = self.heads // self.kv_heads
        widths = {"k": self.width, "v": self.value_width, "a": group * self.value_width}
        per_path = sum(widths[part] for part in self.options.memory)
        return nn.ParameterList(torch.empty(self.kv_heads, i * per_path, width) for i in range(1, self.paths))

    def init_own(self, generator: torch.Generator) -> None:
        for name, p in self.named_parameters(recurse=True):
            if name.startswith("memory_"):
                # With own_path, zero makes paths independent at first; without own_path, zero would leave no keys and values.
                nn.init.zeros_(p) if self.own_path else fill_normal(p, 0.02, generator)
        if self.alpha is not None:
            nn.init.ones_(self.alpha)
        if self.path_weight == "softmax_input":
            return
        # LayerNorm of equal weights is zero: `literal` would begin with silent paths, `affine` with a gain without gradient.
        spread = {"literal": 1.0, "affine": 0.01, "sigmoid": 0.0}[self.path_weight]
        self.w.data.copy_(spread * torch.arange(self.paths))
        if self.path_weight == "affine":
            nn.init.ones_(self.path_gain)
            nn.init.constant_(self.path_bias, 1 / self.paths)

    def weights(self, x: Tensor) -> Tensor:
        """lambda, (P,) or per token (B, T, P)."""
        if self.path_weight == "softmax_input":  # the text's first version
            return self.path_logits(x).softmax(-1)
        if self.path_weight == "sigmoid":
            return self.w.sigmoid()
        if self.path_weight == "literal":  # as printed: sums to zero
            return F.layer_norm(self.w.sigmoid(), self.w.shape)
        # eps bounds the slope of LayerNorm at equal weights to 10; with the usual 1e-5 it is 316.
        return F.layer_norm(self.w.sigmoid(), self.w.shape, self.path_gain, self.path_bias, eps=1e-2)

    def mix(self, x: Tensor, source: Tensor, ropes: Ropes, mask: Mask, cache: LayerCache | None, carry: Carry) -> Tensor:
        keys, values, memory, outputs = [], [], [], []  # memory: of the paths so far, each (B, hkv, T, m)
        feature = self.mode == "feature"
        for i in range(self.paths):
            q = rotate(split(self.q[i](x), self.width), ropes[0])
            if i < len(self.k):
                k, v = split(self.k[i](source), self.width), split(self.v[i](source), self.value_width)
                kept = k, v  # what later paths read: the path's own, before memory is added
            if memory:
                from_k, from_v = self._from_memory(memory, i)
                k, v = (k + from_k, v + from_v) if self.own_path else (from_k, from_v)
                kept = kept if self.own_path else (k, v)
            if feature or i < len(self.k):
                k = rotate(k, ropes[1])
                k, v = (k, v) if cache is None else cache.append(k, v, slot=i)
                keys.append(k)
                values.append(v)
            sets = [keys[j] for j in self._seen(i)], [values[j] for j in self._seen(i)]
            heads = attend_union(q, *sets, mask, self.backend, self.dropout_now)
            outputs.append(self._path_output(heads, i))
            if feature:
                memory += self.remembered(*kept, outputs[-1])
        lam = self.weights(x)  # (P,) or (B, T, P)
        mixed = sum(lam[..., i, None] * a for i, a in enumerate(outputs))  # (B, T, D)
        return self.norm(mixed if self.alpha is None else mixed + self.alpha * x)

    def _path_output(self, heads: Tensor, i: int) -> Tensor:
        return self.path_norms[i](self.merge(heads))  # A_i (B, T, D)

    def _from_memory(self, memory: list[Tensor], i: int) -> tuple[Tensor, Tensor]:
        """M_i U_i and M_i W_i, (B, hkv, T, width) and (B, hkv, T, value_width), by one product per key/value head."""
        m = torch.cat(memory, dim=-1).transpose(0, 1)  # (hkv, B, T, m_i)
        both = m.flatten(1, 2) @ torch.cat((self.memory_k[i - 1], self.memory_v[i - 1]), dim=-1)
        both = both.view(*m.shape[:-1], self.width + self.value_width).transpose(0, 1)  # (B, hkv, T, both widths)
        return both.split((self.width, self.value_width), -1)

    def remembered(self, k: Tensor, v: Tensor, a: Tensor) -> list[Tensor]:
        """What later paths see of a path, each (B, hkv, T, m): keys, values (before RoPE), output a (B, T, D)."""
        parts = {"k": k, "v": v, "a": a.unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)}
        return [parts[part].to(k.dtype) for part in self.options.memory]

    def _seen(self, i: int) -> list[int]:
        if self.mode == "feature":
            return [i]
        if self.options.repeated:
            return [j for earlier in range(i) for j in self._seen(earlier)] + [i]
        return list(range(i + 1 if self.own_path or i == 0 else i))

    @property
    def takes_context(self) -> bool:
        return self.mode == "sequence"  # the feature mode corrects keys by what earlier paths gave for the same token

    @property
    def key_sets(self) -> tuple[int, ...]:
        return tuple(len(self._seen(i)) for i in range(self.paths))

    def readings(self, x: Tensor) -> dict[str, Tensor]:
        values = {f"path_{i}": weight.mean() for i, weight in enumerate(self.weights(x).unbind(-1))}
        return values if self.alpha is None else values | {"alpha": self.alpha.detach()}


def _check(opt: IntrospectiveConfig) -> None:
    if opt.path_weight == "affine" and opt.paths == 1:
        raise ValueError("LayerNorm over a single path weight is always zero: use path_weight=sigmoid or more paths")
    if opt.path_weight == "literal" and opt.paths < 3:
        wrong = "LayerNorm without a gain over one path weight is always zero, over two always +1 and -1"
        raise ValueError(f"{wrong}: use path_weight=sigmoid or three paths")
    if opt.repeated and (opt.mode != "sequence" or not opt.own_path or opt.paths > 10):
        wrong = "repeated=true reads 2^(paths - 1) key sets"
        raise ValueError(f"{wrong}: use it with mode=sequence, own_path=true and at most paths=10")
