"""The stage tiles of gpu.py: times of the fused kernel's tiles, those that the kernel uses and their neighbours first."""

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from model.attention import backends
from model.attention.kernels import unavailable
from model.attention.mask import CAUSAL
from scripts.gpu_tools import DEVICE, ON_CARD, Row, Rows, draw, milliseconds, relative_errors, tolerance

Tile = tuple[int, int, int, int, bool]
# Queries, keys, warps, stages, and whether scores are turned: the fields of diff.Blocks, and their values in steps.
FIELDS = ((16, 32, 64, 128), (16, 32, 64, 128), (4, 8), (1, 2, 3), (False, True))
SHAPES = (("V1", 64), ("V2", 64), ("V2", 128), ("V1", 128))
SM_90 = ((9, 0), 232448)  # compute capability and bytes of shared memory that stand for a card where there is none


def tiles(data: Path | None) -> Rows:
    """Tiles in bfloat16 at one shape per version and width, round-robin over the shapes."""
    if reason := unavailable(64, 128):
        yield "tiles", lambda: {"skipped": reason}
        return
    card = (backends.card(), torch.cuda.get_device_properties(DEVICE).shared_memory_per_block_optin) if ON_CARD else SM_90
    for version, d, backward, tile in in_order(*card):
        name = f"{version} d={d} {'backward' if backward else 'forward'} {','.join(str(int(x)) for x in tile)}"
        yield name, partial(time_tile, version, d, tile, backward)


def in_order(capability: tuple[int, int], shared: int) -> Iterator[tuple[str, int, bool, Tile]]:
    """(version, width, whether backward, tile): the table's tile of every shape, then tiles by their steps from it.

    Leaves out tiles whose operands exceed `shared` bytes. Without a card only the table's tiles.
    """
    from model.attention.kernels import diff

    found = []
    for (version, d), backward in itertools.product(SHAPES, (True, False)):
        dv = 2 * d if version == "V1" else d
        if (own := diff.table(d, dv, torch.bfloat16, backward, capability)) is None:
            continue
        fitting = [
            tile
            for tile in itertools.product(*FIELDS)
            if tile[0] * tile[1] >= 1024 and operand_bytes(version, d, backward, tile) <= shared
        ]
        fitting.sort(key=partial(steps, own))
        for rank, tile in enumerate(fitting if ON_CARD else fitting[:1]):
            found.append((steps(own, tile), rank, (version, d, backward, tile)))
    yield from (row for *_, row in sorted(found, key=lambda each: each[:2]))


def steps(own: Tile, tile: Tile) -> int:
    """By how many steps the fields of `tile` differ from those of `own`: 1 for a neighbour."""
    return sum(abs(values.index(a) - values.index(b)) for values, a, b in zip(FIELDS, own, tile, strict=True))


def operand_bytes(version: str, d: int, backward: bool, tile: Tile) -> int:
    """Least shared memory of a tile in bfloat16: operands that stay, and a copy of those that pass by for each stage but one.

    Some kernels have a copy more (docs/results/gpu/compiled.json).
    """
    queries, keys, _, stages, _ = tile
    maps, dv = (2, 2 * d) if version == "V1" else (1, d)
    of_queries, of_keys = (2 * queries * 2 * d, 2 * queries * dv), (2 * keys * maps * d, 2 * keys * dv)
    stay, pass_by = (sum(of_keys), of_queries) if backward else (of_queries[0], of_keys)
    return stay + ((stages - 1) * sum(pass_by) if stages > 1 else max(pass_by))


def time_tile(version: str, d: int, tile: Tile, timed: bool) -> Row:
    """Milliseconds of the backward pass if `timed`, else of the forward, with this tile; the other pass keeps the table's.

    error: largest ||x - with the table's tile|| / ||with the table's tile|| of the output and, in a backward, the gradients.
    """
    from model.attention.kernels import diff

    own = diff.blocks
    inputs = draw(version, 4 if ON_CARD else 1, 8 if ON_CARD else 1, 4096 if ON_CARD else 64, d)
    call = partial(backends.attend_diff, *inputs, CAUSAL, "fused")
    out = call()
    grad = torch.randn_like(out)

    def results() -> tuple[torch.Tensor, ...]:
        out = call()
        return (out, *torch.autograd.grad(out, inputs, grad)) if timed else (out,)

    wants = results()

    def chosen(*shape: Any, backward: bool) -> diff.Blocks:
        return diff.Blocks(*tile) if backward == timed else own(*shape, backward=backward)

    diff.blocks = chosen
    try:
        errors = relative_errors(results(), wants)
        if timed:
            ms = milliseconds(lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True))
        else:
            with torch.no_grad():
                ms = milliseconds(call)
    finally:
        diff.blocks = own
    right = all(error < tolerance(out.dtype) for error in errors)
    return {"ms": ms, "error": torch.tensor(errors).max().item(), "right": right}  # torch's max keeps NaN
