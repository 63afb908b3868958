"""The made-up runs of the evaluations' tests."""

from tests.eval.conftest import *  # noqa: F403
