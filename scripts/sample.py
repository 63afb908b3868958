"""Write text with a trained run: python scripts/sample.py run=runs/NAME prompt="Once upon a time"

A prompt is taken as typed; several prompts are a list, prompt='["one","two"]'. A text depends on its prompt, its seed and the
settings, but not on the other texts. The speed goes to standard error.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import torch
from omegaconf import MISSING

sys.path.insert(0, str(Path(__file__).parent.parent))

from configs import command
from configs.composing import quote, read_value
from configs.files import write_json
from configs.provenance import result_record
from eval.common import batches, device_of, open_run, pad_left, say
from training.checkpoint import LoadedRun

MAX_TOKENS = 256
# Control characters, which a terminal would obey: all except tab and newline.
CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - {9, 10}, 0xFFFD)


@dataclass
class SampleConfig:
    """The texts to write, and how tokens are drawn."""

    run: str = MISSING  # folder of the run
    prompt: Any = None  # a text or a list of texts; None: the beginning of a document
    temperature: float = 0.8  # 0: always the most probable token
    top_k: int | None = None  # draw among the top_k most probable tokens
    top_p: float | None = None  # draw among the smallest set of tokens whose probabilities sum to top_p
    seed: Annotated[int, "[0, 4294967295]"] = 0  # seed of the first text; text i has seed + i
    samples: Annotated[int, "[1, inf)"] = 1  # texts per prompt
    batch: Annotated[int, "[1, inf)"] = 16  # texts decoded at a time
    max_tokens: Annotated[int | None, "[1, inf)"] = None  # new tokens a text; None: 256, or what fits into the context
    device: str = "auto"  # auto | cpu | cuda
    out: str | None = None  # a JSON file for texts, settings and speed


@dataclass
class Text:
    """A prompt, and the new text after it."""

    prompt: str
    start: list[int]  # the prompt's tokens after an end-of-text token, as a training document has them
    limit: int  # of new tokens
    seed: int
    tokens: Sequence[int] = ()  # the new ones
    text: str = ""
    ended: str = ""  # by the end of text, or by the length


def write(run: LoadedRun, texts: Sequence[Text], cfg: SampleConfig) -> Iterator[Text]:
    """Write the texts, cfg.batch at a time."""
    model, tokenizer = run.model, run.tokenizer
    padding = model.positions is None  # learned positions: the prompts of a part are equally long
    groups = groupby(texts, key=lambda text: padding or len(text.start))
    for part in (part for _, group in groups for part in batches(list(group), cfg.batch, 1)):
        tokens, keys = pad_left([text.start for text in part], device_of(model))
        draws = [torch.Generator().manual_seed(text.seed) for text in part]
        limit = max(text.limit for text in part)
        eot = tokenizer.eot
        steps = model.stream(tokens, limit, cfg.temperature, cfg.top_k, cfg.top_p, draws, keys, stop=[eot])
        for text, new in zip(part, torch.stack(list(steps), dim=1).tolist(), strict=True):
            new = new[: text.limit]
            text.tokens, text.ended = (new[: new.index(eot)], "end of text") if eot in new else (new, "length")
            whole = tokenizer.decode([*text.start[1:], *text.tokens])
            text.text = whole.removeprefix(tokenizer.decode(text.start[1:]))
            yield text


def texts_to_write(cfg: SampleConfig, run: LoadedRun) -> list[Text]:
    """One text for each prompt and seed."""
    texts, context = [], run.model.cfg.context
    prompts = cfg.prompt if isinstance(cfg.prompt, list) else ["" if cfg.prompt is None else cfg.prompt]
    if any(isinstance(prompt, (list, dict)) or prompt is None for prompt in prompts):
        raise ValueError('prompt is neither a text nor a list of texts: type a list as prompt=\'["one","two"]\'')
    for prompt in map(str, prompts):
        start = [run.tokenizer.eot, *run.tokenizer.encode(prompt)]
        limit = cfg.max_tokens or min(MAX_TOKENS, context - len(start))
        if limit < 1:
            wrong = f"the prompt has {len(start)} tokens, but the trained context has {context}"
            raise ValueError(f"{wrong}: shorten the prompt, or set max_tokens=N to exceed the context")
        texts += [Text(prompt, start, limit, cfg.seed + i) for i in range(cfg.samples)]
    return texts


@command("sample", SampleConfig)
def sample(cfg: SampleConfig) -> None:
    if cfg.temperature == 0 and cfg.samples > 1:
        raise ValueError("temperature=0 writes the same text every time: use samples=1 or temperature=0.8")
    run = open_run(cfg, task=True)
    texts = texts_to_write(cfg, run)
    start = time.perf_counter()
    for i, text in enumerate(write(run, texts, cfg), 1):
        title = f"--- {i} of {len(texts)}, seed {text.seed}\n" if len(texts) > 1 else ""
        whole = f"{title}{text.prompt}{text.text}"
        say(whole.translate(CONTROLS) if sys.stdout.isatty() else whole)
    speed = {"new_tokens": sum(len(text.tokens) for text in texts), "seconds": time.perf_counter() - start}
    rate = f"{speed['new_tokens']:,} tokens, {speed['new_tokens'] / speed['seconds']:,.0f} tokens/s"
    print(f"{cfg.run}, step {run.step}, {device_of(run.model)}: {rate}", file=sys.stderr)
    if cfg.out:
        keys = ("prompt", "seed", "text", "tokens", "ended")
        results = {"samples": [{key: getattr(text, key) for key in keys} for text in texts], "speed": speed}
        write_json(Path(cfg.out), result_record("sample", cfg.run, cfg, results, step=run.step))


def as_typed(argument: str) -> str:
    """An argument such as `prompt=Yes, "we" can` in Hydra's quotes. A list stays as it is."""
    key, equals, value = argument.partition("=")
    if key != "prompt" or not equals or value in ("", "null") or isinstance(read_value(argument), list):
        return argument
    return f"{key}={quote(value)}"


def main() -> None:
    sys.argv[1:] = map(as_typed, sys.argv[1:])
    sample()


if __name__ == "__main__":
    main()
