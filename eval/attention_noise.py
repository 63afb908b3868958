"""Attention noise: how much attention goes to the answer, and how much to context that is beside the point?

    python -m eval.attention_noise run=runs/NAME [length=256] [depths=[0,0.25,0.5,0.75,1]] [samples=50]

One needle is hidden in real text of the trained length. The attention row of the last prompt token, which has to
produce the answer, is split in five buckets: the first token (the sink), the context before the needle, the needle's
sentence (the answer), the context after it, and the question (the query). Noise is the two context buckets.

Maps are averaged over heads and layers first, then divided by the sum of the averaged row, so that buckets sum to 1
(arXiv 2410.05258, Table 3 and Figure 1; "averaged over heads and layers" and "normalized" are an author's words in
microsoft/unilm issue 1654). `signed` sums the weights with their sign, as the paper's figure does: weights of a
differential map can cancel within a bucket, and dividing by a row sum of about 1 - lambda magnifies the rest.
`absolute` sums |weight| instead: nothing cancels.
Writes runs/NAME/eval/attention_noise.json and runs/NAME/figures/attention_noise.png.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from configs import command
from data.retrieval import Query
from eval.common import (
    INK,
    RetrievalConfig,
    batches,
    check_grid,
    device_of,
    figure,
    haystack,
    mean_se,
    needle_contexts,
    open_run,
    pad_right,
    progress,
    run_name,
    write_result,
)
from model.attention.probe import probe
from training.checkpoint import LoadedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BUCKETS = ("first", "before", "answer", "after", "query")
NOISE = ("before", "after")
READINGS = ("signed", "absolute")


@dataclass
class AttentionNoiseConfig(RetrievalConfig):
    """length: tokens of prompt and answer, the trained context by default."""

    length: int | None = None


def bucket_sums(row: Tensor, query: Query) -> Tensor:
    """Sums of an attention row (heads, P) over the five buckets of `query`, (heads, 5). One token is in one bucket."""
    start, stop = query.needle
    edges = torch.tensor([0, 1, max(1, start), stop, query.question, len(query.prompt)], device=row.device)
    upto = torch.nn.functional.pad(row.cumsum(-1), (1, 0))  # (heads, P + 1): mass before each position
    return upto[:, edges[1:]] - upto[:, edges[:-1]]


@torch.inference_mode()
def head_masses(model: nn.Module, queries: list[Query], batch: int) -> list[np.ndarray]:
    """Bucket masses of the last prompt token for each layer: (samples, readings, heads, 5), not normalised."""
    samples: list[list[np.ndarray]] = []  # [sample][layer] -> (readings, heads, 5)
    for part in batches(queries, batch, max(len(query.prompt) for query in queries), model.cfg.vocab_size):
        rows = torch.tensor([[len(query.prompt) - 1] for query in part], device=device_of(model))  # (B, 1)
        with probe(model, rows) as maps:
            model(pad_right([query.prompt for query in part], device_of(model)))
        for i, query in enumerate(part):
            signed = [layer[i, :, 0, : len(query.prompt)].double() for layer in maps.layers]  # each (heads, P)
            masses = [torch.stack((bucket_sums(row, query), bucket_sums(row.abs(), query))) for row in signed]
            samples.append([mass.cpu().numpy() for mass in masses])
    return [np.stack(layer) for layer in zip(*samples, strict=True)]


def normalised(layers: list[np.ndarray]) -> np.ndarray:
    """Average over the heads of all layers, then divide by the row sum: (samples, readings, 5), each summing to 1.

    The sum over a bucket is linear, so averaging the heads' bucket masses is averaging their maps.
    """
    mean = np.concatenate(layers, axis=2).mean(axis=2)  # (samples, readings, 5)
    return mean / mean.sum(axis=-1, keepdims=True)


def evaluate(run: LoadedRun, hay: np.ndarray, cfg: AttentionNoiseConfig) -> dict[str, Any]:
    """For each reading and depth: the five buckets, their standard errors, the noise, and masses by layer and head."""
    length = run.model.cfg.context if cfg.length is None else cfg.length
    shares, layers = {}, {}
    with progress("attention noise", len(cfg.depths)) as bar:
        for depth in cfg.depths:
            contexts = needle_contexts(run, hay, cfg, length, depth)
            layers[str(depth)] = head_masses(run.model, [context[0] for context in contexts], cfg.batch)
            shares[str(depth)] = normalised(layers[str(depth)])
            bar.update()
    return summarise(shares, layers) | {"samples": cfg.samples, "length": length}


def summarise(shares: dict[str, np.ndarray], layers: dict[str, list[np.ndarray]]) -> dict[str, Any]:
    """Results, from each depth's shares (samples, readings, 5) and masses by layer (samples, readings, heads, 5)."""
    noisy = [BUCKETS.index(bucket) for bucket in NOISE]
    results: dict[str, Any] = {"noise": {}, "se": {}, "per_layer_head": {}}
    for r, reading in enumerate(READINGS):
        stats = {depth: [mean_se(share[:, r, b]) for b in range(len(BUCKETS))] for depth, share in shares.items()}
        named = {depth: dict(zip(BUCKETS, values, strict=True)) for depth, values in stats.items()}
        depths = {depth: {bucket: mean for bucket, (mean, _) in values.items()} for depth, values in named.items()}
        overall = np.concatenate([share[:, r] for share in shares.values()])  # (depths * samples, 5)
        answer, answer_se = mean_se(overall[:, BUCKETS.index("answer")])
        noise, noise_se = mean_se(overall[:, noisy].sum(axis=1))
        mean = {"answer": answer, "answer_se": answer_se, "noise": noise, "noise_se": noise_se}
        results[reading] = {"depths": depths, "mean": mean}
        results["noise"][reading] = {depth: sum(values[bucket] for bucket in NOISE) for depth, values in depths.items()}
        results["se"][reading] = {depth: {b: se for b, (_, se) in values.items()} for depth, values in named.items()}
        results["per_layer_head"][reading] = {
            depth: {
                bucket: [layer[:, r, :, b].mean(axis=0).tolist() for layer in parts] for b, bucket in enumerate(BUCKETS)
            }
            for depth, parts in layers.items()
        }  # mass before normalisation: a softmax head's buckets sum to 1, a differential head's to about 1 - lambda
    return results


# Noise in one hue, the answer in another, what is neither in greys.
BUCKET_COLOURS = {"first": "#D5D9DF", "before": "#E69F00", "answer": "#0072B2", "after": "#F5CE7A", "query": "#98A1AC"}
BUCKET_LABELS = {
    "first": "first token",
    "before": "context before",
    "answer": "answer",
    "after": "context after",
    "query": "query",
}


def draw(path: Path, results: dict[str, Any], title: str, readings: tuple[str, ...] = READINGS) -> None:
    """Stacked bars of the five buckets at each depth, one panel a reading; negative sums hang below zero."""
    with figure(path, 4.4 * len(readings), 4, columns=len(readings)) as axes:
        for ax, reading in zip(axes[0], readings, strict=True):
            _bars(ax, results[reading]["depths"])
            ax.set_title(f"{title} · {reading}")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        columns = 3 if len(readings) == 1 else 5
        axes[0, 0].figure.legend(handles, labels, loc="outside lower center", ncols=columns, columnspacing=1)


def _bars(ax: "Axes", depths: dict[str, dict[str, float]]) -> None:
    x = np.arange(len(depths))
    above, below = np.zeros(len(depths)), np.zeros(len(depths))
    for bucket in BUCKETS:
        values = np.array([shares[bucket] for shares in depths.values()])
        bottom = np.where(values >= 0, above, below)
        ax.bar(x, values, 0.74, bottom=bottom, color=BUCKET_COLOURS[bucket], label=BUCKET_LABELS[bucket], linewidth=0)
        above, below = above + values.clip(min=0), below + values.clip(max=0)
    for position, top, shares in zip(x, above, depths.values(), strict=True):
        number = {"color": BUCKET_COLOURS["answer"], "weight": "bold", "ha": "center", "textcoords": "offset points"}
        ax.annotate(f"{shares['answer']:.2f}", (position, top), (0, 3), **number)
    ax.axhline(0, color=INK, linewidth=0.8)
    ax.set_xticks(x, [f"{100 * float(depth):g} %" for depth in depths])
    ax.set(xlabel="depth of the needle", ylabel="share of attention")
    ax.set_ylim(min(0, 1.1 * below.min()), 1.1 * above.max())
    ax.set_yticks([tick for tick in ax.get_yticks() if tick <= 1.05 * above.max()])
    ax.tick_params(axis="x", length=0)
    ax.grid(axis="y")


@command("attention_noise", AttentionNoiseConfig)
def main(cfg: AttentionNoiseConfig) -> None:
    check_grid(cfg)
    run = open_run(cfg)
    results = evaluate(run, haystack(run, cfg), cfg)
    write_result(run, cfg, "attention_noise", results)
    name = run_name(cfg.run)
    draw(Path(cfg.run) / "figures" / "attention_noise.png", results, name)
    for reading in READINGS:
        mean = results[reading]["mean"]
        print(
            f"attention_noise  {name}: {reading:8} answer {mean['answer']:.3f} ± {mean['answer_se']:.3f}, "
            f"noise {mean['noise']:.3f} ± {mean['noise_se']:.3f} ({len(cfg.depths)} depths of {cfg.samples} samples)"
        )


if __name__ == "__main__":
    main()
