"""What an experiment of scripts/ablate.py says: its configuration, its arms, and what is refused before any training."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Any

from omegaconf import MISSING

from configs.composing import merged
from eval.report.runs import Arm, SpikeConfig
from eval.study import evaluation_command, result_file
from eval.tuning import TuneConfig


@dataclass
class TierConfig:
    """A scale: overrides of train.py for every arm, and the shape that experiments refer to."""

    n_head: Annotated[int, "[1, inf)"] = MISSING  # heads of the baseline
    head_dim: Annotated[int, "[1, inf)"] = MISSING  # width of a head
    more_heads_d_ff: int | None = None  # width of the FFN of a baseline with 1.5 times the heads
    retrieval_steps: int | None = None  # steps in which models of this scale learn a needle
    tune_steps: int | None = None  # of a trial
    horizons: dict[str, list[str]] = field(default_factory=dict)  # name -> steps after which arms are compared
    peak_flops: float | None = None  # of the card that the cost is estimated for, in FLOP/s
    train: list[str] = field(default_factory=list)  # overrides of train.py for every arm
    sizes: dict[str, list[str]] = field(default_factory=dict)  # name -> overrides; experiment=scaling uses them


@dataclass
class LauncherConfig:
    """What starts the runs: processes of this machine, or a launcher plugin of Hydra."""

    plugin: str | None = None  # name of the launcher; None: processes of this machine
    package: str | None = None  # what pip installs for it
    module: str | None = None  # what Python imports of it
    options: dict[str, Any] = field(default_factory=dict)  # of hydra.launcher


@dataclass
class AblateConfig:
    """arms: name -> overrides of train.py; arms are compared with the first. common: overrides for all of them.

    grid: name -> overrides; where given, every arm runs at each of its points and is compared within its point.
    evaluations: commands of eval/ with their overrides. metrics: column -> EVALUATION.key in its JSON, or train.NAME;
    the first is the one that is tested. matched: the arms claim equal parameters. fit: a power law over the grid's sizes.
    """

    arms: dict[str, list[str]] = MISSING
    grid: dict[str, list[str]] = field(default_factory=dict)
    common: list[str] = field(default_factory=list)
    matched: bool = False
    fit: bool = False
    branch: bool = False  # the grid's points differ in steps alone, and the shorter runs branch off the longest (wsd)
    evaluations: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)  # name -> text that every run is tested on: perplexity_NAME
    text_tokens: Annotated[int, "[1, inf)"] = 1_000_000  # of each of `texts` at most
    metrics: dict[str, str] = field(default_factory=dict)
    compared: list[str] = field(default_factory=list)  # metrics whose differences are tested; empty: the first one
    spikes: SpikeConfig = field(default_factory=SpikeConfig)
    tier: TierConfig = field(default_factory=TierConfig)
    tune: TuneConfig = field(default_factory=TuneConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    seeds: Any = 3  # a number (1 to N) or a list
    fewer_seeds: dict[str, int] = field(default_factory=dict)  # arm -> number of seeds, for arms that get fewer
    train: list[str] = field(default_factory=list)  # more overrides for all runs; an arm's own win
    name: str | None = None  # None: the experiment, and the tier where it is not cpu
    runs: str = "runs/ablate"  # where the folders of experiments are made
    records: str = "docs/results"  # finished runs that NAME/records.jsonl here holds are not run again
    jobs: Annotated[int | None, "[1, inf)"] = None  # runs at a time; None: one per GPU, one on a CPU
    only: str | None = None  # train and evaluate this run (ARM-sSEED) alone, no table
    run: bool = True  # false: train nothing; print what is left and write the table of what is finished


def seed_list(seeds: Any) -> list[int]:
    """seeds=5 means 1 to 5; seeds=[1,4] those."""
    if isinstance(seeds, int) and not isinstance(seeds, bool) and seeds > 0:
        return list(range(1, seeds + 1))
    whole = isinstance(seeds, list) and all(isinstance(s, int) and not isinstance(s, bool) and s >= 0 for s in seeds)
    if not whole or not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds={seeds} is neither a number of seeds nor a list of different ones: use seeds=3")
    return seeds


def arm_list(cfg: AblateConfig) -> list[Arm]:
    """Arms at every point of the grid, with their overrides; the first arm of a point is the others' reference."""
    if not cfg.metrics:
        raise ValueError("metrics is empty, so nothing would be compared: use '+metrics.valid=perplexity.loss'")
    if not cfg.arms:
        raise ValueError(
            "the experiment has no arms: list them under arms:, as configs/ablations/experiment/main.yaml does"
        )
    found, first = [], next(iter(cfg.arms))
    for point, at in (cfg.grid or {"": []}).items():
        for name, overrides in cfg.arms.items():
            for part in (name, point):
                if re.search(r"[^\w.-]", part):
                    raise ValueError(f"'{part}' cannot be part of a folder's name: use letters, digits, '.', '_', '-'")
            full, reference = (f"{part}-{point}" if point else part for part in (name, first))
            found.append(Arm(full, name, point, None if name == first else reference, "", merged(overrides, at)))
    return found


def evaluation_commands(cfg: AblateConfig) -> list[list[str]]:
    """The evaluations of every run: those listed, and the perplexity on each of `texts`."""
    commands = [evaluation_command(text) for text in cfg.evaluations]
    for name, path in cfg.texts.items():
        commands.append(evaluation_command(f"perplexity text={path} name={name} tokens={cfg.text_tokens}"))
    files = [result_file(name, overrides) for name, *overrides in commands]
    if len(set(files)) < len(files):
        raise ValueError("an evaluation is listed twice, and its results would be too: list each one once")
    return commands


def refuse_metrics(cfg: AblateConfig, evaluations: list[list[str]]) -> None:
    """Refuse metrics that no evaluation writes, and those that read the text on which learning rates are chosen."""
    files = {result_file(name, overrides) for name, *overrides in evaluations} | {"train"}
    for name, path in cfg.metrics.items():
        evaluation = path.split(".")[0]
        if evaluation not in files:
            text = evaluation.removeprefix("perplexity_")
            fix = f"give texts.{text}=FILE" if text != evaluation else f"add {evaluation} to evaluations"
            raise ValueError(
                f"metric {name} is read from {evaluation}.json, which no evaluation of this study writes: {fix}"
            )
        if cfg.tune.keys and (evaluation == "perplexity" or path in ("train.val_loss", "train.loss", cfg.tune.metric)):
            wrong = f"metric {name} ({path}) reads the text that the learning rates are chosen on"
            raise ValueError(f"{wrong}: test on another text, as measure=test texts.test=FILE")


def compare_parameters(arms: list[Arm], claimed: bool) -> None:
    """Note each arm's parameters against its reference's; refuse more than 0.5 % where equality is claimed."""
    by_name = {arm.name: arm for arm in arms}
    for arm in arms:
        if not arm.reference:
            arm.facts["params_off"] = None
            continue
        theirs = by_name[arm.reference].facts["params_non_embedding"]
        off = arm.facts["params_off"] = arm.facts["params_non_embedding"] / theirs - 1
        if claimed and abs(off) > 0.005:
            raise ValueError(
                f"arm {arm.name} has {off:+.1%} of {arm.reference}'s parameters, and the experiment says matched: true: "
                "give the arm a model.d_ff, or set matched=false"
            )
