"""Commands: Hydra composes a command's configuration, a dataclass checks it, and a user's mistake prints one line.

Every command but scripts/gpu.py is `@command(name, Schema)` over `main(cfg: Schema)`; one with configuration groups has a
primary file `configs/NAME.yaml`, which begins its defaults with `NAME_schema` and `NAME_hydra`.
"""

import codecs
import contextlib
import difflib
import functools
import io
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from configs.files import flatten

CONFIG_DIR = Path(__file__).parent
LESS_MEMORY = (
    "has too little free memory: use a smaller micro_batch= (training), batch= (evaluations) or samples=, "
    "activation_checkpointing=true, or a smaller model or context"
)
NO_MEMORY = ("can't allocate memory", "bad_alloc")  # in a RuntimeError of torch: of a CPU
USER_ERRORS = (ValueError, OSError, MemoryError, HydraException, OmegaConfBaseException)
# Hydra must not write a time-stamped folder or a log: their names would differ between the ranks of a run.
HYDRA_SETTINGS = {
    "run": {"dir": "."},
    "sweep": {"dir": "runs", "subdir": "."},
    "output_subdir": None,
    "job": {"chdir": False},
    "job_logging": {"root": {"handlers": ["console"]}, "handlers": {"file": {"delay": True}}},
}
HYDRA_OPTIONS = set(
    "--cfg -c --resolve --multirun -m --run -r --package -p --info -i --hydra-help --version --shell-completion -sc "
    "--config-path -cp --config-name -cn --config-dir -cd --experimental-rerun".split()
)
IGNORED = ("hydra.run.dir", "hydra.sweep.subdir", "hydra.job.chdir", "hydra.output_subdir")
# Importing the package model would import torch, which data.prepare does not need (190 MB).
check_ranges = runpy.run_path(str(CONFIG_DIR.parent / "model" / "ranges.py"))["check_ranges"]
TRACEBACK = os.environ.get("HYDRA_FULL_ERROR") == "1"


def command(name: str, schema: type) -> Callable[[Callable[[Any], Any]], Callable[[], None]]:
    """Turn `main(cfg)` into a command line. `cfg` is a plain `schema` object with checked types and ranges (model/ranges.py).

    A user's mistake (USER_ERRORS) prints `error: ...` on one line and exits with 2; HYDRA_FULL_ERROR=1 shows the traceback.
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
            with one_line_errors(schema, every_rank=True):
                return main(config)

        @functools.wraps(main)
        def entry() -> None:
            if isinstance(sys.stdout, io.TextIOWrapper) and codecs.lookup(sys.stdout.encoding).name == "ascii":
                sys.stdout.reconfigure(errors="replace")  # "?" for what an ASCII terminal lacks
            # Hydra then raises errors instead of printing several lines.
            with one_line_errors(schema), patch.dict(os.environ, HYDRA_FULL_ERROR="1"):
                if {"--help", "-h"} & set(sys.argv[1:]):
                    from configs.help import print_help  # imported here because only --help needs it

                    return print_help(name, schema, sys.modules[main.__module__].__doc__ or "")
                sys.argv[1:] = options_first([with_home(argument) for argument in sys.argv[1:]])
                hydra.main(version_base=None, config_path=str(CONFIG_DIR), config_name=name)(task)()

        return entry

    return decorate


def with_home(argument: str) -> str:
    """`path=~/x` with the home folder, also in quotes and in lists; a prompt stays as it is typed."""
    if argument.startswith("prompt="):
        return argument
    return re.sub(r"(?<=[=,\['\"])~(?=/|$)", lambda _: os.path.expanduser("~"), argument)


def options_first(arguments: list[str]) -> list[str]:
    """Hydra's options before all overrides, because Hydra takes no option between them."""
    for argument in arguments:
        key = argument.split("=")[0]
        if argument.startswith("-") and key not in HYDRA_OPTIONS:
            raise ValueError(f"cannot read {argument}: type KEY=VALUE without dashes, as in steps=20")
        if key.lstrip("+") in IGNORED:
            raise ValueError(f"{key}= has no effect here: use run_dir=, runs= or hydra.sweep.dir= (training), or out=")
    return sorted(arguments, key=lambda argument: argument[0:1] == "~" or (argument[0:1] != "-" and "=" in argument))


@contextlib.contextmanager
def one_line_errors(schema: type, every_rank: bool = False) -> Iterator[None]:
    """Print a user's error as one line and exit with 2; a bug keeps its traceback. every_rank: not rank 0 alone prints it."""
    try:
        yield
    except Exception as error:
        full = "the GPU" if type(error).__name__ == "OutOfMemoryError" else ""  # of torch, which is not imported here
        if isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY):
            full = "this machine"
        if TRACEBACK or not (full or isinstance(error, USER_ERRORS)):
            raise
        rank = os.environ.get("RANK", "0")
        if rank == "0" or every_rank:
            where = "" if rank == "0" else f" on rank {rank}"
            line = f"error{where}: {f'{full} {LESS_MEMORY}' if full else explain(error, schema)}\n"
            print(line, end="", file=sys.stderr, flush=True)  # in one write: other ranks print as well
        if every_rank and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            sys.stdout.flush()
            os._exit(2)  # at a normal end nccl may wait for the other processes, and torchrun would not end them
        sys.exit(2)


def explain(error: BaseException, schema: type) -> str:
    """One line for `error`: what is wrong and what to type instead."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key, text = getattr(cause, "full_key", None), str(cause)
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override!r}: type KEY=VALUE, a value with special characters as in 'path=\"a=b.txt\"'"
    if isinstance(error, MissingConfigException):
        if error.missing_cfg_file == "hydra/sweeper/optuna":
            return "sweep=optuna needs the package 'hydra-optuna-sweeper': pip install hydra-optuna-sweeper"
        wrong, name = f"there is no {error.missing_cfg_file}", str(error.missing_cfg_file).removeprefix("data/")
        prepared = "" if name == error.missing_cfg_file else f" (text prepared as data.name={name}: data=text data.name={name})"
        return f"{wrong}: use one of {', '.join(error.options or ())}{prepared}"
    if isinstance(cause, MissingMandatoryValue):
        return f"'{key}' is required: add {key}=..."
    if isinstance(cause, ConfigAttributeError | ConfigKeyError):
        close = difflib.get_close_matches(key, flatten(OmegaConf.to_container(OmegaConf.structured(schema))), n=1, cutoff=0.5)
        hint = f"did you mean '{close[0]}'?" if close else "`--cfg job` lists the keys"
        return f"there is no configuration key '{key}'; {hint}"
    text = f"{key}: {text.splitlines()[0]}" if key else text  # the other lines repeat the key
    return " ".join(text.split()) or type(error).__name__  # a MemoryError has no text
