"""eval/needle_text.py: a query knows where everything is."""

import re

import numpy as np
import pytest

from data.config import TokenizerConfig
from data.retrieval import cities, sentence_ends
from data.tokenizer import Tokenizer, build_tokenizer
from eval.needle_text import Cell, needle_queries

FACT = re.compile(r"The magic number of (\w+) is (\d+)\.")
TEXT = "Some words stand here. Others follow, and a full stop ends them. " * 120
LENGTH = 400


@pytest.fixture(scope="module", params=("bytes", "bpe"))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return build_tokenizer(TokenizerConfig(request.param, 290 if request.param == "bpe" else None), [TEXT])


@pytest.mark.parametrize("needles", (1, 4))
@pytest.mark.parametrize("depth", (0.0, 0.3, 1.0))
def test_a_query_knows_where_everything_is(tokenizer: Tokenizer, depth: float, needles: int) -> None:
    hay = np.array(tokenizer.encode(TEXT), dtype=np.int64)
    queries = needle_queries(np.random.default_rng(1), hay, tokenizer, Cell(LENGTH, depth, needles, min(2, needles)))
    assert len(queries) == min(2, needles)
    for query in queries:
        assert len(query.prompt) + len(query.candidates[0]) == LENGTH and len(query.candidates) == needles
        needle = tokenizer.decode(query.prompt[slice(*query.needle)])
        city, number = FACT.fullmatch(needle.strip()).groups()
        assert city in cities("eval")
        assert tokenizer.decode(query.candidates[0]).strip() == f"{number}."
        assert tokenizer.decode(query.prompt[query.question :]).strip() == f"The magic number of {city} is"
        facts = FACT.findall(tokenizer.decode(query.prompt[: query.question]))
        assert (city, number) in facts and len(facts) == needles
        if needles == 1:
            assert abs((query.needle[0] - 1) / (query.question - 1) - depth) < 0.25  # at the end of a sentence
            assert depth != 0.0 or query.needle[0] == 1
            assert depth != 1.0 or query.needle[1] == query.question


def test_sentences_end_in_other_scripts_too() -> None:
    chinese = build_tokenizer(TokenizerConfig("bpe", 284), ["天地玄黄。宇宙洪荒！" * 50])
    spelled = {token: chinese.token_bytes(token) for token in range(284) if token != chinese.eot}
    ends = [token for token, word in spelled.items() if word.endswith(("。".encode(), "！".encode()))]
    assert ends and sentence_ends(chinese)[ends].all() and sentence_ends(chinese).sum() == len(ends) + 2  # "." and newline


def test_what_does_not_fit_is_refused(tokenizer: Tokenizer) -> None:
    hay = np.array(tokenizer.encode(TEXT), dtype=np.int64)
    for cell, digits, says in (
        (Cell(4000, 0.5, 500), 4, "use at most"),
        (Cell(4000, 0.5, 20), 2, "use more digits"),  # the evaluation's numbers of two digits are 19
    ):
        with pytest.raises(ValueError, match=says):
            needle_queries(np.random.default_rng(0), hay, tokenizer, cell, digits)
