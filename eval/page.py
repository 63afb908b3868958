"""The report's figures, each with its caption, and the HTML page that carries them."""

import base64
import html
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from configs.provenance import ROOT, version
from eval import attention_noise, needle, perplexity
from eval.common import INK, figure
from eval.comparison import EVALUATIONS, Cell, Row, Run, si

# ---------------------------------------- figures


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centred running mean, over fewer values at the ends."""
    total = np.cumsum(np.concatenate(([0.0], values)))
    at = np.arange(len(values))
    start, stop = np.maximum(0, at - window // 2), np.minimum(len(values), at + window // 2 + 1)
    return (total[stop] - total[start]) / (stop - start)


def draw_losses(path: Path, runs: list[Run]) -> None:
    """Training loss (smoothed) and validation loss (markers) against tokens."""
    with figure(path, 6.2, 3.9) as axes:
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


def draw_shares(path: Path, runs: list[Run], what: str, title: str) -> None:
    """`what` (answer or noise) of the attention, mean over depths: one bar per run and reading, with 95 % intervals."""
    with figure(path, 4.4, 3.6) as axes:
        ax = axes[0, 0]
        for i, run in enumerate(runs):
            means = [run.results("attention_noise")[reading]["mean"] for reading in attention_noise.READINGS]
            x = np.arange(len(means)) + (i - (len(runs) - 1) / 2) * 0.8 / len(runs)
            values, errors = [mean[what] for mean in means], [1.96 * mean[f"{what}_se"] for mean in means]
            look = {"color": run.colour, "hatch": HATCHES[run.line], "edgecolor": "white", "linewidth": 0}
            ax.bar(x, values, 0.72 / len(runs), yerr=errors, label=run.label, error_kw={"elinewidth": 1}, **look)
            for position, value, error in zip(x, values, errors, strict=True):
                at = (position, max(0, value + error))
                ax.annotate(f"{value:.2f}", at, (0, 2), textcoords="offset points", ha="center", fontsize=9)
        ax.axhline(0, color=INK, linewidth=0.8)
        ax.set_xticks(range(len(attention_noise.READINGS)), attention_noise.READINGS)
        ax.tick_params(axis="x", length=0)
        ax.set(title=title, ylabel="share of attention")
        ax.grid(axis="y")
        ax.margins(y=0.12)
        ax.figure.legend(loc="outside lower center", ncols=min(3, len(runs)), columnspacing=1)


HATCHES = {"-": "", "--": "//", ":": "..", "-.": "xx"}  # for runs of one variant, as the line styles


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
        figures.append(_shares_figure(measured, folder))
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


def _shares_figure(runs: list[Run], folder: Path) -> Figure:
    paths = [folder / "attention_answer.png", folder / "attention_noise.png"]
    for path, what, title in zip(paths, ("answer", "noise"), ("To the answer", "Noise"), strict=True):
        draw_shares(path, runs, what, title)
    results = runs[0].results("attention_noise")
    depths = len(results["signed"]["depths"])
    return Figure(
        "Attention to the answer, and attention noise",
        "The share of attention that the token about to answer gives to the needle's sentence (more is better), and to "
        "context beside the point (less is better). In the paper's signed reading the weights of a differential map "
        "cancel in part, and dividing by a row sum below 1 enlarges what is left; the absolute reading has neither "
        "effect, so judge variants by both. "
        f"Mean over {depths} depths, n = {results['samples'] * depths} prompts of {results['length']} tokens; the thin "
        "lines are 95 % intervals over prompts (<code>python -m eval.attention_noise</code>).",
        paths,
        ["Bars of attention to the answer for each run", "Bars of attention noise for each run"],
        wide=False,
    )


def _loss_figure(runs: list[Run], path: Path) -> Figure:
    weight = (runs[0].config["data"].get("retrieval") or {}).get("weight", 0)
    mixture = f"text with {weight} % synthetic retrieval documents" if weight else "the training text"
    return Figure(
        "Loss during training",
        f"Lower is better. Lines: loss on {mixture}, a running mean over a fortieth of the run. Dots: loss on held-out "
        "documents, text only. Runs of one seed see the same samples in the same order (<code>python train.py</code>).",
        [path],
        ["Curves of training and validation loss against tokens for each run"],
    )


def _needle_figure(runs: list[Run], folder: Path) -> Figure:
    paths = [folder / f"needle_{_slug(run)}.png" for run in runs]
    for run, path in zip(runs, paths, strict=True):
        needle.draw(path, run.results("needle"), run.label)
    samples = runs[0].results("needle")["cells"][0]["samples"]
    return Figure(
        "Needle in a haystack",
        "Share of hidden numbers given back exactly, by context length and by depth of the needle (0 % comes first). "
        "Bright is right, a dark row is a depth that the model overlooks. The scale is 0 to 1 in every panel. Greedy "
        f"decoding must give the number and its full stop. n = {samples} contexts a cell: a cell near 0.5 is known to "
        f"± {1.96 * (0.25 / samples) ** 0.5:.2f} (<code>python -m eval.needle</code>).",
        paths,
        [f"Heatmap of needle accuracy by depth and context length, {run.label}" for run in runs],
        wide=False,
    )


READING_CAPTIONS = {
    "signed": "Weights are summed with their sign, so a bar can reach below zero and the others above one.",
    "absolute": "Weights are summed without their sign, so nothing cancels.",
}


def _attention_figure(runs: list[Run], folder: Path, reading: str) -> Figure:
    paths = [folder / f"attention_{reading}_{_slug(run)}.png" for run in runs]
    for run, path in zip(runs, paths, strict=True):
        attention_noise.draw(path, run.results("attention_noise"), run.label, (reading,))
    samples = runs[0].results("attention_noise")["samples"]
    return Figure(
        f"Where attention goes, {reading} reading",
        f"Blue is the answer (the number above), orange is noise, grey is neither. {READING_CAPTIONS[reading]} "
        f"Maps are averaged over heads and layers, then divided by the row sum; n = {samples} prompts a depth "
        "(<code>python -m eval.attention_noise</code>).",
        paths,
        [f"Bars of five attention buckets by depth, {reading}, {run.label}" for run in runs],
        wide=False,
    )


def _position_figure(runs: list[Run], path: Path) -> Figure:
    results = runs[0].results("perplexity")
    return Figure(
        "Loss by position",
        "Loss of the token at each position of the window (means of position ranges of equal ratio). The further to "
        f"the right it still falls, the longer the context that the model makes use of. n = {results['windows']:,} "
        f"windows of {results['length']} held-out tokens (<code>python -m eval.perplexity</code>).",
        [path],
        ["Curves of loss against position in the window for each run"],
    )


# ---------------------------------------- page


def compared(runs: list[Run]) -> str:
    """One sentence: what is compared, on what."""

    def same(read: Callable[[Run], Any]) -> str:
        return " / ".join(dict.fromkeys(str(read(run)) for run in runs))

    return (
        f"{len(runs)} {'run' if len(runs) == 1 else 'runs'} on {same(lambda run: run.config['data']['name'])}, "
        f"{same(lambda run: si(run.train[-1]['tokens']))} training tokens, "
        f"context {same(lambda run: run.config['model']['context'])}, seed {same(lambda run: run.config.get('seed'))}; "
        f"{same(lambda run: _machine(run.facts.get('machine') or {}))}; "
        f"code {same(lambda run: run.facts.get('version', 'unknown'))}."
    )


def _machine(info: dict[str, Any]) -> str:
    where = info.get("gpu") if info.get("gpu") not in (None, "none") else info.get("cpu", "unknown machine")
    return f"{where}, torch {info['torch']}" if "torch" in info else str(where)


DEFINITIONS = (
    ("loss", "mean cross-entropy of the next token, in nats; perplexity is its exponential"),
    ("bits per byte", "the same loss in bits, over the UTF-8 bytes of the text instead of its tokens"),
    ("FLOPs per token", "forward and backward, six per matrix parameter and token, and the attention maps"),
    ("accuracy", "share of hidden numbers that greedy decoding gives back exactly; mean over the cells of the grid"),
    (
        "ranked first",
        "share of questions where the right number is the most probable of all numbers in the context",
    ),
    ("attention noise", "share of attention on context that is neither the first token, the answer nor the question"),
    ("±", "standard error over test windows, contexts or prompts of this one training run; not over seeds"),
)

CSS = Path(__file__).with_name("report.css")


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
        f"<style>{CSS.read_text()}</style></head><body>",
        f"<h1>{html.escape(title[0].upper() + title[1:])}: loss, retrieval and attention noise</h1>",
        f'<p class="lead">{html.escape(compared(runs))}</p>',
        *(f'<p class="note">{html.escape(remark[0].upper() + remark[1:])}.</p>' for remark in remarks),
        _html_table(runs, rows),
        *(_html_figure(drawn) for drawn in figures),
        "<h2>Definitions</h2><dl>",
        *(f"<dt>{html.escape(term)}</dt><dd>{html.escape(text)}</dd>" for term, text in DEFINITIONS),
        f'</dl><p>Formulas and sources: <a href="{html.escape(methods)}">docs/METHODS.md</a>.</p>',
        f"<footer>Made by <code>python -m eval.report</code>, code {html.escape(version())}. "
        f"Numbers: <code>{html.escape(out.with_suffix('.json').name)}</code>; figures: <code>figures/</code>.</footer>",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _html_table(runs: list[Run], rows: list[Row]) -> str:
    heads = "".join(
        f'<th scope="col"><span class="swatch" style="background:{run.colour}"></span>{html.escape(run.label)}</th>'
        for run in runs
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
    cards = []
    for path, alt in zip(drawn.images, drawn.alt, strict=True):
        image = base64.b64encode(path.read_bytes()).decode()
        cards.append(f'<div class="card"><img alt="{html.escape(alt)}" src="data:image/png;base64,{image}"></div>')
    images = f'<div class="images {"one" if drawn.wide else "many"}">{"".join(cards)}</div>'
    return f"<h2>{html.escape(drawn.title)}</h2><figure><figcaption>{drawn.caption}</figcaption>{images}</figure>"
