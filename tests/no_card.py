"""Lets a build of torch for the CPU alone trace models for CUDA, on a machine without a card. Needs g++.

Tensors are fake then: they have a device, a shape and no content. A build for CUDA needs `allow_autocast` alone.
"""

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path


def answer() -> None:
    """Load no_card.cpp, which torch has to find when it is imported, so call this before."""
    home = Path(importlib.util.find_spec("torch").submodule_search_locations[0])
    if (home / "lib" / "libtorch_cuda.so").exists():
        return
    source = Path(__file__).with_suffix(".cpp")
    kept = hashlib.sha256(f"{home}{os.getuid()}{version('torch')}{source.read_text()}".encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"no_card_{kept}.so"
    if not library.exists():  # several seconds, and two tests need it
        part = library.with_suffix(f".{os.getpid()}")
        command = ["g++", "-std=c++20", "-shared", "-fPIC", source, f"-I{home}/include", f"-L{home}/lib", "-o", part]
        subprocess.run([*command, f"-Wl,-rpath,{home}/lib", "-lc10", "-ltorch_cpu"], check=True, capture_output=True)
        part.replace(library)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def allow_autocast() -> None:
    """Let autocast take CUDA and bfloat16."""
    import torch

    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda *args, **options: True
