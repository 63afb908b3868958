"""Compile every launch of diff.py ahead of time for a card that this machine lacks, and describe the compiled kernels.

Triton and ptxas compile the launches of tensors on the CPU, so strides, alignment and tiles are specialised as on the card;
no kernel runs. Needs the package triton, and neither a GPU nor its driver. Use it in a process of its own, without
TRITON_INTERPRET: it replaces Triton's driver.
"""

import itertools
import re
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

WGMMA = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m(\d+)n(\d+)k(\d+)")
MMA = re.compile(r"mma\.sync\.aligned\.m(\d+)n(\d+)k(\d+)")
USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")


def rows(arch: int, case: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each launch of forward and backward at `case`, as made on a card of architecture `arch` (90: sm_90).

    case: width (of keys), version (V1: values twice as wide, keys for each map; V2), group (query heads of a key head), dtype,
    mask (causal, window or ids). A row adds to `case` the shared memory of a block (bytes), registers and spilled bytes of a
    thread, and the ratio of the products that the tensor cores execute to the products that the formulas need (None without
    tensor cores). ValueError if no tile fits the card.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    from model.attention.kernels import diff, interpreted

    assert not interpreted(), "unset TRITON_INTERPRET: the interpreter compiles nothing"
    function, kept, card = triton.runtime.jit.JITFunction, [], divmod(arch, 10)
    launch, check, ask = function.run, diff._check, diff.capability

    def keep(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        kept.append((self.fn.__name__.removesuffix("_kernel"), kernel))
        return kernel

    q, k, v, lam, ids, causal, window = inputs(case)
    if reason := diff.unfit(q.shape[-1], v.shape[-1], q.dtype, card):
        raise ValueError(reason)
    # What Triton asks its driver before it compiles. The device is the key of its cache of kernels.
    card_here = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
        get_current_device=lambda: arch,
        get_current_stream=lambda device: 0,
    )
    triton.runtime.driver.set_active(card_here)
    function.run, diff._check, diff.capability = keep, lambda *tensors: None, lambda device: card
    try:
        out, second, lse = diff._forward._init_fn(q, k, v, lam, ids, ids, causal, window)
        diff._backward._init_fn(out, q, k, v, lam, ids, ids, out, second, lse, causal, window)
    finally:
        function.run, diff._check, diff.capability = launch, check, ask
    return [{"architecture": arch, **case, "kernel": name, **describe(name, kernel, arch, case)} for name, kernel in kept]


def inputs(case: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, bool, int | None]:
    """The kernel's inputs as in a variant's training, with heads inside time in memory: one sequence of 256 tokens."""
    d, group, first = case["width"], case["group"], case["version"] == "V1"
    T, hkv, C, dtype = 256, 2, 2 if first else 1, getattr(torch, case["dtype"])
    h, dv = hkv * group, d * C

    def projected(heads: int, parts: int, width: int) -> Tensor:
        return torch.empty(1, T, heads * parts * width, dtype=dtype).unflatten(-1, (heads, parts, width)).movedim(1, 3)

    v = projected(hkv, 1, dv).squeeze(2)
    lam = torch.zeros((), dtype=torch.float32) if first else torch.empty(1, T, h, 1).transpose(1, 2)
    window = 64 if case["mask"] == "window" else None
    ids = torch.zeros(1, T, dtype=torch.int32) if case["mask"] == "ids" else None
    return projected(h, 2, d), projected(hkv, C, d), v, lam.expand(1, h, T, 1), ids, True, window


def describe(name: str, kernel: Any, arch: int, case: dict[str, Any]) -> dict[str, Any]:
    """What ptxas says of a compiled kernel, and the products it executes."""
    from model.attention.kernels import diff

    ptx, num_warps = kernel.asm["ptx"], kernel.metadata.num_warps
    registers, spilled = resources(kernel.asm["cubin"])
    found = {"shared": kernel.metadata.shared, "registers": registers, "spilled": spilled, "tf32": "tf32" in ptx}
    found["instruction"] = "wgmma" if WGMMA.search(ptx) else "mma.sync" if MMA.search(ptx) else None
    if name not in ("forward", "backward"):
        return found
    d, dv = case["width"], case["width"] * (2 if case["version"] == "V1" else 1)
    tile = diff.table(d, dv, getattr(torch, case["dtype"]), name == "backward", divmod(arch, 10))
    per_pair = (2 if name == "forward" else 6) * diff._pad(d) + 2 * diff._pad(dv)  # per head, as counted in diff.py
    done = products(ptx, num_warps) / (tile.BM * tile.BN * per_pair) if found["instruction"] else None
    return {**found, "tile": list(tile), "done_over_needed": done and round(done, 4)}


def products(ptx: str, num_warps: int) -> float:
    """Multiplications of all tensor-core instructions of a block, each counted once."""
    whole = sum(int(m) * int(n) * int(k) for m, n, k in WGMMA.findall(ptx)) * num_warps / 4  # 4 warps execute one
    return whole + sum(int(m) * int(n) * int(k) for m, n, k in MMA.findall(ptx)) * num_warps


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack (spilled) of a thread."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack = USAGE.search(text.stdout).groups()
    return int(registers), int(stack)


if __name__ == "__main__":  # the table of docs/PERFORMANCE.md
    heads = ("shared", "registers", "spilled", "tf32", "instruction", "tile", "done_over_needed")
    for architecture, version, width in itertools.product((90, 80, 89), ("V1", "V2"), (64, 128)):
        case = {"width": width, "version": version, "group": 4, "dtype": "bfloat16", "mask": "causal"}
        for row in rows(architecture, case):
            if row["kernel"] != "delta":
                name = f"sm_{architecture} {version} d={width} group=4 causal | {row['kernel']}"
                print(f"| {name} | {' | '.join(str(row[head]) for head in heads)} |", flush=True)
