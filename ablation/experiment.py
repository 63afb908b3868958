"""An experiment of scripts/ablate.py: its configuration, its arms, and the checks before training."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from omegaconf import MISSING

from ablation.records import LAST_TENTHS
from ablation.study import Evaluation, read_evaluation
from ablation.tuning import TuneConfig
from configs.composing import key_of, merged, quoted
from eval.report.runs import Arm
from training.run import TrainConfig, identity_of

# NAME of the metrics train.NAME, as Run.value reads them, beside tokens_to_0.5 and other levels
OF_TRAINING = ("loss", *LAST_TENTHS, "val_loss", "spikes", "seconds", "tokens")
OF_LOSSES = ("perplexity", "quantization")  # evaluations that report the loss on a given text; for all others it is a haystack


@dataclass
class TierConfig:
    """A scale: the shape and the lengths that experiments refer to."""

    n_head: Annotated[int, "[1, inf)"] = MISSING  # heads of the baseline
    head_dim: Annotated[int, "[1, inf)"] = MISSING  # width of a head
    more_heads_d_ff: int | None = None  # width of the FFN of a baseline with 1.5 times the heads
    retrieval_steps: int | None = None  # steps in which models of this scale learn a needle
    tune_steps: int | None = None  # training steps of a trial
    horizons: dict[str, list[str]] = field(default_factory=dict)  # name -> override steps=N; arms are compared after N
    peak_flops: float | None = None  # peak FLOP/s of the GPU, for the estimate of the cost
    train: list[str] = field(default_factory=list)  # overrides of train.py for every arm
    sizes: dict[str, list[str]] = field(default_factory=dict)  # name -> overrides; experiment=scaling uses them


@dataclass
class AblateConfig:
    arms: dict[str, list[str]] = MISSING  # name -> overrides of train.py; all arms are compared with the first
    grid: dict[str, list[str]] = field(default_factory=dict)  # point -> overrides; every arm runs at each point
    common: list[str] = field(default_factory=list)  # overrides for all arms
    select: list[str] = field(default_factory=list)  # the arms to compare, in the order of `arms`; empty: all
    matched: bool = False  # refuse arms that differ by more than 0.5 % from the first arm's parameters
    fit: bool = False  # fit a power law over the points of the grid
    branch: bool = False  # shorter runs branch off the longest; needs optim.schedule=wsd and a grid over steps alone
    evaluations: list[str] = field(default_factory=list)  # commands of eval/ with their overrides
    texts: dict[str, str] = field(default_factory=dict)  # name -> text; every run is tested on it as perplexity_NAME
    text_tokens: Annotated[int, "[1, inf)"] = 1_000_000  # tokens of each of `texts`, at most
    metrics: dict[str, str] = field(default_factory=dict)  # column -> EVALUATION.KEY in its JSON, or train.NAME
    compared: list[str] = field(default_factory=list)  # metrics whose differences are tested; empty: the first metric
    covariate: str | None = None  # one of `compared`: the others are also compared at equal values of it
    profiles: dict[str, str] = field(default_factory=dict)  # name -> EVALUATION.KEY with several numbers; a table each
    pairs: dict[str, list[str]] = field(default_factory=dict)  # part -> [ARM, OTHER ARM]: what the part gives
    forest: dict[str, str] = field(default_factory=dict)  # compared metric -> its title in forest.png, the figure of all pairs
    plane: dict[str, str] = field(default_factory=dict)  # two compared metrics -> their titles in plane.png, a dot per arm
    tier: TierConfig = field(default_factory=TierConfig)
    tune: TuneConfig = field(default_factory=TuneConfig)
    seeds: Any = 3  # a number N, for the seeds 1 to N, or a list of seeds
    fewer_seeds: Annotated[dict[str, int], "[1, inf)"] = field(default_factory=dict)  # arm -> its number of seeds
    train: list[str] = field(default_factory=list)  # more overrides for all runs; those of an arm or a point win
    name: str | None = None  # None: EXPERIMENT, or EXPERIMENT_TIER if the tier's name does not begin with cpu
    runs: str = "runs/ablate"  # folder with one subfolder per experiment
    records: str = "docs/results"  # earlier results; a run listed in its NAME/records.jsonl.gz is not trained again
    records_of: list[str] = field(default_factory=list)  # studies in `records` whose runs this one takes before those of NAME
    jobs: Annotated[int | None, "[1, inf)"] = None  # runs at a time; None: one per GPU, or one on a CPU
    only: str | None = None  # train and evaluate only the run of this name (ARM-sSEED), and write no table
    run: bool = True  # false: do not train; print the runs that are left, and write the table of the finished runs


def seed_list(seeds: Any) -> list[int]:
    """The seeds: seeds=5 means 1 to 5, seeds=[1,4] means 1 and 4."""
    listed = list(range(1, seeds + 1)) if type(seeds) is int else seeds
    whole = isinstance(listed, list) and all(type(seed) is int and seed >= 0 for seed in listed)
    if not whole or not listed or len(set(listed)) < len(listed):
        raise ValueError(f"seeds={seeds} is neither a number of seeds nor a list of different seeds: use seeds=3")
    return listed


def arm_list(cfg: AblateConfig) -> list[Arm]:
    """The arms at every point of the grid, each compared with the first arm of its point."""
    refuse_inconsistent(cfg)
    chosen = {name: overrides for name, overrides in cfg.arms.items() if name in cfg.select or not cfg.select}
    if not chosen:
        raise ValueError("the experiment has no arms: list them under arms:")
    arms: dict[str, Arm] = {}
    first = next(iter(chosen))
    for point, at in (cfg.grid or {"": []}).items():
        for arm, overrides in chosen.items():
            name, reference = (f"{part}-{point}" if point else part for part in (arm, first))
            if re.search(r"[^\w.-]", name):
                raise ValueError(f"'{name}' cannot be a part of a folder's name: use letters, digits, '.', '_', '-'")
            if name in arms:
                raise ValueError(f"two arms have the name ARM-POINT {name} and one folder: rename an arm or a point")
            arms[name] = Arm(name, arm, point, None if arm == first else reference, "", merged(overrides, at))
    return list(arms.values())


def refuse_inconsistent(cfg: AblateConfig) -> None:
    """ValueError where an option names a metric or a point that the experiment lacks, a pair is not two different arms, a fit
    has one point, or no run would have an override of `train`.
    """
    if not cfg.metrics:
        raise ValueError("metrics is empty: use '+metrics.valid=perplexity.loss'")
    for option, names, of, known in (
        ("compared", cfg.compared, "metrics", cfg.metrics),
        ("covariate", [cfg.covariate], "compared", cfg.compared),
        ("forest", cfg.forest, "compared", cfg.compared),
        ("plane", cfg.plane, "compared", cfg.compared),
        ("tune.at", [cfg.tune.at], "grid", cfg.grid),
    ):
        if unknown := [name for name in names if name is not None and name not in known]:
            fix = ", ".join(known) or (f"no {option}" if of == "grid" else f"{of}=[NAME,...]")
            raise ValueError(f"{option} has '{unknown[0]}', which is not in {of}: use {fix}")
    if len(cfg.plane) not in (0, 2):
        raise ValueError(f"plane={cfg.plane} is not two metrics: name the two whose differences it shows")
    for option, titles in (("forest", cfg.forest), ("plane", cfg.plane)):
        if len(set(titles.values())) < len(titles):
            raise ValueError(f"{option}={titles} has one title twice: give every metric its own")
    for part, names in cfg.pairs.items():
        if len(names) != 2 or names[0] == names[1]:
            raise ValueError(f"pairs.{part}=[{','.join(names)}] is not a pair: name two different arms")
    if cfg.branch and cfg.tune.keys and cfg.tune.each:
        raise ValueError("a run that branches off has the learning rates of the longest: use branch=false with tune.each=true")
    if cfg.fit and len(cfg.grid) < 2:
        raise ValueError(f"fit: true needs several points, but the grid has {len(cfg.grid)}: use tier=cpu or tier=gpu")
    points = [{key_of(override) for override in at} for at in cfg.grid.values()]
    for override in cfg.train if points else ():
        if all(key_of(override) in point for point in points):
            fix = f"give other points with '~grid' '+grid={{NAME:[\"{override}\"]}}'"
            raise ValueError(f"train has {override}, but every point of the grid sets {key_of(override)} itself: {fix}")


def refuse_unknown_arms(cfg: AblateConfig, typed: Sequence[str]) -> None:
    """Refuse an unknown arm in fewer_seeds, select or pairs, unless one of the overrides `typed` dropped it."""
    named = [("fewer_seeds", arm) for arm in cfg.fewer_seeds] + [("select", arm) for arm in cfg.select]
    named += [(f"pairs.{part}", arm) for part, arms in cfg.pairs.items() for arm in arms]
    for option, arm in named:
        if arm not in cfg.arms and not {"~arms", f"~arms.{arm}"} & set(typed):
            raise ValueError(f"{option} has {arm}, which is not an arm of this experiment: use one of {', '.join(cfg.arms)}")


def refuse_branches(arms: Sequence[Arm], configs: Mapping[str, TrainConfig]) -> None:
    """Refuse points of the grid whose runs cannot branch off the longest one. configs: by the arms' names."""
    for arm in arms:
        first = next(other for other in arms if other.arm == arm.arm)
        values, of_first = (identity_of(asdict(configs[one.name]), but=("steps",)) for one in (arm, first))
        differ = [key for key, value in values.items() if of_first[key] != value]
        if differ or values["optim.schedule"] != "wsd":
            wrong = f"branch is true, but {arm.name} has another {differ[0] if differ else 'optim.schedule than wsd'}"
            raise ValueError(f"{wrong}: give points that differ in steps alone and optim.schedule=wsd, or branch=false")


def evaluation_list(cfg: AblateConfig) -> list[Evaluation]:
    """What evaluates every run: `evaluations`, and perplexity on each of `texts`."""
    texts = (f"perplexity {quoted(f'text={text}')} name={name} tokens={cfg.text_tokens}" for name, text in cfg.texts.items())
    evaluations = [read_evaluation(text) for text in (*cfg.evaluations, *texts)]
    if len({one.file for one in evaluations}) < len(evaluations):
        raise ValueError("two evaluations would write the same file: list each one once, or give one a name=")
    return evaluations


def refuse_metrics(cfg: AblateConfig, evaluations: list[Evaluation]) -> None:
    """Refuse metrics that nothing writes, and in a tuned study those on the validation text, which chose the rates."""
    files = {one.file: one for one in evaluations}
    for name, path in (*cfg.metrics.items(), *cfg.profiles.items(), ("tune.metric", cfg.tune.metric)):
        file, _, key = path.partition(".")
        if file == "train" or name == "tune.metric":
            if file != "train" or not (key in OF_TRAINING or re.fullmatch(r"tokens_to_(\d*\.)?\d+", key)):
                raise ValueError(f"metric {name}={path} is not a metric of training: use train.val_loss or train.tokens_to_0.5")
        elif file not in files:
            text = file.removeprefix("perplexity_")
            fix = f"give texts.{text}=FILE" if text != file else f"add {file} to evaluations"
            raise ValueError(f"metric {name} is read from {file}.json, which no evaluation of this study writes: {fix}")
        if cfg.tune.keys and name != "tune.metric" and (path == cfg.tune.metric or _reads_validation(path, files.get(file))):
            wrong = f"metric {name} ({path}) reads the text that the learning rates are chosen on"
            raise ValueError(f"{wrong}: test on another text, for example measure=test texts.test=FILE")


def _reads_validation(path: str, evaluation: Evaluation | None) -> bool:
    if evaluation is None or evaluation.name not in OF_LOSSES:
        return path in ("train.val_loss", "train.loss")
    return not evaluation.settings["text"] and not evaluation.settings["shards"]


def texts_of(evaluations: list[Evaluation]) -> dict[str, str]:
    """Name of the result, without perplexity_, -> text that it was measured on, for the evaluations OF_LOSSES given a text."""
    read = {one.file.removeprefix("perplexity_"): one.settings["text"] for one in evaluations if one.name in OF_LOSSES}
    return {name: text for name, text in read.items() if text}


def compare_parameters(arms: list[Arm], matched: bool) -> None:
    """Store how much each arm's parameters differ from its reference's in `facts`; if `matched`, refuse more than 0.5 %."""
    sizes = {arm.name: arm.facts["params_non_embedding"] for arm in arms}
    for arm in arms:
        off = arm.facts["params_off"] = sizes[arm.name] / sizes[arm.reference] - 1 if arm.reference else None
        if matched and abs(off or 0) > 0.005:
            wrong = f"arm {arm.name} has {off:+.1%} parameters against {arm.reference}, but matched is true"
            raise ValueError(f"{wrong}: give the arm a model.d_ff, or set matched=false")
