"""What the two maps of differential heads do while a model learns associative recall: a reading at every kept checkpoint.

    python -m ablation.two_maps ablation=runs/ablate/NAME [share=0.8] [samples=64] [out=runs/two_maps]

Accuracy, each map's share of mass on the distractors and the correlation of the two, as eval.mqar measures them at one share of
distractors. The runs must have kept their checkpoints: 'train=["checkpoint.every=100","checkpoint.keep=0"]'.
Writes two_maps.json, two_maps.md and figures/two_maps.png.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ablation.findings import FindingsConfig, write_findings
from configs import command
from eval.common import figure, plus_minus
from eval.mqar import MqarEvalConfig, accuracy, read_attention, sources_of
from eval.report.runs import ablation_in, colours_of
from eval.report.statistics import mean_sd
from eval.report.tables import markdown
from training.checkpoint import checkpoints, load_run
from training.distributed import pick_device

FIX = """repeat the ablation with name=OTHER records=none 'train=["checkpoint.every=100","checkpoint.keep=0"]'"""
BATCH = 32  # contexts per forward pass
READ = {"map": "mass of the map", "map_1": "mass of map 1", "map_2": "mass of map 2", "correlation": "correlation"}


@dataclass
class TwoMapsConfig(FindingsConfig):
    share: Annotated[float, "[0, 1)"] = 0.8  # of distractors
    samples: Annotated[int, "[1, inf)"] = 64  # contexts for each checkpoint
    device: str = "auto"  # auto | cpu | cuda


def readings_of(folder: Path, cfg: TwoMapsConfig) -> list[dict[str, Any]]:
    """A reading of each kept checkpoint of the run in `folder`, oldest first."""
    settings = MqarEvalConfig(run=str(folder), samples=cfg.samples, shares=[cfg.share])
    readings = []
    for path in checkpoints(folder):
        run = load_run(folder, pick_device(cfg.device), int(path.name.removeprefix("step_")))
        (source,) = sources_of(run, settings)
        samples = [source.draw("eval", i, settings.seed) for i in range(cfg.samples)]
        attention = read_attention(run.model, samples, BATCH)
        reading = {"step": run.step, "accuracy": accuracy(run.model, samples, BATCH)["accuracy"]}
        reading |= {name: attention[name]["distractors"] for name in ("map", "map_1", "map_2") if name in attention}
        if by_layer := [layer["correlation"] for layer in attention["layers"] if "correlation" in layer]:
            reading |= {"correlation": attention["correlation"], "correlation_by_layer": by_layer}
        readings.append(reading)
    return readings


def over_runs(readings: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation over runs (None for one run) of every number of the readings at one step."""
    numbers = [name for name, value in readings[0].items() if isinstance(value, float)]
    spreads = {name: mean_sd([reading[name] for reading in readings]) for name in numbers}
    return {"step": readings[0]["step"], "n": len(readings)} | {n: {"mean": m, "sd": sd} for n, (m, sd) in spreads.items()}


def table(name: str, cfg: TwoMapsConfig, arms: list[dict[str, Any]]) -> str:
    lines = [["arm", "step", "n", "accuracy", *READ.values()]]
    for arm in arms:
        for row in arm["steps"]:
            numbers = (_number(row.get(key)) for key in ("accuracy", *READ))
            lines.append([arm["arm"], str(row["step"]), str(row["n"]), *numbers])
    about = f"Means ± standard deviations over runs, at {round(100 * cfg.share)} % of distractors; masses on the distractors."
    return f"**{name}: the two maps during training**\n\n{markdown(lines)}\n{about}\n"


def _number(spread: dict[str, Any] | None) -> str:
    return "n/a" if spread is None else plus_minus(spread["mean"], float("nan") if spread["sd"] is None else spread["sd"])


def draw(path: Path, arms: list[dict[str, Any]], shades: dict[str, str]) -> None:
    """Accuracy, the second map's mass on the distractors and the correlation against steps: a thin line for every run."""
    panels = {"accuracy": "accuracy", "map_2": "mass of map 2 on distractors", "correlation": "correlation on distractors"}
    with figure(path, 4.2 * len(panels), 3.6, columns=len(panels)) as axes:
        for ax, (key, title) in zip(axes[0], panels.items(), strict=True):
            for arm in [arm for arm in arms if key in arm["steps"][0]]:
                steps, shade = [row["step"] for row in arm["steps"]], shades[arm["arm"]]
                for run in arm["runs"].values():
                    ax.plot(steps, [reading[key] for reading in run], color=shade, linewidth=0.7, alpha=0.5)
                ax.plot(steps, [row[key]["mean"] for row in arm["steps"]], color=shade, label=arm["arm"])
            ax.set(title=title, xlabel="step", ylim=(-1.02 if key == "correlation" else -0.02, 1.02))
        axes[0, 0].legend()


def read_arm(folder: Path, arm: dict[str, Any], cfg: TwoMapsConfig) -> dict[str, Any]:
    """The readings of an arm's runs, and their means at every step. ValueError if the runs lack checkpoints of one step."""
    names = [run["run"] for run in arm["runs"] if not run.get("diverged")]  # whose checkpoints end early
    runs = {name: readings_of(folder / name, cfg) for name in names}
    steps = {name: [reading["step"] for reading in readings] for name, readings in runs.items()}
    for name in names:
        if not steps[name] or steps[name] != steps[names[0]]:
            kept = f"checkpoints of the steps {steps[name]}, {names[0]} of {steps[names[0]]}"
            raise ValueError(f"{folder / name} has {kept}: {FIX}")
    at_steps = zip(*runs.values(), strict=True)
    return {"arm": arm["name"], "runs": runs, "steps": [over_runs(list(readings)) for readings in at_steps]}


@command("two_maps", TwoMapsConfig)
def main(cfg: TwoMapsConfig) -> None:
    folder = Path(cfg.ablation)
    study = ablation_in(folder)["results"]["arms"]
    arms = [arm for arm in (read_arm(folder, arm, cfg) for arm in study) if arm["runs"]]
    if not any("map_2" in row for arm in arms for row in arm["steps"]):
        raise ValueError(f"{folder} has no finished run of a differential arm: use model=diff for one of its arms")
    text, shades = table(folder.name, cfg, arms), colours_of(study)
    write_findings("two_maps", cfg, {"arms": arms}, text, lambda path: draw(path, arms, shades))


if __name__ == "__main__":
    main()
