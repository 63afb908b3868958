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
    lines += [f"| {key} | {value} |" for key, value in rows(run, kind, form).items()]
    lines += ["", "## Load", "", "```python", load, "```"]
    if run.step and (command := training_command(run.config)):
        lines += ["", "## Training", "", "Overrides of the command; paths are left out.", "", "```bash", command, "```"]
    return "\n".join(lines) + "\n"


def rows(run: LoadedRun, kind: str, form: str) -> dict[str, Any]:
    """The rows of the card's table: name -> value."""
    model, cfg, config = run.model, run.model.cfg, run.config
    lines = [line for line in read_json_lines(run.path / "metrics.jsonl") if line.get("step", 0) <= run.step]
    total, inner = model.num_params(non_embedding=False), model.num_params()
    found = {
        "variant": f"{kind} (layers={cfg.layers}), written as {form}",
        "shape": f"{cfg.n_layer} layers, width {cfg.d_model}, {cfg.n_head} baseline heads of {cfg.head_dim}, "
        f"{cfg.n_kv_head} key heads, context {cfg.context}, vocabulary {cfg.vocab_size:,}",
        "parameters": f"{total:,} ({inner:,} without embeddings and head)",
        "steps": f"{run.step:,}",
    }
    if tokens := last(lines, "tokens"):
        found["tokens"] = f"{tokens:,}"
    if run.step and (data := config.get("data")):
        found["data"] = f"{data['name']} (source {data['source']}), tokenizer {run.tokenizer.name}"
    for key, said in (("loss", "training loss"), ("val_loss", "validation loss")):
        if (value := last(lines, key)) is not None:
            found[said] = f"{value:.4f} nats per token"
    found |= evaluations(run)
    converted = read_json(run.path / "conversion.json", "delete it and convert the source again")
    if converted and {"source", "conversion"} <= converted.keys():
        options = " ".join(f"{key}={value}" for key, value in converted["conversion"].items())
        found["converted from"] = f"{run_name(converted['source'])}: {options}"
    if "seed" in config:
        found["seed"] = config["seed"]
    if lines and "version" in lines[0]:
        found["code version"] = lines[0]["version"]
    return found


def evaluations(run: LoadedRun) -> dict[str, str]:
    """Results by evaluation, of the evaluations that were made at the run's step."""
    found = {}
    for name, keys in SHOWN.items():
        content = read_json(run.path / "eval" / f"{name}.json", "delete it and repeat the evaluation")
        if content and content.get("step") == run.step:
            results = content.get("results") or {}
            finite = {key: value for key in keys if (value := results.get(key)) is not None}
            found |= {f"eval.{name}": ", ".join(f"{key} {value:.4g}" for key, value in finite.items())} if finite else {}
    return found


def training_command(config: dict[str, Any]) -> str:
    """The train.py command with the values that differ from train.py's own; "" where the run has no training config."""
    if "model" not in config:
        return ""
    own, default = deciding(config), deciding(asdict(OmegaConf.to_object(compose_job("train", []))))
    own = {key: value for key, value in own.items() if default.get(key) != value and not key.endswith(("path", "init_from"))}
    return "python train.py " + shlex.join(overrides_of(own))


def last(lines: list[dict[str, Any]], key: str) -> Any:
    """The newest value of `key`; None if no line has it."""
    return next((line[key] for line in reversed(lines) if key in line), None)
