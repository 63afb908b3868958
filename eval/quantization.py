"""Low-bit attention: how much loss does rounding the attention logits to a few bits cost?

    python -m eval.quantization run=runs/NAME [bits=[8,6,4]] [text=FILE | shards=DIR] [name=NAME] [tokens=100000]

The logits of every attention softmax are rounded to a b-bit integer times a scale, max|x| / (2^(b-1) - 1) over the visible
logits of one head's map of one window; everything else stays in float32. Figure 8 of arXiv 2410.05258 with another metric: the
change of the validation loss on the same windows.
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
from eval.common import TextEvalConfig, figure, mean_se, plus_minus
from eval.outliers import maps_that_fit
from eval.perplexity import claim_windows, digest, window_losses
from model.attention.probe import visit_logits


@dataclass
class QuantizationConfig(TextEvalConfig):
    """length: tokens per window; None: the trained context. tokens: most tokens to test on."""

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


def evaluate(model: nn.Module, windows: np.ndarray, cfg: QuantizationConfig) -> dict[str, Any]:
    """Loss as trained and at each number of bits, with the paired change."""
    few, losses = maps_that_fit(model, windows.shape[1] - 1, cfg.batch), {}
    for bits in (None, *cfg.bits):  # None: as trained
        with quantized(model, bits):
            losses[bits] = window_losses(model, windows, few, model.cfg.vocab_size).mean(1).numpy()
    plain, rows = losses.pop(None), []
    for bits, values in losses.items():
        change, se = mean_se(values - plain)
        rows.append({"bits": bits, "loss": float(values.mean()), "loss_change": change, "loss_change_se": se})
    counts = {"windows": len(windows), "length": windows.shape[1] - 1, "sha256": digest(windows)}
    return {"loss": float(plain.mean()), "bits": rows} | counts


def draw(path: Path, results: dict[str, Any], title: str, line_colour: str) -> None:
    """Change of loss against bits; bars are standard errors."""
    rows = sorted(results["bits"], key=lambda row: -row["bits"])
    ticks = ["32 (float)", *(row["bits"] for row in rows)]
    values, errors = ([0.0, *(row[key] for row in rows)] for key in ("loss_change", "loss_change_se"))
    with figure(path, 4.8, 3.7) as axes:
        ax = axes[0, 0]
        ax.axhline(0, color=ax.spines["left"].get_edgecolor(), linewidth=0.8)
        ax.errorbar(range(len(ticks)), values, errors, color=line_colour, marker="o", markersize=4.5, capsize=3)
        ax.set_xticks(range(len(ticks)), ticks)
        ax.set(title=title, xlabel="bits of the attention logits", ylabel="change of loss (nats per token)")


@command("quantization", QuantizationConfig)
def main(cfg: QuantizationConfig) -> None:
    common.check_different("bits", cfg.bits, "[8,6,4]")
    run = common.open_run(cfg)
    windows, name, about, _ = claim_windows("quantization", run, cfg)
    results = evaluate(run.model, windows, cfg) | about
    changes = {row["bits"]: plus_minus(row["loss_change"], row["loss_change_se"], "+.4f") for row in results["bits"]}
    lines = [f"{bits} bits: loss {change} ({len(windows)} windows)" for bits, change in changes.items()]
    common.write_result(run, cfg, name, results, lines, draw)


if __name__ == "__main__":
    main()
