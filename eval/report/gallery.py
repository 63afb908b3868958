"""The figures of a report's page; templates/captions.html explains each of them."""

import struct
from dataclasses import dataclass, field
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
    """Images under one caption. name: of its caption, which reads `facts`. group: of the page's table it stands below."""

    name: str
    group: str
    images: list[Image]
    facts: dict[str, Any] = field(default_factory=dict)


def draw_report(arms: list[Arm], differences: list[Difference], folder: Path) -> list[Figure]:
    """Draw every figure that the arms have measurements for."""
    scored, hidden, noise = ([arm for arm in arms if arm.results(name)] for name in EVALUATIONS)
    trained = [arm for arm in arms if any(run.train for run in arm.runs)]
    watched = [arm for arm in arms if all(run.monitor for run in arm.runs)]
    weighing = [arm for arm in watched if figures.weight_curves(arm)[0]]
    panels = {name: [one for one in differences if one.metric == name] for name in HEADLINES}
    panels = {name: of_name for name, of_name in panels.items() if any(one.n > 1 for one in of_name)}
    drawn = [
        panels and _differences(arms, panels, folder),
        trained and _losses(trained, folder),
        scored and _positions(scored, folder),
        hidden and _needle(hidden, folder),
        noise and _shares(noise, folder),
        *(noise and [_where(noise, folder, reading) for reading in attention_noise.READINGS]),
        noise and _heads(noise, folder),
        weighing and _weights(weighing, folder),
        watched and _statistics(watched, folder),
    ]
    return [figure for figure in drawn if figure]


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


def drawn_by(arms: list[Arm], evaluation: str, alt: str) -> list[Image]:
    """The images that the evaluation drew for the first run of each arm, if they exist."""
    first = [arm for arm in arms if arm.runs[0].results(evaluation) is not None]
    images = [Image(arm.runs[0].folder / "figures" / f"{evaluation}.png", f"{alt}, {arm.name}") for arm in first]
    return [image for image in images if image.path.is_file()]


def _of_arm(stem: Path, arm: Arm, alt: str, heatmap: bool = False) -> Image:
    """The image STEM_ARM.png of an arm, which is still to be drawn."""
    return Image(stem.with_name(f"{stem.name}_{figures.slug(arm.name)}.png"), f"{alt}, {arm.name}", heatmap)


def _facts(arms: list[Arm], evaluation: str = "", **more: Any) -> dict[str, Any]:
    """What captions say: seeds, the numbers of seeds of the arms, [] if all are 1; the evaluation's first results and text."""
    counts = sorted({len(arm.results(evaluation) if evaluation else arm.runs) for arm in arms})
    facts = {"seeds": counts if any(arm.several for arm in arms) else [], **more}
    if evaluation:
        run = next(run for run in arms[0].runs if evaluation in run.evals)
        facts |= {"results": arms[0].results(evaluation)[0], "text": text_of(run, evaluation)}
    return facts


def _differences(arms: list[Arm], panels: dict[str, list[Difference]], folder: Path) -> Figure:
    image = Image(folder / "differences.png", "Paired differences to the first arm with 95 % intervals")
    figures.draw_differences(image.path, arms, panels)
    return Figure("differences", "", [image], {"reference": arms[0].name})


def _losses(arms: list[Arm], folder: Path) -> Figure:
    image = Image(folder / "loss.png", "Curves of training and validation loss against tokens for each arm")
    figures.draw_losses(image.path, arms)
    text_only = figures.training_loss(arms) == "loss_text"
    lines = "the text among the training samples" if text_only else trained_on(arms)
    validated = any(run.val for arm in arms for run in arm.runs)
    return Figure("loss", "Loss", [image], _facts(arms, lines=lines, dots=validated and held_out(arms[0].runs[0])))


def _positions(arms: list[Arm], folder: Path) -> Figure:
    images = [
        Image(folder / "loss_by_position.png", "Curves of loss against position in the window for each arm"),
        Image(folder / "loss_cumulative.png", "Curves of mean loss up to a position"),
    ]
    for image, cumulative in zip(images, (False, True), strict=True):
        figures.draw_positions(image.path, arms, cumulative)
    return Figure("positions", "Loss", images, _facts(arms, "perplexity"))


def _needle(arms: list[Arm], folder: Path) -> Figure:
    alt = "Heatmap of needle accuracy by depth and context length"
    images = [_of_arm(folder / "needle", arm, alt, heatmap=True) for arm in arms]
    for arm, image in zip(arms, images, strict=True):
        needle.draw(image.path, arm.results("needle"), arm.name)
    return Figure("needle", "Retrieval", images, _facts(arms, "needle"))


def _shares(arms: list[Arm], folder: Path) -> Figure:
    images = []
    for what, title in (("answer", "To the answer"), ("noise", "Noise")):
        images.append(Image(folder / f"attention_{what}.png", f"Bars of attention, {title.lower()}, for each arm"))
        figures.draw_shares(images[-1].path, arms, what, title)
    return Figure("shares", "Attention", images, _facts(arms, "attention_noise"))


def _where(arms: list[Arm], folder: Path, reading: str) -> Figure | None:
    """The five buckets of the arms whose rows have a sum that the reading divides by."""
    arms = [arm for arm in arms if all(results.get(reading) for results in arm.results("attention_noise"))]
    stem, alt = folder / f"attention_{reading}", f"Bars of five attention buckets by depth, {reading}"
    images = [_of_arm(stem, arm, alt) for arm in arms]
    for arm, image in zip(arms, images, strict=True):
        attention_noise.draw(image.path, averaged(arm.results("attention_noise")), arm.name, (reading,))
    return Figure("where", "Attention", images, _facts(arms, "attention_noise", reading=reading)) if images else None


def _heads(arms: list[Arm], folder: Path) -> Figure | None:
    """Each head's shares, of the first seed of each arm; older results lack them."""
    measured = [arm for arm in arms if "per_layer_head" in arm.results("attention_noise")[0]]
    images = [_of_arm(folder / "attention_heads", arm, "Heatmaps over layers and heads", heatmap=True) for arm in measured]
    for arm, image in zip(measured, images, strict=True):
        attention_noise.draw_heads(image.path, arm.results("attention_noise")[0], arm.name)
    return Figure("heads", "Attention", images, _facts(arms)) if images else None


def _weights(arms: list[Arm], folder: Path) -> Figure:
    """lambda, gates or path weights over training, for runs with a monitor."""
    images = [_of_arm(folder / "lambda", arm, f"Curves of {figures.weight_curves(arm)[1]} against tokens") for arm in arms]
    for arm, image in zip(arms, images, strict=True):
        figures.draw_weights(image.path, arm)
    return Figure("weights", "Attention", images, _facts(arms))


def _statistics(arms: list[Arm], folder: Path) -> Figure:
    """Statistics of the maps over training, for runs with a monitor."""
    images = []
    for name, label in figures.STATISTICS.items():
        images.append(Image(folder / f"during_{name}.png", f"Curves of the {label} against tokens"))
        figures.draw_monitored(images[-1].path, [(arm, f"monitor/mean/{name}", {}) for arm in arms], ylabel=label)
    return Figure("statistics", "Attention", images, _facts(arms))
