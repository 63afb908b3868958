"""The figures of a report and of an ablation: one function per figure, for arms whose runs have the needed numbers."""

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eval.common import GREY, INK, Axes, figure
from eval.report.runs import Arm, Run, trained_tokens
from eval.report.statistics import LEVEL, Difference
from eval.report.tables import minus, si

Curve = tuple[np.ndarray, np.ndarray]  # x, y
SHORT = 24  # letters of a name that needs no shorter one


def short_labels(names: Sequence[str]) -> list[str]:
    """Long names without the parts between hyphens that all of them have; unchanged where two would become one."""
    parts = [re.split(r"(?<!\de)-", name) for name in names]  # 1e-3 is one part
    shared = set.intersection(*map(set, parts)) if len(names) > 1 else set()
    short = ["-".join([part for part in of if part and part not in shared] or of[:1]) for of in parts]
    return short if len(set(short)) == len(names) and max(map(len, names)) > SHORT else list(names)


def smooth(values: Sequence[float], window: int) -> np.ndarray:
    return pd.Series(values).rolling(2 * (window // 2) + 1, center=True, min_periods=1).mean().to_numpy()


def band(ax: Axes, arm: Arm, curves: list[Curve]) -> np.ndarray:
    """Draw the mean of an arm's curves, at the x of the first that all reach, and their range; returns the mean."""
    x = curves[0][0]
    x = x[(x >= max(c[0].min() for c in curves)) & (x <= min(c[0].max() for c in curves))]
    y = np.stack([np.interp(x, *curve) for curve in curves])  # (seeds, points)
    label = f"{arm.name} (n = {len(curves)})" if arm.several else arm.name
    ax.plot(x, y.mean(0), color=arm.colour, linestyle=arm.line, linewidth=1.5, label=label)
    if len(curves) > 1:
        ax.fill_between(x, y.min(0), y.max(0), color=arm.colour, alpha=0.22, linewidth=0)
    return y.mean(0)


def slug(text: str) -> str:
    return re.sub(r"[^\w.=-]+", "_", text)


def _frame(ax: Axes, shown: list[float]) -> None:
    """Axis limits around the losses `shown`, which cut off the first steps and diverged runs."""
    shown = shown or [0.0, 1.0]
    span = max(max(shown) - min(shown), 1e-3)
    ax.set_ylim(min(shown) - 0.05 * span, max(shown) + 0.05 * span)


# ---------------------------------------- losses


def training_loss(arms: list[Arm]) -> str:
    """The key of the training loss to draw: `loss_text` (text alone, like the validation loss) if every run has it."""
    split = all("loss_text" in line for arm in arms for run in arm.runs for line in run.train[-1:])
    return "loss_text" if split else "loss"


def draw_losses(path: Path, arms: list[Arm]) -> None:
    """Training loss (smoothed) and validation loss (markers) against tokens; means and ranges over seeds."""
    key, shown, look = training_loss(arms), [], {"markersize": 5, "markeredgecolor": "white", "markeredgewidth": 0.8}
    with figure(path, 5.2, 3.9 + 0.08 * len(arms)) as axes:
        ax = axes[0, 0]
        for arm in arms:
            trained = [run for run in arm.runs if run.train]
            runs = [run for run in trained if not run.diverged] or trained
            if not runs:
                continue
            mean = band(ax, arm, [_training_curve(run, key) for run in runs])
            by_seed = [{line["tokens"]: line["val_loss"] for line in run.val} for run in runs]
            common = sorted(set.intersection(*(set(losses) for losses in by_seed)))
            dots = [float(np.mean([losses[tokens] for losses in by_seed])) for tokens in common]
            ax.plot([tokens / 1e6 for tokens in common], dots, "o", color=arm.colour, **look)
            shown += [*mean[len(mean) // 20 :], *dots]
        _frame(ax, shown)
        ax.set(xlabel="training tokens (millions)", ylabel="loss (nats per token)")
        if any(run.val for arm in arms for run in arm.runs):
            ax.plot([], [], "o", color=INK, markersize=5, label="validation")
        ax.figure.legend(loc="outside lower center", ncols=3, columnspacing=1, handlelength=1.4)


def _training_curve(run: Run, key: str) -> Curve:
    lines = [line for line in run.train if key in line]
    return np.array([line["tokens"] for line in lines]) / 1e6, smooth([line[key] for line in lines], len(lines) // 40)


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
        pooled = any(one.se for of_panel in panels.values() for one in of_panel)
        line = f"line: 95 %, {'all arms at once' if pooled else 'paired by seed'}"
        axes[-1, 0].set_xlabel(f"arm less {first.arm}\n(dot: seed; diamond: mean; {line})")


def _readable_limits(differences: list[Difference]) -> tuple[float, float]:
    """Axis limits that show all means and dots, and cut off intervals of few seeds that are much wider."""
    widest = max(3 * (one.sd or 0) for one in differences)
    reach = max(1.6 * max(abs(one.mean) for one in differences), widest) or 1e-3
    dots = [0.0, *(value for one in differences for value in one.by_seed.values())]
    low = min([*dots, *(max(one.low, -2 * reach) for one in differences if one.low is not None)])
    high = max([*dots, *(min(one.high, 2 * reach) for one in differences if one.high is not None)])
    pad = 0.06 * (high - low) or 1e-3  # for equal arms
    return low - pad, high + pad


def draw_grid(path: Path, summaries: list[tuple[Arm, Any]], metric: str, fits: dict[str, Any]) -> None:
    """The metric over parameters with each arm's fit; means and standard deviations over seeds."""
    sizes = {arm.name: arm.facts["params_non_embedding"] for arm, _ in summaries}
    with figure(path, 6.6, 4.4) as axes:
        ax = axes[0, 0]
        for name in dict.fromkeys(arm.arm for arm, one in summaries if one.n):
            of_arm = [(arm, one) for arm, one in summaries if arm.arm == name and one.n]
            x, shade, fit = [sizes[arm.name] for arm, _ in of_arm], of_arm[0][0].colour, fits[name]
            mean, sd = [one.mean for _, one in of_arm], [one.sd or 0 for _, one in of_arm]
            ax.errorbar(x, mean, sd, fmt="o", color=shade, label=name, capsize=3)
            if fit["a"]:
                line = np.geomspace(min(x), max(x), 50)
                laws = [fit["a"][seed] * line ** -fit["b"][seed] for seed in fit["a"]]
                ax.plot(line, np.mean(laws, axis=0), color=shade, linewidth=1.2)
        shown = {arm.point: sizes[arm.name] for arm, _ in summaries}.values()
        ax.set(xscale="log", xlabel="parameters without embeddings", ylabel=f"{metric} (± standard deviation over seeds)")
        ax.set_xticks(list(shown), list(map(si, shown)))
        ax.minorticks_off()
        ax.legend()


def draw_gap(path: Path, arms: list[Arm], effects: Sequence[Difference], ylabel: str) -> None:
    """Differences to the reference with their intervals against training tokens, a line per arm."""
    points, by_name = dict.fromkeys(one.point for one in effects), {arm.name: arm for arm in arms}
    tokens = {point: max(1, *(trained_tokens(arm) for arm in arms if arm.point == point)) for point in points}
    families = list(dict.fromkeys(by_name[one.arm].arm for one in effects))
    with figure(path, 7.6, 4.6) as axes:
        ax = axes[0, 0]
        apart = (max(tokens.values()) / min(tokens.values())) ** 0.008  # so that intervals do not hide each other
        for k, name in enumerate(families):
            line = [one for one in effects if by_name[one.arm].arm == name]
            x, mean = [tokens[one.point] * apart ** (k - len(families) / 2) for one in line], [one.mean for one in line]
            error = np.array([(one.mean - one.low, one.high - one.mean) for one in line]).T
            colour = by_name[line[0].arm].colour
            ax.errorbar(x, mean, error, fmt="o-", color=colour, label=name, capsize=3, markersize=4.5, linewidth=1.4)
        ax.axhline(0, color=INK, linewidth=0.9)
        ax.set(xscale="log", xlabel="training tokens (millions); bars: 95 %, all arms at once", ylabel=ylabel)
        ax.set_xticks(list(tokens.values()), [f"{count / 1e6:.3g}" for count in tokens.values()])
        ax.minorticks_off()
        ax.figure.legend(*ax.get_legend_handles_labels(), loc="outside right center")


def draw_forest(path: Path, panels: Mapping[str, Sequence[Difference]]) -> None:
    """What each part gives, a row per part and a panel per metric; coloured where p after Holm's correction is below 5 %."""
    rows = list(dict.fromkeys(one.part for of_panel in panels.values() for one in of_panel))
    with figure(path, 2.6 + 3.1 * len(panels), 1.3 + 0.42 * len(rows), columns=len(panels), grid="x") as axes:
        for ax, (metric, of_panel) in zip(axes[0], panels.items(), strict=True):
            shown = []
            for one in of_panel:
                resolved = one.p_holm is not None and one.p_holm < LEVEL
                colour = ("#0072B2" if one.mean < 0 else "#D55E00") if resolved else GREY
                shown.append((rows.index(one.part), one, colour))
            _draw_differences(ax, shown, [textwrap.fill(row, 36) if ax is axes[0, 0] else "" for row in rows])
            ax.set_title(metric)
            ax.set_xlabel("lower loss ←    difference (nats)    → higher loss", fontsize=9)


def draw_plane(path: Path, arms: list[Arm], differences: Mapping[str, Sequence[Difference]]) -> None:
    """Two metrics at once: a dot per arm, with the intervals of both. differences: title of an axis -> those of all arms."""
    (across, up), found = differences, [{one.arm: one for one in of} for of in differences.values()]
    with figure(path, 7.2, 5.0, grid="") as axes:
        ax = axes[0, 0]
        ax.axhline(0, color=INK, linewidth=0.8)
        ax.axvline(0, color=INK, linewidth=0.8)
        shown = [(found[0][arm.name], found[1][arm.name], arm) for arm in arms if all(arm.name in of for of in found)]
        for place, (x, y, arm) in enumerate(sorted(shown, key=lambda one: one[0].mean)):
            bars = [[[d.mean - d.low], [d.high - d.mean]] if d.low is not None else None for d in (y, x)]
            ax.errorbar(x.mean, y.mean, *bars, fmt="o", color=arm.colour, elinewidth=0.9)
            offset, side = ((5, 4), "bottom") if place % 2 else ((5, -4), "top")  # so that fewer names cross
            at = {"xytext": offset, "textcoords": "offset points", "va": side}
            ax.annotate(arm.arm, (x.mean, y.mean), **at, fontsize=9, color=arm.colour)
        ax.set(xlabel=f"{across}: lower loss ←   difference (nats)   → higher", ylabel=f"{up}: difference (nats)")
