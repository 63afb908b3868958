"""The monitor: logs lambda, gates, path weights and statistics of attention maps while a model trains.

It reads a few layers on a small batch of validation text, always the same, and changes nothing of training. metrics.jsonl then
has `monitor/layer_I/NAME`, `monitor/mean/NAME`, `monitor/std/NAME` and the seconds `monitor_s` (docs/METHODS.md, 7.10).
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

from data.loader import Windows, inputs_and_targets
from model.attention.base import Attention
from model.attention.probe import SINK, entropy, first_share, negative_share, overlap, probe
from model.decoder import Decoder

LAMBDA = re.compile(r"monitor/layer_(\d+)/lambda")  # lambda of a layer; names that only begin so are other readings
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
            values |= of_maps(maps.layers[i]) | of_pair(maps.pairs[i])
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


def of_maps(maps: Tensor) -> dict[str, Tensor]:
    """Of signed attention maps (B, heads, R, S): means over windows, heads and query rows."""
    first = first_share(maps)  # (B, heads, R)
    return {
        "entropy": entropy(maps).mean(),
        "first": first.mean(),
        "sinks": (first.mean(-1) > SINK).float().mean(),
        "mass": maps.sum(-1).mean(),
        "negative": negative_share(maps).mean(),
    }


def of_pair(maps: tuple[Tensor, Tensor] | None) -> dict[str, Tensor]:
    """Of the two maps of differential heads, (B, heads, R, S) each, and their overlap; {} for other layers."""
    if maps is None:
        return {}
    values = {"overlap": overlap(*maps).mean()}
    for c, each in enumerate(maps, start=1):
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
