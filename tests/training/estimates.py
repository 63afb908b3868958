"""Formulas of what a process holds and sends under training/parallel.py, which the tests compare with gloo processes.

All training is in float32 with autocast, so that a parameter, a gradient and each number that an optimizer remembers have 4
bytes. docs/SCALE.md has a table of these formulas for large models.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from model.config import DecoderConfig
from model.decoder import Decoder
from training.optim import OptimConfig, build_optimizers

BYTES = 4  # of a float32


@dataclass(frozen=True)
class Layout:
    """How the processes share a model: `processes` in all, of which `shard` hold one copy together (1: ddp)."""

    kind: str
    processes: int
    shard: int

    @classmethod
    def of(cls, kind: str, processes: int, shard: int) -> "Layout":
        """The layout of `parallel=kind`; shard: processes per copy, for hsdp only."""
        return cls(kind, processes, {"ddp": 1, "fsdp": processes, "hsdp": shard}[kind])

    def held(self, shape: torch.Size) -> int:
        """Elements of a parameter on the process with the largest shard: rows are split over processes, scalars are not."""
        return -(-shape[0] // self.shard) * math.prod(shape[1:]) if shape else 1

    def padded(self, shapes: Mapping[str, torch.Size]) -> int:
        """Elements that are sent for these parameters, padded to equal shards on all processes; without scalars."""
        return self.shard * sum(self.held(shape) for shape in shapes.values() if shape)


def skeleton(cfg: DecoderConfig) -> Decoder:
    """The decoder without weights."""
    with torch.device("meta"):
        return Decoder(cfg)


def states(model: Decoder, layout: Layout, optim: str = "adamw") -> dict[str, int]:
    """Bytes of `parameters`, `gradients` and `optimizer` that the process with the largest shard keeps during a step.

    AdamW keeps two numbers per parameter and a step count per tensor, Muon one number per parameter.
    """
    held = {name: BYTES * layout.held(p.shape) for name, p in model.named_parameters()}
    remembered = 0
    for optimizer in build_optimizers(model, OptimConfig(name=optim)):
        muon = isinstance(optimizer, torch.optim.Muon)
        names = [name for group in optimizer.param_groups for name in group["names"]]
        remembered += sum(held[name] * (1 if muon else 2) + (0 if muon else BYTES) for name in names)
    total = sum(held.values())
    return {"parameters": total, "gradients": total, "optimizer": remembered}


def messages(model: Decoder, layout: Layout, micros: int = 1, optim: str = "adamw") -> dict[str, int]:
    """Bytes of the tensors that the collectives of one step transfer (all_to_all: sent by each process): collective -> bytes.

    fsdp and hsdp gather all parameters for the forward pass of each of the `micros` micro batches, and the blocks' parameters
    again for its backward pass. Gradients are averaged in the last micro batch; hsdp also reduces them over the processes of a
    copy in every micro batch. The gradient norm is one number. Muon gathers its updates (ddp), or exchanges the rows of its
    matrices, and then of their updates (fsdp, hsdp).
    """
    sent_bytes = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce", "all_to_all"), 0)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    scalars = sum(not shape for shape in shapes.values())
    if layout.processes == 1:
        return sent_bytes
    if layout.kind == "ddp":
        gradients = BYTES * sum(map(math.prod, shapes.values()))
        return sent_bytes | {"all_gather": muon_rows(model, layout, optim), "all_reduce": gradients}
    every = BYTES * layout.padded(shapes)
    blocks = BYTES * layout.padded({name: shape for name, shape in shapes.items() if name.startswith("blocks.")})
    averaged = every // layout.shard if layout.kind == "hsdp" else 0  # a process's gradients, averaged over the copies
    return {
        "all_gather": micros * (every + blocks),
        "reduce_scatter": every * (micros if layout.kind == "hsdp" else 1),
        "all_reduce": averaged + BYTES * (scalars + 1),
        "all_to_all": 2 * muon_rows(model, layout, optim),
    }


def muon_rows(model: Decoder, layout: Layout, optim: str) -> int:
    """Bytes of the rows that a process holds of all of Muon's matrices in bfloat16, with zeros for equal shares; AdamW: 0."""
    optimizers = build_optimizers(model, OptimConfig(name=optim))
    matrices = [p for o in optimizers if isinstance(o, torch.optim.Muon) for group in o.param_groups for p in group["params"]]
    sharing = layout.processes if layout.kind == "ddp" else layout.shard
    counts = Counter(p.shape for p in matrices)
    return sum(2 * -(-count // sharing) * sharing * layout.held(shape) for shape, count in counts.items())
