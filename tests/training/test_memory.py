"""The micro batch that a GPU gets by itself: what a pass needs is counted on this machine, free memory is planted."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from model.decoder import Decoder
from tests.variants import config
from training import parallel
from training.distributed import World
from training.parallel import block_bytes, largest_divisor, micro_batch_that_fits, pass_bytes

CPU, GPU = World(0, 1, torch.device("cpu")), World(0, 1, torch.device("cuda"))
SIZE = {"n_layer": 4, "n_head": 4, "d_model": 64, "context": 128, "vocab_size": 512}


def filled(name: str, **changes: object):  # noqa: ANN201
    return Decoder(config(name, **SIZE | changes)).cfg


@pytest.mark.parametrize(("number", "most", "want"), [(64, 64, 64), (64, 63, 32), (12, 5, 4), (7, 6, 1), (8, 0, 1)])
def test_the_largest_divisor(number: int, most: int, want: int) -> None:
    assert largest_divisor(number, most) == want


def test_a_block_keeps_what_autograd_saves() -> None:
    """By hand: norm, q, k, v, output, norm, gate, up and their product, in float32; each bound is on the whole block."""
    cfg = filled("baseline", backend="sdpa")
    row = 4 * cfg.context  # bytes of one number per position
    least = row * (2 * cfg.d_model + 4 * cfg.d_model + 3 * cfg.d_ff)  # norms' inputs, q/k/v/output, SwiGLU's three
    assert least < block_bytes(replace(cfg, n_layer=1), CPU.device) < 2.5 * least
    double = block_bytes(replace(cfg, n_layer=1, context=2 * cfg.context), CPU.device)
    assert double == pytest.approx(2 * block_bytes(replace(cfg, n_layer=1), CPU.device), rel=0.02)


def test_a_pass_is_its_blocks_and_a_piece_of_the_logits() -> None:
    cfg = filled("diff")
    block = block_bytes(replace(cfg, n_layer=1), CPU.device)
    logits = 12 * cfg.context * cfg.vocab_size / 8
    assert pass_bytes(cfg, False, nullcontext(), CPU.device) == 5 * block + logits
    assert pass_bytes(cfg, True, nullcontext(), CPU.device) == 4 * 4 * cfg.context * cfg.d_model + block + logits
    mixed, plain = (replace(cfg, layers=layers) for layers in ("bd", "b"))
    assert pass_bytes(mixed, False, nullcontext(), CPU.device) > pass_bytes(plain, False, nullcontext(), CPU.device)


@pytest.mark.parametrize(("fitting", "want"), [(64, 64), (40, 32), (3.5, 2), (0.2, 1), (-5, 1)])
def test_a_gpu_gets_what_fits_its_free_memory(fitting: float, want: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Decoder(config("diff", **SIZE))
    needs = pass_bytes(model.cfg, False, nullcontext(), CPU.device)
    states = 3 * sum(p.nbytes for p in model.parameters())
    monkeypatch.setattr(parallel, "pass_bytes", lambda *_: needs)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((states + (fitting + 0.1) * needs) / 0.8, 0))
    assert micro_batch_that_fits(model, 64, nullcontext(), GPU) == want
    assert micro_batch_that_fits(model, 64, nullcontext(), CPU) == 64
