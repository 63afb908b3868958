"""Lets a build of torch for the CPU alone trace models for CUDA, on a machine without a card. Needs g++.

Tensors are fake then: they have a device, a shape and no content. A build for CUDA needs `allow_autocast` alone.
"""

import ctypes
import importlib.util
import subprocess
import tempfile
from pathlib import Path


def answer() -> None:
    """Load no_card.cpp, which torch has to find when it is imported, so call this before."""
    home = Path(importlib.util.find_spec("torch").submodule_search_locations[0])
    if (home / "lib" / "libtorch_cuda.so").exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        library, source = Path(folder) / "no_card.so", Path(__file__).with_suffix(".cpp")
        command = ["g++", "-std=c++20", "-shared", "-fPIC", source, f"-I{home}/include", f"-L{home}/lib", "-o", library]
        subprocess.run([*command, f"-Wl,-rpath,{home}/lib", "-lc10", "-ltorch_cpu"], check=True, capture_output=True)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def allow_autocast() -> None:
    """Let autocast take CUDA and bfloat16."""
    import torch

    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda *args, **options: True
