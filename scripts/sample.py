"""Write text with a trained run: python scripts/sample.py run=runs/NAME prompt="Once upon a time"

A prompt is taken as typed. Several prompts are a list, prompt='["one","two"]', and several stop strings, too,
stop='["\\n","Q:"]'. A text depends on its prompt, its seed and the settings, but not on the other texts. The speed goes to
standard error.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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
from data.tokenizer import Tokenizer
from eval.common import batches, device_of, open_run, pad_left, say
from model.decoder import Decoder
from training.checkpoint import LoadedRun

MAX_TOKENS = 256
LITERAL = ("prompt", "stop")  # keys whose values are text
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
    stop: Any = None  # a text or a list of texts; the output ends before the stop text that is complete first
    seed: Annotated[int, "[0, 4294967295]"] = 0  # seed of the first text; text i has seed + i
    samples: Annotated[int, "[1, inf)"] = 1  # texts per prompt
    batch: Annotated[int, "[1, inf)"] = 16  # texts decoded at a time
    max_tokens: Annotated[int | None, "[1, inf)"] = None  # new tokens a text; None: 256, or what fits into the context
    device: str = "auto"  # auto | cpu | cuda
    out: str | None = None  # a JSON file for texts, settings and speed


@dataclass
class Text:
    """A text that is being written: at most `limit` new tokens, cut before the stop string that is complete first."""

    tokenizer: Tokenizer
    stops: Sequence[str] = ()
    prompt: str = ""
    limit: int = MAX_TOKENS
    seed: int = 0
    tokens: list[int] = field(default_factory=list)  # the new ones
    data: bytes = b""  # of these tokens
    text: str = ""
    ended: str | None = None  # end of text | stop | length

    @property
    def start(self) -> list[int]:
        """The prompt's tokens after an end-of-text token, as a training document has them."""
        return [self.tokenizer.eot, *self.tokenizer.encode(self.prompt)]

    def add(self, token: int) -> None:
        if token == self.tokenizer.eot:
            self.ended = "end of text"
            return
        self.tokens.append(token)
        with suppress(KeyError):  # a vocabulary padded beyond the tokenizer's
            self.data += self.tokenizer.token_bytes(token)
        self.text = self.data.decode("utf-8", "replace")
        ends = [(start + len(stop), start) for stop in self.stops if (start := self.text.find(stop)) >= 0]
        if ends:
            self.text, self.ended = self.text[: min(ends)[1]], "stop"
        elif len(self.tokens) == self.limit:
            self.ended = "length"


def decode(model: Decoder, texts: Sequence[Text], cfg: SampleConfig) -> Iterator[Sequence[Text]]:
    """Write the texts; yields those that were written together."""
    padding = model.positions is None  # learned positions: the prompts of a part are equally long
    groups = groupby(texts, key=lambda text: padding or len(text.start))
    for part in (part for _, group in groups for part in batches(list(group), cfg.batch, 1)):
        tokens, keys = pad_left([text.start for text in part], device_of(model))
        draws = [torch.Generator().manual_seed(text.seed) for text in part]
        limit = max(text.limit for text in part)
        for new in model.stream(tokens, limit, cfg.temperature, cfg.top_k, cfg.top_p, draws, keys):
            for text, token in zip(part, new.tolist(), strict=True):
                if text.ended is None:
                    text.add(token)
            if all(text.ended for text in part):
                break
        yield part


def texts_of(value: Any, key: str) -> list[str]:
    """A text or a list of texts as a list."""
    texts = [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
    if any(isinstance(text, (list, dict)) or text is None for text in texts):
        raise ValueError(f'{key} is neither a text nor a list of texts: type a list as {key}=\'["one","two"]\'')
    return [str(text) for text in texts]


def texts_to_write(cfg: SampleConfig, run: LoadedRun) -> list[Text]:
    """One text for each prompt and seed."""
    stops, texts = [stop.replace("\\n", "\n").replace("\\t", "\t") for stop in texts_of(cfg.stop, "stop")], []
    if "" in stops:
        raise ValueError("stop= has an empty text, which would end every output at once: leave it out")
    for prompt in texts_of(cfg.prompt, "prompt") or [""]:
        length, context = len(Text(run.tokenizer, prompt=prompt).start), run.model.cfg.context
        limit = cfg.max_tokens or min(MAX_TOKENS, context - length)
        if limit < 1:
            wrong = f"the prompt has {length} tokens, but the trained context has {context}"
            raise ValueError(f"{wrong}: shorten the prompt, or set max_tokens=N to exceed the context")
        texts += [Text(run.tokenizer, stops, prompt, limit, cfg.seed + i) for i in range(cfg.samples)]
    return texts


@command("sample", SampleConfig)
def sample(cfg: SampleConfig) -> None:
    if cfg.temperature == 0 and cfg.samples > 1:
        raise ValueError("temperature=0 writes the same text every time: use samples=1 or temperature=0.8")
    run = open_run(cfg, task=True)
    texts = texts_to_write(cfg, run)
    start, count = time.perf_counter(), 0
    for part in decode(run.model, texts, cfg):
        for text in part:
            count += 1
            title = f"--- {count} of {len(texts)}, seed {text.seed}\n" if len(texts) > 1 else ""
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
    if key not in LITERAL or not equals or value in ("", "null") or isinstance(read_value(argument), list):
        return argument
    return f"{key}={quote(value)}"


def main() -> None:
    sys.argv[1:] = map(as_typed, sys.argv[1:])
    sample()


if __name__ == "__main__":
    main()
