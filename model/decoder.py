"""The decoder: token embedding, a stack of blocks whose attention is chosen per layer, output head."""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention import VARIANTS
from .attention.base import Carry, rope_of
from .attention.mask import Mask
from .attention.probe import gather_rows
from .cache import KVCache, LayerCache
from .config import DecoderConfig
from .layers import FeedForward, initialize, make_norm
from .loss import linear_cross_entropy
from .rotary import Rope

Generators = torch.Generator | Sequence[torch.Generator] | None  # one for all rows, or one for each


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); with `norm_place=after`, x + norm(attention(x)), then x + norm(mlp(x))."""

    def __init__(self, cfg: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = make_norm(cfg.norm, cfg.d_model, cfg.bias, cfg.norm_eps)
        self.attention = VARIANTS[layer_letter(cfg, layer)](cfg, layer, seed=None)
        self.mlp_norm = make_norm(cfg.norm, cfg.d_model, cfg.bias, cfg.norm_eps)
        self.mlp = FeedForward(cfg.mlp, cfg.d_model, cfg.d_ff, cfg.bias)
        self.dropout = nn.Dropout(cfg.dropout)
        self.norm_after = cfg.norm_place == "after"

    def forward(self, x: Tensor, rope: Rope | None, mask: Mask, cache: LayerCache | None, carry: Carry) -> Tensor:
        if self.norm_after:
            x = x + self.dropout(self.attention_norm(self.attention(x, rope, mask, cache, carry)))
            return x + self.dropout(self.mlp_norm(self.mlp(x)))
        x = x + self.dropout(self.attention(self.attention_norm(x), rope, mask, cache, carry))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Decoder(nn.Module):
    """A GPT-style decoder; `cfg.layers` names the attention variant of each layer."""

    def __init__(self, cfg: DecoderConfig, seed: int = 0) -> None:
        super().__init__()
        self.cfg = cfg = matched(cfg)
        # Keep only blocks' inputs (Chen et al., arXiv 1604.06174). transformers sets it by this name.
        self.gradient_checkpointing = False
        _refuse_beyond_memory(cfg)
        if cfg.vocab_size < 1:
            raise ValueError("model.vocab_size is not set: give the tokenizer's vocabulary size")
        self.embedding = nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.positions = nn.Embedding(cfg.context, cfg.d_model) if cfg.position == "learned" else None
        self.dropout = nn.Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(Block(cfg, layer) for layer in range(cfg.n_layer))
        self.norm = make_norm(cfg.norm, cfg.d_model, cfg.bias, cfg.norm_eps)
        self.head = nn.Linear(cfg.d_model, cfg.vocab_size, bias=False)
        _tie(self, None)
        self.register_load_state_dict_post_hook(_tie)
        if not self.embedding.weight.is_meta:
            self.reset_parameters(seed)

    def reset_parameters(self, seed: int = 0) -> None:
        """Initial weights as in GPT-2: see `initialize`."""
        initialize(self, seed, residual=("attention.out.weight", "mlp.down.weight"), depth=self.cfg.n_layer)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, **inputs: Any) -> Tensor:
        """tokens (B, T) -> logits (B, T, V), or the mean cross-entropy in nats if `targets` (B, T) are given.

        inputs: as of `hidden`. With rows, logits are (B, R, V) and targets (B, R). A target of -100 is not scored.
        """
        hidden = self.hidden(tokens, **inputs)  # (B, T or R, D)
        if targets is None:
            return self.head(hidden)  # (B, T or R, V)
        return linear_cross_entropy(hidden.flatten(0, 1), self.head.weight, targets.flatten())

    def hidden(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        documents: Tensor | None = None,
        keys: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """The output head's input for tokens (B, T): (B, T or R, D).

        documents (B, S): document number of each token; a token sees its own document only. With `cfg.document_mask` and
        documents=None, the numbers are derived from the tokens. keys (B, S): False marks padding. S counts cached tokens, too.
        rows (R,) or (B, R): the positions to return, counted in S, all among the last T; None: the last T.
        """
        if tokens.dim() != 2:
            raise ValueError(f"the tokens are {tuple(tokens.shape)}, not (B, T): give tokens[None] for a single sequence")
        T, start = tokens.shape[1], cache.length if cache else 0
        x = self.embedding(tokens)  # (B, T, D)
        if self.positions is not None:
            self._refuse_beyond_context(start + T)
            x = x + self.positions.weight[start : start + T]
        x = self.dropout(x)
        if self.cfg.residual == "autocast" and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if self.cfg.document_mask and documents is None:
            seen = cache.seen(tokens) if cache else tokens  # (B, S)
            documents = (seen == self.cfg.eot).cumsum(1)
        mask = Mask(window=self.cfg.window, documents=documents, keys=keys)
        # Made anew in every pass, because a buffer would depend on device, dtype, input length and process.
        rope = rope_of(self.cfg, T, x.device, start) if self.cfg.position == "rope" else None
        carry: Carry = {}
        recomputing = self.gradient_checkpointing and self.training and cache is None and torch.is_grad_enabled()
        if recomputing:
            for block in self.blocks:
                block.attention.prepare(x, mask)
        for layer, block in enumerate(self.blocks):
            if recomputing:
                x, carry = checkpoint(_block_and_carry, block, x, rope, mask, carry, use_reentrant=False)
            else:
                x = block(x, rope, mask, cache.layer(layer) if cache else None, carry)
        if cache:
            cache.length += T
        if rows is not None:
            x = gather_rows(x, rows, start + T)  # (B, R, D)
        return self.norm(x)

    def _refuse_beyond_context(self, length: int) -> None:
        if length > self.cfg.context:
            wrong = f"{length} tokens exceed the {self.cfg.context} learned positions"
            raise ValueError(f"{wrong}: shorten the input or use model.position=rope")

    @torch.no_grad()
    def stream(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: Generators = None,
        keys: Tensor | None = None,
        stop: Sequence[int] = (),
    ) -> Iterator[Tensor]:
        """Continue tokens (B, T) with a KV cache: yields the next ids (B,), at most `max_new_tokens` times.

        temperature (0: greedy), top_k, top_p: docs/METHODS.md, 1.2. generator: one for all rows, or one per row, so that rows
        do not depend on each other. stop: ids that end their row; an ended row repeats its id, and the stream ends when all
        rows have ended. Pad shorter prompts on the left and give keys (B, T), False at the padding. ValueError for impossible
        settings, an empty prompt, padding or too many tokens with learned positions, and logits that are not finite.
        """
        _check_sampling(temperature, top_k, top_p)
        T = tokens.shape[-1]
        if not T:
            raise ValueError("the prompt is empty: give at least one token, such as the end-of-text token")
        if self.positions is not None:
            if keys is not None:
                raise ValueError("left padding shifts learned positions: generate from prompts of one length")
            self._refuse_beyond_context(T + max_new_tokens - 1)  # the last new token is never read
        cache, new = KVCache(T + max_new_tokens), tokens
        last = torch.tensor([T - 1], device=tokens.device)
        ends = torch.tensor(stop, dtype=torch.long, device=tokens.device)
        ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        for step in range(max_new_tokens):
            logits = self(new, cache=cache, keys=keys, rows=None if step else last)[:, -1].float()  # (B, V)
            if not step and not logits.isfinite().all():
                raise ValueError("the model's logits are not finite: its training diverged, so use another model")
            drawn = _choose(logits, temperature, top_k, top_p, generator)  # (B,)
            if stop:
                drawn = torch.where(ended, new[:, -1], drawn)
                ended = torch.isin(drawn, ends)
            yield drawn
            if stop and ended.all():
                return
            new = drawn[:, None]
            if keys is not None:
                keys = F.pad(keys, (0, 1), value=True)

    def generate(self, tokens: Tensor, max_new_tokens: int, **options: Any) -> Tensor:
        """tokens (B, T) and the ids that `stream(**options)` adds to them: (B, T + max_new_tokens), or less after a stop."""
        new = self.stream(tokens, max_new_tokens, **options)
        return torch.cat((tokens, *(drawn[:, None] for drawn in new)), dim=1)

    def set_step(self, step: int) -> None:
        """Training calls this before optimizer step `step`, counted from 0; warm-ups in the blocks follow the step."""
        for block in self.blocks:
            block.attention.set_step(step)

    def num_params(self, non_embedding: bool = True) -> int:
        """Number of parameters; without token and position embeddings and the output head by default."""
        parts = (self.blocks, self.norm) if non_embedding else (self,)
        return sum(p.numel() for part in parts for p in part.parameters())

    def flops_per_token(self) -> dict[str, int]:
        """Training FLOPs (forward and backward) per token: 6 per matrix parameter, plus those of the T x T maps.

        PaLM's convention (arXiv 2204.02311, appendix B): no discount for causality, embeddings free, the head counted.
        """
        return _flops(self.cfg, [*self.blocks, self.head], [block.attention for block in self.blocks])


def _block_and_carry(block: Block, x: Tensor, rope: Rope | None, mask: Mask, carry: Carry) -> tuple[Tensor, Carry]:
    carry = dict(carry)  # `carry` is not changed, so that the block can be computed again
    return block(x, rope, mask, None, carry), carry


def _tie(model: Decoder, _: object) -> None:
    """Tie the head to the embedding again after loading, which may have assigned two tensors."""
    if model.cfg.tie:
        model.head.weight = model.embedding.weight


def _refuse_beyond_memory(cfg: DecoderConfig) -> None:
    least = cfg.d_model * (cfg.vocab_size + cfg.n_layer * cfg.d_ff)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf
    if 4 * least > memory and torch.get_default_device().type != "meta":
        wrong = f"a model of more than {least / 1e9:.0f}B parameters does not fit the {memory / 1e9:.0f} GB of this machine"
        raise ValueError(f"{wrong}: use a smaller model.d_model, model.n_layer, model.d_ff or model.vocab_size")


def layer_letter(cfg: DecoderConfig, layer: int) -> str:
    """The letter of `cfg.layers`, tiled over the depth, that names this layer's attention."""
    if unknown := sorted(set(cfg.layers) - set(VARIANTS)):
        known = ", ".join(f"{letter} ({cls.name})" for letter, cls in VARIANTS.items())
        raise ValueError(f"model.layers={cfg.layers} has unknown letters {''.join(unknown)}: use {known}")
    return cfg.layers[layer % len(cfg.layers)]


def matched(cfg: DecoderConfig) -> DecoderConfig:
    """`cfg` checked and completed: heads, biases, and the d_ff that gives the stack the baseline's budget (`cfg.match`)."""
    cfg = cfg.filled()
    if cfg.d_ff is not None:
        return cfg
    usual = 8 * cfg.d_model / 3 if cfg.mlp == "swiglu" else 4 * cfg.d_model  # LLaMA's and GPT-2's widths
    hidden = cfg.baseline_d_ff or max(8, round(usual / 8) * 8)
    if cfg.match == "none" or set(cfg.layers) == {"b"}:
        return replace(cfg, d_ff=hidden)
    baseline, variant = _budget(replace(cfg, layers="b")), _budget(cfg)
    inner = 2 if cfg.mlp == "swiglu" else 1  # matrices into the FFN's hidden width; one leads out of it
    unit = 6 * cfg.d_model * (inner + 1) if cfg.match == "flops" else cfg.d_model * (inner + 1) + cfg.bias * inner
    per_unit = cfg.n_layer * unit  # what one more unit of d_ff costs the stack
    target = hidden + (baseline - variant) / per_unit  # the width, not yet whole, at which the budgets are equal
    if target < 1:
        wrong = f"attention of layers={cfg.layers} alone exceeds the baseline's budget at d_model={cfg.d_model}"
        raise ValueError(f"{wrong}: use fewer heads or paths, or model.match=none")
    # The first width within 0.4 % of the budget: the baseline's own, else a multiple of 64, 32, ..: odd widths are slow.
    budget = baseline + hidden * per_unit
    widths = [hidden, *(max(1, round(target / step) * step) for step in (64, 32, 16, 8, 4, 2, 1))]
    width = next((w for w in widths if abs(w - target) * per_unit <= 0.004 * budget), widths[-1])
    if abs(width - target) * per_unit > 0.005 * budget:
        wrong = f"no model.d_ff brings the {cfg.match} within 0.5 % of the baseline's at d_model={cfg.d_model}"
        raise ValueError(
            f"{wrong}, because each unit of d_ff adds {per_unit / budget:.1%}: use a wider model or model.match=none"
        )
    return replace(cfg, d_ff=width)


def _budget(cfg: DecoderConfig) -> int:
    """Parameters, or training FLOPs per token, of the stack's attention (everything else is the same for all variants)."""
    with torch.device("meta"):
        parts = [VARIANTS[layer_letter(cfg, layer)](cfg, layer, seed=None) for layer in range(cfg.n_layer)]
    if cfg.match == "params":
        return sum(p.numel() for part in parts for p in part.parameters())
    return _flops(cfg, parts, parts)["total"]


def _flops(cfg: DecoderConfig, parts: list[nn.Module], attentions: list[nn.Module]) -> dict[str, int]:
    """Training FLOPs per token of the matrices in `parts` and of the T x T maps of `attentions`."""
    context = min(cfg.context, cfg.window or cfg.context)
    attention = 3 * sum(part.flops(context) for part in attentions)
    matrices = sum(p.numel() for part in parts for p in part.parameters() if p.dim() >= 2)
    return {"total": 6 * matrices + attention, "attention": attention}


def _check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature} must be 0 (greedy) or more: use temperature=0.8")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} leaves no token: use top_k=50, or null for all")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} is not a share of the probability: use top_p=0.9, or null for all")


def _choose(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: Generators) -> Tensor:
    """The next token (B,) from logits (B, V)."""
    if temperature == 0:
        return logits.argmax(-1)
    ids = None
    if top_k is not None or top_p is not None:  # sorting a large vocabulary takes time
        V = logits.shape[-1]
        logits, ids = logits.topk(min(top_k or V, V), dim=-1)  # (B, K), the likeliest first
    p = (logits.double() / temperature).softmax(-1)
    if top_p is not None:
        p = p * (p.cumsum(-1) - p < top_p)  # keeps a token if the mass before it is below top_p: so always the first
    sums = p.cumsum(-1)
    drawn = torch.searchsorted(sums, _uniform(generator, len(logits)).to(sums.device) * sums[:, -1:], right=True)
    drawn = drawn.clamp(max=sums.shape[-1] - 1)  # (B, 1); a product that rounds up to the sum is past the end
    return (drawn if ids is None else ids.gather(-1, drawn))[:, 0]


def _uniform(generator: Generators, rows: int) -> Tensor:
    """(rows, 1) numbers from [0, 1) in float64."""
    if generator is None or isinstance(generator, torch.Generator):
        device = None if generator is None else generator.device
        return torch.rand(rows, 1, dtype=torch.float64, generator=generator, device=device)
    if len(generator) != rows:
        raise ValueError(f"{len(generator)} generators for {rows} rows: give one for all rows, or one for each")
    return torch.stack([torch.rand(1, dtype=torch.float64, generator=g, device=g.device) for g in generator])
