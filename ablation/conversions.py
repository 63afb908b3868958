"""The library of scripts/convert.py: convert a run, and measure what changes."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import yaml
from omegaconf import MISSING
from torch import Tensor

from ablation.study import train_config
from configs import CONFIG_DIR
from configs.composing import overrides_of
from configs.files import json_text, whole_folder, write_json
from configs.provenance import machine, version
from eval.perplexity import digest, evaluate
from model.attention import VARIANTS
from model.conversion import Conversion, change, convert
from model.decoder import Decoder
from training.checkpoint import LoadedRun, flatten
from training.distributed import pick_device
from training.run import facts
from training.saver import save

RECORD = "conversion.json"  # in a converted run's folder: what was converted, how, and what changed
COMPARED = 4096  # tokens whose logits are compared
LOWER = 0.1  # share of the peak learning rates for further training: at the peak, a short run makes the model worse
WARMUP = 200  # steps over which a lambda that starts at 0 grows to its value


@dataclass
class ConvertConfig(Conversion):
    """What to convert, and what to print of it."""

    source: str | None = None  # a run, a transformers folder, or a name on the hub
    run_dir: str = MISSING  # folder of the new run
    seed: Annotated[int, "[0, 4294967295]"] = 0  # for a conversion's random weights
    device: str = "auto"  # auto | cpu | cuda
    shards: str | None = None  # a prepared folder to test on; None: the validation shards of the source run
    text: str | None = None  # a text file to test on instead of shards
    tokens: int = 65536  # largest number of tokens of the text to test on
    axolotl: str | None = None  # axolotl's config.yml, which names the source and says how to convert it
    debug: bool = False  # also compare loss, perplexity, a greedy sample and every block with the source
    prompt: str = "The quick brown fox"  # start of the greedy sample


def convert_run(
    how: Conversion, source: LoadedRun, windows: np.ndarray | None, run_dir: Path, cfg: ConvertConfig
) -> dict[str, Any]:
    """Convert `source`, measure what has changed, and write the run directory; returns the record of the conversion."""
    shape, generator = (4, min(source.model.cfg.context, 128)), torch.Generator().manual_seed(cfg.seed)
    tokens = torch.randint(source.model.cfg.vocab_size, shape, generator=generator)  # (B, T)
    if windows is not None:
        tokens = torch.from_numpy(windows[: max(1, COMPARED // windows.shape[1]), :-1])
    model = convert(source.model, how, cfg.seed, tokens)
    record = {
        "source": str(source.path),
        "run": run_dir.name,
        "conversion": asdict(how),
        "exact": how.exact,
        "seed": cfg.seed,
        "parameters": [m.num_params(non_embedding=False) for m in (source.model, model)],
        "machine": machine(),
        "version": version(),
        "text": "random tokens" if windows is None else "text",
        "tested": None if windows is None else digest(windows)[:16],
        **measure(source, model, windows, tokens, cfg, cfg.debug or not how.exact),
    }
    write_run(run_dir, model, source, record)
    return record


def measure(
    source: LoadedRun, model: Decoder, windows: np.ndarray | None, tokens: Tensor, cfg: ConvertConfig, losses: bool
) -> dict[str, Any]:
    """The change of logits and hidden states on tokens (B, T); losses before and after if `losses`; samples if cfg.debug."""
    device = pick_device(cfg.device)
    both = source.model.to(device), model.to(device)
    measured: dict[str, Any] = {"change": asdict(change(*both, tokens.to(device)))}
    if windows is not None and losses:
        measured["loss"] = [evaluate(m, windows, source.tokenizer.byte_lengths())["loss"] for m in both]
    if cfg.debug:
        prompt = torch.tensor([source.tokenizer.encode(cfg.prompt)], device=device)
        room = min(40, model.cfg.context - prompt.shape[1])
        if not prompt.numel() or room < 1:
            raise ValueError(f"prompt='{cfg.prompt}' is empty or leaves no room in {model.cfg.context} tokens: give another")
        measured["sample"] = [source.tokenizer.decode(m.generate(prompt, room)[0].tolist()) for m in both]
    model.cpu()
    return measured


def write_run(run_dir: Path, model: Decoder, source: LoadedRun, record: dict[str, Any]) -> None:
    """Write the whole run directory or nothing."""
    changed = {"model": asdict(model.cfg), "run_dir": str(run_dir), "init_from": None, "resume": False}
    line = {"step": 0, "tokens": 0, **facts(model)}
    with whole_folder(run_dir) as partial:
        (partial / "config.yaml").write_text(yaml.safe_dump(source.config | changed, sort_keys=False))
        source.tokenizer.save(partial)
        (partial / "metrics.jsonl").write_text(json_text(line) + "\n")
        write_json(partial / RECORD, record)
        save(partial, 0, model, [])


def train_overrides(run: LoadedRun, how: Conversion, more: dict[str, Any]) -> list[str]:
    """Overrides of train.py that start from `run`'s weights with its architecture, data, batch and optimizer, at a tenth of
    its peak learning rates; `more` overrides these. Only values that differ from train.py's defaults are listed.
    """
    config = run.config
    name, letters = config["data"]["name"], config["model"]["layers"]
    values = {
        "init_from": run.path,
        "model": VARIANTS[letters].name if letters in VARIANTS else "baseline",
        "data": name if (CONFIG_DIR / "data" / f"{name}.yaml").is_file() else config["data"]["source"],
        "data.name": name,
    }
    default = flatten(asdict(train_config(overrides_of(values))))
    read = ("model.", "data.dir", "data.tokenizer.", "data.retrieval.", "data.mqar.", "optim.", "batch_tokens", "micro_batch")
    for key, value in flatten(config).items():
        if key.startswith(read) and key in default and default[key] != value:
            values[key] = value
    if config["model"]["vocab_size"] == run.tokenizer.vocab_size:
        values.pop("model.vocab_size", None)  # train.py takes the size from the tokenizer
    for rate in ("lr", "muon_lr") if config["optim"]["name"] == "muon" else ("lr",):
        values[f"optim.{rate}"] = float(f"{LOWER * config['optim'][rate]:g}")
    if how.second_maps_learn_later:
        values["model.diff.lambda_warmup"] = WARMUP
    return overrides_of(values | more)
