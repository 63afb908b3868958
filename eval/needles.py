"""Needle questions, as evaluations ask them: facts hidden in a long text, in the wordings of eval/needle_styles.py.

Keys and numbers of the style `magic` are those that data/retrieval.py keeps out of training; the sentences of the other
styles were never trained on.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any

import numpy as np

from data.retrieval import Fact, cities, draw_numbers, hide, sentence_ends, spell
from data.tokenizer import Tokenizer
from eval.common import TextEvalConfig
from eval.needle_styles import LWM_CITIES, NOISE, STYLES, WORDS, NeedleStyle
from training.checkpoint import LoadedRun


@dataclass
class NeedleGridConfig(TextEvalConfig):
    """depths: positions of the asked needle, as fractions of the context. samples: contexts per cell."""

    depths: Annotated[list[float], "[0, 1]"] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    samples: Annotated[int, "[1, inf)"] = 50
    seed: Annotated[int, "[0, 4294967295]"] = 0  # seed of the contexts


def check_grid(cfg: NeedleGridConfig) -> None:
    """Raise ValueError for a grid without a depth, or with a depth twice, whose contexts are the same."""
    if not cfg.depths or len({round(1000 * depth) for depth in cfg.depths}) < len(cfg.depths):
        raise ValueError(f"depths={cfg.depths} must be different numbers: use depths=[0,0.5,1], or leave it out")


@dataclass(frozen=True)
class Query:
    """One question about one context, as token ids. Spans are [start, stop) positions in `prompt`.

    `prompt` (P,) ends where `answer` (A,) begins: the number, and its full stop where the style has one. `needle` is the span
    of the asked sentence, `question` the position of the first token of the closing question.
    `candidates` are the answers of all needles of this context. The first `right` candidates are correct: several where
    one question asks for several. Each of `values`, where given, counts as found if it occurs in the text of a greedy
    continuation of at most `new_tokens`.
    """

    prompt: np.ndarray
    answer: np.ndarray
    needle: tuple[int, int]
    question: int
    candidates: list[np.ndarray]
    right: int = 1
    values: tuple[str, ...] = ()
    new_tokens: int = 0


def needle_contexts(
    run: LoadedRun,
    hay: np.ndarray,
    cfg: NeedleGridConfig,
    length: int,
    depth: float,
    needles: int = 1,
    asked: int = 1,
    style: str = "magic",
) -> list[list[Query]]:
    """`cfg.samples` contexts, each with its queries. They do not depend on the other cells of the grid.

    Numbers have as many digits as the numbers of the run's training, unless the style fixes the digits.
    """
    rng = np.random.default_rng([cfg.seed, length, round(1000 * depth), needles, asked])
    digits = trained_digits(run.config)
    return [needle_queries(rng, hay, run.tokenizer, length, depth, needles, asked, digits, style) for _ in range(cfg.samples)]


def trained_digits(config: Mapping[str, Any]) -> int:
    """Digits of the numbers in a run's retrieval documents. config: the run's."""
    return (config["data"].get("retrieval") or {}).get("digits", 4)


def needle_queries(
    rng: np.random.Generator,
    haystack: np.ndarray,
    tokenizer: Tokenizer,
    length: int,
    depth: float,
    needles: int = 1,
    asked: int = 1,
    digits: int = 4,
    style: str = "magic",
) -> list[Query]:
    """Hide `needles` facts in one text and ask for `asked` of them, in the wording of a style.

    Returns one query per asked fact, in which that fact is hidden at `depth` (0..1). A style that asks for all facts at
    once has one query, with its first fact at `depth`. Other facts stand at random depths. The text is cut from
    `haystack` (n,) at a random place, unless the style has its own text. Prompt and answer together have exactly
    `length` tokens (at most `length` in a haystack of needles). digits: of a number, where the style does not fix them.
    Raises ValueError where the facts do not fit.
    """
    wording = STYLES[style]
    facts = _draw(rng, wording, tokenizer, needles, wording.digits if wording.digits is not None else digits)
    start = int(rng.integers(0, max(1, len(haystack) - length)))
    depths = np.concatenate(([depth], rng.random(needles - 1)))
    queries = []
    for i in range(1 if wording.string else asked):
        order = [facts[i], *facts[:i], *facts[i + 1 :]]  # the asked fact takes the place at `depth`
        fact, wanted = order[0], order[: asked if wording.string else 1]
        several, keys = len(wanted) > 1, _listed(list(dict.fromkeys(other.name for other in wanted)))
        intro = _encode(tokenizer, wording.intro[several])
        # A space before the value that is a token of its own belongs to the question.
        question = (*_encode(tokenizer, wording.question[several].format(key=keys)), *fact.lead)
        values = tuple(other.text for other in wanted) if wording.string else ()
        # One token per byte of a plain answer is enough for every tokenizer, and the same number in all contexts of a cell.
        reserve = len(f" {_listed(values)}.".encode()) if wording.string else len(fact.value)
        room = length - 1 - len(intro) - sum(len(f.tokens) for f in facts) - len(question) - reserve
        hay = haystack[start:] if wording.haystack == "text" else _own_haystack(rng, wording, tokenizer, room, facts)
        if room < 0 or (len(hay) < room and wording.haystack == "text"):
            wrong = f"{needles} needles and their question do not fit length={length}, or the text of {len(haystack)} tokens"
            raise ValueError(f"{wrong}: use a longer length, fewer needles or a longer haystack")
        text, starts = hide(hay[:room], order, depths, sentence_ends(tokenizer), max(32, room / 10))
        first = 1 + len(intro) + starts[0]
        queries.append(
            Query(
                prompt=np.array([tokenizer.eot, *intro, *text, *question], dtype=np.int64),
                answer=np.array(fact.answer, dtype=np.int64),
                needle=(first, first + len(fact.tokens)),
                question=1 + len(intro) + len(text),
                candidates=[np.array(other.answer, dtype=np.int64) for other in order],
                right=len(wanted),
                values=values,
                new_tokens=reserve,
            )
        )
    return queries


@dataclass(frozen=True)
class _Needle(Fact):
    """A fact in a style's wording. `lead`: the space before the value, where it is a token of its own, else empty.

    `answer`: the tokens of the right answer.
    """

    rest: list[int]
    name: str
    text: str
    lead: list[int]
    answer: list[int]

    @property
    def tokens(self) -> list[int]:
        return self.key + self.value + self.rest


def _draw(rng: np.random.Generator, wording: NeedleStyle, tokenizer: Tokenizer, count: int, digits: int) -> list[_Needle]:
    """`count` facts with different values and different keys (with one shared key where the wording has `one_key`)."""
    names = _names(rng, wording.keys, 1 if wording.one_key else count)
    drawn = draw_numbers(rng, "eval", digits, count) if digits else [_uuid(rng) for _ in range(count)]
    values = [str(value) for value in drawn]
    names = names * count if wording.one_key else names
    return [_needle(wording, tokenizer, name, value) for name, value in zip(names, values, strict=True)]


def _names(rng: np.random.Generator, kind: str, count: int) -> list[str]:
    if kind == "uuids":
        return [_uuid(rng) for _ in range(count)]
    known = {"cities": cities("eval"), "lwm": LWM_CITIES, "words": WORDS, "none": [""]}[kind]
    if count > len(known):
        raise ValueError(f"{count} needles need {count} {kind}, but there are {len(known)}: use at most {len(known)}")
    return [known[i] for i in rng.choice(len(known), count, replace=False)]


def _uuid(rng: np.random.Generator) -> str:
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


def _listed(names: Sequence[str]) -> str:
    """ "A", "A, and B", "A, B, and C", as LWM and RULER spell lists."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])}, and {names[-1]}"


def _needle(wording: NeedleStyle, tokenizer: Tokenizer, name: str, value: str) -> _Needle:
    head, tail = wording.fact.replace("{key}", name).split(" {value}", 1)
    stop, rest = tail[0], tail[1:].replace("{value}", value)
    lead, spelled = spell(tokenizer, value + stop)
    answer = spell(tokenizer, value)[1] if wording.string else spelled
    key = [*_encode(tokenizer, head), *lead]
    return _Needle(key, spelled, list(_encode(tokenizer, rest)), name, value, lead, answer)


@lru_cache(maxsize=10_000)
def _encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text))


def _own_haystack(
    rng: np.random.Generator, wording: NeedleStyle, tokenizer: Tokenizer, room: int, taken: list[_Needle]
) -> np.ndarray:
    """The style's own text: `room` tokens of noise, or as many whole needles as fit in `room` tokens."""
    if wording.haystack == "noise":
        noise = _encode(tokenizer, NOISE)
        return np.resize(np.array(noise, dtype=np.int64), max(0, room))
    tokens: list[int] = []
    names, values = {fact.name for fact in taken}, {fact.text for fact in taken}
    while True:
        (fact,) = _draw(rng, wording, tokenizer, 1, wording.digits or 0)
        if fact.name in names or fact.text in values:
            continue
        if len(tokens) + len(fact.tokens) > room:
            return np.array(tokens, dtype=np.int64)
        tokens += fact.tokens
