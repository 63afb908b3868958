"""The lambda that training left in each differential layer: what a layer subtracts, or adds.

    python -m ablation.lambdas ablation=runs/ablate/noise [out=runs/lambdas/noise]

A differential head multiplies its values with (first map - lambda * second map). With lambda between 0 and 1 the head
subtracts a part of the second map, as arXiv 2410.05258 describes. With a negative lambda it adds the second map. With
|lambda| above 1 the second map is the larger part, and V1's norm per head removes the common scale. Reads the last
reading of the monitor from every run's metrics.jsonl, or from the run's record where its folder no longer exists; the runs
must have been trained with monitor.every=N. V2 has a lambda for every token and head, and the reading is its mean.
Writes lambdas.json, lambdas.md and figures/lambdas.png.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ablation.records import Record, records_of
from configs import command
from configs.files import read_json_lines
from eval.common import AblationEvalConfig, figure, write_findings
from eval.report.runs import ablation_in, colours_of
from eval.report.tables import markdown
from training.monitor import last_lambdas


@dataclass
class LambdasConfig(AblationEvalConfig):
    records: str = "docs/results"  # runs whose folders are gone are read from NAME/records.jsonl.gz in this folder


def rows_of(arms: list[dict[str, Any]], folder: Path, records: dict[str, Record]) -> Iterator[dict[str, Any]]:
    """For each differential arm and layer: lambda of every run, and in how many runs it is below 0 or above 1.

    arms: as in an ablation's results.json. records: by the names of the runs.
    """
    for arm in arms:
        read = {}
        for name in (run["run"] for run in arm["runs"]):
            recorded = records.get(name, {}).get("lambda", {})
            read[name] = last_lambdas(read_json_lines(folder / name / "metrics.jsonl")) or recorded
        layers = {run: {int(layer): value for layer, value in values.items()} for run, values in read.items()}
        for layer in sorted({layer for values in layers.values() for layer in values}):
            lambdas = {run: values[layer] for run, values in layers.items() if layer in values}
            yield {
                "arm": arm["name"],
                "layer": layer,
                "n": len(lambdas),
                "median": median(lambdas.values()),
                "below_0": sum(value < 0 for value in lambdas.values()),
                "above_1": sum(value > 1 for value in lambdas.values()),
                "lambda": lambdas,
            }


def table(name: str, rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [["arm", "layer", "n", "median", "smallest", "largest", "below 0", "above 1"]]
    for row in rows:
        values = [row["median"], *(end(row["lambda"].values()) for end in (min, max))]
        counts = [f"{row[key]} of {row['n']}" for key in ("below_0", "above_1")]
        lines.append([row["arm"], str(row["layer"]), str(row["n"]), *(f"{value:.3g}" for value in values), *counts])
    return f"**{name}: lambda at the end of training**\n\n{markdown(lines)}"


def squashed(values: np.ndarray) -> np.ndarray:
    """lambda -> its share of the two maps' weights, lambda / (1 + |lambda|), between -1 and 1."""
    return values / (1 + np.abs(values))


def draw(path: Path, rows: list[dict[str, Any]], shades: dict[str, str]) -> None:
    """A dot for every run's lambda at each layer, one panel per arm. The axis is squashed, since lambda has no bound."""
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    ticks = np.array([-100, -2, -1, -0.5, 0, 0.5, 1, 2, 100])
    with figure(path, 1 + 1.9 * len(arms), 3.6, columns=len(arms)) as axes:
        for ax, arm in zip(axes[0], arms, strict=True):
            for row in [row for row in rows if row["arm"] == arm]:
                values = squashed(np.array(list(row["lambda"].values())))
                x = row["layer"] + np.linspace(-0.25, 0.25, len(values) + 2)[1:-1]
                ax.plot(x, values, "o", color=shades[arm], markersize=4, alpha=0.8)
            ax.axhline(0, color="#888888", linewidth=0.8)
            ax.set_title(arm, fontsize=8)
            ax.set(xlabel="layer", xticks=[row["layer"] for row in rows if row["arm"] == arm], ylim=(-1.05, 1.05))
            ax.set_yticks(squashed(ticks), [f"{tick:g}" for tick in ticks] if ax is axes[0, 0] else [""] * len(ticks))
        axes[0, 0].set(ylabel="lambda (below 0: added)")


@command("lambdas", LambdasConfig)
def main(cfg: LambdasConfig) -> None:
    folder = Path(cfg.ablation)
    arms = ablation_in(folder)["results"]["arms"]
    rows = list(rows_of(arms, folder, records_of(folder, Path(cfg.records) / folder.name)))
    if not rows:
        wrong = f"{folder} has no run folder and no record with a reading of lambda"
        fix = "repeat the ablation with a differential arm and name=OTHER records=none 'train=[\"monitor.every=100\"]'"
        raise ValueError(f"{wrong}: {fix}")
    shades = colours_of(arms)
    write_findings("lambdas", cfg, {"rows": rows}, table(folder.name, rows), lambda path: draw(path, rows, shades))


if __name__ == "__main__":
    main()
