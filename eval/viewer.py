"""An attention viewer: one HTML file that shows the attention of a query for a chosen layer, head and example.

    python -m eval.viewer runs=[runs/A,runs/B] out=viewer.html [text=FILE] [prompt="..."] [length=96]

It holds every row of every map for a few short examples: a needle at three depths, a piece of text, and `prompt` if given.
Two models stand side by side. A differential head shows either of its maps, or their difference at any lambda.
"""

import base64
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from markupsafe import Markup
from omegaconf import MISSING
from torch import nn

from configs import command
from configs.files import json_text, write_atomic
from data.tokenizer import Tokenizer
from eval.common import EvalConfig, TextEvalConfig, colour, device_of, evaluation_tokens, haystack, open_run, progress, variant
from eval.needle_text import Cell, needle_queries, trained_digits
from eval.report.figures import short_labels
from eval.report.page import render
from eval.report.runs import labels
from model.attention.probe import probe
from training.checkpoint import LoadedRun

STEPS = 127  # steps of the quantised square root, on either side of zero
GUESSES = 3  # next tokens shown per position
DEPTHS = (0.1, 0.5, 0.9)  # of the needle, one example each


@dataclass
class ViewerConfig:
    """runs: run folders. length: tokens per example. text: a file for the examples, instead of validation data."""

    runs: list[str] = MISSING
    out: str = "viewer.html"  # the HTML file to write
    length: Annotated[int, "[2, inf)"] = 96
    prompt: str | None = None  # another text, as the first example
    text: str | None = None
    device: str = "auto"  # auto | cpu | cuda


@dataclass
class Example:
    """Tokens (T,) and named spans [start, stop) of them. query: the position that the viewer shows first."""

    title: str
    tokens: np.ndarray
    spans: dict[str, tuple[int, int]]
    query: int


@dataclass
class Activations:
    """A model's logits (T, V) for tokens (T,) and, layer by layer, its maps (heads, T, T).

    second_maps: the second maps of a layer of differential heads, which lambda multiplies; None for another layer. A first
    map is the map plus lambda times the second map. A row's lambda is 1 minus the sum of the map's row.
    """

    logits: np.ndarray
    maps: list[np.ndarray]
    second_maps: list[np.ndarray | None]


def viewer_of(runs: list[tuple[str, str]], cfg: ViewerConfig, colours: Sequence[str] = ()) -> tuple[str, str]:
    """The HTML of the viewer of (name, folder) runs, and a sentence about it. colours: of the runs, by default the variants'.

    ValueError if their tokenizers differ or an example cannot be made.
    """
    names = [name for name, _ in runs]
    loaded = [open_run(EvalConfig(run=folder, device=cfg.device)) for _, folder in runs]
    tokenizer = loaded[0].tokenizer
    for (_, folder), run in zip(runs, loaded, strict=True):
        if run.tokenizer.fingerprint != tokenizer.fingerprint:
            raise ValueError(f"{runs[0][1]} and {folder} have different tokenizers: make one viewer file for each")
    made = examples(loaded, cfg)
    shades = colours or [colour(variant(run.config)) for run in loaded]
    models, maps = [], [[] for _ in made]
    of_runs = zip(short_labels(names), shades, loaded, strict=True)
    for label, shade, run in progress("attention maps", len(loaded), of_runs):
        looks = [look(run.model, example.tokens) for example in made]
        models.append(_model(label, shade, list(zip(made, looks, strict=True))))
        for of_example, one in zip(maps, looks, strict=True):
            of_example.append(_packed(one, tokenizer))
    described = [vars(one) | {"tokens": [shown(tokenizer, int(token)) for token in one.tokens]} for one in made]
    data = {"models": models, "examples": described, "maps": maps, "steps": STEPS}
    text = json_text(data, ensure_ascii=False, separators=(",", ":"))
    says = (
        f"{', '.join(names)}: every head of every layer on {len(made)} examples of up to "
        f"{max(len(one.tokens) for one in made)} tokens. One file, {len(text) / 1e6:.1f} MB."
    )
    return render("viewer.html", says=says, data=Markup(text.replace("<", "\\u003c"))), says  # no </script>


def examples(runs: list[LoadedRun], cfg: ViewerConfig) -> list[Example]:
    """A needle at each depth, a piece of text, and the prompt, all short enough for every model's context."""
    run, context = runs[0], min(run.model.cfg.context for run in runs)
    length = min(cfg.length, context)
    hay = haystack(run, evaluation_tokens(run, TextEvalConfig(run=str(run.path), text=cfg.text)))
    made = [_needle(run, hay, length, depth) for depth in DEPTHS]
    texts = {"text": hay[1:length]}
    if cfg.prompt is not None:
        prompt = run.tokenizer.encode(cfg.prompt)
        if not 1 <= len(prompt) < context:
            raise ValueError(f"the prompt has {len(prompt)} tokens: give prompt= a text of 1 to {context - 1} tokens")
        texts["your prompt"] = prompt
    for title, tokens in texts.items():
        made.append(Example(title, np.array([run.tokenizer.eot, *tokens]), {"first token": (0, 1)}, len(tokens)))
    return made[-1:] + made[:-1] if cfg.prompt is not None else made


def _needle(run: LoadedRun, hay: np.ndarray, length: int, depth: float) -> Example:
    rng = np.random.default_rng([0, round(1000 * depth)])
    (query,) = needle_queries(rng, hay, run.tokenizer, Cell(length, depth), trained_digits(run.config))
    tokens = np.concatenate((query.prompt, query.candidates[0]))  # the right answer
    names = ("first token", "context before", "needle", "context after", "question", "answer")
    start, stop = query.needle
    ends = (0, 1, start, stop, query.question, len(query.prompt), len(tokens))
    spans = {name: span for name, span in zip(names, itertools.pairwise(ends), strict=True) if span[0] < span[1]}
    return Example(f"needle at {100 * depth:g} % of the context", tokens, spans, len(query.prompt) - 1)


@torch.inference_mode()
def look(model: nn.Module, tokens: np.ndarray) -> Activations:
    """Logits and all maps of tokens (T,). ValueError if they are not finite."""
    given = torch.from_numpy(tokens)[None].to(device_of(model))
    with probe(model, torch.arange(len(tokens), device=given.device), apart=True) as maps:
        logits = model(given)[0].float().cpu().numpy()  # (T, V)
    if not all(layer.isfinite().all() for layer in maps.layers):
        raise ValueError("a model's attention is not finite: its training diverged, so leave its run out of runs=")
    second_maps = [None if pair is None else pair[1][0].cpu().numpy() for pair in maps.pairs]
    return Activations(logits, [layer[0].cpu().numpy() for layer in maps.layers], second_maps)


def pack(maps: np.ndarray) -> tuple[bytes, bytes]:
    """The lower triangles of causal maps (heads, T, T) as int8, and each row's largest magnitude (heads, T) float32.

    A weight a of a row with the largest magnitude m is stored as round(sign(a) 127 sqrt(|a| / m)): the error is below 0.8 % of
    m, and smaller for the small weights whose sum is the noise. viewer.js unpacks the maps.
    """
    scales = np.abs(maps).max(axis=-1)  # (heads, T)
    share = maps / np.where(scales > 0, scales, 1)[..., None]
    values = np.rint(STEPS * np.sign(share) * np.sqrt(np.abs(share))).astype(np.int8)
    rows, columns = np.tril_indices(maps.shape[-1])
    return values[:, rows, columns].tobytes(), scales.astype("<f4").tobytes()


def _packed(seen: Activations, tokenizer: Tokenizer) -> dict[str, Any]:
    """A model's maps of an example as text: the maps of all heads, and second maps and lambda of differential heads."""
    maps, scales = pack(np.concatenate(seen.maps))
    packed = {"maps": _text(maps), "scales": _text(scales), "next": _guesses(seen.logits, tokenizer)}
    pairs = [(maps, second) for maps, second in zip(seen.maps, seen.second_maps, strict=True) if second is not None]
    if pairs:
        second, second_scales = pack(np.concatenate([second for _, second in pairs]))
        lam = 1 - np.concatenate([maps.sum(-1) for maps, _ in pairs])  # (heads, T)
        packed |= {"second": _text(second), "secondScales": _text(second_scales)}
        packed["lambda"] = _text(lam.astype("<f4").tobytes())
    return packed


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _model(label: str, shade: str, seen: list[tuple[Example, Activations]]) -> dict[str, Any]:
    """A model as the page's script reads it. best: (layer, head) with the largest signed attention to the needles."""
    needles = [(example, one, slice(*example.spans["needle"])) for example, one in seen if "needle" in example.spans]
    masses = [[maps[:, example.query, needle].sum(-1) for maps in one.maps] for example, one, needle in needles]
    by_layer = [sum(layers) for layers in zip(*masses, strict=True)]
    layer = int(np.argmax([mass.max() for mass in by_layer]))
    best, first = (layer, int(by_layer[layer].argmax())), seen[0][1]
    differential = [second is not None for second in first.second_maps]
    return {"label": label, "colour": shade, "heads": list(map(len, first.maps)), "differential": differential, "best": best}


def _guesses(logits: np.ndarray, tokenizer: Tokenizer) -> list[list[tuple[str, float]]]:
    """The most probable next tokens of each position, with their probabilities."""
    best = torch.from_numpy(logits).softmax(-1).topk(GUESSES)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [[(shown(tokenizer, token), round(share, 4)) for token, share in zip(*row, strict=True)] for row in pairs]


def shown(tokenizer: Tokenizer, token: int) -> str:
    """A token as readable text: line breaks are shown as arrows, and bytes that are not text as numbers."""
    if token == tokenizer.eot:
        return "⟨end of text⟩"
    try:
        text = tokenizer.token_bytes(token).decode()
    except KeyError:  # a vocabulary padded to a round size
        return f"⟨{token}⟩"
    except UnicodeDecodeError as error:
        return "".join(f"⟨{byte:02x}⟩" for byte in error.object)
    return text.replace("\n", "↵").replace("\r", "").replace("\t", "⇥") or "⟨⟩"


@command("viewer", ViewerConfig)
def main(cfg: ViewerConfig) -> None:
    out = Path(cfg.out)
    if out.suffix != ".html":
        raise ValueError(f"out={out} is not an .html file: use out=viewer.html")
    page, says = viewer_of(list(zip(labels(cfg.runs), cfg.runs, strict=True)), cfg)
    write_atomic(out, page.encode())
    print(f"viewer  {out} ({says})")


if __name__ == "__main__":
    main()
