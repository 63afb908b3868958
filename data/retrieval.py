"""Synthetic retrieval: facts hidden in real text and asked for at the end; what a small model needs to retrieve at all.

Two kinds of documents, in the shape of the multi-needle test of LWM and of the Differential Transformer paper
(arXiv 2410.05258, section 3.3):

- needle: text with N sentences "The magic number of Paris is 4817." at random depths, each asked for again after it.
- dense: nothing but such sentences over a few cities, so that every repetition is a retrieval.

Cities and numbers of the training documents never occur in evaluation and the other way round. Evaluation can ask in
other wordings, too (data/styles.py): their numbers are those of evaluation, their sentences were never trained on.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from data.styles import LWM_CITIES, NOISE, STYLES, WORDS, Style

if TYPE_CHECKING:
    from data.loader import Source
    from data.tokenizer import Tokenizer

CITIES = """
Aarhus Accra Adelaide Agra Aleppo Algiers Almaty Amman Amsterdam Ankara Antwerp Asmara Athens Atlanta Auckland Baghdad Baku
Baltimore Bangkok Barcelona Basel Beirut Belfast Belgrade Bergen Berlin Bern Bogota Bologna Bombay Bordeaux Boston Bremen
Brisbane Bristol Brno Brussels Bucharest Budapest Cairo Calgary Canberra Caracas Cardiff Chennai Chicago Cologne Colombo
Copenhagen Cordoba Cork Dakar Dallas Damascus Darwin Delhi Denver Detroit Dhaka Doha Dresden Dubai Dublin Durban Edinburgh
Florence Frankfurt Fukuoka Galway Gdansk Geneva Genoa Ghent Glasgow Granada Graz Hamburg Hanoi Harare Havana Helsinki
Hobart Houston Innsbruck Istanbul Izmir Jakarta Jerusalem Kabul Kampala Karachi Kathmandu Khartoum Kiev Kigali Kingston
Kobe Krakow Kuwait Kyoto Lagos Lahore Leeds Leipzig Lima Limerick Lisbon Liverpool London Luanda Lusaka Lyon Madrid Malaga
Malmo Managua Manchester Manila Marseille Medina Melbourne Memphis Miami Milan Minsk Mombasa Monaco Montreal Moscow Mumbai
Munich Muscat Nagoya Nairobi Nantes Naples Nice Osaka Oslo Ottawa Oxford Palermo Panama Paris Perth Porto Prague Pretoria
Quebec Quito Rabat Riga Rome Rotterdam Salzburg Santiago Sarajevo Seattle Seoul Seville Shanghai Singapore Sofia Stockholm
Strasbourg Sydney Taipei Tallinn Tampa Tampere Tangier Tbilisi Tehran Tokyo Toledo Toronto Trieste Tripoli Tunis Turin
Utrecht Valencia Vancouver Venice Verona Vienna Vilnius Warsaw Wellington York Zagreb Zurich
""".split()
EVAL_EVERY = 5  # one city, and one number, in five is kept for evaluation


@dataclass
class RetrievalConfig:
    """The share of training samples that are retrieval documents, and their shape.

    weight: percent of all samples. dense: percent of the retrieval documents that are dense. needles: a document has 1 to
    this many facts (with few, a small model learns to retrieve soonest). digits: of a magic number; with two, the numbers
    kept for evaluation are a rule that a model can learn.
    """

    weight: int = 0
    dense: int = 50
    needles: int = 4
    digits: int = 4


@dataclass(frozen=True)
class Query:
    """One question over one context: token ids, and where in `prompt` things are ([start, stop) spans).

    `prompt` (P,) ends right where `answer` (A,), the number and its full stop, begins. `needle` is the asked sentence,
    `value` its number, `question` the first token of the closing question. `candidates` are the answers of all needles
    of this context, the `right` ones (several where one question asks for several) first. Where `values` are given, each
    of them counts if it occurs in the text of a greedy continuation of at most `new_tokens`.
    """

    prompt: np.ndarray
    answer: np.ndarray
    needle: tuple[int, int]
    value: tuple[int, int]
    question: int
    candidates: list[np.ndarray]
    right: int = 1
    values: tuple[str, ...] = ()
    new_tokens: int = 0


def cities(split: str) -> list[str]:
    """The keys of the `train` or the `eval` split; disjoint."""
    return [city for i, city in enumerate(CITIES) if (i % EVAL_EVERY == 0) == (split == "eval")]


def draw_number(rng: np.random.Generator, split: str, digits: int) -> int:
    """A number of that many digits (3 or more) from the split's own set; the sets are disjoint, their digits alike."""
    while True:
        number = int(rng.integers(10 ** (digits - 1), 10**digits))
        scrambled = number * 2654435761 % 2**32 >> 16  # Knuth's multiplicative hash: no digit tells the split
        if (scrambled % EVAL_EVERY == 0) == (split == "eval"):
            return number


@dataclass(frozen=True)
class Fact:
    """A sentence's tokens in two parts: "\\nThe magic number of Paris is" and " 4817.", cut where the first digit is."""

    key: list[int]
    value: list[int]

    @property
    def tokens(self) -> list[int]:
        return self.key + self.value


class Facts:
    """Draws facts of one split; the sentences' fixed parts are tokenized once."""

    def __init__(self, tokenizer: "Tokenizer", split: str, digits: int) -> None:
        self.tokenizer, self.split, self.digits = tokenizer, split, digits
        self.keys = [tokenizer.encode(f"\nThe magic number of {city} is") for city in cities(split)]

    def draw(self, rng: np.random.Generator, count: int) -> list[Fact]:
        """`count` facts about different cities, with different numbers: ranking the candidates cannot tie."""
        if count > len(self.keys):
            raise ValueError(f"{count} needles asked, but there are {len(self.keys)} cities: use at most that many")
        chosen = rng.choice(len(self.keys), count, replace=False)
        numbers: list[int] = []
        while len(numbers) < count:
            number = draw_number(rng, self.split, self.digits)
            numbers += [number] if number not in numbers else []
        return [self._fact(self.keys[i], number) for i, number in zip(chosen, numbers, strict=True)]

    def _fact(self, key: list[int], number: int) -> Fact:
        value = self.tokenizer.encode(f" {number}.")
        # Some tokenizers give the space a token of its own: it belongs to the question, or a prompt would end before it.
        digit = next(
            i for i, token in enumerate(value) if any(c in b"0123456789" for c in self.tokenizer.token_bytes(token))
        )
        return Fact(key + value[:digit], value[digit:])


class RetrievalSource:
    """Training documents of exactly one window each; sample i is a pure function of (seed, i)."""

    def __init__(self, cfg: RetrievalConfig, haystack: "Source", tokenizer: "Tokenizer", length: int) -> None:
        if not (0 <= cfg.dense <= 100 and cfg.needles >= 1 and cfg.digits >= 1):
            raise ValueError(
                "data.retrieval needs 0 <= dense <= 100, needles >= 1 and digits >= 1: correct the override"
            )
        self.cfg, self.haystack, self.tokenizer, self.length = cfg, haystack, tokenizer, length
        self.facts = Facts(tokenizer, "train", cfg.digits)
        self.sentence_ends = sentence_ends(tokenizer)
        self.longest = max(len(key) for key in self.facts.keys) + cfg.digits + 2
        if length < 4 * self.longest:
            wrong = f"a context of {length} tokens is too short for retrieval documents"
            raise ValueError(f"{wrong}: use model.context={4 * self.longest} or more, or data.retrieval.weight=0")

    def sample(self, index: int, seed: int) -> np.ndarray:
        """(length + 1,) int64 token ids."""
        rng = np.random.default_rng([seed, index])
        kind = self._dense if rng.integers(100) < self.cfg.dense else self._needle
        return kind(rng, index, seed)

    def _dense(self, rng: np.random.Generator, index: int, seed: int) -> np.ndarray:
        facts = self.facts.draw(rng, int(rng.integers(1, self.cfg.needles + 1)))
        tokens = [self.tokenizer.eot]
        while len(tokens) < self.length + 1:
            tokens += facts[rng.integers(len(facts))].tokens
        return np.array(tokens[: self.length + 1], dtype=np.int64)

    def _needle(self, rng: np.random.Generator, index: int, seed: int) -> np.ndarray:
        fit = self.length // (3 * self.longest)  # a third of the window for the facts, a third for the questions
        facts = self.facts.draw(rng, int(rng.integers(1, min(self.cfg.needles, fit) + 1)))
        room = self.length + 1 - 2 * sum(len(f.tokens) for f in facts) - 1
        # Texts of all lengths, long ones more often: with the questions always at the window's end, a model learns to
        # answer there and nowhere else.
        text = self.haystack.sample(index, seed)[: int(room * rng.random() ** 0.5)]
        context, _ = hide(text, facts, rng.random(len(facts)), self.sentence_ends)
        tokens = [self.tokenizer.eot, *context]
        while len(tokens) < self.length + 1:
            tokens += [token for i in rng.permutation(len(facts)) for token in facts[i].tokens]
        return np.array(tokens[: self.length + 1], dtype=np.int64)


def needle_queries(
    rng: np.random.Generator,
    haystack: np.ndarray,
    tokenizer: "Tokenizer",
    length: int,
    depth: float,
    needles: int = 1,
    asked: int = 1,
    digits: int = 4,
    style: str = "magic",
) -> list[Query]:
    """Evaluation: `needles` facts in one text, `asked` of them asked for, in the wording of data/styles.py.

    One query per asked fact, each in turn hidden at `depth` (0..1), or one for all of them, the first at `depth`; the
    others stand at random depths. `haystack` (n,) is cut at a random place, unless the style brings its own; prompt and
    answer together have exactly `length` tokens, whatever the key (at most, in a haystack of needles). digits: of a
    number, where the style leaves it open. Raises ValueError where they do not fit.
    """
    wording = STYLES[style]
    facts = _draw(rng, wording, tokenizer, needles, wording.digits if wording.digits is not None else digits)
    start = int(rng.integers(0, max(1, len(haystack) - length)))
    depths = np.concatenate(([depth], rng.random(needles - 1)))
    queries = []
    for i in range(1 if wording.string else asked):
        order = [facts[i], *facts[:i], *facts[i + 1 :]]  # the asked fact takes the place at `depth`
        wanted = order[: asked if wording.string else 1]
        ask = _Ask.of(wording, tokenizer, wanted)
        room = length - 1 - len(ask.intro) - sum(len(f.tokens) for f in facts) - len(ask.question) - ask.reserve
        hay = haystack[start:] if wording.haystack == "text" else _own_haystack(rng, wording, tokenizer, room, facts)
        if room < 0 or (len(hay) < room and wording.haystack == "text"):
            wrong = f"{needles} needles and their text need more than length={length} or the {len(haystack)} haystack tokens"
            raise ValueError(f"{wrong}: use a longer length, fewer needles or a longer haystack")
        queries.append(_query(tokenizer, ask, hay[:room], order, depths, len(wanted)))
    return queries


@dataclass(frozen=True)
class _Ask:
    """The tokens around a context, the answers as strings, and the tokens kept free for an answer."""

    intro: tuple[int, ...]
    question: tuple[int, ...]
    values: tuple[str, ...]
    reserve: int

    @classmethod
    def of(cls, wording: Style, tokenizer: "Tokenizer", wanted: "list[_Needle]") -> "_Ask":
        several = len(wanted) > 1
        question = wording.question[several].format(key=_listed(list(dict.fromkeys(fact.name for fact in wanted))))
        # Where the space before a value is a token of its own, it belongs to the question.
        lead = wanted[0].key[len(_encode(tokenizer, wanted[0].head)) :]
        values = tuple(fact.text for fact in wanted) if wording.string else ()
        # As many tokens as a plain answer has bytes: enough for every tokenizer, and equal for all contexts of a cell.
        reserve = len(f" {_listed(values)}.".encode()) if wording.string else len(wanted[0].value)
        return cls(_encode(tokenizer, wording.intro[several]), (*_encode(tokenizer, question), *lead), values, reserve)


def _query(
    tokenizer: "Tokenizer", ask: _Ask, text: np.ndarray, order: "list[_Needle]", depths: np.ndarray, right: int
) -> Query:
    context, starts = hide(text, order, depths, sentence_ends(tokenizer))
    first = 1 + len(ask.intro) + starts[0]
    value = first + len(order[0].key)
    return Query(
        prompt=np.array([tokenizer.eot, *ask.intro, *context, *ask.question], dtype=np.int64),
        answer=np.array(order[0].answer, dtype=np.int64),
        needle=(first, first + len(order[0].tokens)),
        value=(value, value + len(order[0].value)),
        question=1 + len(ask.intro) + len(context),
        candidates=[np.array(fact.answer, dtype=np.int64) for fact in order],
        right=right,
        values=ask.values,
        new_tokens=ask.reserve,
    )


@dataclass(frozen=True)
class _Needle(Fact):
    """A fact of any wording: `head` is its text up to the value, `answer` the tokens that a question is answered by."""

    rest: list[int]
    name: str
    text: str
    head: str
    answer: list[int]

    @property
    def tokens(self) -> list[int]:
        return self.key + self.value + self.rest


def _draw(rng: np.random.Generator, wording: Style, tokenizer: "Tokenizer", count: int, digits: int) -> list[_Needle]:
    """`count` facts with different keys (or one, where the wording has one) and different values."""
    names = _names(rng, wording.keys, 1 if wording.one_key else count)
    values: list[str] = []
    while len(values) < count:
        value = str(draw_number(rng, "eval", digits)) if digits else _uuid(rng)
        values += [value] if value not in values else []
    names = names * count if wording.one_key else names
    return [_needle(wording, tokenizer, name, value) for name, value in zip(names, values, strict=True)]


def _names(rng: np.random.Generator, kind: str, count: int) -> list[str]:
    if kind == "uuids":
        return [_uuid(rng) for _ in range(count)]
    known = {"cities": cities("eval"), "lwm": LWM_CITIES, "words": WORDS, "none": [""]}[kind]
    if count > len(known):
        raise ValueError(f"{count} needles asked, but there are {len(known)} {kind}: use at most that many")
    return [known[i] for i in rng.choice(len(known), count, replace=False)]


def _uuid(rng: np.random.Generator) -> str:
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


def _listed(names: Sequence[str]) -> str:
    """ "A", "A, and B", "A, B, and C", as LWM and RULER spell it."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])}, and {names[-1]}"


def _needle(wording: Style, tokenizer: "Tokenizer", name: str, value: str) -> _Needle:
    head, tail = wording.fact.replace("{key}", name).split(" {value}", 1)
    stop, rest = tail[0], tail[1:].replace("{value}", value)
    lead, spelled = _spell(tokenizer, value + stop)
    answer = _spell(tokenizer, value)[1] if wording.string else spelled
    return _Needle(
        [*_encode(tokenizer, head), *lead], spelled, list(_encode(tokenizer, rest)), name, value, head, answer
    )


def _spell(tokenizer: "Tokenizer", text: str) -> tuple[list[int], list[int]]:
    """The tokens of " text" in two parts: those of the space alone (most tokenizers have none), and the rest."""
    tokens = tokenizer.encode(f" {text}")
    first = next(i for i, token in enumerate(tokens) if tokenizer.token_bytes(token).strip())
    return tokens[:first], tokens[first:]


@lru_cache(maxsize=10_000)
def _encode(tokenizer: "Tokenizer", text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text))


def _own_haystack(
    rng: np.random.Generator, wording: Style, tokenizer: "Tokenizer", room: int, taken: list[_Needle]
) -> np.ndarray:
    """Up to `room` tokens: of the noise as many as asked, of needles as many whole ones as fit."""
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


@lru_cache(maxsize=4)
def sentence_ends(tokenizer: "Tokenizer") -> np.ndarray:
    """Which tokens may end a sentence: (vocab,) bool."""
    ends = np.zeros(tokenizer.vocab_size, dtype=bool)
    for token in np.flatnonzero(tokenizer.byte_lengths()):  # some encodings have ids that no token uses
        ends[token] = tokenizer.token_bytes(token).endswith((b".", b"\n"))
    return ends


def hide(
    text: np.ndarray, facts: Sequence[Fact], depths: Sequence[float], ends: np.ndarray
) -> tuple[list[int], list[int]]:
    """Put each fact into `text` at its depth (0 first, 1 last), after the nearest sentence end; the new text and its starts."""
    places = np.concatenate(([0], np.flatnonzero(ends[text]) + 1, [len(text)]))
    cuts = [int(places[np.abs(places - depth * len(text)).argmin()]) for depth in depths]
    context: list[int] = []
    starts = [0] * len(facts)
    done = 0
    for i in sorted(range(len(facts)), key=lambda i: (cuts[i], depths[i])):
        context += text[done : cuts[i]].tolist()
        starts[i], done = len(context), cuts[i]
        context += facts[i].tokens
    return context + text[done:].tolist(), starts
