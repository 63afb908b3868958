"""Train, evaluate and compare the arms of an experiment over seeds. A repeated command continues an interrupted one.

    python scripts/ablate.py experiment=ablation_v1 seeds=3 [tune=rates] [tier=gpu] [jobs=2] [launcher=slurm]
        ['train=["steps=300"]']

experiment: a file of configs/ablations/experiment/. seeds: a number N, for the seeds 1 to N, or a list. tune=rates
first finds every arm's own learning rates. Every arm and seed is a run of train.py in runs/ablate/NAME/ARM-sSEED, which
is then evaluated. The command writes results.json, table.md and figures/ to runs/ablate/NAME/. With run=false it does not
train: it prints how many runs are left and their time, and writes the tables of the finished runs.
"""

import importlib
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import train  # noqa: F401  # registers its schema
from ablation.experiment import AblateConfig, refuse_unknown_arms
from ablation.jobs import Team, environment, run_jobs, visible_gpus
from ablation.plan import Study
from ablation.results import Results, write_page
from ablation.study import PlannedRun, read_epochs
from configs import command
from configs.composing import overrides_of, quoted
from eval.overlap import refuse_overlap
from eval.report.runs import refuse_other_settings, refuse_other_shards
from eval.report.tables import markdown, si
from training.run import flatten

OmegaConf.register_new_resolver("times", lambda factor, number: round(factor * number), replace=True)


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
    if cfg.only and not cfg.run:
        raise ValueError(f"only={cfg.only} trains one run and run=false trains none: leave out one of them")
    if cfg.only:
        carry_out_alone(study, cfg.only, hydra.job.num if hydra.mode == RunMode.MULTIRUN else None)
        return
    if cfg.run:
        find_rates(study)
    runs = study.runs()
    for run in [*study.trials(), *runs]:  # a run may have been made, or evaluated again, by hand
        if not run.record and not run.left():
            run.finished()
    left = study.describe(runs)
    if left and cfg.run:
        carry_out(study, left, name, len(runs))
    if not cfg.run:
        study.print_costs()
        runs = [run for run in runs if not run.left()]
    elif failed := [run for run in runs if run.left()]:
        raise ValueError(f"{len(failed)} of {len(runs)} runs are not finished, {failed[0].reason()}")
    if runs:
        write_results(study, runs)
    else:
        write_trials(study)


def find_rates(study: Study) -> None:
    """Carry out the trials, round after round, until every search is over."""
    untried = {study.tuned_as(search.arm) for search in study.searches() if not search.scores}
    names = [f"{arm.name}-s{seed}" for arm in study.arms for seed in study.seeds if study.tuned_as(arm) in untried]
    if begun := [study.folder / name for name in names if (study.folder / name / "config.yaml").is_file()]:
        wrong = f"{begun[0]} was trained before its learning rates were tuned"  # the tuning would end with another refusal
        raise ValueError(f"{wrong}: start anew with name=OTHER, or leave out tune=")
    while trials := [trial for trial in study.trials() if trial.left()]:
        carry_out(study, [[trial] for trial in trials], f"{study.name}, tuning", len(trials))
        # The jobs of a launcher only print their errors.
        if failed := [trial for trial in trials if trial.left()]:
            raise ValueError(f"{len(failed)} of {len(trials)} trials are not finished, {failed[0].reason()}")


def carry_out(study: Study, chains: list[list[PlannedRun]], title: str, total: int) -> None:
    """Start the runs on this machine or with a launcher."""
    study.print_costs()
    if study.cfg.launcher.plugin:
        first, later = [chain[0] for chain in chains], [run for chain in chains for run in chain[1:]]
        for wave in filter(None, (first, later)):  # shorter runs branch off the first run of their chain
            run_by_launcher(study.cfg, study.folder, wave)
    else:
        run_jobs(chains, study.cfg.jobs, title, total)


def carry_out_alone(study: Study, only: str, job: int | None) -> None:
    """Carry out the one run of only= on this machine. job: the run's number if a launcher started this command.

    An error is raised, but a launcher's job only prints it.
    """
    known = {run.name: run for run in (*study.trials(), *study.runs())}
    if only not in known:
        raise ValueError(f"only={only} is not a run of this experiment: use one of {', '.join(known)}")
    run = known[only]
    try:
        with Team() as team:
            team.carry_out(run, environment(job or 0, 1, visible_gpus()))
        ending = "stopped" if team.stopping else run.finished()
    except ValueError as error:
        if job is None:
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        return
    print(f"{run.folder}: {ending}", flush=True)
    if team.stopping:
        team.leave()


def write_trials(study: Study) -> None:
    """Write the results of the finished trials, as long as none of the runs to compare is finished."""
    keys = study.cfg.tune.keys
    lines = [["arm", *keys, study.cfg.tune.metric, "tokens"]]
    for trial in study.trials():
        if not trial.left():
            run, flat = trial.measured(), flatten(asdict(trial.config))
            arm = next(study.tuned_as(arm) for arm in study.arms if arm.name == trial.arm)
            rates = [f"{flat[key]:g}" for key in keys]
            lines.append([arm, *rates, f"{study.judged(trial):.4f}", si(run.value("train.tokens") or 0)])
    tuning = f"{len(lines) - 1} trials of the tuning, " if keys else ""
    title = f"{study.name}, under way: {tuning}no run of the comparison yet"
    note = f"Seeds {', '.join(map(str, study.cfg.tune.seeds))}; one run per line; training logs the `train.` column."
    trials = [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
    results = {"title": title, "arms": [], "trials": trials}
    write_page(study.folder, study.cfg, results, study.seeds, [markdown(lines).rstrip(), note] if keys else [])


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


def run_by_launcher(cfg: AblateConfig, folder: Path, left: list[PlannedRun]) -> None:
    """Start each run with a Hydra launcher, which calls this script in a sweep over only=."""
    launcher = cfg.launcher
    try:
        importlib.import_module(launcher.module or "hydra")
    except ImportError:
        needs = f"launcher={launcher.plugin} needs the package '{launcher.package}'"
        raise ValueError(f"{needs}: pip install {launcher.package}") from None
    overrides = [o for o in HydraConfig.get().overrides.task if not o.startswith(("launcher", "only="))]
    options = overrides_of({f"hydra.launcher.{key}": value for key, value in launcher.options.items()})
    sweep = [f"hydra/launcher={launcher.plugin}", *options, quoted(f"hydra.sweep.dir={folder}")]
    names = "only=" + ",".join(run.name for run in left)
    arguments = [sys.executable, str(ROOT / "scripts" / "ablate.py"), "-m", *overrides, *sweep, names]
    done = subprocess.run(arguments, env=environment(0, launcher.options.get("n_jobs", 1), []))
    if done.returncode:
        raise ValueError(f"launcher={launcher.plugin} ended with exit code {done.returncode}: see its messages above")


if __name__ == "__main__":
    main()
