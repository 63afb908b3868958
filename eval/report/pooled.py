"""What an ablation says with the error pooled over its arms: differences to the reference, at equal FLOPs, and of pairs."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from scipy import stats

from eval.report.differences import FEWEST_DF, Model, by_seed, correct, difference_table, fit, paired_arms
from eval.report.figures import draw_gap, slug
from eval.report.grid import Comparison
from eval.report.runs import Arm, trained_tokens
from eval.report.statistics import Difference, p_text
from eval.report.tables import markdown

FLOPS = ", equal FLOPs"
ABOUT = (
    "Brackets: 95 % intervals of the mixed model, of arms for all of them at once. Bold: p below 5 %, of parts (an arm less "
    "the arm without it) after Holm's correction. p, alone is the paired t test. docs/METHODS.md, 8.3, defines all of them."
)
TOO_FEW = (
    f"No error is pooled over arms, and nothing is bold, with two seeds and fewer than {FEWEST_DF} degrees of freedom (four "
    "arms): the intervals of the table with p, and of the figure, are paired by seed."
)
GAIN = ("diff", "baseline")  # the arms whose difference, halved, is the margin of equivalence
EFFECT = ("mean", "se", "low", "high", "p", "own_low", "own_high", "n", "p_welch")
P_KINDS = {"pooled": "p", "Holm": "p_holm", "alone": "p_alone", "Welch": "p_welch", "equal": "p_equal"}
PAIR = ("mean", "low", "high", "p", "p_holm", "p_alone", "p_welch", "p_equal")
ERROR = (
    "{where}: error {sd:.4f} (95 % {sd_low:.4f} to {sd_high:.4f}, {df} degrees of freedom), seeds {sd_seed:.4f}, smallest "
    "detectable difference {detectable:.4f} (n = {n}, pooled error, 80 % power, 5 % level); against {reference}."
)
SPREADS_DIFFER = (
    "{where}: the arms differ in their spread over seeds (Bartlett's test, p {p}): the pooled intervals are too narrow for the "
    "arms with a large spread, and too wide for the others. Compare with the paired intervals."
)


class Pooled:
    """Models and pairs of the compared metrics at every point of a grid.

    parts: name -> (arm, arm without the part). horizons: the grid's points are lengths of training, so arms are also
    compared at equal FLOPs. covariate: a compared metric; arms are also compared in the other metrics at equal values of it.
    models: metric -> point -> Model, and pairs: metric -> differences; a metric's name ends with the kind of comparison.
    """

    def __init__(
        self, comparison: Comparison, parts: Mapping[str, Sequence[str]], horizons: bool, covariate: str | None = None
    ) -> None:
        self.comparison, self.parts, self.covariate = comparison, parts, covariate
        self.points = list(dict.fromkeys(arm.point for arm in comparison.arms))
        self.kinds = ("", FLOPS, f", equal {covariate}")
        self.models: dict[str, dict[str, Model]] = {}
        self.pairs: dict[str, list[Difference]] = {}
        metrics, compared = comparison.metrics, comparison.compared
        for metric in compared:
            self._compare(metric, "", comparison.table)
        if horizons:
            table = comparison.at_equal_flops()
            for metric in compared:
                self._compare(metric, FLOPS, table[table["point"] != self.points[0]])  # has no value for more FLOPs per token
        if covariate:
            path = metrics[covariate]
            whole = f"{path.partition('.')[0]}.loss" if ".recall." in path else path  # would repeat another metric's difference
            for metric in (metric for metric in compared if metrics[metric] not in (path, whole)):
                self._compare(metric, self.kinds[-1], comparison.table, covariate)

    def _compare(self, metric: str, kind: str, table: pd.DataFrame, covariate: str | None = None) -> None:
        values = dict(by_seed(table[table["metric"].isin([metric, covariate])], "metric", "point"))
        models, pairs = self.models.setdefault(metric + kind, {}), []
        for point in self.points:
            here, x = values.get((metric, point)), values.get((covariate, point))
            if here is None or (covariate and x is None):
                continue
            arms = [arm for arm in self.comparison.arms if arm.point == point]
            model = fit(here, x, metric=metric, kind=kind, point=point)
            if model.enough and any(arm.name == model.reference and not arm.reference for arm in arms):
                models[point] = model
            if model.enough or not covariate:
                pairs += self._pairs_of(model, {arm.arm: arm.name for arm in arms})
        if kind != FLOPS:
            self.pairs[metric + kind] = pairs

    def _pairs_of(self, model: Model, names: dict[str, str]) -> list[Difference]:
        """The differences of pairs with a common seed, with two one-sided tests of equivalence (Schuirmann 1987)."""
        arms = {part: [names.get(family) for family in families] for part, families in self.parts.items()}
        pairs = [model.less(*of, part=part) for part, of in arms.items() if all(arm in model.values for arm in of)]
        pairs = [one for one in pairs if one.by_seed]
        correct(pairs)
        if model.enough and all(names.get(family) in model.values for family in GAIN):
            margin = abs(model.less(*(names[family] for family in GAIN)).mean) / 2
            for one in pairs:
                one.p_equal = float(stats.t.sf((margin - abs(one.mean)) / one.se, model.df))
        return pairs

    def effects(self, point: str, kind: str = "") -> list[Difference]:
        models = [at[point] for at in self.models.values() if point in at]
        return [one for model in models for one in model.effects.values() if one.kind == kind]

    def drawn(self, metric: str) -> list[Difference]:
        """Every arm less its reference, with the interval of `tables`: the model's, or the paired one where there is none."""
        effects = {one.arm: one for model in self.models.get(metric, {}).values() for one in model.effects.values()}
        return [effects.get(one.arm, one) for one in self.comparison.of_metric(metric)]

    def pairs_at(self, point: str, kind: str = "") -> list[Difference]:
        return [one for of_metric in self.pairs.values() for one in of_metric if (one.point, one.kind) == (point, kind)]

    def alone(self, metric: str) -> list[Difference]:
        """The metric's pairs at the last point, paired by seed, with Holm's correction for the parts."""
        wide = dict(by_seed(self.comparison.table, "metric")).get(metric)
        pairs = [one for one in self.pairs_at(self.points[-1]) if one.metric == metric]
        paired = [paired_arms(wide, one.arm, one.reference, part=one.part, metric=metric) for one in pairs]
        correct(paired)
        return paired

    def as_json(self) -> dict[str, Any]:
        def of_model(model: Model) -> dict[str, Any]:
            effects = {arm: one.numbers(*EFFECT) for arm, one in model.effects.items()}
            return model.summary() | {"effects": effects, "bartlett_p": model.bartlett_p, "slope": model.slope}

        def of_pair(one: Difference) -> dict[str, Any]:
            names = {"name": one.part, "point": one.point, "arm": one.arm, "other": one.reference}
            return names | {"differences": one.by_seed} | one.numbers(*PAIR)

        return {
            "mixed": {metric: {point: of_model(model) for point, model in at.items()} for metric, at in self.models.items()},
            "pairs": {metric: list(map(of_pair, of_metric)) for metric, of_metric in self.pairs.items()},
        }

    def tables(self, point: str) -> list[str]:
        """The tables at one point: arms against the reference and pairs, each also at equal FLOPs or at equal covariate."""
        tables = []
        for kind in self.kinds:
            if effects := self.effects(point, kind):
                tables.append(difference_table(effects, [f"arm less {effects[0].reference}{kind}"], lambda one: (one.arm,)))
        tables += [parts_table(pairs, f"part{kind}") for kind in self.kinds if (pairs := self.pairs_at(point, kind))]
        return [markdown(lines).rstrip() for lines in tables]

    def by_seed(self) -> list[str]:
        """For every point a table of the pairs' differences seed by seed."""
        pairs = [self.pairs_at(point) for point in self.points]
        return [markdown(seed_lines(at_point)).rstrip() for at_point in pairs if any(one.n > 1 for one in at_point)]

    def remarks(self) -> list[str]:
        """What a reader of the tables must know, and the parts that are in none of them."""
        seeds = {(arm.point, run.seed) for arm in self.comparison.arms for run in arm.runs}
        two = [point for point in self.points if sum(of == point for of, _ in seeds) == 2]
        few = self.comparison.differences and any(not self.effects(point) for point in two)
        shown = {one.part for point in self.points for one in self.pairs_at(point)}
        remarks = [TOO_FEW] if few else [ABOUT] if any(self.models.values()) else []
        if absent := [f"{name} ({' - '.join(arms)})" for name, arms in self.parts.items() if name not in shown]:
            remarks.append(f"Without a row, because an arm is missing or has no number for a common seed: {', '.join(absent)}.")
        return remarks

    def notes(self) -> list[str]:
        """The error of every metric at every point, and a warning where arms differ in it."""
        models = [(metric, point, model) for metric, at in self.models.items() for point, model in at.items()]
        return [note for metric, *model in models if not metric.endswith(FLOPS) for note in model_notes(metric, *model)]

    def draw(self, folder: Path, metric: str, unit: str) -> list[Path]:
        """Draw the differences to the reference against training tokens; no path without any."""
        arms = self.comparison.arms
        tokens = {point: max(max(trained_tokens(arm), 1) for arm in arms if arm.point == point) for point in self.points}
        place, by_name = {point: math.log2(count) for point, count in tokens.items()}, {arm.name: arm for arm in arms}
        effects = [one for point in self.points for one in self.effects(point) if one.metric == metric]
        placed = [(by_name[one.arm].arm, by_name[one.arm].colour, place[one.point], one) for one in effects]
        ticks = {place[point]: f"{count / 1e6:.3g}" for point, count in tokens.items()}
        path, x = folder / f"gap_{slug(metric)}.png", "training tokens (millions); bars: 95 %, all arms at once"
        if placed:
            draw_gap(path, placed, ticks, x, f"{metric}: arm less {arms[0].arm}{unit}")
        return [path] if placed else []


def parts_table(pairs: Sequence[Difference], head: str) -> list[list[str]]:
    return difference_table(pairs, [head, "arms"], lambda one: (one.part, one.arms))


def seed_lines(pairs: Sequence[Difference]) -> list[list[str]]:
    """The difference of every seed: a row per part and metric."""
    seeds = list(dict.fromkeys(seed for one in pairs for seed in one.by_seed))
    parts = list(dict.fromkeys(one.part for one in pairs))
    kinds = {kind: key for kind, key in P_KINDS.items() if any(getattr(one, key) is not None for one in pairs)}
    lines = [["part by seed", "arms", "metric", *(f"seed {seed}" for seed in seeds), *(f"p, {kind}" for kind in kinds)]]
    for one in sorted(pairs, key=lambda one: parts.index(one.part)):
        values = [f"{one.by_seed[seed]:+z.4f}" if seed in one.by_seed else "" for seed in seeds]
        lines.append([one.part, one.arms, one.metric, *values, *map(p_text, one.numbers(*kinds.values()).values())])
    return lines


def model_notes(metric: str, point: str, model: Model) -> list[str]:
    """A sentence about the pooled noise, and a warning where arms differ in it."""
    where = f"{metric}, {point}" if point else metric
    notes = [ERROR.format(where=where, **model.summary())]
    return notes + [SPREADS_DIFFER.format(where=where, p=p_text(model.bartlett_p))] * model.spreads_differ


def unit(path: str) -> str:
    return " (nats)" if path.endswith(("loss", "by_octave")) else ""


def profile(arms: list[Arm], path: str, parts: Mapping[str, Sequence[str]]) -> Pooled | None:
    """The comparison of the numbers under `path`, which are the metrics. None if no run has more than one number there."""
    runs = [run for arm in arms for run in arm.runs]
    keys = max((run.keys(path) for run in runs), key=len, default=[])  # a longer context has more positions
    if len(keys) < 2:
        return None
    return Pooled(Comparison(arms, {key: f"{path}.{key}" for key in keys}, keys), parts, horizons=False)
