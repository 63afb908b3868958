"""The stages of gpu.py: each yields (name of a row, function that measures it). Without a card the shapes are small."""

import itertools
import math
import os
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data.loader import Loader, Windows, inputs_and_targets
from data.shards import TextTokens, open_split, read_meta
from model.attention import backends, reference
from model.attention.diff import DiffConfig
from model.attention.kernels import unavailable
from model.attention.mask import CAUSAL, Mask
from model.config import DecoderConfig
from model.decoder import Decoder
from training.metrics import memory_gb, peak_flops
from training.optim import OptimConfig, build_optimizers, set_lr
from training.parallel import compile_steps
from training.schedule import lr_factor

Row = dict[str, Any]
Rows = Iterator[tuple[str, Callable[[], Row]]]
ON_CARD = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_CARD else "cpu")
HALF = torch.bfloat16 if ON_CARD else torch.float32
GPT2_VOCABULARY = 50257
DOCUMENTS = 8  # in a sequence


# ---------------------------------------- helpers


def milliseconds(work: Callable[[], Any]) -> float:
    """Median time of one call, after a warm-up."""
    work()
    start = time.perf_counter()
    work()
    synchronize()
    once = time.perf_counter() - start
    times = []
    for _ in range(max(3, min(50, int(0.2 / max(once, 1e-6)))) if ON_CARD else 1):
        start = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * median(times)


def synchronize() -> None:
    if ON_CARD:
        torch.cuda.synchronize()


def draw(version: str, B: int, h: int, T: int, d: int, group: int = 1, dtype: torch.dtype = HALF) -> list[Tensor]:
    """Random q, k, v, lam for a version of differential or plain attention with the same maps; in memory time before heads."""
    generator = torch.Generator(DEVICE).manual_seed(T + d + group)
    keys, dv, hkv = (2 if version == "V1" else 1), (2 * d if version == "V1" else d), h // group

    def normal(*shape: int) -> Tensor:
        x = torch.randn(B, T, *shape, generator=generator, device=DEVICE).to(dtype)
        return x.movedim(1, -2).requires_grad_()

    lam = torch.rand(B, h, T, 1, generator=generator, device=DEVICE)
    return [normal(h, 2, d), normal(hkv, keys, d), normal(hkv, dv), lam.requires_grad_()]


def mask_of(name: str, B: int, T: int) -> Mask:
    """The mask `name`: causal, window (an eighth of the text) or documents."""
    positions = torch.arange(T, device=DEVICE).expand(B, T)
    window = max(1, T // 8) if name == "window" else None
    return Mask(window=window, documents=positions * DOCUMENTS // T if name == "documents" else None)


def forward_backward(call: Callable[[], Tensor], inputs: list[Tensor]) -> Row:
    """Milliseconds of forward alone and with backward, and the peak memory (MB) of both without the inputs."""
    with torch.no_grad():
        forward = milliseconds(call)
    grad = torch.randn_like(call())

    def both() -> None:
        torch.autograd.grad(call(), inputs, grad)

    row = {"forward_ms": forward, "forward_backward_ms": milliseconds(both)}
    if ON_CARD:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        both()
        row["memory_mb"] = (torch.cuda.max_memory_allocated() - before) / 1e6
    return row


# ---------------------------------------- environment


def environment(data: Path | None) -> Rows:
    yield "versions", versions
    yield "rates", rates
    for d, dv in ((64, 64), (64, 128), (128, 128), (128, 256)):
        for dtype, group in itertools.product((torch.bfloat16, torch.float32), (1, 4)):
            yield f"sdpa d={d} dv={dv} {str(dtype)[6:]} group={group}", partial(sdpa_choice, d, dv, dtype, group)


def versions() -> Row:
    row: Row = {"torch": torch.__version__, "cards": torch.cuda.device_count()}
    if ON_CARD:
        properties = torch.cuda.get_device_properties(0)
        row |= {"card": properties.name, "capability": backends.card(), "memory_gb": properties.total_memory / 1e9}
        row |= {"multiprocessors": properties.multi_processor_count, "cudnn": torch.backends.cudnn.version()}
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
        row["nvidia_smi"] = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.strip()
    row["fused"] = unavailable(64, 128) or "available"
    return row


def rates() -> Row:
    """Bytes per second (read and written) of a plain copy, and FLOP/s of a plain matrix product, on random numbers."""
    side = 8192 if ON_CARD else 256
    a, b = (torch.randn(side, side, device=DEVICE).to(HALF) for _ in range(2))
    source = torch.randn(2**30 if ON_CARD else 2**16, device=DEVICE)
    target = torch.empty_like(source)
    copied = 2 * source.numel() * 4 / milliseconds(lambda: target.copy_(source)) * 1e3
    return {"matrix_flops": 2 * side**3 / milliseconds(lambda: a @ b) * 1e3, "copy_bytes": copied}


def sdpa_choice(d: int, dv: int, dtype: torch.dtype, group: int) -> Row:
    """The kernel that torch's SDPA takes for this shape, and the backend that our `auto` chooses."""
    q, k, v = (torch.randn(1, heads, 256, width, device=DEVICE, dtype=dtype, requires_grad=True)
               for heads, width in ((8, d), (8 // group, d), (8 // group, dv)))  # fmt: skip
    choice = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=group > 1)
    names = {int(value): name for name, value in torch.nn.attention.SDPBackend.__members__.items()}
    card = backends.card() if ON_CARD else None
    return {"sdpa": names.get(int(choice), str(choice)), "auto": backends.choose(card, dtype, d, dv, CAUSAL, 256, 256)}


# ---------------------------------------- the fused kernel


def kernel(data: Path | None) -> Rows:
    lengths = (63, 500, 1024) if ON_CARD else (20,)
    wanted = [(torch.bfloat16, (64, 128, 48)), (torch.float32, (64,))] if ON_CARD else [(torch.float32, (64, 48))]
    for dtype, widths in wanted:
        for d, version, name, group, T in itertools.product(
            widths, ("V1", "V2"), ("causal", "window", "documents"), (1, 4), lengths
        ):
            label = f"{version} d={d} group={group} {name} {str(dtype)[6:]} T={T}"
            yield label, partial(kernel_error, version, d, group, name, dtype, T)


def kernel_error(version: str, d: int, group: int, name: str, dtype: torch.dtype, T: int) -> Row:
    """||fused - exact|| / ||exact|| of the output and of every gradient; exact is the N x N formula in float64."""
    inputs, mask, h = draw(version, 2, 4, T, d, group, dtype), mask_of(name, 2, T), 4
    out = backends.attend_diff(*inputs, mask, "fused")
    grad = torch.randn_like(out)
    got = (out, *torch.autograd.grad(out, inputs, grad))
    exact = [x.detach().double().requires_grad_() for x in inputs]
    q, k, v, lam = exact
    k, v = (x.repeat_interleave(h // x.shape[1], 1) for x in (k, v))
    want = reference.attend_diff(q, k.expand(-1, -1, 2, -1, -1), v, lam, mask.dense(T, T, DEVICE))
    wants = (want, *torch.autograd.grad(want, exact, grad.double()))
    error = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, wants, strict=True)]
    most = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    return dict(zip(("out", "dq", "dk", "dv", "dlam"), error, strict=True)) | {"right": all(e < most for e in error)}


def tiles(data: Path | None) -> Rows:
    """Every tile that may fit, timed at one shape; a tile that does not fit fails and says so."""
    sides = itertools.product((16, 32, 64, 128), (16, 32, 64, 128), (4, 8), (1, 2, 3), (False, True))
    candidates = [tile for tile in sides if tile[0] * tile[1] >= 1024] if ON_CARD else [(32, 64, 4, 1, True)]
    shapes = (("V1", 64), ("V2", 64), ("V2", 128), ("V1", 128))
    for (version, d), tile, backward in itertools.product(shapes, candidates, (True, False)):
        name = f"{version} d={d} {'backward' if backward else 'forward'} {','.join(str(int(x)) for x in tile)}"
        yield name, partial(time_tile, version, d, tile, backward)


def time_tile(version: str, d: int, tile: tuple, timed: bool) -> Row:
    """Milliseconds of the backward pass if `timed`, else of the forward, with this tile; the other pass keeps its own tile."""
    from model.attention.kernels import diff

    own = diff.blocks
    diff.blocks = lambda *shape, backward: diff.Blocks(*tile) if backward == timed else own(*shape, backward=backward)
    try:
        inputs = draw(version, 4 if ON_CARD else 1, 8 if ON_CARD else 1, 4096 if ON_CARD else 64, d)
        call = partial(backends.attend_diff, *inputs, CAUSAL, "fused")
        if not timed:
            with torch.no_grad():
                return {"ms": milliseconds(call)}
        out = call()
        grad = torch.randn_like(out)
        return {"ms": milliseconds(lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True))}
    finally:
        diff.blocks = own


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
    """32k tokens in all, 8 heads of two maps, by each backend except auto and cpu; plain attention with as many maps."""
    lengths = (2048, 8192, 16384, 4096, 1024) if ON_CARD else (128,)
    names = [name for name in backends.BACKENDS if name not in ("auto", "cpu")] + ["plain"]
    for (version, d), T in itertools.product((("V1", 64), ("V2", 64), ("V2", 128), ("V1", 128)), lengths):
        for name, masked in itertools.product(names, ("causal", "documents")):
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
    vocabulary = GPT2_VOCABULARY if ON_CARD else 64
    micro = micro if ON_CARD else 2
    model = model_of(size, vocabulary, **options)
    net = compile_steps(model) if ON_CARD else model
    optimizers = build_optimizers(model, OptimConfig(name=optimizer))
    tokens = torch.randint(vocabulary, (micro, model.cfg.context), device=DEVICE)
    work = partial(update, net, model, optimizers, tokens, tokens.roll(-1, 1), micro)
    if ON_CARD:
        torch.cuda.reset_peak_memory_stats()
    speed = 1e3 * tokens.numel() / milliseconds(work)
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
    """One run with tier=gpu's schedule: final validation loss in nats per token, and the losses on the way."""
    batch, micro = (32, 32) if ON_CARD else (4, 4)
    if data:
        text, held_out = open_split(data, "train"), open_split(data, "val")
        meta = read_meta(data) or {}  # shards without metadata are taken for GPT-2's
        vocabulary = meta.get("tokenizer", {}).get("vocab_size", GPT2_VOCABULARY)
    else:
        tokens, vocabulary = library(), 256
        cut = int(0.98 * len(tokens))
        text, held_out = [TextTokens(tokens[:cut])], [TextTokens(tokens[cut:])]
    torch.manual_seed(seed)
    model = model_of("30m", vocabulary, **options)
    model.reset_parameters(seed)
    cfg = OptimConfig(
        name="muon", lr=3e-3, muon_lr=rate, schedule="wsd", decay=0.2, min_lr=0.0, warmup=min(100, steps // 3)
    )
    optimizers, T = build_optimizers(model, cfg), model.cfg.context
    net = compile_steps(model) if ON_CARD else model
    loader, losses, start = Loader(Windows(text, T), batch, T, seed), {}, time.perf_counter()
    for step in range(steps):
        set_lr(optimizers, lr_factor(step, steps, cfg))
        model.set_step(step)
        tokens, targets = (torch.from_numpy(x).to(DEVICE) for x in inputs_and_targets(loader(step)))
        loss = update(net, model, optimizers, tokens, targets, micro)
        if step % 50 == 0 or step == steps - 1:
            losses[step] = loss.item()
            if not math.isfinite(losses[step]):
                return {"losses": losses, "val_loss": None, "diverged": step}
    windows = Windows(held_out, T)
    rows = [windows.window(i) for i in range(min(len(windows), 1024 if ON_CARD else 4))]
    with torch.no_grad(), torch.autocast(DEVICE.type, torch.bfloat16, enabled=ON_CARD):
        parts = [
            torch.from_numpy(np.stack(rows[i : i + micro])).to(DEVICE) for i in range(0, len(rows) - micro + 1, micro)
        ]
        val = torch.stack([net(part[:, :-1], part[:, 1:]) for part in parts]).mean().item()
    seconds = time.perf_counter() - start
    about = {
        "params": model.num_params(),
        "vocabulary": vocabulary,
        "tokens": steps * batch * T,
        "text": str(data or "stdlib"),
    }
    return {"val_loss": val, "losses": losses, "tokens_per_s": steps * batch * T / seconds, **about}


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
    x = torch.ones(size, device=DEVICE)
    for _ in range(3):
        dist.all_reduce(x)
    synchronize()
    start = time.perf_counter()
    for _ in range(10):
        dist.all_reduce(x)
    synchronize()
    if rank == 0:
        queue.put((time.perf_counter() - start) * 100)
    dist.barrier()
    dist.destroy_process_group()


STAGES: dict[str, Callable[[Path | None], Rows]] = {
    "environment": environment,
    "kernel": kernel,
    "attention": attention,
    "mfu": mfu,
    "tiles": tiles,
    "nccl": nccl,
    "training": training,
    "compiled": compiled,
}


def rows_of(stage: str, data: Path | None) -> list[tuple[str, Callable[[], Row]]]:
    """The rows of `stage`; without a card a few rows at odd distances (even distances would select rows of one mask only)."""
    rows = list(STAGES[stage](data))
    return rows if ON_CARD or stage == "compiled" else rows[:: len(rows) // 8 | 1]
