"""The lambda that training left in each differential layer: what a layer subtracts, or adds.

    python -m ablation.lambdas ablation=runs/ablate/noise [out=runs/lambdas/noise]

Reads the monitor's last reading (of V2 a mean over tokens and heads) from every run's metrics.jsonl or record; the runs must
have been trained with monitor.every=N. Writes lambdas.json, lambdas.md and figures/lambdas.png.
"""

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ablation.findings import RecordedConfig, read_study, write_findings
from ablation.records import Record
from configs import command
from configs.files import read_json_lines
from eval.common import figure
from eval.report.runs import colours_of
from eval.report.tables import markdown
from training.monitor import last_lambdas


def rows_of(arms: list[dict[str, Any]], folder: Path, records: dict[str, Record]) -> Iterator[dict[str, Any]]:
    """For each arm of a results.json and layer with readings of lambda: lambda of every run, how many are below 0, above 1."""
    for arm in arms:
        layers = {}
        for name in (run["run"] for run in arm["runs"]):
            read = last_lambdas(read_json_lines(folder / name / "metrics.jsonl")) or records.get(name, {}).get("lambda", {})
            layers[name] = {int(layer): value for layer, value in read.items()}
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
    lines = [["arm", "layer", "n", "median", "smallest", "largest", "below 0", "above 1"]]
    for row in rows:
        values = [row["median"], *(end(row["lambda"].values()) for end in (min, max))]
        counts = [f"{row[key]} of {row['n']}" for key in ("below_0", "above_1")]
        lines.append([row["arm"], str(row["layer"]), str(row["n"]), *(f"{value:.3g}" for value in values), *counts])
    return f"**{name}: lambda at the end of training**\n\n{markdown(lines)}"


def draw(path: Path, rows: list[dict[str, Any]], shades: dict[str, str]) -> None:
    """A dot for every run's lambda at each layer, one panel per arm. Beyond -1 and 1 the axis is logarithmic."""
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    with figure(path, 1 + 1.9 * len(arms), 3.6, columns=len(arms)) as axes:
        for ax, arm in zip(axes[0], arms, strict=True):
            for row in [row for row in rows if row["arm"] == arm]:
                x = row["layer"] + np.linspace(-0.25, 0.25, row["n"] + 2)[1:-1]
                ax.plot(x, list(row["lambda"].values()), "o", color=shades[arm], markersize=4, alpha=0.8)
            ax.axhline(0, color="#888888", linewidth=0.8)
            ax.set_title(arm, fontsize=8)
            ax.set_yscale("symlog", linthresh=1)
            ax.set(xlabel="layer", xticks=[row["layer"] for row in rows if row["arm"] == arm])
        axes[0, 0].set(ylabel="lambda (below 0: added)")


@command("lambdas", RecordedConfig)
def main(cfg: RecordedConfig) -> None:
    study, records = read_study(cfg)
    folder, arms = Path(cfg.ablation), study["results"]["arms"]
    rows = list(rows_of(arms, folder, records))
    if not rows:
        raise ValueError(f"{folder} has no reading of lambda: train a differential arm with 'train=[\"monitor.every=100\"]'")
    shades = colours_of(arms)
    write_findings("lambdas", cfg, {"rows": rows}, table(folder.name, rows), lambda path: draw(path, rows, shades))


if __name__ == "__main__":
    main()
