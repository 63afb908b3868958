"""Composes the configuration of one command inside of another command."""

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
