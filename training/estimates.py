"""What a model needs on many GPUs, from formulas: memory of its states, and bytes sent at every optimizer step.

`python -m training.estimates` prints the table of docs/SCALE.md. The formulas count what training/parallel.py does; tests
compare them with gloo processes. All training is in float32 with autocast, so that a parameter, a gradient and each number
that an optimizer remembers have 4 bytes.
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

# Depth, width and heads of the Differential Transformer's scaling runs (arXiv 2410.05258, table 10), and of size=124m.
MODELS = {
    "124M": DecoderConfig(n_layer=12, d_model=768, n_head=12, context=1024, vocab_size=50257),
    "1.4B": DecoderConfig(n_layer=24, d_model=2048, n_head=16, context=2048, vocab_size=50257),
    "2.8B": DecoderConfig(n_layer=32, d_model=2560, n_head=20, context=2048, vocab_size=50257),
    "13B": DecoderConfig(n_layer=40, d_model=5120, n_head=40, context=2048, vocab_size=50257),
}
MACHINE = 8  # GPUs per machine
GPUS = (8, 64, 512)


@dataclass(frozen=True)
class Layout:
    """How the processes share a model: `processes` in all, of which `shard` hold one copy together (1: ddp)."""

    kind: str
    processes: int
    shard: int

    @classmethod
    def of(cls, kind: str, processes: int, shard: int = MACHINE) -> "Layout":
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


def working(model: Decoder, layout: Layout) -> int:
    """Bytes, beside the states, of tensors that are unsharded for a while: an upper estimate, which no test measures.

    With one micro batch. ddp: none, because the gradients are views of DDP's buckets. fsdp and hsdp: parameters and gradients
    of two blocks (one computes, the next arrives) and of the part of the model outside of the blocks.
    """
    if layout.kind == "ddp":
        return 0
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    root = sum(p.numel() for p in model.parameters()) - sum(blocks)
    return BYTES * 2 * (root + 2 * max(blocks))


def messages(model: Decoder, layout: Layout, micros: int = 1, optim: str = "adamw") -> dict[str, int]:
    """Bytes of the tensors that the collectives of one step transfer (all_to_all: sent by each process): collective -> bytes.

    fsdp and hsdp gather all parameters for the forward pass of each of the `micros` micro batches, and the blocks' parameters
    again for its backward pass. Gradients are averaged in the last micro batch; hsdp also reduces them over the processes of a
    copy in every micro batch. The gradient norm is one number. Muon gathers its updates (ddp), or exchanges the rows of its
    matrices, and then of their updates (fsdp, hsdp).
    """
    found = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce", "all_to_all"), 0)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    scalars = sum(not shape for shape in shapes.values())
    if layout.processes == 1:
        return found
    if layout.kind == "ddp":
        gradients = BYTES * sum(map(math.prod, shapes.values()))
        return found | {"all_gather": muon_rows(model, layout, optim), "all_reduce": gradients}
    every = BYTES * layout.padded(shapes)
    blocks = BYTES * layout.padded({name: shape for name, shape in shapes.items() if name.startswith("blocks.")})
    own = every // layout.shard if layout.kind == "hsdp" else 0  # a process's gradients, averaged over the copies
    return {
        "all_gather": micros * (every + blocks),
        "reduce_scatter": every * (micros if layout.kind == "hsdp" else 1),
        "all_reduce": own + BYTES * (scalars + 1),
        "all_to_all": 2 * muon_rows(model, layout, optim),
    }


def muon_rows(model: Decoder, layout: Layout, optim: str) -> int:
    """Bytes of the rows that a process holds of all of Muon's matrices in bfloat16, with zeros for equal shares; AdamW: 0."""
    optimizers = build_optimizers(model, OptimConfig(name=optim))
    matrices = [p for o in optimizers if isinstance(o, torch.optim.Muon) for group in o.param_groups for p in group["params"]]
    sharing = layout.processes if layout.kind == "ddp" else layout.shard
    counts = Counter(p.shape for p in matrices)
    return sum(2 * -(-count // sharing) * sharing * layout.held(shape) for shape, count in counts.items())


def sent(model: Decoder, layout: Layout) -> float:
    """Bytes that each process sends per step of AdamW with one micro batch, if every collective runs on a ring.

    For a tensor of B bytes on N processes: B (N - 1) / N for an all-gather or a reduce-scatter, twice as much for an
    all-reduce (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009). The all-reduces of hsdp run over the copies.
    """
    found = messages(model, layout)
    inner = layout.processes if layout.kind != "hsdp" else layout.shard
    outer = layout.processes if layout.kind != "hsdp" else layout.processes // layout.shard
    within = (found["all_gather"] + found["reduce_scatter"]) * (inner - 1) / inner
    return within + found["all_reduce"] * 2 * (outer - 1) / outer


def table() -> str:
    """The Markdown table of docs/SCALE.md: GB on each GPU, and GB that each sends per step, for 8, 64 and 512 GPUs."""
    columns = [*(f"states, {n}" for n in GPUS), "working", *(f"sent, {n}" for n in GPUS)]
    lines = [["model", "parameters", "parallel", *columns], ["---"] * (3 + len(columns))]
    for name, cfg in MODELS.items():
        model = skeleton(cfg)
        for kind in ("ddp", "fsdp", "hsdp"):
            layouts = [Layout.of(kind, n) for n in GPUS]
            memory = [sum(states(model, layout).values()) for layout in layouts]
            traffic = [sent(model, layout) for layout in layouts]
            numbers = [*memory, working(model, layouts[0]), *traffic]
            total = f"{model.num_params(non_embedding=False) / 1e9:.3f}B"
            lines.append([name, total, kind, *(f"{number / 1e9:.2f}" for number in numbers)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(table())
