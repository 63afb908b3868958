"""Rows of published attention modules in our order: the two maps of a head, the layout of RoPE, a stored lambda_init."""

import math
from collections.abc import Callable, Collection

import torch
from torch import Tensor


def change_rows(state: dict[str, Tensor], parts: Collection[str], change: Callable[[Tensor], Tensor]) -> None:
    """Change in `state` the rows of weights and biases of the modules named in `parts`."""
    for name in state:
        if name.endswith((".weight", ".bias")) and name.split(".")[-2] in parts:
            state[name] = change(state[name])


def heads_in_pairs(rows: Tensor, width: int) -> Tensor:
    """Heads 0..h-1, h..2h-1 in the order 0, h, 1, h + 1, ..: the two heads of a pair become neighbours."""
    return rows.unflatten(0, (2, -1, width)).transpose(0, 1).flatten(0, 2)


def heads_in_halves(rows: Tensor, width: int) -> Tensor:
    """Heads 0, 1, 2, 3, .. in the order 0, 2, .., 1, 3, ..: the inverse of `heads_in_pairs`."""
    return rows.unflatten(0, (-1, 2, width)).transpose(0, 1).flatten(0, 2)


def half_from_interleaved(weight: Tensor, width: int) -> Tensor:
    """Query or key rows (heads * width, ...) for RoPE in the half-split layout, from rows for the interleaved one.

    Dimensions 0, 2, 4, .. then 1, 3, 5, .. of each head, of queries and keys alike, so every q k' is what it was.
    """
    rows = weight.unflatten(0, (-1, width))  # (H, d, ...)
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1).flatten(0, 1)


def keep_lambda(state: dict[str, Tensor], ours: float) -> None:
    """Replace a stored lambda_init by ours; one vector moves, so that exp(q1.k1) - exp(q2.k2) + lambda_init stays."""
    change = state.pop("lambda_init").double().item() - ours  # by which exp(q1.k1) - exp(q2.k2) must grow
    if not math.isfinite(change):
        raise ValueError("lambda_init is not finite, so the source's checkpoint is damaged: give an undamaged one")
    if abs(change) < 1e-7:  # the schedule's value, rounded to float32
        return
    # One of the two exponentials can always take up the difference and remain positive.
    first, second = ((state[f"lambda_q{c}"].double() @ state[f"lambda_k{c}"].double()).exp().item() for c in (1, 2))
    c, exponential = (1, first + change) if first + change > second - change else (2, second - change)
    q, k = state[f"lambda_q{c}"].double(), state[f"lambda_k{c}"].double()
    if not k.any():
        k[0] = 1.0
    q = q + (math.log(exponential) - q @ k) * k / (k @ k)  # the nearest q with this q.k
    dtype = torch.promote_types(state[f"lambda_q{c}"].dtype, torch.float32)
    state |= {f"lambda_q{c}": q.to(dtype), f"lambda_k{c}": k.to(dtype)}
