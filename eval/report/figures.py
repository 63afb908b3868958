"""The figures of a report and of an ablation: one function per figure, for arms whose runs have the needed numbers."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eval import attention_noise, perplexity
from eval.common import GREY, INK, Axes, figure
from eval.report.runs import CYCLE, Arm, Run
from eval.report.statistics import LEVEL, Difference, holm, paired
from eval.report.tables import minus, si

Curve = tuple[np.ndarray, np.ndarray]  # x, y
Placed = tuple[str, str | None, float, Difference]  # line, its colour or None, place on the axis
SHORT, CUT = 24, 40  # letters: names up to SHORT stay whole, longer labels than CUT are cut


def short_labels(names: Sequence[str]) -> list[str]:
    """What differs between the names: without the parts between hyphens that all share; unchanged if all are short.

    Of what is still long, the first parts that no other name begins with.
    """
    if max(map(len, names), default=0) <= SHORT:
        return list(names)
    parts = [re.split(r"(?<!\de)-", name) for name in names]  # 1e-3 is one part
    shared = set.intersection(*map(set, parts)) if len(names) > 1 else set()
    parts = [[part for part in of if part not in shared] or of[:1] for of in parts]

    def label(of: list[str]) -> str:
        alone = (k for k in range(1, len(of)) if sum(other[:k] == of[:k] for other in parts) == 1)
        whole = "-".join(of)
        return whole if len(whole) <= SHORT else "-".join(of[: next(alone, len(of))])

    short = list(map(label, parts))
    cut = [text if len(text) <= CUT else f"{text[: CUT - 1]}…" for text in short]
    return next((labels for labels in (cut, short) if len(set(labels)) == len(names)), list(names))


def smooth(values: Sequence[float], window: int) -> np.ndarray:
    """Centred running mean; means at the ends are over fewer values."""
    return pd.Series(values).rolling(2 * (window // 2) + 1, center=True, min_periods=1).mean().to_numpy()


def band(ax: Axes, arm: Arm, curves: list[Curve], **look: Any) -> np.ndarray:
    """Draw the mean of an arm's curves and the band from the lowest to the highest curve; returns the mean.

    look: options of the line. All curves are interpolated to the x of the first, as far as all of them reach.
    """
    x = curves[0][0]
    x = x[(x >= max(c[0].min() for c in curves)) & (x <= min(c[0].max() for c in curves))]
    y = np.stack([np.interp(x, *curve) for curve in curves])  # (seeds, points)
    label = f"{arm.name} (n = {len(curves)})" if arm.several else arm.name
    look = {"color": arm.colour, "linestyle": arm.line, "label": label, **look}
    ax.plot(x, y.mean(0), **look)
    if len(curves) > 1:
        ax.fill_between(x, y.min(0), y.max(0), color=look["color"], alpha=0.22, linewidth=0)
    return y.mean(0)


def slug(text: str) -> str:
    """The text with characters that are safe in a file's name."""
    return re.sub(r"[^\w.=-]+", "_", text)


def _legend_below(ax: Axes, columns: int) -> None:
    handles, labels = ax.get_legend_handles_labels()
    if handles:
        place = {"loc": "outside lower center", "columnspacing": 1, "handlelength": 1.4}
        ax.figure.legend(handles, labels, ncols=min(columns, len(labels)), **place)


def _frame(axes: Iterable[Axes], shown: list[float]) -> None:
    """Axis limits around the losses `shown`. They cut off the high losses of the first steps and of diverged runs."""
    shown = [loss for loss in shown if np.isfinite(loss)] or [0.0, 1.0]
    span = max(max(shown) - min(shown), 1e-3)
    for ax in axes:
        ax.set_ylim(min(shown) - 0.05 * span, max(shown) + 0.05 * span)


# ---------------------------------------- losses


def training_loss(arms: list[Arm]) -> str:
    """The key of the training loss to draw: `loss_text` (text alone, like the validation loss) if every run has it."""
    split = all("loss_text" in line for arm in arms for run in arm.runs for line in run.train[-1:])
    return "loss_text" if split else "loss"


def draw_losses(path: Path, arms: list[Arm]) -> None:
    """Training loss (smoothed) and validation loss (markers) against tokens; means and ranges over seeds."""
    key, shown, look = training_loss(arms), [], {"markersize": 5, "markeredgecolor": "white", "markeredgewidth": 0.8}
    with figure(path, 5.2, 3.9) as axes:
        ax = axes[0, 0]
        for arm in arms:
            mean = band(ax, arm, [_training_curve(run, key) for run in arm.runs if run.train], linewidth=1.5)
            by_seed = [{line["tokens"]: line["val_loss"] for line in run.val} for run in arm.runs]
            common = sorted(set.intersection(*(set(losses) for losses in by_seed)))
            dots = [float(np.mean([losses[tokens] for losses in by_seed])) for tokens in common]
            ax.plot([tokens / 1e6 for tokens in common], dots, "o", color=arm.colour, **look)
            shown += [*mean[len(mean) // 20 :], *dots]
        _frame([ax], shown)
        ax.set(xlabel="training tokens (millions)", ylabel="loss (nats per token)")
        if any(run.val for arm in arms for run in arm.runs):
            ax.plot([], [], "o", color=INK, markersize=5, label="validation")
        ax.legend(fontsize=9 if max(len(arm.name) for arm in arms) > SHORT else None)


def _training_curve(run: Run, key: str) -> Curve:
    lines = [line for line in run.train if key in line]
    return np.array([line["tokens"] for line in lines]) / 1e6, smooth([line[key] for line in lines], len(lines) // 40)


def draw_validation(path: Path, arms: list[Arm]) -> None:
    """Validation loss against tokens, FLOPs and seconds of training; means and ranges over the seeds that did not diverge.

    The training loss (smoothed) if no run has a validation loss.
    """
    validated = any(run.val for arm in arms for run in arm.runs)
    key, shown = "val_loss" if validated else training_loss(arms), []
    with figure(path, 13.5, 4.6, columns=3) as axes:
        for arm in arms:
            runs = [run.val if validated else run.train for run in arm.runs if not run.diverged]
            length = min(map(len, filter(None, runs)), default=0)
            if not length:
                continue
            tokens, seconds, losses = (
                np.array([[line.get(name, 0.0) for line in lines[:length]] for lines in runs if lines])  # (seeds, points)
                for name in ("tokens", "time_s", key)
            )
            if not validated:
                losses = np.stack([smooth(loss, length // 40) for loss in losses])
            scales = (tokens.mean(0) / 1e6, tokens.mean(0) * arm.facts["flops_per_token"], seconds.mean(0))
            for ax, x in zip(axes[0], scales, strict=True):
                mean = band(ax, arm, [(x, loss) for loss in losses], linewidth=1.6, label=arm.name)
            shown += [losses.min(), mean[length // 5]]
        _frame(axes[0], shown)
        labels = ("training tokens (millions)", "training FLOPs", "seconds of training")
        for ax, label in zip(axes[0], labels, strict=True):
            ax.set(xlabel=label)
        if len({arm.facts["flops_per_token"] for arm in arms if not arm.reference}) > 1:
            axes[0, 1].set_xscale("log")  # several sizes
        axes[0, 0].set_ylabel(f"{'validation' if validated else 'training'} loss (nats per token)")
        _legend_below(axes[0, 0], 6)


def draw_positions(path: Path, arms: list[Arm], cumulative: bool = False) -> None:
    """Loss by position in the window, or mean loss up to the position; means and ranges over seeds."""
    with figure(path, 4.6, 3.7) as axes:
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
        if len(arms) > 1:
            ax.legend()


# ---------------------------------------- attention


def draw_shares(path: Path, arms: list[Arm], what: str, title: str) -> None:
    """`what` (answer or noise) of the attention, mean over depths: one bar per arm and reading.

    Thin lines: from the lowest to the highest seed; where no arm has several seeds, the 95 % interval over prompts.
    """
    readings, seeds = attention_noise.READINGS, any(arm.several for arm in arms)
    small = {"textcoords": "offset points", "ha": "center", "fontsize": 9 if len(arms) <= 4 else 6.5}
    with figure(path, 4.4, 3.6) as axes:
        ax = axes[0, 0]
        for i, arm in enumerate(arms):
            x = np.arange(len(readings)) + (i - (len(arms) - 1) / 2) * 0.8 / len(arms)
            values, low, high = zip(*(_share(arm, reading, what, seeds) for reading in readings), strict=True)
            errors = {"yerr": (low, high), "error_kw": {"elinewidth": 1, "ecolor": INK}}
            ax.bar(x, values, 0.72 / len(arms), color=arm.colour, label=arm.name, linewidth=0, **errors)
            for position, value, error in zip(x, values, high, strict=True):
                if math.isnan(value):
                    continue
                ax.annotate(f"{value:.2f}", (position, max(0, value + np.nan_to_num(error))), (0, 2), **small)
        ax.axhline(0, color=INK, linewidth=0.8)
        ax.set_xticks(range(len(readings)), readings)
        ax.tick_params(axis="x", length=0)
        ax.set(title=title, ylabel="share of attention")
        ax.margins(y=0.12)
        _legend_below(ax, 3)


def _share(arm: Arm, reading: str, what: str, seeds: bool) -> tuple[float, float, float]:
    """Mean over seeds, and the lengths of the error bar below and above the mean; nan, also of no reading, draws no bar.

    seeds: bars are over seeds, of which a single one has no range.
    """
    means = [results[reading]["mean"] for results in arm.results("attention_noise") if results.get(reading)]
    if not means:
        return math.nan, math.nan, math.nan
    values = [mean[what] for mean in means]
    if len(values) == 1:
        se = means[0][f"{what}_se"]  # None for a single sample
        half = math.nan if seeds or se is None else 1.96 * se
        return values[0], half, half
    mean = float(np.mean(values))
    return mean, mean - min(values), max(values) - mean


# The weights that an arm's layers give to their maps: pattern of the keys of training/monitor.py, label of the axis.
WEIGHTS = (
    (r"monitor/(layer)_(\d+)/lambda", "lambda"),
    (r"monitor/(layer)_(\d+)/gate", "gate"),
    (r"monitor/mean/(path)_(\d+)", "path weight, mean over layers"),
)
STATISTICS = {"entropy": "entropy (nats)", "first": "share on the first token", "negative": "share of negative mass"}


def weight_curves(arm: Arm) -> tuple[dict[str, str], str]:
    """("layer 0" -> key of its curve in every run's monitor lines, label of the axis); ({}, "") without such keys."""
    common = set.intersection(*({key for line in run.monitor for key in line} for run in arm.runs))
    for pattern, label in WEIGHTS:
        matches = [match for key in common if (match := re.fullmatch(pattern, key))]
        if matches:
            matches.sort(key=lambda match: int(match[2]))
            return {f"{match[1]} {match[2]}": match[0] for match in matches}, label
    return {}, ""


def draw_monitored(path: Path, curves: Iterable[tuple[Arm, str, dict[str, Any]]], **labels: str) -> None:
    """Curves of the monitor against tokens, one per (arm, key, options of the line); means and ranges over seeds."""
    with figure(path, 4.4, 3.6) as axes:
        ax = axes[0, 0]
        for arm, key, look in curves:
            of_runs = [[(line["tokens"] / 1e6, line[key]) for line in run.monitor if key in line] for run in arm.runs]
            band(ax, arm, [tuple(np.array(lines).T) for lines in of_runs], marker="o", markersize=2.5, **look)
        ax.set(xlabel="training tokens (millions)", **labels)
        ax.margins(y=0.12)
        _legend_below(ax, 4)


def draw_weights(path: Path, arm: Arm) -> None:
    """lambda, gate or path weights of an arm, one line for each layer or path."""
    import matplotlib

    curves, label = weight_curves(arm)
    shades = matplotlib.colormaps["plasma"](np.linspace(0.05, 0.7, max(2, len(curves))))  # no extreme shades
    looks = [{"color": shade, "linestyle": "-", "label": name} for name, shade in zip(curves, shades, strict=False)]
    draw_monitored(path, zip([arm] * len(curves), curves.values(), looks, strict=True), ylabel=label, title=arm.title)


# ---------------------------------------- differences


def _draw_differences(ax: Axes, shown: Iterable[tuple[int, Difference, str]], labels: Sequence[str]) -> None:
    """Differences at their row, in their colour: a dot per seed, a diamond for the mean, a line for its interval."""
    for y, one, colour in shown:
        ax.plot(list(one.by_seed.values()), [y] * len(one.by_seed), "o", color=colour, alpha=0.4, markersize=4.5)
        if one.low is not None:
            ax.plot([one.low, one.high], [y, y], color=colour, linewidth=1.7)
        ax.plot([one.mean], [y], "D", color=colour, markersize=6, markeredgecolor="white")
    ax.axvline(0, color=INK, linewidth=0.8)
    ax.set_ylim(max(1, len(labels)) - 0.4, -0.6)
    ax.set_yticks(range(len(labels)), labels)
    ax.tick_params(axis="y", length=0)
    ax.locator_params(axis="x", nbins=5)
    ax.xaxis.set_major_formatter(lambda x, _: minus(f"{x:g}"))


def draw_differences(path: Path, arms: list[Arm], panels: dict[str, list[Difference]]) -> None:
    """Differences to the reference arms, one panel for each number (title -> differences), one line for each arm."""
    by_name = {arm.name: arm for arm in arms}
    height = 0.8 + sum(0.75 + 0.3 * max(1, len(of_panel)) for of_panel in panels.values())
    with figure(path, 5.2, height, rows=len(panels), grid="x") as axes:
        for ax, (title, of_panel) in zip(axes[:, 0], panels.items(), strict=True):
            shown = [(y, one, by_name[one.arm].colour) for y, one in enumerate(of_panel)]
            _draw_differences(ax, shown, [one.arm for one in of_panel])
            better = {"lower": "   ← better", "higher": "   better →", "": ""}[of_panel[0].better if of_panel else ""]
            ax.set_title(f"{title.split(' (')[0]}{better}", fontsize=10.5)
            if of_panel:
                ax.set_xlim(*_readable_limits(of_panel))
        first = next((arm for arm in arms if not arm.reference), arms[0])
        reference = first.arm if first.point else first.name
        pooled = any(one.se for of_panel in panels.values() for one in of_panel)
        line = f"line: 95 %, {'all arms at once' if pooled else 'paired by seed'}"
        axes[-1, 0].set_xlabel(f"arm less {reference}\n(dot: seed; diamond: mean; {line})")


def _readable_limits(differences: list[Difference]) -> tuple[float, float]:
    """Axis limits that show all means and dots. Intervals of few seeds may be much wider and are then cut off."""
    widest = max(3 * (one.sd or 0) for one in differences)
    reach = max(1.6 * max(abs(one.mean) for one in differences), widest) or 1e-3
    dots = [0.0, *(value for one in differences for value in one.by_seed.values())]
    low = min([*dots, *(max(one.low, -2 * reach) for one in differences if one.low is not None)])
    high = max([*dots, *(min(one.high, 2 * reach) for one in differences if one.high is not None)])
    pad = 0.06 * (high - low) or 1e-3  # for equal arms
    return low - pad, high + pad


def draw_grid(path: Path, summaries: list[tuple[Arm, Any]], metric: str, fits: dict[str, Any] | None) -> None:
    """The metric over the points of the grid, or over parameters with a fit; means and standard deviations over seeds."""
    points = list(dict.fromkeys(arm.point for arm, _ in summaries))
    with figure(path, 6.6, 4.4) as axes:
        ax = axes[0, 0]
        for name in dict.fromkeys(arm.arm for arm, _ in summaries):
            mine = [(arm, one) for arm, one in summaries if arm.arm == name and one.n]
            if not mine:
                continue
            x = [arm.facts["params_non_embedding"] if fits else points.index(arm.point) for arm, _ in mine]
            y, error = [one.mean for _, one in mine], [one.sd or 0 for _, one in mine]
            look = {"color": mine[0][0].colour, "label": name, "capsize": 3}
            ax.errorbar(x, y, error, fmt="o" if fits else "o-", **look)
            if fits and fits[name]["a"]:
                line = np.geomspace(min(x), max(x), 50)
                laws = [fits[name]["a"][s] * line ** -fits[name]["b"][s] for s in fits[name]["a"]]
                ax.plot(line, np.mean(laws, axis=0), color=mine[0][0].colour, linewidth=1.2)
        if fits:
            sizes = {arm.point: arm.facts["params_non_embedding"] for arm, _ in summaries}
            ax.set(xscale="log", xlabel="parameters without embeddings")
            ax.set_xticks(list(sizes.values()), [si(size) for size in sizes.values()])
            ax.minorticks_off()
        else:
            ax.set_xticks(range(len(points)), points)
        ax.set(ylabel=f"{metric} (± standard deviation over seeds)")
        ax.legend()


def draw_gap(path: Path, placed: Sequence[Placed], ticks: Mapping[float, str], xlabel: str, ylabel: str) -> list[Path]:
    """Differences with their intervals; one seed is a hollow dot. ticks: place -> label. No path without differences."""
    if not placed:
        return []
    names = list(dict.fromkeys(name for name, *_ in placed))
    with figure(path, 7.6, 4.6) as axes:
        ax, apart = axes[0, 0], 0.008 * (max(ticks) - min(ticks))  # so that intervals do not hide each other
        for k, name in enumerate(names):
            shades, places, line = zip(*(rest for other, *rest in placed if other == name), strict=True)
            shade, x, mean = shades[0] or CYCLE[k % len(CYCLE)], np.array(places), np.array([one.mean for one in line])
            x = x + apart * (k - len(names) / 2)
            error = np.array([(0, 0) if one.low is None else (one.mean - one.low, one.high - one.mean) for one in line]).T
            look = {"color": shade, "label": name, "capsize": 3, "markersize": 4.5, "linewidth": 1.4}
            ax.errorbar(x, mean, error, fmt="o-", **look)
            alone = [one.n == 1 for one in line]
            ax.plot(x[alone], mean[alone], "o", color="white", markeredgecolor=shade, markersize=4.5, zorder=3)
        ax.axhline(0, color=INK, linewidth=0.9)
        small = 9 if len("".join(ticks.values())) > 30 else None  # so that labels do not touch
        ax.set_xticks(list(ticks), list(ticks.values()), fontsize=small)
        hollow = "; hollow dots: one seed" if any(one.n == 1 for *_, one in placed) else ""
        ax.set(xlabel=f"{xlabel}{hollow}", ylabel=ylabel)
        ax.figure.legend(*ax.get_legend_handles_labels(), loc="outside right center")
    return [path]


def draw_forest(path: Path, panels: Mapping[str, Sequence[Difference]]) -> None:
    """What each part gives, a row per part and a panel per metric (title -> pairs): seeds, mean and 95 % paired interval.

    A row is coloured where p of the paired t test is below 5 % after Holm's correction for the panel's rows.
    """
    rows = list(dict.fromkeys(pair.part for pairs in panels.values() for pair in pairs))
    with figure(path, 2.6 + 3.1 * len(panels), 1.3 + 0.42 * len(rows), columns=len(panels), grid="x") as axes:
        for ax, (metric, pairs) in zip(axes[0], panels.items(), strict=True):
            corrected = holm([1.0 if pair.p_alone is None else pair.p_alone for pair in pairs])
            shown = []
            for pair, p in zip(pairs, corrected, strict=True):
                one = paired(list(pair.by_seed.values()), by_seed=pair.by_seed)
                colour = ("#0072B2" if one.mean < 0 else "#D55E00") if p < LEVEL else GREY
                shown.append((rows.index(pair.part), one, colour))
            _draw_differences(ax, shown, rows if ax is axes[0, 0] else [""] * len(rows))
            ax.set_title(metric)
            ax.set_xlabel("lower loss ←    difference (nats)    → higher loss", fontsize=9)
