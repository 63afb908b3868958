"""The validation loss that training reports."""

import numpy as np
import torch

from data.loader import Windows, inputs_and_targets
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
