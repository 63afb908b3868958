"""Convert a baseline to a differential or gated stack, or to DEX (docs/METHODS.md, section 9.1). Options as in axolotl."""

import math
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from typing import Annotated

import torch
from torch import Tensor, nn

from .attention.diff import DiffAttention, DiffConfig
from .attention.diff_v2 import DiffV2Attention, DiffV2Config
from .attention.gated import GatedConfig
from .config import DecoderConfig
from .decoder import Decoder
from .ranges import check_ranges

EXCLUDED = (  # options that exclude each other, and what to use
    ("to=diff init=mirror heads=split", "it would overwrite trained second maps: use init=zero"),
    ("init=mirror second=random", "it copies the first maps over the second: use second=copy, or init=zero"),
    ("init=mirror to=diff_v2", "lambda starts at sigmoid(lambda_bias): leave init out"),
    ("init=open to=diff_v2", "lambda starts at sigmoid(lambda_bias): use lambda_bias=0 second=random, without init"),
    ("init=open heads=double second=copy", "it would subtract copies of the first maps: use second=random, or init=mirror"),
    ("heads=split to=diff_v2", "diff_v2 keeps all heads: use heads=double"),
    ("sublayer_norm=True to=diff_v2", "diff_v2 has no head norm: use sublayer_norm=false"),
    ("heads=split second=random", "it pairs trained heads and adds no maps: leave second out"),
)


@dataclass
class Conversion:
    """How a baseline becomes another model."""

    to: Annotated[str, ("diff", "diff_v2", "gated", "dex", "same")] = "diff"  # attention of the new model; same: as it was
    init: Annotated[str, ("zero", "mirror", "open")] = "zero"  # lambda is 0, or lambda_init; mirror: `out` makes up for it
    heads: Annotated[str, ("double", "split")] = "double"  # every head gets a second map, or two heads become the maps of one
    second: Annotated[str, ("copy", "random")] = "copy"  # start of the added maps
    sublayer_norm: bool = False  # the paper's norm per head, which changes the function
    lambda_init: Annotated[float | None, "(0, 0.95]"] = None  # start of lambda with init=mirror or open; None: the paper's
    lambda_bias: Annotated[float, "[-20, 0]"] = -4.0  # with to=diff_v2, lambda starts at sigmoid(lambda_bias)

    def check(self) -> None:
        """ValueError for an unknown option, or for options that exclude each other."""
        check_ranges(self)
        changed = {one.name for one in fields(Conversion) if getattr(self, one.name) != one.default} - {"to"}
        unused = changed - ({"sublayer_norm"} if self.to == "same" else set())
        if self.to in ("same", "gated", "dex") and unused:
            raise ValueError(f"to={self.to} adds no maps: leave out {', '.join(sorted(unused))}")
        typed = {f"{one.name}={getattr(self, one.name)}" for one in fields(self)}
        for options, fix in EXCLUDED:
            if typed.issuperset(options.split()):
                raise ValueError(f"{options}: {fix}")
        if self.lambda_init is not None and (self.to != "diff" or self.init == "zero"):
            raise ValueError("lambda_init is an option of to=diff with init=mirror or init=open: leave lambda_init out")
        if "lambda_bias" in changed and self.to != "diff_v2":
            raise ValueError("lambda_bias is an option of to=diff_v2: leave lambda_bias out")

    @property
    def exact(self) -> bool:
        """Whether the converted model computes what its source computed."""
        kept = self.heads == "double" and self.init != "open" and not self.sublayer_norm
        return {"diff_v2": self.second == "copy", "diff": kept}.get(self.to, not self.sublayer_norm)


def converted_config(cfg: DecoderConfig, how: Conversion) -> DecoderConfig:
    """The converted decoder's configuration. ValueError unless `cfg` is a baseline that `how` can convert."""
    how.check()
    if how.to == "same" and not how.sublayer_norm:
        return cfg
    if set(cfg.layers) != {"b"}:
        raise ValueError(f"model.layers={cfg.layers} is not a baseline: convert a model with model.layers=b, or use to=same")
    cfg = cfg.filled()
    if how.heads == "split" and (cfg.n_head % 2 or cfg.n_kv_head % 2):
        raise ValueError(f"heads=split pairs heads: n_head={cfg.n_head} or n_kv_head={cfg.n_kv_head} is odd: use heads=double")
    qk_norm = cfg.baseline.qk_norm
    if cfg.baseline.head_norm != "none" or qk_norm not in ("none", "head"):
        raise ValueError("the source's norms cannot be kept: convert a baseline with head_norm=none, and qk_norm=none or head")
    if how.to in ("diff_v2", "dex") and qk_norm != "none":
        raise ValueError(f"the source has a norm over queries and keys, which {how.to} lacks: use to=diff or to=gated")
    if how.to == "same":
        return replace(cfg, baseline=replace(cfg.baseline, head_norm="affine"))
    if how.to == "gated":
        return replace(cfg, layers="g", gated=GatedConfig(qk_norm=qk_norm))
    if how.to == "dex":
        return replace(cfg, layers="x")
    if how.to == "diff_v2":
        return replace(cfg, layers="v", diff_v2=DiffV2Config(lambda_bias=how.lambda_bias))
    options = DiffConfig(
        heads="half" if how.heads == "split" else "double",
        lambda_init=0.0 if how.init == "zero" else how.lambda_init,
        head_norm="affine" if how.sublayer_norm else "none",
        qk_norm=qk_norm == "head",
    )
    return replace(cfg, layers="d", diff=options)


@torch.no_grad()
def convert(source: Decoder, how: Conversion, seed: int = 0, tokens: Tensor | None = None) -> Decoder:
    """`source`, a baseline, as the decoder that `how` asks for, in evaluation mode and float32 on the CPU.

    seed: for the lambda vectors, and with second=random the second maps. tokens (B, T): with sublayer_norm, a text on which
    the mean rms of each head, which the norm removes, is measured.
    """
    target = Decoder(converted_config(source.cfg, how), seed=seed)
    state = {name: value.detach().float().cpu() for name, value in source.state_dict().items()}
    of_diff = _split if how.heads == "split" else _double
    fill = {"diff": of_diff, "diff_v2": _to_diff_v2}.get(how.to, _keep)
    for layer, block in enumerate(target.blocks):
        prefix = f"blocks.{layer}.attention."
        old = {name.removeprefix(prefix): state.pop(name) for name in list(state) if name.startswith(prefix)}
        new = dict(block.attention.state_dict())
        fill(old, new, block.attention, how)
        state |= {prefix + name: value for name, value in new.items()}
    target.load_state_dict(state, strict=True)
    if how.sublayer_norm and tokens is not None:
        _restore_sizes(target, convert(source, replace(how, sublayer_norm=False), seed), tokens)
    return target.eval()


def _double(old: dict[str, Tensor], new: dict[str, Tensor], target: DiffAttention, how: Conversion) -> None:
    """A second map beside every head: query and key rows of component c of head i are head 2i + c."""
    _add_second(old, new, ("q.weight", "q.bias", "k.weight", "k.bias"), target.width, how.second)
    new |= {name: value for name, value in old.items() if name[0] in "vo" or "_norm." in name}
    _start_lambda(new)
    # lam is lambda_init. The head norm undoes the factor 1 - lam. Random second maps have no such factor.
    lam = 0.0 if how.sublayer_norm or how.second == "random" else target.lambda_init
    new["out.weight"] = _over(old["out.weight"], (1 - lam) * target.head_scale)


def _split(old: dict[str, Tensor], new: dict[str, Tensor], target: DiffAttention, how: Conversion) -> None:
    """Two heads become the two maps of one head, which has the values of both.

    Pair p is key heads 2p and 2p + 1, each of which serves r query heads. Component c of head i, which uses pair p = i // r, is
    the baseline's head (2p + c) r + i mod r, which used key head 2p + c. Output columns follow their baseline heads.
    """
    r = target.heads // target.kv_heads
    # baseline heads (pairs, 2, r) -> (pairs, r, 2): query head i of a pair, then its component c
    order = torch.arange(2 * target.heads).unflatten(0, (-1, 2, r)).transpose(1, 2).flatten()
    new |= old
    for name in ("q.weight", "q.bias"):
        if name in old:
            new[name] = old[name].unflatten(0, (-1, target.width))[order].flatten(0, 1)
    columns = old["out.weight"].unflatten(1, (-1, target.width))[:, order].flatten(1)
    new["out.weight"] = _over(columns, target.head_scale)
    _start_lambda(new)


def _to_diff_v2(old: dict[str, Tensor], new: dict[str, Tensor], target: DiffV2Attention, how: Conversion) -> None:
    """A second query head beside every one, over the same keys and values; lambda is sigmoid(lambda_bias) for all tokens."""
    _add_second(old, new, ("q.weight", "q.bias"), target.width, how.second)
    new |= {name: value for name, value in old.items() if name[0] in "kvo"}
    new["lambda_logits.weight"] = torch.zeros_like(new["lambda_logits.weight"])
    lam = new["lambda_logits.bias"][0].double().sigmoid().item()
    if how.second == "copy":
        new["out.weight"] = _over(old["out.weight"], 1 - lam)


def _keep(old: dict[str, Tensor], new: dict[str, Tensor], target: nn.Module, how: Conversion) -> None:
    """What is added starts at zero: DEX subtracts nothing, every gate is sigmoid(0) = 1/2, which `out` makes up for."""
    for name in (new.keys() - old.keys()) & {"noise.weight", "gate_logits.weight"}:
        new[name] = torch.zeros_like(new[name])
    new |= old
    new["out.weight"] = _over(old["out.weight"], 0.5 if how.to == "gated" else 1.0)


def _restore_sizes(normed: Decoder, plain: Decoder, tokens: Tensor) -> None:
    """Set the output projections of `normed` to those of `plain`, the conversion without norms, times each head's mean rms."""
    sizes: list[Tensor] = []

    def measure(module: nn.Module, inputs: tuple[Tensor]) -> None:  # of the merged heads (B, T, h dv)
        heads = inputs[0].unflatten(-1, (plain.blocks[len(sizes)].attention.heads, -1))
        sizes.append(heads.square().mean(-1).sqrt().mean((0, 1)))  # (h,)

    with ExitStack() as hooks:
        for block in plain.blocks:
            hooks.enter_context(block.attention.out.register_forward_pre_hook(measure))
        plain(tokens.cpu(), rows=torch.zeros(1, dtype=torch.long))  # one row of logits, because none are needed
    for size, before, after in zip(sizes, plain.blocks, normed.blocks, strict=True):
        size = size / getattr(after.attention, "head_scale", 1.0)  # the input of `out` has this factor already
        columns = before.attention.out.weight.unflatten(1, (len(size), -1)) * size[:, None]
        after.attention.out.weight.copy_(columns.flatten(1))


def _add_second(old: dict[str, Tensor], new: dict[str, Tensor], names: tuple[str, ...], width: int, second: str) -> None:
    """Heads 0, 1, .. of the old rows become 0, 0', 1, 1', ..: copies, or the odd heads of the new rows."""
    for name in old.keys() & set(names):
        first = old[name].unflatten(0, (-1, width))
        added = first if second == "copy" else new[name].unflatten(0, (-1, 2, width))[:, 1]
        new[name] = torch.stack((first, added), dim=1).flatten(0, 2)


def _start_lambda(new: dict[str, Tensor]) -> None:
    """Give both exponentials the same vectors, so that lam is lambda_init to the bit, and all four vectors learn."""
    for name in ("lambda_q", "lambda_k"):
        new[f"{name}2"] = new[f"{name}1"].clone()


def _over(weight: Tensor, divisor: float) -> Tensor:
    """weight / divisor, in float64 until the last rounding."""
    return (weight.double() / divisor).to(weight.dtype)


@dataclass
class Change:
    """max and mean of |logits - logits before|. hidden: for each block, rms(output - output before) / rms(output before)."""

    max_logit: float
    mean_logit: float
    hidden: list[float]
    tokens: int


@torch.inference_mode()
def change(before: Decoder, after: Decoder, tokens: Tensor) -> Change:
    """Compare two decoders of one depth and vocabulary on tokens (B, T), a sequence at a time."""
    largest, total, squares, moved = 0.0, 0.0, 0.0, 0.0
    for row in tokens.split(1):
        (old, first), (new, second) = _run(before, row), _run(after, row)
        gap = (new - old).abs()  # (1, T, V)
        largest = max(largest, gap.max().item()) if gap.isfinite().all() else math.inf
        total += gap.double().mean().item() * row.shape[1]
        squares += torch.stack([a.double().square().sum() for a in first])
        moved += torch.stack([(b.double() - a.double()).square().sum() for a, b in zip(first, second, strict=True)])
    return Change(largest, total / tokens.numel(), (moved / squares).sqrt().tolist(), tokens.numel())


def _run(model: Decoder, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    """float32 logits, and the output of every block (B, T, D)."""
    outputs: list[Tensor] = []
    with ExitStack() as hooks:
        for block in model.blocks:
            hooks.enter_context(block.register_forward_hook(lambda module, inputs, output: outputs.append(output)))
        return model(tokens).float(), outputs
