"""A run of a study as the commands that make it, train.py and then evaluations, with the configurations of both."""

import copy
import functools
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from ablation.records import Record, describes, measures_of, record_of, run_of, write_records
from configs import CONFIG_DIR, USER_ERRORS, explain
from configs.composing import compose_job, key_of, quoted
from configs.files import read_run_config, write_json
from configs.provenance import ROOT
from data.shards import open_split
from data.stream import is_task, open_tokenizer
from eval.common import OF_A_RUN, result_name
from eval.report.measured import settings_of
from eval.report.runs import DIVERGED, Run, SpikeConfig, read_json, read_run
from eval.texts import Texts, prepared
from model.config import DecoderConfig
from model.decoder import Decoder
from training.checkpoint import checkpoints, folder_name
from training.optim import decay_start
from training.run import TrainConfig, Vocabulary, fill_model, refuse_other_config, sizes
from training.text import trained_on


@dataclass
class PlannedRun:
    """One arm at one seed: arguments of train.py and of the evaluations. spike: what counts as a spike of its loss.

    record: given if the run was finished elsewhere. texts: the digests that the runs of a study share.
    """

    arm: str
    seed: int
    folder: Path
    overrides: list[str]
    config: TrainConfig
    evaluations: list[list[str]]
    flops_per_token: int
    spike: SpikeConfig = field(default_factory=SpikeConfig)
    texts: Texts = field(default_factory=Texts)
    record: Record | None = None

    def take_over(self, record: Record | None) -> None:
        """Go on from what is there of this run: its record, if it fits and the run has no checkpoint here, or its folder.

        ValueError if the run in the folder has another configuration, if the record has other evaluations, or if the run
        measured itself in another way or was trained on other shards.
        """
        data, begun = self.config.data, (self.folder / "config.yaml").is_file()
        again = begun and not self.diverged  # a user deleted the file that says that the run diverged
        advice = "repeat its overrides, or start anew with name=OTHER"
        if record and describes(record, self.config) and not checkpoints(self.folder) and not (record["diverged"] and again):
            self.record = record
            refuse_other_measures(self.name, record.get("measures", {}), asdict(self.config), advice)
            self.texts.refuse_other_shards(self.name, record["facts"].get("text_digest"), data)
            refuse_other_results(self)
        elif begun:
            refuse_other_config(self.folder, asdict(self.config), advice=advice)
            refuse_other_measures(str(self.folder), measures_of(read_run_config(self.folder)), asdict(self.config), advice)
            self.texts.refuse_other_shards(str(self.folder), trained_on(self.folder), data)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def log(self) -> Path:
        return self.folder.parent / "logs" / f"{self.name}.log"

    @property
    def trained(self) -> bool:
        found = checkpoints(self.folder)
        return self.record is not None or bool(found) and found[-1].name == folder_name(self.config.steps)

    @property
    def diverged(self) -> bool:
        return (self.folder / DIVERGED).is_file() or bool(self.record and self.record["diverged"])

    @property
    def work(self) -> float:
        """FLOPs of the whole training, which weigh the run in the estimate of the time left."""
        return training_flops(self.config, self.flops_per_token)

    def progress(self) -> tuple[int, int]:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        done = max((json.loads(line).get("step", 0) for line in lines[-3:] if line.endswith("}")), default=0)
        return self.config.steps if self.record or self.diverged else done, self.config.steps

    def left(self) -> list[list[str]]:
        """The commands still to run: training unless it is finished, and evaluations without a result of this training."""
        if self.diverged or self.record:
            return []
        overrides, trunk = self.overrides, self.config.branch_from
        if trunk and trunk_ended_early(Path(trunk), self.config):  # the trunk has diverged since this run was planned
            overrides = [override for override in overrides if key_of(override) != "branch_from"]
        commands = [] if self.trained else [[str(ROOT / "train.py"), *overrides]]
        return commands + [
            ["-m", f"eval.{name}", quoted(f"run={self.folder}"), *overrides]
            for name, *overrides in self.evaluations
            if not (self.trained and self.evaluated(name, *overrides))
        ]

    def evaluated(self, name: str, *overrides: str) -> bool:
        """Whether the result of this evaluation exists: from the finished training, with the same settings, and of perplexity
        with the same text.
        """
        path = self.folder / "eval" / f"{result_file(name, *overrides)}.json"
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError):
            return False
        if not (isinstance(content, dict) and all(isinstance(content.get(key), dict) for key in ("config", "results"))):
            return False  # damaged
        same = content.get("step") == self.config.steps and not other_setting(content["config"], name, *overrides)
        return same and not self.other_text(content, name, *overrides)

    def other_text(self, found: Mapping[str, Any], name: str, *overrides: str) -> bool:
        """Whether the result `found` of perplexity is of another text than the one that it would read now.

        Texts and questions of other evaluations are not compared: delete their results after a change.
        """
        theirs = found.get("results", {}).get("sha256")
        if name != "perplexity" or theirs is None:
            return False
        settings, model = evaluation_config(name, *overrides), self.config.model
        return self.texts.tested(self.config.data, self.tokenizer, model.context, settings) not in (None, theirs)

    @functools.cached_property
    def tokenizer(self) -> str | None:
        """The fingerprint of the finished run's tokenizer."""
        found = self.record["tokenizer"] if self.record else read_json(self.folder / "tokenizer.json")
        return found["fingerprint"] if isinstance(found, dict) else found

    def check(self, arguments: list[str], code: int, said: str) -> bool:
        training = arguments[0] != "-m"
        if code or (training and not self.trained):
            infinite = re.search(r"error: ((?:the loss is \S+|\S+ is not finite) at step \d+(?: \(gradient norm \S+\))?)", said)
            if not (training and infinite):
                raise ValueError(f"{self.folder}, {self.reason()}")
            write_json(self.folder / DIVERGED, {"error": infinite.group(1)})
        return not self.diverged

    def finished(self) -> str:
        if not self.left():
            write_records(self.folder.parent / "records" / f"{self.name}.jsonl", [record_of(self.measured())])
        return "diverged" if self.diverged else "done"

    def measured(self) -> Run:
        """The finished run's configuration, metrics and evaluations."""
        return run_of(self.record, self.spike) if self.record else read_run(self.folder, self.spike)

    def reason(self) -> str:
        """The last error in the run's log, and the log's path."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
        said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        last = said[-1] if said else (lines[-1] if lines else "the run has not begun")
        return f"{self.name}: {last} (see {self.log}); correct that and repeat this command: finished runs are kept"


def refuse_other_measures(run: str, theirs: Mapping[str, Any], ours: Mapping[str, Any], advice: str) -> None:
    """ValueError if `run` has other measures: a resume may change them, but a study compares what runs log."""
    for key, had in theirs.items():
        if had != ours[key]:
            raise ValueError(f"{run} measures itself with {key}={had} (now {ours[key]}): {advice}")


def trunk_ended_early(trunk: Path, cfg: TrainConfig) -> bool:
    """Whether the run in the folder `trunk` diverged before it wrote the checkpoint off which `cfg` would branch."""
    at = folder_name(decay_start(cfg.steps, cfg.optim))
    return (trunk / DIVERGED).is_file() and at not in [path.name for path in checkpoints(trunk)]


def training_flops(cfg: TrainConfig, per_token: int) -> float:
    """FLOPs of a run's training. A run that branches off another run counts its own steps alone."""
    begins = decay_start(cfg.steps, cfg.optim) if cfg.branch_from else 0
    return per_token * cfg.batch_tokens * (cfg.steps - begins)


def evaluation_command(text: str) -> list[str]:
    """ "needle samples=20" -> ["needle", "samples=20"], checked. A value in single quotes may have spaces."""
    name, *overrides = re.findall(r"(?:'(?:\\.|[^'\\])*'|\S)+", text)
    if name not in OF_A_RUN:
        raise ValueError(f"evaluations has '{name}', but there is no such evaluation: use {', '.join(OF_A_RUN)}")
    try:
        evaluation_config(name, *overrides)
    except USER_ERRORS as error:
        schema = OmegaConf.get_type(ConfigStore.instance().load(f"{name}_schema.yaml").node)
        raise ValueError(f"evaluation '{text}': {explain(error, schema)}") from None
    return [name, *overrides]


def result_file(name: str, *overrides: str) -> str:
    """The name, without .json, of the file that an evaluation writes into a run's eval/."""
    return result_name(name, evaluation_config(name, *overrides))


def other_setting(found: Mapping[str, Any], name: str, *overrides: str) -> str | None:
    """The first setting of the evaluation that `found`, the configuration of a result, has otherwise; None if all agree.

    Machine and batch change no result, and of a path only the last part counts. A result of older code may lack a setting
    that was added later. The setting then had its default value.
    """
    default, wanted = evaluation_config(name), evaluation_config(name, *overrides)
    had, asked = (settings_of({"config": config}) for config in ({**default, **found}, wanted))
    if name == "harness" and set(asked.get("tasks", ())) <= set(had.get("tasks", ())):
        had |= {key: asked.get(key) for key in ("tasks", "include_path")}  # the result may have other commands' tasks, too
    keys = [key for key in (had | asked) if key not in ("device", "batch")]
    return next((key for key in keys if had.get(key) != asked.get(key)), None)


def refuse_other_results(run: PlannedRun) -> None:
    """Raise ValueError if the run's record lacks an evaluation, or has it with other settings or of another text."""
    record = run.record
    for name, *overrides in run.evaluations if not record["diverged"] else ():
        file = result_file(name, *overrides)
        result, wanted = record["evals"].get(file), evaluation_config(name, *overrides)
        if result is None:
            wrong = f"lacks {file}"
        elif key := other_setting(result.get("config", {}), name, *overrides):
            wrong = f"has {file} with {key}={result['config'].get(key)} instead of {key}={wanted.get(key)}"
        elif run.other_text(result, name, *overrides):
            wrong = f"has {file} of another text than {wanted['text'] or wanted['shards']}"
        else:
            continue
        raise ValueError(
            f"the record of the finished run {record['run']} {wrong}: ask for the evaluations of the records, or train "
            "and evaluate all runs again with name=OTHER records=none"
        )


@functools.cache
def evaluation_config(name: str, *overrides: str) -> dict[str, Any]:
    """An evaluation's resolved configuration as in its JSON, except for the run."""
    importlib.import_module(f"eval.{name}")  # registers the schema
    return OmegaConf.to_container(compose_job(name, ["run=none", *overrides]), resolve=True)


def train_config(overrides: Sequence[str], own: Sequence[str] = (), recorded: Vocabulary | None = None) -> TrainConfig:
    """The configuration of a run as in its config.yaml. own: overrides of single values outside of the model.

    recorded: the vocabulary of earlier runs, for data that are not on this machine. The caller must have imported train.py,
    which registers the schema.
    """
    return copy.deepcopy(_train_config(tuple(overrides), tuple(own), recorded))


@functools.cache
def _train_config(overrides: tuple[str, ...], own: tuple[str, ...], recorded: Vocabulary | None) -> TrainConfig:
    cfg, model = _composed(overrides, recorded)
    plain: TrainConfig = OmegaConf.to_object(_with_values(cfg, own) if own else cfg)
    plain.model = model
    return plain


@functools.cache
def _composed(overrides: tuple[str, ...], recorded: Vocabulary | None) -> tuple[DictConfig, DecoderConfig]:
    """train.py's configuration, and its model configuration with the values that come from the data."""
    groups = tuple(override for override in overrides if _chooses_group(override))
    cfg = _with_values(_chosen(groups), [override for override in overrides if override not in groups])
    plain: TrainConfig = OmegaConf.to_object(cfg)
    known = recorded and not prepared(plain.data)
    return cfg, fill_model(plain.model, recorded if known else open_tokenizer(plain.data))


@functools.cache
def _chosen(groups: tuple[str, ...]) -> DictConfig:
    """train.py's configuration with these choices, for which Hydra takes tenths of a second."""
    return compose_job("train", list(groups))


def _chooses_group(override: str) -> bool:
    """Whether the override names a file of a group (model=diff) or may do so, rather than set a value."""
    key = key_of(override)
    return "/" in key or "@" in key or ("." not in key and (override[0] in "+~" or (CONFIG_DIR / key).is_dir()))


def _with_values(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """A copy of `cfg` with the values of the overrides, set as Hydra sets them."""
    cfg = cfg.copy()
    ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(list(overrides)), cfg)
    return cfg


def read_epochs(cfg: TrainConfig) -> float:
    """How often training reads the prepared text; up to 1, no text is repeated. 0 for a task generated during training."""
    if is_task(cfg.data):
        return 0.0
    tokens = sum(len(shard) for shard in open_split(Path(cfg.data.dir), "train"))
    return cfg.steps * cfg.batch_tokens * (1 - cfg.data.retrieval.weight / 100) / tokens


def describe_model(cfg: TrainConfig) -> dict[str, Any]:
    """Heads, their width, head norm, parameters and FLOPs of the model, which is built on the meta device."""
    with torch.device("meta"):
        model = Decoder(cfg.model)
    attentions, none = [block.attention for block in model.blocks], torch.nn.Identity()
    norms = ["no" if isinstance(getattr(a, "head_norm", none), torch.nn.Identity) else "yes" for a in attentions]
    return {
        "heads": _joined(str(a.heads) for a in attentions),
        "d": _joined(str(a.width) for a in attentions),
        "head_norm": _joined(norms),
        **sizes(model),
    }


def _joined(parts: Any) -> str:
    return "/".join(dict.fromkeys(parts))
