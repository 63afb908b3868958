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


def test_the_code_of_both_passes_of_v2() -> None:
    done = run_command("-m", "tests.cuda_code", "code", env={"TRITON_INTERPRET": "0"}, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    passes = json.loads(done.stdout.splitlines()[-1])
    assert len(passes) == 2 and all("triton_" in code for code in passes)
    for function in ("cos", "sin"):  # no kernel computes rotations again
        assert not any(f"{library}.{function}(" in code for library in ("math", "device") for code in passes)
    # Both maps are one call of attention, which writes as the output projection reads: heads inside time, as its queries.
    assert [code.count("= torch.ops.aten._scaled_dot_product_") for code in passes] == [1, 1]
    lines = passes[0].splitlines()
    (call,) = [line for line in lines if "= torch.ops.aten._scaled_dot_product_" in line]
    assert call.count("(1, 24, 88, 64), (135168, 64, 1536, 1)") == 1, call
    # The logits of a piece wait for the gradient of the piece before.
    products = [number for number, line in enumerate(lines) if "extern_kernels.mm(" in line and "(768, 50304)" in line]
    waits = [number for number, line in enumerate(lines) if "model_loss.after.default(" in line]
    assert len(products) == 3 and products[0] < waits[0] < products[1] < waits[1] < products[2]
