"""Train, evaluate and compare the arms of an experiment over seeds. A repeated command continues an interrupted one.

    python scripts/ablate.py experiment=ablation_v1 seeds=3 [tune=rates] [tier=gpu] [jobs=2] ['train=["steps=300"]']

experiment: a file of configs/ablations/experiment/. seeds: a number N, for the seeds 1 to N, or a list. tune=rates
first finds the learning rates of every arm. Every arm and seed is a run of train.py in runs/ablate/NAME/ARM-sSEED, which
is then evaluated. The command writes results.json, table.md and figures/ to runs/ablate/NAME/. With run=false it does not
train: it prints how many runs are left and their time, and writes the tables of the finished runs.
"""

import sys
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

sys.path.insert(0, str(Path(__file__).parent.parent))

import train  # noqa: F401  # registers its schema
from ablation.experiment import AblateConfig, refuse_unknown_arms
from ablation.jobs import run_jobs
from ablation.plan import Study
from ablation.results import Results
from ablation.study import PlannedRun, read_epochs
from configs import command
from eval.overlap import refuse_overlap
from eval.report.runs import refuse_other_settings, refuse_other_shards


@command("ablate", AblateConfig)
def main(cfg: AblateConfig) -> None:
    hydra = HydraConfig.get()
    choices = hydra.runtime.choices
    name = cfg.name or choices["experiment"] + ("" if choices["tier"].startswith("cpu") else f"_{choices['tier']}")
    if name in (".", "..") or Path(name).name != name:
        raise ValueError(f"name={name} is not the name of a folder: use name=NAME, and runs=FOLDER for another place")
    refuse_unknown_arms(cfg, list(hydra.overrides.task))
    study = Study(cfg, name)
    for text, share in (study.overlaps() or {}).items():
        refuse_overlap(f"texts.{text}" if text in cfg.texts else f"the text of {text}", share)
    if cfg.only and cfg.run:
        known = {run.name: run for run in (*study.trials(), *study.runs())}
        if cfg.only not in known:
            wrong = f"only={cfg.only} is not a run of this experiment, or its rates are not tuned yet"
            raise ValueError(f"{wrong}: use one of {', '.join(known)}")
        run_jobs([[known[cfg.only]]], 1, name, 1)
        return
    if cfg.run:
        while trials := [trial for trial in study.trials() if trial.left()]:  # until every search is over
            study.print_costs()
            run_jobs([[trial] for trial in trials], cfg.jobs, f"{name}, tuning", len(trials))
    runs = study.runs()
    for run in [*study.trials(), *runs]:  # a run may have been made, or evaluated again, by hand
        run.finished()
    left = study.describe(runs)
    study.print_costs()
    if cfg.run:
        run_jobs(left, cfg.jobs, name, len(runs))
    if finished := [run for run in runs if not run.left()]:
        write_results(study, finished)


def write_results(study: Study, runs: list[PlannedRun]) -> None:
    """Compare all runs, and write results.json, table.md and figures; print the table."""
    by_name = {arm.name: arm for arm in study.arms}
    for run in runs:
        by_name[run.arm].runs.append(run.measured())
    measured = [run for arm in study.arms for run in arm.runs]
    for context in {run.config["model"]["context"] for run in measured}:  # another context is tested at other lengths
        refuse_other_settings([run for run in measured if run.config["model"]["context"] == context])
    if not study.data:
        refuse_other_shards(measured)
    longest = max((run.config for run in runs), key=lambda config: config.steps * config.batch_tokens)
    results = Results(study.cfg, study.arms, study.tuned())
    epochs = read_epochs(longest) if study.data else None
    results.write(study.folder, len(study.planned()) - len(runs), epochs, study.overlaps())
    figures = results.draw(study.folder / "figures")
    print(f"ablation  {study.folder / 'table.md'} ({len(runs)} runs, {len(figures)} figures)", flush=True)


if __name__ == "__main__":
    main()
