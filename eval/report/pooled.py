"""What an ablation says with the error pooled over its arms: differences to the reference, at equal FLOPs, and of pairs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eval.report.figures import Gap, draw_gap, slug
from eval.report.grid import Comparison
from eval.report.mixed import Effect, MixedModel, by_point, mixed_lines, mixed_notes
from eval.report.pairs import Pair, compare_pairs, pair_lines, pair_notes, seed_lines
from eval.report.runs import CYCLE, Arm, trained_tokens
from eval.report.tables import markdown

BOLD = (
    "In brackets: 95 % intervals of the mixed model, for all arms at once; bold where p, for all arms of this table at once, "
    "is below 5 %. The JSON has p and the interval of each arm alone."
)
EQUAL_FLOPS = (
    "Equal FLOPs: every arm after as many training FLOPs (FLOPs/token times tokens) as {reference} has used there, between the "
    "arm's own two numbers of tokens, on a straight line in their logarithm. FLOPs/token counts a product with the values for "
    "every map, as calls of a standard kernel compute them; a kernel that subtracts maps first needs fewer."
)
AT_ONCE, ALONE = "bars: 95 %, all arms at once", "bars: 95 %, each part alone"
LESS = "arm with the part minus arm without it"
AT_EQUAL = (
    "Equal {metric}: {metric} is a covariate of the model, so what is left does not come from a difference in {metric}. Where "
    "an arm changes {metric} itself, this leaves out a part of what the arm does."
)
BY_SEED = (
    "Part by seed: p, pooled has the error pooled over all arms; p, Holm is the same after Holm's correction for the parts; p, "
    "alone is the paired t test of the row's differences, uncorrected. Where the arms differ in their spread (notes below), "
    "the pooled error can be too small or too large for a row; p, alone does not use the pooled error."
)
Models = dict[str, dict[str, MixedModel]]  # metric -> point of the grid -> model


def metric_of_parts(path: str) -> str | None:
    """The path of the loss of which the loss at `path` is a part: EVALUATION.loss of EVALUATION.recall.hit.loss."""
    evaluation, recall, _ = path.partition(".recall.")
    return f"{evaluation}.loss" if recall else None


class Pooled:
    """Mixed models and pairs of the compared metrics at every point of a grid.

    pairs: part -> (arm, arm without the part). horizons: the grid's points are lengths of training, so arms are also
    compared at equal FLOPs. covariate: a compared metric; arms are also compared in the other metrics at equal values of it.
    Left out is the loss of which the covariate is a part, because its difference would repeat another metric's.
    """

    def __init__(
        self, found: Comparison, pairs: Mapping[str, Sequence[str]], horizons: bool, covariate: str | None = None
    ) -> None:
        self.found, self.asked, self.covariate = found, pairs, covariate
        self.points = list(dict.fromkeys(arm.point for arm in found.arms))
        values = {metric: found.values(metric) for metric in found.compared}
        self.models: Models = {metric: by_point(found.arms, of) for metric, of in values.items()}
        self.pairs = {metric: compare_pairs(found.arms, of, pairs) for metric, of in values.items()}
        self.equal: Models = {}
        for metric in found.compared if horizons else ():
            self.equal[metric] = by_point(found.arms, found.at_equal_flops(metric))
            self.equal[metric].pop(self.points[0], None)  # no value there for more FLOPs per token
        parts = (None, metric_of_parts(found.metrics[covariate])) if covariate else ()
        others = {m: of for m, of in values.items() if parts and m != covariate and found.metrics[m] not in parts}
        x = values[covariate] if others else None
        self.at_equal: Models = {metric: by_point(found.arms, of, x) for metric, of in others.items()}
        self.pairs_at_equal = {metric: compare_pairs(found.arms, of, pairs, x) for metric, of in others.items()}
        # What is added to a metric's name -> models and pairs.
        self.kinds: dict[str, tuple[Models, dict[str, list[Pair]]]] = {
            "": (self.models, self.pairs),
            ", equal FLOPs": (self.equal, {}),
            f", equal {covariate}": (self.at_equal, self.pairs_at_equal),
        }

    def as_json(self) -> dict[str, Any]:
        mixed = {f"{metric}{kind}": at for kind, (models, _) in self.kinds.items() for metric, at in models.items()}
        pairs = {f"{metric}{kind}": of for kind, (_, found) in self.kinds.items() for metric, of in found.items()}
        return {
            "mixed": {metric: {point: asdict(m) for point, m in at.items()} for metric, at in mixed.items()},
            "pairs": {metric: [asdict(pair) for pair in of_metric] for metric, of_metric in pairs.items()},
        }

    def tables(self, point: str) -> list[str]:
        """The tables at one point: arms against the reference and pairs, each also at equal FLOPs or at equal covariate."""
        arms = [
            mixed_lines(models, point, kind)
            for kind, (models, _) in self.kinds.items()
            if any(point in at for at in models.values())
        ]
        pairs = [pair_lines(found, point, kind) for kind, (_, found) in self.kinds.items()]
        return [markdown(lines).rstrip() for lines in (*arms, *pairs) if len(lines) > 1]

    def by_seed(self) -> list[str]:
        """For every point a table of the pairs' differences seed by seed, and what its p values are."""
        pairs = [pair for of_metric in self.pairs.values() for pair in of_metric]
        several = [point for point in self.points if any(pair.n > 1 for pair in pairs if pair.point == point)]
        tables = [markdown(seed_lines(self.pairs, point)).rstrip() for point in several]
        return [*tables, BY_SEED] if tables else []

    def remarks(self) -> list[str]:
        """What a reader of the tables must know."""
        fitted = any(self.models.values())
        equal = [EQUAL_FLOPS.format(reference=self.found.arms[0].arm)] if any(self.equal.values()) else []
        equal += [AT_EQUAL.format(metric=self.covariate)] if any(self.at_equal.values()) else []
        pairs = [pair for of_metric in self.pairs.values() for pair in of_metric]
        return [BOLD] * fitted + equal + pair_notes(pairs, self.asked)

    def notes(self) -> list[str]:
        """The error of every metric at every point."""
        models = self.models | {f"{metric}, equal {self.covariate}": at for metric, at in self.at_equal.items()}
        return [note for metric, at in models.items() for note in mixed_notes(at, metric)]

    def draw(self, folder: Path, metric: str, unit: str) -> list[Path]:
        """Draw the differences to the reference, and those of the pairs, against training tokens."""
        tokens: dict[str, int] = {}
        for arm in self.found.arms:  # an arm that diverged stopped before
            tokens[arm.point] = max(tokens.get(arm.point, 1), trained_tokens(arm))
        places = {point: math.log2(count) for point, count in tokens.items()}
        ticks = {places[point]: f"{count / 1e6:.3g}" for point, count in tokens.items()}
        arms = lines_of((arm.arm, arm.colour, places[arm.point], effect) for arm, effect in self._effects(metric))
        parts = lines_of((pair.name, None, places[pair.point], pair) for pair in self.pairs[metric])
        x = "training tokens (millions)"
        return [
            *drawn(folder / f"gap_{slug(metric)}.png", arms, ticks, f"{x}; {AT_ONCE}", f"{metric}: {self._less()}{unit}"),
            *drawn(folder / f"pairs_{slug(metric)}.png", parts, ticks, f"{x}; {ALONE}", f"{metric}: {LESS}{unit}"),
        ]

    def draw_profile(self, folder: Path, name: str, point: str, unit: str) -> list[Path]:
        """Draw the differences at one point of the grid, with the metrics beside each other in their order."""
        place = {metric: i for i, metric in enumerate(self.models)}
        effects = [(metric, *found) for metric in self.models for found in self._effects(metric)]
        pairs = [(metric, pair) for metric, of_metric in self.pairs.items() for pair in of_metric]
        arms = lines_of((arm.arm, arm.colour, place[m], effect) for m, arm, effect in effects if arm.point == point)
        parts = lines_of((pair.name, None, place[m], pair) for m, pair in pairs if pair.point == point)
        ticks, x = {i: metric for metric, i in place.items()}, f"{name}{point and f', {point}'}"
        return [
            *drawn(folder / f"profile_{slug(name)}.png", arms, ticks, f"{x}; {AT_ONCE}", f"{self._less()}{unit}"),
            *drawn(folder / f"profile_pairs_{slug(name)}.png", parts, ticks, f"{x}; {ALONE}", f"{LESS}{unit}"),
        ]

    def _effects(self, metric: str) -> list[tuple[Arm, Effect]]:
        found = ((arm, self.models[metric].get(arm.point)) for arm in self.found.arms)
        return [(arm, model.effects[arm.name]) for arm, model in found if model and arm.name in model.effects]

    def _less(self) -> str:
        return f"arm less {self.found.arms[0].arm}"


def drawn(path: Path, lines: dict[str, tuple[str, Gap]], ticks: dict[float, str], xlabel: str, ylabel: str) -> list[Path]:
    """The path of the figure of these lines; none without lines."""
    if lines:
        draw_gap(path, lines, ticks, xlabel, ylabel)
    return [path] if lines else []


def lines_of(found: Iterable[tuple[str, str | None, float, Effect | Pair]]) -> dict[str, tuple[str, Gap]]:
    """Name -> colour and points, for `draw_gap`. found: name, colour or None, place on the axis, difference."""
    lines: dict[str, tuple[str, Gap]] = {}
    for name, colour, place, one in found:
        shade = colour or CYCLE[len(lines) % len(CYCLE)]
        lines.setdefault(name, (shade, []))[1].append((place, one.mean, one.low, one.high, one.n))
    return lines


def unit(path: str) -> str:
    """The unit of a metric's numbers, for the label of an axis."""
    return " (nats)" if path.endswith(("loss", "by_octave")) else ""


def profile(arms: list[Arm], path: str, pairs: Mapping[str, Sequence[str]]) -> Pooled | None:
    """The comparison of the numbers under `path`, which are the metrics. None if no run has more than one number there."""
    runs = [run for arm in arms for run in arm.runs]
    keys = max((run.keys(path) for run in runs), key=len, default=[])  # a longer context has more positions
    if len(keys) < 2:
        return None
    return Pooled(Comparison(arms, {key: f"{path}.{key}" for key in keys}, keys), pairs, horizons=False)
