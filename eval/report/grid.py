"""The comparison of an ablation's arms: points of a grid, fits over sizes, equal FLOPs, and the table.

scripts/ablate.py trains the runs and fills each arm's `runs`. docs/METHODS.md defines every column.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from eval.report.differences import by_seed, contrasts, long_table
from eval.report.notes import mixed_precision
from eval.report.runs import Arm, Run, trained_tokens
from eval.report.statistics import PAIRED, Difference, geometric_interval, interval, p_text, power_law, size_ratio
from eval.report.tables import si

HEAD = ["arm", "heads", "head width", "head norm", "parameters", "FLOPs/token", "n"]
DIFFERENCE_HEAD = ["95 % interval", "p", "p, Holm", "p, sign flips", "detectable"]
ABOUT_P = "p, Holm is corrected for the comparisons of each metric ({tested}). Detectable: with 80 % power, given this spread."


class Summary(NamedTuple):
    """An arm's values of one metric over seeds."""

    n: int = 0
    mean: float | None = None
    sd: float | None = None


class Comparison:
    """The arms of an ablation, every metric over their seeds, and each arm's paired difference to its reference.

    metrics: name -> metric path (Run.value). compared: the metrics whose differences the table shows, by default the
    first metric alone. table: as `long_table`. differences: (metric, arm) -> Difference.
    """

    def __init__(self, arms: list[Arm], metrics: dict[str, str], compared: Sequence[str] = ()) -> None:
        self.arms, self.metrics = arms, metrics
        self.compared = tuple(compared) or tuple(metrics)[:1]
        values = {name: [[run.value(path) for run in arm.runs] for arm in arms] for name, path in metrics.items()}
        self.table = long_table(arms, values)
        tests = contrasts(self.table, {arm.name: arm.reference for arm in arms})
        self.differences = {(one.metric, one.arm): one for one in tests}
        over_seeds = self.table.groupby(["metric", "arm"])["value"].agg(["count", "mean", "std"]).itertuples()
        self._summaries = {key: Summary(int(n), float(mean), float(sd) if n > 1 else None) for key, n, mean, sd in over_seeds}

    def summary(self, metric: str, arm: Arm) -> Summary:
        return self._summaries.get((metric, arm.name), Summary())

    def measured(self, metric: str) -> bool:
        return any(self.summary(metric, arm).n for arm in self.arms)

    def of_metric(self, metric: str) -> list[Difference]:
        return [one for one in self.differences.values() if one.metric == metric]

    def values(self, metric: str) -> pd.DataFrame:
        of_metric = dict(by_seed(self.table, "metric")).get(metric, pd.DataFrame())
        return of_metric.reindex(columns=[arm.name for arm in self.arms])

    def fit_sizes(self, metric: str) -> dict[str, Any]:
        """loss = a N^-b for each arm, one fit per seed, with N parameters without embeddings; means and intervals.

        size_ratio: the parameters with which the arm has the reference's loss at the grid's middle size (geometric
        mean), divided by that size. The paper reports 0.62 for 6.8B parameters (arXiv 2410.05258, section 3.2).
        """
        values, laws = self.values(metric), {}
        for name in dict.fromkeys(arm.arm for arm in self.arms):
            sizes = {arm.name: arm.facts["params_non_embedding"] for arm in self.arms if arm.arm == name}
            several = len(set(sizes.values())) > 1  # not in an unfinished grid
            losses = values[list(sizes)].dropna().itertuples() if several else ()
            laws[name] = {seed: power_law(list(sizes.values()), of_seed) for seed, *of_seed in losses}
        first = self.arms[0].arm
        middle = math.exp(np.mean([math.log(arm.facts["params_non_embedding"]) for arm in self.arms if arm.arm == first]))
        results = {}
        for name, fits in laws.items():
            ratios = [size_ratio(laws[first][seed], law, middle) for seed, law in fits.items() if seed in laws[first]]
            results[name] = {
                "a": {seed: a for seed, (a, _) in fits.items()},
                "b": {seed: b for seed, (_, b) in fits.items()},
                "exponent": interval([b for _, b in fits.values()]) if fits else None,
                "at_size": middle,
                "size_ratio": geometric_interval(ratios) if ratios and all(map(math.isfinite, ratios)) else None,
            }
        return results

    def at_equal_flops(self) -> pd.DataFrame:
        """The table of the compared metrics after as many training FLOPs as the arm's reference has used at the same point.

        A value lies between the arm's two nearest numbers of tokens, on a straight line in their logarithm, or is missing.
        """
        rows = []
        for metric, arm in itertools.product(self.compared, self.arms):
            values = self._at_equal_flops(arm, self.values(metric))
            rows += [(arm.name, arm.point, seed, metric, value) for seed, value in values.dropna().items()]
        return pd.DataFrame(rows, columns=self.table.columns)

    def _at_equal_flops(self, arm: Arm, values: pd.DataFrame) -> pd.Series:
        reference = next((other for other in self.arms if other.name == arm.reference), None)
        if reference is None:
            return values[arm.name]
        tokens = trained_tokens(reference) * reference.facts["flops_per_token"] / arm.facts["flops_per_token"]
        same = [other for other in self.arms if other.arm == arm.arm and values[other.name].notna().any()]
        points = {trained_tokens(other): values[other.name] for other in same}
        for less, more in itertools.pairwise(sorted(points)):
            if less <= tokens <= more:
                return points[less] + math.log(tokens / less) / math.log(more / less) * (points[more] - points[less])
        return pd.Series(dtype=float)

    def as_json(self) -> list[dict[str, Any]]:
        keys = ("name", "arm", "point", "reference", "variant", "overrides", "facts")
        return [
            {key: getattr(arm, key) for key in keys}
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
        test = self.differences.get((metric, arm.name))
        difference = {"difference": test.numbers(*PAIRED) if test else None, "p_holm": test.p_holm if test else None}
        return self.summary(metric, arm)._asdict() | difference

    def lines(self) -> list[list[str]]:
        """The table as text, the header first. A metric without a single value has no column."""
        shown = list(filter(self.measured, self.metrics))
        first, *others = self.compared
        diverged = any(run.diverged for arm in self.arms for run in arm.runs)
        head = [*HEAD, *["diverged"] * diverged, *shown, f"difference ({first})", *DIFFERENCE_HEAD]
        lines = [head + [text.format(name) for name in others for text in ("difference ({})", "95 % ({})", "p, Holm ({})")]]
        for arm in self.arms:
            line = [arm.name, *(arm.facts[key] for key in ("heads", "d", "head_norm"))]
            line += [si(arm.facts[key]) for key in ("params_non_embedding", "flops_per_token")]
            line += [str(self.summary(first, arm).n)]
            line += [str(sum(run.diverged is not None for run in arm.runs))] * diverged
            line += [_mean_text(self.summary(name, arm), len(arm.runs)) for name in shown]
            line += _difference_text(self.differences.get((first, arm.name)))
            for name in others:
                mean, spread, _, p_holm, *_ = _difference_text(self.differences.get((name, arm.name)))
                line += [mean, spread, p_holm]
            lines.append(line)
        return lines

    def notes(self, seeds: Sequence[int], epochs: float | None) -> list[str]:
        """Sentences on the table. epochs: over the prepared text; 0 for data made during training, None if not known."""
        arms = self.arms
        tokens = {run.val[-1]["tokens"] for arm in arms for run in arm.runs if run.val}
        most = ("up to " if len(tokens) > 1 else "") + si(max(tokens, default=0))
        tested = sorted({sum(one.p is not None for one in self.of_metric(metric)) for metric in self.compared})
        reference = f"{arms[0].arm} at the same point of the grid" if any(arm.point for arm in arms) else arms[0].name
        read = f", {epochs:.2f} epochs of the prepared text" if epochs else ", generated during training"
        lines = [
            f"Seeds {', '.join(map(str, seeds))}; {most} training tokens{'' if epochs is None else read}. "
            f"± is the standard deviation over seeds. A difference is the arm less {reference}, paired by seed "
            "(same data order, shared initial weights); negative is better for a loss, positive for an accuracy.",
            ABOUT_P.format(tested=" to ".join(map(str, tested[:1] + tested[1:][-1:]))),
        ]
        off = {arm.name: arm.facts.get("params_off") or 0 for arm in arms}
        if unmatched := [f"{name} ({share:+.1%})" for name, share in off.items() if abs(share) > 0.005]:
            lines.append(f"Not matched to the reference's parameters within 0.5 %: {', '.join(unmatched)}.")
        if epochs and epochs > 1:
            lines.append("The training text was read more than once, so losses on it and on unseen text differ.")
        if mixed := mixed_precision([run for arm in arms for run in arm.runs]):
            lines.append(f"{mixed[0].upper()}{mixed[1:]}.")
        return lines


def _mean_text(one: Summary, runs: int) -> str:
    if one.mean is None:
        return "not measured"
    digits = 4 if abs(one.mean) < 1e4 else 0  # tokens
    spread = f" ± {one.sd:.{digits}f}" if one.sd is not None else ""
    return f"{one.mean:.{digits}f}{spread}" + (f" (n = {one.n})" if one.n < runs else "")


def _difference_text(one: Difference | None) -> list[str]:
    """Mean, 95 % interval, p, p after Holm, p of sign flips, smallest detectable difference; "" for unknown values."""
    if one is None:
        return [""] * 6
    spread = f"{one.low:+z.4f} to {one.high:+z.4f}" if one.low is not None else ""
    least = f"{one.detectable:.4f}" if one.detectable is not None else ""
    return [f"{one.mean:+z.4f}", spread, *map(p_text, (one.p, one.p_holm, one.p_permutation)), least]


def fit_rows(fits: dict[str, Any]) -> list[list[str]]:
    rows = [["arm", "n", "exponent b", "95 % interval", "parameters for equal loss", "95 % interval"]]
    for name, fit in fits.items():
        cells = [name, str(fit["exponent"]["n"]) if fit["exponent"] else "0"]
        for one in (fit["exponent"], fit["size_ratio"]):
            known = one and one["low"] is not None
            cells += [f"{one['mean']:.4f}" if one else "no fit", f"{one['low']:.4f} to {one['high']:.4f}" if known else ""]
        rows.append(cells)
    return rows
