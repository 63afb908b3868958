"""Convert a trained baseline to differential attention; the result is a run that evaluations read and train.py continues.

    python scripts/convert.py source=runs/NAME run_dir=runs/NEW [to=diff] [init=mirror] [heads=split] [debug=true]
    python scripts/convert.py source=FOLDER run_dir=runs/NEW to=diff_v2 [shards=DIR]     (to=same: import alone)
    python scripts/convert.py axolotl=config.yml run_dir=runs/NEW                        (base_model and flags from the file)

source: a run of this project, or a transformers folder or hub name (GPT-2, Llama and its relatives).

The command prints how much the logits change and, if the conversion changes the function, how much the loss rises; debug=true
adds a sample and the change of every block's output. Its last line continues the training.
"""

import math
import shlex
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import train  # noqa: F401  # registers its schema
from ablation.conversions import ConvertConfig, convert_run, train_config, train_overrides
from configs import command
from configs.composing import overrides_of
from configs.files import write_atomic
from data.tokenizer import read_tokenizer
from eval.common import TextEvalConfig, evaluation_tokens
from eval.perplexity import cut_windows
from model.conversion import Conversion
from model.decoder import Decoder
from model.interop.axolotl import Settings, read_settings, written_settings
from model.interop.folder import local_folder
from model.interop.huggingface import read_folder
from training.checkpoint import LoadedRun, load_run
from training.distributed import pick_device

LONGEST = 1024  # tokens per window of text
LR = 1e-3  # AdamW's peak learning rate for an imported model, which is not known


@command("convert", ConvertConfig)
def main(cfg: ConvertConfig) -> None:
    settings = read_settings(read_yaml(cfg.axolotl)) if cfg.axolotl else None
    if settings:
        cfg = with_settings(cfg, settings)
    check(cfg)
    source = open_source(cfg)
    windows = text_windows(source, cfg)
    how = Conversion(**{f.name: getattr(cfg, f.name) for f in fields(Conversion)})
    record = convert_run(how, source, windows, Path(cfg.run_dir), cfg)
    print("\n".join(describe(record, how)))
    if settings:
        print(write_settings(settings.config, Path(cfg.run_dir)))
    more = {"steps": 500} | (settings.training if settings else {})
    print("train on   python train.py " + shlex.join(train_overrides(load_run(cfg.run_dir), how, more)))


def check(cfg: ConvertConfig) -> None:
    """ValueError for wrong options, before anything is read."""
    cfg.check()
    if cfg.source is None:
        raise ValueError("'source' is required: add source=... or axolotl=config.yml")
    pick_device(cfg.device)
    if Path(cfg.run_dir).exists():
        raise ValueError(f"{cfg.run_dir} exists already: choose another run_dir=..., or delete it")


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


def describe(record: dict[str, Any], how: Conversion) -> list[str]:
    """What a conversion did, for the terminal."""
    change, (before, after), text = record["change"], record["parameters"], record["text"]
    logits = f"{change['max_logit']:.2g}, {change['mean_logit']:.2g} on average, over {change['tokens']:,} tokens"
    lines = [
        f"converted  {record['source']}: " + " ".join(f"{key}={value}" for key, value in asdict(how).items()),
        f"parameters {before:,} -> {after:,}",
        f"logits     change by at most {logits} ({text})",
    ]
    if not how.exact:
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
