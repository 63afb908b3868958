"""Needle questions: facts hidden in a long text, with keys and numbers that data/retrieval.py keeps out of training."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

import numpy as np

from data.retrieval import Facts, hide, sentence_ends
from data.tokenizer import Tokenizer
from eval.common import TextEvalConfig
from training.checkpoint import LoadedRun

_facts = lru_cache(maxsize=4)(Facts)  # kept, because making one tokenizes the sentence of every city


@dataclass
class NeedleGridConfig(TextEvalConfig):
    """depths: positions of the needle in question, as fractions of the context. samples: contexts per cell."""

    depths: Annotated[list[float], "[0, 1]"] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    samples: Annotated[int, "[1, inf)"] = 50
    seed: Annotated[int, "[0, 4294967295]"] = 0  # seed of the contexts


class Cell(NamedTuple):
    """Contexts of `length` tokens with `needles` facts, of which `asked` have a question; the asked one lies at `depth`."""

    length: int
    depth: float
    needles: int = 1
    asked: int = 1


@dataclass(frozen=True)
class Query:
    """One question about one context, as token ids."""

    prompt: np.ndarray  # (P,), ends where the answer begins
    needle: tuple[int, int]  # [start, stop) of the sentence with the answer in the prompt
    question: int  # the position of the first token of the closing question
    candidates: list[np.ndarray]  # (A,) each: number and full stop of all needles of this context, the right answer first


def trained_digits(config: Mapping[str, Any]) -> int:
    """Digits of the numbers in a run's retrieval documents. config: the run's."""
    return (config["data"].get("retrieval") or {}).get("digits", 4)


def needle_contexts(run: LoadedRun, hay: np.ndarray, cfg: NeedleGridConfig, cell: Cell) -> list[list[Query]]:
    """`cfg.samples` contexts, each with its queries. They do not depend on the other cells of the grid."""
    rng = np.random.default_rng([cfg.seed, cell.length, round(1000 * cell.depth), cell.needles, cell.asked])
    return [needle_queries(rng, hay, run.tokenizer, cell, trained_digits(run.config)) for _ in range(cfg.samples)]


def needle_queries(
    rng: np.random.Generator, haystack: np.ndarray, tokenizer: Tokenizer, cell: Cell, digits: int = 4
) -> list[Query]:
    """Hide the cell's needles in one text and ask for them. ValueError where they do not fit.

    Returns one query for each of `cell.asked` facts, in which that fact is hidden at `cell.depth`, and the others at random
    depths. The text is cut from `haystack` (n,) at a random place; prompt and answer have exactly `cell.length` tokens.
    """
    facts = _facts(tokenizer, "eval", digits).draw(rng, cell.needles)
    start = int(rng.integers(0, max(1, len(haystack) - cell.length)))
    depths = np.concatenate(([cell.depth], rng.random(cell.needles - 1)))
    queries = []
    for i, fact in enumerate(facts[: cell.asked]):
        order = [fact, *facts[:i], *facts[i + 1 :]]  # the fact in question takes the place at `depth`
        room = cell.length - 1 - sum(len(other.tokens) for other in facts) - len(fact.tokens)
        if not 0 <= room <= len(haystack) - start:
            fit = f"length={cell.length}, or the text of {len(haystack)} tokens"
            fix = "use a longer length, fewer needles or a longer text=FILE"
            raise ValueError(f"needles={cell.needles} and a question do not fit {fit}: {fix}")
        # at the end of a sentence within a tenth of the text (or 32 tokens) of its depth, or else just there
        hay = haystack[start : start + room]
        text, starts = hide(hay, order, depths, sentence_ends(tokenizer), max(32, room / 10))
        first = 1 + starts[0]
        queries.append(
            Query(
                prompt=np.array([tokenizer.eot, *text, *fact.key], dtype=np.int64),
                needle=(first, first + len(fact.tokens)),
                question=1 + len(text),
                candidates=[np.array(other.value, dtype=np.int64) for other in order],
            )
        )
    return queries
