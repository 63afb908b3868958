"""Our kernels: diff.py with diff_triton.py (Triton, CUDA), and cpu.py with cpu.cpp (C++). diff.py imports Triton: ask
`unavailable` first.
"""

import importlib.util
import os

import torch

WIDEST_KEY, WIDEST_VALUE = 128, 256  # head widths up to which the accumulators of a block fit the registers


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU: TRITON_INTERPRET=1 was set before Triton was imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def unavailable(d: int, dv: int) -> str | None:
    """Why the fused kernels cannot run here with keys of width d and values of width dv, in one line; None if they can."""
    fix = "use model.backend=sdpa (in Python: backend='sdpa')"
    if importlib.util.find_spec("triton") is None:
        return f"the fused backend needs the package 'triton': pip install triton, or {fix}"
    if not (torch.cuda.is_available() or interpreted()):
        return f"the fused backend needs a CUDA GPU (or TRITON_INTERPRET=1, slow, for tests on a CPU): {fix}"
    if d > WIDEST_KEY or dv > WIDEST_VALUE:
        return f"the fused backend takes heads up to d={WIDEST_KEY}, dv={WIDEST_VALUE}, not d={d}, dv={dv}: {fix}"
    return None
