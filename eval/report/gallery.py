"""The figures of a report, each with a caption that explains it and says how it was measured."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eval import attention_noise, needle
from eval.report import figures
from eval.report.measured import EVALUATIONS
from eval.report.runs import Arm, text_of
from eval.report.statistics import Difference
from eval.report.tables import HEADLINES, held_out, trained_on

DOTS_PER_INCH = 160  # of eval.common.figure
CSS_PER_INCH = 96


@dataclass
class Image:
    """A PNG and a description. heatmap: the dark page keeps its colours, which are a scale from dark to light."""

    path: Path
    alt: str
    heatmap: bool = False

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in CSS pixels, so that a figure keeps its size."""
        pixels = struct.unpack(">II", self.path.read_bytes()[16:24])  # the PNG header
        return tuple(round(side * CSS_PER_INCH / DOTS_PER_INCH) for side in pixels)


@dataclass
class Figure:
    """Images under one heading, with a caption. command: the command that measured them."""

    title: str
    caption: str
    images: list[Image]
    command: str = ""


def draw_report(arms: list[Arm], found: list[Difference], folder: Path) -> list[Figure]:
    """Draw every figure that the arms have measurements for."""
    have = {name: [arm for arm in arms if arm.results(name)] for name in EVALUATIONS}
    drawn = [*_differences(arms, found, folder)]
    if noise := have["attention_noise"]:
        drawn.append(_shares(noise, folder))
    if trained := [arm for arm in arms if any(run.train for run in arm.runs)]:
        drawn.append(_losses(trained, folder))
    drawn += _monitored([arm for arm in arms if all(run.monitor for run in arm.runs)], folder)
    if have["needle"]:
        drawn.append(_needle(have["needle"], folder))
    if noise:
        drawn += [_attention(noise, folder, reading) for reading in attention_noise.READINGS]
        drawn += _heads(noise)
    if have["perplexity"]:
        drawn.append(_positions(have["perplexity"], folder))
    return drawn


def averaged(results: list[Any]) -> Any:
    """The mean of results, number by number. A value that is not a number, or whose shapes differ, is the first result's."""
    first = results[0]
    if isinstance(first, dict):
        return {key: averaged([r[key] for r in results]) if all(key in r for r in results) else first[key]
                for key in first}  # fmt: skip
    if isinstance(first, list) and len({len(r) for r in results}) == 1:
        return [averaged(list(items)) for items in zip(*results, strict=True)]
    if None in results:  # the standard error of a single sample
        return None
    if isinstance(first, float) or (isinstance(first, int) and len(set(results)) > 1):
        return float(np.mean(results))
    return first


def _image(stem: Path, arm: Arm, alt: str, heatmap: bool = False) -> Image:
    """The image STEM_ARM.png of an arm, which is still to be drawn."""
    return Image(stem.with_name(f"{stem.name}_{figures.slug(arm.name)}.png"), f"{alt}, {arm.name}", heatmap)


def drawn_by(arms: list[Arm], evaluation: str, figure: str, alt: str, heatmap: bool = False) -> list[Image]:
    """The images FIGURE.png that the evaluation drew for the first run of each arm, if they exist."""
    first = {arm.name: arm.runs[0] for arm in arms if arm.runs[0].results(evaluation) is not None}
    paths = {name: run.folder / "figures" / f"{figure}.png" for name, run in first.items()}
    return [Image(path, f"{alt}, {name}", heatmap) for name, path in paths.items() if path.is_file()]


def _over_seeds(arms: list[Arm], evaluation: str = "", single: str = "") -> str:
    """A sentence about lines and bands for arms with several seeds that have the evaluation, else `single`."""
    if not any(arm.several for arm in arms):
        return single
    counts = {len(arm.results(evaluation) if evaluation else arm.runs) for arm in arms}
    n = f"n = {min(counts)}" + (f" to {max(counts)}" if len(counts) > 1 else "")
    alone = " An arm with one seed has no range." if 1 in counts else ""
    return f" Means over seeds ({n} training runs an arm), with the range from the lowest to the highest seed.{alone}"


def _on(arms: list[Arm], name: str) -> str:
    return text_of(next(run for run in arms[0].runs if name in run.evals), name)


def _differences(arms: list[Arm], found: list[Difference], folder: Path) -> Iterator[Figure]:
    panels = {name: [contrast for contrast in found if contrast.metric == name] for name in HEADLINES}
    panels = {name: of_name for name, of_name in panels.items() if any(contrast.n > 1 for contrast in of_name)}
    if panels:
        path = folder / "differences.png"
        figures.draw_differences(path, arms, panels)
        yield Figure(
            "Differences, paired by seed",
            f"Every arm minus {arms[0].name}, seed by seed: runs of one seed read the same samples in the same order and "
            "share initial weights. Pale dots: one seed each; diamond and line: mean and 95 % interval (paired t over the "
            "seeds that both have). An interval that excludes 0 is evidence of a difference. Of twenty intervals of "
            "equal arms, one excludes 0 by chance.",
            [Image(path, "Paired differences to the first arm with 95 % intervals")],
        )


def _shares(arms: list[Arm], folder: Path) -> Figure:
    images = []
    for what, title in (("answer", "To the answer"), ("noise", "Noise")):
        images.append(Image(folder / f"attention_{what}.png", f"Bars of attention, {title.lower()}, for each arm"))
        figures.draw_shares(images[-1].path, arms, what, title)
    results = arms[0].results("attention_noise")[0]
    depths = len(results["signed"]["depths"])
    spread = _over_seeds(arms, "attention_noise", " The thin lines are 95 % intervals over prompts.")
    return Figure(
        "Attention to the answer, and attention noise",
        "The share of attention that the last token before the answer gives to the needle's sentence (more is better), and "
        "to the rest of the context (less is better). In the paper's signed reading the weights of a differential map partly "
        "cancel, and dividing by a row sum below 1 enlarges the rest. The absolute reading has neither effect, so judge "
        "variants by both. Signed masses are summed over layers and then divided by the summed row sums, so a layer with "
        "large row sums counts for more. The table also has the other order (signed per layer): each layer is divided by its "
        "own row sum, then the layers are averaged. "
        f"Mean over {depths} depths, n = {results['samples'] * depths} prompts of {results['length']} tokens from "
        f"{_on(arms, 'attention_noise')}.{spread}",
        images,
        "python -m eval.attention_noise",
    )


def _losses(arms: list[Arm], folder: Path) -> Figure:
    path = folder / "loss.png"
    figures.draw_losses(path, arms)
    text_only = figures.training_loss(arms) == "loss_text"
    lines = "the text among the training samples" if text_only else trained_on(arms)
    easier = " Retrieval documents are easier than text, which lowers the lines beside the dots."
    return Figure(
        "Loss during training",
        f"Lower is better. Lines: loss on {lines}, a running mean over a fortieth of the run. Dots: loss on "
        f"{held_out(arms[0].runs[0])}.{easier if 'retrieval' in lines else ''}"
        f"{_over_seeds(arms)} Runs of one seed see the same samples in the same order.",
        [Image(path, "Curves of training and validation loss against tokens for each arm")],
        "python train.py",
    )


def _monitored(arms: list[Arm], folder: Path) -> Iterator[Figure]:
    """lambda (gates, path weights) by layer, and statistics of the maps, over training, for runs with a monitor."""
    if weighing := [arm for arm in arms if figures.weight_curves(arm)[0]]:
        images = []
        for arm in weighing:
            images.append(_image(folder / "lambda", arm, f"Curves of {figures.weight_curves(arm)[1]} against tokens"))
            figures.draw_weights(images[-1].path, arm)
        yield Figure(
            "Weights of the maps during training",
            "The weights that each layer gives to its maps, over training: lambda of differential attention, the gates of "
            "gated attention, the path weights of introspective attention. Weights that depend on the token and the head are "
            "averaged over both. Colours go from violet, the first layer or path, to orange, the last; the layers are evenly "
            f"spaced. Measured on a fixed batch of held-out text.{_over_seeds(arms)}",
            images,
            "python train.py",
        )
    if arms:
        images = []
        for name, label in figures.STATISTICS.items():
            images.append(Image(folder / f"during_{name}.png", f"Curves of the {label} against tokens"))
            lines = [(arm, f"monitor/mean/{name}", {}) for arm in arms]
            figures.draw_monitored(images[-1].path, lines, ylabel=label)
        yield Figure(
            "Attention during training",
            "The attention maps of the monitored layers: how widely a row spreads its mass (entropy), the share of mass on "
            "the first token (the sink), and the share of negative mass. Means over layers, heads and query rows of a fixed "
            f"batch of held-out text, by absolute mass.{_over_seeds(arms)}",
            images,
            "python train.py",
        )


def _needle(arms: list[Arm], folder: Path) -> Figure:
    images = []
    for arm in arms:
        images.append(_image(folder / "needle", arm, "Heatmap of needle accuracy by depth and context length", True))
        needle.draw(images[-1].path, arm.results("needle"), arm.name)
    samples = arms[0].results("needle")[0]["cells"][0]["samples"]
    several = " Cells are means over seeds, ± their standard error." if any(arm.several for arm in arms) else ""
    return Figure(
        "Needle in a haystack",
        "Share of hidden numbers that the model gives back exactly, by context length and by depth of the needle (0 % is the "
        "beginning). Yellow is right, purple is wrong: a purple row is a depth that the model overlooks. The scale is 0 to 1 "
        "in every panel. Greedy decoding must give the number and its full stop. The needles are hidden in "
        f"{_on(arms, 'needle')}; n = {samples} contexts per cell, so the 95 % interval of a cell near 0.5 is "
        f"± {1.96 * (0.25 / samples) ** 0.5:.2f}.{several}",
        images,
        "python -m eval.needle",
    )


READING_CAPTIONS = {
    "signed": "Weights are summed with their sign, so one bar can be below zero and the others above one.",
    "absolute": "Weights are summed without their sign, so they do not cancel.",
}


def _attention(arms: list[Arm], folder: Path, reading: str) -> Figure:
    images = []
    for arm in arms:
        alt = f"Bars of five attention buckets by depth, {reading}"
        images.append(_image(folder / f"attention_{reading}", arm, alt))
        attention_noise.draw(images[-1].path, averaged(arm.results("attention_noise")), arm.name, (reading,))
    samples = arms[0].results("attention_noise")[0]["samples"]
    several = " Bars are means over seeds." if any(arm.several for arm in arms) else ""
    return Figure(
        f"Where attention goes, {reading} reading",
        f"Blue is the answer (its share above the bar), orange is noise, grey is neither. {READING_CAPTIONS[reading]} "
        f"Maps are averaged over heads and layers, then divided by the row sum; n = {samples} prompts a depth, from "
        f"{_on(arms, 'attention_noise')}.{several}",
        images,
        "python -m eval.attention_noise",
    )


def _heads(arms: list[Arm]) -> list[Figure]:
    """The heatmaps over layers and heads, if they exist."""
    images = drawn_by(arms, "attention_noise", "attention_heads", "Heatmaps over layers and heads", heatmap=True)
    several = " The first seed of each arm." if any(arm.several for arm in arms) else ""
    caption = f"The attention of each head. A mean over heads hides heads that do the opposite of others.{several}"
    return [Figure("Each layer and head", caption, images, "python -m eval.attention_noise")] if images else []


def _positions(arms: list[Arm], folder: Path) -> Figure:
    images = [
        Image(folder / "loss_by_position.png", "Curves of loss against position in the window for each arm"),
        Image(folder / "loss_cumulative.png", "Curves of mean loss up to a position"),
    ]
    for image, cumulative in zip(images, (False, True), strict=True):
        figures.draw_positions(image.path, arms, cumulative)
    results = arms[0].results("perplexity")[0]
    return Figure(
        "Loss by position",
        "Loss of the token at each position of the window, and the mean over all positions up to it, in ranges of positions "
        "of equal ratio. Where the curve still falls far to the right, the model uses a long context. "
        f"n = {results['windows']:,} windows of {results['length']} tokens from {_on(arms, 'perplexity')}."
        f"{_over_seeds(arms, 'perplexity')}",
        images,
        "python -m eval.perplexity",
    )
