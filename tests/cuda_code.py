"""What torch.compile makes of a training step for an H100, on a machine without a card: python -m tests.cuda_code

Needs a build of torch for the CPU alone, g++ (no_card.py) and the package triton. Prints a JSON row for each of three variants:
the launches and the bytes that they read and write (GB, as Inductor counts them), of a step of one layer and of one more layer.
"""

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

from tests import no_card

if __name__ == "__main__":
    no_card.answer()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

ARCH = 90
SIZE = {"n_head": 12, "d_model": 768, "context": 1024, "vocab_size": 50304, "match": "none"}  # 124M with 12 layers
MICRO_BATCH = 32


def pretend() -> None:
    """Let torch and Triton take this process for one with an H100. Needs a process of its own."""
    assert not torch.backends.cuda.is_built(), "use a build of torch for the CPU alone"
    card = SimpleNamespace(
        name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, warp_size=32,
        max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65536,
        shared_memory_per_block=48 << 10, shared_memory_per_block_optin=227 << 10, gcnArchName="", L2_cache_size=50 << 20,
    )  # fmt: skip
    torch.version.cuda = "13.0"
    no_card.allow_autocast()
    torch.cuda._lazy_init = lambda: None
    torch.cuda.current_device, torch.cuda.device_count = lambda: 0, lambda: 1
    torch.cuda.get_device_properties = lambda *args: card
    torch.cuda.get_device_capability = lambda *args: (9, 0)
    # Imported here, because they keep what they find of torch.cuda.
    from torch._inductor import config, scheduler
    from torch._subclasses import fake_tensor
    from torch.utils import _triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    fake_tensor.init_gpu_context = lambda device: None
    scheduler.has_triton = _triton.has_triton = lambda *args: True
    config.compile_threads = 1
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", ARCH, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_device_interface=lambda: torch.cuda,
        )
    )


def cudnn_attention(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, dropout_p: float = 0.0, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """What SDPA calls on an H100. A build for the CPU alone would take it apart into matrix products."""
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
    return cudnn(q, k, v, None, True, dropout_p, is_causal, False, scale=scale)[0]


def generated(name: str, n_layer: int, **changes: Any) -> list[dict[str, Any]]:
    """For the forward and the backward pass of a variant: the generated code, its launches and their bytes.

    triton: launches of generated kernels; extern: of matrix products, attention and other library calls. read_and_written: GB
    of the generated kernels.
    """
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode

    from model.attention import backends, sdpa
    from model.decoder import Decoder
    from tests.variants import config

    torch.nn.functional.scaled_dot_product_attention = cudnn_attention
    backends.card = sdpa.card = torch.compiler.assume_constant_result(lambda: (9, 0))
    passes: list[dict[str, Any]] = []

    def lower(graph: torch.fx.GraphModule, inputs: list) -> Any:
        passes.append(lowered(graph, inputs, is_backward=bool(passes)))
        return graph

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Any:
        options = {"decompositions": select_decomp_table(), "partition_fn": min_cut_rematerialization_partition}
        return aot_module_simplified(graph, inputs, fw_compiler=lower, bw_compiler=lower, **options)

    torch._dynamo.reset()
    with torch.device("meta"):
        model = Decoder(config(name, **SIZE, n_layer=n_layer, **changes))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cuda")
        tokens = torch.zeros(MICRO_BATCH, SIZE["context"], dtype=torch.long, device="cuda")
        step = torch.compile(model, fullgraph=True, backend=backend, dynamic=False)
        with torch.autocast("cuda", torch.bfloat16):
            loss = step(tokens, tokens)
        loss.backward()
    return passes


def lowered(graph: torch.fx.GraphModule, inputs: list, is_backward: bool) -> dict[str, Any]:
    """The code that torch generates for one pass, and what it counts."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import ExternKernelSchedulerNode
    from torch._inductor.virtualized import V

    fake, available = torch._guards.detect_fake_mode(inputs), torch.cuda.is_available
    lowering = GraphLowering(graph, is_backward=is_backward)
    torch.cuda.is_available = lambda: True
    try:
        with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()), V.set_fake_mode(fake):
            lowering.run(*inputs)
            code = lowering.codegen()[0].value
            nodes = [node for node, _ in lowering.count_bytes()[1]]
    finally:
        torch.cuda.is_available = available
    elementwise = [node.get_read_write_buffers_sizes() for node in nodes if not isinstance(node, ExternKernelSchedulerNode)]
    launches = {"triton": len(elementwise), "extern": len(nodes) - len(elementwise)}
    return {"code": code, **launches, "read_and_written": sum(elementwise) / 1e9}


def row(name: str, **changes: Any) -> dict[str, Any]:
    """Launches and GB of a step of one layer, and what each more layer adds, both passes together."""
    one, three = ({key: sum(each[key] for each in generated(name, n, **changes)) for key in COUNTED} for n in (1, 3))
    more = {f"{key}_a_layer": (three[key] - one[key]) / 2 for key in COUNTED}
    return {"variant": name, **changes, **{f"{key}_of_one_layer": one[key] for key in COUNTED}, **more}


COUNTED = ("triton", "extern", "read_and_written")

if __name__ == "__main__":
    pretend()
    if sys.argv[1:] == ["code"]:  # for the test: the code itself, of one layer and of two pieces of the logits
        MICRO_BATCH, SIZE["context"] = 1, 88
        print(json.dumps([each["code"] for each in generated("diff_v2", 1)]), flush=True)
        os._exit(0)  # else a thread of the compiler's, still alive, may abort the process
    else:
        for variant in sys.argv[1:] or ("baseline", "diff", "diff_v2"):
            print(json.dumps(row(variant)), flush=True)
