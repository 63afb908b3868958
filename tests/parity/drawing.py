"""Random configurations: drawn from PARITY_SEED, which tests/conftest.py sets to the date."""

import os
import random
from collections.abc import Callable
from typing import Any

DRAWS = [f"{os.environ['PARITY_SEED']}-{i}" for i in range(8)]


def choices(name: str) -> Callable[..., Any]:
    """pick(a, b, ..) -> one of its arguments; what is picked depends on `name` alone."""
    draw = random.Random(name)
    return lambda *options: draw.choice(options)
