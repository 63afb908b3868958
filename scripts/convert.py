"""Convert a trained baseline to differential attention; the result is a run that evaluations read and train.py continues.

    python scripts/convert.py source=runs/NAME run_dir=runs/NEW [to=diff] [init=mirror] [heads=split] [debug=true]
    python scripts/convert.py source=FOLDER run_dir=runs/NEW to=diff_v2 [shards=DIR]     (to=same: import alone)
    python scripts/convert.py what=compare source=runs/NAME run_dir=runs/compare [steps=200] [arms=[baseline,zero,mirror]]

source: a run of ours, or a transformers folder or hub name (GPT-2, Llama). init=zero starts lambda at 0; init=mirror at
lambda_init, with second maps that are copies, which the output projection makes up for. heads=double adds a second map to
every head, heads=split makes one head of two. second=random draws the added maps instead of copying them. sublayer_norm=true
adds the norm per head. lambda_bias is of diff_v2. How much the logits change is always stated; debug=true adds perplexity, a
sample and the change of every block's output. The command that trains on is printed last. what=compare converts in every way
and trains each for `steps` steps: the loss before, at step 0 and after.
"""

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from omegaconf import MISSING, OmegaConf
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from configs import CONFIG_DIR, command  # noqa: E402
from configs.composing import compose_job  # noqa: E402
from configs.files import write_atomic  # noqa: E402
from configs.provenance import machine, version  # noqa: E402
from eval.common import EvalConfig, evaluation_tokens  # noqa: E402
from eval.perplexity import cut_windows, evaluate  # noqa: E402
from model.attention.diff import DiffAttention  # noqa: E402
from model.attention.diff_v2 import DiffV2Attention  # noqa: E402
from model.decoder import Decoder  # noqa: E402
from model.interop.conversion import Conversion, change, convert  # noqa: E402
from scripts.ablate import merged  # noqa: E402
from training import checkpoint  # noqa: E402
from training.checkpoint import LoadedRun, load_run  # noqa: E402
from training.run import TrainConfig, facts, flatten  # noqa: E402

RECORD = "conversion.json"
LONGEST = 1024  # tokens per window of text
COMPARED = 4096  # tokens whose logits are compared
MODELS = {"b": "baseline", "d": "diff", "v": "diff_v2"}
LR = 1e-3  # AdamW's peak for a model from elsewhere, whose own is not known
LOWER = 0.1  # of the peak learning rates to go on with: at the peak, a trained model loses more than it gains in a short run
WARMUP = 200  # steps over which a lambda that starts at 0 is let in

ARMS = {
    "baseline": Conversion(to="same"),
    "zero": Conversion(),
    "zero_random": Conversion(second="random"),
    "mirror": Conversion(init="mirror"),
    "split": Conversion(heads="split"),
    "zero_norm": Conversion(second="random", sublayer_norm=True),
    "mirror_norm": Conversion(init="mirror", sublayer_norm=True),
    "split_norm": Conversion(heads="split", sublayer_norm=True),
    "diff_v2": Conversion(to="diff_v2"),
    "diff_v2_random": Conversion(to="diff_v2", second="random"),
}


@dataclass
class ConvertConfig(Conversion):
    """shards, text: what to test on, a prepared folder or a text file; None: the source run's validation shards.

    tokens: at most so many are tested. seed: of what is random in a conversion, and of what=compare's training. arms: some
    of compare's; train: overrides of train.py for all of them.
    """

    source: str = MISSING  # a run, a transformers folder, or a name on the hub
    run_dir: str = MISSING  # folder of the new run
    what: str = "convert"  # convert | compare: one conversion, or several that are trained on
    debug: bool = False  # also compare loss, perplexity, a greedy sample and every block with the source
    shards: str | None = None
    text: str | None = None
    tokens: int = 65536
    prompt: str = "The quick brown fox"  # of the greedy sample
    seed: int = 0
    device: str = "auto"  # auto | cpu | cuda
    steps: int = 200  # of what=compare
    arms: list[str] = field(default_factory=lambda: list(ARMS))
    train: list[str] = field(default_factory=list)

    @property
    def conversion(self) -> Conversion:
        return Conversion(**{f.name: getattr(self, f.name) for f in fields(Conversion)})


@command("convert", ConvertConfig)
def main(cfg: ConvertConfig) -> None:
    check(cfg)
    source = open_source(cfg)
    windows = text_windows(source, cfg)
    if cfg.what == "compare":
        compare(cfg, source, windows)
        return
    record = convert_run(cfg.conversion, source, windows, Path(cfg.run_dir), cfg)
    print("\n".join(describe(record)))
    print(next_command(cfg, source, record))


def check(cfg: ConvertConfig) -> None:
    """ValueError for what can be seen to be wrong before anything is read."""
    cfg.conversion.check()
    if cfg.what not in ("convert", "compare"):
        raise ValueError(f"what={cfg.what} is unknown: use convert or compare")
    if cfg.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device={cfg.device}, but torch sees no GPU: use device=cpu")
    if cfg.what == "convert" and Path(cfg.run_dir).exists():
        raise ValueError(f"{cfg.run_dir} exists already: choose another run_dir=..., or delete it")
    if cfg.what == "compare" and (unknown := [name for name in cfg.arms if name not in ARMS]):
        raise ValueError(f"arms has no '{unknown[0]}': use {', '.join(ARMS)}")
    if min(cfg.steps, len(cfg.arms), cfg.tokens) < 1:
        raise ValueError("steps, arms or tokens is empty: use steps=200 and tokens=65536, and leave arms out for all")


# Sources


def open_source(cfg: ConvertConfig) -> LoadedRun:
    """A run of ours, or a transformers folder (or hub name) as if it were one that has not been trained here."""
    path = Path(cfg.source)
    if (path / "config.yaml").is_file():
        return load_run(path)
    if path.is_dir() and not (path / "config.json").is_file():
        wrong = f"{path} is neither a run (config.yaml) nor a transformers folder (config.json)"
        raise ValueError(f"{wrong}: give source=runs/NAME or the folder that save_pretrained wrote")
    from data.tokenizer import read_tokenizer
    from model.interop.huggingface import local_folder, read_folder

    path = local_folder(cfg.source)
    shape, weights = read_folder(path)
    model = Decoder(shape)
    model.load_state_dict(weights, strict=True)
    tokenizer = read_tokenizer(path)
    if tokenizer.vocab_size > model.cfg.vocab_size:
        wrong = f"the tokenizer of {path} has {tokenizer.vocab_size} tokens, its model {model.cfg.vocab_size}"
        raise ValueError(f"{wrong}: give a folder in which they belong together")
    name = Path(cfg.run_dir).name
    overrides = ["data=text", f"data.name={name}", f"data.dir={cfg.shards or f'shards/{name}'}", f"optim.lr={LR}"]
    if tokenizer.name == "hf":
        overrides += ["data.tokenizer.name=hf", f"data.tokenizer.path={path}"]
    config = asdict(train_config([quoted(override) for override in overrides]))
    return LoadedRun(model.eval(), tokenizer, config, 0, path)


def text_windows(source: LoadedRun, cfg: ConvertConfig) -> np.ndarray | None:
    """(n, T + 1) windows of the text to test on; None where none is given and the source has none."""
    if not cfg.text and not Path(cfg.shards or source.config["data"]["dir"]).is_dir():
        if cfg.shards or cfg.what == "compare":
            folder = cfg.shards or source.config["data"]["dir"]
            raise ValueError(
                f"there is no folder {folder} to test on: give shards=, prepared with the source's tokenizer"
            )
        return None
    parts = evaluation_tokens(source, EvalConfig(run=str(source.path), text=cfg.text, shards=cfg.shards))
    length = min(source.model.cfg.context, LONGEST, max(map(len, parts)) - 1)
    return cut_windows(parts, length, max(cfg.tokens, length))


# One conversion


def convert_run(
    how: Conversion, source: LoadedRun, windows: np.ndarray | None, run_dir: Path, cfg: ConvertConfig
) -> dict[str, Any]:
    """Convert `source`, measure what has changed, and write the run directory; returns what conversion.json says."""
    tokens = compared_tokens(source, windows, cfg)
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
        **measure(source, model, windows, tokens, cfg),
    }
    write_run(run_dir, model, source, record)
    return record


def compared_tokens(source: LoadedRun, windows: np.ndarray | None, cfg: ConvertConfig) -> Tensor:
    """(B, T) tokens on which models are compared: the first of the text, or random ones."""
    if windows is not None:
        return torch.from_numpy(windows[: max(1, COMPARED // windows.shape[1]), :-1])
    shape = (4, min(source.model.cfg.context, 128))
    return torch.randint(source.model.cfg.vocab_size, shape, generator=torch.Generator().manual_seed(cfg.seed))


def measure(
    source: LoadedRun, model: Decoder, windows: np.ndarray | None, tokens: Tensor, cfg: ConvertConfig
) -> dict[str, Any]:
    """The change of logits, and of hidden states; with debug the losses and samples before and after."""
    device = "cuda" if cfg.device == "auto" and torch.cuda.is_available() else cfg.device.replace("auto", "cpu")
    before, after = source.model.to(device), model.to(device)
    found: dict[str, Any] = {
        "text": "random tokens" if windows is None else "text",
        "change": asdict(change(before, after, tokens.to(device))),
    }
    if cfg.debug and windows is not None:
        found["loss"] = [loss_of(m, source, windows) for m in (before, after)]
    if cfg.debug:
        prompt = torch.tensor([source.tokenizer.encode(cfg.prompt)], device=device)
        room = min(40, before.cfg.context - prompt.shape[1])
        if not prompt.numel() or room < 1:
            raise ValueError(f"prompt='{cfg.prompt}' leaves no room in {before.cfg.context} tokens: give prompt=A WORD")
        found["sample"] = [source.tokenizer.decode(m.generate(prompt, room)[0].tolist()) for m in (before, after)]
    model.cpu()
    return found


def loss_of(model: Decoder, source: LoadedRun, windows: np.ndarray) -> float:
    """Mean loss over windows, in nats per token."""
    return evaluate(model, windows, source.tokenizer.byte_lengths())["loss"]


def write_run(run_dir: Path, model: Decoder, source: LoadedRun, record: dict[str, Any]) -> None:
    """The run directory, whole or not at all: configuration, tokenizer, first line of metrics, checkpoint of step 0."""
    if run_dir.exists():
        raise ValueError(f"{run_dir} exists already: choose another run_dir=..., or delete it")
    partial = run_dir.with_name(f".{run_dir.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    own = {"model": asdict(model.cfg), "run_dir": str(run_dir), "init_from": None, "resume": False}
    (partial / "config.yaml").write_text(yaml.safe_dump(source.config | own, sort_keys=False))
    source.tokenizer.save(partial)
    line = {"step": 0, "tokens": 0, **facts(TrainConfig(model=model.cfg), model)}
    (partial / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (partial / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    checkpoint.save(partial, 0, model, [], keep=0)
    os.replace(partial, run_dir)


def describe(record: dict[str, Any]) -> list[str]:
    """What a conversion did, for the terminal."""
    found, (before, after) = record["change"], record["parameters"]
    options = " ".join(f"{key}={value}" for key, value in record["conversion"].items())
    lines = [
        f"converted  {record['source']}: {options}",
        f"parameters {before:,} -> {after:,}",
        f"logits     change by at most {found['max_logit']:.2g}, {found['mean_logit']:.2g} on average, over "
        f"{found['tokens']:,} tokens of {record['text'].removesuffix(' tokens')}",
    ]
    if not record["exact"]:
        kept = "heads=double without sublayer_norm, and diff_v2 with second=copy, do not"
        lines.append(f"           this conversion changes the function: {kept}")
    how = Conversion(**record["conversion"])
    if how.waits:
        lines.append(
            "           the second maps' queries and keys get their first gradient after one step, all else at once"
        )
    elif how.to == "diff":
        lines.append(
            "           train without model.diff.lambda_warmup: the output projection makes up for all of lambda"
        )
    if "sample" in record:
        lines.append(
            "hidden     change of each block's output, of its rms: " + " ".join(f"{x:.1e}" for x in found["hidden"])
        )
        lines += [f"{when} {text!r}" for when, text in zip(("before    ", "after     "), record["sample"], strict=True)]
    if "loss" in record:
        a, b = record["loss"]
        lines.append(f"loss       {a:.4f} -> {b:.4f} nats per token, perplexity {math.exp(a):.2f} -> {math.exp(b):.2f}")
    return lines


# Training on


def next_command(cfg: ConvertConfig, source: LoadedRun, record: dict[str, Any]) -> str:
    """What to type to train on; of a source without prepared data, how to prepare them as well."""
    run = load_run(cfg.run_dir)
    lines = ["train on   python train.py " + shlex.join([*continue_overrides(run, cfg.conversion), "steps=500"])]
    folder = Path(run.config["data"]["dir"])
    if not folder.is_dir():
        words = (
            "data=text", "path=TEXT", f"data.name={run.config['data']['name']}", f"data.dir={folder}",
            "data.tokenizer.name=hf", f"data.tokenizer.path={source.path}",
        )  # fmt: skip
        lines.insert(0, "data first python -m data.prepare " + shlex.join(words))
    return "\n".join(lines)


def continue_overrides(run: LoadedRun, how: Conversion) -> list[str]:
    """Overrides of train.py that start from `run`'s weights with its architecture, data, batch and optimizer, at a tenth of
    its peak learning rates. Only what differs from train.py's own defaults is spelled out.
    """
    config = run.config
    data = config["data"]
    group = data["name"] if (CONFIG_DIR / "data" / f"{data['name']}.yaml").is_file() else data["source"]
    start = [
        f"init_from={run.path}", f"model={MODELS.get(config['model']['layers'], 'baseline')}", f"data={group}",
        f"data.name={data['name']}",
    ]  # fmt: skip
    default = flatten(asdict(train_config([quoted(override) for override in start])))
    read = ("model.", "data.dir", "data.tokenizer.", "data.retrieval.", "optim.", "batch_tokens", "micro_batch")
    differ = {
        key: value
        for key, value in flatten(config).items()
        if key.startswith(read) and key in default and default[key] != value
    }
    if config["model"]["vocab_size"] == run.tokenizer.vocab_size:
        differ.pop("model.vocab_size", None)  # train.py takes the tokenizer's
    for rate in ("lr", "muon_lr") if config["optim"]["name"] == "muon" else ("lr",):
        differ[f"optim.{rate}"] = f"{LOWER * config['optim'][rate]:g}"
    if how.waits:
        differ["model.diff.lambda_warmup"] = WARMUP
    return [quoted(f"{key}={_value(value)}") for key, value in [*_pairs(start), *differ.items()]]


def _pairs(overrides: list[str]) -> list[tuple[str, str]]:
    return [tuple(override.split("=", 1)) for override in overrides]


def _value(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def quoted(override: str) -> str:
    """Hydra takes a value with unusual characters in quotes."""
    key, value = override.split("=", 1)
    plain = re.fullmatch(r"[\w./:@%+-]*", value)
    return override if plain else f"{key}='" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def train_config(overrides: list[str]) -> TrainConfig:
    """train.py's configuration from these overrides."""
    return OmegaConf.to_object(compose_job("train", overrides))


# What each way costs, and what training gives back


def compare(cfg: ConvertConfig, source: LoadedRun, windows: np.ndarray) -> None:
    """Convert in every way, train each for cfg.steps steps on the same samples, and print the losses of all."""
    folder = Path(cfg.run_dir)
    rows = []
    for name in dict.fromkeys(cfg.arms):
        how, start, trained = ARMS[name], folder / name, folder / f"{name}-{cfg.steps}"
        record = read_record(start, how, source, cfg) or convert_run(how, source, windows, start, cfg)
        run = load_run(start)
        train_on(run, how, trained, cfg, folder / "logs" / f"{name}.log")
        found = {"arm": name, "parameters": record["parameters"][1], "max_logit": record["change"]["max_logit"]}
        found["before"] = loss_of(source.model, source, windows) if not rows else rows[0]["before"]
        found["start"] = loss_of(run.model, source, windows)
        final = load_run(trained).model
        found |= {"end": loss_of(final, source, windows), "lambda": lambdas(final)}
        rows.append(found)
        print(
            f"compare    {name}: loss {found['start']:.4f} at step 0, {found['end']:.4f} after {cfg.steps}", flush=True
        )
    table = compare_table(rows, cfg)
    results = {"arms": rows, "windows": len(windows), "length": windows.shape[1] - 1, "steps": cfg.steps}
    content = {
        "eval": "conversion", "run": folder.name, "config": asdict(cfg), "machine": machine(), "version": version(),
        "results": results,
    }  # fmt: skip
    write_atomic(folder / "results.json", json.dumps(content, indent=1).encode())
    write_atomic(folder / "table.md", table.encode())
    print(f"{table}compare    {folder / 'table.md'}")


def read_record(start: Path, how: Conversion, source: LoadedRun, cfg: ConvertConfig) -> dict[str, Any] | None:
    """What an earlier, interrupted comparison has made of this arm; None if nothing."""
    if not start.exists():
        return None
    record = json.loads((start / RECORD).read_text()) if (start / RECORD).is_file() else {}
    if (record.get("source"), record.get("conversion"), record.get("seed")) != (
        str(source.path),
        asdict(how),
        cfg.seed,
    ):
        raise ValueError(f"{start} holds something else: choose another run_dir=..., or delete it")
    return record


def train_on(run: LoadedRun, how: Conversion, run_dir: Path, cfg: ConvertConfig, log: Path) -> None:
    """train.py from the weights of `run`, as the printed command does; goes on where it was interrupted."""
    warmup = max(1, cfg.steps // 10)
    own = [
        f"steps={cfg.steps}",
        f"optim.warmup={warmup}",
        f"seed={cfg.seed + 1000}",
        "eval_every=0",
    ]  # samples not seen
    if how.waits:
        own.append(f"model.diff.lambda_warmup={warmup}")
    where = [quoted(f"run_dir={run_dir}"), "resume=true", f"device={cfg.device}"]
    overrides = merged(continue_overrides(run, how), own, cfg.train, where)
    line = f"$ python train.py {shlex.join(overrides)}\n"
    if log.is_file() and log.read_text().startswith(line) and (run_dir / f"checkpoints/step_{cfg.steps:08d}").is_dir():
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        print(line, end="", file=file, flush=True)
        done = subprocess.run(
            [sys.executable, str(ROOT / "train.py"), *overrides], stdout=file, stderr=subprocess.STDOUT
        )
    if done.returncode:
        last = (log.read_text().strip().splitlines() or ["no output"])[-1].removeprefix("error: ")
        raise ValueError(f"training of {run_dir.name} failed: {last} ({log})")


@torch.no_grad()
def lambdas(model: Decoder) -> list[float]:
    """lambda of every differential layer; of version 2 its mean over heads at a token that says nothing."""
    found = []
    for attention in (block.attention for block in model.blocks):
        if isinstance(attention, DiffAttention):
            found.append(attention.lam().item())
        elif isinstance(attention, DiffV2Attention):
            found.append(attention.lambda_logits.bias.sigmoid().mean().item())
    return found


def compare_table(rows: list[dict[str, Any]], cfg: ConvertConfig) -> str:
    """Markdown; "against" compares with the first arm, trained as long. lambda: after training, the mean over layers."""
    lines = [
        f"| arm | parameters | largest logit change | loss at step 0 | cost | loss after {cfg.steps} steps | against "
        f"{rows[0]['arm']} | lambda |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        mean = f"{np.mean(row['lambda']):.4f}" if row["lambda"] else "-"
        cost, left = row["start"] - row["before"], row["end"] - rows[0]["end"]
        lines.append(
            f"| {row['arm']} | {row['parameters']:,} | {row['max_logit']:.1e} | {row['start']:.4f} | {cost:+.4f} | "
            f"{row['end']:.4f} | {left:+.4f} | {mean} |"
        )
    note = f"Source: {cfg.source}, loss {rows[0]['before']:.4f}; one seed, the same samples for every arm."
    return "\n".join([*lines, "", note]) + "\n"


if __name__ == "__main__":
    main()
