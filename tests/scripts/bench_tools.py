"""Tiny sizes for the tests of scripts/bench.py."""

import torch

from bench.models import BenchConfig
from bench.timing import Row
from model.config import DecoderConfig
from training.distributed import World

CPU = World(0, 1, torch.device("cpu"))
TINY = {"rounds": 2, "device": "cpu", "dtype": "float32", "heads": 4, "width": 8, "batch": 2}
SMALL = {"n_layer": 2, "n_head": 8, "d_model": 64, "context": 128}


def tiny(what: str, **changes: object) -> BenchConfig:
    return BenchConfig(what=what, model=DecoderConfig(**SMALL), **TINY | changes)


def row_of(rows: list[Row], **labels: object) -> Row:
    (found,) = [row for row in rows if labels.items() <= row.labels.items()]
    return found
