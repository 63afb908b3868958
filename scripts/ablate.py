"""Train, evaluate and compare the arms of an experiment over seeds. A repeated command continues an interrupted one.

    python scripts/ablate.py experiment=ablation_v1 seeds=3 [tune=rates] [tier=gpu] [jobs=2] [launcher=slurm]
        ['train=["steps=300"]']

experiment: a file of configs/ablations/experiment/. seeds: a number N, for the seeds 1 to N, or a list. tune=rates
first finds every arm's own learning rates. Every arm and seed is a run of train.py in runs/ablate/NAME/ARM-sSEED, which
is then evaluated. The command writes results.json, table.md, differences.md (the differences at the last point of the
grid) and figures/ to runs/ablate/NAME/. With run=false it does not train: it prints the runs that are left and their cost,
and writes the tables of the finished runs.
"""

import importlib
import subprocess
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import train  # noqa: F401  # registers its schema
from ablation import tuning
from ablation.experiment import (
    AblateConfig,
    arm_list,
    compare_parameters,
    evaluation_commands,
    refuse_branches,
    refuse_metrics,
    refuse_own_shards,
    refuse_tuning_points,
    refuse_unknown_arms,
    seed_list,
    texts_of,
)
from ablation.jobs import Team, environment, run_jobs, visible_gpus
from ablation.records import TRIAL, recorded_vocabulary, records_of
from ablation.results import Results, write_page
from ablation.study import PlannedRun, describe_model, read_epochs, train_config, training_flops, trunk_ended_early
from ablation.tuning import Point, Tuned
from configs import USER_ERRORS, command, explain
from configs.composing import merged, overrides_of, quoted
from data.config import DataConfig
from eval.common import variant
from eval.overlap import overlaps, refuse_overlap
from eval.report.runs import Arm, give_colours, refuse_other_settings, refuse_other_shards
from eval.report.tables import markdown, si
from eval.texts import Texts, prepared
from training.checkpoint import checkpoints
from training.run import TrainConfig, flatten
from training.schedule import decay_start

OmegaConf.register_new_resolver("times", lambda factor, number: round(factor * number), replace=True)


@command("ablate", AblateConfig)
def main(cfg: AblateConfig) -> None:
    hydra = HydraConfig.get()
    choices = hydra.runtime.choices
    name = cfg.name or choices["experiment"] + ("" if choices["tier"].startswith("cpu") else f"_{choices['tier']}")
    task = list(hydra.overrides.task)
    refuse_unknown_arms(cfg, task)
    study = Study(cfg, name)
    for text, share in study.overlaps().items():
        refuse_overlap(f"texts.{text}" if text in cfg.texts else f"the text of {text}", share)
    if cfg.only and not cfg.run:
        raise ValueError(f"only={cfg.only} trains one run and run=false trains none: leave out one of them")
    if cfg.only:
        study.carry_out_alone(cfg.only, hydra.job.num if hydra.mode == RunMode.MULTIRUN else None)
        return
    study.print_costs()
    if cfg.run:
        study.find_rates(f"{name}, tuning", task)
    runs = study.runs()
    study.write_own_records([*study.trials(), *runs])
    left = study.describe(runs)
    if left and cfg.run:
        study.carry_out(left, name, len(runs), task)
    if not cfg.run:
        runs = [run for run in runs if not run.left()]
    elif failed := [run for run in runs if run.left()]:
        raise ValueError(f"{len(failed)} of {len(runs)} runs are not finished, {failed[0].reason()}")
    if runs:
        study.write_results(runs)
    else:
        study.write_trials()


@dataclass
class Search:
    """An arm's search for its learning rates. scores: those of finished points. waits: trials are not finished."""

    arm: Arm
    runs: list[PlannedRun] = field(default_factory=list)
    scores: dict[Point, tuning.Score] = field(default_factory=dict)
    waits: bool = False


class Study:
    """An experiment in progress: its arms, the trials for their learning rates, and the runs to compare."""

    def __init__(self, cfg: AblateConfig, name: str) -> None:
        self.cfg, self.name, self.folder = cfg, name, Path(cfg.runs) / name
        self.seeds = seed_list(cfg.seeds)
        self.texts = Texts()
        self._known: dict[str, PlannedRun] = {}
        self._configs: dict[str, TrainConfig] = {}  # an arm's own
        tuning.check(cfg.tune, self.seeds)
        refuse_tuning_points(cfg)
        self.evaluations = evaluation_commands(cfg)
        refuse_metrics(cfg, self.evaluations)
        self.records = records_of(self.folder, *(Path(cfg.records) / study for study in (cfg.records_of or name, name)))
        self.recorded = None if cfg.run else recorded_vocabulary(self.records.values())
        self.arms = arm_list(cfg)
        for arm in self.arms:
            arm.overrides = merged(cfg.tier.train, cfg.common, cfg.train, arm.overrides)
            config = self._configs[arm.name] = self._config(arm, [])
            arm.variant = variant({"model": asdict(config.model)})
            arm.facts = describe_model(config)
        refuse_own_shards(cfg, self.evaluations, self._configs)
        if cfg.branch:
            refuse_branches(self.arms, self._configs)
        give_colours(self.arms)  # of all arms: an arm keeps its colour while others have no finished run
        compare_parameters(self.arms, cfg.matched)

    def _config(self, arm: Arm, own: list[str]) -> TrainConfig:
        """An arm's configuration. own: overrides of values outside of the model, applied without composing again."""
        try:
            return train_config(arm.overrides, own, self.recorded)
        except USER_ERRORS as error:
            raise ValueError(f"arm {arm.name}: {explain(error, TrainConfig)}") from None

    def _run(self, arm: Arm, seed: int, name: str, more: list[str], evaluations: list[list[str]]) -> PlannedRun:
        """The run `name`, made once."""
        if name in self._known:
            return self._known[name]
        folder = self.folder / name
        config = replace(self._config(arm, more), seed=seed, run_dir=str(folder), resume=True)
        overrides = merged(arm.overrides, more, [f"seed={seed}", quoted(f"run_dir={folder}"), "resume=true"])
        flops, cfg = arm.facts["flops_per_token"], self.cfg
        run = PlannedRun(arm.name, seed, folder, overrides, config, evaluations, flops, cfg.spikes, self.texts)
        run.take_over(self.records.get(name))
        self._known[name] = run
        return run

    @property
    def data(self) -> DataConfig | None:
        """The data of the first arm. None if they are not on this machine, so that the table comes from records alone."""
        data = self._configs[self.arms[0].name].data
        return data if prepared(data) else None

    def overlaps(self) -> dict[str, float]:
        """Test text -> the share of the text that occurs in the training text of the first arm."""
        texts = texts_of(self.cfg)
        return overlaps(self.data, texts, self.folder / "overlap.json") if texts and self.data else {}

    # Tuning

    def trials(self) -> list[PlannedRun]:
        """The known trials of all arms: finished trials, and the trials that the search wants next."""
        return [trial for search in self._searches() for trial in search.runs]

    def _searches(self) -> list[Search]:
        """The search of every arm, at the points of the grid for tuning: `tune.at`, all with `tune.each`, or the last."""
        if not self.cfg.tune.keys:
            return []
        grid = list(self.cfg.grid or [""])
        points = grid if self.cfg.tune.each else [self.cfg.tune.at or grid[-1]]
        return [search for point in points for search in self._searches_at(point)]

    def _searches_at(self, point: str) -> list[Search]:
        """The search of every arm at one point of the grid.

        With `tune.exchange`, no search is over before all are, because one arm's best point is a trial of the others.
        """
        searches = [Search(arm) for arm in self.arms if arm.point == point]
        for search in searches:
            while not search.waits and (points := tuning.wanted(self.cfg.tune, search.scores)):
                self._try(search, points)
        if not self.cfg.tune.exchange:
            return searches
        if not any(search.waits for search in searches):
            more = tuning.exchanged({search.arm.arm: search.scores for search in searches})
            for search in searches:
                self._try(search, more[search.arm.arm])
                for _ in range(self.cfg.tune.widen):
                    if not search.waits:
                        self._try(search, tuning.beyond(self.cfg.tune, search.scores))
        if any(search.waits for search in searches):
            return [replace(search, waits=True) for search in searches]
        return searches

    def _try(self, search: Search, points: list[Point]) -> None:
        """Add the trials at the points to the search."""
        seeds = self.cfg.tune.seeds
        for point in points:
            mine = [self._trial(search.arm, point, seed) for seed in seeds]
            search.runs += mine
            if any(trial.left() for trial in mine):
                search.waits = True
            else:
                search.scores[point] = tuning.score(self.cfg.tune, [self._judged(trial) for trial in mine])

    def _trial(self, arm: Arm, point: Point, seed: int) -> PlannedRun:
        pairs = list(zip(self.cfg.tune.keys, point, strict=True))
        rates = [f"{key}={value:g}" for key, value in pairs]
        short = "-".join(f"{key.rsplit('.', 1)[-1]}{value:g}" for key, value in pairs)
        more = merged(self.cfg.tune.train, rates)
        return self._run(arm, seed, f"{TRIAL}{self._tuned_as(arm)}-{short}-s{seed}", more, [])

    def _tuned_as(self, arm: Arm) -> str:
        """The name of the arm's search: one for all points of the grid, or with `tune.each` one for each."""
        return arm.name if self.cfg.tune.each else arm.arm

    def find_rates(self, title: str, task: list[str]) -> None:
        """Carry out the trials, round after round, until every search is over."""
        self._refuse_untuned_runs()
        while trials := [trial for trial in self.trials() if trial.left()]:
            self.carry_out([[trial] for trial in trials], title, len(trials), task)
            # The jobs of a launcher only print their errors.
            if failed := [trial for trial in trials if trial.left()]:
                raise ValueError(f"{len(failed)} of {len(trials)} trials are not finished, {failed[0].reason()}")

    def _refuse_untuned_runs(self) -> None:
        """ValueError if the folder has a run of an arm without a finished trial: the tuning would end with this refusal."""
        for search in self._searches():
            mine = [arm for arm in self.arms if self._tuned_as(arm) == self._tuned_as(search.arm)]
            folders = [self.folder / f"{arm.name}-s{seed}" for arm in mine for seed in self.seeds]
            begun = [folder for folder in folders if (folder / "config.yaml").is_file()]
            if begun and not search.scores:
                wrong = f"{begun[0]} was trained before its learning rates were tuned"
                raise ValueError(f"{wrong}: start anew with name=OTHER, or leave out tune=")

    def _judged(self, trial: PlannedRun) -> float:
        """The number that judges a finished trial; infinity if the trial diverged."""
        found = trial.measured().value(self.cfg.tune.metric)
        if found is None and not trial.diverged:
            wrong = f"{trial.folder} has no {self.cfg.tune.metric}, which judges the trials"
            raise ValueError(f"{wrong}: repeat the trial (add records=none if the trial's folder no longer exists)")
        return float("inf") if found is None else found

    def tuned(self) -> dict[str, Tuned]:
        """Name of a search -> the result of its trials; searches that are not over are left out."""
        found = {}
        for search in self._searches():
            if not search.waits:
                found[self._tuned_as(search.arm)] = result = tuning.tuned(self.cfg.tune, search.scores)
                measured = [run.measured() for run in search.runs]
                tokens = [round(run.value("train.tokens") or 0) for run in measured]
                result.tokens, result.longest = sum(tokens), max(tokens)
                result.seconds = sum(run.value("train.seconds") or 0 for run in measured)
        return found

    # The runs that are compared

    def runs(self) -> list[PlannedRun]:
        """Every arm at every seed, seed by seed, so that an interrupted ablation has complete comparisons.

        Arms with fewer seeds come last. A study with tuning leaves out arms whose tuning is not finished.
        """
        tuned, runs = self.tuned(), []
        pairs = [(seed, arm) for seed in self.seeds for arm in self.arms if seed in self._seeds_of(arm)]
        for seed, arm in sorted(pairs, key=lambda pair: pair[1].arm in self.cfg.fewer_seeds):
            result = tuned.get(self._tuned_as(arm))
            if self.cfg.tune.keys and not result:
                continue
            rates = [f"{key}={value:g}" for key, value in result.best.items()] if result else []
            more = [*rates, *self._branching(arm, seed)]
            runs.append(self._run(arm, seed, f"{arm.name}-s{seed}", more, self.evaluations))
        return runs

    def planned(self) -> int:
        """The number of runs of the whole study, with those of arms whose tuning is not finished."""
        return sum(len(self._seeds_of(arm)) for arm in self.arms)

    def _seeds_of(self, arm: Arm) -> list[int]:
        return self.seeds[: self.cfg.fewer_seeds.get(arm.arm)]

    def _branching(self, arm: Arm, seed: int) -> list[str]:
        """The overrides with which an arm's shorter runs branch off the longest run before its decay."""
        if not self.cfg.branch:
            return []
        points = {other.name: self._configs[other.name] for other in self.arms if other.arm == arm.arm}
        trunk = max(points, key=lambda name: points[name].steps)
        if arm.name == trunk:
            at = {decay_start(config.steps, config.optim) for name, config in points.items() if name != trunk}
            return [f"checkpoint.at={sorted(at)}"]
        folder, own = self.folder / f"{trunk}-s{seed}", points[arm.name]
        recorded = folder.name in self.records and not checkpoints(folder)
        if recorded or trunk_ended_early(folder, own):
            return []  # without a trunk the run is trained as a whole
        return [quoted(f"branch_from={folder}")]

    def describe(self, runs: list[PlannedRun]) -> list[list[PlannedRun]]:
        """Print the arms and the number of finished runs. Returns the chains of unfinished runs, longest run first."""
        width = max(len(arm.name) for arm in self.arms)
        for arm in self.arms:
            off = arm.facts["params_off"]
            against = "" if off is None else f" ({off:+.2%})"
            print(
                f"{arm.name:<{width}}  {arm.facts['params_non_embedding']:>12,} parameters{against}, d_ff {arm.facts['d_ff']}, "
                f"{arm.facts['flops_per_token'] / 1e6:.2f} MFLOPs per token"
            )
        left = [run for run in runs if run.left()]
        waiting = self.planned() - len(runs)
        untuned = f" (not counted: {waiting} run{'s' * (waiting > 1)} of arms that are not tuned yet)" if waiting else ""
        print(f"{self.name}: {len(runs)} runs, {len(runs) - len(left)} of them finished{untuned}", flush=True)
        arm_of = {arm.name: arm.arm for arm in self.arms}
        chains: dict[Any, list[PlannedRun]] = {}
        for run in left:
            chains.setdefault((arm_of[run.arm], run.seed) if self.cfg.branch else run.name, []).append(run)
        return [sorted(chain, key=lambda run: -run.config.steps) for chain in chains.values()]

    def print_costs(self) -> None:
        """Print how much is left: if the tier names a GPU, every known run's seconds and the hours of all at a given MFU;
        else the hours at the speed of the finished runs.
        """
        peak, runs = self.cfg.tier.peak_flops, self.runs()
        every = [*self.trials(), *runs]
        known = [run for run in every if run.left()]
        for run in known if peak else ():
            seconds = run.work / peak
            print(f"{run.name:<44} {seconds / 0.2:7.0f} s at 20 % MFU, {seconds / 0.4:6.0f} s at 40 %")
        planned = {run.arm for run in runs}
        later = [
            training_flops(self._config(arm, self._branching(arm, seed)), arm.facts["flops_per_token"])
            for arm in self.arms
            if arm.name not in planned  # its learning rates are not known yet, but its cost does not depend on them
            for seed in self._seeds_of(arm)
        ]
        work = sum(run.work for run in known) + sum(later)
        waiting = f" (with {len(later)} runs that wait for the tuning of their arm)" if later else ""
        if not peak:
            print(f"{len(known) + len(later)} runs left{waiting}{self._at_known_speed(work, every)}", flush=True)
            return
        hours = work / peak / 3600
        card = f"of {peak / 1e12:.0f} TFLOP/s (for another card set tier.peak_flops=)"
        needed = f"{hours / 0.2:.1f} h at 20 % MFU, {hours / 0.4:.1f} h at 40 %, {card}"
        print(f"{len(known) + len(later)} runs left{waiting}: {needed}", flush=True)

    def _at_known_speed(self, work: float, runs: list[PlannedRun]) -> str:
        """The hours of `work` FLOPs at the speed of the finished ones of the runs, as the end of a line; "" without any."""
        done = [run for run in runs if not run.left() and not run.diverged]
        if not done:
            return ""
        seconds = sum(run.measured().value("train.seconds") or 0 for run in done)
        hours = seconds / 3600 * work / sum(run.work for run in done)
        return f": about {hours:.1f} h one after the other, at the speed of {len(done)} finished runs"

    def carry_out(self, chains: list[list[PlannedRun]], title: str, total: int, task: list[str]) -> None:
        """Start the runs on this machine or with a launcher."""
        if self.cfg.launcher.plugin:
            first, later = [chain[0] for chain in chains], [run for chain in chains for run in chain[1:]]
            for wave in filter(None, (first, later)):  # shorter runs branch off the first run of their chain
                run_by_launcher(self.cfg, self.folder, wave, task)
        else:
            run_jobs(chains, self.cfg.jobs, title, total)

    def carry_out_alone(self, only: str, job: int | None) -> None:
        """Carry out the one run of only= on this machine. job: the run's number if a launcher started this command.

        An error is raised, but a launcher's job only prints it.
        """
        known = {run.name: run for run in (*self.trials(), *self.runs())}
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

    # Results

    def write_own_records(self, runs: list[PlannedRun]) -> None:
        """Write the records of the folder's finished runs anew: a run may have been made, or evaluated again, by hand."""
        for run in runs:
            if not run.record and not run.left():
                run.finished()

    def write_trials(self) -> None:
        """Write the results of the finished trials, as long as none of the runs to compare is finished."""
        keys = self.cfg.tune.keys
        lines = [["arm", *keys, self.cfg.tune.metric, "tokens"]]
        for trial in self.trials():
            if not trial.left():
                run, flat = trial.measured(), flatten(asdict(trial.config))
                arm = next(self._tuned_as(arm) for arm in self.arms if arm.name == trial.arm)
                rates = [f"{flat[key]:g}" for key in keys]
                lines.append([arm, *rates, f"{self._judged(trial):.4f}", si(run.value("train.tokens") or 0)])
        tuning = f"{len(lines) - 1} trials of the tuning, " if keys else ""
        title = f"{self.name}, under way: {tuning}no run of the comparison yet"
        note = f"Seeds {', '.join(map(str, self.cfg.tune.seeds))}; one run per line; training logs the `train.` column."
        trials = [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
        results = {"title": title, "arms": [], "trials": trials}
        write_page(self.folder, self.cfg, results, self.seeds, [markdown(lines).rstrip(), note] if keys else [])

    def write_results(self, runs: list[PlannedRun]) -> None:
        """Compare all runs, and write results.json, table.md, records and figures; print the table."""
        by_name = {arm.name: arm for arm in self.arms}
        for run in runs:
            by_name[run.arm].runs.append(run.measured())
        measured = [run for arm in self.arms for run in arm.runs]
        for context in {run.config["model"]["context"] for run in measured}:  # another context is tested at other lengths
            refuse_other_settings([run for run in measured if run.config["model"]["context"] == context])
        if not self.data:
            refuse_other_shards(measured)
        longest = max((run.config for run in runs), key=lambda config: config.steps * config.batch_tokens)
        results = Results(self.cfg, self.arms, self.tuned())
        epochs = read_epochs(longest) if self.data else None
        results.write(self.folder, self.planned() - len(runs), epochs, self.overlaps())
        figures = results.draw(self.folder / "figures")
        print(f"ablation  {self.folder / 'table.md'} ({len(runs)} runs, {len(figures)} figures)", flush=True)


def run_by_launcher(cfg: AblateConfig, folder: Path, left: list[PlannedRun], task: list[str]) -> None:
    """Start each run with a Hydra launcher, which calls this script in a sweep over only=."""
    launcher = cfg.launcher
    try:
        importlib.import_module(launcher.module or "hydra")
    except ImportError:
        needs = f"launcher={launcher.plugin} needs the package '{launcher.package}'"
        raise ValueError(f"{needs}: pip install {launcher.package}") from None
    overrides = [o for o in task if not o.startswith(("launcher", "only="))]
    options = overrides_of({f"hydra.launcher.{key}": value for key, value in launcher.options.items()})
    sweep = [f"hydra/launcher={launcher.plugin}", *options, quoted(f"hydra.sweep.dir={folder}")]
    names = "only=" + ",".join(run.name for run in left)
    arguments = [sys.executable, str(ROOT / "scripts" / "ablate.py"), "-m", *overrides, *sweep, names]
    done = subprocess.run(arguments, env=environment(0, launcher.options.get("n_jobs", 1), []))
    if done.returncode:
        raise ValueError(f"launcher={launcher.plugin} ended with exit code {done.returncode}: see its messages above")


if __name__ == "__main__":
    main()
