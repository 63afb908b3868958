"""The validation loss that training reports."""

import torch

from data.loader import Windows
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
    for at in range(0, len(mine), batch):
        rows = torch.stack([torch.from_numpy(windows.window(i)) for i in mine[at : at + batch]]).to(world.device)
        loss = model(rows[:, :-1], rows[:, 1:])
        total += torch.tensor([loss.item() * len(rows), len(rows)], dtype=torch.float64, device=world.device)
    model.train()
    total = world.mean(total)
    return (total[0] / total[1]).item()
