"""train.py against the plain loop that it stands for, written here from torch's parts."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from configs.files import read_json_lines
from data.loader import Windows
from data.shards import open_split
from model.decoder import Decoder
from tests.conftest import Typed, train_arguments
from training.checkpoint import load_run

OPTIONS = """steps=8 seed=3 micro_batch=2 optim.lr=0.01 optim.beta2=0.7 optim.weight_decay=0.5 optim.clip=0.8 eval_tokens=192
    model.tie=false"""


def test_training_is_the_plain_loop(shards: Path, tmp_path: Path, typed: Typed) -> None:
    """Samples, schedule, gradients over micro batches, clipping, AdamW and its groups, and the validation loss."""
    done = typed(*train_arguments(shards, tmp_path / "run", *OPTIONS.split()))
    assert done.returncode == 0, done.stderr
    lines = list(read_json_lines(tmp_path / "run" / "metrics.jsonl"))
    logged = [line for line in lines if "loss" in line]
    model = Decoder(load_run(tmp_path / "run").model.cfg, seed=3).train()
    text, val = (Windows(open_split(shards, split), 64) for split in ("train", "val"))
    matrices, rest = ([p for p in model.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.7))
    for step in range(8):
        share = (step + 1) / 3 if step < 2 else 0.1 + 0.45 * (1 + math.cos(math.pi * (step - 2) / 6))  # warm-up, cosine
        loss = plain_loss(model, [text.sample(8 * step + row, 3) for row in range(8)])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.8)
        for group in adam.param_groups:
            group["lr"] = 0.01 * share
        adam.step()
        adam.zero_grad()
        wanted = {"loss": loss.item(), "grad_norm": norm.item(), "lr": 0.01 * share, "tokens": 512 * (step + 1)}
        assert {key: logged[step][key] for key in wanted} == pytest.approx(wanted, rel=1e-3), step
    assert len(val) > 6
    last = plain_loss(model, [val.window(round(i * (len(val) - 1) / 2)) for i in range(3)])  # at even distances
    assert [line["val_loss"] for line in lines if "val_loss" in line] == pytest.approx([last.item()], rel=1e-3)


def plain_loss(model: Decoder, rows: list) -> torch.Tensor:
    """Cross entropy of whole logits on rows (T + 1,)."""
    tokens = torch.stack([torch.from_numpy(row) for row in rows])
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
