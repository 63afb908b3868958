"""Convert a trained baseline to differential attention; the result is a run that evaluations read and train.py continues.

    python scripts/convert.py source=runs/NAME run_dir=runs/NEW [to=diff] [init=mirror] [heads=split] [debug=true]
    python scripts/convert.py source=FOLDER run_dir=runs/NEW to=diff_v2 [shards=DIR]     (to=same: import alone)
    python scripts/convert.py axolotl=config.yml run_dir=runs/NEW                        (base_model and flags from the file)

source: a run of this project, or a transformers folder or hub name (GPT-2, Llama and its relatives).
axolotl=config.yml: read base_model, zero_init, sublayer_norm, split_heads, mirror_weights and diff_attn_* from that file, and
write run_dir/axolotl_config.yml.

The command prints how much the logits change and, if the conversion changes the function, how much the loss rises. debug=true
adds perplexity, a sample and the change of every block's output. The last line printed is the command that continues the
training.
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
LR = 1e-3  # AdamW's peak learning rate for an imported model, whose own is not known


@command("convert", ConvertConfig)
def main(cfg: ConvertConfig) -> None:
    config = read_yaml(cfg.axolotl) if cfg.axolotl else None
    settings = read_settings(config) if cfg.axolotl else None
    if settings:
        cfg = with_settings(cfg, settings)
    check(cfg)
    source = open_source(cfg)
    windows = text_windows(source, cfg)
    how = Conversion(**{f.name: getattr(cfg, f.name) for f in fields(Conversion)})
    record = convert_run(how, source, windows, Path(cfg.run_dir), cfg)
    print("\n".join(describe(record, how)))
    if settings:
        print("\n".join(write_settings(config, settings, Path(cfg.run_dir))))
    print("\n".join(next_commands(load_run(cfg.run_dir), how, source, settings.training if settings else {})))


def check(cfg: ConvertConfig) -> None:
    """ValueError for options that are wrong, before anything is read."""
    cfg.check()
    if cfg.source is None:
        raise ValueError("'source' is required: add source=... or axolotl=config.yml")
    pick_device(cfg.device)
    if Path(cfg.run_dir).exists():
        raise ValueError(f"{cfg.run_dir} exists already: choose another run_dir=..., or delete it")
    if cfg.tokens < 1:
        raise ValueError(f"tokens={cfg.tokens} leaves no text to test on: use tokens=65536")


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
    if tokenizer.vocab_size > model.cfg.vocab_size:
        wrong = f"the tokenizer of {path} has {tokenizer.vocab_size} tokens, its model {model.cfg.vocab_size}"
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
            raise ValueError(f"there is no folder {folder} to test on: give shards=, prepared with the source's tokenizer")
        return None
    parts = evaluation_tokens(source, TextEvalConfig(run=str(source.path), text=cfg.text, shards=cfg.shards))
    length = min(source.model.cfg.context, LONGEST, max(map(len, parts)) - 1)
    return cut_windows(parts, length, max(cfg.tokens, length))


# axolotl's config.yml


def read_yaml(path: str) -> Any:
    """The content of a YAML file. ValueError if it is missing or damaged."""
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:100]
        raise ValueError(f"axolotl={path} cannot be read as YAML ({reason}): give axolotl's config.yml") from None


def with_settings(cfg: ConvertConfig, settings: Settings) -> ConvertConfig:
    """`cfg` with the settings of the file. ValueError if the command line sets one of them, too."""
    typed = [f.name for f in fields(Conversion) if getattr(cfg, f.name) != f.default]
    typed += ["source"] * (cfg.source is not None)
    if typed:
        raise ValueError(f"axolotl={cfg.axolotl} says what to convert and how: leave out {', '.join(typed)}")
    return replace(cfg, source=settings.source, **asdict(settings.how))


def write_settings(config: dict[str, Any], settings: Settings, run_dir: Path) -> list[str]:
    """Write axolotl's file into the run; returns lines that say what differs, and which commands axolotl needs next."""
    folder = str(config.get("output_dir") or run_dir / "axolotl")
    path = run_dir / "axolotl_config.yml"
    write_atomic(path, yaml.safe_dump(written_settings(config, folder), sort_keys=False).encode())
    lines = [f"axolotl    {note}" for note in settings.notes]
    if settings.unread:
        lines.append(f"axolotl    kept in {path}, not used here: {', '.join(settings.unread)}")
    command = shlex.join(overrides_of({"run": run_dir, "to": "axolotl", "out": folder}))
    return [*lines, f"axolotl    python scripts/export.py {command}, then axolotl train {path}"]


# What is printed


def describe(record: dict[str, Any], how: Conversion) -> list[str]:
    """What a conversion did, for the terminal."""
    change, (before, after), text = record["change"], record["parameters"], record["text"]
    largest, mean = f"{change['max_logit']:.2g}", f"{change['mean_logit']:.2g}"
    lines = [
        f"converted  {record['source']}: " + " ".join(f"{key}={value}" for key, value in asdict(how).items()),
        f"parameters {before:,} -> {after:,}",
        f"logits     change by at most {largest}, {mean} on average, over {change['tokens']:,} tokens ({text})",
    ]
    if not how.exact:
        lines.append(
            "           this conversion changes the function" + ("" if "loss" in record else ": give text= for its cost")
        )
    if how.to == "diff" and how.init == "mirror":
        lines.append("           train without model.diff.lambda_warmup: the output projection compensates for all of lambda")
    if "sample" in record:
        lines.append(f"hidden     change of each block's output, by its rms: {' '.join(f'{x:.1e}' for x in change['hidden'])}")
        lines += [f"{when:10} {text!r}" for when, text in zip(("before", "after"), record["sample"], strict=True)]
    if "loss" in record:
        a, b = record["loss"]
        cost = f"loss       {a:.4f} -> {b:.4f} nats per token right after the conversion ({b - a:+.4f})"
        lines.append(f"{cost}, perplexity {math.exp(a):.2f} -> {math.exp(b):.2f}")
    return lines


def next_commands(run: LoadedRun, how: Conversion, source: LoadedRun, more: dict[str, Any]) -> list[str]:
    """The command that trains further, with the overrides `more`; before it, if needed, the one that prepares data."""
    lines = ["train on   python train.py " + shlex.join(train_overrides(run, how, {"steps": 500} | more))]
    data = run.config["data"]
    if data["source"] == "mqar" or Path(data["dir"]).is_dir():  # mqar: train.py makes its sequences itself
        return lines
    if (source.path / "config.yaml").is_file():
        return [f"data first prepare the data of {source.path} in {data['dir']} again, or copy its shards there", *lines]
    values = {"data.name": data["name"], "data.dir": Path(data["dir"]), "data.tokenizer.name": "hf"}
    words = ["data=text", "path=TEXT", *overrides_of(values | {"data.tokenizer.path": source.path})]
    return ["data first python -m data.prepare " + shlex.join(words), *lines]


if __name__ == "__main__":
    main()
