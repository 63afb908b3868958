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
def code() -> dict[str, list[str]]:
    """For each variant, the code of the forward and of the backward pass."""
    done = run_command("-m", "tests.cuda_code", "code", env={"TRITON_INTERPRET": "0"}, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_no_kernel_computes_rotations_again(code: dict[str, list[str]]) -> None:
    for name, passes in code.items():
        assert len(passes) == 2 and all("triton_" in each for each in passes)
        for each in passes:
            assert not any(f"{library}.{function}(" in each for library in ("math", "device") for function in ("cos", "sin")), (
                name
            )


def test_both_maps_of_v2_are_one_call_of_attention(code: dict[str, list[str]]) -> None:
    for each in code["diff_v2"]:
        assert each.count("= torch.ops.aten._scaled_dot_product_") == 1
