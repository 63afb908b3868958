"""Every variant becomes one graph for CUDA, on a machine without a card, and with the kernel that is meant.

torch.compile traces fake tensors (tests/no_card.py) as it would trace those of a card.
TRACE_ALL=1 traces every variant on every backend and, with auto, under every mask; without it a choice that has each kernel,
and each variant in one model.
"""

# ruff: noqa: E402

import itertools
import json
import os
import shutil
from collections import Counter

from tests import no_card

if __name__ == "__main__":
    no_card.answer()

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from model.attention import VARIANTS as CLASSES
from model.attention import backends, sdpa
from model.attention.kernels import unavailable
from tests.conftest import run_command
from tests.variants import config

LENGTHS = (256, 384)
SIZE = {"n_head": 2, "d_model": 128, "context": 512, "match": "none"}  # heads of 64
KERNELS = {"scaled_dot_product_attention": "sdpa", "flex_attention": "flex", "forward": "fused", "softmax": "math"}
NAMES = [variant.name for variant in CLASSES.values()] + ["introspective_sequence"]
MASKS = ("causal", "window", "documents", "padding")
TOGETHER = "a layer of every variant"
CHECKPOINTED = ", checkpointed"  # after a mask's name: with activation checkpointing


def cases() -> list[tuple[str, str, str, tuple[int, int]]]:
    """(variant, backend, mask, card)."""
    if os.environ.get("TRACE_ALL"):
        masked = itertools.product(NAMES, ("auto",), MASKS, ((9, 0), (8, 0)))
        return [*masked, *itertools.product(NAMES, backends.BACKENDS[1:], ("causal",), ((9, 0),))]
    every = [(name, "auto", "causal", (9, 0)) for name in ("baseline", "diff", "diff_v2", "introspective_sequence", "softpick")]
    every.append((TOGETHER, "auto", "causal", (9, 0)))
    # "auto" takes two_calls on the first card and four_calls on the second.
    diffs = [("diff", backend, "causal", (9, 0)) for backend in ("math", "one_call", "flex", "fused")]
    diffs += [("diff", "auto", "causal", (8, 0))]
    masked = [("hybrid", "auto", "documents", (9, 0)), *(("baseline", "auto", mask, (9, 0)) for mask in ("window", "padding"))]
    masked += [("diff_v2", "fused", "causal", (9, 0))]
    masked += [("introspective_sequence", "auto", "documents" + CHECKPOINTED, (9, 0))]
    return every + diffs + masked


def lengths(name: str, mask: str) -> tuple[int, ...]:
    """The lengths at which a case is traced, one after the other."""
    twice = name in ("introspective_sequence", "softpick") and mask == "causal"
    return LENGTHS if twice else LENGTHS[1:]


def trace(name: str, backend: str, mask: str, card: tuple[int, int]) -> list[dict[str, int]]:
    """How often each kernel stands in the graph of `name`, for each of its lengths."""
    from model.decoder import Decoder

    at = lengths(name, mask)
    backends.card = sdpa.card = torch.compiler.assume_constant_result(lambda: card)
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []
    again, mask = mask.endswith(CHECKPOINTED), mask.removesuffix(CHECKPOINTED)
    window = 100 if mask == "window" else None
    # FlexAttention traces without gradients only: there is no autograd engine for CUDA here. Checkpointing is asked for by the
    # gradient mode alone, so it traces with frozen weights.
    grad = again or (backend != "flex" and mask == "causal")
    layers = {"hybrid": "bd", TOGETHER: "".join(CLASSES)}.get(name)
    shape = {"layers": layers, "n_layer": len(layers)} if layers else {"n_layer": 1}
    with torch.device("meta"):
        model = Decoder(config("hybrid" if layers else name, **SIZE, **shape, window=window, backend=backend))
    model.gradient_checkpointing = again
    model.requires_grad_(not again)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(grad):
        model.to_empty(device="cuda")
        compiled = torch.compile(model, fullgraph=True, backend=lambda graph, inputs: graphs.append(graph) or graph)
        for T in at:
            tokens = torch.zeros(2, T, dtype=torch.long, device="cuda")
            given = {"documents": {"documents": tokens}, "padding": {"keys": tokens == 0}}.get(mask, {})
            with torch.autocast("cuda", torch.bfloat16):
                assert compiled(tokens, tokens, **given).device.type == "cuda"
    assert len(graphs) == len(at), f"{len(graphs)} graphs for {len(at)} lengths"
    kernels = []
    for graph in graphs:  # checkpointed layers, and rows of a variant's own map, are graphs inside the graph
        inside = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
        counts = [
            Counter(filter(None, (kernel(node) for part in parts for node in part.graph.nodes))) for parts in ([graph], inside)
        ]
        kernels.append(dict(counts[1] if again or not counts[0] else counts[0]))
    return kernels


def kernel(node: torch.fx.Node) -> str | None:
    target = getattr(node.target, "__name__", str(node.target))
    return next((name for part, name in KERNELS.items() if target.split(".")[0] == part), None)


@pytest.fixture(scope="module")
def traced() -> dict[str, list[dict[str, int]] | str]:
    if not torch.backends.cuda.is_built() and not shutil.which("g++"):
        pytest.skip("tracing for CUDA with a CPU build of torch needs g++")
    done = run_command("-m", "tests.model.test_cuda_traces", timeout=3000)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def wanted(name: str, backend: str, mask: str, card: tuple[int, int]) -> dict[str, int] | None:
    """The kernels that the graph of one layer shall have; None: whatever, in one graph."""
    if name in ("diff", "diff_v2"):
        auto = "four_calls" if name == "diff" and card < (9, 0) else "two_calls"  # V1: heads of 64, values of 128
        chosen = auto if backend in ("auto", "sdpa", "cpu") else backend
        calls = {"one_call": 1, "two_calls": 2 if name == "diff" else 1, "four_calls": 4}
        if mask == "causal":
            return {"sdpa": calls[chosen]} if chosen in calls else {chosen: 2 if chosen == "flex" else 1}
    if name == "baseline" and backend == "auto":
        return {"sdpa": 1} if mask == "causal" else {"flex": 1}
    return None


@pytest.mark.parametrize("case", cases(), ids=lambda case: "-".join(map(str, case)))
def test_one_graph_at_each_length(case: tuple, traced: dict[str, list[dict[str, int]] | str]) -> None:
    name, backend, mask, _ = case
    if backend == "fused" and unavailable(64, 128):
        pytest.skip("the fused kernel needs the package triton")
    kernels = traced[json.dumps(case)]
    if isinstance(kernels, str):  # what a kernel cannot compute is refused where it was named
        assert backend in ("flex", "fused") and kernels.startswith(f"ValueError: backend={backend} takes no"), kernels
        return
    if name == TOGETHER:
        assert kernels[0].keys() == {"sdpa", "math"}
    elif any("math" in counts for counts in kernels):  # a map of the variant's own, in parts of ROWS queries
        assert all(set(counts) == {"math"} for counts in kernels)
    else:
        assert kernels == [kernels[0]] * len(lengths(name, mask))
    want = wanted(*case)
    assert want is None or kernels[0] == want
    if backend == "auto" and mask != "causal":
        assert not {"sdpa", "fused"} & kernels[0].keys()  # flex, or the formulas of a map of its own


if __name__ == "__main__":  # trace every case, and print what became of each as JSON
    no_card.allow_autocast()
    answers = {}
    for each in cases():
        try:
            answers[json.dumps(each)] = trace(*each)
        except Exception as error:
            answers[json.dumps(each)] = f"{type(error).__name__}: {str(error)[:2000]}"
    print(json.dumps(answers))
