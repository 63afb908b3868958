"""The text of a run: the folder is prepared as it was asked for, and a run goes on with the text that it began with."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from configs.files import read_json_lines
from data.config import DataConfig
from data.shards import read_meta
from data.stream import is_task, text_digest
from data.tokenizer import BPE_TOKENS
from training.checkpoint import flatten

# Options that only data.prepare reads, as meta.json names them.
PREPARING = (
    *("dataset", "subset", "split", "data_files", "column", "val_fraction", "max_tokens", "shard_tokens"),
    *("tokenizer.name", "tokenizer.path", "tokenizer.vocab_size"),
)


def refuse_ignored_options(cfg: DataConfig, overrides: Sequence[str]) -> None:
    """ValueError if the command line gives an option of the preparation another value than the prepared folder was made with.

    overrides: those of the command line. Other values are not compared, because they are often the defaults of data=NAME.
    """
    made = None if is_task(cfg) else (read_meta(cfg.dir) or {}).get("request")
    if not isinstance(made, dict):  # shards of another project
        return
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    typed = flatten({override.key_or_group: override.value() for override in parsed})
    values = flatten(asdict(cfg))
    for option in PREPARING:
        theirs, ours = made.get(option), values[option]
        if option == "tokenizer.vocab_size":
            theirs, ours = theirs or BPE_TOKENS, ours or BPE_TOKENS
        known = option in made or option == "tokenizer.path"  # a request without this option was made without a path
        if f"data.{option}" in typed and known and theirs != ours:
            wrong = f"{cfg.dir} was prepared with data.{option}={theirs}, not {ours}, and training does not prepare it again"
            raise ValueError(f"{wrong}: set data.{option}={theirs}, or prepare as another data.name=NAME")


def refuse_other_text(run: Path, cfg: DataConfig) -> None:
    """ValueError if `run` was trained on other shards than those of `cfg`. An older run does not say what it was trained on."""
    if trained_on(run) not in (None, text_digest(cfg)):
        wrong = f"{run} was trained on other shards than those in {cfg.dir} (other numbers of tokens or checksums)"
        raise ValueError(f"{wrong}: set data.dir= to the folder that it was trained on, or start a new run")


def trained_on(run: Path) -> str | None:
    """The digest of the shards that `run` was trained on; None if the run does not say it."""
    return next(read_json_lines(run / "metrics.jsonl"), {}).get("text_digest")
