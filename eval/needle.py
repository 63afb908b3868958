"""Needle in a haystack: does the model give back a number that was hidden in real text, by depth and context length?

    python -m eval.needle run=runs/NAME [lengths=[128,256]] [depths=[0,0.5,1]] [pairs=[[1,1],[4,2]]] [samples=50]

A pair is (N, R): N needles lie in one context and R of them are asked for, each by a question of its own. The asked
needle lies at the cell's depth, the others anywhere. An answer counts when the greedy continuation is the number and
its full stop, token by token. With N > 1 the N numbers of the context are also ranked by log-probability, which
measures small models before they can answer freely. Protocol: arXiv 2410.05258, section 3.3, after LWM and Gemini
1.5.
Writes runs/NAME/eval/needle.json and runs/NAME/figures/needle.png.
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

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
    wilson,
    write_result,
)
from training.checkpoint import LoadedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass
class NeedleConfig(RetrievalConfig):
    """lengths: tokens of prompt and answer, by default 1/4, 1/2 and all of the trained context. pairs: (N, R)."""

    lengths: list[int] | None = None
    pairs: list[list[int]] = field(default_factory=lambda: [[1, 1]])


@torch.inference_mode()
def score(
    model: nn.Module, prompts: Sequence[np.ndarray], answers: Sequence[np.ndarray], batch: int
) -> tuple[np.ndarray, np.ndarray]:
    """Whether greedy decoding of each prompt gives its answer, (n,) bool, and the answer's log-probability, (n,).

    Greedy decoding gives the answer exactly if, fed the answer, every next token is the most probable one. So one
    forward pass over prompt and answer tells both, and prompts of different lengths share a batch.
    """
    texts = [np.concatenate((prompt, answer[:-1])) for prompt, answer in zip(prompts, answers, strict=True)]
    hits, logprobs = [], []
    for rows in batches(range(len(texts)), batch, max(map(len, texts)), model.cfg.vocab_size):
        logits = model(pad_right([texts[row] for row in rows], device_of(model)))  # (B, T, V)
        for row, row_logits in zip(rows, logits, strict=True):
            start, answer = len(prompts[row]) - 1, torch.as_tensor(answers[row], device=logits.device)
            predicted = row_logits[start : start + len(answer)].float().log_softmax(-1)  # (A, V)
            hits.append(bool((predicted.argmax(-1) == answer).all()))
            logprobs.append(float(predicted.gather(1, answer[:, None]).sum()))
    return np.array(hits), np.array(logprobs)


def evaluate_cell(model: nn.Module, contexts: list[list[Query]], batch: int) -> dict[str, Any]:
    """Accuracy over contexts (each the mean of its queries), its standard error, log-probability, rank accuracy."""
    queries = [query for context in contexts for query in context]
    pairs = [(query.prompt, answer) for query in queries for answer in query.candidates]
    hits, logprobs = score(model, *zip(*pairs, strict=True), batch)
    own = np.cumsum([0] + [len(query.candidates) for query in queries])[:-1]  # where each query's own answer is
    hits, ranks = hits[own], [part[0] > part[1:].max(initial=-math.inf) for part in np.split(logprobs, own[1:])]
    by_context = hits.reshape(len(contexts), -1).mean(axis=1)
    accuracy, se = mean_se(by_context)
    return {
        "samples": len(contexts),
        "accuracy": accuracy,
        "se": se,
        "interval": wilson(accuracy, len(contexts)),
        "answer_logprob": float(logprobs[own].mean()),
        "rank_accuracy": float(np.mean(ranks)) if len(queries[0].candidates) > 1 else None,
    }


def evaluate(run: LoadedRun, hay: np.ndarray, cfg: NeedleConfig) -> dict[str, Any]:
    """The grid: `cells`, their mean `accuracy` with its standard error, and the same for each (N, R) in `pairs`."""
    lengths = cfg.lengths or default_lengths(run, hay, cfg)
    grid = [(n, r, length, depth) for n, r in cfg.pairs for length in lengths for depth in cfg.depths]
    cells = []
    with progress("needle", len(grid)) as bar:
        for needles, asked, length, depth in grid:
            contexts = needle_contexts(run, hay, cfg, length, depth, needles, asked)
            where = {"length": length, "depth": depth, "needles": needles, "asked": asked}
            cells.append(where | evaluate_cell(run.model, contexts, cfg.batch))
            bar.update()
    pairs = [
        {"needles": n, "asked": r} | summary([cell for cell in cells if (cell["needles"], cell["asked"]) == (n, r)])
        for n, r in cfg.pairs
    ]
    return summary(cells) | {"pairs": pairs, "cells": cells}


def default_lengths(run: LoadedRun, hay: np.ndarray, cfg: NeedleConfig) -> list[int]:
    """A quarter, half and all of the trained context; a part too short for the needles is left out."""
    context, most = run.model.cfg.context, max(n for n, _ in cfg.pairs)

    def fits(length: int) -> bool:
        with contextlib.suppress(ValueError):
            return bool(needle_contexts(run, hay, replace(cfg, samples=1), length, 0.5, most))
        return False

    return [length for length in (context // 4, context // 2) if fits(length)] + [context]


def summary(cells: list[dict[str, Any]]) -> dict[str, float | None]:
    """Mean accuracy of cells, its standard error, and the mean rank accuracy where there is one."""
    ranks = [cell["rank_accuracy"] for cell in cells if cell["rank_accuracy"] is not None]
    return {
        "accuracy": float(np.mean([cell["accuracy"] for cell in cells])),
        "se": math.sqrt(sum(cell["se"] ** 2 for cell in cells)) / len(cells),
        "rank_accuracy": float(np.mean(ranks)) if ranks else None,
    }


def draw(path: Path, results: dict[str, Any], title: str) -> None:
    """Heatmaps of accuracy, one for each (N, R): context length to the right, depth downwards, their mean below."""
    pairs = [(pair["needles"], pair["asked"]) for pair in results["pairs"]]
    lengths = len({cell["length"] for cell in results["cells"]})
    depths = len({cell["depth"] for cell in results["cells"]})
    height = 1.5 + 0.42 * (depths + 1)
    with figure(path, max(4.0, 1.9 + 0.7 * lengths), height * len(pairs), rows=len(pairs)) as axes:
        for ax, (needles, asked) in zip(axes[:, 0], pairs, strict=True):
            cells = [cell for cell in results["cells"] if (cell["needles"], cell["asked"]) == (needles, asked)]
            _heatmap(ax, cells)
            ax.set_title(f"{title} · N={needles}" + (f", R={asked}" if needles > 1 else ""))


def _heatmap(ax: "Axes", cells: list[dict[str, Any]]) -> None:
    lengths, depths = sorted({cell["length"] for cell in cells}), sorted({cell["depth"] for cell in cells})
    table = {(cell["depth"], cell["length"]): cell["accuracy"] for cell in cells}
    grid = np.array([[table[depth, length] for length in lengths] for depth in depths])  # (depths, lengths)
    grid = np.vstack((grid, grid.mean(axis=0)))
    y = [*range(len(depths)), len(depths) + 0.25]  # a gap before the mean
    for row, values in zip(y, grid, strict=True):
        extent = (-0.5, len(lengths) - 0.5, row + 0.5, row - 0.5)
        image = ax.imshow(values[None], cmap="viridis", vmin=0, vmax=1, aspect="auto", extent=extent)
        for column, value in enumerate(values):
            ink = "white" if value < 0.6 else INK
            weight = "bold" if row == y[-1] else "normal"
            ax.text(column, row, f"{value:.2f}", ha="center", va="center", color=ink, weight=weight)
    ax.set(xlim=(-0.5, len(lengths) - 0.5), ylim=(y[-1] + 0.5, -0.5), xlabel="context (tokens)")
    ax.set_ylabel("depth of the needle")
    ax.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    ax.set_yticks(y, [f"{100 * depth:g} %" for depth in depths] + ["mean"])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    bar = ax.figure.colorbar(image, ax=ax, ticks=(0, 0.5, 1), label="accuracy", shrink=0.8, pad=0.03)
    bar.outline.set_visible(False)


def check(cfg: NeedleConfig) -> None:
    """Raise ValueError for a grid that cannot be evaluated."""
    check_grid(cfg)
    for pair in cfg.pairs:
        if len(pair) != 2 or not 1 <= pair[1] <= pair[0]:
            raise ValueError(f"pair {pair} is not (needles, asked) with 1 <= asked <= needles: use pairs=[[1,1],[4,2]]")
    if not cfg.pairs:
        raise ValueError("pairs is empty: use pairs=[[1,1]]")


@command("needle", NeedleConfig)
def main(cfg: NeedleConfig) -> None:
    check(cfg)
    run = open_run(cfg)
    results = evaluate(run, haystack(run, cfg), cfg)
    write_result(run, cfg, "needle", results)
    name = run_name(cfg.run)
    draw(Path(cfg.run) / "figures" / "needle.png", results, name)
    for pair in results["pairs"]:
        rank = f", ranked first {pair['rank_accuracy']:.3f}" if pair["rank_accuracy"] is not None else ""
        print(
            f"needle  {name}: N={pair['needles']} R={pair['asked']} accuracy {pair['accuracy']:.3f} ± {pair['se']:.3f}"
            f"{rank} ({len(results['cells']) // len(cfg.pairs)} cells of {cfg.samples} samples)"
        )


if __name__ == "__main__":
    main()
