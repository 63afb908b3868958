"""C++ kernels for CPUs as torch operators, compiled at first use and kept in the user's cache folder; no second derivatives."""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

SHARED = Path(__file__).with_suffix(".h")
OPTIONS = ("-O3", "-std=c++17", "-shared", "-fPIC")
# The first of these that the compiler accepts is used.
TUNED = (["-march=native", "-fopenmp"], ["-mcpu=native", "-fopenmp"], ["-fopenmp"])


def constant(function: Callable) -> Callable:
    """Have torch.compile take what `function` returns for a constant."""
    # As torch.compiler.assume_constant_result does, whose call would import torch._dynamo and delay every command by a second.
    function._dynamo_marked_constant = True
    return function


@cache
def failure(source: Path) -> str | None:
    """Why the kernel cannot be used here, in a few words; None if it can. The first call on a machine compiles it."""
    try:
        library(source)
    except (OSError, subprocess.SubprocessError) as error:
        lines = str(getattr(error, "stderr", None) or error).strip().split("\n")
        # A compiler's last line is seldom the reason; "cannot find" is the linker's.
        return next((line for line in lines if "error" in line or "cannot find" in line), lines[-1])
    return None


def compiler(language: str = "c++") -> str | None:
    """This machine's compiler for c++ or c."""
    variable, *names = {"c++": ("CXX", "g++", "clang++"), "c": ("CC", "gcc", "clang")}[language]
    return os.environ.get(variable) or next(filter(None, map(shutil.which, names)), None)


@cache
def library(source: Path) -> ctypes.CDLL:
    """The compiled kernel. OSError or SubprocessError without a compiler that can make it."""
    program = compiler()
    if not program:
        raise OSError("there is no compiler")
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    kept = Path(caches, "attention-noise", f"{source.stem}-{_fingerprint(source, program)}.so")
    with suppress(OSError):
        return ctypes.CDLL(str(kept))
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "kernel.so"
        _compile(source, program, made)
        with suppress(OSError):  # a folder that cannot be written: the next process compiles again
            kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            part = kept.with_suffix(f".{Path(folder).name}")  # a name of this call alone, even if machines share the cache
            shutil.copyfile(made, part)
            made = part.replace(kept)  # a folder for temporary files may forbid to load libraries
        return ctypes.CDLL(str(made))


def _compile(source: Path, compiler: str, to: Path) -> None:
    for tuned in TUNED:
        command = [*shlex.split(compiler), *OPTIONS, *tuned, str(source), "-o", str(to)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
            return
        except subprocess.CalledProcessError:
            if tuned is TUNED[-1]:
                raise


def _fingerprint(source: Path, compiler: str) -> str:
    """What the library depends on: the source, the compiler and its options, and the processor that it was compiled for."""
    processor = platform.processor()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n")
        processor = next((line for line in lines if line.lower().startswith(("flags", "features"))), processor)
    code = source.read_text(encoding="utf-8") + SHARED.read_text(encoding="utf-8")
    text = f"{code} {compiler} {OPTIONS} {TUNED} {platform.machine()} {processor}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def operator(name: str, signature: str, run: Callable, empty: Callable, on: str = "cpu") -> Callable:
    """Define a torch operator in the namespace of `run`'s module. empty: makes the outputs of `run` without computing them."""
    namespace = run.__module__.replace(".", "_")  # the module may be imported under two names (pip, a checkout)
    torch.library.define(f"{namespace}::{name}", signature)
    torch.library.impl(f"{namespace}::{name}", on, run)
    torch.library.register_fake(f"{namespace}::{name}", empty)
    return getattr(getattr(torch.ops, namespace), name).default


def first_derivatives_only(inputs: tuple[Tensor | None, ...], gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The `gradients` that a custom backward returns, from `inputs`; ValueError where they are differentiated again.

    Autograd would silently take them for constants.
    """
    # An ordinary backward pass runs without grad mode, and a compiled graph refuses second derivatives by itself.
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return gradients
    return _Once.apply(len(inputs), *inputs, *gradients)


class _Once(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(inputs: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(gradient.view_as(gradient) for gradient in tensors[inputs:])

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: tuple) -> None:  # noqa: ANN001
        """Nothing is kept."""

    @staticmethod
    def backward(ctx, *grads: Tensor) -> None:  # noqa: ANN001
        fix = "use model.backend=math (in Python: backend='math') and, for the loss, F.cross_entropy of model(tokens)"
        raise ValueError(f"this gradient cannot be differentiated again: {fix}")
