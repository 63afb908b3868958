"""Our format, for every variant: the decoder's configuration, tensors under our names, and the modeling code.

The code is modeling.py beside this file, and the modules of model/ that it needs, side by side in one folder. Folders without
the code, which earlier versions wrote, are read too.
"""

import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..config import DecoderConfig, decoder_config
from ..decoder import Decoder
from .format import Format, tensor_shapes

MODEL = Path(__file__).parents[1]  # the package `model`
FLAT = {"interop.modeling": "modeling", "attention.kernels.diff": "attention_kernels"}  # other names than a_b for a.b
KERNELS = '''"""The kernels of the project are not part of an exported folder."""


def unavailable(d=0, dv=0):
    return "the fused and the cpu backend are not part of an exported folder: use backend=sdpa"


class cpu:
    KINDS, missing = (), unavailable
'''


class Remote(Format):
    """transformers loads it with trust_remote_code=True. `stack` in config.json has the fields of DecoderConfig."""

    architecture, model_type, settings = "VariantForCausalLM", "attention_variants", {}

    def our_config(self, config: dict[str, Any]) -> DecoderConfig:
        return decoder_config(config.get("stack")).filled()

    def their_config(self, cfg: DecoderConfig) -> dict[str, Any]:
        stack = replace(cfg, backend="auto", dropout=0.0, attention_dropout=0.0, projection_dropout=0.0)
        code = {"AutoConfig": "modeling.VariantConfig", "AutoModelForCausalLM": f"modeling.{self.architecture}"}
        return super().their_config(cfg) | {"stack": asdict(stack), "auto_map": code}

    def refusal(self, model: Decoder) -> str | None:
        return None

    def modules(self, cfg: DecoderConfig) -> Iterator[tuple[list[str], str]]:
        return (([name], f"decoder.{name}") for name in tensor_shapes(cfg))


def flattened() -> dict[str, str]:
    """modeling.py and the modules that it needs, as files of one folder. transformers copies those that modeling.py names."""
    sources: dict[str, str] = {}
    waiting = ["interop.modeling"]
    while waiting:
        module = waiting.pop()
        if _flat(module) not in sources:
            path, kernels = _file(module), module.startswith("attention.kernels")
            package = list(path.parent.relative_to(MODEL).parts)
            text, needs = _flattened(KERNELS if kernels else path.read_text(encoding="utf-8"), package)
            sources[_flat(module)] = f"# From the project's model/{module.replace('.', '/')}, for one folder.\n{text}"
            waiting += needs
    names = [f"from .{name} import __doc__ as _  # noqa: F401\n" for name in sorted(sources) if name != "modeling"]
    sources["modeling"] += "\n" + "".join(names)
    return {f"{name}.py": text for name, text in sources.items()}


def _flat(module: str) -> str:
    return FLAT.get(module, module.replace(".", "_"))


def _file(module: str) -> Path | None:
    path = MODEL / module.replace(".", "/")
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


def _flattened(text: str, package: list[str]) -> tuple[str, list[str]]:
    """`text`, of a module in `package`, with `from ..a.b import c` as `from .a_b import c`, and the modules it needs."""
    needs: list[str] = []

    def rewritten(line: re.Match) -> str:
        indent, dots, named, names = line.groups()
        module = ".".join([*package[: len(package) + 1 - len(dots)], *filter(None, named.split("."))])
        inside = [f"{module}.{name.strip()}".lstrip(".") for name in names.split(",")]
        if all(map(_file, inside)):
            needs.extend(inside)
            return f"{indent}from . import " + ", ".join(f"{_flat(name)} as {name.rpartition('.')[2]}" for name in inside)
        needs.append(module)
        return f"{indent}from .{_flat(module)} import {names}"

    return re.sub(r"^(\s*)from (\.+)([\w.]*) import (.+)$", rewritten, text, flags=re.MULTILINE), needs
