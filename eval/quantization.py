"""Low-bit attention: how much loss does rounding the attention logits to a few bits cost?

    python -m eval.quantization run=runs/NAME [bits=[8,6,4]] [text=FILE | shards=DIR] [name=NAME] [tokens=100000]

The logits of every attention softmax are rounded to a b-bit integer times a scale, max|x| / (2^(b-1) - 1) over the visible
logits of one head's map of one window (absmax, dynamic); everything else stays in float32. Figure 8 of arXiv 2410.05258, with
another metric than HellaSwag: the change of the validation loss and, for runs trained on retrieval documents, of needle
accuracy, both paired: the same windows with and without rounding.
Writes eval/quantization.json and figures/quantization.png, named as eval.perplexity's.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from configs import command
from eval import common
from eval.common import Axes, figure, mean_se, plus_minus
from eval.needle_text import Cell, NeedleGridConfig, Query, check_grid, needle_contexts
from eval.outliers import maps_that_fit
from eval.perplexity import claim_windows, digest, token_losses
from eval.scoring import score
from model.attention.probe import visit_logits
from training.checkpoint import LoadedRun


@dataclass
class QuantizationConfig(NeedleGridConfig):
    """length: tokens per window and needle context; None: the trained context. tokens: most tokens used for the loss."""

    bits: Annotated[list[int], "[2, 16]"] = field(default_factory=lambda: [8, 6, 4])  # bits of the rounded logits
    length: Annotated[int | None, "[1, inf)"] = None
    tokens: Annotated[int, "[1, inf)"] = 100_000


def absmax(logits: Tensor, see: Tensor, bits: int) -> Tensor:
    """Attention logits (..., T, S) rounded to `bits` bits, symmetric: 2^(bits-1) - 1 steps on either side of 0.

    Each map (T, S) has one scale, which depends only on the logits that the mask `see` shows (arXiv 2208.07339, 2.1).
    """
    steps = 2 ** (bits - 1) - 1
    largest = logits.masked_fill(~see, 0.0).abs().amax((-2, -1), keepdim=True)
    step = (largest / steps).clamp_min(torch.finfo(logits.dtype).tiny)  # all zeros stay zeros
    return (logits / step).round().clamp(-steps, steps) * step


def quantized(model: nn.Module, bits: int | None) -> AbstractContextManager[None]:
    """A context in which the model's attention logits are rounded; with `bits` None they are not."""
    return nullcontext() if bits is None else visit_logits(model, lambda layer, logits, see: absmax(logits, see, bits))


@torch.inference_mode()
def window_losses(model: nn.Module, windows: np.ndarray, batch: int) -> np.ndarray:
    """(n,) mean loss in nats per token of each window (n, T + 1)."""
    length, losses = windows.shape[1] - 1, []
    for part in common.batches(windows, maps_that_fit(model, length, batch), length * model.cfg.vocab_size):
        tokens = torch.from_numpy(part).to(common.device_of(model))
        losses.append(token_losses(model, tokens, model.cfg.vocab_size).double().mean(1).cpu().numpy())
    return np.concatenate(losses)


def needle_hits(model: nn.Module, queries: list[Query], batch: int) -> np.ndarray:
    """(n,) 1.0 where greedy decoding gives the answer. Texts are read without a cache: rounding needs whole maps."""
    longest = max(len(query.prompt) + len(query.answer) - 1 for query in queries)
    prompts, answers = [query.prompt for query in queries], [[query.answer] for query in queries]
    hits, _ = score(model, prompts, answers, maps_that_fit(model, longest, batch), cached=False)
    return np.array([float(hit[0]) for hit in hits])


def evaluate(run: LoadedRun, windows: np.ndarray, queries: list[Query], cfg: QuantizationConfig) -> dict[str, Any]:
    """Loss, and needle accuracy if there are queries, as trained and at each number of bits, with paired changes."""
    measured = []  # as trained, then for each of cfg.bits
    with common.progress("quantization", 1 + len(cfg.bits)) as bar:
        for bits in (None, *cfg.bits):
            with quantized(run.model, bits):
                values = {"loss": window_losses(run.model, windows, cfg.batch)}
                if queries:
                    values["accuracy"] = needle_hits(run.model, queries, cfg.batch)
            measured.append(values)
            bar.update()
    plain, *rounded = measured
    rows: list[dict[str, Any]] = [{"bits": bits} for bits in cfg.bits]
    for row, values in zip(rows, rounded, strict=True):
        for what, reference in plain.items():
            change, se = mean_se(values[what] - reference)
            row |= {what: float(values[what].mean()), f"{what}_change": change, f"{what}_change_se": se}
    results = {"loss": float(plain["loss"].mean()), "accuracy": float(plain["accuracy"].mean()) if queries else None}
    counts = {"windows": len(windows), "length": windows.shape[1] - 1, "needles": len(queries)}
    return results | {"bits": rows} | counts | {"sha256": digest(windows)}


def needles(run: LoadedRun, cfg: QuantizationConfig) -> list[Query]:
    """Single needles, `cfg.samples` at every depth; [] for a run that was not trained on retrieval documents."""
    if not run.config["data"].get("retrieval", {}).get("weight", 0):
        return []
    hay, length = common.haystack(run, common.evaluation_tokens(run, cfg)), cfg.length or run.model.cfg.context
    return [query for depth in cfg.depths for (query,) in needle_contexts(run, hay, cfg, Cell(length, depth))]


def draw(path: Path, results: dict[str, Any], title: str, line_colour: str) -> None:
    """Change of loss and, where there are needles, of accuracy against bits; bars are standard errors."""
    columns = 1 if results["accuracy"] is None else 2
    with figure(path, 0.6 + 4.2 * columns, 3.7, columns=columns) as axes:
        _line(axes[0, 0], results["bits"], "loss_change", line_colour)
        axes[0, 0].set(title=f"{title} · loss", ylabel="change of loss (nats per token)")
        if columns == 2:
            _line(axes[0, 1], results["bits"], "accuracy_change", line_colour)
            axes[0, 1].set(title=f"{title} · needle", ylabel=f"change of accuracy (from {results['accuracy']:.2f})")


def _line(ax: Axes, rows: list[dict[str, Any]], key: str, line_colour: str) -> None:
    points = [("32 (float)", 0.0, 0.0)]
    points += [(row["bits"], row[key], row[f"{key}_se"]) for row in sorted(rows, key=lambda row: -row["bits"])]
    ticks, values, errors = zip(*points, strict=True)
    ax.axhline(0, color=ax.spines["left"].get_edgecolor(), linewidth=0.8)
    ax.errorbar(range(len(ticks)), values, errors, color=line_colour, marker="o", markersize=4.5, capsize=3)
    ax.set_xticks(range(len(ticks)), ticks)
    ax.set_xlabel("bits of the attention logits")


def line(row: dict[str, Any], windows: int) -> str:
    """What is printed of one number of bits."""
    changes = [f"loss {plus_minus(row['loss_change'], row['loss_change_se'], '+.4f')}"]
    if "accuracy" in row:
        changes.append(f"needle {plus_minus(row['accuracy_change'], row['accuracy_change_se'], '+.3f')}")
    return f"{row['bits']} bits: {', '.join(changes)} ({windows} windows)"


@command("quantization", QuantizationConfig)
def main(cfg: QuantizationConfig) -> None:
    check_grid(cfg)
    if not cfg.bits or len(set(cfg.bits)) < len(cfg.bits):
        raise ValueError(f"bits={cfg.bits} must be different numbers: use bits=[8,6,4]")
    run = common.open_run(cfg)
    windows, name, about = claim_windows("quantization", run, cfg)
    results = evaluate(run, windows, needles(run, cfg), cfg) | about
    lines = [line(row, len(windows)) for row in results["bits"]]
    common.write_result(run, cfg, name, results, lines, draw)


if __name__ == "__main__":
    main()
