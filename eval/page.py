"""The report's figures, each with its caption, and the HTML page that carries them."""

import base64
import html
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from configs.provenance import ROOT, version
from eval import attention_noise, needle, perplexity
from eval.common import INK, figure, mean_se
from eval.comparison import EVALUATIONS, Ablation, Arm, Cell, Contrast, Row, Run, Section, si

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# ---------------------------------------- figures


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centred running mean, over fewer values at the ends."""
    total = np.cumsum(np.concatenate(([0.0], values)))
    at = np.arange(len(values))
    start, stop = np.maximum(0, at - window // 2), np.minimum(len(values), at + window // 2 + 1)
    return (total[stop] - total[start]) / (stop - start)


def band(ax: "Axes", arm: Arm, curves: list[tuple[np.ndarray, np.ndarray]], **look: Any) -> np.ndarray:
    """Draw the mean of an arm's curves (x, y) and what lies between the lowest and the highest; returns the mean.

    look: of the line, in the arm's own colour, style and name unless it says otherwise. Curves of other x are interpolated
    to those of the first, as far as all of them reach.
    """
    x = curves[0][0]
    x = x[(x >= max(c[0].min() for c in curves)) & (x <= min(c[0].max() for c in curves))]
    y = np.stack([np.interp(x, *curve) for curve in curves])  # (seeds, points)
    look = {"color": arm.colour, "linestyle": arm.line, "label": _named(arm), **look}
    ax.plot(x, y.mean(0), **look)
    if len(curves) > 1:
        ax.fill_between(x, y.min(0), y.max(0), color=look["color"], alpha=0.22, linewidth=0)
    return y.mean(0)


def _named(arm: Arm) -> str:
    return f"{arm.label} (n = {len(arm.runs)})" if arm.several else arm.label


def draw_losses(path: Path, arms: list[Arm]) -> None:
    """Training loss (smoothed) and validation loss (markers) against tokens; means and ranges over seeds."""
    with figure(path, 6.2, 3.9) as axes:
        ax = axes[0, 0]
        shown = []
        for arm in arms:
            mean = band(ax, arm, [_training_curve(run) for run in arm.runs], linewidth=1.5)
            shown += mean[len(mean) // 20 :].tolist()
            shown += _validation_dots(ax, arm)
        shown = [loss for loss in shown if np.isfinite(loss)] or [0.0, 1.0]  # of a diverged run the curve ends
        span = max(shown) - min(shown)
        ax.set_ylim(min(shown) - 0.05 * span, max(shown) + 0.05 * span)  # the first steps' fall is cut off
        ax.set(xlabel="training tokens (millions)", ylabel="loss (nats per token)")
        ax.plot([], [], "o", color=INK, markersize=5, label="validation")
        ax.grid(axis="y")
        ax.legend()


def _training_curve(run: Run) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.array([line["tokens"] for line in run.train]) / 1e6
    return tokens, smooth(np.array([line["loss"] for line in run.train]), max(1, len(run.train) // 40))


def _validation_dots(ax: "Axes", arm: Arm) -> list[float]:
    """Mean validation losses at the tokens where every seed has one."""
    by_seed = [{line["tokens"]: line["val_loss"] for line in run.val} for run in arm.runs]
    common = sorted(set.intersection(*(set(losses) for losses in by_seed)))
    means = [float(np.mean([losses[tokens] for losses in by_seed])) for tokens in common]
    look = {"color": arm.colour, "markersize": 5, "markeredgecolor": "white", "markeredgewidth": 0.8}
    ax.plot([tokens / 1e6 for tokens in common], means, "o", **look)
    return means


def draw_shares(path: Path, arms: list[Arm], what: str, title: str) -> None:
    """`what` (answer or noise) of the attention, mean over depths: one bar per arm and reading.

    Thin lines: from the lowest to the highest seed; with one seed, the 95 % interval over prompts.
    """
    with figure(path, 4.4, 3.6) as axes:
        ax = axes[0, 0]
        for i, arm in enumerate(arms):
            found = [_share(arm, reading, what) for reading in attention_noise.READINGS]
            x = np.arange(len(found)) + (i - (len(arms) - 1) / 2) * 0.8 / len(arms)
            values, errors = [mean for mean, _, _ in found], np.array([(low, high) for _, low, high in found]).T
            look = {"color": arm.colour, "hatch": HATCHES[arm.line], "edgecolor": "white", "linewidth": 0}
            ax.bar(x, values, 0.72 / len(arms), yerr=errors, label=arm.label, error_kw={"elinewidth": 1}, **look)
            for position, value, error in zip(x, values, errors[1], strict=True):
                at = (position, max(0, value + error))
                size = 9 if len(arms) <= 4 else 6.5
                ax.annotate(f"{value:.2f}", at, (0, 2), textcoords="offset points", ha="center", fontsize=size)
        ax.axhline(0, color=INK, linewidth=0.8)
        ax.set_xticks(range(len(attention_noise.READINGS)), attention_noise.READINGS)
        ax.tick_params(axis="x", length=0)
        ax.set(title=title, ylabel="share of attention")
        ax.grid(axis="y")
        ax.margins(y=0.12)
        ax.figure.legend(loc="outside lower center", ncols=min(3, len(arms)), columnspacing=1)


def _share(arm: Arm, reading: str, what: str) -> tuple[float, float, float]:
    """Mean over seeds, and how far below and above it the error bar reaches."""
    means = [results[reading]["mean"] for results in arm.results("attention_noise")]
    values = [mean[what] for mean in means]
    if len(values) == 1:
        return values[0], 1.96 * means[0][f"{what}_se"], 1.96 * means[0][f"{what}_se"]
    mean = float(np.mean(values))
    return mean, mean - min(values), max(values) - mean


def draw_positions(path: Path, arms: list[Arm], cumulative: bool = False) -> None:
    """Loss by position in the window, or its mean up to there; means and ranges over seeds."""
    with figure(path, 5.2, 3.9) as axes:
        ax = axes[0, 0]
        for arm in arms:
            by_position = [np.array(results["by_position"]) for results in arm.results("perplexity")]
            if cumulative:
                by_position = [losses.cumsum() / np.arange(1, len(losses) + 1) for losses in by_position]
            band(ax, arm, [perplexity.position_buckets(losses) for losses in by_position], marker="o", markersize=3.5)
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        title = "mean up to the position" if cumulative else "at the position"
        ax.set(xlabel="position in the window (tokens)", ylabel="loss (nats per token)", title=title)
        ax.grid(axis="y")
        if len(arms) > 1:
            ax.legend()


# The numbers a comparison is about, as far as they are measured; one panel each.
HEADLINES = (
    "test loss (nats per token)",
    "validation loss, end of training",
    "needle accuracy, N=1",
    "attention to the answer, absolute",
    "attention noise, absolute",
)


def draw_contrasts(path: Path, found: list[Contrast], arms: list[Arm]) -> None:
    """Differences to the first arm: a dot per seed, their mean, and its 95 % interval."""
    names = headlines(found)
    with figure(path, 5.4, 0.6 + (0.75 + 0.3 * (len(arms) - 1)) * len(names), rows=len(names)) as axes:
        for ax, name in zip(axes[:, 0], names, strict=True):
            shown = [contrast for contrast in found if contrast.name == name]
            for y, contrast in enumerate(shown):
                arm = next(arm for arm in arms if arm.label == contrast.arm)
                ax.plot(contrast.differences, [y] * contrast.n, "o", color=arm.colour, alpha=0.45, markersize=4.5)
                if contrast.low is not None:
                    ax.plot([contrast.low, contrast.high], [y, y], color=arm.colour, linewidth=1.6)
                ax.plot([contrast.mean], [y], "D", color=arm.colour, markersize=6, markeredgecolor="white")
            ax.axvline(0, color=INK, linewidth=0.8)
            ax.set_yticks(range(len(shown)), [contrast.arm for contrast in shown])
            better = "← better" if shown[0].better == "lower" else "better →"
            ax.set(ylim=(len(shown) - 0.4, -0.6), title=f"{name.split(' (')[0]}   {better}")
            ax.title.set_fontsize(10.5)
            ax.tick_params(axis="y", length=0)
            ax.locator_params(axis="x", nbins=5)
            ax.grid(axis="x")
        axes[-1, 0].set_xlabel(f"difference to {found[0].reference}")


def headlines(found: list[Contrast]) -> list[str]:
    """Which of HEADLINES have differences over two seeds or more."""
    return [name for name in HEADLINES if any(contrast.name == name and contrast.n > 1 for contrast in found)]


# What an arm's layers weigh their maps with, as training/monitor.py names it: pattern of its keys, label of the axis.
WEIGHTS = (
    (r"monitor/(layer)_(\d+)/lambda", "lambda"),
    (r"monitor/(layer)_(\d+)/gate", "gate"),
    (r"monitor/mean/(path)_(\d+)", "path weight, mean over layers"),
)
STATISTICS = {"entropy": "entropy (nats)", "first": "share on the first token", "negative": "share of negative mass"}


def weight_curves(arm: Arm) -> tuple[dict[str, str], str]:
    """("layer 0" -> key of its curve in every run's monitor lines, label of the axis); no curves where there are none."""
    common = set.intersection(*({key for line in run.monitor for key in line} for run in arm.runs))
    for pattern, label in WEIGHTS:
        found = [match for key in common if (match := re.fullmatch(pattern, key))]
        if found:
            found.sort(key=lambda match: int(match[2]))
            return {f"{match[1]} {match[2]}": match[0] for match in found}, label
    return {}, ""


def _monitored(run: Run, key: str) -> tuple[np.ndarray, np.ndarray]:
    lines = [line for line in run.monitor if key in line]
    return np.array([line["tokens"] for line in lines]) / 1e6, np.array([line[key] for line in lines])


def draw_weights(path: Path, arm: Arm) -> None:
    """lambda, gate or path weights of an arm against tokens, a line for each layer or path; means and ranges over seeds."""
    import matplotlib

    curves, label = weight_curves(arm)
    with figure(path, 4.4, 3.6) as axes:
        ax = axes[0, 0]
        for i, (name, key) in enumerate(curves.items()):
            shade = matplotlib.colormaps["viridis"](0.9 * i / max(1, len(curves) - 1))
            measured = [_monitored(run, key) for run in arm.runs]
            band(ax, arm, measured, color=shade, linestyle="-", label=name, marker="o", markersize=2.5)
        ax.set(xlabel="training tokens (millions)", ylabel=label, title=_named(arm))
        ax.margins(y=0.12)
        ax.grid(axis="y")
        ax.figure.legend(loc="outside lower center", ncols=4, columnspacing=1, handlelength=1.2)


def draw_statistic(path: Path, arms: list[Arm], name: str) -> None:
    """One statistic of the attention maps against tokens, mean over the monitored layers; means and ranges over seeds."""
    with figure(path, 4.4, 3.6) as axes:
        ax = axes[0, 0]
        for arm in arms:
            measured = [_monitored(run, f"monitor/mean/{name}") for run in arm.runs]
            band(ax, arm, measured, marker="o", markersize=2.5)
        ax.set(xlabel="training tokens (millions)", ylabel=STATISTICS[name])
        ax.grid(axis="y")
        ax.figure.legend(loc="outside lower center", ncols=min(3, len(arms)), columnspacing=1, handlelength=1.2)


HATCHES = {"-": "", "--": "//", ":": "..", "-.": "xx"}  # for arms of one variant, as the line styles


@dataclass
class Figure:
    """Images side by side under one heading, with what to see and how it was measured."""

    title: str
    caption: str
    images: list[Path]
    alt: list[str]
    wide: bool = True  # one image over the whole width, or several side by side


def draw_all(arms: list[Arm], found: list[Contrast], folder: Path) -> list[Figure]:
    """Draw every figure that the arms have measurements for."""
    figures = []
    have = {name: [arm for arm in arms if arm.results(name)] for name in EVALUATIONS}
    if headlines(found):
        draw_contrasts(folder / "differences.png", found, arms)
        figures.append(_contrasts_figure(found, folder / "differences.png"))
    if measured := have["attention_noise"]:
        figures.append(_shares_figure(measured, folder))
    draw_losses(folder / "loss.png", arms)
    figures.append(_loss_figure(arms, folder / "loss.png"))
    figures += _monitor_figures([arm for arm in arms if all(run.monitor for run in arm.runs)], folder)
    if measured := have["needle"]:
        figures.append(_needle_figure(measured, folder))
    if measured := have["attention_noise"]:
        figures += [_attention_figure(measured, folder, reading) for reading in attention_noise.READINGS]
        figures += _heads_figure(measured)
    if measured := have["perplexity"]:
        paths = [folder / "loss_by_position.png", folder / "loss_cumulative.png"]
        for path, cumulative in zip(paths, (False, True), strict=True):
            draw_positions(path, measured, cumulative)
        figures.append(_position_figure(measured, paths))
    return figures


def averaged(results: list[Any]) -> Any:
    """The mean of equally shaped results, number by number; what is no number, or not of one shape, is the first's."""
    first = results[0]
    if isinstance(first, dict):
        return {key: averaged([r[key] for r in results]) if all(key in r for r in results) else first[key]
                for key in first}  # fmt: skip
    if isinstance(first, list) and len({len(r) for r in results}) == 1:
        return [averaged(list(items)) for items in zip(*results, strict=True)]
    if isinstance(first, float) or (isinstance(first, int) and len(set(results)) > 1):
        return float(np.mean(results))
    return first


def _slug(arm: Arm) -> str:
    return re.sub(r"[^\w.=-]+", "_", arm.label)


def _over_seeds(arms: list[Arm], single: str = "") -> str:
    """What the lines and bands of a figure are, where an arm has several seeds."""
    if not any(arm.several for arm in arms):
        return single
    counts = {len(arm.runs) for arm in arms}
    n = f"n = {min(counts)}" + (f" to {max(counts)}" if len(counts) > 1 else "")
    return f" Means over seeds ({n} training runs an arm), with the range from the lowest to the highest seed."


def _contrasts_figure(found: list[Contrast], path: Path) -> Figure:
    return Figure(
        "Differences, paired by seed",
        f"Every arm minus {html.escape(found[0].reference)}, seed by seed: runs of one seed read the same samples in "
        "the same order and share initial weights. Pale dots: one seed each; diamond and line: mean and 95 % interval "
        "(paired t over the seeds that both have). An interval that leaves out 0 is evidence of a difference; of twenty "
        "such intervals of equal arms, one leaves it out by chance.",
        [path],
        ["Paired differences to the first arm with 95 % intervals"],
    )


def _shares_figure(arms: list[Arm], folder: Path) -> Figure:
    paths = [folder / "attention_answer.png", folder / "attention_noise.png"]
    for path, what, title in zip(paths, ("answer", "noise"), ("To the answer", "Noise"), strict=True):
        draw_shares(path, arms, what, title)
    results = arms[0].results("attention_noise")[0]
    depths = len(results["signed"]["depths"])
    interval = " The thin lines are 95 % intervals over prompts."
    return Figure(
        "Attention to the answer, and attention noise",
        "The share of attention that the token about to answer gives to the needle's sentence (more is better), and to "
        "context beside the point (less is better). In the paper's signed reading the weights of a differential map "
        "cancel in part, and dividing by a row sum below 1 enlarges what is left; the absolute reading has neither "
        "effect, so judge variants by both. "
        f"Mean over {depths} depths, n = {results['samples'] * depths} prompts of {results['length']} tokens."
        f"{_over_seeds(arms, interval)} (<code>python -m eval.attention_noise</code>)",
        paths,
        ["Bars of attention to the answer for each arm", "Bars of attention noise for each arm"],
        wide=False,
    )


def _loss_figure(arms: list[Arm], path: Path) -> Figure:
    weight = (arms[0].runs[0].config["data"].get("retrieval") or {}).get("weight", 0)
    mixture = f"text with {weight} % synthetic retrieval documents" if weight else "the training text"
    return Figure(
        "Loss during training",
        f"Lower is better. Lines: loss on {mixture}, a running mean over a fortieth of the run. Dots: loss on held-out "
        f"documents, text only.{_over_seeds(arms)} Runs of one seed see the same samples in the same order "
        "(<code>python train.py</code>).",
        [path],
        ["Curves of training and validation loss against tokens for each arm"],
    )


def _monitor_figures(arms: list[Arm], folder: Path) -> list[Figure]:
    """lambda (gates, path weights) by layer, and statistics of the maps, over training, where they were monitored."""
    figures = []
    source = f"{_over_seeds(arms)} (<code>python train.py</code>)"
    if weighing := [arm for arm in arms if weight_curves(arm)[0]]:
        paths = [folder / f"lambda_{_slug(arm)}.png" for arm in weighing]
        for arm, path in zip(weighing, paths, strict=True):
            draw_weights(path, arm)
        figures.append(
            Figure(
                "Lambda during training",
                "What each layer weighs its maps with, from the first step to the last: lambda of differential attention, the "
                "gates of gated attention, the path weights of introspective attention. Where it depends on the token and "
                "the head, the mean over both. Dark is the first layer or path; the layers are evenly chosen. Read on a "
                f"fixed batch of held-out text.{source}",
                paths,
                [f"Curves of {weight_curves(arm)[1]} against tokens, {arm.label}" for arm in weighing],
                wide=False,
            )
        )
    if arms:
        paths = {name: folder / f"during_{name}.png" for name in STATISTICS}
        for name, path in paths.items():
            draw_statistic(path, arms, name)
        figures.append(
            Figure(
                "Attention during training",
                "The attention maps of the monitored layers: how widely a row spreads its mass, how much of it lies on the "
                "first token (the sink), and how much is negative. Means over layers, heads and query rows of a fixed batch "
                f"of held-out text, by absolute mass.{source}",
                list(paths.values()),
                [f"Curves of the {label} against tokens" for label in STATISTICS.values()],
                wide=False,
            )
        )
    return figures


def _needle_figure(arms: list[Arm], folder: Path) -> Figure:
    paths = [folder / f"needle_{_slug(arm)}.png" for arm in arms]
    for arm, path in zip(arms, paths, strict=True):
        needle.draw(path, _mean_needle(arm.results("needle")), arm.label)
    samples = arms[0].results("needle")[0]["cells"][0]["samples"]
    several = " Cells are means over seeds, ± their standard error." if any(arm.several for arm in arms) else ""
    return Figure(
        "Needle in a haystack",
        "Share of hidden numbers given back exactly, by context length and by depth of the needle (0 % comes first). "
        "Bright is right, a dark row is a depth that the model overlooks. The scale is 0 to 1 in every panel. Greedy "
        f"decoding must give the number and its full stop. n = {samples} contexts a cell: a cell near 0.5 is known to "
        f"± {1.96 * (0.25 / samples) ** 0.5:.2f}.{several} (<code>python -m eval.needle</code>)",
        paths,
        [f"Heatmap of needle accuracy by depth and context length, {arm.label}" for arm in arms],
        wide=False,
    )


def _mean_needle(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds, in each cell with the standard error over seeds instead of that over samples."""
    mean = averaged(results)
    if len(results) > 1:
        for i, cell in enumerate(mean["cells"]):
            cell["se"] = mean_se([one["cells"][i]["accuracy"] for one in results])[1]
    return mean


READING_CAPTIONS = {
    "signed": "Weights are summed with their sign, so a bar can reach below zero and the others above one.",
    "absolute": "Weights are summed without their sign, so nothing cancels.",
}


def _attention_figure(arms: list[Arm], folder: Path, reading: str) -> Figure:
    paths = [folder / f"attention_{reading}_{_slug(arm)}.png" for arm in arms]
    for arm, path in zip(arms, paths, strict=True):
        attention_noise.draw(path, averaged(arm.results("attention_noise")), arm.label, (reading,))
    samples = arms[0].results("attention_noise")[0]["samples"]
    several = " Bars are means over seeds." if any(arm.several for arm in arms) else ""
    return Figure(
        f"Where attention goes, {reading} reading",
        f"Blue is the answer (the number above), orange is noise, grey is neither. {READING_CAPTIONS[reading]} "
        f"Maps are averaged over heads and layers, then divided by the row sum; n = {samples} prompts a depth."
        f"{several} (<code>python -m eval.attention_noise</code>)",
        paths,
        [f"Bars of five attention buckets by depth, {reading}, {arm.label}" for arm in arms],
        wide=False,
    )


def _heads_figure(arms: list[Arm]) -> list[Figure]:
    """The heatmaps over layers and heads that the evaluation has drawn, where it has."""
    found = [(arm.label, arm.runs[0].folder / "figures" / "attention_heads.png") for arm in arms]
    found = [(label, path) for label, path in found if path.is_file()]
    if not found:
        return []
    several = " The first seed of each arm." if any(arm.several for arm in arms) else ""
    return [
        Figure(
            "Each layer and head",
            f"Where the heads look, one by one; means hide heads that do the opposite of others.{several} "
            "(<code>python -m eval.attention_noise</code>)",
            [path for _, path in found],
            [f"Heatmaps over layers and heads, {label}" for label, _ in found],
            wide=len(found) == 1,
        )
    ]


def _position_figure(arms: list[Arm], paths: list[Path]) -> Figure:
    results = arms[0].results("perplexity")[0]
    return Figure(
        "Loss by position",
        "Loss of the token at each position of the window, and the mean of all up to it (means of position ranges of "
        "equal ratio). The further to "
        f"the right it still falls, the longer the context that the model makes use of. n = {results['windows']:,} "
        f"windows of {results['length']} held-out tokens.{_over_seeds(arms)} (<code>python -m eval.perplexity</code>)",
        paths,
        ["Curves of loss against position in the window for each arm", "Curves of mean loss up to a position"],
        wide=False,
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
)
PLUS_MINUS = {
    False: "standard error over test windows, contexts or prompts of this one training run; not over seeds",
    True: "standard deviation over the seeds of an arm (an arm with one seed has none); n is the number of seeds",
}
INTERVAL = (
    "[a, b]",
    "95 % interval of the mean difference, by the paired t distribution over the seeds that both arms have",
)

CSS = Path(__file__).with_name("report.css")


@dataclass
class Content:
    """All that the page shows."""

    arms: list[Arm]
    rows: list[Row]
    contrasts: list[Contrast]
    figures: list[Figure]
    sections: list[Section]
    notes: list[str]
    viewer: tuple[str, str] | None = None  # file beside the page, and what it holds
    ablation: Ablation | None = None


def page(content: Content, out: Path) -> str:
    """The HTML, with everything it needs inside."""
    arms = content.arms
    methods = os.path.relpath(ROOT / "docs" / "METHODS.md", out.resolve().parent)
    several = any(arm.several for arm in arms)
    names = list(dict.fromkeys(arm.variant for arm in arms))
    title = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    definitions = (*DEFINITIONS, ("±", PLUS_MINUS[several]), *((INTERVAL,) if content.contrasts else ()))
    blocks = [block for block in _blocks(content) if block[1]]
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(title)}: loss, retrieval, attention noise</title>",
        f"<style>{CSS.read_text()}</style></head><body>",
        f"<h1>{html.escape(title[0].upper() + title[1:])}: loss, retrieval and attention noise</h1>",
        f'<p class="lead">{html.escape(compared([run for arm in arms for run in arm.runs]))}</p>',
        *(f'<p class="note">{html.escape(remark[0].upper() + remark[1:])}.</p>' for remark in content.notes),
        _contents([heading for heading, _ in blocks]),
        _html_table(arms, content.rows),
        *(f'<h2 id="{_anchor(heading)}">{html.escape(heading)}</h2>{body}' for heading, body in blocks),
        "<h2>Definitions</h2><dl>",
        *(f"<dt>{html.escape(term)}</dt><dd>{html.escape(text)}</dd>" for term, text in definitions),
        f'</dl><p>Formulas and sources: <a href="{html.escape(methods)}">docs/METHODS.md</a>.</p>',
        f"<footer>Made by <code>python -m eval.report</code>, code {html.escape(version())}. "
        f"Numbers: <code>{html.escape(out.with_suffix('.json').name)}</code>; figures: <code>figures/</code>.</footer>",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _blocks(content: Content) -> list[tuple[str, str]]:
    """Headings and what stands under them, in the order of the page."""
    blocks = []
    for drawn in content.figures:
        body = _html_figure(drawn)
        if drawn.title == "Differences, paired by seed":
            main = [contrast for contrast in content.contrasts if contrast.group in {row.group for row in content.rows}]
            body += _details("All differences as numbers", _contrast_table(main))
        blocks.append((drawn.title, body))
    if content.viewer:
        name, holds = content.viewer
        link = f'<p><a class="button" href="{html.escape(name)}">Open the attention viewer</a></p>'
        blocks.append(("Attention, token by token", f"<p>{html.escape(holds)}</p>{link}"))
    for section in content.sections:
        blocks.append((section.title, _html_section(content, section)))
    if ablation := content.ablation:
        images = [(path, f"{path.stem.replace('_', ' ')} of the ablation {ablation.name}") for path in ablation.images]
        body = _from_markdown(ablation.text) + _cards(images, "many" if len(images) > 1 else "one")
        blocks.append((f"Ablation: {ablation.name}", body))
    return blocks


def _from_markdown(text: str) -> str:
    """Pipe tables and paragraphs as HTML: all that an ablation's table.md has."""
    blocks = []
    for block in text.strip().split("\n\n"):
        if not block.startswith("|"):
            blocks.append(f"<p class=caption>{html.escape(block)}</p>")
            continue
        head, _, *lines = [line.strip("| ").split(" | ") for line in block.splitlines()]
        heads = "".join(f"<th>{html.escape(cell)}</th>" for cell in head[1:])
        bodies = (
            f"<tr><th scope=row>{html.escape(line[0])}</th>"
            + "".join(f"<td>{html.escape(cell.strip())}</td>" for cell in [*line[1:], *[""] * (len(head) - len(line))])
            + "</tr>"
            for line in lines
        )
        table = f"<table><thead><tr><td>{html.escape(head[0])}</td>{heads}</tr></thead><tbody>{''.join(bodies)}</tbody></table>"
        blocks.append(f'<div class="scroll">{table}</div>')
    return "".join(blocks)


def _contents(headings: list[str]) -> str:
    links = "".join(f'<a href="#{_anchor(heading)}">{html.escape(heading)}</a>' for heading in headings)
    return f'<nav aria-label="Contents">{links}</nav>'


def _anchor(heading: str) -> str:
    return re.sub(r"\W+", "-", heading.lower()).strip("-")


def _html_table(arms: list[Arm], rows: list[Row]) -> str:
    heads = "".join(
        f'<th scope="col"><span class="swatch" style="background:{arm.colour}"></span>{html.escape(arm.label)}'
        + (f' <span class="se">n = {len(arm.runs)}</span>' if any(other.several for other in arms) else "")
        + "</th>"
        for arm in arms
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


def _contrast_table(found: list[Contrast]) -> str:
    """A line per number, a column per arm; bold where the interval leaves out zero."""
    if not found:
        return ""
    arms = list(dict.fromkeys(contrast.arm for contrast in found))
    heads = "".join(
        f'<th scope="col">{html.escape(arm)} <span class="se">− {html.escape(found[0].reference)}</span></th>'
        for arm in arms
    )
    lines = []
    for name, better in dict.fromkeys((contrast.name, contrast.better) for contrast in found):
        by_arm = {contrast.arm: contrast for contrast in found if contrast.name == name}
        hint = f' <span class="se">{better} is better</span>' if better else ""
        cells = "".join(_contrast_cell(by_arm.get(arm)) for arm in arms)
        lines.append(f'<tr><th scope="row">{html.escape(name)}{hint}</th>{cells}</tr>')
    table = f"<table><thead><tr><td></td>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f'<div class="scroll">{table}</div>'


def _contrast_cell(contrast: Contrast | None) -> str:
    if contrast is None:
        return '<td class="missing">not measured</td>'
    mean, _, rest = contrast.text.replace("-", "−").partition(" ")
    number = f"<b>{mean}</b>" if contrast.clear else mean
    return f'<td>{number} <span class="se">{rest}{f" n = {contrast.n}" if contrast.n > 1 else ""}</span></td>'


def _details(summary: str, body: str) -> str:
    return f"<details><summary>{html.escape(summary)}</summary>{body}</details>" if body else ""


def _html_section(content: Content, section: Section) -> str:
    """An evaluation's table, its differences and its figures."""
    settings = ", ".join(f"{name} {value:,}" for name, value in section.settings.items())
    more = f" {section.left_out} more numbers are in the JSON." if section.left_out else ""
    seeds = " Figures: the first seed of each arm." if any(arm.several for arm in content.arms) else ""
    command = f"(<code>python -m eval.{html.escape(section.name)}</code>)"
    caption = f"<p class=caption>{html.escape(settings)}{'.' if settings else ''}{more}{seeds} {command}</p>"
    found = [contrast for contrast in content.contrasts if contrast.group == section.name]
    images = [(path, f"{section.title}, {label}") for label, path in section.images]
    return (
        caption
        + _html_table(content.arms, section.rows)
        + _details("Differences, paired by seed", _contrast_table(found))
        + _cards(images, "many" if len(images) > 1 else "one")
    )


def _html_figure(drawn: Figure) -> str:
    images = _cards(list(zip(drawn.images, drawn.alt, strict=True)), "one" if drawn.wide else "many")
    return f"<figure><figcaption>{drawn.caption}</figcaption>{images}</figure>"


def _cards(images: list[tuple[Path, str]], width: str) -> str:
    cards = []
    for path, alt in images:
        image = base64.b64encode(path.read_bytes()).decode()
        cards.append(f'<div class="card"><img alt="{html.escape(alt)}" src="data:image/png;base64,{image}"></div>')
    return f'<div class="images {width}">{"".join(cards)}</div>' if cards else ""
