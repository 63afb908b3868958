"""A study as a plan: its arms, the trials for their learning rates, the runs to compare, and what is left of them."""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from ablation import experiment, tuning
from ablation.experiment import AblateConfig
from ablation.records import TRIAL, recorded_model, records_of
from ablation.study import PlannedRun, describe_model, train_config, training_flops, trunk_ended_early, with_values
from ablation.tuning import Point, Tuned
from configs import USER_ERRORS, explain
from configs.composing import merged, overrides_of
from data.config import DataConfig
from data.stream import open_tokenizer
from eval.common import variant
from eval.overlap import overlaps
from eval.report.runs import Arm, give_colours
from eval.texts import Texts
from training.checkpoint import checkpoints
from training.optim import decay_start
from training.run import TrainConfig, fill_model


@dataclass
class Search:
    """An arm's search for its learning rates."""

    arm: Arm
    runs: list[PlannedRun] = field(default_factory=list)
    scores: dict[Point, tuning.Score] = field(default_factory=dict)  # of finished points
    waits: bool = False  # some trials are not finished


class Study:
    """An experiment in progress. The caller must have imported train.py, which registers its schema."""

    def __init__(self, cfg: AblateConfig, name: str) -> None:
        self.cfg, self.name, self.folder = cfg, name, Path(cfg.runs) / name
        self.seeds = experiment.seed_list(cfg.seeds)
        self._known: dict[str, PlannedRun] = {}
        tuning.check(cfg.tune, self.seeds)
        self.evaluations = experiment.evaluation_list(cfg)
        experiment.refuse_metrics(cfg, self.evaluations)
        self.records = records_of(self.folder, *(Path(cfg.records) / study for study in (*cfg.records_of, name)))
        # A table of records does not need their data. Records of other data do not count (main's at tier=gpu).
        data = merged(cfg.tier.train, cfg.common, cfg.train)
        known = [one for one in self.records.values() if not cfg.run and f"data.name={one['config'].get('data.name')}" in data]
        self.recorded = recorded_model(known)
        self.texts = Texts({record["facts"].get("text_digest") for record in known} - {None})
        self.arms = experiment.arm_list(cfg)
        self._configs: dict[str, TrainConfig] = {}  # by name of the arm
        self._trial_configs: dict[str, TrainConfig] = {}
        for arm in self.arms:
            arm.overrides = merged(cfg.tier.train, cfg.common, cfg.train, arm.overrides)
            config = self._configs[arm.name] = self._config(arm, arm.overrides)
            arm.variant = variant({"model": asdict(config.model)})
            arm.facts = describe_model(config)
        if cfg.branch:
            experiment.refuse_branches(self.arms, self._configs)
        give_colours(self.arms)  # of all arms: an arm keeps its colour while others have no finished run
        experiment.compare_parameters(self.arms, cfg.matched)

    def _config(self, arm: Arm, overrides: list[str]) -> TrainConfig:
        try:
            config = train_config(overrides)
            if config.init_from and not Path(config.init_from).is_dir():  # on another machine
                config.model = recorded_model(self.records.values(), config.init_from) or config.model
            known = self.recorded and not self.texts.here(config.data)
            config.model = fill_model(config.model, self.recorded if known else open_tokenizer(config.data))
            return config
        except USER_ERRORS as error:
            raise ValueError(f"arm {arm.name}: {explain(error, TrainConfig)}") from None

    def _run(self, arm: Arm, seed: int, name: str, values: dict[str, Any]) -> PlannedRun:
        """The run or trial `name`, made once. values: those of its configuration that its arm does not have."""
        if name not in self._known:
            trial, folder = name.startswith(TRIAL), self.folder / name
            values = values | {"seed": seed, "run_dir": str(folder), "resume": True}
            config = with_values((self._trial_configs if trial else self._configs)[arm.name], values)
            overrides = merged(arm.overrides, self.cfg.tune.train if trial else [], overrides_of(values))
            evaluations, flops = [] if trial else self.evaluations, arm.facts["flops_per_token"]
            run = PlannedRun(arm.name, seed, folder, overrides, config, evaluations, flops, self.texts)
            run.take_over(self.records.get(name))
            self._known[name] = run
        return self._known[name]

    @property
    def data(self) -> DataConfig | None:
        """The data of the first arm; None where they are not on this machine."""
        data = self._configs[self.arms[0].name].data
        return data if self.texts.here(data) else None

    def overlaps(self) -> dict[str, float] | None:
        """Test text -> the share of it that occurs in the training text of the first arm; None without that text."""
        if not (texts := experiment.texts_of(self.evaluations)):
            return {}
        return overlaps(self.data, texts, self.folder / "overlap.json") if self.data else None

    def trials(self) -> list[PlannedRun]:
        """The trials of all arms that are finished, or that the search wants next."""
        return [trial for search in self.searches() for trial in search.runs]

    def searches(self) -> list[Search]:
        """The search of every arm, at the point `tune.at` of the grid, at all with `tune.each`, or at the last."""
        if not self.cfg.tune.keys:
            return []
        grid = list(self.cfg.grid or [""])
        points = grid if self.cfg.tune.each else [self.cfg.tune.at or grid[-1]]
        return [search for point in points for search in self._searches_at(point)]

    def _searches_at(self, point: str) -> list[Search]:
        """The search of every arm at one point of the grid. With `tune.exchange` none is over before all are."""
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
        waits = any(search.waits for search in searches)
        return [replace(search, waits=waits) for search in searches]

    def _try(self, search: Search, points: list[Point]) -> None:
        for point in points:
            trials = [self._trial(search.arm, point, seed) for seed in self.cfg.tune.seeds]
            search.runs += trials
            if any(trial.left() for trial in trials):
                search.waits = True
            else:
                search.scores[point] = tuning.score(self.cfg.tune, [self.judged(trial) for trial in trials])

    def _trial(self, arm: Arm, point: Point, seed: int) -> PlannedRun:
        rates = {key: float(f"{value:g}") for key, value in zip(self.cfg.tune.keys, point, strict=True)}
        if arm.name not in self._trial_configs:
            self._trial_configs[arm.name] = self._config(arm, merged(arm.overrides, self.cfg.tune.train, overrides_of(rates)))
        short = "-".join(f"{key.rsplit('.', 1)[-1]}{value:g}" for key, value in rates.items())
        return self._run(arm, seed, f"{TRIAL}{self.tuned_as(arm)}-{short}-s{seed}", rates)

    def tuned_as(self, arm: Arm) -> str:
        """The name of the arm's search: one for all points of the grid, or with `tune.each` one for each."""
        return arm.name if self.cfg.tune.each else arm.arm

    def judged(self, trial: PlannedRun) -> float:
        """The number that judges a finished trial; infinity if the trial diverged."""
        metric = trial.measured().value(self.cfg.tune.metric)
        if metric is None and not trial.diverged:
            raise ValueError(f"{trial.folder} has no {self.cfg.tune.metric}, which judges the trials: repeat it, records=none")
        return float("inf") if metric is None else metric

    def tuned(self) -> dict[str, Tuned]:
        """Name of a search -> the result of its trials; searches that are not over are left out."""
        results = {}
        for search in self.searches():
            if not search.waits:
                results[self.tuned_as(search.arm)] = result = tuning.tuned(self.cfg.tune, search.scores)
                measured = [run.measured() for run in search.runs]
                tokens = [round(run.value("train.tokens") or 0) for run in measured]
                result.tokens, result.longest = sum(tokens), max(tokens)
                result.seconds = sum(run.value("train.seconds") or 0 for run in measured)
        return results

    def planned(self) -> list[tuple[int, Arm]]:
        """Seed and arm of all runs, seed by seed, so that an interrupted study has whole comparisons; fewer_seeds last."""
        fewer = self.cfg.fewer_seeds
        pairs = [(seed, arm) for seed in self.seeds for arm in self.arms if seed in self.seeds[: fewer.get(arm.arm)]]
        return sorted(pairs, key=lambda pair: pair[1].arm in fewer)

    def runs(self) -> list[PlannedRun]:
        """The runs of all arms but those whose tuning is not finished."""
        tuned, runs = self.tuned(), []
        for seed, arm in self.planned():
            result = tuned.get(self.tuned_as(arm))
            if result or not self.cfg.tune.keys:
                rates = {key: float(f"{value:g}") for key, value in result.best.items()} if result else {}
                runs.append(self._run(arm, seed, f"{arm.name}-s{seed}", rates | self._branching(arm, seed)))
        return runs

    def _branching(self, arm: Arm, seed: int) -> dict[str, Any]:
        """The values with which an arm's shorter runs branch off the longest run before its decay."""
        if not self.cfg.branch:
            return {}
        points = {other.name: self._configs[other.name] for other in self.arms if other.arm == arm.arm}
        trunk = max(points, key=lambda name: points[name].steps)
        if arm.name == trunk:
            at = {decay_start(config.steps, config.optim) for name, config in points.items() if name != trunk}
            return {"checkpoint.at": sorted(at)}
        folder = self.folder / f"{trunk}-s{seed}"
        recorded = folder.name in self.records and not checkpoints(folder)
        whole = recorded or trunk_ended_early(folder, points[arm.name])  # without a trunk the run is trained as a whole
        return {} if whole else {"branch_from": str(folder)}

    def describe(self, runs: list[PlannedRun]) -> list[list[PlannedRun]]:
        """Print the arms and the number of finished runs. Returns the chains of unfinished runs, longest run first."""
        width = max(len(arm.name) for arm in self.arms)
        for arm in self.arms:
            facts, off = arm.facts, arm.facts["params_off"]
            size = f"{facts['params_non_embedding']:>12,} parameters" + ("" if off is None else f" ({off:+.2%})")
            print(f"{arm.name:<{width}}  {size}, d_ff {facts['d_ff']}, {facts['flops_per_token'] / 1e6:.2f} MFLOPs per token")
        left, waiting = [run for run in runs if run.left()], len(self.planned()) - len(runs)
        untuned = f" (and {waiting} of arms that are not tuned yet)" if waiting else ""
        print(f"{self.name}: {len(runs)} runs{untuned}, {len(runs) - len(left)} of them finished", flush=True)
        if stale := [run for run in left if run.stale]:
            again = f"{len(stale)} recorded runs would be trained again"
            print(f"{self.name}: {again}, because the record of {stale[0].name} {stale[0].stale}", flush=True)
        arm_of, chains = {arm.name: arm.arm for arm in self.arms}, {}
        for run in left:
            chains.setdefault((arm_of[run.arm], run.seed) if self.cfg.branch else run.name, []).append(run)
        return [sorted(chain, key=lambda run: -run.config.steps) for chain in chains.values()]

    def print_costs(self) -> None:
        """Print how many runs are left, and their time: at the speed of finished runs, or of the tier's GPU."""
        searches, runs = self.searches(), self.runs()
        tuning_work = [run.work for search in searches for run in search.runs if run.left()]
        for search in (search for search in searches if search.waits):  # trials at points that are not known yet
            more = self.cfg.tune.fewest * len(self.cfg.tune.seeds) - len(search.runs)
            tuning_work += [search.runs[0].work] * more
        done = {run.name for run in runs if not run.left()}
        work = tuning_work + [
            training_flops(with_values(self._configs[arm.name], self._branching(arm, seed)), arm.facts["flops_per_token"])
            for seed, arm in self.planned()
            if f"{arm.name}-s{seed}" not in done
        ]
        if not work:
            return
        known = [*(trial for search in searches for trial in search.runs), *runs]
        finished = [run for run in known if not run.left() and not run.config.branch_from and not run.diverged][-20:]
        time, peak = "their time is not known before the first is finished", self.cfg.tier.peak_flops
        if speeds := [run.work / seconds for run in finished if (seconds := run.measured().value("train.seconds"))]:
            time = f"about {sum(work) / median(speeds) / 60:.0f} minutes, one at a time, as measured in {len(speeds)} runs"
        elif peak:
            time = f"{sum(work) / peak / 3600 / 0.4:.1f} h at 40 % MFU of {peak / 1e12:.0f} TFLOP/s (tier.peak_flops)"
        tuning_runs = f" ({len(tuning_work)} of them or more for the tuning)" if tuning_work else ""
        print(f"{self.name}: {len(work)} runs left{tuning_runs}: {time}; a log of each in {self.folder / 'logs'}", flush=True)
