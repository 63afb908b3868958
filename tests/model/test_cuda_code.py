"""The code that torch.compile generates for an H100, without a card (tests/cuda_code.py)."""

import json
import shutil

import pytest
import torch

from tests.conftest import run_command

pytest.importorskip("triton", reason="generates Triton code with the package triton")
pytestmark = [
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="needs a build of torch for the CPU alone"),
    pytest.mark.skipif(not shutil.which("g++"), reason="needs g++"),
]


@pytest.fixture(scope="module")
def passes() -> list[str]:
    """The code of V2's forward and of its backward pass."""
    done = run_command("-m", "tests.cuda_code", "code", env={"TRITON_INTERPRET": "0"}, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_no_kernel_computes_rotations_again(passes: list[str]) -> None:
    assert len(passes) == 2 and all("triton_" in code for code in passes)
    for function in ("cos", "sin"):
        assert not any(f"{library}.{function}(" in code for library in ("math", "device") for code in passes)


def test_both_maps_of_v2_are_one_call_of_attention(passes: list[str]) -> None:
    assert [code.count("= torch.ops.aten._scaled_dot_product_") for code in passes] == [1, 1]


def test_attention_writes_as_the_output_projection_reads(passes: list[str]) -> None:
    """SDPA's kernels write in the order of their queries: heads inside time."""
    (call,) = [line for line in passes[0].splitlines() if "= torch.ops.aten._scaled_dot_product_" in line]
    assert call.count("(1, 24, 88, 64), (135168, 64, 1536, 1)") == 1, call


def test_the_logits_of_a_piece_wait_for_the_gradient_of_the_piece_before(passes: list[str]) -> None:
    lines = passes[0].splitlines()
    products = [number for number, line in enumerate(lines) if "extern_kernels.mm(" in line and "(768, 50304)" in line]
    waits = [number for number, line in enumerate(lines) if "model_loss.after.default(" in line]
    assert len(products) == 3 and products[0] < waits[0] < products[1] < waits[1] < products[2]
