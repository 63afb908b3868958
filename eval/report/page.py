"""The report's HTML page: one file that carries its style and its images, which templates/captions.html explains."""

import base64
import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from configs.files import naming
from configs.provenance import ROOT, version
from data.stream import text_read
from eval.common import command_of
from eval.report import figures
from eval.report.runs import Arm, Run, text_named, text_of
from eval.report.statistics import Difference
from eval.report.tables import HEADLINES, Row, Section, held_out, main_numbers, minus, si, trained_on

TEMPLATES = Path(__file__).parent / "templates"
GROUPS = {"Loss": ("Loss",), "Retrieval": ("Needle",), "Attention": ("Attention",), "Cost": ("Model", "Training")}
SHOWN = 3  # rows of a group that are not folded, or the main numbers
SCALE = 96 / 160  # CSS pixels of a pixel: eval.common.figure has 160 to the inch
DRAWN_BEFORE = (  # the caption's name, the evaluation that drew the figures, their group, their description
    ("positions", "perplexity", "Loss", "Curves of loss against position in the window"),
    ("needle", "needle", "Retrieval", "Heatmap of needle accuracy by depth and context length"),
    ("where", "attention_noise", "Attention", "Bars of five attention buckets by depth"),
)


@dataclass
class Image:
    """A PNG, its description, and the arm that it shows, if one. heatmap: its colours are a scale, kept on the dark page."""

    path: Path
    alt: str
    arm: str = ""
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
    """Images under one caption. name: its macro in captions.html, which reads `facts`. group: title of their group."""

    name: str
    group: str
    images: list[Image]
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Content:
    """The content of the page. contrasts: the paired differences of arms with several seeds. viewer: the viewer's file beside
    the page, and a sentence about it.
    """

    arms: list[Arm]
    rows: list[Row]
    verdicts: list[str]
    contrasts: list[Difference]
    sections: list[Section]
    notes: list[str]
    figures: list[Figure] = field(default_factory=list)
    viewer: tuple[str, str] | None = None


def render(template: str, **content: Any) -> str:
    """Fill in a template of this package. All text is escaped; `file("NAME")` inserts a style or script unescaped."""
    loader = FileSystemLoader(TEMPLATES)
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters |= {"minus": minus, "base64": lambda content: base64.b64encode(content).decode()}
    made.filters["anchor"] = lambda heading: re.sub(r"\W+", "-", heading.lower()).strip("-")
    made.globals |= {"version": version(), "file": lambda name: Markup((TEMPLATES / name).read_text())}
    return made.get_template(template).render(**content)


def page(content: Content, out: Path) -> str:
    arms = content.arms
    variants = list(dict.fromkeys(arm.variant for arm in arms))
    title = f"{', '.join(variants[:-1])} and {variants[-1]}" if len(variants) > 1 else variants[0]
    clear = [any(one.resolved for one in main_numbers(arm, content.contrasts)) for arm in arms[1:]]
    resolved = ["Resolved" if of_arm else "Not resolved" for of_arm in clear]
    return render(
        "report.html",
        content=content,
        title=title[0].upper() + title[1:],
        lead=compared([run for arm in arms for run in arm.runs]),
        several=any(arm.several for arm in arms),
        opening=list(zip(resolved or [""], content.verdicts, strict=True)),  # a single arm has a verdict, too
        groups=groups(content),
        about={section.name: about(arms, section) for section in content.sections},
        methods=os.path.relpath(ROOT / "docs" / "METHODS.md", out.resolve().parent),
        numbers=out.with_suffix(".json").name,
    )


def groups(content: Content) -> list[dict[str, Any]]:
    """The page's groups: rows to show (the main numbers, or the first), rows to fold, differences and figures."""
    parts = []
    for title, names in GROUPS.items():
        rows = [row for row in content.rows if row.group in names]
        shown = [row for row in rows if row.name in HEADLINES] or rows[:SHOWN]
        parts.append({
            "title": title,
            "shown": shown,
            "folded": [row for row in rows if row not in shown],
            "contrasts": [one for one in content.contrasts if one.group in names],
            "figures": [figure for figure in content.figures if figure.group == title],
        })  # fmt: skip
    return [part for part in parts if part["shown"] or part["figures"]]


def compared(runs: list[Run]) -> str:
    """One sentence about the runs: data, tokens, context, seeds, machine and code."""

    def same(read: Callable[[Run], Any], between: str = " / ") -> str:
        return between.join(dict.fromkeys(str(read(run)) for run in runs))

    seeds = same(lambda run: run.seed, ", ")
    return (
        f"{len(runs)} run{'s' * (len(runs) > 1)} on {same(lambda run: text_read(run.config['data'])[0])}, "
        f"{same(lambda run: si(run.value('train.tokens')))} training tokens, "
        f"context {same(lambda run: run.config['model']['context'])}, seed{'s' * (',' in seeds)} {seeds}; "
        f"{same(lambda run: _machine(run.facts))}; "
        f"code {same(lambda run: run.facts.get('version', 'unknown'))}."
    )


def _machine(facts: dict[str, Any]) -> str:
    """The processor or card, torch and the dtype of training, as far as the first line of metrics.jsonl names them."""
    info = {key: value for key, value in (facts.get("machine") or {}).items() if value != "none"}
    torch = f"torch {info['torch']}" if "torch" in info else None
    return ", ".join(filter(None, [info.get("gpu") or info.get("cpu", "unknown machine"), torch, facts.get("dtype")]))


def about(arms: list[Arm], section: Section) -> dict[str, Any]:
    texts = {text_named(run, section.name) for arm in arms for run in arm.runs if section.name in run.evals}
    images = drawn_by(arms, section.name, section.title)
    return {"command": command_of(section.name), "texts": sorted(filter(None, texts)), "images": images}


def draw_report(arms: list[Arm], differences: list[Difference], folder: Path) -> list[Figure]:
    """The figures over all arms, drawn into `folder`, and those that evaluations drew of the first run of each arm."""
    drawn, several = [], any(arm.several for arm in arms)
    panels = {name: [one for one in differences if one.metric == name] for name in HEADLINES}
    panels = {name: of_name for name, of_name in panels.items() if any(one.n > 1 for one in of_name)}
    if panels:
        image = Image(folder / "differences.png", "Paired differences to the first arm with 95 % intervals")
        figures.draw_differences(image.path, arms, panels)
        drawn.append(Figure("differences", "", [image], {"reference": arms[0].name}))
    if trained := [arm for arm in arms if any(run.last_tenth() is not None for run in arm.runs)]:
        image = Image(folder / "loss.png", "Curves of training and validation loss against tokens for each arm")
        figures.draw_losses(image.path, trained)
        text_only = figures.training_loss(trained) == "loss_text"
        facts = {"lines": "the text among the training samples" if text_only else trained_on(trained)}
        facts["dots"] = any(run.val for arm in trained for run in arm.runs) and held_out(trained[0].runs[0])
        facts["seeds"] = sorted({len(arm.runs) for arm in trained}) if several else []
        drawn.append(Figure("loss", "Loss", [image], facts))
    for name, evaluation, group, alt in DRAWN_BEFORE:
        if images := drawn_by(arms, evaluation, alt):
            first = next(arm.runs[0] for arm in arms if arm.runs[0].results(evaluation))
            facts = {"results": first.results(evaluation), "text": text_of(first, evaluation), "several": several}
            drawn.append(Figure(name, group, images, facts))
    return drawn


def drawn_by(arms: list[Arm], evaluation: str, alt: str) -> list[Image]:
    """The images that the evaluation drew for the first run of each arm, if they exist."""
    first = [arm for arm in arms if arm.runs[0].results(evaluation) is not None]
    heatmap = command_of(evaluation) == "needle"
    images = [Image(arm.runs[0].folder / "figures" / f"{evaluation}.png", alt, arm.name, heatmap) for arm in first]
    return [image for image in images if image.path.is_file()]
