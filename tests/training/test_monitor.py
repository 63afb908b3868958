"""training/monitor.py: right numbers, and nothing of training is touched."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from eval.report.runs import read_run
from model.attention.diff import DiffConfig
from model.attention.probe import probe
from model.decoder import Decoder
from tests.training.test_train import metrics, trained
from tests.variants import VARIANTS, config, randomized
from training.monitor import Monitor, evenly

OF_MAPS = {"entropy", "first", "sinks", "mass", "negative"}
APART = {"entropy_1", "entropy_2", "first_1", "first_2", "overlap"}


def tokens(rows: int = 2, length: int = 32) -> torch.Tensor:
    return torch.randint(0, 50, (rows, length), generator=torch.Generator().manual_seed(0))


def of_layer(numbers: dict[str, float], layer: int) -> dict[str, float]:
    prefix = f"monitor/layer_{layer}/"
    return {key.removeprefix(prefix): value for key, value in numbers.items() if key.startswith(prefix)}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_has_finite_numbers(variant: str) -> None:
    model = Decoder(config(variant))
    numbers = Monitor(model, tokens()).read()
    assert all(math.isfinite(value) for value in numbers.values()) and numbers.pop("monitor_s") > 0
    layer = of_layer(numbers, 1)
    assert layer.keys() >= OF_MAPS
    special = model.blocks[1].attention.readings(torch.randn(2, 3, 64)).keys()
    letter = (model.cfg.layers * 2)[1]
    two_maps = model.blocks[1].attention.shape.maps == 2 and variant != "dint"
    assert layer.keys() - OF_MAPS - special == (APART if two_maps else set())
    known = {"d": "lambda", "v": "lambda", "g": "gate", "i": "path_0", "t": "temperature"}.get(letter)
    assert known is None or known in special
    assert 0 < layer["entropy"] <= math.log(32) and 0 <= layer["negative"] < 1 and 0 <= layer["sinks"] <= 1


@torch.no_grad()
def test_lambda_is_made_of_its_parts_with_the_warm_up_in_it() -> None:
    model = randomized("diff", diff=DiffConfig(lambda_warmup=10))
    model.set_step(2)
    numbers = Monitor(model, tokens()).read()
    for i, block in enumerate(model.blocks):
        read, attention = of_layer(numbers, i), block.attention
        assert read["lambda"] == pytest.approx(attention.lam().item(), rel=1e-5)
        parts = read["lambda_first"] - read["lambda_second"] + read["lambda_init"]
        assert read["lambda_mix"] == pytest.approx(0.3) and read["lambda"] == pytest.approx(0.3 * parts, rel=1e-4)
        dot = (attention.lambda_q2.double() * attention.lambda_k2.double()).sum()
        assert read["lambda_second"] == pytest.approx(math.exp(dot), rel=1e-5)
        assert read["lambda_k1_norm"] == pytest.approx(attention.lambda_k1.norm().item(), rel=1e-5)
        assert read["mass"] == pytest.approx(1 - read["lambda"], rel=1e-4)
    values = [of_layer(numbers, i)["lambda"] for i in (0, 1)]
    assert numbers["monitor/mean/lambda"] == pytest.approx(sum(values) / 2, rel=1e-5)
    assert numbers["monitor/std/lambda"] == pytest.approx(abs(values[0] - values[1]) / 2, rel=1e-4)
    model.blocks[0].attention.lambda_q1.fill_(1e30)  # what is not finite is left out
    model.blocks[0].attention.lambda_k1.fill_(1e30)
    numbers = Monitor(model, tokens()).read()
    assert "monitor/layer_0/lambda" not in numbers and "monitor/layer_1/lambda" in numbers
    json.loads(json.dumps(numbers), parse_constant=lambda name: pytest.fail(name))


def test_lambdas_of_tokens_gates_and_path_weights_are_means_with_their_spread() -> None:
    x = tokens()
    for variant, mean, spread in (("diff_v2", "lambda", "lambda_std"), ("gated", "gate", "gate_std")):
        model, inputs = randomized(variant), {}
        for i, block in enumerate(model.blocks):
            block.attention.register_forward_pre_hook(lambda _, given, i=i, inputs=inputs: inputs.update({i: given[0]}))
        numbers = Monitor(model, x).read()
        attention = model.blocks[1].attention
        logits = attention.lambda_logits if variant == "diff_v2" else attention.gate_logits
        open_ = logits(inputs[1]).sigmoid()
        read = of_layer(numbers, 1)
        assert read[mean] == pytest.approx(open_.mean().item(), rel=1e-5)
        assert read[spread] == pytest.approx(open_.std(correction=0).item(), rel=1e-4) and read[spread] > 0
    model = randomized("introspective")
    read = of_layer(Monitor(model, x).read(), 0)
    weights = model.blocks[0].attention.weights(torch.zeros(()))
    assert [read[f"path_{i}"] for i in range(3)] == pytest.approx(weights.tolist(), rel=1e-5)
    assert read["alpha"] == pytest.approx(model.blocks[0].attention.alpha.item(), rel=1e-5)


def test_the_two_maps_apart_are_those_of_a_softmax_each() -> None:
    """From the layer's queries and keys, at the monitor's rows; and statistics of whole maps are those of the probe."""
    model, x, seen = randomized("diff"), tokens(rows=3), {}
    attention, monitor = model.blocks[1].attention, Monitor(model, x)
    assert monitor.rows.tolist() == list(range(1, 32, 2))
    with torch.no_grad(), probe(model, torch.arange(32)) as probed:
        handle = attention.register_forward_pre_hook(lambda _, inputs: seen.update(x=inputs[0], rope=inputs[1]))
        model(x)
        handle.remove()
        q, k, _ = attention.project(seen["x"], seen["x"])
        q, k = attention.turn(q, seen["rope"]), attention.turn(k, seen["rope"])  # (B, 2h, T, d)
        logits = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        maps = logits.masked_fill(torch.ones(32, 32).triu(1).bool(), -torch.inf).softmax(-1)[:, :, monitor.rows]
    read = of_layer(monitor.read(), 1)
    for c in (0, 1):
        p = maps[:, c::2]
        assert read[f"first_{c + 1}"] == pytest.approx(p[..., 0].mean().item(), rel=1e-4)
        assert read[f"entropy_{c + 1}"] == pytest.approx(-(p * p.clamp_min(1e-30).log()).sum(-1).mean().item(), rel=1e-4)
    shared = torch.minimum(maps[:, 0::2], maps[:, 1::2]).sum(-1).mean().item()
    assert read["overlap"] == pytest.approx(shared, rel=1e-4) and 0 < shared < 0.95
    assert abs(read["entropy_1"] - read["entropy_2"]) > 1e-3

    rows = probed.layers[1][:, :, monitor.rows].double()
    mass = rows.abs().sum(-1)
    assert read["first"] == pytest.approx((rows[..., 0].abs() / mass).mean().item(), rel=1e-4)
    assert read["sinks"] == ((rows[..., 0].abs() / mass).mean(-1) > 0.3).double().mean().item()
    negative = (-rows.clamp(max=0)).sum(-1).div(mass).mean().item()
    assert read["negative"] == pytest.approx(negative, rel=1e-4) and negative > 0
    p = rows.abs() / mass[..., None]
    assert read["entropy"] == pytest.approx(-(p * p.clamp_min(1e-30).log()).sum(-1).mean().item(), rel=1e-4)


def test_layers_are_evenly_chosen_and_every_variant_of_a_stack_is_seen() -> None:
    assert evenly(12, 4) == [0, 4, 7, 11] and evenly(3, 4) == [0, 1, 2] and evenly(9, 1) == [4] and evenly(1, 3) == [0]
    monitor = Monitor(Decoder(config("baseline", n_layer=8)), tokens(), layers=3)
    assert monitor.layers == [0, 4, 7]
    assert Monitor(Decoder(config("hybrid", layers="bbbd", n_layer=8)), tokens(), layers=None).layers == list(range(8))
    hybrid = Monitor(Decoder(config("hybrid", layers="bbbd", n_layer=8)), tokens(), layers=2)
    assert hybrid.layers == [0, 3, 6, 7]
    assert {key.split("/")[1] for key in hybrid.read() if key.endswith("/lambda")} == {"layer_3", "layer_7", "mean", "std"}


def test_training_does_not_notice() -> None:
    """Gradients, random numbers, modes and hooks are what they are without it, also under autocast and with dropout."""
    options = {"dropout": 0.2, "attention_dropout": 0.1, "document_mask": True, "eot": 7}
    gradients = {}
    for watched in (False, True):
        model = randomized("diff", **options).float()
        monitor = Monitor(model, tokens())
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16):
            if watched:
                first = monitor.read()
            model(tokens(), tokens().roll(-1, 1)).backward()
        if watched:
            second = monitor.read()
            assert first | {"monitor_s": 0} == second | {"monitor_s": 0}  # the same batch, no dropout
        assert model.training and all(module.training for module in model.modules())
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        gradients[watched] = {name: p.grad for name, p in model.named_parameters()} | {"rng": torch.rand(3)}
    assert all(torch.equal(gradients[False][name], gradients[True][name]) for name in gradients[False])


def test_a_compiled_graph_is_compiled_once() -> None:
    torch._dynamo.reset()
    model, counter = Decoder(config("diff", n_layer=1)), CompileCounter()
    net, monitor = torch.compile(model, backend=counter, dynamic=False), Monitor(model, tokens())
    monitor.read()
    for _ in range(3):
        net(tokens(4), tokens(4).roll(-1, 1)).backward()
        compiled = counter.frame_count
        monitor.read()
    net(tokens(4), tokens(4).roll(-1, 1)).backward()
    assert counter.frame_count == compiled == 1


def test_a_run_is_watched_at_its_start_every_so_often_and_at_its_end(shards: Path, tmp_path: Path) -> None:
    """By the monitor and by needle questions, and it trains as a run that nobody watches."""
    mixed = ("data.retrieval.weight=50", "model.context=192", "batch_tokens=768", "needle_samples=8")
    more = ("model=diff", "model.n_layer=1", "steps=3", "model.dropout=0.1", "model.diff.lambda_warmup=10", *mixed)
    runs = {}
    for every in (2, 0):
        runs[every] = metrics(trained(shards, tmp_path / str(every), *more, f"monitor.every={every}", f"needle_every={every}"))
    watched, asked = ([line for line in runs[2] if key in line] for key in ("monitor_s", "needle_acc"))
    assert [line["step"] for line in watched] == [line["step"] for line in asked] == [0, 2, 3]
    assert watched[1]["tokens"] == 2 * 768 and not any({"monitor_s", "needle_acc"} & line.keys() for line in runs[0])
    assert [line["monitor/mean/lambda_mix"] for line in watched] == pytest.approx([0.1, 0.2, 0.3])
    often, never = ([(line["loss"], line["grad_norm"]) for line in lines if "loss" in line] for lines in runs.values())
    assert often == never and len(never) == 3
    assert all({"loss_text", "loss_retrieval"} <= line.keys() for line in runs[0] if "loss" in line)
    run = read_run(tmp_path / "2")
    assert run.value("train.tokens_to_0.5") is None and run.value("train.val_loss") > 0
