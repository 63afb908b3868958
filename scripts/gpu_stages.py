"""The stages of gpu.py: each yields (name of a row, function that measures it). Without a card the shapes are small."""

import gc
import itertools
import math
import os
import subprocess
import sysconfig
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from data.loader import Loader, Windows, inputs_and_targets
from data.shards import TextTokens, open_split, read_meta
from model.attention import backends, reference
from model.attention.diff import DiffConfig
from model.attention.kernels import unavailable
from model.attention.mask import CAUSAL
from model.config import DecoderConfig
from model.decoder import Decoder
from scripts.gpu_tiles import tiles
from scripts.gpu_tools import (
    DEVICE,
    HALF,
    ON_CARD,
    Row,
    Rows,
    draw,
    forward_backward,
    mask_of,
    milliseconds,
    relative_errors,
    seconds_of,
    synchronize,
    tolerance,
)
from training.distributed import World
from training.metrics import memory_gb, peak_flops
from training.optim import OptimConfig, build_optimizers, set_lr
from training.parallel import compile_steps
from training.schedule import lr_factor
from training.validation import validation_loss

GPT2_VOCABULARY = 50257
WORLD = World(0, 1, DEVICE)
SMI = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")  # fields of nvidia-smi

# ---------------------------------------- environment


def environment(data: Path | None) -> Rows:
    yield "versions", versions
    yield "rates", rates
    for d, dv in ((64, 64), (64, 128), (48, 48), (48, 96), (128, 128), (128, 256)):
        for dtype, group in itertools.product((torch.bfloat16, torch.float32), (1, 4)):
            yield f"sdpa d={d} dv={dv} {str(dtype)[6:]} group={group}", partial(sdpa_choice, d, dv, dtype, group)


def versions() -> Row:
    row: Row = {"torch": torch.__version__, "cards": torch.cuda.device_count()}
    if ON_CARD:
        properties = torch.cuda.get_device_properties(0)
        row |= {"card": properties.name, "capability": backends.card(), "memory_gb": properties.total_memory / 1e9}
        row |= {"multiprocessors": properties.multi_processor_count, "cudnn": torch.backends.cudnn.version()}
        a = torch.randn(8192, 8192, device=DEVICE, dtype=HALF)
        for _ in range(math.ceil(2000 / milliseconds(lambda: a @ a))):  # 2 s of work: an idle card lowers its clock
            a @ a
        row |= nvidia_smi()
        synchronize()
    row["fused"] = refused() or "available"
    return row


def refused() -> str | None:
    """Why the fused kernel is not run here; None if it is."""
    if ON_CARD and not unavailable(64, 128):
        from model.attention.kernels import diff  # needs Triton

        return diff.unfit(64, 128, torch.bfloat16, backends.card())
    return unavailable(64, 128)


def nvidia_smi() -> Row:
    """Driver, clocks now and at most, and power limit of the first card, in the words of nvidia-smi; or why it does not say."""
    query = ["nvidia-smi", f"--query-gpu={','.join(SMI)}", "--format=csv,noheader"]
    query += [f"--id=GPU-{torch.cuda.get_device_properties(0).uuid}"] if ON_CARD else []  # torch's first, not the machine's
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        return dict(zip(SMI, (part.strip() for part in said.splitlines()[0].split(",")), strict=True))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError) as error:
        return {"nvidia_smi": f"not read: {error}"}


def rates() -> Row:
    """Bytes per second (read and written) of a plain copy, and FLOP/s of a plain matrix product, on random numbers."""
    side = 8192 if ON_CARD else 256
    a, b = (torch.randn(side, side, device=DEVICE).to(HALF) for _ in range(2))
    source = torch.randn(2**30 if ON_CARD else 2**16, device=DEVICE)
    target = torch.empty_like(source)
    copied = 2 * source.numel() * 4 / milliseconds(lambda: target.copy_(source)) * 1e3
    return {"matrix_flops": 2 * side**3 / milliseconds(lambda: a @ b) * 1e3, "copy_bytes": copied}


def on_hopper() -> bool:
    """Whether the card has compute capability 9.x."""
    return ON_CARD and backends.card()[0] == 9


def sdpa_choice(d: int, dv: int, dtype: torch.dtype, group: int) -> Row:
    """The kernel that torch's SDPA takes for this shape, forward and backward, and the backend that our `auto` chooses."""
    q, k, v = (torch.randn(1, heads, 256, width, device=DEVICE, dtype=dtype, requires_grad=True)
               for heads, width in ((8, d), (8 // group, d), (8 // group, dv)))  # fmt: skip
    choice = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=group > 1)
    names = {int(value): name for name, value in torch.nn.attention.SDPBackend.__members__.items()}
    card = backends.card() if ON_CARD else None
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group > 1)
    if not all(grad.isfinite().all() for grad in torch.autograd.grad(out.float().square().sum(), (q, k, v))):
        raise FloatingPointError(f"gradients of {names.get(int(choice), choice)} are not finite")
    return {"sdpa": names.get(int(choice), str(choice)), "auto": backends.choose(card, dtype, d, dv, CAUSAL, 256, 256)}


# ---------------------------------------- the fused kernel


def kernel(data: Path | None) -> Rows:
    """Every shape at one length first, then at the others; first of all with lambda as it comes from V1 and V2."""
    if reason := refused():
        yield "kernel", lambda: {"skipped": reason}
        return
    lengths = (500, 63, 1024) if ON_CARD else (20,)
    kinds = [(torch.bfloat16, d) for d in (64, 128, 48)] + [(torch.float32, 64)]
    kinds = kinds if ON_CARD else [(torch.float32, 64), (torch.float32, 48)]
    for version in ("V1", "V2"):
        own = partial(kernel_error, version, 64, 1, "causal", HALF, lengths[0], own_lambda=True)
        yield f"{version} with its own lambda", own
    for T, (dtype, d) in itertools.product(lengths, kinds):
        for version, name, group in itertools.product(("V1", "V2"), ("causal", "window", "documents"), (1, 4)):
            label = f"{version} d={d} group={group} {name} {str(dtype)[6:]} T={T}"
            yield label, partial(kernel_error, version, d, group, name, dtype, T)


def kernel_error(version: str, d: int, group: int, name: str, dtype: torch.dtype, T: int, own_lambda: bool = False) -> Row:
    """||fused - exact|| / ||exact|| of the output and of every gradient; exact is the N x N formula in float64.

    own_lambda: lambda as the version makes it, one number (V1) or heads inside time (V2).
    """
    inputs, mask, h = draw(version, 2, 4, T, d, group, dtype), mask_of(name, 2, T), 4
    if own_lambda:
        lam = torch.rand(2, T, h, device=DEVICE).mT[..., None] if version == "V2" else torch.rand((), device=DEVICE)
        inputs[3] = lam.requires_grad_()
    out = backends.attend_diff(*inputs, mask, "fused")
    grad = torch.randn_like(out)
    got = (out, *torch.autograd.grad(out, inputs, grad))
    exact = [x.detach().double().requires_grad_() for x in inputs]
    if not inputs[3].dim():  # lambda for each row, because much cancels in the gradient of one for all
        exact[3] = exact[3].detach().expand(2, h, T, 1).clone().requires_grad_()
    q, k, v, lam = exact
    k, v = (x.repeat_interleave(h // x.shape[1], 1) for x in (k, v))
    want = reference.attend_diff(q, k.expand(-1, -1, 2, -1, -1), v, lam, mask.dense(T, T, DEVICE))
    *others, dlam = torch.autograd.grad(want, exact, grad.double())
    wrong = got[4].double() - dlam.sum_to_size(inputs[3].shape)
    errors = [*relative_errors(got[:4], (want, *others)), (wrong.norm() / dlam.norm()).item()]
    right = all(error < tolerance(dtype) for error in errors)
    return dict(zip(("out", "dq", "dk", "dv", "dlam"), errors, strict=True)) | {"right": right}


def compiled(data: Path | None) -> Rows:
    """The kernels compiled for other cards, on the CPU; no kernel runs."""
    masks = (("causal", 1), ("causal", 4), ("window", 4), ("ids", 4))
    for (name, group), arch, version, d in itertools.product(masks, (90, 80, 89), ("V1", "V2"), (64, 128)):
        case = {"width": d, "version": version, "group": group, "dtype": "bfloat16", "mask": name}
        yield f"sm_{arch} {version} d={d} group={group} {name}", partial(compiled_rows, arch, case)


def compiled_rows(arch: int, case: Row) -> Row:
    import triton

    from model.attention.kernels.compiled import rows

    try:
        return {"triton": triton.__version__, "kernels": rows(arch, case)}
    except ValueError as refusal:
        return {"triton": triton.__version__, "refused": str(refusal)}


# ---------------------------------------- attention


def attention(data: Path | None) -> Rows:
    """32k tokens in all, 8 heads of two maps, by each backend except auto and cpu; plain attention with as many maps.

    Of documents, FlexAttention keeps its block mask between calls, and the SDPA routes make their dense mask in each call.
    """
    lengths = (2048, 8192, 16384, 4096, 1024) if ON_CARD else (128,)
    names = [name for name in backends.BACKENDS if name not in ("auto", "cpu", "flex")] + ["plain"]
    # flex is last, because each of its rows compiles two graphs
    passes = [("causal", names), ("documents", names), ("causal", ["flex"]), ("documents", ["flex"])]
    shapes = (("V1", 64), ("V1", 128), ("V2", 64), ("V2", 128))
    for (masked, of_pass), (version, d), T in itertools.product(passes, shapes, lengths):
        for name in of_pass:
            if name != "math" or T <= 2048:  # longer T x T scores do not fit in memory
                yield f"{version} d={d} T={T} {masked} {name}", partial(time_attention, version, d, T, masked, name)


def time_attention(version: str, d: int, T: int, masked: str, name: str) -> Row:
    B, h = (max(1, 32768 // T), 8) if ON_CARD else (1, 1)
    q, k, v, lam = draw(version, B, h, T, d)
    mask = mask_of(masked, B, T)
    if name == "plain":  # 2h heads of width d, keys and values for each
        plain = [x.detach().flatten(1, 2).requires_grad_() for x in (q, k.expand(-1, -1, 2, -1, -1))]
        plain.append(torch.randn_like(plain[0]).requires_grad_())
        return forward_backward(partial(backends.attend, *plain, mask, "sdpa"), plain)
    return forward_backward(partial(backends.attend_diff, q, k, v, lam, mask, name), [q, k, v, lam])


# ---------------------------------------- training

SIZES = {
    "30m": {"n_layer": 8, "n_head": 16, "d_model": 512, "head_dim": 48, "context": 1024},
    "124m": {"n_layer": 12, "n_head": 12, "d_model": 768, "context": 1024},
    "tiny": {"n_layer": 2, "n_head": 4, "d_model": 32, "context": 32},
}
# Copies from configs/size and tier=gpu of configs/ablations, which need yaml; tests/scripts/test_gpu.py compares them.
ARMS: dict[str, Row] = {
    "baseline": {"layers": "b"},
    "diff": {"layers": "d"},
    "diff_v2": {"layers": "v"},
    "gated": {"layers": "g"},
    "half_heads": {"layers": "b", "halved": True},
    "diff_lambda0": {"layers": "d", "diff": DiffConfig(lambda_form="fixed", lambda_init=0.0)},
    "diff_no_norm": {"layers": "d", "diff": DiffConfig(head_norm="none")},
    "introspective": {"layers": "i"},
}


def model_of(size: str, vocabulary: int, layers: str = "b", halved: bool = False, **options: Any) -> Decoder:
    shape = dict(SIZES[size if ON_CARD else "tiny"])
    if halved:  # V1's fewer, wider heads
        width = shape.get("head_dim", shape["d_model"] // shape["n_head"])
        shape |= {"n_head": shape["n_head"] // 2, "head_dim": 2 * width}
    return Decoder(DecoderConfig(**shape, vocab_size=vocabulary, layers=layers, **options)).to(DEVICE)


def update(net: Callable, model: Decoder, optimizers: list, tokens: Tensor, targets: Tensor, micro: int) -> float:
    """One training step as in train.py. Returns the loss as a tensor, without waiting for the device."""
    loss = torch.zeros((), device=DEVICE)
    parts = list(zip(tokens.split(micro), targets.split(micro), strict=True))
    for inputs, wanted in parts:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=ON_CARD):
            part = net(inputs, wanted) / len(parts)
        part.backward()
        loss += part.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss


def mfu(data: Path | None) -> Rows:
    for micro, optimizer, size, arm in itertools.product(
        (32, 16), ("adamw", "muon"), ("124m", "30m"), ("baseline", "diff", "diff_v2", "gated")
    ):
        label = f"{size} {arm} {optimizer} micro_batch={micro}"
        yield label, partial(training_speed, size, ARMS[arm], optimizer, micro)


def training_speed(size: str, options: Row, optimizer: str, micro: int) -> Row:
    """Tokens a second, model FLOPs utilization and peak memory of compiled training steps on random tokens."""
    gc.collect()  # the model of the row before may wait in a cycle of references
    torch.cuda.empty_cache()
    vocabulary = GPT2_VOCABULARY if ON_CARD else 64
    micro = micro if ON_CARD else 2
    model = model_of(size, vocabulary, **options)
    net = compile_steps(model) if ON_CARD else model
    optimizers = build_optimizers(model, OptimConfig(name=optimizer))
    tokens = torch.randint(vocabulary, (micro, model.cfg.context), device=DEVICE)
    work = partial(update, net, model, optimizers, tokens, tokens.roll(-1, 1), micro)
    if ON_CARD:
        torch.cuda.reset_peak_memory_stats()
    speed = 1e3 * tokens.numel() / milliseconds(work, least=3.0)
    flops, peak = model.flops_per_token()["total"], peak_flops(DEVICE)
    return {"tokens_per_s": speed, "mfu": speed * flops / peak if peak else None, "mem_gb": memory_gb(DEVICE)}


def training(data: Path | None) -> Rows:
    """30M runs over 75M tokens (first horizon of tier=gpu), rate by rate and seed by seed, the most informative arms first."""
    steps = 2288 if ON_CARD else 3
    for seed, names, rate in [
        *((1, list(ARMS)[:6], rate) for rate in (0.02, 0.01, 0.04)),
        *((seed, list(ARMS)[:6], 0.02) for seed in (2, 3)),
        *((seed, list(ARMS)[6:], rate) for seed, rate in ((1, 0.02), (1, 0.01), (1, 0.04), (2, 0.02), (3, 0.02))),
    ]:
        for arm in names:
            yield f"{arm} muon_lr={rate} seed={seed}", partial(train, ARMS[arm], rate, seed, steps, data)


def library() -> np.ndarray:
    """Python's own library, file after file, as bytes (n,): a text that every machine has."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py" if ON_CARD else "*.py"))
    text = b"\0".join(file.read_bytes() for file in files if "site-packages" not in file.parts)
    return np.frombuffer(text, np.uint8)


def train(options: Row, rate: float, seed: int, steps: int, data: Path | None) -> Row:
    """One run with tier=gpu's schedule: final validation loss in nats per token, and the losses on the way.

    tokens_per_s is the speed of the steps after step 20 (1 in a short run). compile_s is the time that the steps before needed
    more: compiling and other warm-up. Neither has the validation.
    """
    batch, micro = (32, 32) if ON_CARD else (4, 4)
    text, held_out, vocabulary = splits(data)
    torch.manual_seed(seed)
    model = model_of("30m", vocabulary, **options)
    model.reset_parameters(seed)
    cfg = OptimConfig(name="muon", lr=3e-3, muon_lr=rate, schedule="wsd", decay=0.2, min_lr=0.0, warmup=min(100, steps // 3))
    optimizers, T = build_optimizers(model, cfg), model.cfg.context
    net = compile_steps(model) if ON_CARD else model
    loader, losses, first = Loader(Windows(text, T), batch, T, seed), {}, 20 if steps > 20 else 1
    begin = start = time.perf_counter()
    for step in range(steps):
        if step == first:
            synchronize()
            start = time.perf_counter()
        set_lr(optimizers, lr_factor(step, steps, cfg))
        model.set_step(step)
        tokens, targets = WORLD.tensors(*inputs_and_targets(loader(step)))
        loss = update(net, model, optimizers, tokens, targets, micro)
        if step % 50 == 0 or step == steps - 1:
            losses[step] = loss.item()
            if not math.isfinite(losses[step]):
                return {"losses": losses, "val_loss": None, "diverged": step}
    synchronize()
    of_step = (time.perf_counter() - start) / (steps - first)
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=ON_CARD):  # at most 1,024 windows, as train.py measures it
        val_loss = validation_loss(model, Windows(held_out, T), (1024 if ON_CARD else 4) * T, micro, WORLD)
    return {
        "val_loss": val_loss,
        "losses": losses,
        "tokens_per_s": batch * T / of_step,
        "compile_s": max(0.0, start - begin - first * of_step),
        "params": model.num_params(),
        "vocabulary": vocabulary,
        "tokens": steps * batch * T,
        "text": str(data or "stdlib"),
    }


def splits(data: Path | None) -> tuple[list, list, int]:
    """Training text, validation text and vocabulary: of prepared shards, or of Python's library."""
    if data:
        meta = read_meta(data) or {}  # shards without metadata are taken for GPT-2's
        vocabulary = meta.get("tokenizer", {}).get("vocab_size", GPT2_VOCABULARY)
        return open_split(data, "train"), open_split(data, "val"), vocabulary
    tokens = library()
    cut = int(0.98 * len(tokens))
    return [TextTokens(tokens[:cut])], [TextTokens(tokens[cut:])], 256


# ---------------------------------------- several cards


def nccl(data: Path | None) -> Rows:
    cards = torch.cuda.device_count()
    if cards > 1 or not ON_CARD:
        for size in (2**20, 2**28) if ON_CARD else (2**10,):
            yield f"all_reduce {size} float32", partial(all_reduce, max(2, cards), size)
    else:
        yield "all_reduce", lambda: {"skipped": "there is one card"}


def all_reduce(processes: int, size: int) -> Row:
    """Time of a sum over all cards, and the bandwidth of each card's link: 2 (n - 1) / n of the bytes."""
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    torch.multiprocessing.spawn(_reduce, (processes, size, queue), nprocs=processes)
    ms = queue.get()
    return {"ms": ms, "bus_gb_per_s": 4 * size * 2 * (processes - 1) / processes / ms / 1e6, "processes": processes}


def _reduce(rank: int, processes: int, size: int, queue: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    if ON_CARD:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if ON_CARD else "gloo", rank=rank, world_size=processes)
    work = partial(dist.all_reduce, torch.ones(size, device=DEVICE))
    seconds_of(work, 3)  # to warm up
    seconds = seconds_of(work, 10)
    if rank == 0:
        queue.put(1e3 * seconds)
    dist.barrier()
    dist.destroy_process_group()


WORKS = (environment, kernel, attention, mfu, tiles, nccl, training, compiled)
STAGES: dict[str, Callable[[Path | None], Rows]] = {work.__name__: work for work in WORKS}


def rows_of(stage: str, data: Path | None) -> list[tuple[str, Callable[[], Row]]]:
    """The rows of `stage`; without a card a few rows at odd distances (even distances would select rows of one mask only)."""
    rows = list(STAGES[stage](data))
    return rows if ON_CARD or stage == "compiled" else rows[:: len(rows) // 8 | 1]
