"""What the two maps of differential heads do while a model learns associative recall: a reading at every kept checkpoint.

    python -m ablation.two_maps ablation=runs/ablate/NAME [share=0.8] [samples=64] [out=runs/two_maps]

If the second map cancelled noise that the first map has, the masses of the two maps on the distractors would be correlated.
For each arm and checkpoint: accuracy, each map's share of mass on the distractors and that correlation, as eval.mqar measures
them at one share of distractors, over the arm's runs. Arms without a second map have the mass of their one map. The runs must
be of an ablation on data=mqar whose checkpoints were kept: 'train=["checkpoint.every=100","checkpoint.keep=0"]'.
Writes two_maps.json, two_maps.md and figures/two_maps.png.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from configs import command
from eval.common import AblationEvalConfig, figure, plus_minus, progress, write_findings
from eval.mqar import MqarEvalConfig, accuracy, read_attention, sources_of
from eval.report.runs import ablation_in, colours_of
from eval.report.statistics import mean_sd
from eval.report.tables import markdown
from training.checkpoint import checkpoints, load_run
from training.distributed import pick_device

FIX = """repeat the ablation with name=OTHER records=none 'train=["checkpoint.every=100","checkpoint.keep=0"]'"""
READ = {"map": "mass of the map", "map_1": "mass of map 1", "map_2": "mass of map 2", "correlation": "correlation"}


@dataclass
class TwoMapsConfig(AblationEvalConfig):
    share: Annotated[float, "[0, 1)"] = 0.8  # of distractors
    samples: Annotated[int, "[1, inf)"] = 64  # contexts for each checkpoint
    batch: Annotated[int, "[1, inf)"] = 32  # contexts per forward pass
    device: str = "auto"  # auto | cpu | cuda


def read_run(folder: Path, cfg: TwoMapsConfig) -> list[dict[str, Any]]:
    """A reading of each kept checkpoint of the run in `folder`, oldest first."""
    settings = MqarEvalConfig(run=str(folder), batch=cfg.batch, samples=cfg.samples, shares=[cfg.share])
    readings = []
    for path in checkpoints(folder):
        run = load_run(folder, pick_device(cfg.device), int(path.name.removeprefix("step_")))
        (source,) = sources_of(run, settings)
        samples = [source.draw("eval", i, settings.seed) for i in range(cfg.samples)]
        attention = read_attention(run.model, samples, cfg.batch)
        reading = {"step": run.step, "accuracy": accuracy(run.model, samples, cfg.batch)["accuracy"]}
        reading |= {name: attention[name]["distractors"] for name in ("map", "map_1", "map_2") if name in attention}
        if by_layer := [layer["correlation"] for layer in attention["layers"] if "correlation" in layer]:
            reading |= {"correlation": attention["correlation"], "correlation_by_layer": by_layer}
        readings.append(reading)
    return readings


def over_runs(readings: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation over runs (None for a single run) of every number of the readings at one step."""
    numbers = [name for name, value in readings[0].items() if isinstance(value, float)]
    spreads = {name: mean_sd([reading[name] for reading in readings]) for name in numbers}
    return {"step": readings[0]["step"], "n": len(readings)} | {n: {"mean": m, "sd": sd} for n, (m, sd) in spreads.items()}


def table(name: str, cfg: TwoMapsConfig, arms: list[dict[str, Any]]) -> str:
    """A row for each arm and step, as Markdown."""
    lines = [["arm", "step", "n", "accuracy", *READ.values()]]
    for arm in arms:
        for row in arm["steps"]:
            numbers = (_number(row.get(key)) for key in ("accuracy", *READ))
            lines.append([arm["arm"], str(row["step"]), str(row["n"]), *numbers])
    about = f"Means ± standard deviations over runs, at {round(100 * cfg.share)} % of distractors; masses on the distractors."
    return f"**{name}: the two maps during training**\n\n{markdown(lines)}\n{about}\n"


def _number(found: dict[str, Any] | None) -> str:
    return "n/a" if found is None else plus_minus(found["mean"], math.nan if found["sd"] is None else found["sd"])


def draw(path: Path, arms: list[dict[str, Any]], shades: dict[str, str]) -> None:
    """Accuracy, the second map's mass on the distractors and the correlation against steps: a thin line for every run."""
    panels = {"accuracy": "accuracy", "map_2": "mass of map 2 on distractors", "correlation": "correlation on distractors"}
    with figure(path, 4.2 * len(panels), 3.6, columns=len(panels)) as axes:
        for ax, (key, title) in zip(axes[0], panels.items(), strict=True):
            for arm in [arm for arm in arms if key in arm["steps"][0]]:
                for run in arm["runs"].values():
                    x, y = [reading["step"] for reading in run], [reading[key] for reading in run]
                    ax.plot(x, y, color=shades[arm["arm"]], linewidth=0.7, alpha=0.5)
                x, y = [row["step"] for row in arm["steps"]], [row[key]["mean"] for row in arm["steps"]]
                ax.plot(x, y, color=shades[arm["arm"]], label=arm["arm"])
            ax.set_ylim(*((-1.02, 1.02) if key == "correlation" else (-0.02, 1.02)))
            ax.set(title=title, xlabel="step")
        axes[0, 0].legend()


@command("two_maps", TwoMapsConfig)
def main(cfg: TwoMapsConfig) -> None:
    folder = Path(cfg.ablation)
    results = ablation_in(folder)["results"]["arms"]
    study = [
        arm | {"runs": [run for run in arm["runs"] if not run.get("diverged")]} for arm in results
    ]  # their checkpoints end early
    study = [arm for arm in study if arm["runs"]]
    if not study:
        raise ValueError(f"{folder} has no finished runs yet: finish the study with scripts/ablate.py first")
    arms = []
    with progress("two_maps", sum(len(arm["runs"]) for arm in study)) as bar:
        for arm in study:
            runs = {}
            for name in (run["run"] for run in arm["runs"]):
                runs[name] = read_run(folder / name, cfg)
                steps = [[reading["step"] for reading in runs[other]] for other in (name, next(iter(runs)))]
                if not steps[0] or steps[0] != steps[1]:
                    kept = (
                        f"checkpoints of the steps {steps[0]}, the arm's first run of {steps[1]}"
                        if steps[0]
                        else "no checkpoints"
                    )
                    raise ValueError(f"{folder / name} has {kept}: {FIX}")
                bar.update()
            readings = [over_runs(list(at_step)) for at_step in zip(*runs.values(), strict=True)]
            arms.append({"arm": arm["name"], "runs": runs, "steps": readings})
    if not any("map_2" in row for arm in arms for row in arm["steps"]):
        raise ValueError(f"{folder} has no differential arm: use model=diff for one of its arms")
    text, shades = table(folder.name, cfg, arms), colours_of(study)
    write_findings("two_maps", cfg, {"arms": arms}, text, lambda path: draw(path, arms, shades))


if __name__ == "__main__":
    main()
