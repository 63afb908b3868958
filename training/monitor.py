"""Reads a model while it trains, without a change to it: loss on validation text and by kind of document, needles, the monitor.

The monitor logs lambda, gates, path weights and statistics of attention maps, in a few layers on a small batch of validation
text, always the same. metrics.jsonl then has `monitor/layer_I/NAME`, `monitor/mean/NAME`, `monitor/std/NAME` and the seconds
`monitor_s` (docs/METHODS.md, 7.10).
"""

import math
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from statistics import fmean, pstdev
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from data.loader import UNSCORED, Mixture, Windows, inputs_and_targets
from data.retrieval import Facts, as_one_document, hide, sentence_ends
from data.tokenizer import Tokenizer
from model.attention.base import Attention
from model.attention.probe import SINK, entropy, first_share, negative_share, overlap, probe
from model.decoder import Decoder
from training.distributed import World

MOST_ROWS = 32  # of a process's micro batch whose loss is reported by kind
LOGITS_AT_ONCE = 2**26  # logits of one forward pass; more rows take several passes
KINDS = ("text", "retrieval")  # the sources of the mixture that data/stream.py makes, in its order
LAMBDA = re.compile(r"monitor/layer_(\d+)/lambda")  # lambda itself; lambda_init, lambda_mix and the like must not match
ROWS = 16  # query rows of a window whose maps are read


@dataclass
class MonitorConfig:
    """Readings of lambda, gates, path weights and attention maps during training, written to metrics.jsonl."""

    every: Annotated[int, "[0, inf)"] = 100  # steps between readings; 0: none
    layers: Annotated[int | None, "[1, inf)"] = 4  # number of layers read per variant; null: every layer
    windows: Annotated[int, "[1, inf)"] = 2  # windows of validation text that the layers are read on


class Monitor:
    """Reads the chosen layers of `model` on `tokens` (B, T): `read()` gives the numbers by key."""

    def __init__(self, model: Decoder, tokens: Tensor, layers: int | None = MonitorConfig.layers) -> None:
        self.model, self.tokens = model, tokens
        kinds: dict[type, list[int]] = {}  # of attention -> its layers
        for i, block in enumerate(model.blocks):
            kinds.setdefault(type(block.attention), []).append(i)
        self.layers = sorted(same[i] for same in kinds.values() for i in evenly(len(same), layers or len(same)))
        T, count = tokens.shape[1], min(ROWS, tokens.shape[1])
        self.rows = ((torch.arange(count) + 0.5) * T / count).long().to(tokens.device)  # middles of equal parts

    @torch.no_grad()  # not inference_mode: a block mask cached in there could not be used in training
    def read(self) -> dict[str, float]:
        """Key -> number, without numbers that are not finite."""
        start, training = time.perf_counter(), self.model.training
        readings: dict[int, dict[str, Tensor]] = {i: {} for i in self.layers}
        hooks = [self.model.blocks[i].attention.register_forward_pre_hook(partial(_note, readings[i])) for i in self.layers]
        self.model.eval()
        try:
            with torch.autocast(self.tokens.device.type, enabled=False), probe(self.model, self.rows, apart=True) as maps:
                self.model(self.tokens, rows=self.rows[-1:])
        finally:
            self.model.train(training)
            for hook in hooks:
                hook.remove()
        for i, values in readings.items():
            values |= of_maps(maps.layers[i], maps.pairs[i])
        keys = [(i, name) for i, values in readings.items() for name in values]
        numbers = torch.stack([readings[i][name].float() for i, name in keys]).tolist()  # one transfer
        return _summary(dict(zip(keys, numbers, strict=True))) | {"monitor_s": time.perf_counter() - start}


def monitor_of(cfg: MonitorConfig, model: Decoder, windows: Windows, device: torch.device) -> Monitor | None:
    if not cfg.every:
        return None
    chosen = np.stack([windows.window(i) for i in evenly(len(windows), cfg.windows)])
    return Monitor(model, torch.from_numpy(inputs_and_targets(chosen)[0]).to(device), cfg.layers)


def last_lambdas(lines: Iterable[dict[str, Any]]) -> dict[int, float]:
    """Layer, counted from 0 -> lambda, where finite, at the last reading in the lines of a metrics.jsonl; {} without one."""
    last = {}
    for line in lines:
        if "monitor_s" in line:  # a reading
            last = line
    return {int(key[1]): value for name, value in last.items() if (key := LAMBDA.fullmatch(name))}


def evenly(n: int, count: int) -> list[int]:
    """`count` evenly spaced indices below n, both ends included (all n if n < count); for one index, the middle."""
    if count == 1:
        return [n // 2]
    return sorted({round(i * (n - 1) / (count - 1)) for i in range(count)})


def of_maps(maps: Tensor, pair: tuple[Tensor, Tensor] | None) -> dict[str, Tensor]:
    """Of signed attention maps (B, heads, R, S), and of the pair of maps of differential heads: means over all but S."""
    first = first_share(maps)  # (B, heads, R)
    values = {
        "entropy": entropy(maps).mean(),
        "first": first.mean(),
        "sinks": (first.mean(-1) > SINK).float().mean(),
        "mass": maps.sum(-1).mean(),
        "negative": negative_share(maps).mean(),
    }
    if pair:
        values["overlap"] = overlap(*pair).mean()
    for c, each in enumerate(pair or (), start=1):
        values |= {f"entropy_{c}": entropy(each).mean(), f"first_{c}": first_share(each).mean()}
    return values


def _note(values: dict[str, Tensor], layer: Attention, inputs: tuple) -> None:
    values.update({name: value.clone() for name, value in layer.readings(inputs[0]).items()})  # FSDP frees parameters


def _summary(numbers: dict[tuple[int, str], float]) -> dict[str, float]:
    """(layer, name) -> number as `monitor/...` keys, with means and standard deviations over layers."""
    by_name: dict[str, list[float]] = {}
    lines = {}
    for (i, name), number in numbers.items():
        if math.isfinite(number):
            lines[f"layer_{i}/{name}"] = number
            by_name.setdefault(name, []).append(number)
    lines |= {f"mean/{name}": fmean(values) for name, values in by_name.items()}
    lines |= {f"std/{name}": pstdev(values) for name, values in by_name.items()}
    return {f"monitor/{key}": float(f"{number:.6g}") for key, number in lines.items()}


@torch.no_grad()
def validation_loss(model: Decoder, windows: Windows, tokens: int, batch: int, world: World) -> float:
    """Mean loss in nats over `tokens` of the validation set, in windows at even distances, shared out over the processes."""
    count = max(1, min(len(windows), tokens // windows.length))
    chosen = torch.linspace(0, len(windows) - 1, count, dtype=torch.float64).round().long().tolist()
    mine, total = chosen[world.rank :: world.size], 0.0
    model.eval()
    # Every process runs the same number of passes, because a pass of a split model needs all processes.
    for start in range(0, len(chosen[:: world.size]), batch):
        part = mine[start : start + batch]
        rows = np.stack([windows.window(i) for i in part or chosen[:1]])  # (b, T + 1)
        total += model(*world.tensors(*inputs_and_targets(rows))).item() * len(part)
    model.train()
    loss, count = world.mean(torch.tensor([total, len(mine)], dtype=torch.float64, device=world.device)).tolist()
    return loss / count


@torch.no_grad()
def losses_by_kind(
    model: Decoder, inputs: Tensor, targets: Tensor, source: Mixture, samples: range, world: World
) -> dict[str, float | None]:
    """loss_text and loss_retrieval, nats per token, of the rows of each kind among the first MOST_ROWS of `samples` (b, T)."""
    inputs, targets = inputs[:MOST_ROWS], targets[:MOST_ROWS]
    rows = max(1, LOGITS_AT_ONCE // (inputs.shape[1] * model.cfg.vocab_size))  # the same on every process
    parts = [  # (rows, T) each
        F.cross_entropy(model(x).float().transpose(1, 2), wanted, reduction="none").double()
        for x, wanted in zip(inputs.split(rows), targets.split(rows), strict=True)
    ]
    if isinstance(model, FSDPModule):
        model.reshard()  # else the root keeps its whole weights, and the next training step uses them without the update
    losses = torch.cat(parts)  # (b, T)
    scored = targets != UNSCORED
    kinds = torch.tensor([source.source_of(i) for i in samples[:MOST_ROWS]], device=inputs.device)
    sums = [torch.stack((losses[kinds == k].sum(), scored[kinds == k].sum().double())) for k in range(len(KINDS))]
    totals = world.mean(torch.stack(sums)).tolist()
    return {f"loss_{name}": loss / tokens if tokens else None for name, (loss, tokens) in zip(KINDS, totals, strict=True)}


class NeedleProbe:
    """`read()` asks `model` the same `samples` questions every time, each in a context of its own, as long as in training."""

    def __init__(self, model: Decoder, windows: Windows, tokenizer: Tokenizer, samples: int, digits: int) -> None:
        if not isinstance(windows, Windows):
            raise ValueError("a needle check hides needles in text, and these data have no text: use needle_every=0")
        self.model, device = model, model.embedding.weight.device
        rng, source = np.random.default_rng(0), Facts(tokenizer, "eval", digits)
        facts = [source.draw(rng, 1)[0] for _ in range(samples)]
        rows, chosen = [], evenly(len(windows), min(samples, len(windows)))
        for i, fact in enumerate(facts):
            room = windows.length - 2 * len(fact.tokens)
            if room < 0:
                raise ValueError(f"a context of {windows.length} tokens has no room for a needle: use needle_every=0")
            text = windows.window(chosen[i % len(chosen)])[:room]
            text = as_one_document(text, tokenizer) if model.cfg.document_mask else text
            context, _ = hide(text, [fact], rng.random(1).tolist(), sentence_ends(tokenizer))
            rows.append([tokenizer.eot, *context, *fact.tokens])
        self.rows = torch.tensor(rows, device=device)  # (samples, T + 1): each row ends with its answer
        lengths = torch.tensor([len(fact.value) for fact in facts], device=device)
        self.longest = int(lengths.max())
        self.of_answer = torch.arange(self.longest, device=device) >= self.longest - lengths[:, None]  # (samples, longest)

    @torch.no_grad()
    def read(self) -> float:
        """The share of questions for which greedy decoding gives exactly the answer (number and full stop)."""
        self.model.eval()
        last = torch.arange(self.rows.shape[1] - 1 - self.longest, self.rows.shape[1] - 1, device=self.rows.device)
        with torch.autocast(self.rows.device.type, enabled=False):
            predicted = self.model(self.rows[:, :-1], rows=last).argmax(-1)  # (samples, longest)
        self.model.train()
        right = (predicted == self.rows[:, -self.longest :]) | ~self.of_answer
        return right.all(-1).float().mean().item()
