"""The classic mistakes of differential and introspective attention code, each made on purpose in a copy and caught.

A mutant is one replacement in one file. Its tests run in a process of their own and must fail (pytest's exit status 1:
not "nothing collected", not an error of collection). Where a published implementation has the mistake, it is named.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
DIFF, V2, SEQ = "model/attention/diff.py", "model/attention/diff_v2.py", "model/attention/introspective.py"
FACADE, REFERENCE, MASK = "model/attention/backends.py", "model/attention/reference.py", "model/attention/mask.py"
BLOCKED, KERNEL, PROGRAMS = (
    "model/attention/blocked.py",
    "model/attention/kernels/diff.py",
    "model/attention/kernels/diff_triton.py",
)
VARIANTS, OPERATIONS = "tests/model/test_variants.py", "tests/model/test_backends.py"
KERNELS = "tests/model/test_kernels.py"
CONVERSION, CONVERTED = "model/conversion.py", "tests/model/test_conversion.py"
FORMULA = f"{VARIANTS}::test_equals_the_formula"


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    caught_by: str  # pytest node


MUTANTS = (
    # lambda
    Mutant("lambda_init is subtracted (blog)", DIFF, "first - second + self", "first - second - self",
           f"{FORMULA}[diff-1-math]"),
    Mutant("the maps are added", FACADE, "(first - (lam if", "(first + (lam if", f"{FORMULA}[diff-1-sdpa]"),
    Mutant("the maps are added in the reference", REFERENCE, "(first - lam", "(first + lam", f"{FORMULA}[diff-1-math]"),
    Mutant("1 - lam for 1 - lambda_init", DIFF, "(1 - self.lambda_init)", "(1 - self.lam())", f"{FORMULA}[diff-1-math]"),
    Mutant("no 1 - lambda_init (blog, axolotl)", DIFF, " * (1 - self.lambda_init)", "", f"{FORMULA}[diff-1-math]"),
    Mutant("depth from 1 (blog)", DIFF, "-0.3 * layer", "-0.3 * (layer + 1)", f"{FORMULA}[diff-1-math]"),
    Mutant(
        "lambda vectors start at zero and stay (blog, axolotl)", DIFF,
        "nn.init.normal_(p, std=0.1, generator=generator) if name in VECTORS else nn.init.zeros_(p)",
        "nn.init.zeros_(p)", f"{VARIANTS}::test_every_parameter_learns[diff]",
    ),
    Mutant(
        "the warm-up is not saved (axolotl)", DIFF, '"lambda_mix", torch.ones(())',
        '"lambda_mix", torch.ones(()), persistent=False',
        f"{VARIANTS}::test_lambda_warms_up_and_the_warm_up_is_saved",
    ),
    Mutant(
        "the warm-up is not in lambda (axolotl's log)", DIFF, "return self.lambda_mix * (first", "return (first",
        f"{VARIANTS}::test_lambda_warms_up_and_the_warm_up_is_saved",
    ),
    Mutant(
        "lambda vectors decay", "training/optim.py", 'UNDECAYED = ("lambda", ', "UNDECAYED = (",
        "tests/training/test_parts.py",
    ),
    Mutant(
        "lambda is rounded to bfloat16 (unilm)", FACADE, "(lam if lam.dim() else lam.view(1, 1))", "lam.to(first.dtype)",
        f"{OPERATIONS}::test_lambda_is_not_rounded_to_the_maps_precision",
    ),
    # heads
    Mutant(
        "heads and width are both halved (nanoGPT ports)", DIFF,
        "self.width, self.value_width = cfg.head_dim, pairs * cfg.head_dim",
        "self.width, self.value_width = cfg.head_dim // 2, cfg.head_dim",
        f"{VARIANTS}::test_variants_share_the_weights_both_have",
    ),
    Mutant(
        "components are heads i and i + h (DiffLlama's layout)", DIFF, "q.unflatten(1, (-1, 2)), k",
        "q.unflatten(1, (2, -1)).transpose(1, 2), k", f"{FORMULA}[diff-1-math]",
    ),
    Mutant(
        "keys are repeated, then paired (unilm naive, vasqu)", DIFF, "k.unflatten(1, (-1, 2)), v",
        "k.repeat_interleave(self.heads // self.kv_heads, 1).unflatten(1, (-1, 2)), v", f"{FORMULA}[diff-2-math]",
    ),
    Mutant(
        "V2 pairs heads across groups", V2, "q.unflatten(1, (-1, 2))", "q.unflatten(1, (2, -1)).transpose(1, 2)",
        f"{FORMULA}[diff_v2-2-math]",
    ),
    Mutant("V2 without its sigmoid", V2, "(x).sigmoid()", "(x)", f"{FORMULA}[diff_v2-1-math]"),
    Mutant("odd heads are floored (vasqu, timm)", DIFF, "count % 2", "False",
           f"{VARIANTS}::test_wrong_input_is_refused_with_the_fix"),
    Mutant("the head norm is dropped", DIFF, "self.head_norm(y) *", "y *", f"{FORMULA}[diff-1-math]"),
    Mutant("no output projection (blog)", DIFF, "return self.out(self.scale_norm(y.transpose(1, 2).flatten(2)))",
           "return self.scale_norm(y.transpose(1, 2).flatten(2))", f"{FORMULA}[diff-1-math]"),
    Mutant(
        "scores are scaled by the value width", FACADE, "k.shape[-2], q.shape[-1] ** -0.5, v.shape[-1]",
        "k.shape[-2], v.shape[-1] ** -0.5, v.shape[-1]", f"{FORMULA}[diff-1-sdpa]",
    ),
    Mutant("dropout in evaluation", DIFF, "self.dropout if self.training else 0.0", "self.dropout",
           f"{VARIANTS}::test_attention_dropout_is_random_in_training_only_and_right_on_average[diff-math]"),
    # masks and positions
    Mutant("a causal mask of zeros (blog)", MASK, "(s <= t) if self.causal else torch.ones_like(s <= t)",
           "torch.ones_like(s <= t)", f"{VARIANTS}::test_no_token_sees_the_future[diff-math]"),
    Mutant(
        "bottom-right causal alignment over several key sets (introspective flash code)", REFERENCE,
        "see.repeat(1, 1, 1, len(keys))",
        "torch.ones(q.shape[-2], len(keys) * q.shape[-2], dtype=torch.bool).tril((len(keys) - 1) * q.shape[-2])[None, None]",
        f"{VARIANTS}::test_no_token_sees_the_future[introspective_sequence-math]",
    ),
    Mutant("top-left causal alignment with a cache", MASK, "torch.arange(S - T, S, device=device)",
           "torch.arange(T, device=device)", f"{VARIANTS}::test_decoding_with_a_cache_equals_prefill[diff-math]"),
    Mutant("padding and windows are ignored (unilm flash, axolotl flash)", FACADE, "(mask.plain and T in (S, 1))",
           "(mask.causal and T in (S, 1))", f"{FORMULA}[diff-1-sdpa]"),
    Mutant("rows that see nothing are NaN (timm)", REFERENCE,
           'scores.masked_fill(~(see | blind), float("-inf")).softmax(-1).masked_fill(blind, 0.0)',
           'scores.masked_fill(~see, float("-inf")).softmax(-1)',
           f"{VARIANTS}::test_rows_that_see_nothing_are_zero_forward_and_backward[diff-math]"),
    Mutant("rows that see nothing see everything (timm fused)", FACADE, "out.masked_fill(blind, 0.0)", "out",
           f"{VARIANTS}::test_rows_that_see_nothing_are_zero_forward_and_backward[diff-sdpa]"),
    Mutant("decoding starts again at position 0 (unilm, blog)", "model/decoder.py", "self._rope(start, T)",
           "self._rope(0, T)", f"{VARIANTS}::test_decoding_with_a_cache_equals_prefill[diff-math]"),
    Mutant("the cache is written and not read (blog)", "model/cache.py", "return keys[:, :, :stop], values[:, :, :stop]",
           "return k, v", f"{VARIANTS}::test_decoding_with_a_cache_equals_prefill[diff-math]"),
    Mutant("interleaved RoPE taken for half-split", "model/rotary.py", "x[..., 0::2], x[..., 1::2]",
           "x.chunk(2, dim=-1)", f"{FORMULA}[diff_biased-1-math]"),
    # introspective attention
    Mutant("keys are rotated twice (introspective flash code)", SEQ, "rotate(q, rope), rotate(k, rope)",
           "rotate(q, rope), rotate(rotate(k, rope), rope)", f"{FORMULA}[introspective-1-math]"),
    Mutant("memory holds rotated keys (introspective flash code)", SEQ, 'own = {"k": k, "v": v}',
           'own = {"k": rotate(k, rope), "v": v}', f"{FORMULA}[introspective-1-math]"),
    Mutant("LayerNorm of equal path weights silences all paths (introspective code)", SEQ, '"literal": 1.0',
           '"literal": 0.0', f"{VARIANTS}::test_every_parameter_learns[introspective_sequence]"),
    Mutant("LayerNorm over a single path is let through (introspective code)", SEQ,
           'opt.path_weight == "affine" and opt.paths == 1', "False",
           f"{VARIANTS}::test_degenerate_introspection_is_refused"),
    Mutant("earlier paths are masked out (introspective naive code)", SEQ, "keys[:seen], values[:seen]",
           "keys[seen - 1 : seen], values[seen - 1 : seen]", f"{FORMULA}[introspective_sequence-1-math]"),
    Mutant("paths are not normed one by one", SEQ, "return self.path_norms[i](heads.transpose(1, 2).flatten(2))",
           "return heads.transpose(1, 2).flatten(2)", f"{FORMULA}[introspective-1-math]"),
    Mutant("merging by wrong log-sum-exps in the backward", FACADE, "ctx.save_for_backward(q, *sets, out, lse)",
           "ctx.save_for_backward(q, *sets, out, lses[0])",
           f"{OPERATIONS}::test_a_union_is_one_softmax_with_exact_gradients"),
    # blocks and kernels
    Mutant("a block sees its own future", BLOCKED, ".triu(1)", ".triu(2)", f"{FORMULA}[diff-1-blocked]"),
    Mutant("a block takes the lambda of the first rows", BLOCKED, "lam[..., start:stop, :]", "lam[..., : stop - start, :]",
           f"{OPERATIONS}::test_backends_agree_with_the_float64_reference[diff_v2-500-1-32]"),
    Mutant("the first map's delta leaves lambda out", PROGRAMS, "tl.sum(grad * out, 1) + lam * delta2",
           "tl.sum(grad * out, 1)", f"{KERNELS}::test_lambda_of_any_shape"),
    Mutant("the gradient of lambda has the wrong sign", KERNEL, "-delta[:, :, 1, :, None]", "delta[:, :, 1, :, None]",
           f"{KERNELS}::test_lambda_of_any_shape"),
    Mutant("the values' gradient comes from the first map alone", PROGRAMS, "p1 - p2", "p1",
           f"{KERNELS}::test_lambda_of_any_shape"),
    Mutant("a window one key too wide", PROGRAMS, "positions - keys < window", "positions - keys <= window",
           f"{KERNELS}::test_windows"),
    Mutant("cached queries start at position 0", PROGRAMS, "positions = rows + (S - T)", "positions = rows",
           f"{KERNELS}::test_long"),
    # conversion of trained models
    Mutant("a converted lambda starts at zero vectors and stays (axolotl)", CONVERSION,
           'new[f"{name}2"] = new[f"{name}1"].clone()',
           'new[f"{name}1"] = new[f"{name}2"] = torch.zeros_like(new[f"{name}1"])',
           f"{CONVERTED}::test_every_parameter_learns_at_once_but_second_maps_at_lambda_zero"),
    Mutant("mirrored maps lose 1 - lam (axolotl)", CONVERSION,
           "(1 - lam) * (1 - target.lambda_init))", "1 - target.lambda_init)",
           f"{CONVERTED}::test_exact_conversions_leave_the_logits_alone"),
    Mutant("split heads meet the wrong columns of the output projection (axolotl)", CONVERSION,
           ".unflatten(1, (-1, target.width))[:, order].flatten(1)", ".clone()",
           f"{CONVERTED}::test_split_keeps_every_map_and_the_first_half_of_the_values"),
    Mutant("split heads draw new queries (axolotl)", CONVERSION, "    new |= old\n    for name in (\"q.weight\"",
           "    new |= {k: v for k, v in old.items() if k[0] != 'q'}\n    for name in (\"none\"",
           f"{CONVERTED}::test_split_keeps_every_map_and_the_first_half_of_the_values"),
)  # fmt: skip


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code and its tests without anything that was made from them."""
    folder = tmp_path_factory.mktemp("mutants") / "repo"
    ignore = shutil.ignore_patterns(".*", "__pycache__", "runs", "shards", "docs", "wandb")
    shutil.copytree(ROOT, folder, ignore=ignore)
    return folder


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.split(" (")[0].replace(" ", "_"))
def test_a_mutant_is_caught(mutant: Mutant, copy: Path) -> None:
    path = copy / mutant.file
    source = path.read_text()
    assert source.count(mutant.old) == 1, f"{mutant.old!r} stands {source.count(mutant.old)} times in {mutant.file}"
    path.write_text(source.replace(mutant.old, mutant.new))
    try:
        done = subprocess.run(
            [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", mutant.caught_by],
            cwd=copy, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
    finally:
        path.write_text(source)
    assert done.returncode == 1, f"not caught: {done.stdout[-1500:]}{done.stderr[-500:]}"
