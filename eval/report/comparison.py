"""The numbers of an ablation: its arms on one long table, their differences, models, parts and fits (docs/METHODS.md, 8.3)."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from eval.report.differences import MixedModel, by_seed, contrasts, long_table
from eval.report.runs import Arm, Run, trained_tokens
from eval.report.statistics import PAIRED, Difference, correct, geometric_interval, mean_sd, paired, power_law, size_ratio

EQUAL_FLOPS = ", equal FLOPs"  # ends the name of a metric that is compared after equal training FLOPs
GAIN = ("diff", "baseline")  # the arms whose difference, halved, is the margin of equivalence
PAIR = ("mean", "low", "high", "p", "p_holm", "p_alone", "p_welch", "p_equal")
OF_ARM = ("name", "arm", "point", "reference", "variant", "overrides", "facts")


@dataclass
class Comparison:
    """metrics: name -> metric path (Run.value). compared: those whose differences are tested, by default the first.

    parts: name -> (arm, arm without the part). horizons: the grid's points are lengths of training, so arms are also
    compared at equal FLOPs. covariate: a compared metric, at whose equal values arms are also compared in the other metrics.
    effects: the models' differences to the reference; pairs: those of parts. Their metrics end with their kind.
    """

    arms: list[Arm]
    metrics: Mapping[str, str]
    compared: Sequence[str] = ()
    parts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    horizons: bool = False
    covariate: str | None = None
    models: dict[str, dict[str, MixedModel]] = field(default_factory=dict)
    effects: list[Difference] = field(default_factory=list)
    pairs: list[Difference] = field(default_factory=list)

    def __post_init__(self) -> None:
        arms, metrics = self.arms, self.metrics
        self.compared = list(self.compared) or list(metrics)[:1]
        self.points = list(dict.fromkeys(arm.point for arm in arms))
        values = {name: [[run.value(path) for run in arm.runs] for arm in arms] for name, path in metrics.items()}
        self.table = long_table(arms, values)
        self.differences = {(one.metric, one.arm): one for one in contrasts(self.table, arms)}
        self.values = self.table.groupby(["metric", "arm"])["value"].agg(list).to_dict()
        tested = self.table[self.table["metric"].isin(self.compared)]
        self._compare("", self.compared, tested)
        if self.horizons:
            self._compare(EQUAL_FLOPS, self.compared, at_equal_flops(arms, tested))
        if self.covariate:
            path = metrics[self.covariate]
            whole = f"{path.partition('.')[0]}.loss" if ".recall." in path else path  # would repeat another metric's difference
            others = [metric for metric in self.compared if metrics[metric] not in (path, whole)]
            self._compare(f", equal {self.covariate}", others, tested, self.covariate)

    def _compare(self, kind: str, metrics: Sequence[str], table: pd.DataFrame, covariate: str | None = None) -> None:
        at, references = dict(by_seed(table, "metric", "point")), {arm.name for arm in self.arms if not arm.reference}
        points = self.points[1:] if kind == EQUAL_FLOPS else self.points  # at the first an arm with more FLOPs has none
        for metric in metrics:
            of_points = self.models.setdefault(metric + kind, {})
            for point in points:
                values, covariates = at.get((metric, point)), at.get((covariate, point))
                if values is None or (covariate and covariates is None):
                    continue
                model = MixedModel(values, covariates, metric=metric + kind, kind=kind, point=point)
                if model.enough and model.reference in references:
                    of_points[point] = model
                    self.effects += model.effects.values()
                if kind != EQUAL_FLOPS and (model.enough or not covariate):
                    self.pairs += self._pairs_of(model, {arm.arm: arm.name for arm in self.arms if arm.point == point})

    def _pairs_of(self, model: MixedModel, names: Mapping[str, str]) -> list[Difference]:
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

    def summary(self, metric: str, arm: Arm) -> Difference:
        """n, mean and sd of the arm's values over seeds."""
        values = self.values.get((metric, arm.name), [])
        return Difference(len(values), *(mean_sd(values) if values else (None, None)))

    def drawn(self, metric: str) -> list[Difference]:
        """Every arm less its reference, with the interval of the tables: the model's, or the paired one where there is none."""
        effects = {one.arm: one for one in self.effects if one.metric == metric}
        return [effects.get(arm, one) for (of, arm), one in self.differences.items() if of == metric]

    def alone(self, metric: str) -> list[Difference]:
        """The metric's pairs at the last point, paired by seed, with Holm's correction for the parts."""
        pairs = [one for one in self.pairs if (one.metric, one.point) == (metric, self.points[-1])]
        place = ("by_seed", "arm", "reference", "part", "metric")
        differences = [paired(list(one.by_seed.values()), **one.numbers(*place)) for one in pairs]
        correct(differences)
        return differences

    def over_documents(self, metric: str) -> list[Difference]:
        """The metric's parts at the last point, paired by the documents of its text: of each the mean over the common seeds."""
        path, differences = self.metrics[metric].removesuffix("loss") + "by_document", []
        runs = {arm.arm: {run.seed: run for run in arm.runs} for arm in self.arms if arm.point == self.points[-1]}
        for part, (arm, other) in self.parts.items():
            both = [(run, runs[other][seed]) for seed, run in runs.get(arm, {}).items() if seed in runs.get(other, {})]
            losses = [[[run.value(f"{path}.{key}") for key in run.keys(path)] for run in pair] for pair in both]
            if losses := [pair for pair in losses if all(pair)]:
                less = np.subtract(*np.moveaxis(losses, 1, 0)).mean(axis=0)
                differences.append(paired(less.tolist(), part=part, arm=arm, reference=other, metric=metric))
        correct(differences)
        return differences

    def arms_json(self) -> list[dict[str, Any]]:
        return [
            {key: getattr(arm, key) for key in OF_ARM}
            | {"runs": [self._run(run) for run in arm.runs]}
            | {"metrics": {metric: self._metric(metric, arm) for metric in self.metrics}}
            for arm in self.arms
        ]

    def _run(self, run: Run) -> dict[str, Any]:
        """curve: (tokens, seconds of training, validation loss). losses: (step, training loss), as logged."""
        return {
            "seed": run.seed,
            "run": run.folder.name,
            "values": {name: run.value(path) for name, path in self.metrics.items()},
            "curve": [(line["tokens"], line.get("time_s", 0.0), line["val_loss"]) for line in run.val],
            "losses": [(line["step"], line["loss"]) for line in run.train],
            "spikes": run.spikes,
            "diverged": run.diverged,
            "tokens_per_s": run.tokens_per_s,
            "seconds": run.value("train.seconds"),
            "machine": run.facts.get("machine", {}),
            "version": run.facts.get("version", "unknown"),
        }

    def _metric(self, metric: str, arm: Arm) -> dict[str, Any]:
        numbers, test = self.summary(metric, arm).numbers("n", "mean", "sd"), self.differences.get((metric, arm.name))
        return numbers | {"difference": test and test.numbers(*PAIRED), "p_holm": test and test.p_holm}

    def models_json(self) -> dict[str, Any]:
        mixed = {metric: {point: model.summary() for point, model in at.items()} for metric, at in self.models.items()}
        pairs = {metric: [] for metric in mixed if not metric.endswith(EQUAL_FLOPS)}
        for one in self.pairs:
            place = {"name": one.part, "point": one.point, "arm": one.arm, "other": one.reference, "differences": one.by_seed}
            pairs[one.metric].append(place | one.numbers(*PAIR))
        return {"mixed": mixed, "pairs": pairs}


def profile(arms: list[Arm], path: str, parts: Mapping[str, Sequence[str]]) -> Comparison | None:
    """The comparison of the numbers under `path`, which are the metrics. None if no run has more than one number there."""
    runs = [run for arm in arms for run in arm.runs]
    keys = max((run.keys(path) for run in runs), key=len, default=[])  # a longer context has more positions
    return Comparison(arms, {key: f"{path}.{key}" for key in keys}, keys, parts) if len(keys) > 1 else None


def at_equal_flops(arms: list[Arm], table: pd.DataFrame) -> pd.DataFrame:
    """The table's values after as many training FLOPs as the arm's reference has used, linear in log tokens, or missing."""
    rows, by_name = [], {arm.name: arm for arm in arms}
    for (metric, values), arm in itertools.product(by_seed(table, "metric"), arms):
        points = {trained_tokens(one): values[one.name] for one in arms if one.arm == arm.arm and one.name in values}
        equal = values.get(arm.name) if arm.reference not in by_name else _between(points, arm, by_name[arm.reference])
        if equal is not None:
            rows += [(arm.name, arm.point, seed, metric, value) for seed, value in equal.dropna().items()]
    return pd.DataFrame(rows, columns=table.columns)


def _between(points: Mapping[float, pd.Series], arm: Arm, reference: Arm) -> pd.Series | None:
    tokens = trained_tokens(reference) * reference.facts["flops_per_token"] / arm.facts["flops_per_token"]
    for less, more in itertools.pairwise(sorted(points)):
        if less <= tokens <= more:
            return points[less] + math.log(tokens / less) / math.log(more / less) * (points[more] - points[less])
    return None


def fit_sizes(comparison: Comparison, metric: str) -> dict[str, Any]:
    """loss = a N^-b for each arm, one fit per seed, with N parameters without embeddings; means and intervals.

    size_ratio: the parameters with which the arm has the reference's loss at the grid's middle size, divided by that size.
    """
    arms, laws, sizes = comparison.arms, {}, {}
    values = dict(by_seed(comparison.table, "metric")).get(metric, pd.DataFrame())
    for name in dict.fromkeys(arm.arm for arm in arms):
        of_arm = [arm for arm in arms if arm.arm == name]
        sizes[name] = [arm.facts["params_non_embedding"] for arm in of_arm]
        several = len(set(sizes[name])) > 1  # not in an unfinished grid
        losses = values.reindex(columns=[arm.name for arm in of_arm]).dropna().itertuples() if several else ()
        laws[name] = {seed: power_law(sizes[name], of_seed) for seed, *of_seed in losses}
    first = laws[arms[0].arm]
    middle = math.exp(np.mean(np.log(sizes[arms[0].arm])))
    results = {}
    for name, fits in laws.items():
        ratios = [size_ratio(first[seed], law, middle) for seed, law in fits.items() if seed in first]
        exponent = paired([b for _, b in fits.values()]).numbers("n", "mean", "low", "high") if fits else None
        results[name] = {
            "a": {seed: a for seed, (a, _) in fits.items()},
            "b": {seed: b for seed, (_, b) in fits.items()},
            "exponent": exponent,
            "at_size": middle,
            "size_ratio": geometric_interval(ratios) if ratios and all(0 < ratio < math.inf for ratio in ratios) else None,
        }
    return results
