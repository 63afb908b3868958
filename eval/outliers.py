"""Activation outliers: the largest attention logits and hidden states, and the medians of both.

    python -m eval.outliers run=runs/NAME [text=FILE | shards=DIR] [name=NAME] [length=256] [tokens=400000]

Attention logits are |q.k| / sqrt(d), the inputs of every softmax (both maps of a differential head, every path of an
introspective layer), without the pairs that the mask hides. Hidden states are the absolute values of every layer's output.
top-k is exact, the median to 0.05 % of its value. Table 5 of arXiv 2410.05258, defined in microsoft/unilm issue 1666.
Writes eval/outliers.json, named as eval.perplexity's.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from configs import command
from eval import common
from eval.common import FLOATS_IN_MEMORY, TextEvalConfig
from eval.perplexity import claim_windows, digest
from model.attention.probe import visit_logits

RANKS = (1, 2, 3, 10, 100)
KINDS = {"logits": "|attention logits|", "hidden": "|hidden states|"}
KEPT_BITS = 18  # of a float32: 8 bits of exponent, 10 bits of mantissa


@dataclass
class OutliersConfig(TextEvalConfig):
    """length: tokens per window, by default the trained context. tokens: read at most this many (the paper: 0.4M)."""

    length: Annotated[int | None, "[1, inf)"] = None
    tokens: Annotated[int, "[1, inf)"] = 400_000


class Magnitudes:
    """The exact largest values of a stream of magnitudes (`top`), and a histogram for the median (`counts`).

    A bin holds the non-negative float32 numbers with the same exponent and the same first 10 bits of mantissa. The bit
    patterns of such numbers have the order of the numbers, and the width of a bin is at most 2^-10 of its value.
    """

    def __init__(self) -> None:
        self.top = torch.empty(0)
        self.counts = torch.zeros(2**KEPT_BITS, dtype=torch.int64)

    def add(self, values: Tensor) -> None:
        """Add the absolute values of a tensor."""
        values = values.detach().flatten().float().abs()
        bins = values.view(torch.int32) >> (31 - KEPT_BITS)
        self.counts += torch.bincount(bins, minlength=2**KEPT_BITS).cpu()
        floor = self.top[-1].item() if len(self.top) == RANKS[-1] else -1.0
        values = values[~(values <= floor)]  # NaN is kept here; `summary` refuses it
        both = torch.cat((self.top, values.topk(min(RANKS[-1], len(values))).values.cpu()))
        self.top = both.topk(min(RANKS[-1], len(both))).values


def summary(parts: list[Magnitudes]) -> dict[str, float | int | None]:
    """Of all parts together: top1 to top100 (None where there are fewer values), the median (the lower one of two middle
    values, with a relative error of at most 2^-11), and the number of values. ValueError where one is not finite.
    """
    counts = sum(part.counts for part in parts)
    top = torch.cat([part.top for part in parts]).sort(descending=True).values
    common.check_finite(top)
    index = int(torch.searchsorted(counts.cumsum(0), (int(counts.sum()) + 1) // 2))
    edges = torch.tensor([index, index + 1], dtype=torch.int32) << (31 - KEPT_BITS)
    tops = {f"top{k}": float(top[k - 1]) if len(top) >= k else None for k in RANKS}
    return tops | {"median": float(edges.view(torch.float32).double().mean()), "count": int(counts.sum())}


@contextmanager
def watch(model: nn.Module) -> Iterator[dict[str, list[Magnitudes]]]:
    """A context that adds the model's activations to `logits` and `hidden`, one `Magnitudes` per layer each."""
    seen = {kind: [Magnitudes() for _ in model.blocks] for kind in KINDS}
    with ExitStack() as stack:
        for block, layer in zip(model.blocks, seen["hidden"], strict=True):
            stack.enter_context(block.register_forward_hook(lambda module, inputs, output, layer=layer: layer.add(output)))
        stack.enter_context(visit_logits(model, lambda i, logits, see: seen["logits"][i].add(logits[see.expand_as(logits)])))
        yield seen


def maps_that_fit(model: nn.Module, length: int, batch: int) -> int:
    """The number of sequences, at most `batch`, for which several dense copies of a layer's maps fit in memory."""
    return max(1, min(batch, FLOATS_IN_MEMORY // (8 * model.cfg.n_head * length**2)))


@torch.inference_mode()
def evaluate(model: nn.Module, windows: np.ndarray, batch: int = 32) -> dict[str, Any]:
    """Outliers over windows (n, T + 1) of tokens: `logits` and `hidden` of the model, and both `per_layer`."""
    n, length = windows.shape[0], windows.shape[1] - 1
    with common.progress("outliers", n) as bar, watch(model) as seen:
        for part in common.batches(windows, maps_that_fit(model, length, batch), length * model.cfg.vocab_size):
            model.hidden(torch.from_numpy(part[:, :-1]).to(common.device_of(model)))
            bar.update(len(part))
    results: dict[str, Any] = {kind: summary(layers) for kind, layers in seen.items()}
    results["per_layer"] = [
        {"layer": i} | {kind: summary([layers[i]]) for kind, layers in seen.items()} for i in range(len(model.blocks))
    ]
    return results | {"tokens": n * length, "windows": n, "length": length, "sha256": digest(windows)}


def line(kind: str, results: dict[str, Any]) -> str:
    """What is printed of the logits or the hidden states."""
    values = results[kind]
    tops = ", ".join(f"top-{k} {values[f'top{k}']:.4g}" for k in RANKS if values[f"top{k}"])
    size = f"({values['count']:,} values of {results['tokens']:,} tokens)"
    return f"{KINDS[kind]}: {tops}, median {values['median']:.4g} {size}"


@command("outliers", OutliersConfig)
def main(cfg: OutliersConfig) -> None:
    run = common.open_run(cfg)
    windows, name, about, _ = claim_windows("outliers", run, cfg)
    results = evaluate(run.model, windows, cfg.batch) | about
    common.write_result(run, cfg, name, results, [line(kind, results) for kind in KINDS])


if __name__ == "__main__":
    main()
