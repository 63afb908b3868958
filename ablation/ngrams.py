"""Kneser-Ney n-grams as a yardstick: their loss on a study's test text, after as many tokens of its training text as its runs.

    python -m ablation.ngrams ablation=docs/results/main shards=shards/prose text=FILE [out=runs/ngrams/main]

For each order n, interpolated Kneser-Ney with one discount per order, n1 / (n1 + 2 n2) (Kneser and Ney 1995; Chen and Goodman
1999, section 2.7), from the windows that a run with seed `seed` reads first. Tested on windows of eval.perplexity; a context
does not reach beyond its window. `cache` mixes in the bigrams that the window itself has had so far, with the weight that is
best on the validation shards. Writes ngrams.json, ngrams.md and figures/ngrams.png.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from omegaconf import MISSING

from ablation.findings import FindingsConfig, write_findings
from configs import command
from data.loader import Windows
from data.shards import open_split
from data.tokenizer import load_tokenizer
from eval.common import GREY, figure, tokens_of
from eval.perplexity import cut_windows, digest
from eval.recall import ngram_codes, recall_hits
from eval.report.runs import ablation_in, colours_of
from eval.report.tables import markdown

WEIGHTS = np.arange(0, 0.95, 0.05)  # of the cache


@dataclass
class NgramsConfig(FindingsConfig):
    """The texts, and the numbers of training tokens: by default those of the study's arms."""

    shards: str = MISSING  # the study's prepared folder
    text: str | None = None  # test text; None: the validation shards
    metrics: list[str] = field(default_factory=lambda: ["books", "AR-Hit"])  # of the study on this text: loss, recalled tokens
    tokens: Annotated[list[int], "[1, inf)"] = field(default_factory=list)  # training tokens; []: those of the study's points
    orders: Annotated[list[int], "[1, inf)"] = field(default_factory=lambda: [3, 4, 5])  # n
    context: Annotated[int, "[2, inf)"] = 256  # tokens per window, as the study's model.context
    test_tokens: Annotated[int, "[1, inf)"] = 524_288  # largest number of tokens to test on, as the study's text_tokens
    seed: int = 1  # of the order of the training windows


class Counts:
    """The k-grams of a text as sorted codes with their counts, and of each context its sum of counts and number of k-grams."""

    def __init__(self, grams: np.ndarray, counts: np.ndarray, vocab_size: int) -> None:
        self.grams, self.counts = grams, counts
        self.contexts, starts, self.kinds = np.unique(grams // vocab_size, return_index=True, return_counts=True)
        self.sums = np.add.reduceat(counts, starts)
        once, twice = (counts == 1).sum(), (counts == 2).sum()
        self.discount = float(once / max(once + 2 * twice, 1))


def kneser_ney(windows: np.ndarray, order: int, vocab_size: int) -> list[Counts]:
    """The counts of orders 1 to `order`: the highest counts occurrences, lower ones the different tokens before a k-gram."""
    grams, tables = ngram_codes(windows, order, vocab_size), []
    for k in range(order, 0, -1):
        grams, counts = np.unique(grams % vocab_size**k, return_counts=True)
        tables.insert(0, Counts(grams, counts, vocab_size))
    return tables


def probabilities(tables: list[Counts], windows: np.ndarray, vocab_size: int) -> np.ndarray:
    """(n, T) probability of each target of windows (n, T + 1)."""
    p = np.full((windows.shape[0], windows.shape[1] - 1), 1 / vocab_size)
    for k, table in enumerate(tables, 1):
        first = max(k - 1, 1)  # the first token that is a target and ends a k-gram of its window
        codes = ngram_codes(windows, k, vocab_size)[:, first - (k - 1) :]
        count = _at(table.grams, table.counts, codes)
        total, kinds = (_at(table.contexts, values, codes // vocab_size) for values in (table.sums, table.kinds))
        lower = p[:, first - 1 :]
        mixed = (np.maximum(count - table.discount, 0) + table.discount * kinds * lower) / np.maximum(total, 1)
        p[:, first - 1 :] = np.where(total > 0, mixed, lower)
    return p


def _at(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The values at `wanted` keys; 0 for a key that is not among the sorted `keys`."""
    places = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], 0)


def cached(windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For windows (n, T + 1): (n, T) probability of each target by the window's bigrams so far, and whether there is any."""
    shares, known = [], []
    for window in windows:
        before, target = window[:-1], window[1:]
        same = np.tril(before[:, None] == before, -1)  # [t, s]: an earlier token s equals the one before target t
        times = same.sum(1)
        shares.append((same & (target[:, None] == target)).sum(1) / np.maximum(times, 1))
        known.append(times > 0)
    return np.stack(shares), np.stack(known)


def mix(p: np.ndarray, cache: tuple[np.ndarray, np.ndarray], weight: float) -> np.ndarray:
    share, known = cache
    return np.where(known, (1 - weight) * p + weight * share, p)


def rows_of(cfg: NgramsConfig, budgets: list[int]) -> Iterator[dict[str, Any]]:
    """For each number of training tokens and order: losses on all, recalled and other tokens, without and with the cache."""
    tokenizer = load_tokenizer(Path(cfg.shards))
    V = tokenizer.vocab_size
    if V ** max(cfg.orders) >= 2**63:
        raise ValueError(f"orders={cfg.orders} has an order too high for {V} tokens: leave it out")
    if min(budgets) < cfg.context:
        raise ValueError(f"tokens={min(budgets)} is less than a window of {cfg.context}: give more, or a smaller context")
    train = Windows(open_split(cfg.shards, "train", vocab_size=V), cfg.context)
    test = cut_windows(tokens_of(tokenizer, cfg.text, cfg.shards), cfg.context, max(cfg.test_tokens, cfg.context))
    val = cut_windows(tokens_of(tokenizer, None, cfg.shards), cfg.context, max(cfg.test_tokens // 4, cfg.context))
    hits, cache, val_cache = recall_hits(test, V), cached(test), cached(val)
    for budget in budgets:
        numbers = range(min(budget // cfg.context, len(train)))
        read = np.stack([train.sample(i, cfg.seed) for i in numbers])
        for order in cfg.orders:
            tables = kneser_ney(read, order, V)
            p, of_val = probabilities(tables, test, V), probabilities(tables, val, V)
            weight = min(WEIGHTS, key=lambda weight: -np.log(mix(of_val, val_cache, weight)).sum())
            row: dict[str, Any] = {
                "tokens": len(read) * cfg.context,
                "order": order,
                "cache_weight": round(float(weight), 2),
                "sha256": digest(test),
            }
            for name, chosen in (("", p), ("cache_", mix(p, cache, weight))):
                loss = -np.log(chosen)
                row |= {f"{name}loss": loss.mean(), f"{name}hit": loss[hits].mean(), f"{name}other": loss[~hits].mean()}
            yield {key: round(float(value), 5) if isinstance(value, np.floating) else value for key, value in row.items()}


def table(name: str, rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    keys = ("loss", "hit", "other", "cache_loss", "cache_hit", "cache_other")
    head = ["training tokens", "n", "loss", "recalled", "other", "loss, cache", "recalled, cache", "other, cache"]
    lines = [head] + [[f"{row['tokens']:,}", str(row["order"]), *(f"{row[key]:.3f}" for key in keys)] for row in rows]
    return f"**{name}: Kneser-Ney n-grams on the study's test text, nats per token**\n\n{markdown(lines)}"


def draw(path: Path, rows: list[dict[str, Any]], arms: list[dict[str, Any]], metrics: dict[str, str]) -> None:
    """Loss against training tokens, a panel for each of `metrics` (key of a row -> the study's): arms (means), and n-grams."""
    shades, orders = colours_of(arms), sorted({row["order"] for row in rows})
    with figure(path, 10.5, 4.4, columns=len(metrics)) as axes:
        for ax, (key, metric) in zip(axes[0], metrics.items(), strict=True):
            for name in dict.fromkeys(arm["arm"] for arm in arms):
                line = sorted((tokens_read(arm), mean(arm, metric)) for arm in arms if arm["arm"] == name)
                shade = next(shades[arm["name"]] for arm in arms if arm["arm"] == name)
                ax.plot(*zip(*line, strict=True), color=shade, marker="o", markersize=4, label=name)
            for prefix, style, what in (("", "--", "n-grams"), ("cache_", ":", "with a cache")):
                for order in orders:
                    line = [(row["tokens"], row[prefix + key]) for row in rows if row["order"] == order]
                    label = f"{what}, n = {orders[0]} to {orders[-1]}" if order == orders[0] else None
                    ax.plot(*zip(*line, strict=True), style, color=GREY, linewidth=1.3, label=label)
            ax.set_xscale("log", base=2)
            budgets = sorted({row["tokens"] for row in rows})
            ax.set_xticks(budgets, [f"{budget / 1e6:.1f}M" for budget in budgets])
            ax.minorticks_off()
            ax.set(title=metric, xlabel="training tokens")
        axes[0, 0].set(ylabel="loss (nats per token)")
        axes[0, -1].legend(fontsize=8.5, loc="upper left", bbox_to_anchor=(1.02, 1))


def mean(arm: dict[str, Any], metric: str) -> float:
    values = [run["values"][metric] for run in arm["runs"]]
    return float(np.mean([value for value in values if value is not None]))  # a run that diverged has none


def tokens_read(arm: dict[str, Any]) -> int:
    """Training tokens of an arm's runs, from its overrides; of a key that is given twice, the last value counts."""
    values = dict(override.split("=", 1) for override in arm["overrides"])
    return int(values["steps"]) * int(values["batch_tokens"])


@command("ngrams", NgramsConfig)
def main(cfg: NgramsConfig) -> None:
    arms = ablation_in(Path(cfg.ablation))["results"]["arms"]
    measured = arms[0]["runs"][0]["values"]
    if len(cfg.metrics) != 2 or not set(cfg.metrics) <= set(measured):
        raise ValueError(
            f"metrics={cfg.metrics} are not two of {', '.join(measured)}: name the loss and that on recalled tokens"
        )
    rows = list(rows_of(cfg, sorted(cfg.tokens or {tokens_read(arm) for arm in arms})))
    shown = dict(zip(("loss", "hit"), cfg.metrics, strict=True))
    write_findings(
        "ngrams", cfg, {"rows": rows}, table(Path(cfg.ablation).name, rows), lambda path: draw(path, rows, arms, shown)
    )


if __name__ == "__main__":
    main()
