"""An attention viewer: one HTML file in which to choose layer, head and example, and to see where a query looks.

    python -m eval.viewer runs=[runs/A,runs/B] out=viewer.html [text=FILE] [prompt="..."] [length=96]

Every row of every map of a few short examples: a needle at three depths, a piece of text, and `prompt` where one is
given. Hover, tap or use the arrow keys: the query's attention is painted over the tokens before it, two models side by
side, negative weights of differential maps in another hue. The file needs nothing beside it.
"""

import base64
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import MISSING
from torch import nn

from configs import command
from configs.provenance import version
from data.retrieval import needle_queries
from data.tokenizer import Tokenizer
from eval.common import EvalConfig, colour, device_of, haystack, open_run, progress, run_name, variant, write_atomically
from model.attention.probe import probe
from training.checkpoint import LoadedRun

FOLDER = Path(__file__).parent
MAX_BYTES = 12_000_000  # of packed maps: examples over it are left out, but for the first
STEPS = 127  # of the quantised square root, on either side of zero
GUESSES = 3  # next tokens shown per position


@dataclass
class ViewerConfig:
    """runs: run folders. length: tokens per example. text: a file to take them from, instead of validation data."""

    runs: list[str] = MISSING
    out: str = "viewer.html"  # the page
    length: int = 96
    depths: list[float] = field(default_factory=lambda: [0.1, 0.5, 0.9])  # of the needle, one example each
    prompt: str | None = None  # your own words, as a further example
    text: str | None = None
    seed: int = 0  # of the needle examples
    device: str = "auto"  # auto | cpu | cuda


@dataclass
class Example:
    """Tokens (T,) and named spans [start, stop) of them; `query` is where the viewer looks first."""

    title: str
    tokens: np.ndarray
    spans: dict[str, tuple[int, int]]
    query: int


@dataclass
class Viewer:
    """The file, and one sentence about what it holds."""

    html: str
    says: str


def viewer_of(runs: list[tuple[str, str]], cfg: ViewerConfig | None = None) -> Viewer:
    """The viewer of (label, folder) runs. ValueError where their tokenizers differ or an example cannot be made."""
    cfg = cfg or ViewerConfig(runs=[folder for _, folder in runs])
    loaded = [open_run(EvalConfig(run=folder, device=cfg.device)) for _, folder in runs]
    for (_, folder), run in zip(runs[1:], loaded[1:], strict=True):
        if run.tokenizer.fingerprint != loaded[0].tokenizer.fingerprint:
            raise ValueError(f"{runs[0][1]} and {folder} have different tokenizers: view them in files of their own")
    made, tokenizer = examples(loaded, cfg), loaded[0].tokenizer
    packed: list[list[dict[str, Any]]] = []
    size = 0
    with progress("attention maps", len(made)) as bar:
        for example in made:
            seen = [look(run.model, example.tokens) for run in loaded]
            size += sum(len(maps) for _, maps, _ in seen)
            if packed and size > MAX_BYTES:
                break
            packed.append(
                [
                    {"maps": _text(maps), "scales": _text(scales), "next": _guesses(logits, tokenizer)}
                    for logits, maps, scales in seen
                ]
            )
            bar.update()
    models = [
        {"label": label, "colour": colour(variant(run.config)), "heads": heads_of(run.model)}
        for (label, _), run in zip(runs, loaded, strict=True)
    ]
    described = [_described(example, tokenizer) for example in made[: len(packed)]]
    data = {"models": models, "examples": described, "maps": packed, "steps": STEPS}
    return _page(data, len(made) - len(packed))


def examples(runs: list[LoadedRun], cfg: ViewerConfig) -> list[Example]:
    """A needle at each depth, a piece of text, and the prompt; all as long as every model's context allows."""
    run, context = runs[0], min(run.model.cfg.context for run in runs)
    length = min(cfg.length, context)
    if length < 2:
        raise ValueError(f"length={cfg.length} is too short to look at: use length=96")
    hay = haystack(run, EvalConfig(run=str(run.path), text=cfg.text))
    found = [_needle(run, hay, length, depth, cfg.seed) for depth in cfg.depths]
    start = int(np.random.default_rng(cfg.seed).integers(0, max(1, len(hay) - length)))
    passage = np.concatenate(([run.tokenizer.eot], hay[start : start + length - 1]))
    found.append(Example("text", passage, {"first token": (0, 1)}, len(passage) - 1))
    if cfg.prompt is not None:
        own = np.array([run.tokenizer.eot, *run.tokenizer.encode(cfg.prompt)])
        if not 1 < len(own) <= context:
            raise ValueError(f"the prompt has {len(own) - 1} tokens: give prompt= 1 to {context - 1} of them")
        found.insert(0, Example("your prompt", own, {"first token": (0, 1)}, len(own) - 1))
    return found


def _needle(run: LoadedRun, hay: np.ndarray, length: int, depth: float, seed: int) -> Example:
    if not 0 <= depth <= 1:
        raise ValueError(f"depth {depth:g} is not a fraction of the context: use depths=[0.1,0.5,0.9], from 0 to 1")
    digits = (run.config["data"].get("retrieval") or {}).get("digits", 4)
    rng = np.random.default_rng([seed, round(1000 * depth)])
    (query,) = needle_queries(rng, hay, run.tokenizer, length, depth, digits=digits)
    (start, stop), asked = query.needle, query.question
    spans = {
        "first token": (0, 1),
        "context before": (min(1, start), start),
        "needle": (start, stop),
        "context after": (stop, asked),
        "question": (asked, len(query.prompt)),
    }
    tokens = np.concatenate((query.prompt, query.answer))
    title = f"needle at {100 * depth:g} % of the context"
    return Example(
        title, tokens, {name: span for name, span in spans.items() if span[0] < span[1]}, len(query.prompt) - 1
    )


# ---------------------------------------- maps


@torch.inference_mode()
def look(model: nn.Module, tokens: np.ndarray) -> tuple[np.ndarray, bytes, bytes]:
    """Logits (T, V), and all maps of tokens (T,), packed: int8 values and float32 scales, layer by layer."""
    device = device_of(model)
    with probe(model, torch.arange(len(tokens), device=device)) as maps:
        logits = model(torch.from_numpy(tokens)[None].to(device))[0].float().cpu().numpy()  # (T, V)
    if not all(layer.isfinite().all() for layer in maps.layers):
        raise ValueError("a model's attention is not finite, its training diverged: leave its run out of runs=")
    packed = [pack(layer[0].cpu().numpy()) for layer in maps.layers]
    return logits, b"".join(values for values, _ in packed), b"".join(scales for _, scales in packed)


def heads_of(model: nn.Module) -> list[int]:
    """Number of maps of each layer."""
    one = torch.zeros(1, dtype=torch.long, device=device_of(model))
    with probe(model, one) as maps, torch.inference_mode():
        model(one[None])
    return [layer.shape[1] for layer in maps.layers]


def pack(maps: np.ndarray) -> tuple[bytes, bytes]:
    """Causal maps (heads, T, T) as int8, the lower triangle only, and each row's largest magnitude (heads, T) float32.

    A weight a of a row with the largest magnitude m is stored as the nearest whole number to sign(a) 127 sqrt(|a| / m):
    the root keeps small weights apart, whose sum is what noise is. The error is below 0.8 % of m, and smaller for
    smaller weights.
    """
    scales = np.abs(maps).max(axis=-1)  # (heads, T)
    share = maps / np.where(scales > 0, scales, 1)[..., None]
    values = np.rint(STEPS * np.sign(share) * np.sqrt(np.abs(share))).astype(np.int8)
    rows, columns = np.tril_indices(maps.shape[-1])
    return values[:, rows, columns].tobytes(), scales.astype("<f4").tobytes()


def unpack(values: bytes, scales: bytes, length: int) -> np.ndarray:
    """What `pack` was given, (heads, T, T), to its precision; the viewer's script does the same."""
    rows, columns = np.tril_indices(length)
    share = np.frombuffer(values, np.int8).reshape(-1, len(rows)) / STEPS
    largest = np.frombuffer(scales, "<f4").reshape(-1, length)
    maps = np.zeros((len(largest), length, length))
    maps[:, rows, columns] = np.sign(share) * share**2 * largest[:, rows]
    return maps


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _guesses(logits: np.ndarray, tokenizer: Tokenizer) -> list[list[tuple[str, float]]]:
    """The most probable next tokens of each position, with their probabilities."""
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities = shifted / shifted.sum(axis=-1, keepdims=True)  # (T, V)
    best = np.argsort(-probabilities, axis=-1)[:, :GUESSES]
    return [[(shown(tokenizer, int(token)), round(float(row[token]), 4)) for token in tokens]
            for row, tokens in zip(probabilities, best, strict=True)]  # fmt: skip


def shown(tokenizer: Tokenizer, token: int) -> str:
    """A token as a reader can tell it from others: line breaks as arrows, bytes that are no text as numbers."""
    if token == tokenizer.eot:
        return "⟨end of text⟩"
    try:
        piece = tokenizer.token_bytes(token)
    except KeyError:  # a vocabulary padded to a round size
        return f"⟨{token}⟩"
    try:
        text = piece.decode()
    except UnicodeDecodeError:
        return "".join(f"⟨{byte:02x}⟩" for byte in piece)
    return text.replace("\n", "↵").replace("\r", "").replace("\t", "⇥") or "⟨⟩"


def _described(example: Example, tokenizer: Tokenizer) -> dict[str, Any]:
    tokens = [shown(tokenizer, int(token)) for token in example.tokens]
    return {"title": example.title, "tokens": tokens, "spans": example.spans, "query": example.query}


# ---------------------------------------- page


def _page(data: dict[str, Any], left_out: int) -> Viewer:
    """The HTML with style, script and data inside."""
    content = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    style = (FOLDER / "report.css").read_text() + (FOLDER / "viewer.css").read_text()
    size = f"{(len(content) + len(style)) / 1e6:.1f} MB"
    count = len(data["examples"])
    names = ", ".join(model["label"] for model in data["models"])
    fewer = f"; {left_out} more would make it too large" if left_out else ""
    says = (
        f"{names}: every head of every layer on {count} example{'s' if count > 1 else ''} of up to "
        f"{max(len(example['tokens']) for example in data['examples'])} tokens{fewer}. One file, {size}."
    )
    body = (FOLDER / "viewer.html").read_text()
    parts = {
        "STYLE": style,
        "SAYS": says,
        "VERSION": version(),
        "SCRIPT": (FOLDER / "viewer.js").read_text(),
        "DATA": content,
    }
    for name, text in parts.items():  # the data last: nothing in them is replaced
        body = body.replace(f"<!--{name}-->", text)
    return Viewer(body, says)


@command("viewer", ViewerConfig)
def main(cfg: ViewerConfig) -> None:
    out = Path(cfg.out)
    if out.suffix != ".html":
        raise ValueError(f"out={out} is not an .html file: use out=viewer.html")
    if not cfg.runs:
        raise ValueError("runs is empty: give runs=[runs/A,runs/B]")
    names = [run_name(run) for run in cfg.runs]
    labels = [name if names.count(name) == 1 else "/".join(Path(run).resolve().parts[-2:])
              for name, run in zip(names, cfg.runs, strict=True)]  # fmt: skip
    viewer = viewer_of(list(zip(labels, cfg.runs, strict=True)), cfg)
    write_atomically(out, viewer.html.encode())
    print(f"viewer  {out} ({viewer.says})")


if __name__ == "__main__":
    main()
