"""Retrieval documents, which training mixes with text: facts hidden in real text, and questions at the end, in the shape of the
multi-needle test of LWM and of the Differential Transformer paper (arXiv 2410.05258, section 3.3).

needle: text with N sentences "The magic number of Paris is 4817." at random depths, then a question for each. dense: only such
sentences, about a few cities, so that every repetition is a retrieval. Training and evaluation share no city and no number.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from data.config import RetrievalMixConfig
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
ENDS = tuple(end.encode() for end in (".", "\n", "。", "！", "？", "।", "؟"))  # of sentences, in several languages
EVAL_EVERY = 5  # one city, and one number, in five is kept for evaluation


def cities(split: str) -> list[str]:
    """The cities of the split `train` or `eval`; the two splits share no city."""
    return [city for i, city in enumerate(CITIES) if (i % EVAL_EVERY == 0) == (split == "eval")]


def draw_numbers(rng: np.random.Generator, split: str, digits: int, count: int) -> list[int]:
    """`count` different numbers of `digits` digits from the split's set. ValueError: it has fewer."""
    numbers = range(10 ** (digits - 1), 10**digits)
    if count > numbers.start and count > sum(_in_split(number, split) for number in numbers):
        fix = "use fewer needles, or use more digits in training (data.retrieval.digits)"
        raise ValueError(f"there are too few numbers of {digits} digits for {count} needles: {fix}")
    drawn: list[int] = []
    while len(drawn) < count:
        number = int(rng.integers(numbers.start, numbers.stop))
        if _in_split(number, split) and number not in drawn:
            drawn.append(number)
    return drawn


def _in_split(number: int, split: str) -> bool:
    scrambled = number * 2654435761 % 2**32 >> 16  # Knuth's multiplicative hash: no single digit tells the split
    return (scrambled % EVAL_EVERY == 0) == (split == "eval")


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

    def __init__(self, tokenizer: Tokenizer, split: str, digits: int) -> None:
        self.tokenizer, self.split, self.digits = tokenizer, split, digits
        self.keys = [tokenizer.encode(f"\nThe magic number of {city} is") for city in cities(split)]

    def draw(self, rng: np.random.Generator, count: int) -> list[Fact]:
        """`count` facts about different cities, with different numbers, so that ranks of the candidates cannot tie."""
        if count > len(self.keys):
            raise ValueError(f"{count} needles are more than the {len(self.keys)} cities: use at most that many")
        chosen = rng.choice(len(self.keys), count, replace=False)
        facts = []
        for i, number in zip(chosen, draw_numbers(rng, self.split, self.digits, count), strict=True):
            tokens = self.tokenizer.encode(f" {number}.")
            # A space that is a token by itself (most tokenizers make none) belongs to the question, so it ends the prompt.
            cut = next(place for place, token in enumerate(tokens) if self.tokenizer.token_bytes(token).strip())
            facts.append(Fact(self.keys[i] + tokens[:cut], tokens[cut:]))
        return facts


class RetrievalSource:
    """Training documents of exactly one window each; sample i is a pure function of (seed, i)."""

    def __init__(
        self, cfg: RetrievalMixConfig, haystack: Source, tokenizer: Tokenizer, length: int, document_mask: bool = False
    ) -> None:
        self.cfg, self.haystack, self.tokenizer, self.length = cfg, haystack, tokenizer, length
        self.document_mask = document_mask  # of the model that reads the documents
        self.facts = Facts(tokenizer, "train", cfg.digits)
        self.facts.draw(np.random.default_rng(0), cfg.needles)  # raise now what a later document would raise
        self.sentence_ends = sentence_ends(tokenizer)
        self.longest = max(len(key) for key in self.facts.keys) + cfg.digits + 2
        if length < 4 * self.longest:
            fix = f"use model.context={4 * self.longest} or more, or data.retrieval.weight=0"
            raise ValueError(f"a context of {length} tokens is too short for retrieval documents: {fix}")

    def sample(self, index: int, seed: int) -> np.ndarray:
        rng = np.random.default_rng([seed, index])
        tokens = self._dense(rng) if rng.integers(100) < self.cfg.dense else self._needle(rng, index, seed)
        return np.array(tokens[: self.length + 1], dtype=np.int64)

    def _dense(self, rng: np.random.Generator) -> list[int]:
        facts = self.facts.draw(rng, int(rng.integers(1, self.cfg.needles + 1)))
        tokens = [self.tokenizer.eot]
        while len(tokens) < self.length + 1:
            tokens += facts[rng.integers(len(facts))].tokens
        return tokens

    def _needle(self, rng: np.random.Generator, index: int, seed: int) -> list[int]:
        fit = self.length // (3 * self.longest)  # a third of the window for the facts, a third for the questions
        facts = self.facts.draw(rng, int(rng.integers(1, min(self.cfg.needles, fit) + 1)))
        room = self.length + 1 - 2 * sum(len(f.tokens) for f in facts) - 1
        # Texts of all lengths, long ones more often: if the questions were always at the window's end, a model would
        # learn to answer only there.
        text = self.haystack.sample(index, seed)[: int(room * rng.random() ** 0.5)]
        text = as_one_document(text, self.tokenizer) if self.document_mask else text
        context, _ = hide(text, facts, rng.random(len(facts)), self.sentence_ends)
        tokens = [self.tokenizer.eot, *context]
        while len(tokens) < self.length + 1:
            tokens += [token for i in rng.permutation(len(facts)) for token in facts[i].tokens]
        return tokens


def as_one_document(text: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """The tokens (n,) with a line break for every end-of-text token, after which a document mask would hide a needle."""
    return np.where(text == tokenizer.eot, tokenizer.encode("\n")[-1], text)


@lru_cache(maxsize=4)
def sentence_ends(tokenizer: Tokenizer) -> np.ndarray:
    """Which tokens may end a sentence: (vocab,) bool."""
    ends = np.zeros(tokenizer.vocab_size, dtype=bool)
    for token in np.flatnonzero(tokenizer.byte_lengths()):  # some encodings have ids that no token uses
        ends[token] = tokenizer.token_bytes(token).endswith(ENDS)
    return ends


def hide(
    text: np.ndarray, facts: Sequence[Fact], depths: Sequence[float], ends: np.ndarray, reach: float = np.inf
) -> tuple[list[int], list[int]]:
    """Put each fact into `text` at its depth (0 first, 1 last), after the nearest sentence end within `reach` tokens, if any.

    Returns the new tokens and the position at which each fact starts.
    """
    places, cuts = np.concatenate(([0], np.flatnonzero(ends[text]) + 1, [len(text)])), []
    for wish in (depth * len(text) for depth in depths):
        nearest = int(places[np.abs(places - wish).argmin()])
        cuts.append(nearest if abs(nearest - wish) <= reach else round(wish))
    context: list[int] = []
    starts = [0] * len(facts)
    done = 0
    for i in sorted(range(len(facts)), key=lambda i: (cuts[i], depths[i])):
        context += text[done : cuts[i]].tolist()
        starts[i], done = len(context), cuts[i]
        context += facts[i].tokens
    return context + text[done:].tolist(), starts
