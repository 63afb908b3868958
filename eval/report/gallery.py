"""The figures of a report's page; templates/captions.html explains each of them."""

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from configs.files import naming
from eval import attention_noise, needle
from eval.report import figures
from eval.report.measured import EVALUATIONS
from eval.report.runs import Arm, text_of
from eval.report.statistics import Difference
from eval.report.tables import HEADLINES, held_out, trained_on

SCALE = 96 / 160  # CSS pixels of a pixel: eval.common.figure has 160 to the inch


@dataclass
class Image:
    """A PNG and a description. heatmap: the dark page keeps its colours, which are a scale from dark to light."""

    path: Path
    alt: str
    heatmap: bool = False

    @property
    def content(self) -> bytes:
        with naming(self.path):
            return self.path.read_bytes()

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in CSS pixels, so that a figure keeps its size."""
        return tuple(round(side * SCALE) for side in struct.unpack(">II", self.content[16:24]))  # the PNG header


@dataclass
class Figure:
    """Images under one caption. name: of its caption, which reads `facts`. group: of the page's table it stands below."""

    name: str
    group: str
    images: list[Image]
    facts: dict[str, Any] = field(default_factory=dict)


def draw_report(arms: list[Arm], differences: list[Difference], folder: Path) -> list[Figure]:
    scored, hidden, noise = ([arm for arm in arms if arm.results(name)] for name in EVALUATIONS)
    trained = [arm for arm in arms if any(run.train for run in arm.runs)]
    weighing = [arm for arm in arms if all(run.monitor for run in arm.runs) and figures.weight_curves(arm)[0]]
    panels = {name: [one for one in differences if one.metric == name] for name in HEADLINES}
    panels = {name: of_name for name, of_name in panels.items() if any(one.n > 1 for one in of_name)}
    drawn = [
        _differences(arms, panels, folder) if panels else None,
        _losses(trained, folder) if trained else None,
        _positions(scored, folder) if scored else None,
        _needle(hidden, folder) if hidden else None,
        *(_where(noise, folder, reading) for reading in attention_noise.READINGS),
        _weights(weighing, folder) if weighing else None,
    ]
    return [figure for figure in drawn if figure]


def averaged(results: list[Any]) -> Any:
    """The mean of results, number by number. A value that is not a number, or whose shapes differ, is the first result's."""
    first = results[0]
    if isinstance(first, dict):
        shared = {key: [r[key] for r in results] for key in first if all(key in r for r in results)}
        return first | {key: averaged(values) for key, values in shared.items()}
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


def _of_arms(stem: Path, arms: list[Arm], alt: str, heatmap: bool = False) -> list[tuple[Arm, Image]]:
    paths = [stem.with_name(f"{stem.name}_{figures.slug(arm.name)}.png") for arm in arms]
    return [(arm, Image(path, f"{alt}, {arm.name}", heatmap)) for arm, path in zip(arms, paths, strict=True)]


def _figure(name: str, group: str, images: list[Image], arms: list[Arm], evaluation: str = "", **facts: Any) -> Figure:
    """A figure with what its caption says: the numbers of seeds of the arms, [] if all are 1; first results and text."""
    counts = sorted({len(arm.results(evaluation) if evaluation else arm.runs) for arm in arms})
    facts |= {"seeds": counts if any(arm.several for arm in arms) else []}
    if evaluation:
        run = next(run for run in arms[0].runs if evaluation in run.evals)
        facts |= {"results": arms[0].results(evaluation)[0], "text": text_of(run, evaluation)}
    return Figure(name, group, images, facts)


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
    return _figure("loss", "Loss", [image], arms, lines=lines, dots=validated and held_out(arms[0].runs[0]))


def _positions(arms: list[Arm], folder: Path) -> Figure:
    image = Image(folder / "loss_by_position.png", "Curves of loss against position in the window for each arm")
    figures.draw_positions(image.path, arms)
    return _figure("positions", "Loss", [image], arms, "perplexity")


def _needle(arms: list[Arm], folder: Path) -> Figure:
    images = _of_arms(folder / "needle", arms, "Heatmap of needle accuracy by depth and context length", heatmap=True)
    for arm, image in images:
        needle.draw(image.path, arm.results("needle"), arm.name)
    return _figure("needle", "Retrieval", [image for _, image in images], arms, "needle")


def _where(arms: list[Arm], folder: Path, reading: str) -> Figure | None:
    """The five buckets of the arms whose rows have a sum that the reading divides by."""
    arms = [arm for arm in arms if all(results.get(reading) for results in arm.results("attention_noise"))]
    images = _of_arms(folder / f"attention_{reading}", arms, f"Bars of five attention buckets by depth, {reading}")
    for arm, image in images:
        attention_noise.draw(image.path, averaged(arm.results("attention_noise")), arm.name, (reading,))
    drawn = [image for _, image in images]
    return _figure("where", "Attention", drawn, arms, "attention_noise", reading=reading) if images else None


def _weights(arms: list[Arm], folder: Path) -> Figure:
    images = _of_arms(folder / "lambda", arms, "Curves of the weights of the maps against tokens")
    for arm, image in images:
        figures.draw_weights(image.path, arm)
    return _figure("weights", "Attention", [image for _, image in images], arms)
