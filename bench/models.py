"""The configuration of a benchmark, and the models and inputs of its rows."""

from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from omegaconf import MISSING, OmegaConf
from torch import Tensor

from eval.common import model_files
from model.config import DecoderConfig
from training.distributed import World
from training.optim import OptimConfig

VOCABULARY = 4096  # unless model.vocab_size= is given


@dataclass
class BenchConfig:
    """What to time, and at which shape. None means the device's default, which the function of that `what` names."""

    what: str = MISSING  # what to time: a NAME of the list at the top of this page (scripts/bench.py)
    out: str | None = None  # the JSON; None: runs/bench/WHAT.json
    rounds: Annotated[int, "[1, inf)"] = 10  # timings of each row
    device: str = "auto"  # auto | cpu | cuda
    dtype: Annotated[str, ("auto", "float32", "bfloat16")] = "auto"  # of autocast; auto: float32 for what=decode
    variants: list[str] | None = None  # names in configs/model; None: all, baseline first
    lengths: Annotated[list[int] | None, "[1, inf)"] = None  # context lengths (what=attention, decode)
    batch: Annotated[int | None, "[1, inf)"] = None  # sequences per call
    backends: list[str] | None = None  # backends of what=attention; None: all
    heads: Annotated[int | None, "[1, inf)"] = None  # what=attention: heads of the baseline; variants derive their number
    width: Annotated[int | None, "[1, inf)"] = None  # what=attention: width of a baseline head
    model: DecoderConfig = field(default_factory=DecoderConfig)  # set by size=; the options of a variant override it
    optim: OptimConfig = field(default_factory=OptimConfig)  # optimizer of the training steps
    compile: bool | None = None  # torch.compile for steps; None: on CUDA, with peer= both ways
    peer: str | None = None  # what=train: folder of a nanoGPT checkout that the model gpt2 is compared with


def variants(cfg: BenchConfig) -> list[str]:
    """The names of `cfg`, or all of configs/model, the baseline first."""
    return cfg.variants or sorted(model_files(), key=lambda name: (name != "baseline", name))


def model_config(cfg: BenchConfig, variant: str, **changes: Any) -> DecoderConfig:
    """The configuration that `train.py model=VARIANT size=...` composes, with `changes`."""
    size = {"vocab_size": cfg.model.vocab_size or VOCABULARY}
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cfg.model), size, model_files()[variant], changes))


def random_tokens(rows: int, length: int, vocabulary: int, world: World) -> Tensor:
    """Ids (rows, length), the same every time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (rows, length), generator=generator).to(world.device)


def mixed(cfg: BenchConfig, variant: str) -> bool:
    """Whether the variant's layers are of several variants."""
    return len(set(model_config(cfg, variant).layers)) > 1
