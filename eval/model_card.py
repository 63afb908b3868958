"""README.md of an exported folder: the model, its training data, its results, and how to load it."""

import shlex
from dataclasses import asdict
from typing import Any

import yaml
from omegaconf import OmegaConf

from configs.composing import compose_job, overrides_of
from configs.files import read_json_lines
from eval.common import run_name, variant
from eval.report.runs import read_json
from training.checkpoint import LoadedRun
from training.run import deciding
from training.text import text_read

SHOWN = {"perplexity": ("loss", "ppl", "bits_per_byte"), "needle": ("accuracy",)}  # evaluation: results in the card


def model_card(run: LoadedRun, form: str, load: str) -> str:
    """The Markdown of the card. form: the folder's format. load: the Python lines that load the folder.

    Rows without a value in the run's folder are left out, and so are paths of this machine.
    """
    name, cfg = run_name(run.path), run.model.cfg
    kind = variant(run.config) if "model" in run.config else f"layers={cfg.layers}"
    head = {"tags": ["attention-noise", kind], "pipeline_tag": "text-generation"}
    head |= {"library_name": "transformers"} if form not in ("safetensors", "axolotl") else {}
    lines = [f"---\n{yaml.safe_dump(head, sort_keys=False)}---", f"# {name}", "", "| | |", "| --- | --- |"]
    lines += [f"| {key} | {value} |" for key, value in rows(run, kind, form).items() if value is not None]
    lines += ["", "## Load", "", "```python", load, "```"]
    if run.step and (command := training_command(run.config)):
        lines += ["", "## Training", "", "Overrides of the command; paths are left out.", "", "```bash", command, "```"]
    return "\n".join(lines) + "\n"


def rows(run: LoadedRun, kind: str, form: str) -> dict[str, Any]:
    """The rows of the card's table: name -> value, None where it is not known."""
    model, cfg, config = run.model, run.model.cfg, run.config
    total, inner = model.num_params(non_embedding=False), model.num_params()
    newest: dict[str, Any] = {}  # value of each key of the metrics
    first: dict[str, Any] = {}
    for line in read_json_lines(run.path / "metrics.jsonl"):
        if line.get("step", 0) <= run.step:
            first = first or line
            newest |= line
    losses = {name: newest.get(key) for key, name in (("loss", "training loss"), ("val_loss", "validation loss"))}
    converted = read_json(run.path / "conversion.json", "delete it and convert the source again") or {}
    options = " ".join(f"{key}={value}" for key, value in converted.get("conversion", {}).items())
    return {
        "variant": f"{kind} (layers={cfg.layers}), written as {form}",
        "shape": f"{cfg.n_layer} layers, width {cfg.d_model}, {cfg.n_head} baseline heads of {cfg.head_dim}, "
        f"{cfg.n_kv_head} key heads, context {cfg.context}, vocabulary {cfg.vocab_size:,}",
        "parameters": f"{total:,} ({inner:,} without embeddings and head)",
        "steps": f"{run.step:,}",
        "tokens": f"{newest['tokens']:,}" if newest.get("tokens") else None,
        "data": f"{text_of(config['data'])}, tokenizer {run.tokenizer.name}" if run.step and config.get("data") else None,
        **{name: None if loss is None else f"{loss:.4f} nats per token" for name, loss in losses.items()},
        **evaluations(run),
        "converted from": f"{run_name(converted['source'])}: {options}" if options and "source" in converted else None,
        "seed": config.get("seed"),
        "code version": first.get("version"),
    }


def text_of(data: dict[str, Any]) -> str:
    name, source, _ = text_read(data)
    return f"{name} (source {source})"


def evaluations(run: LoadedRun) -> dict[str, str]:
    """Results by evaluation, of the evaluations that were made at the run's step."""
    shown = {}
    for name, keys in SHOWN.items():
        content = read_json(run.path / "eval" / f"{name}.json", "delete it and repeat the evaluation") or {}
        results = content.get("results") or {}
        values = [f"{key} {results[key]:.4g}" for key in keys if results.get(key) is not None]
        if values and content.get("step") == run.step:
            shown[f"eval.{name}"] = ", ".join(values)
    return shown


def training_command(config: dict[str, Any]) -> str:
    """The train.py command with the values that differ from train.py's defaults; "" where the run has no training config."""
    if "model" not in config:
        return ""
    given, default = deciding(config), deciding(asdict(OmegaConf.to_object(compose_job("train", []))))
    name, _, request = text_read(config["data"])
    given |= {f"data.{key}": value for key, value in ({"name": name} | request).items() if f"data.{key}" in given}
    paths = ("path", "init_from")
    changed = {key: value for key, value in given.items() if default.get(key) != value and not key.endswith(paths)}
    return "python train.py " + shlex.join(overrides_of(changed))
