"""The comparison of an ablation's arms: points of a grid, fits over sizes, equal FLOPs, and the table.

scripts/ablate.py trains the runs and fills each arm's `runs`. docs/METHODS.md defines every column.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from eval.report.notes import mixed_precision
from eval.report.runs import Arm, Run, trained_tokens
from eval.report.statistics import Difference, geometric_interval, interval, p_text, power_law, size_ratio
from eval.report.tables import Cell, Contrast, at, contrasts, row_of, si

DIFFERENCE_HEADS = ("95 % interval", "p", "p, Holm", "p, sign flips", "detectable")


class Comparison:
    """The arms of an ablation, every metric over their seeds, and each arm's paired difference to its reference.

    metrics: name -> metric path (Run.value). compared: the metrics whose differences the table shows, by default the
    first metric alone. rows: metric -> Row. differences: (metric, arm) -> Contrast.
    """

    def __init__(self, arms: list[Arm], metrics: dict[str, str], compared: Sequence[str] = ()) -> None:
        self.arms, self.metrics = arms, metrics
        self.compared = tuple(compared) or (next(iter(metrics)),)
        self.rows = {name: row_of(arms, "", name, at(path), "{:.4f}") for name, path in metrics.items()}
        found = contrasts(arms, self.rows.values())
        self.differences: dict[tuple[str, str], Contrast] = {(one.name, one.arm): one for one in found}

    def cells(self, metric: str) -> list[tuple[Arm, Cell]]:
        return list(zip(self.arms, self.rows[metric].cells, strict=True))

    def values(self, metric: str) -> dict[str, dict[int, float]]:
        """Arm -> seed -> value, without the runs that have no value."""
        return {arm.name: arm.by_seed(cell.values) for arm, cell in self.cells(metric)}

    def of_metric(self, metric: str) -> list[Contrast]:
        """The metric's differences, in the order of the arms."""
        return [one for (name, _), one in self.differences.items() if name == metric]

    def fit_sizes(self, metric: str) -> dict[str, Any]:
        """loss = a N^-b for each arm, one fit per seed, with N parameters without embeddings; means and intervals.

        size_ratio: the parameters with which the arm has the reference's loss at the grid's middle size (geometric
        mean), divided by that size. The paper reports 0.62 for 6.8B parameters (arXiv 2410.05258, section 3.2).
        """
        names = list(dict.fromkeys(arm.arm for arm in self.arms))
        fits = {name: self._fits([arm for arm in self.arms if arm.arm == name], metric) for name in names}
        sizes = [arm.facts["params_non_embedding"] for arm in self.arms if arm.arm == names[0]]
        middle = math.exp(np.mean(np.log(sizes)))
        results: dict[str, Any] = {}
        for name, by_seed in fits.items():
            shared = [seed for seed in by_seed if seed in fits[names[0]]]
            ratios = [size_ratio(fits[names[0]][seed], by_seed[seed], middle) for seed in shared]
            results[name] = {
                "a": {seed: a for seed, (a, _) in by_seed.items()},
                "b": {seed: b for seed, (_, b) in by_seed.items()},
                "exponent": interval([b for _, b in by_seed.values()]) if by_seed else None,
                "at_size": middle,
                "size_ratio": geometric_interval(ratios) if ratios and all(map(math.isfinite, ratios)) else None,
            }
        return results

    def at_equal_flops(self, metric: str) -> dict[str, dict[int, float]]:
        """Arm -> seed -> value after as many training FLOPs as the arm's reference has used at the same point.

        A value lies between the arm's own two nearest numbers of tokens, on a straight line in their logarithm. An arm
        that would have to be taken beyond its own points has no value there.
        """
        by_name, own = {arm.name: arm for arm in self.arms}, self.values(metric)
        return {
            arm.name: self._taken_at(by_name[arm.reference], arm, own) if arm.reference in by_name else own[arm.name]
            for arm in self.arms
        }

    def _taken_at(self, reference: Arm, arm: Arm, own: dict[str, dict[int, float]]) -> dict[int, float]:
        tokens = trained_tokens(reference) * reference.facts["flops_per_token"] / arm.facts["flops_per_token"]
        points = {trained_tokens(other): own[other.name] for other in self.arms if other.arm == arm.arm and own[other.name]}
        for (less, before), (more, after) in itertools.pairwise(sorted(points.items(), key=lambda point: point[0])):
            if less <= tokens <= more:
                share = math.log(tokens / less) / math.log(more / less)
                return {s: before[s] + share * (after[s] - before[s]) for s in before if s in after}
        return {}

    def _fits(self, points: list[Arm], metric: str) -> dict[int, tuple[float, float]]:
        values = [self.values(metric)[arm.name] for arm in points]
        sizes = [arm.facts["params_non_embedding"] for arm in points]
        if len(set(sizes)) < 2:  # of an unfinished grid
            return {}
        seeds = [seed for seed in values[0] if all(seed in others for others in values)]
        return {seed: power_law(sizes, [losses[seed] for losses in values]) for seed in seeds}

    def as_json(self) -> list[dict[str, Any]]:
        """Every arm with its runs, its metrics and their differences."""
        keys = ("name", "arm", "point", "reference", "variant", "overrides", "facts")
        return [
            {key: getattr(arm, key) for key in keys}
            | {"runs": [self._run(run) for run in arm.runs]}
            | {"metrics": {name: self._summary(arm, name, row.cells[i]) for name, row in self.rows.items()}}
            for i, arm in enumerate(self.arms)
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

    def _summary(self, arm: Arm, name: str, cell: Cell) -> dict[str, Any]:
        found = self.differences.get((name, arm.name))
        test = {key: getattr(found, key) for key in Difference.__dataclass_fields__} if found else None
        about = {"n": cell.n, "mean": cell.value, "sd": cell.sd, "difference": test}
        return about | {"p_holm": found.p_holm if found else None}

    def table(self) -> list[list[str]]:
        """Rows of text, the header first. A metric without a single value has no column."""
        shown = [name for name, row in self.rows.items() if any(cell.n for cell in row.cells)]
        first, *others = self.compared
        header = ["arm", "heads", "head width", "head norm", "parameters", "FLOPs/token", "n", *shown]
        header += [f"difference ({first})", *DIFFERENCE_HEADS]
        header += [head for name in others for head in (f"difference ({name})", f"95 % ({name})", f"p, Holm ({name})")]
        diverged = any(run.diverged for arm in self.arms for run in arm.runs)
        if diverged:
            header.insert(7, "diverged")
        lines = [header]
        for i, arm in enumerate(self.arms):
            line = [arm.name, *(arm.facts[key] for key in ("heads", "d", "head_norm"))]
            line += [si(arm.facts[key]) for key in ("params_non_embedding", "flops_per_token")]
            line.append(str(self.rows[first].cells[i].n))
            if diverged:
                line.append(str(sum(run.diverged is not None for run in arm.runs)))
            line += [_mean_text(self.rows[name].cells[i]) for name in shown]
            line += _difference_text(self.differences.get((first, arm.name)))
            for name in others:
                mean, spread, _, p_holm, *_ = _difference_text(self.differences.get((name, arm.name)))
                line += [mean, spread, p_holm]
            lines.append(line)
        return lines

    def notes(self, seeds: Sequence[int], epochs: float | None) -> list[str]:
        """Sentences that a reader of the table needs.

        epochs: how often training read the prepared text; 0 for data generated during training, None if it is not known.
        """
        arms = self.arms
        tokens = {run.val[-1]["tokens"] for arm in arms for run in arm.runs if run.val}
        most = ("up to " if len(tokens) > 1 else "") + si(max(tokens, default=0))
        tested = [sum(one.p is not None for one in self.of_metric(metric)) for metric in self.compared]
        counts = " to ".join(dict.fromkeys((str(min(tested)), str(max(tested)))))
        at_point = f"{arms[0].arm} at the same point of the grid" if any(arm.point for arm in arms) else arms[0].name
        read = f", {epochs:.2f} epochs of the prepared text" if epochs else ", generated during training"
        read = "" if epochs is None else read
        lines = [
            f"Seeds {', '.join(map(str, seeds))}; {most} training tokens{read}. "
            f"± is the standard deviation over seeds. A difference is the arm less {at_point}, paired by seed "
            "(same data order, shared initial weights); negative is better for a loss, positive for an accuracy.",
            f"p, Holm is corrected for the comparisons of each metric ({counts}). With n seeds p, sign flips cannot fall "
            "below 2^(1-n). Detectable: the true difference that would be found in 80 % of such experiments, given this "
            "comparison's spread.",
        ]
        off = {arm.name: arm.facts.get("params_off") or 0 for arm in arms}
        if unmatched := [f"{name} ({share:+.1%})" for name, share in off.items() if abs(share) > 0.005]:
            lines.append(f"Not matched to the reference's parameters within 0.5 %: {', '.join(unmatched)}.")
        if epochs and epochs > 1:
            lines.append("The training text was read more than once, so losses on it and on unseen text differ.")
        if mixed := mixed_precision([run for arm in arms for run in arm.runs]):
            lines.append(f"{mixed[0].upper()}{mixed[1:]}.")
        return lines


def _mean_text(cell: Cell) -> str:
    if cell.value is None:
        return "not measured"
    digits = 4 if abs(cell.value) < 1e4 else 0  # tokens
    n = f" (n = {cell.n})" if cell.n < len(cell.values) else ""
    return f"{cell.value:.{digits}f}" + (f" ± {cell.sd:.{digits}f}" if cell.sd is not None else "") + n


def _difference_text(found: Contrast | None) -> list[str]:
    """Mean, 95 % interval, p, p after Holm, p of sign flips, smallest detectable difference; "" for unknown values."""
    if found is None:
        return [""] * 6
    spread = f"{found.low:+z.4f} to {found.high:+z.4f}" if found.low is not None else ""
    least = f"{found.detectable:.4f}" if found.detectable is not None else ""
    return [f"{found.mean:+z.4f}", spread, *map(p_text, (found.p, found.p_holm, found.p_permutation)), least]


def fit_rows(fits: dict[str, Any]) -> list[list[str]]:
    """The table of the power laws."""
    rows = [["arm", "n", "exponent b", "95 % interval", "parameters for equal loss", "95 % interval"]]
    for name, fit in fits.items():
        cells = [name, str(fit["exponent"]["n"]) if fit["exponent"] else "0"]
        for found in (fit["exponent"], fit["size_ratio"]):
            if not found:
                cells += ["no fit", ""]
                continue
            known = found["low"] is not None
            cells += [f"{found['mean']:.4f}", f"{found['low']:.4f} to {found['high']:.4f}" if known else ""]
        rows.append(cells)
    return rows
