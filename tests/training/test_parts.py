"""Optimizer groups, schedules, checkpoints, metrics; Muon's iteration, which rounds the same on every processor."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from data.loader import Mixture, Windows
from data.shards import TextTokens
from model.attention.gated import GatedConfig
from model.config import DecoderConfig
from model.decoder import Decoder
from model.rotary import RopeScaling
from tests.variants import VARIANTS, config
from training import checkpoint, distributed, metrics, monitor, optim
from training.checkpoint import save
from training.distributed import World, pick_dtype
from training.monitor import losses_by_kind
from training.optim import OptimConfig, build_optimizers, check_warmup, decay_start, lr_factor, set_lr, state_tensors


def stepped(model: Decoder, cfg: OptimConfig, steps: int = 2) -> list[torch.optim.Optimizer]:
    optimizers = build_optimizers(model, cfg)
    x = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(0))
    for _ in range(steps):
        model(x, x.roll(-1, 1)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return optimizers


@pytest.mark.parametrize("name", ("adamw", "muon"))
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_is_in_one_group_and_only_matrices_decay(variant: str, name: str) -> None:
    model = Decoder(config(variant, tie=variant != "baseline"))
    optimizers = build_optimizers(model, OptimConfig(name=name))
    groups = [g for o in optimizers for g in o.param_groups]
    names = [n for g in groups for n in g["names"]]
    declared = {f".{name}." for block in model.blocks for name in block.attention.undecayed}
    assert sorted(names) == sorted(n for n, _ in model.named_parameters())
    for group in groups:
        for n, p in zip(group["names"], group["params"], strict=True):
            assert p is dict(model.named_parameters())[n]
            gate = any(part in f"{n}." for part in (".lambda_", ".path_", ".gate_", *declared))
            assert (group["weight_decay"] == 0) == (p.dim() < 2 or gate), n
    muon = [n for o in optimizers if isinstance(o, torch.optim.Muon) for n in o.param_groups[0]["names"]]
    assert all(n.startswith("blocks.") for n in muon) and bool(muon) == (name == "muon")


def test_schedules_at_known_points() -> None:
    for schedule, values in {
        "cosine": {0: 1 / 11, 9: 10 / 11, 10: 1.0, 35: 0.55 + 0.45 / 2**0.5, 60: 0.55, 85: 0.55 - 0.45 / 2**0.5, 110: 0.1},
        "linear": {0: 1 / 11, 10: 1.0, 35: 0.775, 60: 0.55, 85: 0.325, 110: 0.1},
        "wsd": {0: 1 / 11, 10: 1.0, 60: 1.0, 88: 1.0, 99: 0.55, 110: 0.1},
    }.items():
        cfg = OptimConfig(schedule=schedule, warmup=10, min_lr=0.1, decay=0.2)
        for step, value in values.items():
            assert lr_factor(step, 110, cfg) == pytest.approx(value), (schedule, step)
    cfg = OptimConfig(schedule="wsd", warmup=16, decay=0.2)
    assert decay_start(20, cfg) == 16
    for warmup, schedule in ((16, "wsd"), (17, "cosine")):  # not into the decay (one step more: tests/wrong_inputs)
        check_warmup(20, replace(cfg, warmup=warmup, schedule=schedule))
    cfg = OptimConfig(name="muon", lr=0.1, muon_lr=0.4, schedule="linear", warmup=1, min_lr=0.0)
    optimizers = build_optimizers(Decoder(config("diff")), cfg)
    assert set_lr(optimizers, 0, 11, cfg) == 0.05  # warm-up, of every group from its peak
    assert [o.param_groups[0]["lr"] for o in optimizers] == [0.2, 0.05] and set_lr(optimizers, 1, 11, cfg) == 0.1


@pytest.mark.parametrize(("variant", "steps"), (("baseline", 2), ("diff", 2), ("introspective", 0)))
def test_a_checkpoint_brings_back_weights_and_optimizer_exactly(variant: str, steps: int, tmp_path: Path) -> None:
    cfg = OptimConfig(name="muon")  # and AdamW for the rest
    model = Decoder(config(variant))
    optimizers = stepped(model, cfg, steps)
    folder = save(tmp_path, steps, model, optimizers)
    other = Decoder(config(variant), seed=9)
    others = build_optimizers(other, cfg)
    assert checkpoint.load(folder, other, others) == steps
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[key])
    a, b = state_tensors(optimizers), state_tensors(others)
    assert a.keys() == b.keys() and bool(a) == bool(steps) and all(torch.equal(a[key], b[key]) for key in a)
    assert (other.head.weight is other.embedding.weight) == other.cfg.tie


def test_foreign_checkpoints_are_named(tmp_path: Path) -> None:
    model = Decoder(config("baseline"))
    optimizers = stepped(model, OptimConfig())
    folder = save(tmp_path, 1, model, optimizers)
    with pytest.raises(ValueError, match="gated.gate"):
        checkpoint.load(folder, Decoder(config("baseline", gated=GatedConfig("elementwise"))))
    longer = config("baseline", context=64, window=8, rope_theta=5e4, attention_dropout=0.1, backend="math")
    longer = replace(longer, projection_dropout=0.1, rope_scaling=RopeScaling("linear", 2.0))
    assert checkpoint.load(folder, Decoder(longer)) == 1  # what the weights do not depend on may change
    with pytest.raises(ValueError, match="of other parameters: use init_from"):
        checkpoint.load(folder, model, stepped(Decoder(config("diff")), OptimConfig()))


def test_the_dtype_of_a_cpu_is_the_one_that_it_multiplies_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, amx, avx512, dtype in (
        ("AMD EPYC 9R14", False, True, torch.bfloat16),
        ("Intel(R) Xeon(R) Processor", True, True, torch.bfloat16),
        ("Intel(R) Xeon(R) Processor", False, True, torch.float32),
        ("AMD EPYC 7763", False, False, torch.float32),
    ):
        monkeypatch.setattr(distributed, "cpu_name", lambda name=name: name)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda avx512=avx512: avx512)
        assert pick_dtype("auto", torch.device("cpu")) is dtype


@pytest.mark.parametrize("at_once", [2**26, 2 * 8 * 11])
def test_losses_by_kind_are_those_of_the_rows_of_each_source(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no forward pass makes more logits than it may, here those of two rows."""
    monkeypatch.setattr(monitor, "LOGITS_AT_ONCE", at_once)
    sizes: list[int] = []
    model = Decoder(DecoderConfig(n_layer=1, n_head=2, d_model=16, context=8, vocab_size=11))
    tokens = torch.randint(11, (6, 9), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, :5] = -100  # not scored
    source, alone = Mixture([(None, 60), (None, 40)]), World(0, 1, torch.device("cpu"))
    kinds = torch.tensor([source.source_of(i) for i in range(10, 16)])
    assert 0 < kinds.sum() < 6
    hook = model.head.register_forward_hook(lambda module, given, out: sizes.append(out.numel()))
    given = losses_by_kind(model, inputs, targets, source, range(10, 16), alone)
    hook.remove()
    assert max(sizes) == min(at_once, 6 * 8 * 11) and sum(sizes) == 6 * 8 * 11
    for kind, name in enumerate(("loss_text", "loss_retrieval")):
        alone_loss = model(inputs[kinds == kind], targets[kinds == kind]).item()
        assert given[name] == pytest.approx(alone_loss, rel=1e-5)  # another order of summation
    only = losses_by_kind(model, inputs[:1], targets[:1], source, range(10, 11), alone)
    assert [value is None for value in only.values()] == [kinds[0] == 1, kinds[0] == 0]


def test_the_validation_loss_is_without_dropout() -> None:
    model = Decoder(config("baseline", context=8, vocab_size=11, dropout=0.5)).train()
    windows = Windows([TextTokens(np.arange(81) % 11)], 8)
    values = [monitor.validation_loss(model, windows, 32, 2, World(0, 1, torch.device("cpu"))) for _ in range(2)]
    assert values[0] == values[1] and model.training


def test_memory_is_that_of_this_process_and_stands_in_the_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    line = {"loss": 2.0, "lr": 1e-3, "grad_norm": 0.5, "tokens_per_s": 1200.0, "mfu": None}
    for content, gb, says in (("VmHWM:\t 2000000 kB\n", 2.048, "mem 2.05 GB"), ("VmSize:\t 9 kB\n", None, "mem n/a")):
        (tmp_path / "status").write_text(content)
        monkeypatch.setattr(metrics, "STATUS", tmp_path / "status")
        assert metrics.memory_gb(torch.device("cpu")) == gb
        assert says in metrics.log_line(1, 10, 512, line | {"mem_gb": gb})


def test_a_peak_belongs_to_one_card(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, peak in (
        ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 NVL", 835e12), ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12), ("NVIDIA GeForce RTX 4090", 165e12), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A1000", None), ("NVIDIA GB200", None), ("NVIDIA GeForce RTX 3090 Ti", None),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert metrics.peak_flops(torch.device("cuda")) == peak, name
    assert metrics.peak_flops(torch.device("cpu")) is None


NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315), 5, 1e-7)


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().double()


def newton_schulz(x: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz in float64 on one matrix after the other, every product rounded to bfloat16 and nothing else."""
    (a, b, c), steps, eps = NEWTON_SCHULZ
    results = []
    for matrix in x:
        y = (matrix / matrix.norm().clamp(min=eps)).double()  # the iteration begins with the bfloat16 quotient
        for _ in range(steps):
            gram = rounded(y @ y.T)
            y = rounded(a * y + rounded(b * gram + c * gram @ gram) @ y)
        results.append(y)
    return torch.stack(results)


@pytest.mark.parametrize("slow", (False, True))
def test_every_product_is_rounded_to_bfloat16(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "slow_bfloat16", lambda device: slow)
    x = torch.randn(3, 7, 19, generator=torch.Generator().manual_seed(0)).bfloat16()
    result, expected = optim.orthogonalized(x, *NEWTON_SCHULZ), newton_schulz(x)
    assert result.dtype == torch.bfloat16
    assert (result.double() - expected).norm() / expected.norm() < 2e-3  # unrounded products are 0.02 away
