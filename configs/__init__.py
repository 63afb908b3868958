"""Commands: Hydra composes a command's configuration, a dataclass checks it, and a user's mistake prints one line.

Every command but scripts/gpu.py is `@command(name, Schema)` over `main(cfg: Schema)`. A command
with configuration groups has a primary file `configs/NAME.yaml`; a command without groups (for example an evaluation) has
only its dataclass.
"""

import contextlib
import difflib
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from configs.quoting import retyped
from configs.ranges import check_ranges

CONFIG_DIR = Path(__file__).parent
OUT_OF_MEMORY = "OutOfMemoryError"  # the name of torch's class; torch is not imported here
USER_ERRORS = (ValueError, OSError, MemoryError, HydraException, OmegaConfBaseException)
# Hydra must not write its own folder and log: their time-stamped names would differ between the ranks of a run.
HYDRA_SETTINGS = {
    "run": {"dir": "."},
    "sweep": {"dir": "runs", "subdir": "."},
    "output_subdir": None,
    "job": {"chdir": False},
    "job_logging": {"root": {"handlers": ["console"]}, "handlers": {"file": {"delay": True}}},
}
ASKED_FOR_TRACEBACK = os.environ.get("HYDRA_FULL_ERROR") == "1"


def command(name: str, schema: type) -> Callable[[Callable[[Any], Any]], Callable[[], None]]:
    """Turn `main(cfg)` into a command line. `cfg` is a plain `schema` object; a sweep gets the value that `main` returns.

    The types of all fields are checked, and the ranges in `steps: Annotated[int, "[1, inf)"]` (configs/ranges.py).

    A user's mistake (`ValueError`, `OSError`, a wrong override) prints `error: ...` on one line and exits with 2, and so does a
    GPU without free memory; HYDRA_FULL_ERROR=1 shows the traceback instead. A primary file `configs/NAME.yaml` must begin its
    defaults with `NAME_schema` and `NAME_hydra`.
    """

    def decorate(main: Callable[[Any], Any]) -> Callable[[], None]:
        store = ConfigStore.instance()
        store.store(name=f"{name}_schema", node=schema)
        store.store(name=f"{name}_hydra", node={"hydra": HYDRA_SETTINGS}, package="_global_")
        if not (CONFIG_DIR / f"{name}.yaml").exists():
            store.store(name=name, node={"defaults": [f"{name}_schema", f"{name}_hydra", "_self_"]})

        def task(cfg: Any) -> Any:
            with one_line_errors(schema):
                config = OmegaConf.to_object(cfg)
                check_ranges(config)
            with one_line_errors(schema, every_rank=True, config=config):
                return main(config)

        @functools.wraps(main)
        def entry() -> None:
            # Hydra then raises errors instead of printing several lines.
            with one_line_errors(schema), environment_variables(HYDRA_FULL_ERROR="1"):
                if {"--help", "-h"} & set(sys.argv[1:]):
                    return print_help(name, schema, sys.modules[main.__module__].__doc__ or "")
                if unknown := get_args_parser().parse_known_args()[1]:
                    dashes = "type KEY=VALUE without dashes, as in steps=20"
                    fix = dashes if unknown[0].startswith("-") else "put -m before all overrides"
                    raise ValueError(f"cannot read {unknown[0]}: {fix}")
                hydra.main(version_base=None, config_path=str(CONFIG_DIR), config_name=name)(task)()

        return entry

    return decorate


@contextlib.contextmanager
def environment_variables(**values: str) -> Iterator[None]:
    """A context in which the environment of this process, and of new processes, has these variables."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def print_help(name: str, schema: type, about: str) -> None:
    """Print what the command does and what its fields mean; overrides on the command line change the shown defaults."""
    from configs.help import help_text  # imported here because only --help needs it

    overrides = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    try:
        print(help_text(name, schema, about, CONFIG_DIR, overrides), flush=True)
    except BrokenPipeError:  # the reader (head, a pager) has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def one_line_errors(schema: type, every_rank: bool = False, config: Any = None) -> Iterator[None]:
    """Print a user's error as one line and exit with 2; a bug keeps its traceback.

    every_rank: each process of torchrun prints its own error with its rank, not rank 0 alone. config: what the command runs
    with; it tells what needs less memory.
    """
    try:
        yield
    except Exception as error:
        out_of_memory = type(error).__name__ == OUT_OF_MEMORY
        if ASKED_FOR_TRACEBACK or not (out_of_memory or isinstance(error, USER_ERRORS)):
            raise
        rank = os.environ.get("RANK", "0")
        if rank == "0" or every_rank:
            where = "" if rank == "0" else f" on rank {rank}"
            said = needs_less_memory(config) if out_of_memory else explain(error, schema)
            print(f"error{where}: {said}", file=sys.stderr, flush=True)
        if every_rank and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            sys.stdout.flush()
            os._exit(2)  # at a normal end nccl may wait for the other processes, and torchrun would not end them
        sys.exit(2)


def needs_less_memory(config: Any) -> str:
    """One line for a GPU whose memory is full: the fields of `config` that take less of it."""
    fixes = []
    for name in ("micro_batch", "batch"):
        if hasattr(config, name) and (now := getattr(config, name)) != 1:
            # a divisor fits the batch of a step, too
            half = now and next(n for n in range(now // 2, 0, -1) if now % n == 0)
            fixes.append(f"use {name}={half}" if half else f"set {name}= to half of what it is now, or less")
    if getattr(config, "activation_checkpointing", True) is False:
        fixes.append("use activation_checkpointing=true")
    fix = ", or ".join(fixes) or "use a smaller model or context"
    return f"the GPU has too little free memory: {fix}, or end other processes that use the GPU"


def explain(error: BaseException, schema: type) -> str:
    """One line for `error`: what is wrong and, for an unknown or missing key, what to type instead."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key = getattr(cause, "full_key", None)
    if key and "not in" in str(cause):
        close = difflib.get_close_matches(key, _keys(OmegaConf.structured(schema)), n=1, cutoff=0.5)
        hint = f"did you mean '{close[0]}'?" if close else "`--cfg job` lists the keys"
        return f"there is no configuration key '{key}'; {hint}"
    if key and "is not a ListConfig" in str(cause):
        return f"{key} takes a list, even of one entry: put its value in brackets, {key}=[...]"
    if isinstance(cause, MissingMandatoryValue):
        return f"'{key}' is required: add {key}=..."
    if (typed := _retyped(error)) is not None:
        return typed
    text = str(error).split("Config search path")[0]
    if "Config group override must be a string" in text:
        return "a group (model=, size=, data=, optim=) takes a name, not a number, as in size=124m: --help lists the names"
    if "'hydra/sweeper/optuna'" in text:
        return "sweep=optuna needs the package 'hydra-optuna-sweeper': pip install hydra-optuna-sweeper"
    if other := re.match(r"In 'experiment/(.*?)': Could not override '(.*?)'", text):
        return f"experiment={other[1]} sets {other[2]}=, which this command does not have: give it to train.py"
    text = text.split("full_key:")[0] if key is None else f"{key}: {str(cause).split('full_key:')[0]}"
    return " ".join(text.split()) or type(error).__name__  # a MemoryError has no text


def _retyped(error: BaseException) -> str | None:
    """What to type instead of an override that Hydra cannot read; None for other errors."""
    if isinstance(error, OverrideParseException):
        return retyped(error.override)
    comma = re.match(r"Ambiguous value for argument '(.*)'$", str(error), re.MULTILINE)
    return retyped(comma[1], ambiguous=True) if comma and isinstance(error, HydraException) else None


def _keys(cfg: Any, prefix: str = "") -> list[str]:
    keys = []
    for key in cfg:
        keys.append(f"{prefix}{key}")
        group = cfg._get_node(key)
        if OmegaConf.is_dict(group) and not OmegaConf.is_missing(cfg, key) and group._content:
            keys += _keys(group, f"{prefix}{key}.")
    return keys
