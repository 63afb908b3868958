"""Attention noise: how much attention goes to the answer, and how much to context that does not matter?

    python -m eval.attention_noise run=runs/NAME [text=FILE | shards=DIR] [name=NAME] [length=256]
        [depths=[0,0.25,0.5,0.75,1]] [samples=50]

One needle is hidden in real text. The attention row of the last prompt token, which has to produce the answer, is split into
five buckets: first token (the sink), context before the needle, the needle's sentence (answer), context after it, question
(query). Noise is the two context buckets (arXiv 2410.05258, Table 3). `signed` sums weights with their sign, as the paper does;
`absolute` sums |weight|; `signed_per_layer` divides each layer's row by that row's sum. Also entropy, negative mass and
attention sinks (arXiv 2410.10781) by layer and head. docs/METHODS.md, section 7.3.
Writes eval/attention_noise.json and figures/attention_noise.png, named as eval.perplexity's.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from configs import command
from eval import common
from eval.common import INK, Axes, device_of, figure, mean_se, pad_right, plus_minus
from eval.needle_text import Cell, NeedleGridConfig, Query, needle_contexts
from eval.scoring import floats_per_token
from model.attention.probe import SINK, entropy, first_share, negative_share, probe
from training.checkpoint import LoadedRun

BUCKETS = ("first", "before", "answer", "after", "query")
NOISE = ("before", "after")
READINGS = ("signed", "absolute")
SINK_LENGTH = 64  # T of arXiv 2410.10781
SINK_ROWS = 64  # at most this many query rows are read per window


@dataclass
class AttentionNoiseConfig(NeedleGridConfig):
    """length: tokens of prompt and answer, by default the trained context. windows: text windows for attention sinks."""

    length: Annotated[int | None, "[1, inf)"] = None
    windows: Annotated[int, "[1, inf)"] = 100


def bucket_sums(row: Tensor, query: Query) -> Tensor:
    """Sums of an attention row (heads, P) over the five buckets of `query`: (heads, 5). Each token is in one bucket."""
    start, stop = query.needle
    edges = torch.tensor([0, 1, max(1, start), stop, query.question, len(query.prompt)], device=row.device)
    upto = F.pad(row.cumsum(-1), (1, 0))  # (heads, P + 1): mass before each position
    return upto[:, edges[1:]] - upto[:, edges[:-1]]


@torch.inference_mode()
def head_rows(model: nn.Module, queries: list[Query], batch: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Of the attention row of the last prompt token, for the heads of all layers side by side: bucket masses (samples,
    readings, heads, 5), entropy and share of negative mass (samples, 2, heads), and the number of heads in each layer.
    """
    masses, spreads, heads = [], [], []
    longest = max(len(query.prompt) for query in queries)
    for part in common.batches(queries, batch, longest * floats_per_token(model.cfg)):
        rows = torch.tensor([[len(query.prompt) - 1] for query in part], device=device_of(model))  # (B, 1)
        with probe(model, rows) as maps:
            model(pad_right([query.prompt for query in part], rows.device), rows=rows)
        heads = [layer.shape[1] for layer in maps.layers]
        for i, query in enumerate(part):
            row = torch.cat([layer[i, :, 0, : len(query.prompt)].double() for layer in maps.layers])  # (heads, P)
            common.check_finite(row)
            masses.append(torch.stack((bucket_sums(row, query), bucket_sums(row.abs(), query))).cpu().numpy())
            spreads.append(torch.stack((entropy(row), negative_share(row))).cpu().numpy())
    return np.stack(masses), np.stack(spreads), heads


def by_layer(values: np.ndarray, heads: list[int]) -> list[list[float]]:
    """Values (heads of all layers,) as a list for each layer."""
    return [layer.tolist() for layer in np.split(values, np.cumsum(heads)[:-1])]


@torch.inference_mode()
def sinks(model: nn.Module, hay: np.ndarray, length: int, windows: int, batch: int) -> dict[str, Any]:
    """Attention to the first token of `windows` windows of text, `length` tokens each (arXiv 2410.10781, section 3.2).

    A head's mass is the mean of |first weight| / sum |weights| over the query rows, in longer windows over 64 of them. `share`:
    the share of all (window, layer, head) with a mass over 0.3, as the authors' code counts; `se` is its error over windows.
    `heads`: the share of all (layer, head) whose mean mass is over 0.3. A short text has fewer windows, without overlap.
    """
    if len(hay) < length:
        raise ValueError(f"the text has {len(hay)} tokens, but a window needs {length}: give a longer text=FILE")
    windows = min(windows, len(hay) // length)
    starts = np.linspace(0, len(hay) - length, windows).round().astype(int)
    n_rows = min(SINK_ROWS, length)
    rows = (torch.arange(n_rows) + 0.5) * length / n_rows  # middles of equal parts of the window
    rows = rows.long().to(device_of(model))
    masses, heads = [], []
    per_token = max(floats_per_token(model.cfg), n_rows * model.cfg.n_layer * model.cfg.n_head)
    for part in common.batches(starts, batch, length * per_token):
        with probe(model, rows) as maps:
            model(pad_right([hay[start : start + length] for start in part], rows.device), rows=rows[-1:])
        first = [first_share(layer).mean(-1) for layer in maps.layers]  # (B, heads) each
        masses.append(torch.cat(first, dim=1).double().cpu().numpy())
        heads = [layer.shape[1] for layer in first]
    mass = np.concatenate(masses)  # (windows, heads of all layers)
    share, se = mean_se((mass > SINK).mean(axis=1))
    mean = mass.mean(axis=0)
    shares = {"share": share, "se": se, "heads": float((mean > SINK).mean()), "mass": float(mass.mean())}
    return shares | {"windows": windows, "per_layer_head": by_layer(mean, heads)}


def normalised(masses: np.ndarray) -> np.ndarray:
    """Masses (..., heads, 5) averaged over heads and then divided by the row sum: (..., 5), where each 5 sum to 1.

    The sum over a bucket is linear, so the mean of the heads' bucket masses is the bucket mass of their mean map.
    """
    mean = masses.mean(axis=-2)
    return mean / mean.sum(axis=-1, keepdims=True)


def evaluate(run: LoadedRun, hay: np.ndarray, cfg: AttentionNoiseConfig) -> dict[str, Any]:
    """The results of `summarise`, entropy and negative share over prompts and heads, and `sinks` for each length."""
    model, context = run.model, run.model.cfg.context
    length = cfg.length or context
    masses, spreads, sink = [], [], {}
    with common.progress("attention noise", len(cfg.depths) + 2) as bar:
        for size in sorted({min(SINK_LENGTH, context), context}):
            sink[str(size)] = sinks(model, hay, size, cfg.windows, cfg.batch)
            bar.update()
        for depth in cfg.depths:
            contexts = needle_contexts(run, hay, cfg, Cell(length, depth))
            mass, spread, heads = head_rows(model, [context[0] for context in contexts], cfg.batch)
            masses.append(mass)
            spreads.append(spread)
            bar.update()
    signed = all(block.attention.row_sums != "any" for block in model.blocks)
    results = summarise(np.stack(masses), heads, [str(depth) for depth in cfg.depths], signed)
    for i, name in enumerate(("entropy", "negative")):
        values = np.stack(spreads)[:, :, i]  # (depths, samples, heads)
        mean, se = over_depths(values.mean(axis=2))
        per_head = values.reshape(-1, values.shape[2]).mean(axis=0)
        results[name] = {"mean": mean, "se": se, "per_layer_head": by_layer(per_head, heads)}
    return results | {"samples": cfg.samples, "length": length, "sink": sink, "windows": cfg.windows}


def summarise(masses: np.ndarray, heads: list[int], depths: list[str], signed: bool = True) -> dict[str, Any]:
    """Results from the masses (depths, samples, readings, heads of all layers, 5).

    signed: whether row sums can serve as divisors; if not, the results divided by signed row sums are None.
    """
    results: dict[str, Any] = {"noise": {}, "se": {}, "per_layer_head": {}}
    for r, reading in enumerate(READINGS):
        means, errors, noise = None, None, None
        if signed or reading == "absolute":
            means, errors = over_samples(normalised(masses[:, :, r]), depths)
            noise = {depth: sum(shares[bucket] for bucket in NOISE) for depth, shares in means["depths"].items()}
        results[reading], results["se"][reading], results["noise"][reading] = means, errors, noise
        # Mass before normalisation: a softmax head's buckets sum to 1, a differential head's to about 1 - lambda.
        results["per_layer_head"][reading] = {
            depth: {bucket: by_layer(mean[:, b], heads) for b, bucket in enumerate(BUCKETS)}
            for depth, mean in zip(depths, masses[:, :, r].mean(axis=1), strict=True)  # (heads, 5) each
        }
    layers = np.split(masses[:, :, READINGS.index("signed")], np.cumsum(heads)[:-1], axis=-2)
    shares = np.mean([normalised(layer) for layer in layers], axis=0) if signed else None
    return results | {"signed_per_layer": over_samples(shares, depths)[0] if signed else None}


def over_samples(shares: np.ndarray, depths: list[str]) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """One reading's results from shares (depths, samples, 5): means by depth and overall, and errors by depth."""
    stats = np.array([[mean_se(bucket) for bucket in share.T] for share in shares])  # (depths, 5, mean and error)
    means, errors = (pd.DataFrame(table, depths, BUCKETS).to_dict("index") for table in np.moveaxis(stats, -1, 0))
    answer, answer_se = over_depths(shares[..., BUCKETS.index("answer")])
    noise, noise_se = over_depths(shares[..., [BUCKETS.index(bucket) for bucket in NOISE]].sum(axis=-1))
    mean = {"answer": answer, "answer_se": answer_se, "noise": noise, "noise_se": noise_se}
    return {"depths": means, "mean": mean}, errors


def over_depths(values: np.ndarray) -> tuple[float, float]:
    """Mean of values (depths, samples), and its standard error over samples: the depths are fixed."""
    means, errors = np.transpose([mean_se(row) for row in values])
    return float(means.mean()), float(np.sqrt(np.sum(np.square(errors)))) / len(values)


# Noise has one hue, the answer another; the other buckets are grey.
BUCKET_COLOURS = {"first": "#D5D9DF", "before": "#E69F00", "answer": "#0072B2", "after": "#F5CE7A", "query": "#98A1AC"}
BUCKET_LABELS = {"first": "first token", "before": "context before", "after": "context after"}  # others: names


def draw(path: Path, results: dict[str, Any], title: str, _: str) -> None:
    """Stacked bars of the five buckets at each depth, one panel per reading; negative sums are drawn below zero."""
    readings = list(filter(results.get, READINGS))
    with figure(path, 4.4 * len(readings), 4, columns=len(readings)) as axes:
        for ax, reading in zip(axes[0], readings, strict=True):
            _bars(ax, results[reading]["depths"])
            ax.set_title(f"{title} · {reading}")
        legend = axes[0, 0].get_legend_handles_labels()
        axes[0, 0].figure.legend(*legend, loc="outside lower center", ncols=3 if len(readings) == 1 else 5, columnspacing=1)


def _bars(ax: Axes, depths: dict[str, dict[str, float]]) -> None:
    x = np.arange(len(depths))
    above, below = np.zeros((2, len(depths)))
    for bucket in BUCKETS:
        values = np.array([shares[bucket] for shares in depths.values()])
        look = {"color": BUCKET_COLOURS[bucket], "label": BUCKET_LABELS.get(bucket, bucket), "linewidth": 0}
        ax.bar(x, values, 0.74, bottom=np.where(values >= 0, above, below), **look)
        above, below = above + values.clip(min=0), below + values.clip(max=0)
    number = {"color": BUCKET_COLOURS["answer"], "weight": "bold", "ha": "center", "textcoords": "offset points"}
    for position, top, shares in zip(x, above, depths.values(), strict=True):
        ax.annotate(f"{shares['answer']:.2f}", (position, top), (0, 3), **number)
    ax.axhline(0, color=INK, linewidth=0.8)
    ax.set_xticks(x, [f"{100 * float(depth):g} %" for depth in depths])
    ax.set(xlabel="depth of the needle", ylabel="share of attention", ylim=(min(0, 1.1 * below.min()), 1.1 * above.max()))
    ax.tick_params(axis="x", length=0)


def lines(results: dict[str, Any], cfg: AttentionNoiseConfig) -> list[str]:
    """What is printed."""
    count = f"({len(cfg.depths)} depths of {cfg.samples} samples)"
    printed = []
    for reading in filter(results.get, READINGS):
        mean = results[reading]["mean"]
        answer, noise = (plus_minus(mean[key], mean[f"{key}_se"]) for key in ("answer", "noise"))
        printed.append(f"{reading:8} answer {answer}, noise {noise} {count}")
    if not results["signed"]:
        printed.append("signed and signed_per_layer are left out: rows may sum to zero, so no share of the sum has a meaning")
    sink = ", ".join(f"{plus_minus(part['share'], part['se'])} (T={size})" for size, part in results["sink"].items())
    spreads = f"entropy {results['entropy']['mean']:.3f} nats, negative mass {results['negative']['mean']:.3f}"
    return [*printed, f"{spreads}, sinks {sink}"]


@command("attention_noise", AttentionNoiseConfig)
def main(cfg: AttentionNoiseConfig) -> None:
    common.check_different("depths", [round(depth, 3) for depth in cfg.depths], "[0,0.5,1]")
    run = common.open_run(cfg)
    parts = common.evaluation_tokens(run, cfg)
    name, about = common.claim_result("attention_noise", cfg, common.content_of(parts))
    results = evaluate(run, common.haystack(run, parts), cfg) | about
    common.write_result(run, cfg, name, results, lines(results, cfg), draw)


if __name__ == "__main__":
    main()
