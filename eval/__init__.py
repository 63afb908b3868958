"""Evaluations of a trained run: one file and one command each."""

import configs.threads  # noqa: F401  # before any evaluation loads torch
