"""Composes the configuration of one command inside of another command."""

import re
import threading
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from configs import CONFIG_DIR

_LOCK = threading.Lock()  # Hydra's state is global


def compose_job(name: str, overrides: list[str]) -> Any:
    """The configuration that the command `name` gets from these overrides."""
    with _LOCK:
        if GlobalHydra.instance().is_initialized():
            return compose(name, overrides)
        with initialize_config_dir(str(CONFIG_DIR.resolve()), version_base=None):  # in a launcher's job
            return compose(name, overrides)


def merged(*parts: list[str]) -> list[str]:
    """The overrides in order; among several overrides of one key, the last is kept."""
    last: dict[str, str] = {}
    for override in (o for part in parts for o in part):
        key = override.split("=")[0].lstrip("+~")
        last.pop(key, None)
        last[key] = override
    return list(last.values())


def quoted(override: str) -> str:
    """The override, its value in quotes if the value has characters that Hydra accepts only in quotes."""
    key, value = override.split("=", 1)
    plain = re.fullmatch(r"[\w./:@%+-]*", value)
    return override if plain else f"{key}='" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
