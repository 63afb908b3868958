"""The classic mistakes of differential and introspective attention code, each made on purpose at run time and caught.

A mutant replaces functions or methods by wrong ones while a test runs. The test must then fail (pytest's exit status 1: not
"nothing collected", not an error of collection). Where a published implementation has the mistake, it is named.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from model import conversion, decoder
from model.attention import backends, base, diff, introspective, mask, reference, sdpa
from model.attention.base import Attention, Heads
from model.attention.diff import DiffAttention
from model.attention.diff_v2 import DiffV2Attention
from model.attention.introspective import IntrospectiveAttention
from model.attention.kernels import cpu
from model.attention.mask import Mask
from model.attention.temperature import TemperatureAttention
from model.attention.value_residual import ValueResidualAttention
from model.cache import LayerCache
from tests.variants import NATIVE
from training import optim

VARIANTS, OPERATIONS = "tests/model/test_variants.py", "tests/model/test_backends.py"
KERNELS, CONVERTED = "tests/model/test_kernels.py", "tests/model/test_conversion.py"
MODULES = "tests/model/test_modules.py"
OPTIMIZERS = "tests/training/test_parts.py::test_every_parameter_is_in_one_group_and_only_matrices_decay"
FORMULA = f"{VARIANTS}::test_equals_the_formula"
LEARNS = f"{VARIANTS}::test_every_parameter_learns"
FUTURE = f"{VARIANTS}::test_no_token_sees_the_future"
PREFILL = f"{VARIANTS}::test_decoding_with_a_cache_equals_prefill"
BLIND = f"{VARIANTS}::test_rows_that_see_nothing_are_zero_forward_and_backward"
CACHED = f"{MODULES}::test_a_module_decodes_with_a_cache_under_any_mask"
WARM_UP = f"{VARIANTS}::test_lambda_warms_up_and_the_warm_up_is_saved"
LAMBDA = f"{KERNELS}::test_lambda_of_any_shape"
SPLIT = f"{CONVERTED}::test_split_keeps_every_map_and_the_first_half_of_the_values"


class Value(NamedTuple):
    """What is put in place of something that is no function."""

    made_from: Callable[[Any], Any]


class Mutant(NamedTuple):
    """A call of `owner.name` becomes one of `wrong`, whose first argument is the right function; a test must notice."""

    label: str
    owner: Any  # a module, a class, or a function without arguments that returns one
    name: str
    wrong: Callable | Value
    caught_by: str = f"{FORMULA}[diff-1]"  # pytest node

    def replacement(self, right: Any) -> Any:
        if isinstance(self.wrong, Value):
            return self.wrong.made_from(right)
        return lambda *given, **options: self.wrong(right, *given, **options)


def triton_diff() -> Any:
    """The kernel's module, which imports Triton."""
    return pytest.importorskip("model.attention.kernels.diff", reason="the fused kernel needs the package triton")


# ---------------------------------------- wrong functions that take more than a line


def halves_apart(q: Tensor) -> Tensor:
    """Query heads in the order in which head i has the components i and i + h."""
    return q.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def keys_rotated_twice(right: Callable) -> Callable:
    """Of each pair of calls, for a path's queries and then for its keys, the second rotates twice."""
    calls = itertools.count()
    return lambda x, rope: right(right(x, rope), rope) if next(calls) % 2 else right(x, rope)


def rotated_memory(right: Callable, self: IntrospectiveAttention, k: Tensor, v: Tensor, a: Tensor) -> list[Tensor]:
    """The keys in memory are turned as the half-split layout turns them by one radian."""
    first, second = k.chunk(2, -1)
    positions = torch.arange(k.shape[-2], dtype=k.dtype)[:, None]
    turned = first * positions.cos() - second * positions.sin(), second * positions.cos() + first * positions.sin()
    return right(self, torch.cat(turned, -1), v, a)


def delta_without_lambda(right: Any) -> Any:
    class Wrong:
        def __getitem__(self, grid: Any) -> Callable:
            return lambda grad, out, second, lam, *rest, **o: right[grid](grad, out, second, torch.zeros_like(lam), *rest, **o)

    return Wrong()


def negated_lambda_gradient(right: Callable, *given: Any) -> tuple[Tensor, ...]:
    *others, dlam = right(*given)
    return *others, -dlam


def weak_temperature_gradient(right: Callable, self: TemperatureAttention, q: Tensor, k: Tensor, *rest: Any) -> tuple:
    """The outputs and the gradient of the input are right."""
    tenth = self.log_temperature * 0.1 + (self.log_temperature * 0.9).detach()
    return (q * (-tenth).exp()[:, None, None]).to(q.dtype), k, rest[0]


def first_maps_value_gradient(right: Callable, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lam: Tensor, *rest: Any) -> tuple:
    dq, dk, _, dlam = right(grad, q, k, v, lam, *rest)
    return dq, dk, right(grad, q, k, v, torch.zeros_like(lam), *rest)[2], dlam


def zero_vectors(right: Callable, new: dict[str, Tensor]) -> None:
    for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
        new[name] = torch.zeros_like(new[name])


def new_queries(right: Callable, old: dict[str, Tensor], new: dict[str, Tensor], *rest: Any) -> None:
    drawn = {name: value for name, value in new.items() if name.startswith("q.")}
    right(old, new, *rest)
    new |= drawn


MUTANTS = (
    # lambda
    Mutant("lambda_init is subtracted (blog)", DiffAttention, "lam",
           lambda right, self: right(self) - 2 * self.lambda_mix * self.lambda_init),
    Mutant("the maps are added", backends, "_subtract", lambda right, first, lam, second: right(first, -lam, second)),
    Mutant("the maps are added in the reference", reference, "attend_diff",
           lambda right, q, k, v, lam, *rest: right(q, k, v, -lam, *rest)),
    Mutant("1 - lam for 1 - lambda_init", DiffAttention, "after", lambda right, self, y: self.head_norm(y) * (1 - self.lam())),
    Mutant("no 1 - lambda_init (blog, axolotl)", DiffAttention, "after", lambda right, self, y: self.head_norm(y)),
    Mutant("depth from 1 (blog)", diff, "lambda_init", lambda right, layer: right(layer + 1)),
    Mutant("lambda vectors start at zero and stay (blog, axolotl)", DiffAttention, "init_own",
           lambda right, self, generator: [nn.init.zeros_(p) for p in self.parameters(recurse=False)], f"{LEARNS}[diff]"),
    Mutant("the warm-up is not saved (axolotl)", DiffAttention, "make_parameters",
           lambda right, self, *given: right(self, *given) or self.register_buffer(
               "lambda_mix", torch.ones(()), persistent=False), WARM_UP),
    Mutant("the warm-up is not in lambda (axolotl's log)", DiffAttention, "lam",
           lambda right, self: right(self) / self.lambda_mix, WARM_UP),
    Mutant("lambda vectors decay", optim, "_group_of",
           lambda right, name, *rest: "decayed" if ".lambda_" in name else right(name, *rest), OPTIMIZERS),
    Mutant("lambda's projection decays", DiffV2Attention, "undecayed", Value(lambda right: ()), OPTIMIZERS),
    Mutant("lambda is rounded to bfloat16 (unilm)", backends, "_subtract",
           lambda right, first, lam, second: right(first, lam.to(first.dtype), second),
           f"{OPERATIONS}::test_lambda_is_not_rounded_to_the_maps_precision"),
    # heads
    Mutant("heads and width are both halved (nanoGPT ports)", DiffAttention, "head_shape",
           lambda right, *given: (lambda s: s._replace(width=s.width // 2, value_width=s.value_width // 2))(right(*given)),
           f"{VARIANTS}::test_variants_share_the_weights_both_have"),
    Mutant("components are heads i and i + h (DiffLlama's layout)", DiffAttention, "attend",
           lambda right, self, q, *rest: right(self, halves_apart(q), *rest)),
    Mutant("keys are repeated, then paired (unilm naive, vasqu)", DiffAttention, "attend",
           lambda right, self, q, k, *rest: right(self, q, k.repeat_interleave(self.heads // self.kv_heads, 1), *rest),
           f"{FORMULA}[diff-4]"),
    Mutant("V2 pairs heads across groups", DiffV2Attention, "attend",
           lambda right, self, q, *rest: right(self, halves_apart(q), *rest), f"{FORMULA}[diff_v2-4]"),
    Mutant("V2 without its sigmoid", DiffV2Attention, "lam", lambda right, self, x: self.lambda_logits(x).mT[..., None],
           f"{FORMULA}[diff_v2-1]"),
    Mutant("odd heads are floored (vasqu, timm)", DiffAttention, "head_shape",
           lambda right, self, cfg: Heads(cfg.n_head // 2, cfg.n_kv_head // 2, cfg.head_dim, 2 * cfg.head_dim, 2, 2, 2),
           f"{VARIANTS}::test_wrong_input_is_refused_with_the_fix"),
    Mutant("the head norm is dropped", DiffAttention, "after", lambda right, self, y: y * (1 - self.lambda_init)),
    Mutant("no output projection (blog)", DiffAttention, "forward",
           lambda right, self, x, rope, mask, cache=None, carry=None: self.mix(x, x, (rope, rope), mask, cache, carry)),
    Mutant("scores are scaled by the value width", backends, "_both_maps",
           lambda right, q, k, v, *rest, **options: right(q * (q.shape[-1] / v.shape[-1]) ** 0.5, k, v, *rest, **options)),
    Mutant("dropout in evaluation", Attention, "dropout_now", Value(lambda right: property(lambda self: self.dropout)),
           f"{VARIANTS}::test_attention_dropout_is_random_in_training_only_and_right_on_average[diff]"),
    # masks and positions
    Mutant("a causal mask of zeros (blog)", Mask, "allowed",
           lambda right, self, *given: right(replace(self, causal=False), *given), f"{FUTURE}[diff]"),
    Mutant("bottom-right causal alignment over several key sets (introspective flash code)", reference, "attend",
           lambda right, q, k, v, *rest: right(q, k, v, torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(
               k.shape[-2] - q.shape[-2])[None, None]), f"{FUTURE}[introspective_sequence]"),
    Mutant("top-left causal alignment with a cache", Mask, "dense",
           lambda right, self, T, S, device: self.allowed(torch.arange(T, device=device), S), f"{PREFILL}[diff]"),
    Mutant("padding and windows are ignored (unilm flash, axolotl flash)", Mask, "limited",
           Value(lambda right: property(lambda self: False))),
    Mutant("rows that see nothing are NaN (timm)", reference, "weights",
           lambda right, q, k, see, bias=None: ((q @ k.mT) * q.shape[-1] ** -0.5).masked_fill(
               ~see.unsqueeze(2), float("-inf")).softmax(-1),
           f"{BLIND}[diff]"),
    Mutant("rows that see nothing see everything (timm fused)", sdpa, "dense",
           lambda right, *given: (lambda see, bias: (see | ~see.any(-1, keepdim=True), bias))(*right(*given)),
           f"{BLIND}[diff]"),
    Mutant("maps of a head take other heads' rows of a mask", sdpa, "spread",
           lambda right, x, q: x if x.shape[1] in (1, q.shape[1]) else x.repeat(1, q.shape[1] // x.shape[1], 1, 1),
           f"{MODULES}::test_a_mask_of_any_shape_is_the_formulas[diff_v2]"),
    Mutant("queries take other queries' rows of an added bias", mask, "_rows",
           lambda right, x, positions, S: right(x.flip(-2), positions, S), f"{CACHED}[diff]"),
    Mutant("ALiBi favours what is far", base, "alibi_slopes", lambda right, heads: tuple(-s for s in right(heads)),
           f"{MODULES}::test_positions_are_those_of_the_formula[diff]"),
    Mutant("RoPE is rounded to half precision (unilm)", base, "rope_table",
           lambda right, *given: tuple(table.bfloat16() for table in right(*given)),
           f"{MODULES}::test_rope_is_exact_in_half_precision"),
    Mutant("the RoPE of a module starts again at position 0", base, "rope_table",
           lambda right, T, width, theta, device, start, *rest: right(T, width, theta, device, 0, *rest), f"{CACHED}[diff]"),
    Mutant("decoding starts again at position 0 (unilm, blog)", decoder, "rope_of",
           lambda right, cfg, T, device, start: right(cfg, T, device, 0), f"{PREFILL}[diff]"),
    Mutant("the cache is written and not read (blog)", LayerCache, "append",
           lambda right, self, k, v, slot=0: right(self, k, v, slot) and (k, v), f"{PREFILL}[diff]"),
    Mutant("interleaved RoPE taken for half-split", Attention, "turn",
           lambda right, self, x, rope: right(self, x, rope._replace(interleaved=False)), f"{FORMULA}[diff_biased-1]"),
    # introspective attention
    Mutant("keys are rotated twice (introspective flash code)", introspective, "rotate", Value(keys_rotated_twice),
           f"{FORMULA}[introspective-1]"),
    Mutant("memory holds rotated keys (introspective flash code)", IntrospectiveAttention, "remembered", rotated_memory,
           f"{FORMULA}[introspective-1]"),
    Mutant("LayerNorm of equal path weights silences all paths (introspective code)", IntrospectiveAttention, "init_own",
           lambda right, self, generator: right(self, generator) or self.w.data.zero_(), f"{LEARNS}[introspective_sequence]"),
    Mutant("LayerNorm over a single path is let through (introspective code)", introspective, "_check",
           lambda right, opt, *rest: opt.paths == 1 or right(opt, *rest),
           f"{VARIANTS}::test_degenerate_introspection_is_refused"),
    Mutant("earlier paths are masked out (introspective naive code)", introspective, "attend_union",
           lambda right, q, keys, values, *rest: right(q, keys[-1:], values[-1:], *rest),
           f"{FORMULA}[introspective_sequence-1]"),
    Mutant("paths are not normed one by one", IntrospectiveAttention, "_path_output",
           lambda right, self, heads, i: self.merge(heads), f"{FORMULA}[introspective-1]"),
    Mutant("merging by wrong log-sum-exps in the backward", sdpa.Union, "forward",
           lambda right, scale, q, *sets: (right(scale, q, *sets)[0], sdpa._flash(q, sets[0], sets[len(sets) // 2], scale)[1]),
           f"{OPERATIONS}::test_a_union_is_one_softmax_with_exact_gradients"),
    # other variants
    Mutant("the first layer's values are forgotten", ValueResidualAttention, "before",
           lambda right, self, q, k, v, carry: (q, k, v), f"{FORMULA}[value_residual-1]"),
    Mutant("values are mixed with those of the layer before", ValueResidualAttention, "before",
           lambda right, self, q, k, v, carry: (q, k, (v + carry.setdefault("v", v)) / (carry.update(v=v) or 2)),
           f"{VARIANTS}::test_values_are_mixed_with_those_of_the_first_layer"),
    Mutant("a temperature multiplies the scores", TemperatureAttention, "before",
           lambda right, self, q, k, v, carry: (q * self.log_temperature.exp()[:, None, None], k, v),
           f"{FORMULA}[temperature-1]"),
    Mutant("a parameter gets a tenth of its gradient", TemperatureAttention, "before", weak_temperature_gradient,
           f"{MODULES}::test_gradients_under_a_mask_of_any_shape_are_those_of_the_formulas[temperature]"),
    # kernels
    *[Mutant("the C++ kernel sees the next key", cpu, "FORWARD",
             lambda right, q, k, v, lam: right(q, k.roll(-1, 3), v.roll(-1, 2), lam)),  # row t sees the keys from 1 to t + 1
      Mutant("the C++ kernel takes the lambda of the first row", cpu, "FORWARD",
             lambda right, q, k, v, lam: right(q, k, v, lam if lam is None else lam[..., :1, :].expand(lam.shape)),
             f"{OPERATIONS}::test_backends_agree_with_the_float64_reference[diff_v2-500-2-32]")][:2 * len(NATIVE)],
    Mutant("the first map's delta leaves lambda out", triton_diff, "delta_kernel", Value(delta_without_lambda), LAMBDA),
    Mutant("the gradient of lambda has the wrong sign", triton_diff, "_backward", negated_lambda_gradient, LAMBDA),
    Mutant("the values' gradient comes from the first map alone", triton_diff, "_backward", first_maps_value_gradient, LAMBDA),
    Mutant("a window one key too wide", triton_diff, "_forward",
           lambda right, *given: right(*given[:-1], given[-1] and given[-1] + 1), f"{KERNELS}::test_windows"),
    Mutant("cached queries start at position 0", triton_diff, "_forward",  # where all later keys are hidden
           lambda right, q, k, v, *rest: right(q, k[..., : q.shape[-2], :], v[..., : q.shape[-2], :], *rest),
           f"{KERNELS}::test_one_query"),
    # conversion of trained models
    Mutant("a converted lambda starts at zero vectors and stays (axolotl)", conversion, "_start_lambda", zero_vectors,
           f"{CONVERTED}::test_every_parameter_learns_at_once_but_second_maps_at_lambda_zero"),
    Mutant("mirrored maps lose 1 - lam (axolotl)", conversion, "_over",
           lambda right, weight, divisor: right(weight, divisor**0.5),
           f"{CONVERTED}::test_exact_conversions_leave_the_logits_alone"),
    Mutant("split heads meet the wrong columns of the output projection (axolotl)", conversion, "_split",
           lambda right, old, new, *rest: right(old, new, *rest) or new.update({"out.weight": old["out.weight"]}), SPLIT),
    Mutant("split heads draw new queries (axolotl)", conversion, "_split", new_queries, SPLIT),
)  # fmt: skip


class Patched:
    """A pytest plugin: while a test runs, the mutant's wrong function stands in for the right one."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant
        self.misfit: Exception | None = None  # a crash fails any test, and so shows nothing

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        owner, name = self.mutant.owner() if self.mutant.owner is triton_diff else self.mutant.owner, self.mutant.name
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, self.mutant.replacement(getattr(owner, name)))
            try:
                return (yield)
            except Exception as error:
                self.misfit = None if isinstance(error, AssertionError) else error
                raise


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.label.split(" (")[0].replace(" ", "_"))
def test_a_mutant_is_caught(mutant: Mutant) -> None:
    assert hasattr(triton_diff() if mutant.owner is triton_diff else mutant.owner, mutant.name)
    # no:unraisableexception, because it collects garbage twice in every session, which takes longer than the test
    without = ("cacheprovider", "xdist", "unraisableexception")
    alone = ("-x", "-q", "-o", "addopts=", *(f"-pno:{plugin}" for plugin in without))
    patched = Patched(mutant)
    status = pytest.main([*alone, mutant.caught_by], plugins=[patched])
    assert patched.misfit is None, f"the mutant of {mutant.name} must compute something wrong, not crash: {patched.misfit!r}"
    assert status == pytest.ExitCode.TESTS_FAILED, f"not caught by {mutant.caught_by}: {status!r}"
