"""The losses that training reports beside its own: on the validation set, and of text and retrieval documents apart."""

import numpy as np
import torch
from torch import Tensor
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
    for at in range(0, len(chosen[:: world.size]), batch):  # as many passes on every process: a split model needs them
        own = mine[at : at + batch]
        rows = np.stack([windows.window(i) for i in own or chosen[:1]])  # (b, T + 1)
        loss = model(*world.tensors(*inputs_and_targets(rows)))
        total += torch.tensor([loss.item() * len(own), len(own)], dtype=torch.float64, device=world.device)
    model.train()
    total = world.mean(total)
    return (total[0] / total[1]).item()


MOST_ROWS = 32  # of a process's micro batch whose loss is split
LOGITS_AT_ONCE = 2**26  # floats of one forward pass; more rows are read in several
KINDS = ("text", "retrieval")  # the sources of the mixture that data/stream.py makes, in its order


@torch.no_grad()
def losses_apart(
    model: Decoder, inputs: Tensor, targets: Tensor, source: Mixture, samples: range, world: World
) -> dict[str, float]:
    """loss_text and loss_retrieval, nats per token: of the rows (b, T) of this step that are either; None of no row.

    samples: the rows' global numbers. All processes take part. A forward pass without gradients of at most 32 rows: the
    mean loss that the step itself returns cannot be taken apart, and must keep its bits.
    """
    inputs, targets = inputs[:MOST_ROWS], targets[:MOST_ROWS]
    rows = max(1, LOGITS_AT_ONCE // (inputs.shape[1] * model.cfg.vocab_size))  # as many passes on every process
    parts = [  # (rows, T) each
        F.cross_entropy(model(own).float().transpose(1, 2), wanted, reduction="none").double()
        for own, wanted in zip(inputs.split(rows), targets.split(rows), strict=True)
    ]
    losses = torch.cat(parts)  # (b, T)
    scored = targets != UNSCORED
    kinds = torch.tensor([source.which(i) for i in samples[:MOST_ROWS]], device=inputs.device)
    sums = [torch.stack((losses[kinds == k].sum(), scored[kinds == k].sum().double())) for k in range(len(KINDS))]
    totals = world.mean(torch.stack(sums)).tolist()
    return {
        f"loss_{name}": loss / tokens if tokens else None for name, (loss, tokens) in zip(KINDS, totals, strict=True)
    }
