"""Associative recall among distractors: accuracy and attention at every share of them, and what a second map contributes.

    python -m eval.mqar run=runs/NAME [shares=[0,0.5,0.8,0.9,0.95]] [samples=256]

For a run that was trained with data=mqar (data/mqar.py). An answer is right if the most probable token of the vocabulary is
the value. Contexts come from a separate split; at a higher share than in training they may be longer than all of training.
`attention`: of the rows at the questions, the share of absolute mass on the distractors, on the pair's key and value, on the
first token, and elsewhere. Differential heads also have `map_1`, `map_2` and their `correlation` over the distractors.
`altered`: accuracy with lambda set to 0, without further training.
Writes eval/mqar.json and figures/mqar.png into the run's folder or out=.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from configs import command
from data.mqar import Mqar, MqarConfig, Sample, shortest_row
from eval import common
from eval.common import GREY, EvalConfig, figure, mean_se, plus_minus
from eval.scoring import floats_per_token
from model.attention.probe import probe
from training.checkpoint import LoadedRun

BUCKETS = ("distractors", "key", "value", "first", "elsewhere")


@dataclass
class MqarEvalConfig(EvalConfig):
    """The contexts."""

    shares: Annotated[list[float], "[0, 1)"] = field(default_factory=lambda: [0.0, 0.5, 0.8, 0.9, 0.95])  # of distractors
    samples: Annotated[int, "[1, inf)"] = 256  # contexts for each share
    seed: Annotated[int, "[0, 4294967295]"] = 0  # seed of the contexts


@torch.inference_mode()
def hits(model: nn.Module, samples: list[Sample], batch: int) -> np.ndarray:
    """Whether each answer is the most probable token: (samples, pairs) bool."""
    right = []
    for part in common.batches(samples, batch, len(samples[0].tokens) * floats_per_token(model.cfg)):
        tokens, at = _tensors(part, common.device_of(model), "tokens", "questions")
        logits = model(tokens[:, :-1], rows=at)
        common.check_finite(logits)
        right.append((logits.argmax(-1) == tokens.gather(1, at + 1)).cpu().numpy())
    return np.concatenate(right)


def _tensors(samples: list[Sample], device: torch.device, *names: str) -> list[Tensor]:
    """Fields of all samples, stacked: `tokens` (B, T + 1), positions `questions` (B, R) or `distractors` (B, n)."""
    return [torch.from_numpy(np.stack([getattr(sample, name) for sample in samples])).to(device) for name in names]


@contextmanager
def lambda_zero(model: nn.Module) -> Iterator[bool]:
    """A context in which every lambda of the model is 0; gives whether a layer has one (V1, V2, their subclasses, and dex)."""
    layers = [block.attention for block in model.blocks if hasattr(block.attention, "lam")]
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(patch.object(layer, "lam", lambda *inputs, lam=layer.lam: 0.0 * lam(*inputs)))
        yield bool(layers)


@torch.inference_mode()
def read_attention(model: nn.Module, samples: list[Sample], batch: int) -> dict[str, Any]:
    """`map`, and for two maps also `map_1`, `map_2` and `correlation`: means over layers, and by layer in `layers`."""
    layers: list[dict[str, list[Tensor]]] = [{} for _ in model.blocks]
    for part in common.batches(samples, batch, len(samples[0].tokens) * floats_per_token(model.cfg)):
        tokens, at, distractors = _tensors(part, common.device_of(model), "tokens", "questions", "distractors")
        buckets = bucket_of_positions(part).to(tokens.device)  # (B, R, T, buckets)
        with probe(model, at, apart=True) as seen:
            model(tokens[:, :-1], rows=at)
        for layer, whole, pair in zip(layers, seen.layers, seen.pairs, strict=True):
            for name, rows in zip(("map", "map_1", "map_2"), (whole, *(pair or ())), strict=False):
                layer.setdefault(name, []).append(bucket_shares(rows, buckets))
            if pair and distractors.shape[1] > 2:
                layer.setdefault("correlation", []).append(correlation(*pair, distractors))
    means = [{name: torch.cat(parts).mean(0).cpu() for name, parts in layer.items()} for layer in layers]
    names = {name for mean in means for name in mean}
    overall = {name: torch.stack([mean[name] for mean in means if name in mean]).mean(0) for name in names}
    return {**_named(overall), "layers": [{"layer": i, **_named(mean)} for i, mean in enumerate(means)]}


def _named(values: dict[str, Tensor]) -> dict[str, Any]:
    return {
        name: dict(zip(BUCKETS, value.tolist(), strict=True)) if value.dim() else value.item()
        for name, value in sorted(values.items())
    }


def bucket_of_positions(samples: list[Sample]) -> Tensor:
    """The bucket of each position for each question: (B, R, T, buckets), one-hot."""
    bucket = np.full((len(samples), len(samples[0].questions), len(samples[0].tokens) - 1), BUCKETS.index("elsewhere"))
    questions = np.arange(bucket.shape[1])
    for rows, sample in zip(bucket, samples, strict=True):
        rows[:, 0] = BUCKETS.index("first")
        rows[:, sample.distractors] = BUCKETS.index("distractors")
        rows[questions, sample.told] = BUCKETS.index("key")
        rows[questions, sample.told + 1] = BUCKETS.index("value")
    return nn.functional.one_hot(torch.from_numpy(bucket), len(BUCKETS)).float()


def bucket_shares(rows: Tensor, buckets: Tensor) -> Tensor:
    """Shares of absolute mass in each bucket for maps (B, heads, R, S), averaged over heads and rows: (B, buckets)."""
    mass = rows.abs() / rows.abs().sum(-1, keepdim=True)
    return torch.einsum("bhrs,brsk->bhrk", mass, buckets).mean((1, 2))


def correlation(first: Tensor, second: Tensor, positions: Tensor) -> Tensor:
    """Pearson's correlation of maps (B, heads, R, S) over `positions` (B, n), mean over heads and rows: (B,); 0 if constant."""
    index = positions[:, None, None].expand(*first.shape[:3], -1)

    def standard(rows: Tensor) -> Tensor:
        mass = rows.gather(-1, index)
        spread = mass - mass.mean(-1, keepdim=True)
        rounding = 1e-4 * mass.norm(dim=-1, keepdim=True) + 1e-30
        return spread / spread.norm(dim=-1, keepdim=True).clamp(min=rounding)

    return (standard(first) * standard(second)).sum(-1).mean((1, 2))


def evaluate(run: LoadedRun, cfg: MqarEvalConfig) -> dict[str, Any]:
    """Accuracy and attention at each share, and for a model that has lambdas the accuracy with all of them 0."""
    model, sources = run.model, sources_of(run, cfg)
    shares, attention, zero = [], [], []
    for share, source in common.progress("mqar", len(cfg.shares), zip(cfg.shares, sources, strict=True)):
        samples = [source.draw("eval", i, cfg.seed) for i in range(cfg.samples)]
        where = {"percent": round(100 * share)}
        shares.append(where | accuracy(model, samples, cfg.batch))
        attention.append(where | read_attention(model, samples, cfg.batch))
        with lambda_zero(model) as differential:
            if differential:
                zero.append(where | accuracy(model, samples, cfg.batch))
    results = {"shares": shares, "mean": float(np.mean([row["accuracy"] for row in shares])), "attention": attention}
    task, trained = sources[0].cfg, run.config["data"]["mqar"]
    about = {"chance": 1 / task.values, "samples": cfg.samples, "kind": task.kind, "trained": trained}
    return results | ({"altered": {"lambda_zero": zero}} if zero else {}) | about


def accuracy(model: nn.Module, samples: list[Sample], batch: int) -> dict[str, float]:
    """Share of right answers and its standard error over contexts."""
    mean, se = mean_se(hits(model, samples, batch).mean(axis=1))
    return {"accuracy": mean, "se": se}


def sources_of(run: LoadedRun, cfg: MqarEvalConfig) -> list[Mqar]:
    """The run's task at each of the shares. ValueError for what cannot be evaluated."""
    if run.config["data"]["source"] != "mqar":
        raise ValueError(f"{cfg.run} was not trained on associative recall: train one with data=mqar")
    common.check_different("shares", [round(share, 2) for share in cfg.shares], "[0,0.5,0.9]")
    tasks = [MqarConfig(**run.config["data"]["mqar"] | {"distractors": share}) for share in cfg.shares]
    return [Mqar(task, shortest_row(task)) for task in tasks]


def draw(path: Path, results: dict[str, Any], title: str, line: str) -> None:
    """Accuracy against the share of distractors, with standard errors; one more line with lambda set to 0."""
    with figure(path, 5.6, 4.2) as axes:
        ax = axes[0, 0]
        for name, rows in accuracies(results).items():
            look = {"color": line if name == "as trained" else GREY, "marker": "o", "markersize": 4}
            values, errors = ([row[key] for row in rows] for key in ("accuracy", "se"))
            ax.errorbar(range(len(rows)), values, errors, label=name.replace("_", " "), **look)
        ax.axhline(results["chance"], color=GREY, linewidth=0.8)
        ax.set_xticks(range(len(results["shares"])), [f"{row['percent']} %" for row in results["shares"]])
        ax.set(ylim=(-0.02, 1.04), ylabel="accuracy", title=title)
        ax.set_xlabel("share of distractors among the slots before the questions")
        ax.legend()


def accuracies(results: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The rows of the model as trained, and with lambda set to 0."""
    return {"as trained": results["shares"], **results.get("altered", {})}


def lines(results: dict[str, Any]) -> Iterator[str]:
    """What is printed."""
    for model, rows in accuracies(results).items():
        yield f"{model}: " + ", ".join(f"{row['percent']} % {plus_minus(row['accuracy'], row['se'])}" for row in rows)


@command("mqar", MqarEvalConfig)
def main(cfg: MqarEvalConfig) -> None:
    run = common.open_run(cfg, task=True)
    name, _ = common.claim_result("mqar", cfg)
    results = evaluate(run, cfg)
    common.write_result(run, cfg, name, results, lines(results), draw)


if __name__ == "__main__":
    main()
