"""Needle questions: facts hidden in a long text, and the questions about them, in the wordings of published tests.

Keys and numbers of the style `magic` are those that data/retrieval.py keeps out of training; the sentences of the other
styles were never trained on.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import numpy as np

from data.retrieval import Fact, cities, draw_numbers, hide, sentence_ends, spell
from data.tokenizer import Tokenizer
from eval.common import TextEvalConfig
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
class NeedleStyle:
    """One needle test. Texts have the fields {key} and {value}; the {key} of a `question` may be a list of several keys."""

    fact: str  # the needle
    question: tuple[str, str]  # after the text and before the answer, for one value and for several
    intro: tuple[str, str] = ("", "")  # before the text, for one value and for several
    keys: str = "cities"  # cities | lwm | words | uuids | none
    digits: int | None = None  # of a number; None: as many as in the run's training; 0: the values are UUIDs
    haystack: str = "text"  # text (any) | noise (one repeated passage) | needles (more facts)
    pair: tuple[int, int] | None = None  # (N, R) where the source fixes it
    one_key: bool = False  # all facts have the same key
    # One question asks for all R values, and a value counts if it occurs in what the model writes (the source's score).
    # Otherwise a separate question asks for each value, and the model must continue with exactly the answer.
    string: bool = True


class Cell(NamedTuple):
    """Contexts of `length` tokens with `needles` facts, of which `asked` are asked for; the asked fact lies at `depth`."""

    length: int
    depth: float
    needles: int = 1
    asked: int = 1


@dataclass(frozen=True)
class Query:
    """One question about one context, as token ids."""

    prompt: np.ndarray  # (P,), ends where the answer begins
    answer: np.ndarray  # (A,): the number, and its full stop where the style has one
    needle: tuple[int, int]  # [start, stop) of the asked sentence in the prompt
    question: int  # the position of the first token of the closing question
    candidates: list[np.ndarray]  # the answers of all needles of this context, the correct ones first
    right: int = 1  # number of correct candidates
    values: tuple[str, ...] = ()  # texts that count if they occur in a greedy continuation of at most `new_tokens`
    new_tokens: int = 0


def trained_digits(config: Mapping[str, Any]) -> int:
    """Digits of the numbers in a run's retrieval documents. config: the run's."""
    return (config["data"].get("retrieval") or {}).get("digits", 4)


def needle_contexts(
    run: LoadedRun, hay: np.ndarray, cfg: NeedleGridConfig, cell: Cell, style: str = "magic"
) -> list[list[Query]]:
    """`cfg.samples` contexts, each with its queries. They do not depend on the other cells of the grid."""
    rng = np.random.default_rng([cfg.seed, cell.length, round(1000 * cell.depth), cell.needles, cell.asked])
    digits = trained_digits(run.config)
    return [needle_queries(rng, hay, run.tokenizer, cell, digits, style) for _ in range(cfg.samples)]


def needle_queries(
    rng: np.random.Generator, haystack: np.ndarray, tokenizer: Tokenizer, cell: Cell, digits: int = 4, style: str = "magic"
) -> list[Query]:
    """Hide the cell's needles in one text and ask for them, in the wording of a style. ValueError where they do not fit.

    Returns one query per asked fact, in which that fact is hidden at `cell.depth`, and the others at random depths. A style
    that asks for all facts at once has one query, with its first fact there. The text is cut from `haystack` (n,) at a
    random place, unless the style has its own text. Prompt and answer together have exactly `cell.length` tokens (at most
    these in a haystack of needles). digits: of a number, where the style does not fix them.
    """
    wording, (length, depth, needles, asked) = STYLES[style], cell
    facts = _draw(rng, wording, tokenizer, needles, digits if wording.digits is None else wording.digits)
    start = int(rng.integers(0, max(1, len(haystack) - length)))
    depths = np.concatenate(([depth], rng.random(needles - 1)))
    queries = []
    for i in range(1 if wording.string else asked):
        order = [facts[i], *facts[:i], *facts[i + 1 :]]  # the asked fact takes the place at `depth`
        wanted = order[: asked if wording.string else 1]
        intro, question, reserve = _ask(tokenizer, wording, wanted)
        room = length - 1 - len(intro) - sum(len(fact.tokens) for fact in facts) - len(question) - reserve
        hay = haystack[start:] if wording.haystack == "text" else _own_haystack(rng, wording, tokenizer, room, facts)
        if room < 0 or (len(hay) < room and wording.haystack == "text"):
            wrong = f"{needles} needles and their question do not fit length={length}, or the text of {len(haystack)} tokens"
            raise ValueError(f"{wrong}: use a longer length, fewer needles or a longer haystack")
        text, starts = hide(hay[:room], order, depths, sentence_ends(tokenizer), max(32, room / 10))
        first = 1 + len(intro) + starts[0]
        queries.append(
            Query(
                prompt=np.array([tokenizer.eot, *intro, *text, *question], dtype=np.int64),
                answer=order[0].answer,
                needle=(first, first + len(order[0].tokens)),
                question=1 + len(intro) + len(text),
                candidates=[fact.answer for fact in order],
                right=len(wanted),
                values=tuple(fact.text for fact in wanted) if wording.string else (),
                new_tokens=reserve,
            )
        )
    return queries


@dataclass(frozen=True)
class _Needle(Fact):
    """A fact in a style's wording: its `name` and value as `text`, and the tokens (A,) of the right `answer`.

    `rest`: the tokens after the value. `lead`: the space before the value, where it is a token of its own, else empty.
    """

    rest: list[int]
    name: str
    text: str
    lead: list[int]
    answer: np.ndarray

    @property
    def tokens(self) -> list[int]:
        return self.key + self.value + self.rest


def _draw(rng: np.random.Generator, wording: NeedleStyle, tokenizer: Tokenizer, count: int, digits: int) -> list[_Needle]:
    """`count` facts with different values and different keys (with one shared key where the wording has `one_key`)."""
    names = _names(rng, wording.keys, 1) * count if wording.one_key else _names(rng, wording.keys, count)
    values = draw_numbers(rng, "eval", digits, count) if digits else [_uuid(rng) for _ in range(count)]
    return [_needle(wording, tokenizer, name, str(value)) for name, value in zip(names, values, strict=True)]


def _names(rng: np.random.Generator, kind: str, count: int) -> list[str]:
    if kind == "uuids":
        return [_uuid(rng) for _ in range(count)]
    known = {"cities": cities("eval"), "lwm": LWM_CITIES, "words": WORDS, "none": [""]}[kind]
    if count > len(known):
        raise ValueError(f"{count} needles need {count} {kind}, but there are {len(known)}: use at most {len(known)}")
    return [known[i] for i in rng.choice(len(known), count, replace=False)]


def _uuid(rng: np.random.Generator) -> str:
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


def _needle(wording: NeedleStyle, tokenizer: Tokenizer, name: str, value: str) -> _Needle:
    head, tail = wording.fact.replace("{key}", name).split(" {value}", 1)
    stop, rest = tail[0], tail[1:].replace("{value}", value)
    lead, spelled = spell(tokenizer, value + stop)
    answer = np.array(spell(tokenizer, value)[1] if wording.string else spelled, dtype=np.int64)
    return _Needle(tokenizer.encode(head) + lead, spelled, tokenizer.encode(rest), name, value, lead, answer)


def _ask(tokenizer: Tokenizer, wording: NeedleStyle, wanted: list[_Needle]) -> tuple[list[int], list[int], int]:
    """The tokens before the text and of the question about the `wanted` facts, and the number kept free for the answer."""
    keys = _listed(list(dict.fromkeys(fact.name for fact in wanted)))
    several = len(wanted) > 1
    # A space before the value that is a token of its own belongs to the question.
    question = tokenizer.encode(wording.question[several].format(key=keys)) + wanted[0].lead
    # One token per byte of a plain answer is enough for every tokenizer, and the same number in all contexts of a cell.
    spelled = len(f" {_listed([fact.text for fact in wanted])}.".encode())
    return tokenizer.encode(wording.intro[several]), question, spelled if wording.string else len(wanted[0].value)


def _listed(names: Sequence[str]) -> str:
    """ "A", "A, and B", "A, B, and C", as LWM and RULER spell lists."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])}, and {names[-1]}"


def _own_haystack(
    rng: np.random.Generator, wording: NeedleStyle, tokenizer: Tokenizer, room: int, taken: list[_Needle]
) -> np.ndarray:
    """The style's own text: `room` tokens of noise, or as many whole needles as fit in `room` tokens."""
    if wording.haystack == "noise":
        return np.resize(np.array(tokenizer.encode(NOISE), dtype=np.int64), max(0, room))
    tokens: list[int] = []
    while True:
        (fact,) = _draw(rng, wording, tokenizer, 1, wording.digits or 0)
        if any(fact.name == other.name or fact.text == other.text for other in taken):
            continue
        if len(tokens) + len(fact.tokens) > room:
            return np.array(tokens, dtype=np.int64)
        tokens += fact.tokens


# The wordings

NOISE = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def _ruler(value: str, keys: str = "words", **options: object) -> NeedleStyle:
    """RULER's sentences (arXiv 2404.06654, scripts/data/synthetic): `value` is number or uuid."""
    one = f"What is the special magic {value} for {{key}} mentioned in the provided text?"
    several = f"What are all the special magic {value}s for {{key}} mentioned in the provided text?"
    memorize = "hidden within the following text. Make sure to memorize it. I will quiz you about the"
    return NeedleStyle(
        fact=f"\nOne of the special magic {value}s for {{key}} is: {{value}}.",
        intro=(
            f"A special magic {value} is {memorize} {value} afterwards.\n",
            f"Some special magic {value}s are {memorize} {value}s afterwards.\n",
        ),
        question=(
            f"\n{one} The special magic {value} for {{key}} mentioned in the provided text is",
            f"\n{several} The special magic {value}s for {{key}} mentioned in the provided text are",
        ),
        keys=keys,
        digits=7 if value == "number" else 0,
        **options,
    )


_MAGIC = "\nThe magic number of {key} is"
_PASSKEY = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there.\n"
)
_LWM = "What {} for {{key}}? Don't give information outside the document. ASSISTANT:"
STYLES = {
    # our own style: the sentences of data/retrieval.py
    "magic": NeedleStyle(f"{_MAGIC} {{value}}.", (_MAGIC, _MAGIC), string=False),
    # LWM (arXiv 2402.08268), scripts/eval_needle_multi.py, which arXiv 2410.05258 follows
    "lwm": NeedleStyle(
        "\nThe special magic {key} number is: {value}\n",
        question=(" " + _LWM.format("is the special magic number"), " " + _LWM.format("are the special magic numbers")),
        intro=("You are a helpful assistant. USER: ",) * 2,
        keys="lwm",
        digits=7,
    ),
    # Landmark attention (Mohtashami & Jaggi, arXiv 2305.16300), appendix: passkey retrieval
    "passkey": NeedleStyle(
        "\nThe pass key is {value}. Remember it. {value} is the pass key.",
        question=("\nWhat is the pass key? The pass key is",) * 2,
        intro=(_PASSKEY,) * 2,
        keys="none",
        digits=5,
        haystack="noise",
        pair=(1, 1),
        string=False,
    ),
    # RULER's eight retrieval tasks with the settings of its synthetic.yaml. Where the haystack is made of needles, four
    # facts are ranked.
    "niah_single_1": _ruler("number", haystack="noise", pair=(1, 1)),
    "niah_single_2": _ruler("number", pair=(1, 1)),
    "niah_single_3": _ruler("uuid", pair=(1, 1)),
    "niah_multikey_1": _ruler("number", pair=(4, 1)),
    "niah_multikey_2": _ruler("number", haystack="needles", pair=(4, 1)),
    "niah_multikey_3": _ruler("uuid", keys="uuids", haystack="needles", pair=(4, 1)),
    "niah_multivalue": _ruler("number", pair=(4, 4), one_key=True),
    "niah_multiquery": _ruler("number", pair=(4, 4)),
}

# LWM's cities, each once. LWM's own list has Chicago four times, so one of its questions can have two right answers.
LWM_CITIES = (
    "Chicago, Yangon, Antananarivo, Colombo, Almaty, Sydney, Mexico City, Seattle, Lagos, Amsterdam, Belgrade, Cairo, "
    "Baghdad, Damascus, Kigali, Dakar, Sofia, Victoria, Tashkent, Mumbai, Barcelona, Amman, Toronto, Bratislava, "
    "Johannesburg, Thimphu, Bangkok, Santiago, San Francisco, Paris, Rabat, Copenhagen, Madrid, Ho Chi Minh City, "
    "Sarajevo, Delhi, Istanbul, Khartoum, Helsinki, Doha, Kuala Lumpur, Budapest, Shanghai, Moscow, Los Angeles, Oslo, "
    "Berlin, Bangalore, Tokyo, Melbourne, Port Louis, Lisbon, Nairobi, Kampala, Lima, Maputo, Vancouver, Dubai, Jakarta, "
    "Yerevan, Beirut, Athens, Bucharest, Brussels, Tunis, Astana, Seoul, Buenos Aires, Vienna"
).split(", ")

# RULER makes adjective-noun keys from a word list. These words are our own.
_ADJECTIVES = (
    "able amber ancient bitter bold brave brief bright broad calm careful clever cold crisp curious damp dark deep dry "
    "early easy faint famous fierce fresh gentle giant golden grand happy heavy hidden honest humble icy idle jolly keen "
    "large lively lonely loud lucky mellow mild narrow noble odd pale patient plain polite proud quick quiet rapid rare"
).split()
_NOUNS = (
    "acorn anchor arrow badge barn basket beacon bell bench blanket boat bottle branch bridge bucket button cabin candle "
    "canyon carpet castle chapel cliff cloud coin compass cottage cradle curtain desert drum eagle engine falcon feather "
    "fence ferry flute forest fountain garden glacier hammer harbor island jacket kettle ladder lantern meadow mirror"
).split()
WORDS = tuple(f"{adjective}-{noun}" for adjective in _ADJECTIVES for noun in _NOUNS)
