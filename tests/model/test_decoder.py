"""The decoder: logits at chosen positions only, loading weights, inputs at the edge, half precision."""

import pytest
import torch
import torch.nn.functional as F

from model.attention import backends
from model.attention.diff import DiffConfig
from model.attention.mask import CAUSAL
from model.cache import KVCache
from model.decoder import Decoder
from tests.variants import VARIANTS, config, randomized


@pytest.mark.parametrize("name", ("hybrid", "gpt2"))
def test_rows_are_the_logits_at_those_positions(name: str) -> None:
    model = randomized(name).eval()
    tokens = torch.randint(50, (2, 13), generator=torch.Generator().manual_seed(1))
    logits = model(tokens)
    same, apart = torch.tensor([0, 12, 5]), torch.tensor([[3, 3, 11], [12, 0, 7]])
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, rows=same), logits[:, same])
        torch.testing.assert_close(model(tokens, rows=apart), torch.stack([logits[0, apart[0]], logits[1, apart[1]]]))
        cache = KVCache(13)  # rows count the cached tokens, and may be none at all
        assert model(tokens[:, :8], rows=torch.zeros(0, dtype=torch.long), cache=cache).shape == (2, 0, 50)
        late = model(tokens[:, 8:], rows=torch.tensor([8, 12]), cache=cache)
        # The second part attends through another kernel than the whole: float64 rounding, 1e-10 is 1e5 times that.
        torch.testing.assert_close(late, logits[:, [8, 12]], rtol=0, atol=1e-10)
        targets = torch.randint(50, (2, 3))
        want = F.cross_entropy(logits[:, same].flatten(0, 1), targets.flatten()).float()  # the loss is computed in float32
        torch.testing.assert_close(model(tokens, targets, rows=same).float(), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_no_sequences_have_no_logits(name: str) -> None:
    """Nor have no tokens: torch's flash kernel divides by their number, and the process dies."""
    for backend, shape in (("auto", (0, 1)), ("math", (0, 5)), ("sdpa", (2, 0))):
        assert Decoder(config(name, backend=backend))(torch.zeros(shape, dtype=torch.long)).shape == (*shape, 50)


def test_inputs_without_a_batch_are_refused() -> None:
    model = Decoder(config("baseline"))
    for part, shape, says in (
        (model, (5,), r"the tokens are \(5,\), not \(B, T\): give tokens\[None\]"),
        (model.blocks[0].attention, (5, 64), r"the input is \(5, 64\), not \(B, T, D\): give x\[None\]"),
    ):
        with pytest.raises(ValueError, match=says):
            part(torch.zeros(shape, dtype=torch.long))


def test_a_model_with_activation_checkpointing_still_fills_a_cache() -> None:
    model, tokens = randomized("baseline"), torch.randint(0, 50, (2, 12))
    want = model(tokens)
    model.gradient_checkpointing, cache = True, KVCache(12)
    torch.testing.assert_close(torch.cat([model.train()(part, cache=cache) for part in tokens.split(6, 1)], 1), want)


@pytest.mark.parametrize("name", ("diff", "introspective"))
def test_a_model_made_without_memory_is_whole_after_loading(name: str) -> None:
    """It has shapes before, and its tied tensors stay tied, loaded or assigned."""
    with torch.device("meta"):
        model = Decoder(config(name))
        assert model(torch.zeros(2, 5, dtype=torch.long)).shape == (2, 5, 50)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(float("nan"))
    other, tokens = Decoder(config(name), seed=2), torch.randint(0, 50, (2, 16))
    for assign in (False, True):
        model.load_state_dict({key: value.clone() for key, value in other.state_dict().items()}, assign=assign)
        assert torch.equal(model(tokens), other(tokens)) and model.head.weight is model.embedding.weight


@pytest.mark.parametrize("form", ("vectors", "dual_scalar", "fixed"))
def test_lambda_is_float32_in_a_half_precision_model(form: str) -> None:
    attention = Decoder(config("diff", diff=DiffConfig(lambda_form=form))).bfloat16().blocks[1].attention
    exact = {name: p.detach().double() for name, p in attention.named_parameters(recurse=False)}
    lam = attention.lam()
    want = attention.lambda_init
    if form == "vectors":
        dots = [(exact[f"lambda_q{c}"] * exact[f"lambda_k{c}"]).sum() for c in (1, 2)]
        want = dots[0].exp() - dots[1].exp() + want
    assert lam.dtype == torch.float32 and lam.item() == pytest.approx(float(want), rel=1e-6)


@pytest.mark.parametrize("maps", (1, 2))
def test_the_reference_computes_in_float32_in_half_precision(maps: int) -> None:
    """Only its inputs and its output are rounded, so that other backends can be held against it."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 2, 3, 2, 40, 32, generator=generator).bfloat16().mul(3)
    v = torch.randn(2, 3, 40, 32, generator=generator).bfloat16()
    if maps == 2:
        call = lambda q, k, v: backends.attend_diff(q, k, v, torch.tensor(0.5), CAUSAL, "math")  # noqa: E731
    else:
        call = lambda q, k, v: backends.attend(q[:, :, 0], k[:, :, 0], v, CAUSAL, "math")  # noqa: E731
    exact = call(q.double(), k.double(), v.double())
    out = call(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(call(q, k, v), out)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, call(q.float(), k.float(), v.float()).bfloat16())
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("mlp", ("swiglu", "gelu"))
def test_training_does_not_store_the_feed_forward_networks_hidden_layer(mlp: str) -> None:
    """The same gradients as in evaluation, where it is stored."""
    model = randomized("baseline", mlp=mlp)
    width, tokens = model.blocks[0].mlp.down.in_features, torch.arange(20).reshape(2, 10)
    kept, grads, calls = {True: [], False: []}, {}, []
    model.blocks[0].mlp.down.register_forward_hook(lambda *_: calls.append(None))
    for training in (True, False):
        with torch.autograd.graph.saved_tensors_hooks(lambda x, at=kept[training]: at.append(x) or x, lambda x: x):
            loss = model.train(training)(tokens, tokens)
        grads[training] = torch.autograd.grad(loss, list(model.parameters()))
    assert all(map(torch.equal, grads[True], grads[False]))
    of_parameters = lambda given: torch.func.functional_call(model, given, (tokens, tokens))  # noqa: E731
    functional = torch.func.grad(of_parameters)(dict(model.train().named_parameters()))
    torch.testing.assert_close(tuple(functional.values()), grads[True], rtol=1e-10, atol=1e-12)  # float64
    stored = {training: sum(x.numel() == 20 * width for x in kept[training]) for training in kept}
    inputs = 2 if mlp == "swiglu" else 1  # gate and up, of 2 layers
    assert stored[True] == 2 * inputs < stored[False]
    assert len(calls) == 3  # one a forward pass: the product with `down` is not computed again


@pytest.mark.parametrize(("residual", "want"), (("float32", torch.float32), ("autocast", torch.bfloat16)))
def test_the_residual_stream_has_the_dtype_of_its_option(residual: str, want: torch.dtype) -> None:
    model, tokens, dtypes = randomized("baseline", residual=residual).float().train(), torch.arange(20).reshape(2, 10), []
    for part in (*model.blocks, model.norm):
        part.register_forward_pre_hook(lambda part, inputs: dtypes.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens, tokens).backward()
    assert dtypes == [want] * 3
    dtypes.clear()
    model(tokens, tokens)
    assert dtypes == [torch.float32] * 3  # without autocast
