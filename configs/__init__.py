"""Commands: Hydra composes a command's configuration, a dataclass checks it, and a user's mistake prints one line.

Every command but scripts/gpu.py is `@command(name, Schema)` over `main(cfg: Schema)`; one with configuration groups has a
primary file `configs/NAME.yaml`, which begins its defaults with `NAME_schema` and `NAME_hydra`.
"""

import contextlib
import difflib
import functools
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

CONFIG_DIR = Path(__file__).parent
OUT_OF_MEMORY = "OutOfMemoryError"  # the name of torch's class; torch is not imported here
LESS_MEMORY = (
    "the GPU has too little free memory: use a smaller micro_batch= (training) or batch= (evaluations), "
    "activation_checkpointing=true, a smaller model or context, or end other processes that use the GPU"
)
USER_ERRORS = (ValueError, OSError, MemoryError, HydraException, OmegaConfBaseException)
# Hydra must not write its own folder and log: their time-stamped names would differ between the ranks of a run.
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
# Run as a file of its own: importing the package model would import torch, which data.prepare does not need (190 MB).
check_ranges = runpy.run_path(str(CONFIG_DIR.parent / "model" / "ranges.py"))["check_ranges"]
ASKED_FOR_TRACEBACK = os.environ.get("HYDRA_FULL_ERROR") == "1"


def command(name: str, schema: type) -> Callable[[Callable[[Any], Any]], Callable[[], None]]:
    """Turn `main(cfg)` into a command line. `cfg` is a plain `schema` object with checked types and ranges (model/ranges.py).

    A user's mistake (`ValueError`, `OSError`, a wrong override) prints `error: ...` on one line and exits with 2, and so does a
    GPU without free memory; HYDRA_FULL_ERROR=1 shows the traceback instead. A sweep gets what `main` returns.
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
            # Hydra then raises errors instead of printing several lines.
            with one_line_errors(schema), environment_variables(HYDRA_FULL_ERROR="1"):
                if {"--help", "-h"} & set(sys.argv[1:]):
                    from configs.help import print_help  # imported here because only --help needs it

                    return print_help(name, schema, sys.modules[main.__module__].__doc__ or "")
                sys.argv[1:] = options_first([with_home(argument) for argument in sys.argv[1:]])
                hydra.main(version_base=None, config_path=str(CONFIG_DIR), config_name=name)(task)()

        return entry

    return decorate


def with_home(argument: str) -> str:
    """`path=~/x` with the home folder, which a shell puts only at the beginning of a word; also in quotes and in lists."""
    return re.sub(r"(?<=[=,\['\"])~(?=/|$)", lambda _: os.path.expanduser("~"), argument)


def options_first(arguments: list[str]) -> list[str]:
    """Hydra's options before all overrides, because Hydra takes no option between them. ValueError for other options."""
    for argument in arguments:
        if argument.startswith("-") and argument.split("=")[0] not in HYDRA_OPTIONS:
            raise ValueError(f"cannot read {argument}: type KEY=VALUE without dashes, as in steps=20")
    return sorted(arguments, key=lambda argument: argument[0:1] == "~" or (argument[0:1] != "-" and "=" in argument))


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


@contextlib.contextmanager
def one_line_errors(schema: type, every_rank: bool = False) -> Iterator[None]:
    """Print a user's error as one line and exit with 2; a bug keeps its traceback.

    every_rank: each process of torchrun prints its own error with its rank, not rank 0 alone.
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
            line = f"error{where}: {LESS_MEMORY if out_of_memory else explain(error, schema)}\n"
            print(line, end="", file=sys.stderr, flush=True)  # in one write: other ranks print as well
        if every_rank and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            sys.stdout.flush()
            os._exit(2)  # at a normal end nccl may wait for the other processes, and torchrun would not end them
        sys.exit(2)


def explain(error: BaseException, schema: type) -> str:
    """One line for `error`: what is wrong and, for an unknown or missing key, what to type instead."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key, text = getattr(cause, "full_key", None), str(cause)
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override!r}: type KEY=VALUE, a value with special characters as in 'path=\"a=b.txt\"'"
    if isinstance(error, MissingConfigException):
        if error.missing_cfg_file == "hydra/sweeper/optuna":
            return "sweep=optuna needs the package 'hydra-optuna-sweeper': pip install hydra-optuna-sweeper"
        return f"there is no {error.missing_cfg_file}: use one of {', '.join(error.options or ())}"
    if isinstance(cause, MissingMandatoryValue):
        return f"'{key}' is required: add {key}=..."
    if isinstance(cause, ConfigAttributeError | ConfigKeyError):
        close = difflib.get_close_matches(key, _keys(OmegaConf.to_container(OmegaConf.structured(schema))), n=1, cutoff=0.5)
        hint = f"did you mean '{close[0]}'?" if close else "`--cfg job` lists the keys"
        return f"there is no configuration key '{key}'; {hint}"
    text = f"{key}: {text.splitlines()[0]}" if key else text  # the other lines repeat the key
    return " ".join(text.split()) or type(error).__name__  # a MemoryError has no text


def _keys(group: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in group.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")
