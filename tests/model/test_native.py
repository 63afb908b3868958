"""The C++ kernels under the compiler's sanitizers: no access outside of a tensor or a buffer, no undefined behaviour."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from model import native
from tests.conftest import ROOT

# Awkward shapes of both kernels, forward and backward, with zeros, very large numbers, NaN and infinities.
TESTS = (
    "test_cpu_kernel.py::test_in_float64_it_is_the_formula",
    "test_cpu_kernel.py::test_other_dtypes_are_rounded_once",
    "test_cpu_kernel.py::test_what_is_not_a_number_reaches_the_rows_that_see_it",
    "test_loss.py::test_the_kernel_equals_the_formula",
    "test_loss.py::test_the_kernel_passes_on_what_is_not_finite",
)


def libraries(*names: str) -> str:
    """Files of g++'s libraries, for LD_PRELOAD: Python itself is not compiled with the sanitizers."""
    if not native.compiler():
        pytest.skip("needs g++")
    paths = [subprocess.check_output([native.compiler(), f"-print-file-name={name}"], text=True).strip() for name in names]
    if not all(map(os.path.isabs, paths)):  # the answer for an unknown library is its name
        pytest.skip("needs g++ with libasan")
    return " ".join(paths)


def fixed_addresses() -> None:
    """For a new process: where addresses are very random, older sanitizers now and then find no room for their tables."""
    ctypes.CDLL(None).personality(0x0040000)  # ADDR_NO_RANDOMIZE of linux/personality.h; some containers refuse it


@pytest.mark.skipif(sys.platform != "linux", reason="preloads the libraries of Linux")
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    sanitized = tmp_path / "sanitized"  # -O1 after the kernels' own -O3: half of the time
    options = "-O1 -fsanitize=address,undefined -fno-sanitize-recover=all"
    sanitized.write_text(f'#!/bin/sh\nunset LD_PRELOAD\nexec {native.compiler()} "$@" {options}\n')
    sanitized.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} | {
        "CXX": str(sanitized),
        "LD_PRELOAD": libraries("libasan.so", "libstdc++.so.6"),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python frees little at its end
        "XDG_CACHE_HOME": str(tmp_path),
        "OMP_NUM_THREADS": "2",
    }
    command = [sys.executable, "-m", "pytest", "-qs", "-p", "no:cacheprovider", *(f"tests/model/{test}" for test in TESTS)]
    options = {"cwd": ROOT, "env": env, "capture_output": True, "text": True, "timeout": 600}
    done = subprocess.run(command, preexec_fn=fixed_addresses, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = list(tmp_path.glob("attention-noise/*.so"))
    assert len(kernels) == 2 and all(b"__asan_init" in kernel.read_bytes() for kernel in kernels)
