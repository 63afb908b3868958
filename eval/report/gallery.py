"""The figures of a report's page; templates/captions.html explains each of them."""

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.files import naming
from eval.report import figures
from eval.report.runs import Arm, text_of
from eval.report.statistics import Difference
from eval.report.tables import HEADLINES, held_out, trained_on

SCALE = 96 / 160  # CSS pixels of a pixel: eval.common.figure has 160 to the inch
DRAWN_BEFORE = (  # the caption's name, the evaluation that drew the figures, their group, their description
    ("positions", "perplexity", "Loss", "Curves of loss against position in the window"),
    ("needle", "needle", "Retrieval", "Heatmap of needle accuracy by depth and context length"),
    ("where", "attention_noise", "Attention", "Bars of five attention buckets by depth"),
)


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
    """The figures over all arms, drawn into `folder`, and those that evaluations drew of the first run of each arm."""
    drawn, several = [], any(arm.several for arm in arms)
    panels = {name: [one for one in differences if one.metric == name] for name in HEADLINES}
    panels = {name: of_name for name, of_name in panels.items() if any(one.n > 1 for one in of_name)}
    if panels:
        image = Image(folder / "differences.png", "Paired differences to the first arm with 95 % intervals")
        figures.draw_differences(image.path, arms, panels)
        drawn.append(Figure("differences", "", [image], {"reference": arms[0].name}))
    if trained := [arm for arm in arms if any(run.train for run in arm.runs)]:
        image = Image(folder / "loss.png", "Curves of training and validation loss against tokens for each arm")
        figures.draw_losses(image.path, trained)
        text_only = figures.training_loss(trained) == "loss_text"
        facts = {"lines": "the text among the training samples" if text_only else trained_on(trained)}
        facts["dots"] = any(run.val for arm in trained for run in arm.runs) and held_out(trained[0].runs[0])
        facts["seeds"] = sorted({len(arm.runs) for arm in trained}) if several else []
        drawn.append(Figure("loss", "Loss", [image], facts))
    for name, evaluation, group, alt in DRAWN_BEFORE:
        if images := drawn_by(arms, evaluation, alt, heatmap=evaluation == "needle"):
            first = next(arm.runs[0] for arm in arms if arm.runs[0].results(evaluation))
            facts = {"results": first.results(evaluation), "text": text_of(first, evaluation), "several": several}
            drawn.append(Figure(name, group, images, facts))
    return drawn


def drawn_by(arms: list[Arm], evaluation: str, alt: str, heatmap: bool = False) -> list[Image]:
    """The images that the evaluation drew for the first run of each arm, if they exist."""
    first = [arm for arm in arms if arm.runs[0].results(evaluation) is not None]
    images = [Image(arm.runs[0].folder / "figures" / f"{evaluation}.png", f"{alt}, {arm.name}", heatmap) for arm in first]
    return [image for image in images if image.path.is_file()]
