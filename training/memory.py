"""The micro batch on a GPU if the user does not set it: how many sequences fit in one forward and backward pass."""

from dataclasses import replace

import torch
from torch import Tensor

from model.config import DecoderConfig
from model.decoder import Decoder
from model.loss import PIECES
from training.distributed import World

SHARE = 0.8  # of the free memory; the rest is for memory that the allocator cannot use, and for collectives
STATES = 3  # times the size of the parameters: gradients and AdamW's two averages, which are allocated later
LOGIT_BYTES = 12  # per logit of a piece: itself in the autocast dtype, its probability, its gradient, a copy of each


def micro_batch_that_fits(model: Decoder, sequences: int, autocast: torch.autocast, world: World) -> int:
    """The largest divisor of `sequences` (sequences per process and step) that fits the free memory of this process's GPU.

    On a CPU: `sequences`. If not even one sequence fits: 1. All processes must call it together, and all get the smallest of
    their results. The memory of a pass is counted without torch.compile, which needs less.
    """
    if world.device.type != "cuda":
        return sequences
    room = SHARE * torch.cuda.mem_get_info(world.device)[0] - STATES * sum(map(local_bytes, model.parameters()))
    fits = largest_divisor(sequences, int(room / pass_bytes(model.cfg, model.recompute, autocast, world.device)))
    return -int(world.largest(-fits))


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`, and at least 1."""
    return max(n for n in range(1, number + 1) if number % n == 0 and n <= max(1, most))


def pass_bytes(cfg: DecoderConfig, recompute: bool, autocast: torch.autocast, device: torch.device) -> float:
    """Approximate peak bytes of the forward and backward pass of one sequence, beside the model's states.

    Counted: the activations of all blocks, or with `recompute` only their inputs; the activations of one more block, for
    its backward pass; and one piece of the logits.
    """
    with autocast:
        block = max(block_bytes(replace(cfg, layers=letter, n_layer=1), device) for letter in set(cfg.layers))
    kept = 4 * cfg.context * cfg.d_model if recompute else block
    return cfg.n_layer * kept + block + LOGIT_BYTES * cfg.context * cfg.vocab_size / PIECES


def block_bytes(cfg: DecoderConfig, device: torch.device) -> int:
    """Bytes that the forward pass of a model of one block keeps for the backward pass, for one sequence."""
    model = Decoder(cfg).to(device)
    own = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        if (address := x.untyped_storage().data_ptr()) not in own:
            kept[address] = x  # held, so that no other tensor gets its address
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model.hidden(torch.zeros(1, cfg.context, dtype=torch.long, device=device))
    return sum(x.untyped_storage().nbytes() for x in kept.values())


def local_bytes(x: Tensor) -> int:
    """Bytes of a tensor on this process; for a split tensor, the bytes of the local shard."""
    return (x.to_local() if hasattr(x, "to_local") else x).nbytes
