"""A run of a study as the commands that make it, train.py and then evaluations, with the configurations of both."""

import copy
import functools
import importlib
import json
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from ablation.records import Record, describes, record_of, run_of, write_records
from configs import USER_ERRORS, explain
from configs.composing import compose_job, key_of, quoted
from configs.files import write_json
from configs.provenance import ROOT
from data.shards import open_split
from data.stream import is_task, open_tokenizer, trained_on
from eval.common import OF_A_RUN, result_name
from eval.report.runs import DIVERGED, Run, read_json, read_run, settings_of
from eval.texts import Texts
from model.decoder import Decoder
from training.checkpoint import checkpoints, of_step
from training.optim import decay_start
from training.run import TrainConfig, refuse_other_config, sizes, take_architecture

# train.py's last line after a loss or gradient that is not finite: the run is then a result (diverged) and no failure
INFINITE = re.compile(r"error: ((?:the loss is \S+|\S+ is not finite) at step \d+(?: \(gradient norm \S+\))?)")
REPEAT = "repeat its overrides, or start anew with name=OTHER"


@dataclass(frozen=True)
class Evaluation:
    """python -m eval.NAME OVERRIDES. settings: its configuration as in its JSON; default: the same without overrides."""

    name: str
    overrides: list[str]
    settings: dict[str, Any]
    default: dict[str, Any]

    @property
    def file(self) -> str:
        """The name, without .json, of the file that the evaluation writes into a run's eval/."""
        return result_name(self.name, self.settings)

    def other_setting(self, had: Mapping[str, Any]) -> str | None:
        """The first setting that differs in `had`, the settings of a result; what an older result lacks had its default."""
        before, now = (settings_of({"config": config}) for config in ({**self.default, **had}, self.settings))
        keys = [key for key in self.default if key not in ("device", "batch")]  # not those that only older code has
        return next((key for key in keys if before.get(key) != now.get(key)), None)


def read_evaluation(text: str) -> Evaluation:
    """ "needle samples=20" -> the evaluation. A value in single quotes may have spaces. ValueError if a word is wrong."""
    name, *overrides = re.findall(r"(?:'(?:\\.|[^'\\])*'|\S)+", text)
    if name not in OF_A_RUN:
        raise ValueError(f"evaluations has '{name}', but there is no such evaluation: use {', '.join(OF_A_RUN)}")
    importlib.import_module(f"eval.{name}")  # registers the schema
    try:
        composed = (compose_job(name, ["run=none", *given]) for given in (overrides, []))
        evaluation = Evaluation(name, overrides, *(OmegaConf.to_container(config, resolve=True) for config in composed))
        result_name(name, evaluation.settings)
        return evaluation
    except USER_ERRORS as error:
        schema = OmegaConf.get_type(ConfigStore.instance().load(f"{name}_schema.yaml").node)
        raise ValueError(f"evaluation '{text}': {explain(error, schema)}") from None


@dataclass
class PlannedRun:
    """One arm at one seed. record: of a run that was finished elsewhere. stale: why a record was not taken."""

    arm: str
    seed: int
    folder: Path
    overrides: list[str]
    config: TrainConfig
    evaluations: list[Evaluation]
    flops_per_token: int
    texts: Texts = field(default_factory=Texts)
    record: Record | None = None
    stale: str | None = None

    def take_over(self, record: Record | None) -> None:
        """Take the run's record if it fits and no checkpoint is here. ValueError: other shards, or a folder of another run."""
        if self._takes(record):
            self.record = record
            self.texts.refuse_other_shards(self.name, record["facts"].get("text_digest"), self.config.data)
        elif (self.folder / "config.yaml").is_file():
            refuse_other_config(self.folder, asdict(self.config), advice=REPEAT)
            self.texts.refuse_other_shards(str(self.folder), trained_on(self.folder), self.config.data)

    def _takes(self, record: Record | None) -> bool:
        if not record or checkpoints(self.folder) or not describes(record, self.config):
            return False
        if record["diverged"]:  # without this file in its folder, the run is to be trained again
            return self.diverged or not (self.folder / "config.yaml").is_file()
        faults = (self.fault(one, record["evals"].get(one.file), record["tokenizer"]) for one in self.evaluations)
        self.stale = next(filter(None, faults), None)
        return self.stale is None

    def fault(self, evaluation: Evaluation, result: Mapping[str, Any] | None, fingerprint: str | None) -> str | None:
        """Why `result` is not what the evaluation would write now; None if it is. Of perplexity the text counts, too."""
        settings, file = evaluation.settings, evaluation.file
        if result is None:
            return f"lacks {file}"
        if key := evaluation.other_setting(result.get("config", {})):
            return f"has {file} with another {key} than {settings.get(key)}"
        sha256 = result["results"].get("sha256") if evaluation.name == "perplexity" else None
        known = sha256 and self.texts.tested(self.config.data, fingerprint, self.config.model.context, settings)
        other = known not in (None, sha256)
        return f"has {file} of another text than {settings['text'] or settings['shards']}" if other else None

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def log(self) -> Path:
        return self.folder.parent / "logs" / f"{self.name}.log"

    @property
    def trained(self) -> bool:
        return checkpoints(self.folder)[-1:] == [of_step(self.folder, self.config.steps)]

    @property
    def diverged(self) -> bool:
        return (self.folder / DIVERGED).is_file() or bool(self.record and self.record["diverged"])

    @property
    def work(self) -> float:
        return training_flops(self.config, self.flops_per_token)

    def left(self) -> list[list[str]]:
        """The commands still to run: training, and evaluations without a result of this training."""
        if self.diverged or self.record:
            return []
        overrides, trunk = self.overrides, self.config.branch_from
        if trunk and trunk_ended_early(Path(trunk), self.config):  # the trunk has diverged since this run was planned
            overrides = [override for override in overrides if key_of(override) != "branch_from"]
        training = [] if self.trained else [[str(ROOT / "train.py"), *overrides]]
        stale = [one for one in self.evaluations if training or not self.evaluated(one)]
        return training + [["-m", f"eval.{one.name}", quoted(f"run={self.folder}"), *one.overrides] for one in stale]

    def evaluated(self, evaluation: Evaluation) -> bool:
        try:
            content = json.loads((self.folder / "eval" / f"{evaluation.file}.json").read_text())
            whole = isinstance(content["config"], dict) and isinstance(content["results"], dict)
        except (OSError, ValueError, KeyError, TypeError):  # none, or damaged
            return False
        fingerprint = (read_json(self.folder / "tokenizer.json") or {}).get("fingerprint")
        return whole and content.get("step") == self.config.steps and not self.fault(evaluation, content, fingerprint)

    def check(self, arguments: list[str], code: int, output: str) -> bool:
        """After a command: whether to go on with the next. ValueError if it failed; a loss that diverged is a result."""
        training = arguments[0] != "-m"
        if code or (training and not self.trained):
            infinite = INFINITE.search(output)
            if not (training and infinite):
                lines = output.splitlines()
                error = ([line for line in lines if line.startswith("error: ")] or lines)[-1].removeprefix("error: ")
                error = f"killed by {signal.Signals(-code).name}" if code < 0 else error
                again = "repeat this command: finished runs are kept"
                raise ValueError(f"{self.name}: {error} (exit status {code}, see {self.log}); {again}")
            write_json(self.folder / DIVERGED, {"error": infinite.group(1)})
        return not self.diverged

    def finished(self) -> str:
        """Store the record of a finished run that was made here; returns the outcome in a word."""
        if not self.record and not self.left():
            write_records(self.folder.parent / "records" / f"{self.name}.jsonl", [record_of(self.measured())])
        return "diverged" if self.diverged else "done"

    def measured(self) -> Run:
        return self._recorded if self.record else read_run(self.folder)

    @functools.cached_property
    def _recorded(self) -> Run:
        return run_of(self.record)


def trunk_ended_early(trunk: Path, cfg: TrainConfig) -> bool:
    """Whether a run diverged before it wrote the checkpoint off which `cfg` would branch."""
    return (trunk / DIVERGED).is_file() and not of_step(trunk, decay_start(cfg.steps, cfg.optim)).is_dir()


def training_flops(cfg: TrainConfig, per_token: int) -> float:
    """FLOPs of a run's training. Of a run that branches off another, the steps after that."""
    begins = decay_start(cfg.steps, cfg.optim) if cfg.branch_from else 0
    return per_token * cfg.batch_tokens * (cfg.steps - begins)


def train_config(overrides: Sequence[str]) -> TrainConfig:
    """train.py's configuration. The caller must have imported train.py, which registers the schema."""
    config = OmegaConf.to_object(compose_job("train", list(overrides)))
    take_architecture(config, overrides)
    return config


def with_values(config: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """A copy of `config` with these values under dotted keys, none of them of the model."""
    config = copy.deepcopy(config)
    for key, value in values.items():
        *groups, name = key.split(".")
        setattr(functools.reduce(getattr, groups, config), name, value)
    return config


def read_epochs(cfg: TrainConfig) -> float:
    """How often training reads the prepared text; 0 for a task generated during training."""
    if is_task(cfg.data):
        return 0.0
    vocab_size = open_tokenizer(cfg.data).vocab_size  # which says the width of nanoGPT's integers
    tokens = sum(len(shard) for shard in open_split(Path(cfg.data.dir), "train", vocab_size=vocab_size))
    return cfg.steps * cfg.batch_tokens * (1 - cfg.data.retrieval.weight / 100) / tokens


def describe_model(cfg: TrainConfig) -> dict[str, Any]:
    with torch.device("meta"):
        model = Decoder(cfg.model)
    attentions, none = [block.attention for block in model.blocks], torch.nn.Identity()
    shapes = {
        "heads": [str(a.heads) for a in attentions],
        "d": [str(a.width) for a in attentions],
        "head_norm": ["no" if isinstance(getattr(a, "head_norm", none), torch.nn.Identity) else "yes" for a in attentions],
    }
    return {key: "/".join(dict.fromkeys(values)) for key, values in shapes.items()} | sizes(model)
