"""The fused kernel's very launches, compiled ahead of time for cards that are not here: what ptxas and the PTX say of them.

COMPILE_ALL=1 compiles every case; without it some that have each architecture, version, width and direction. About 3 s of CPU
for each case.
"""

import itertools
import json
import os

import pytest

from tests.conftest import run_command

pytest.importorskip("triton", reason="compiles with the package triton")

from model.attention.kernels import diff  # noqa: E402

SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}  # bytes that a block of threads may have
# Bytes of a thread. Triton 3.6 spills more than 256 in four launches with four query heads a key head: V2 d=64 on sm_90 264 to
# 336, V1 d=64 with a window on sm_80 280. Tiles that spill none take 1.26 times as long on an H200 (docs/PERFORMANCE.md).
SPILLED = 336
INSTRUCTION = {80: "mma.sync", 89: "mma.sync", 90: "wgmma"}
ALL = [
    {"architecture": arch, "version": version, "width": d, "group": group, "dtype": "bfloat16", "mask": mask}
    for arch, version, d, group, mask in itertools.product(SHARED, ("V1", "V2"), (64, 128), (1, 4), ("causal", "window", "ids"))
]
SHORT = {(90, "V1", 128, 4), (90, "V2", 128, 1), (80, "V1", 64, 1), (89, "V2", 128, 4)}
CODE = """
import json, sys
from tests.compiled_kernels import rows
for case in json.loads(sys.argv[1]):
    arch = case.pop("architecture")
    print(json.dumps(rows(arch, case)), flush=True)
"""


CASES = ALL
if not os.environ.get("COMPILE_ALL"):
    CASES = [case for case in ALL if case["mask"] == "causal" and tuple(case.values())[:4] in SHORT]


@pytest.fixture(scope="module")
def compiled() -> list[list[dict]]:
    """The rows of every case, from a process in which Triton does not interpret."""
    done = run_command("-c", CODE, json.dumps(CASES), env={"TRITON_INTERPRET": "0"}, timeout=3000)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: "-".join(map(str, CASES[n].values())))
def test_a_launch_fits_its_card_and_does_no_product_twice(number: int, compiled: list[list[dict]]) -> None:
    arch = CASES[number]["architecture"]
    assert [row["kernel"] for row in compiled[number]] == ["forward", "delta", "backward"]
    for row in compiled[number]:
        assert row["shared"] <= SHARED[arch] and row["spilled"] <= SPILLED and not row["tf32"], row
        if row["kernel"] != "delta":
            # Tiles of 32 queries, too few for wgmma, were the fastest on an H200 (docs/results/gpu/README.md).
            small = arch == 90 and (row["version"], row["width"], row["kernel"]) == ("V1", 128, "forward")
            assert row["instruction"] == ("mma.sync" if small else INSTRUCTION[arch]) and row["done_over_needed"] == 1, row


def test_a_card_on_which_nothing_fits_is_refused_with_the_backend_to_use() -> None:
    says = diff.unfit(64, 128, diff.torch.bfloat16, (7, 5))
    assert "compute capability 7.5" in says and says.endswith("use model.backend=sdpa") and "\n" not in says
    assert "compute capability 10.0" in diff.unfit(64, 64, diff.torch.bfloat16, (10, 0))
    assert diff.unfit(64, 128, diff.torch.bfloat16, (8, 9)) is None
