"""A model whose activations overflow is refused by every evaluation of text, and no result of it is written."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from eval import attention_noise, icl, needle, outliers, perplexity, quantization
from training import checkpoint
from training.saver import save

NEEDLE = ("samples=1", "depths=[0.5]")
COMMANDS = {
    attention_noise: (*NEEDLE, "windows=1"),
    icl: ("episodes=2", "shots=[2]", "orders=0"),
    needle: (*NEEDLE, "lengths=[160]"),
    outliers: (),
    perplexity: ("tokens=640",),
    quantization: (*NEEDLE, "bits=[8]", "tokens=640"),
}


@pytest.mark.parametrize("evaluation", COMMANDS, ids=lambda module: module.__name__)
def test_no_result_of_numbers_that_are_not_finite(
    evaluation: ModuleType, make_run: Callable[..., Path], refused: Callable[..., str]
) -> None:
    run = make_run("big")
    model = checkpoint.load_run(run).model
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1e20)  # finite weights, as a checkpoint must have, but no finite activations
    save(run, 5, model, [])
    assert "not finite: its training diverged" in refused(evaluation, f"run={run}", *COMMANDS[evaluation])
    assert not list(run.glob("eval/*.json"))
