"""Convert a trained baseline to another attention; the result is a run that evaluations read and train.py continues.

    python scripts/convert.py source=runs/NAME run_dir=runs/NEW [to=diff] [init=mirror] [heads=split] [debug=true]
    python scripts/convert.py source=FOLDER run_dir=runs/NEW to=diff_v2 [shards=DIR]     (to=gated, dex; to=same: import alone)
    python scripts/convert.py axolotl=config.yml run_dir=runs/NEW                        (base_model and flags from the file)

source: a run of this project, or a transformers folder or hub name (GPT-2, Llama and its relatives).

The command prints how much the logits change and, if the conversion changes the function, how much the loss rises; debug=true
adds a sample and the change of every block's output. Its last line continues the training.
"""

import math
import shlex
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import yaml
from omegaconf import MISSING
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

import train  # noqa: F401  # registers its schema
from ablation.study import train_config
from configs import CONFIG_DIR, command
from configs.composing import overrides_of
from configs.files import flatten, json_text, whole_folder, write_atomic, write_json
from configs.provenance import machine, version
from data.tokenizer import read_tokenizer
from eval.common import TextEvalConfig, evaluation_tokens
from eval.perplexity import cut_windows, digest, evaluate
from model.conversion import Conversion, change, convert
from model.decoder import Decoder
from model.interop.axolotl import Settings, read_settings, written_settings
from model.interop.format import local_folder
from model.interop.huggingface import read_folder
from training.checkpoint import LoadedRun, load_run, save
from training.distributed import pick_device
from training.run import facts

LONGEST = 1024  # tokens per window of text
LR = 1e-3  # AdamW's peak learning rate for an imported model, which is not known
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


@command("convert", ConvertConfig)
def main(cfg: ConvertConfig) -> None:
    settings = read_settings(read_yaml(cfg.axolotl)) if cfg.axolotl else None
    if settings:
        cfg = with_settings(cfg, settings)
    cfg.check()
    if cfg.source is None:
        raise ValueError("'source' is required: add source=... or axolotl=config.yml")
    pick_device(cfg.device)
    if Path(cfg.run_dir).exists():
        raise ValueError(f"{cfg.run_dir} exists already: choose another run_dir=...")
    source = open_source(cfg)
    windows = text_windows(source, cfg)
    record = convert_run(source, windows, cfg)
    print("\n".join(describe(record)))
    if settings:
        print(write_settings(settings.config, Path(cfg.run_dir)))
    more = {"steps": 500} | (settings.training if settings else {})
    print("train on   python train.py " + shlex.join(train_overrides(load_run(cfg.run_dir), cfg, more)))


def open_source(cfg: ConvertConfig) -> LoadedRun:
    """A run of this project, or a transformers folder (or hub name) as a run at step 0 that has train.py's defaults."""
    path = Path(cfg.source)
    if (path / "config.yaml").is_file():
        return load_run(path)
    path = local_folder(cfg.source)
    shape, weights = read_folder(path)
    model = Decoder(shape).eval()
    model.load_state_dict(weights, strict=True)
    tokenizer = read_tokenizer(path)
    if tokenizer.vocab_size > shape.vocab_size:
        wrong = f"the tokenizer of {path} has {tokenizer.vocab_size} tokens, its model {shape.vocab_size}"
        raise ValueError(f"{wrong}: give a folder in which they belong together")
    name = Path(cfg.run_dir).name
    values = {"data": "text", "data.name": name, "data.dir": cfg.shards or f"shards/{name}", "optim.lr": LR}
    if tokenizer.name == "hf":
        values |= {"data.tokenizer.name": "hf", "data.tokenizer.path": path}
    return LoadedRun(model, tokenizer, asdict(train_config(overrides_of(values))), 0, path)


def text_windows(source: LoadedRun, cfg: ConvertConfig) -> np.ndarray | None:
    """(n, T + 1) windows of the text to test on; None if no text is given and the source has no shards."""
    folder = cfg.shards or source.config["data"]["dir"]
    if not cfg.text and not Path(folder).is_dir():
        if cfg.shards:
            raise ValueError(f"there is no folder {folder} to test on: give shards= or text=")
        return None
    parts = evaluation_tokens(source, TextEvalConfig(run=str(source.path), text=cfg.text, shards=cfg.shards))
    length = min(source.model.cfg.context, LONGEST, max(map(len, parts)) - 1)
    return cut_windows(parts, length, max(cfg.tokens, length))


def convert_run(source: LoadedRun, windows: np.ndarray | None, cfg: ConvertConfig) -> dict[str, Any]:
    """Convert `source`, measure what has changed, and write the run directory; returns the record of the conversion."""
    shape, generator = (4, min(source.model.cfg.context, 128)), torch.Generator().manual_seed(cfg.seed)
    tokens = torch.randint(source.model.cfg.vocab_size, shape, generator=generator)  # (B, T)
    if windows is not None:
        tokens = torch.from_numpy(windows[: max(1, COMPARED // windows.shape[1]), :-1])
    model = convert(source.model, cfg, cfg.seed, tokens)
    record = {
        "source": str(source.path),
        "run": Path(cfg.run_dir).name,
        "conversion": {f.name: getattr(cfg, f.name) for f in fields(Conversion)},
        "exact": cfg.exact,
        "seed": cfg.seed,
        "parameters": [m.num_params(non_embedding=False) for m in (source.model, model)],
        "machine": machine(),
        "version": version(),
        "text": "random tokens" if windows is None else "text",
        "tested": None if windows is None else digest(windows)[:16],
        **measure(source, model, windows, tokens, cfg),
    }
    write_run(Path(cfg.run_dir), model, source, record)
    return record


def measure(
    source: LoadedRun, model: Decoder, windows: np.ndarray | None, tokens: Tensor, cfg: ConvertConfig
) -> dict[str, Any]:
    """The change of logits and hidden states on tokens (B, T); both losses if inexact or cfg.debug; samples if cfg.debug."""
    device = pick_device(cfg.device)
    both = source.model.to(device), model.to(device)
    measured: dict[str, Any] = {"change": asdict(change(*both, tokens.to(device)))}
    if windows is not None and (cfg.debug or not cfg.exact):
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
    """Overrides of train.py that start from `run`'s model with its data, batch and optimizer, at a tenth of its peak learning
    rates; `more` overrides these. Only values that differ from train.py's defaults are listed.
    """
    config, name = run.config, run.config["data"]["name"]
    values = {
        "init_from": run.path,
        "data": name if (CONFIG_DIR / "data" / f"{name}.yaml").is_file() else config["data"]["source"],
        "data.name": name,
    }
    default = flatten(asdict(train_config(overrides_of(values))))
    read = ("data.dir", "data.tokenizer.", "data.retrieval.", "data.mqar.", "optim.", "batch_tokens", "micro_batch")
    ours = {key: value for key, value in flatten(config).items() if key.startswith(read)}
    values |= {key: value for key, value in ours.items() if default.get(key, value) != value}
    for rate in ("lr", "muon_lr") if config["optim"]["name"] == "muon" else ("lr",):
        values[f"optim.{rate}"] = float(f"{LOWER * config['optim'][rate]:g}")
    if how.to == "diff" and how.init == "zero":  # at lambda 0 second maps have no effect
        values["model.diff.lambda_warmup"] = WARMUP
    return overrides_of(values | more)


def read_yaml(path: str) -> Any:
    """The content of a YAML file. ValueError if it is missing or damaged."""
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        raise ValueError(f"axolotl={path} cannot be read as YAML: give axolotl's config.yml") from None


def with_settings(cfg: ConvertConfig, settings: Settings) -> ConvertConfig:
    """`cfg` with the settings of the file. ValueError if the command line sets one of them, too."""
    settled = {f.name for f in fields(Conversion)} | {"source"}
    if typed := [f.name for f in fields(cfg) if f.name in settled and getattr(cfg, f.name) != f.default]:
        raise ValueError(f"axolotl={cfg.axolotl} says what to convert and how: leave out {', '.join(typed)}")
    return replace(cfg, source=settings.source, **asdict(settings.how))


def write_settings(config: dict[str, Any], run_dir: Path) -> str:
    """Write axolotl's file into the run; returns a line that says which commands axolotl needs next."""
    folder = str(config.get("output_dir") or run_dir / "axolotl")
    path = run_dir / "axolotl_config.yml"
    write_atomic(path, yaml.safe_dump(written_settings(config, folder), sort_keys=False).encode())
    words = shlex.join(overrides_of({"run": run_dir, "to": "axolotl", "out": folder}))
    return f"axolotl    python scripts/export.py {words}, then axolotl train {path}"


def describe(record: dict[str, Any]) -> list[str]:
    """What a conversion did, for the terminal."""
    change, (before, after), text = record["change"], record["parameters"], record["text"]
    logits = f"{change['max_logit']:.2g}, {change['mean_logit']:.2g} on average, over {change['tokens']:,} tokens"
    lines = [
        f"converted  {record['source']}: " + " ".join(f"{key}={value}" for key, value in record["conversion"].items()),
        f"parameters {before:,} -> {after:,}",
        f"logits     change by at most {logits} ({text})",
    ]
    if not record["exact"]:
        lines.append("           this conversion changes the function")
    if "sample" in record:
        lines.append(f"hidden     change of each block's output, by its rms: {' '.join(f'{x:.1e}' for x in change['hidden'])}")
        lines += [f"{when:10} {text!r}" for when, text in zip(("before", "after"), record["sample"], strict=True)]
    if "loss" in record:
        a, b = record["loss"]
        cost = f"loss       {a:.4f} -> {b:.4f} nats per token right after the conversion ({b - a:+.4f})"
        lines.append(f"{cost}, perplexity {math.exp(a):.2f} -> {math.exp(b):.2f}")
    return lines


if __name__ == "__main__":
    main()
