"""Write text with a trained run: python scripts/sample.py run=runs/NAME prompt="Once upon a time"

A prompt is taken as typed. Several prompts are a list, prompt='["one","two"]', and several stop strings, too,
stop='["\\n","Q:"]'. The first unfinished text is shown while the model writes it; the other texts follow after it. A
text depends on its prompt, its seed and the settings, but not on the other texts. The speed of reading and writing goes
to standard error.
"""

import codecs
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
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
from eval.common import batches, device_of, open_run, pad_left
from model.decoder import Decoder
from training.checkpoint import LoadedRun

MAX_TOKENS = 256
LITERAL = ("prompt", "stop", "file")  # keys whose values are text
# Control characters, which a terminal would obey: all except tab and newline.
CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - {9, 10}, 0xFFFD)


@dataclass
class SampleConfig:
    """The texts to write, and how tokens are drawn."""

    run: str = MISSING  # folder of the run
    prompt: Any = None  # a text or a list of texts; None: the beginning of a document
    file: str | None = None  # a file with the prompt, or - for standard input; one newline at its end is dropped
    temperature: float = 0.8  # 0: always the most probable token
    top_k: int | None = None  # draw among the top_k most probable tokens
    top_p: float | None = None  # draw among the smallest set of tokens whose probabilities sum to top_p
    stop: Any = None  # a text or a list of texts; the output ends before the stop text that is complete first
    seed: Annotated[int, "[0, 4294967295]"] = 0  # seed of the first text; text i has seed + i
    samples: Annotated[int, "[1, inf)"] = 1  # texts per prompt
    batch: Annotated[int, "[1, inf)"] = 16  # texts decoded at a time
    max_tokens: Annotated[int | None, "[1, inf)"] = None  # new tokens a text; None: 256, or what fits into the context
    echo: bool = True  # show the prompt, too
    device: str = "auto"  # auto | cpu | cuda
    out: str | None = None  # a JSON file for texts, settings and speed


class Text:
    """The text of one sequence, token by token, cut before the stop string that is complete first.

    `text` only grows: incomplete characters, and endings that may become a stop string, are held back. `ended` is the reason
    why the text has ended: "end of text", "stop" or "length".
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.tokens: list[int] = []
        self.text, self.ended = "", None
        self._held, self._utf8 = "", codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> None:
        """Add the next token. The end-of-text token, or a token that completes a stop string, ends the text."""
        if token == self.tokenizer.eot:
            return self.end("end of text")
        self.tokens.append(token)
        with suppress(KeyError):  # a vocabulary padded beyond the tokenizer's
            self._take(self._utf8.decode(self.tokenizer.token_bytes(token)))

    def end(self, why: str) -> None:
        """End the text, with the part that was held back. A text that has ended stays as it is."""
        if self.ended is None:
            self._take(self._utf8.decode(b"", final=True))
        if self.ended is None:
            self.text, self.ended = self.text + self._held, why

    def _take(self, new: str) -> None:
        text = self._held + new
        if ends := [(start + len(stop), start) for stop in self.stops if (start := text.find(stop)) >= 0]:
            self.text, self.ended = self.text + text[: min(ends)[1]], "stop"
            return
        tails = (n for n in range(len(text), 0, -1) if any(stop.startswith(text[-n:]) for stop in self.stops))
        sure = len(text) - next(tails, 0)
        self.text, self._held = self.text + text[:sure], text[sure:]


class Screen:
    """Prints texts in order: the certain part of the first unfinished text, then the texts after it."""

    def __init__(self, heads: Sequence[str], texts: Sequence[Text]) -> None:
        self.heads, self.texts = heads, texts
        self.current, self.shown = 0, 0  # text that is shown, and its printed characters, head included

    def update(self) -> None:
        while self.current < len(self.texts):
            text = self.texts[self.current]
            whole = self.heads[self.current] + text.text + ("\n" if text.ended else "")
            new, self.shown = whole[self.shown :], len(whole)
            print(new.translate(CONTROLS) if sys.stdout.isatty() else new, end="", flush=True)
            if text.ended is None:
                return
            self.current, self.shown = self.current + 1, 0


@dataclass
class Speed:
    """Prompt tokens and the seconds until the first new tokens; the new tokens after those and their seconds."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    new_tokens: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        rate = f" ({self.new_tokens / self.seconds:,.0f} tokens/s)" if self.new_tokens else ""
        read = f"{self.prompt_tokens:,} tokens read in {self.prompt_seconds:.2f} s"
        return f"{read}; {self.new_tokens:,} tokens after each text's first in {self.seconds:.2f} s{rate}"


@dataclass
class Job:
    """One text to write, with at most `limit` new tokens."""

    prompt: str
    tokens: list[int]
    limit: int
    seed: int
    text: Text


def decode(model: Decoder, jobs: Sequence[Job], cfg: SampleConfig) -> Iterator[Speed]:
    """Write the jobs' texts. Yields the speed so far after every new token of the texts."""
    speed, padding = Speed(), model.positions is None  # learned positions: the prompts of a part are equally long
    groups = groupby(jobs, key=lambda job: padding or len(job.tokens))
    for part in (part for _, group in groups for part in batches(list(group), cfg.batch, 1)):
        tokens, keys = pad_left([job.tokens for job in part], device_of(model))
        draws = [torch.Generator().manual_seed(job.seed) for job in part]
        limit = max(job.limit for job in part)
        steps = model.stream(tokens, limit, cfg.temperature, cfg.top_k, cfg.top_p, draws, keys)
        speed.prompt_tokens += sum(len(job.tokens) for job in part)
        for step in range(limit):
            growing = [(row, job) for row, job in enumerate(part) if job.text.ended is None]
            if not growing:
                break
            start = time.perf_counter()
            new = next(steps).tolist()
            elapsed = time.perf_counter() - start
            if step:
                speed.new_tokens, speed.seconds = speed.new_tokens + len(growing), speed.seconds + elapsed
            else:
                speed.prompt_seconds += elapsed
            for row, job in growing:
                job.text.add(new[row])
                if step + 1 == job.limit:
                    job.text.end("length")
            yield speed


def new_tokens(cfg: SampleConfig, model: Decoder, length: int) -> int:
    """The number of tokens to write after a prompt of `length` tokens (with the end-of-text token)."""
    context, learned = model.cfg.context, model.positions is not None
    left = context - length
    if cfg.max_tokens is None and left < 1:
        fix = "shorten the prompt" if learned else "shorten the prompt, or set max_tokens=N to exceed the context"
        raise ValueError(f"the prompt has {length} tokens, but the trained context has {context}: {fix}")
    if learned and (cfg.max_tokens or 1) > left:
        fix = f"use max_tokens={left}" if left > 0 else "shorten the prompt"
        raise ValueError(f"{length} + {cfg.max_tokens} tokens exceed the {context} learned positions: {fix}")
    return cfg.max_tokens or min(MAX_TOKENS, left)


def texts_of(value: Any, key: str) -> list[str]:
    """A text or a list of texts as a list."""
    texts = [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
    if any(isinstance(text, (list, dict)) or text is None for text in texts):
        raise ValueError(f'{key} is neither a text nor a list of texts: type a list as {key}=\'["one","two"]\'')
    return [str(text) for text in texts]


def prompts_of(cfg: SampleConfig) -> list[str]:
    """The prompts of prompt= or file=; one empty prompt if both are missing."""
    if cfg.file is None:
        return texts_of(cfg.prompt, "prompt") or [""]
    if cfg.prompt is not None:
        raise ValueError("prompt= and file= are both given: give one of them")
    try:
        text = sys.stdin.buffer.read() if cfg.file == "-" else Path(cfg.file).read_bytes()
        return [text.decode("utf-8").removesuffix("\n")]
    except OSError:
        raise ValueError(f"there is no file {cfg.file}: correct file=, or use file=- for standard input") from None
    except UnicodeDecodeError:
        raise ValueError(f"file={cfg.file} is not UTF-8 text: convert it, e.g. iconv -f latin1 -t utf-8 FILE > NEW") from None


def jobs_of(cfg: SampleConfig, run: LoadedRun) -> list[Job]:
    """One job for each prompt and seed. Every prompt follows an end-of-text token, as a training document does."""
    stops, jobs = [stop.replace("\\n", "\n").replace("\\t", "\t") for stop in texts_of(cfg.stop, "stop")], []
    if "" in stops:
        raise ValueError("stop= has an empty text, which would end every output at once: leave it out")
    for prompt in prompts_of(cfg):
        tokens = [run.tokenizer.eot, *run.tokenizer.encode(prompt)]
        limit = new_tokens(cfg, run.model, len(tokens))
        if len(tokens) + limit > run.model.cfg.context:
            print(f"note: {len(tokens)} + {limit} tokens exceed the trained context", file=sys.stderr)
        jobs += [Job(prompt, tokens, limit, cfg.seed + i, Text(run.tokenizer, stops)) for i in range(cfg.samples)]
    return jobs


@command("sample", SampleConfig)
def sample(cfg: SampleConfig) -> None:
    if cfg.temperature == 0 and cfg.samples > 1:
        raise ValueError("temperature=0 writes the same text every time: use samples=1 or temperature=0.8")
    run = open_run(cfg, task=True)
    jobs = jobs_of(cfg, run)
    titles = [f"--- {i} of {len(jobs)}, seed {job.seed}\n" if len(jobs) > 1 else "" for i, job in enumerate(jobs, 1)]
    heads = [title + job.prompt * cfg.echo for title, job in zip(titles, jobs, strict=True)]
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character
    screen, speed = Screen(heads, [job.text for job in jobs]), Speed()
    try:
        for speed in decode(run.model, jobs, cfg):  # noqa: B007
            screen.update()
    except KeyboardInterrupt:
        print()
    except BrokenPipeError:  # the reader (`| head`) has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    print(f"{cfg.run}, step {run.step}, {device_of(run.model)}: {speed}", file=sys.stderr)
    if cfg.out:
        texts = [{key: getattr(job.text, key) for key in ("text", "tokens", "ended")} for job in jobs]
        samples = [{"prompt": job.prompt, "seed": job.seed} | text for job, text in zip(jobs, texts, strict=True)]
        results = {"samples": samples, "speed": asdict(speed)}
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
