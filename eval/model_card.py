"""README.md of an exported folder: the model, its training data and losses, and how to load it."""

from typing import Any

import yaml

from configs.files import read_json_lines
from data.stream import text_read
from eval.common import variant
from training.checkpoint import LoadedRun


def model_card(run: LoadedRun, form: str, load: str) -> str:
    """The Markdown of the card, without paths of this machine. form: the folder's format. load: Python lines that load it."""
    name, cfg = run.path.resolve().name, run.model.cfg
    kind = variant(run.config) if "model" in run.config else f"layers={cfg.layers}"
    head = {"tags": ["attention-noise", kind], "pipeline_tag": "text-generation"}
    head |= {"library_name": "transformers"} if form not in ("safetensors", "axolotl") else {}
    lines = [f"---\n{yaml.safe_dump(head, sort_keys=False)}---", f"# {name}", "", "| | |", "| --- | --- |"]
    lines += [f"| {key} | {value} |" for key, value in rows(run, kind, form).items() if value is not None]
    lines += ["", "## Load", "", "```python", load, "```"]
    return "\n".join(lines) + "\n"


def rows(run: LoadedRun, kind: str, form: str) -> dict[str, Any]:
    """The rows of the card's table: name -> value, None where it is not known."""
    model, cfg, config = run.model, run.model.cfg, run.config
    total, inner = model.num_params(non_embedding=False), model.num_params()
    newest: dict[str, Any] = {}  # value of each key of the metrics
    for line in read_json_lines(run.path / "metrics.jsonl"):
        if line.get("step", 0) <= run.step:
            newest |= line
    losses = {name: newest.get(key) for key, name in (("loss", "training loss"), ("val_loss", "validation loss"))}
    return {
        "variant": f"{kind} (layers={cfg.layers}), written as {form}",
        "shape": f"{cfg.n_layer} layers, width {cfg.d_model}, {cfg.n_head} baseline heads of {cfg.head_dim}, "
        f"{cfg.n_kv_head} key heads, context {cfg.context}, vocabulary {cfg.vocab_size:,}",
        "parameters": f"{total:,} ({inner:,} without embeddings and head)",
        "steps": f"{run.step:,}",
        "tokens": f"{newest['tokens']:,}" if newest.get("tokens") else None,
        "data": f"{text_of(config['data'])}, tokenizer {run.tokenizer.name}" if run.step and config.get("data") else None,
        **{name: None if loss is None else f"{loss:.4f} nats per token" for name, loss in losses.items()},
        "seed": config.get("seed"),
        "code version": newest.get("version"),
    }


def text_of(data: dict[str, Any]) -> str:
    name, source, _ = text_read(data)
    return f"{name} (source {source})"
