"""One self-contained HTML page that compares runs: table, loss curves, needle heatmaps, attention, loss by position.

    python -m eval.report runs=[runs/A,runs/B] out=report.html

It shows what the evaluations have measured (eval.perplexity, eval.needle, eval.attention_noise); what a run lacks is said.
Beside the page it writes its figures (figures/*.png) and its numbers (the same name, .json), and it prints the table.
"""

import base64
import html
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from omegaconf import MISSING

from configs import command
from configs.provenance import ROOT, machine, version
from eval import attention_noise, needle, perplexity
from eval.common import INK, colour, figure, run_name, variant, write_atomically

EVALUATIONS = ("perplexity", "needle", "attention_noise")
LINES = ("-", "--", ":", "-.")  # runs of one variant share its colour and differ in line style
MISSING_CELL = "not measured"


@dataclass
class ReportConfig:
    """runs: run folders. out: the page; its figures and JSON are written beside it."""

    runs: list[str] = MISSING
    out: str = "report.html"


# ---------------------------------------- runs


@dataclass
class Run:
    """All that a run folder says: configuration, metrics and evaluations."""

    folder: Path
    label: str
    variant: str
    config: dict[str, Any]
    tokenizer: str  # fingerprint
    facts: dict[str, Any]  # first line of metrics.jsonl
    train: list[dict[str, float]]
    val: list[dict[str, float]]
    evals: dict[str, dict[str, Any]]
    line: str = "-"

    @property
    def colour(self) -> str:
        return colour(self.variant)

    def results(self, name: str) -> dict[str, Any] | None:
        return self.evals[name]["results"] if name in self.evals else None


def read_run(folder: Path) -> Run:
    """Read a run folder. ValueError where it is no run, never trained, or never evaluated."""
    if not (folder / "config.yaml").is_file():
        raise ValueError(f"{folder} is not a run: give runs=[runs/A,runs/B] of training runs (python train.py makes one)")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    path = folder / "metrics.jsonl"
    # A line that a kill cut in half is not a line yet.
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.is_file() else []
    if not any("loss" in line for line in lines):
        raise ValueError(f"{folder} has no training metrics: train it first, or continue it with resume=true")
    evals = {name: _read_json(folder / "eval" / f"{name}.json") for name in EVALUATIONS}
    evals = {name: content for name, content in evals.items() if content}
    if not evals:
        raise ValueError(f"{folder} has no evaluation: run python -m eval.perplexity run={folder} (and needle, attention_noise)")
    return Run(
        folder=folder,
        label=run_name(folder),
        variant=variant(config),
        config=config,
        tokenizer=(_read_json(folder / "tokenizer.json") or {}).get("fingerprint", "none"),
        facts=lines[0],
        train=[line for line in lines if "loss" in line],
        val=[line for line in lines if "val_loss" in line],
        evals=evals,
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text())
    except ValueError:
        raise ValueError(f"{path} is damaged: delete it and repeat the evaluation") from None


def read_runs(folders: list[str]) -> list[Run]:
    """Read the runs, refuse those that cannot be compared, and give each a label and a line style of its own."""
    if not folders:
        raise ValueError("runs is empty: give runs=[runs/A,runs/B]")
    if len({Path(folder).resolve() for folder in folders}) < len(folders):
        raise ValueError("a run is given twice: name each folder once in runs=[...]")
    runs = [read_run(Path(folder)) for folder in folders]
    refuse_incomparable(runs)
    labels = [run.label for run in runs]
    for i, run in enumerate(runs):
        if labels.count(run.label) > 1:
            run.label = "/".join(run.folder.resolve().parts[-2:])
        run.line = LINES[sum(other.variant == run.variant for other in runs[:i]) % len(LINES)]
    return runs


def refuse_incomparable(runs: list[Run]) -> None:
    """Raise ValueError for runs whose losses or evaluations are not of the same thing."""
    first = runs[0]
    data = ("name", "source", "path", "dataset", "subset", "split", "val_fraction")
    for run in runs[1:]:
        pair = f"{first.folder} and {run.folder}"
        if run.tokenizer != first.tokenizer:
            raise ValueError(f"{pair} have different tokenizers, so their losses cannot be compared: report them apart")
        if differ := [key for key in data if run.config["data"].get(key) != first.config["data"].get(key)]:
            raise ValueError(f"{pair} have different data (data.{differ[0]}), so their losses cannot be compared: report them apart")
    for name in EVALUATIONS:
        measured = [run for run in runs if name in run.evals]
        for run in measured[1:]:
            if _what(name, run) != _what(name, measured[0]):
                pair = f"{measured[0].folder} and {run.folder}"
                raise ValueError(f"{pair} ran eval.{name} on different text or settings: repeat both with the same ones")


def _what(name: str, run: Run) -> Any:
    """What an evaluation was of: equal for results that can be compared."""
    results = run.results(name)
    if name == "perplexity":
        return results.get("sha256")
    given = {key: run.evals[name]["config"].get(key) for key in ("seed", "text", "shards", "samples")}
    if name == "attention_noise":
        return given, results.get("length"), list(results["signed"]["depths"])
    return given, [[cell[key] for key in ("length", "depth", "needles", "asked")] for cell in results["cells"]]


def notes(runs: list[Run]) -> list[str]:
    """One line for each thing a reader must know before comparing: stopped early, not measured, unequal training."""
    lines = []
    for run in runs:
        done, steps = run.train[-1]["step"], run.config.get("steps", run.train[-1]["step"])
        if done < steps:
            lines.append(f"{run.label} is half finished: step {done:,} of {steps:,}; continue it with resume=true")
        lines += [
            f"{run.label} has no {name}: run python -m eval.{name} run={run.folder}"
            for name in EVALUATIONS
            if name not in run.evals
        ]
        stale = [name for name, content in run.evals.items() if content.get("step", done) < done]
        lines += [f"{run.label} was trained on after its {name}: repeat python -m eval.{name}" for name in stale]
    if len({run.train[-1]["tokens"] for run in runs}) > 1:
        lines.append("the runs were trained on different numbers of tokens: their losses are not a fair comparison")
    return lines


# ---------------------------------------- table


@dataclass
class Cell:
    """A measured value, with its standard error over samples where it has one; value None is not measured."""

    value: float | str | None
    se: float | None = None
    text: str = ""


@dataclass
class Row:
    """A line of the table: what it is, and one cell per run."""

    group: str
    name: str
    cells: list[Cell] = field(default_factory=list)


def table(runs: list[Run]) -> list[Row]:
    """The headline table, one column per run."""
    rows: list[Row] = []

    def add(group: str, name: str, read: Callable[[Run], Any], shown: str | Callable[[float], str]) -> None:
        rows.append(Row(group, name, [_cell(read(run), shown) for run in runs]))

    add("Model", "variant", lambda run: run.variant, "{}")
    add("Model", "parameters without embeddings", lambda run: run.facts.get("params_non_embedding"), si)
    add("Model", "parameters in total", lambda run: run.facts.get("params"), si)
    add("Model", "training FLOPs per token", lambda run: run.facts.get("flops_per_token"), si)
    add("Training", "seed", lambda run: run.config.get("seed"), "{}")
    add("Training", "tokens", lambda run: run.train[-1]["tokens"], si)
    add("Training", "tokens/s", lambda run: run.train[-1].get("tokens_per_s"), si)
    add("Loss", "training loss, last tenth", last_tenth, "{:.3f}")
    add("Loss", "validation loss, end of training", lambda run: run.val[-1]["val_loss"] if run.val else None, "{:.3f}")
    add("Loss", "test loss (nats per token)", _of("perplexity", lambda r: (r["loss"], r.get("se"))), "{:.3f}")
    add("Loss", "perplexity", _of("perplexity", lambda r: r["ppl"]), "{:.2f}")
    add("Loss", "bits per byte", _of("perplexity", lambda r: r["bits_per_byte"]), "{:.3f}")
    for n, r in _pairs(runs):
        asked = f"N={n}" if n == 1 else f"N={n}, R={r}"
        add("Needle", f"accuracy, {asked}", lambda run, at=(n, r): _pair(run, at, "accuracy"), "{:.3f}")
        if n > 1:
            add("Needle", f"ranked first of {n}", lambda run, at=(n, r): _pair(run, at, "rank_accuracy"), "{:.3f}")
    for reading in attention_noise.READINGS:
        for what, name in (("answer", "attention to the answer"), ("noise", "attention noise")):
            add("Attention", f"{name}, {reading}", _of("attention_noise", _mean_of(reading, what)), "{:.3f}")
    return rows


def _cell(value: Any, shown: str | Callable[[float], str]) -> Cell:
    value, se = value if isinstance(value, tuple) else (value, None)
    if value is None:
        return Cell(None, None, MISSING_CELL)
    text = shown(value) if callable(shown) else shown.format(value)
    return Cell(value, se, f"{text} ± {se:.3f}" if se is not None else text)


def _of(name: str, read: Callable[[dict[str, Any]], Any]) -> Callable[[Run], Any]:
    return lambda run: read(run.results(name)) if run.results(name) else None


def _mean_of(reading: str, what: str) -> Callable[[dict[str, Any]], tuple[float, float]]:
    return lambda results: (results[reading]["mean"][what], results[reading]["mean"][f"{what}_se"])


def _pairs(runs: list[Run]) -> list[tuple[int, int]]:
    found = [(pair["needles"], pair["asked"]) for run in runs for pair in (run.results("needle") or {}).get("pairs", [])]
    return list(dict.fromkeys(found)) or [(1, 1)]


def _pair(run: Run, at: tuple[int, int], key: str) -> tuple[float, float | None] | None:
    for pair in (run.results("needle") or {}).get("pairs", []):
        if (pair["needles"], pair["asked"]) == at:
            return pair[key], pair["se"] if key == "accuracy" else None
    return None


def last_tenth(run: Run) -> float:
    """Mean training loss of the last tenth of the logged steps."""
    losses = [line["loss"] for line in run.train]
    return float(np.mean(losses[-max(1, len(losses) // 10) :]))


def si(value: float) -> str:
    """1234567 -> 1.23M."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def print_table(runs: list[Run], rows: list[Row]) -> None:
    """The table for the terminal."""
    lines = [["", *(run.label for run in runs)]] + [[row.name, *(cell.text for cell in row.cells)] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        first, *others = (text.ljust(w) if i == 0 else text.rjust(w) for i, (text, w) in enumerate(zip(line, widths, strict=True)))
        print("  ".join([first, *others]))


# ---------------------------------------- figures


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centred running mean, over fewer values at the ends."""
    total = np.cumsum(np.concatenate(([0.0], values)))
    at = np.arange(len(values))
    start, stop = np.maximum(0, at - window // 2), np.minimum(len(values), at + window // 2 + 1)
    return (total[stop] - total[start]) / (stop - start)


def draw_losses(path: Path, runs: list[Run]) -> None:
    """Training loss (smoothed) and validation loss (markers) against tokens."""
    with figure(path, 7, 4.2) as axes:
        ax = axes[0, 0]
        shown = []
        for run in runs:
            tokens = np.array([line["tokens"] for line in run.train]) / 1e6
            losses = smooth(np.array([line["loss"] for line in run.train]), max(1, len(run.train) // 40))
            ax.plot(tokens, losses, run.line, color=run.colour, label=run.label, linewidth=1.5)
            ax.plot(
                [line["tokens"] / 1e6 for line in run.val],
                [line["val_loss"] for line in run.val],
                "o", color=run.colour, markersize=5, markeredgecolor="white", markeredgewidth=0.8,
            )  # fmt: skip
            shown += losses[len(losses) // 20 :].tolist() + [line["val_loss"] for line in run.val]
        span = max(shown) - min(shown)
        ax.set_ylim(min(shown) - 0.05 * span, max(shown) + 0.05 * span)  # the first steps' fall is cut off
        ax.set(xlabel="training tokens (millions)", ylabel="loss (nats per token)")
        ax.plot([], [], "o", color=INK, markersize=5, label="validation")
        ax.grid(axis="y")
        ax.legend()


def draw_attention_summary(path: Path, runs: list[Run]) -> None:
    """Attention to the answer and attention noise, mean over depths, one bar per run and reading."""
    panels = (("answer", "To the answer (more is better)"), ("noise", "Noise (less is better)"))
    with figure(path, 7.4, 3.6, columns=2) as axes:
        for ax, (what, title) in zip(axes[0], panels, strict=True):
            for i, run in enumerate(runs):
                means = [run.results("attention_noise")[reading]["mean"] for reading in attention_noise.READINGS]
                x = np.arange(len(means)) + (i - (len(runs) - 1) / 2) * 0.8 / len(runs)
                values, errors = [mean[what] for mean in means], [1.96 * mean[f"{what}_se"] for mean in means]
                hatch = {"-": "", "--": "//", ":": "..", "-.": "xx"}[run.line]
                ax.bar(x, values, 0.72 / len(runs), yerr=errors, color=run.colour, hatch=hatch, edgecolor="white",
                       linewidth=0, error_kw={"elinewidth": 1, "ecolor": INK}, label=run.label)  # fmt: skip
                for position, value, error in zip(x, values, errors, strict=True):
                    ax.annotate(f"{value:.2f}", (position, max(0, value + error)), (0, 2), textcoords="offset points",
                                ha="center", fontsize=9)  # fmt: skip
            ax.axhline(0, color=INK, linewidth=0.8)
            ax.set_xticks(range(len(means)), attention_noise.READINGS)
            ax.tick_params(axis="x", length=0)
            ax.set_title(title)
            ax.grid(axis="y")
            ax.margins(y=0.12)
        axes[0, 0].set_ylabel("share of attention")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        axes[0, 0].figure.legend(handles, labels, loc="outside lower center", ncols=3)


@dataclass
class Figure:
    """Images side by side under one heading, with what to see and how it was measured."""

    title: str
    caption: str
    images: list[Path]
    alt: list[str]
    wide: bool = True  # one image over the whole width, or several side by side


def draw_all(runs: list[Run], folder: Path) -> list[Figure]:
    """Draw every figure that the runs have measurements for."""
    figures = []
    have = {name: [run for run in runs if name in run.evals] for name in EVALUATIONS}
    if measured := have["attention_noise"]:
        draw_attention_summary(folder / "attention.png", measured)
        figures.append(_summary_figure(measured, folder / "attention.png"))
    draw_losses(folder / "loss.png", runs)
    figures.append(_loss_figure(runs, folder / "loss.png"))
    if measured := have["needle"]:
        figures.append(_needle_figure(measured, folder))
    if measured := have["attention_noise"]:
        figures += [_attention_figure(measured, folder, reading) for reading in attention_noise.READINGS]
    if measured := have["perplexity"]:
        curves = {run.label: (run.colour, run.line, run.results("perplexity")["by_position"]) for run in measured}
        perplexity.draw(folder / "loss_by_position.png", curves)
        figures.append(_position_figure(measured, folder / "loss_by_position.png"))
    return figures


def _slug(run: Run) -> str:
    return run.label.replace("/", "_")


def _summary_figure(runs: list[Run], path: Path) -> Figure:
    results = runs[0].results("attention_noise")
    n = results["samples"] * len(results["signed"]["depths"])
    return Figure(
        "Attention to the answer, and attention noise",
        "Share of attention that the token about to answer gives to the needle's sentence, and to the context beside the point. "
        "The signed reading is the paper's: weights of a differential map may cancel and are divided by a row sum below 1, which "
        "enlarges the shares; the absolute reading has neither effect, so compare variants by both. "
        f"Mean over {len(results['signed']['depths'])} depths, n = {n} prompts of {results['length']} tokens; bars show 95 % intervals "
        "over prompts (<code>python -m eval.attention_noise</code>).",
        [path],
        ["Bars of attention to the answer and attention noise for each run"],
    )


def _loss_figure(runs: list[Run], path: Path) -> Figure:
    weight = (runs[0].config["data"].get("retrieval") or {}).get("weight", 0)
    mixed = f", {weight} % of it synthetic retrieval documents," if weight else ""
    return Figure(
        "Loss during training",
        f"Lower is better. Lines: loss on the training mixture{mixed} as a running mean over a fortieth of the run. "
        "Dots: loss on held-out documents, text only. All runs see the same tokens in the same order (<code>python train.py</code>).",
        [path],
        ["Curves of training and validation loss against tokens for each run"],
    )


def _needle_figure(runs: list[Run], folder: Path) -> Figure:
    paths = [folder / f"needle_{_slug(run)}.png" for run in runs]
    for run, path in zip(runs, paths, strict=True):
        needle.draw(path, run.results("needle"), run.label)
    cell = runs[0].results("needle")["cells"][0]
    return Figure(
        "Needle in a haystack",
        "Share of hidden four-digit numbers given back exactly, by context length and by the needle's depth (0 % is the beginning). "
        "Bright is right; a pale stripe at one depth is a place the model overlooks. The scale is 0 to 1 in every panel; greedy "
        f"decoding must give the number and its full stop. n = {cell['samples']} contexts a cell, so a cell near 0.5 is known to "
        f"± {1.96 * (0.25 / cell['samples']) ** 0.5:.2f} (<code>python -m eval.needle</code>).",
        paths,
        [f"Heatmap of needle accuracy by depth and context length, {run.label}" for run in runs],
        wide=False,
    )


def _attention_figure(runs: list[Run], folder: Path, reading: str) -> Figure:
    paths = [folder / f"attention_{reading}_{_slug(run)}.png" for run in runs]
    for run, path in zip(runs, paths, strict=True):
        attention_noise.draw(path, run.results("attention_noise"), run.label, (reading,))
    how = {
        "signed": "Weights are summed with their sign, so a bar can reach below zero and the others above one.",
        "absolute": "Weights are summed without their sign, so nothing cancels.",
    }[reading]
    results = runs[0].results("attention_noise")
    return Figure(
        f"Where attention goes, {reading} reading",
        f"Blue is the answer, orange is noise, grey is neither. {how} Maps are averaged over heads and layers and then divided by the "
        f"row sum; n = {results['samples']} prompts a depth (<code>python -m eval.attention_noise</code>).",
        paths,
        [f"Bars of five attention buckets by depth, {reading}, {run.label}" for run in runs],
        wide=False,
    )


def _position_figure(runs: list[Run], path: Path) -> Figure:
    results = runs[0].results("perplexity")
    return Figure(
        "Loss by position",
        "Loss of the token at each position of the window, positions averaged in equal ratios. It falls as far to the right as a model "
        f"makes use of context. n = {results['windows']:,} windows of {results['length']} held-out tokens "
        "(<code>python -m eval.perplexity</code>).",
        [path],
        ["Curves of loss against position in the window for each run"],
    )


# ---------------------------------------- page


def compared(runs: list[Run]) -> str:
    """One sentence: what is compared, on what."""

    def same(values: Iterable[Any]) -> str:
        return " / ".join(dict.fromkeys(str(value) for value in values))

    machines = same(_machine(run.facts.get("machine") or {}) for run in runs)
    return (
        f"{len(runs)} {'run' if len(runs) == 1 else 'runs'} on {same(run.config['data']['name'] for run in runs)}, "
        f"{same(si(run.train[-1]['tokens']) for run in runs)} training tokens, seed {same(run.config.get('seed') for run in runs)}, "
        f"context {same(run.config['model']['context'] for run in runs)}; {machines}; "
        f"code {same(run.facts.get('version', 'unknown') for run in runs)}."
    )


def _machine(info: dict[str, Any]) -> str:
    where = info.get("gpu") if info.get("gpu") not in (None, "none") else info.get("cpu", "unknown machine")
    return f"{where}, torch {info['torch']}" if "torch" in info else str(where)


DEFINITIONS = (
    ("loss", "mean cross-entropy of the next token, in nats; perplexity is its exponential"),
    ("bits per byte", "the same loss in bits, over the UTF-8 bytes of the text instead of its tokens"),
    ("FLOPs per token", "forward and backward, six per matrix parameter and token, and the attention maps"),
    ("accuracy", "share of hidden numbers that greedy decoding gives back exactly; mean over the cells of the grid"),
    ("ranked first", "share of questions where the right number has the highest log-probability of all numbers in the context"),
    ("attention noise", "share of attention on context that is neither the first token, the answer nor the question"),
    ("±", "standard error over test windows, contexts or prompts of this one training run; not over seeds"),
)

CSS = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --line: #d9dde3; --page: #ffffff; --band: #f5f6f8; --link: #0b63b5; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --soft: #9da7b1; --line: #343a42; --page: #14171b; --band: #1c2026; --link: #79b8ff; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 2.5rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .5rem; letter-spacing: -.01em; }
h2 { font-size: 1.2rem; margin: 2.75rem 0 .35rem; }
p, figcaption, dd { max-width: 46rem; }
.lead, figcaption, footer, .note { color: var(--soft); }
.lead { margin: 0 0 1.5rem; overflow-wrap: anywhere; }
.note { border-left: 3px solid #E69F00; padding-left: .75rem; margin: .4rem 0; overflow-wrap: anywhere; }
code { font: .875em ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace; }
a { color: var(--link); }
.scroll { overflow-x: auto; margin: 0 -1.25rem; padding: 0 1.25rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .925rem; }
th, td { padding: .32rem .75rem; text-align: right; white-space: nowrap; }
th[scope=row] { text-align: left; font-weight: 400; padding-left: 0; white-space: normal; min-width: 8.5rem; }
thead th { border-bottom: 2px solid var(--ink); vertical-align: bottom; overflow-wrap: anywhere; white-space: normal; }
tbody tr:first-child th, tbody tr:first-child td { border-top: 1px solid var(--line); }
tbody:nth-of-type(even) { background: var(--band); }
td.missing { color: var(--soft); font-style: italic; }
.se { color: var(--soft); font-size: .85em; }
.swatch { display: inline-block; width: .7em; height: .7em; border-radius: 2px; margin-right: .4em; }
figure { margin: 0; }
figcaption { margin: 0 0 .9rem; font-size: .95rem; }
.images { display: grid; gap: 1rem; }
.images.many { grid-template-columns: repeat(auto-fit, minmax(min(18rem, 100%), 1fr)); }
.images.one { max-width: 46rem; }
.card { background: #fff; border: 1px solid var(--line); border-radius: 8px; padding: .5rem; }
.card img { display: block; width: 100%; height: auto; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1rem; font-size: .925rem; }
dt { font-weight: 600; } dd { margin: 0; color: var(--soft); }
footer { margin-top: 2.5rem; padding-top: 1rem; border-top: 1px solid var(--line); font-size: .875rem; }
@media (max-width: 40rem) {
  body { padding-top: 1.5rem; } h1 { font-size: 1.4rem; }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .6rem; }
  table { font-size: .85rem; } th, td { padding: .3rem .5rem; }
}
"""


def page(runs: list[Run], rows: list[Row], figures: list[Figure], remarks: list[str], out: Path) -> str:
    """The page, with everything it needs inside."""
    methods = os.path.relpath(ROOT / "docs" / "METHODS.md", out.resolve().parent)
    names = list(dict.fromkeys(run.variant for run in runs))
    title = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(title)}: loss, retrieval, attention noise</title>",
        f"<style>{CSS}</style></head><body>",
        f"<h1>{html.escape(title[0].upper() + title[1:])}: loss, retrieval and attention noise</h1>",
        f'<p class="lead">{html.escape(compared(runs))}</p>',
        *(f'<p class="note">{html.escape(remark[0].upper() + remark[1:])}.</p>' for remark in remarks),
        _html_table(runs, rows),
        *(_html_figure(drawn) for drawn in figures),
        "<h2>Definitions</h2><dl>",
        *(f"<dt>{html.escape(term)}</dt><dd>{html.escape(text)}</dd>" for term, text in DEFINITIONS),
        f'</dl><p>Formulas and sources: <a href="{html.escape(methods)}">docs/METHODS.md</a>.</p>',
        f"<footer>Made by <code>python -m eval.report</code>, code {html.escape(version())}. "
        f"The numbers are in <code>{html.escape(out.with_suffix('.json').name)}</code>, the figures in <code>figures/</code>.</footer>",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _html_table(runs: list[Run], rows: list[Row]) -> str:
    heads = "".join(
        f'<th scope="col"><span class="swatch" style="background:{run.colour}"></span>{html.escape(run.label)}</th>' for run in runs
    )
    bodies = []
    for group in dict.fromkeys(row.group for row in rows):
        lines = [
            f'<tr><th scope="row">{html.escape(row.name)}</th>{"".join(map(_html_cell, row.cells))}</tr>'
            for row in rows
            if row.group == group
        ]
        bodies.append(f"<tbody>{''.join(lines)}</tbody>")
    return f'<div class="scroll"><table><thead><tr><td></td>{heads}</tr></thead>{"".join(bodies)}</table></div>'


def _html_cell(cell: Cell) -> str:
    if cell.value is None:
        return f'<td class="missing">{cell.text}</td>'
    text, _, se = html.escape(cell.text).partition(" ± ")
    return f"<td>{text}{f' <span class=se>± {se}</span>' if se else ''}</td>"


def _html_figure(drawn: Figure) -> str:
    cards = "".join(
        f'<div class="card"><img alt="{html.escape(alt)}" src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"></div>'
        for path, alt in zip(drawn.images, drawn.alt, strict=True)
    )
    images = f'<div class="images {"one" if drawn.wide else "many"}">{cards}</div>'
    return f"<h2>{html.escape(drawn.title)}</h2><figure><figcaption>{drawn.caption}</figcaption>{images}</figure>"


def write_report(folders: list[str], out: str | Path) -> list[Row]:
    """Compare the runs: write the page, its JSON and its figures, print the table and return it."""
    out = Path(out)
    if out.suffix != ".html":
        raise ValueError(f"out={out} is not an .html file: use out=report.html")
    runs = read_runs(folders)
    rows, remarks = table(runs), notes(runs)
    figures = draw_all(runs, out.parent / "figures")
    content = {
        "eval": "report",
        "runs": [{"run": run.label, "variant": run.variant, "config": run.config, "evals": run.evals} for run in runs],
        "machine": machine(),
        "version": version(),
        "results": [asdict(row) for row in rows],
    }
    write_atomically(out.with_suffix(".json"), json.dumps(content, indent=1).encode())
    write_atomically(out, page(runs, rows, figures, remarks, out).encode())
    print_table(runs, rows)
    for remark in remarks:
        print(f"note: {remark}")
    print(f"report  {out} ({len(runs)} runs, {len(figures)} figures)")
    return rows


@command("report", ReportConfig)
def main(cfg: ReportConfig) -> None:
    write_report(cfg.runs, cfg.out)


if __name__ == "__main__":
    main()
