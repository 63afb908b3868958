"""The configuration that a command would get, composed within another command."""

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
