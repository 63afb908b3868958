"""Needle in a haystack: does the model give back a number that is hidden in real text, by depth and context length?

    python -m eval.needle run=runs/NAME [lengths=[128,256]] [depths=[0,0.5,1]] [pairs=[[1,1],[4,2]]]
        [text=FILE | shards=DIR] [name=NAME] [samples=50]

A pair (N, R): N needles lie in one context, and R of them have a question. The needle in question lies at the cell's depth, the
others at random depths. With several needles the N numbers are also ranked by log-probability, which measures small models.
A question's greedy continuation must be the answer, token by token. RULER's tasks are lm-eval's: eval.harness.
Writes eval/needle.json and figures/needle.png; for a given text, as eval.perplexity does.
"""

import contextlib
import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from configs import command
from eval import common
from eval.common import INK, Axes, figure, mean_se, plus_minus
from eval.needle_text import Cell, NeedleGridConfig, Query, needle_contexts
from eval.scoring import score
from training.checkpoint import LoadedRun

ONE = [[1, 1]]  # one needle and its question


@dataclass
class NeedleConfig(NeedleGridConfig):
    """The grid."""

    lengths: Annotated[list[int] | None, "[1, inf)"] = None  # tokens of prompt and answer; None: 1/4, 1/2, all of the context
    pairs: list[list[int]] | None = None  # (N, R); None: (1, 1); the paper has [[1,1],[2,2],[4,2],[6,2],[8,1]]


def evaluate_cell(run: LoadedRun, contexts: list[list[Query]], batch: int) -> dict[str, Any]:
    """Accuracy over contexts (the mean over a context's queries), its standard error, log-probability, rank accuracy."""
    queries = [query for context in contexts for query in context]
    prompts = [query.prompt for query in queries]
    hits, logprobs = score(run.model, prompts, [query.candidates for query in queries], batch)
    accuracy, se = mean_se(np.reshape([float(hit[0]) for hit in hits], (len(contexts), -1)).mean(axis=1))
    ranked = [logprob[0] > logprob[1:].max() for logprob in logprobs if len(logprob) > 1]
    return {
        "samples": len(contexts),
        "accuracy": accuracy,
        "se": se,
        "answer_logprob": float(np.mean([logprob[0] for logprob in logprobs])),
        "rank_accuracy": float(np.mean(ranked)) if ranked else None,
    }


def evaluate(run: LoadedRun, hay: np.ndarray, cfg: NeedleConfig) -> dict[str, Any]:
    """The grid: its `cells`, their mean `accuracy` and its standard error `se`, and both for each (N, R) in `pairs`."""
    pairs = cfg.pairs or ONE
    lengths = cfg.lengths or default_lengths(run, hay, cfg)
    grid = [Cell(length, depth, n, r) for n, r in pairs for length in lengths for depth in cfg.depths]
    contexts = [needle_contexts(run, hay, cfg, cell) for cell in grid]  # an impossible cell is refused before any is measured
    cells = []
    for cell, of_cell in common.progress("needle", len(grid), zip(grid, contexts, strict=True)):
        cells.append(cell._asdict() | evaluate_cell(run, of_cell, cfg.batch))
    by_pair = [{"needles": n, "asked": r} | summary(cells_of(cells, n, r)) for n, r in pairs]
    return summary(cells) | {"pairs": by_pair, "cells": cells, "context": run.model.cfg.context}


def cells_of(cells: list[dict[str, Any]], needles: int, asked: int) -> list[dict[str, Any]]:
    """The cells of the pair (needles, asked)."""
    return [cell for cell in cells if (cell["needles"], cell["asked"]) == (needles, asked)]


def default_lengths(run: LoadedRun, hay: np.ndarray, cfg: NeedleConfig) -> list[int]:
    """A quarter, half and all of the trained context, without the parts that are too short for the needles."""
    lengths, context = [], run.model.cfg.context
    for length in (context // 4, context // 2):
        with contextlib.suppress(ValueError):
            for pair, depth in itertools.product(cfg.pairs or ONE, cfg.depths):
                needle_contexts(run, hay, cfg, Cell(length, depth, *pair))
            lengths.append(length)
    return [*lengths, context]


def summary(cells: list[dict[str, Any]]) -> dict[str, float | None]:
    """Mean accuracy of cells, its standard error (nan for single contexts), and the mean rank accuracy where it is measured."""
    ranks = [cell["rank_accuracy"] for cell in cells if cell["rank_accuracy"] is not None]
    return {
        "accuracy": float(np.mean([cell["accuracy"] for cell in cells])),
        "se": math.sqrt(sum(cell["se"] ** 2 for cell in cells)) / len(cells),
        "rank_accuracy": float(np.mean(ranks)) if ranks else None,
    }


def draw(path: Path, results: dict[str, Any], title: str, _: str) -> None:
    """Heatmaps of accuracy, one for each (N, R): context length to the right, depth downwards, mean over depths below."""
    pairs = [(pair["needles"], pair["asked"]) for pair in results["pairs"]]
    lengths, depths = (len({cell[key] for cell in results["cells"]}) for key in ("length", "depth"))
    height = 2.2 + 0.5 * depths
    with figure(path, max(4.2, 1.9 + 0.8 * lengths), height * len(pairs), rows=len(pairs), grid="") as axes:
        for ax, (needles, asked) in zip(axes[:, 0], pairs, strict=True):
            heatmap(ax, cells_of(results["cells"], needles, asked), results["context"])
            ax.set_title(f"{title} · N={needles}" + (f", R={asked}" if needles > 1 else ""))


def heatmap(ax: Axes, cells: list[dict[str, Any]], context: int) -> None:
    """Accuracy and its standard error by length and depth, for the cells of one (N, R); * marks more than the context."""
    lengths, depths = (sorted({cell[key] for cell in cells}) for key in ("length", "depth"))
    y = [*range(len(depths)), len(depths) + 0.25]  # a gap before the mean
    for position, chosen in zip(y, [*([depth] for depth in depths), depths], strict=True):
        row = [summary([cell for cell in cells if cell["length"] == n and cell["depth"] in chosen]) for n in lengths]
        extent = (-0.5, len(lengths) - 0.5, position + 0.5, position - 0.5)
        values = np.array([[cell["accuracy"] for cell in row]])
        image = ax.imshow(values, cmap="viridis", vmin=0, vmax=1, aspect="auto", extent=extent)
        for column, cell in enumerate(row):
            look = {"ha": "center", "color": "white" if cell["accuracy"] < 0.6 else INK}
            ax.text(column, position + 0.02, f"{cell['accuracy']:.2f}", va="bottom", **look)
            if not math.isnan(cell["se"]):
                ax.text(column, position + 0.08, f"± {cell['se']:.2f}", va="top", fontsize=8, **look)
    longer = [length > context for length in lengths]
    label = f"context (tokens); n = {cells[0]['samples']} a cell, ± standard error"
    ax.set_xlabel(label + "\n* longer than in training" * any(longer), fontsize=9.5)
    ax.set(xlim=(-0.5, len(lengths) - 0.5), ylim=(y[-1] + 0.5, -0.5), ylabel="depth of the needle")
    ax.set_xticks(range(len(lengths)), [f"{n:,}" + "*" * more for n, more in zip(lengths, longer, strict=True)])
    ax.set_yticks(y, [f"{100 * depth:g} %" for depth in depths] + ["mean"])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    bar = ax.figure.colorbar(image, ax=ax, ticks=(0, 0.5, 1), label="accuracy", shrink=0.8, pad=0.03)
    bar.outline.set_visible(False)


def line(pair: dict[str, Any], cells: list[dict[str, Any]]) -> str:
    """What is printed of one (N, R)."""
    rank = f", ranked first {pair['rank_accuracy']:.3f}" if pair["rank_accuracy"] is not None else ""
    accuracy = f"N={pair['needles']} R={pair['asked']} accuracy {plus_minus(pair['accuracy'], pair['se'])}"
    return f"{accuracy}{rank} ({len(cells)} cells of {cells[0]['samples']} samples)"


@command("needle", NeedleConfig)
def main(cfg: NeedleConfig) -> None:
    common.check_different("depths", [round(depth, 3) for depth in cfg.depths], "[0,0.5,1]")
    common.check_different("lengths", cfg.lengths, "[128,256]")
    common.check_different("pairs", cfg.pairs, "[[1,1],[4,2]]")
    for pair in cfg.pairs or ONE:
        if len(pair) != 2 or not 1 <= pair[1] <= pair[0]:
            raise ValueError(f"pair {pair} is not (needles, asked) with 1 <= asked <= needles: use pairs=[[1,1],[4,2]]")
    run = common.open_run(cfg)
    parts = common.evaluation_tokens(run, cfg)
    name, about = common.claim_result("needle", cfg, common.content_of(parts))
    results = evaluate(run, common.haystack(run, parts), cfg) | about
    lines = [line(pair, cells_of(results["cells"], pair["needles"], pair["asked"])) for pair in results["pairs"]]
    common.write_result(run, cfg, name, results, lines, draw)


if __name__ == "__main__":
    main()
