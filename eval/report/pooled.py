"""What an ablation says with the error pooled over its arms: differences to the reference, at equal FLOPs, and of pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eval.report.figures import draw_gap, slug
from eval.report.grid import Comparison
from eval.report.mixed import by_point, gaps, mixed_lines, mixed_notes
from eval.report.pairs import compare_pairs, pair_gaps, pair_lines, pair_notes
from eval.report.runs import trained_tokens
from eval.report.tables import markdown

BOLD = (
    "In brackets: 95 % intervals of the mixed model, for all arms at once; bold where zero lies outside. The JSON has p and "
    "the interval of each arm alone."
)
EQUAL_FLOPS = (
    "Equal FLOPs: every arm after as many training FLOPs (FLOPs/token times tokens) as {reference} has used there, between the "
    "arm's own two numbers of tokens, on a straight line in their logarithm. FLOPs/token counts a product with the values for "
    "every map, as calls of a standard kernel compute them; a kernel that subtracts maps first needs fewer."
)


class Pooled:
    """Mixed models and pairs of the compared metrics at every point of a grid.

    pairs: part -> (arm, arm without the part). horizons: the grid's points are lengths of training; then the first metric
    is also compared at equal FLOPs.
    """

    def __init__(self, found: Comparison, pairs: Mapping[str, Sequence[str]], horizons: bool) -> None:
        self.found, self.asked, self.horizons = found, pairs, horizons
        self.points = list(dict.fromkeys(arm.point for arm in found.arms))
        values = {metric: found.values(metric) for metric in found.compared}
        self.pairs = {metric: compare_pairs(found.arms, of, pairs) for metric, of in values.items()}
        if horizons:
            first = found.compared[0]
            values[f"{first}, equal FLOPs"] = found.at_equal_flops(first)
        self.models = {metric: by_point(found.arms, of) for metric, of in values.items()}
        if horizons:  # at the first point, only arms with the reference's FLOPs per token have a value
            self.models[f"{first}, equal FLOPs"].pop(self.points[0], None)

    def as_json(self) -> dict[str, Any]:
        return {
            "mixed": {metric: {point: asdict(m) for point, m in at.items()} for metric, at in self.models.items()},
            "pairs": {metric: [asdict(pair) for pair in of_metric] for metric, of_metric in self.pairs.items()},
        }

    def tables(self, point: str) -> list[str]:
        """The tables at one point: arms against the reference, and pairs."""
        fitted = any(point in at for at in self.models.values())
        arms = [markdown(mixed_lines(self.models, point)).rstrip()] if fitted else []
        paired = any(pair.point == point for pair in next(iter(self.pairs.values())))
        return arms + ([markdown(pair_lines(self.pairs, point)).rstrip()] if paired else [])

    def remarks(self) -> list[str]:
        """What a reader of the tables must know."""
        fitted = any(self.models.values())
        equal = [EQUAL_FLOPS.format(reference=self.found.arms[0].arm)] if self.horizons and fitted else []
        pairs = [pair for of_metric in self.pairs.values() for pair in of_metric]
        return [BOLD] * fitted + equal + pair_notes(pairs, self.asked)

    def notes(self) -> list[str]:
        """The error of every metric at every point."""
        return [note for metric, at in self.models.items() for note in mixed_notes(at, metric)]

    def draw(self, folder: Path, metric: str, unit: str) -> list[Path]:
        """Draw the differences to the reference, and those of the pairs, against training tokens."""
        arms, paths = self.found.arms, []
        tokens = {arm.point: trained_tokens(arm) for arm in arms}
        drawn = {
            "gap": (gaps(arms, self.models[metric]), arms[0].arm),
            "pairs": (pair_gaps(self.pairs[metric], tokens), "the arm without this part"),
        }
        for kind, (lines, other) in drawn.items():
            if lines:
                paths.append(folder / f"{kind}_{slug(metric)}.png")
                draw_gap(paths[-1], lines, f"{metric}: arm less {other}{unit}")
        return paths
