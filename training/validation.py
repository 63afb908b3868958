"""Losses that training reports beside the training loss: on the validation set, and by kind of training document."""

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from data.loader import UNSCORED, Mixture, Windows, inputs_and_targets
from model.decoder import Decoder
from training.distributed import World


@torch.no_grad()
def validation_loss(model: Decoder, windows: Windows, tokens: int, batch: int, world: World) -> float:
    """Mean loss in nats over `tokens` of the validation set, in windows at even distances, shared out over the processes."""
    count = max(1, min(len(windows), tokens // windows.length))
    chosen = torch.linspace(0, len(windows) - 1, count, dtype=torch.float64).round().long().tolist()
    total = torch.zeros(2, dtype=torch.float64, device=world.device)  # summed loss, windows
    model.eval()
    mine = chosen[world.rank :: world.size]
    # Every process runs the same number of passes, because a pass of a split model needs all processes.
    for at in range(0, len(chosen[:: world.size]), batch):
        own = mine[at : at + batch]
        rows = np.stack([windows.window(i) for i in own or chosen[:1]])  # (b, T + 1)
        loss = model(*world.tensors(*inputs_and_targets(rows)))
        total += torch.tensor([loss.item() * len(own), len(own)], dtype=torch.float64, device=world.device)
    model.train()
    total = world.mean(total)
    return (total[0] / total[1]).item()


MOST_ROWS = 32  # of a process's micro batch whose loss is reported by kind
LOGITS_AT_ONCE = 2**26  # logits of one forward pass; more rows take several passes
KINDS = ("text", "retrieval")  # the sources of the mixture that data/stream.py makes, in its order


@torch.no_grad()
def losses_apart(
    model: Decoder, inputs: Tensor, targets: Tensor, source: Mixture, samples: range, world: World
) -> dict[str, float | None]:
    """loss_text and loss_retrieval in nats per token, each over the rows (b, T) of that kind; None: no such row.

    The rows are those of the step's last micro batch, at most 32 of them; samples: their global sample numbers. All processes
    must call it. It runs a separate forward pass without gradients, because the step's mean loss cannot be split by row, and
    its bits must not change.
    """
    inputs, targets = inputs[:MOST_ROWS], targets[:MOST_ROWS]
    rows = max(1, LOGITS_AT_ONCE // (inputs.shape[1] * model.cfg.vocab_size))  # the same on every process
    parts = [  # (rows, T) each
        F.cross_entropy(model(own).float().transpose(1, 2), wanted, reduction="none").double()
        for own, wanted in zip(inputs.split(rows), targets.split(rows), strict=True)
    ]
    if isinstance(model, FSDPModule):
        model.reshard()  # else the root keeps its whole weights, and the next training step uses them without the update
    losses = torch.cat(parts)  # (b, T)
    scored = targets != UNSCORED
    kinds = torch.tensor([source.source_of(i) for i in samples[:MOST_ROWS]], device=inputs.device)
    sums = [torch.stack((losses[kinds == k].sum(), scored[kinds == k].sum().double())) for k in range(len(KINDS))]
    totals = world.mean(torch.stack(sums)).tolist()
    return {f"loss_{name}": loss / tokens if tokens else None for name, (loss, tokens) in zip(KINDS, totals, strict=True)}
