"""eval/needle_text.py: a query knows where everything is, and every style hides what it asks for."""

import re
import uuid

import numpy as np
import pytest

from data.config import TokenizerConfig
from data.retrieval import cities, sentence_ends
from data.tokenizer import Tokenizer, build_tokenizer
from eval.needle_text import LWM_CITIES, STYLES, WORDS, Cell, needle_queries
from tests.conftest import ROOT

FACT = re.compile(r"The magic number of (\w+) is (\d+)\.")
TEXT = "Some words stand here. Others follow, and a full stop ends them. " * 40
LENGTH = 400


@pytest.fixture(scope="module", params=("bytes", "bpe"))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    corpus = [path.read_text() for path in sorted((ROOT / "eval").glob("*.py"))]
    return build_tokenizer(TokenizerConfig(request.param, 1500 if request.param == "bpe" else None), corpus)


@pytest.mark.parametrize("needles", (1, 4))
@pytest.mark.parametrize("depth", (0.0, 0.3, 1.0))
def test_a_query_knows_where_everything_is(tokenizer: Tokenizer, depth: float, needles: int) -> None:
    hay = np.array(tokenizer.encode(TEXT * 3), dtype=np.int64)
    queries = needle_queries(np.random.default_rng(1), hay, tokenizer, Cell(LENGTH, depth, needles, min(2, needles)))
    assert len(queries) == min(2, needles)
    for query in queries:
        assert len(query.prompt) + len(query.answer) == LENGTH
        needle = tokenizer.decode(query.prompt[slice(*query.needle)])
        city, number = FACT.fullmatch(needle.strip()).groups()
        assert city in cities("eval")
        assert tokenizer.decode(query.answer).strip() == f"{number}."
        assert tokenizer.decode(query.prompt[query.question :]).strip() == f"The magic number of {city} is"
        assert len(query.candidates) == needles and np.array_equal(query.candidates[0], query.answer)
        facts = FACT.findall(tokenizer.decode(query.prompt[: query.question]))
        assert (city, number) in facts and len(facts) == needles
        place = (query.needle[0] - 1) / (query.question - 1)
        if needles == 1:
            assert abs(place - depth) < 0.25  # at the end of a sentence
            if depth in (0.0, 1.0):
                assert (query.needle[0] == 1) if depth == 0 else (query.needle[1] == query.question)


def test_sentences_end_in_other_scripts_too() -> None:
    chinese = build_tokenizer(TokenizerConfig("bpe", 284), ["天地玄黄。宇宙洪荒！" * 50])
    spelled = {token: chinese.token_bytes(token) for token in range(284) if token != chinese.eot}
    ends = [token for token, word in spelled.items() if word.endswith(("。".encode(), "！".encode()))]
    assert ends and sentence_ends(chinese)[ends].all() and sentence_ends(chinese).sum() == len(ends) + 2  # "." and newline


VALUE = r"(\d{4,7}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})"
NEEDLES = {
    "magic": rf"The magic number of (\w+) is {VALUE}\.",
    "lwm": rf"The special magic ([A-Z][A-Za-z ]+?) number is: {VALUE}\n",
    "passkey": rf"(The) pass key is {VALUE}\. Remember it\. \2 is the pass key\.",
    "niah": rf"One of the special magic (?:number|uuid)s for ([-\w]+) is: {VALUE}\.",
}


@pytest.mark.parametrize("style", STYLES)
def test_every_style_hides_what_it_asks_for(tokenizer: Tokenizer, style: str) -> None:
    hay, length = np.array(tokenizer.encode(TEXT * 3), dtype=np.int64), 1400
    n, r = STYLES[style].pair or (4, 2)
    for seed in range(2):
        queries = needle_queries(np.random.default_rng(seed), hay, tokenizer, Cell(length, 0.5, n, r), style=style)
        assert len(queries) == (1 if STYLES[style].string else r)
        for query in queries:
            facts = re.findall(NEEDLES[style.split("_")[0]], tokenizer.decode(query.prompt))
            own = tokenizer.decode(query.prompt[slice(*query.needle)]).strip()
            key, value = re.fullmatch(NEEDLES[style.split("_")[0]].rstrip("\\n"), own).groups()
            question = tokenizer.decode(query.prompt[query.question :])
            assert (style == "passkey" or key in question) and (key, value) in facts
            answer = tokenizer.decode(query.answer).strip()
            assert answer == (value if query.values else f"{value}.")
            candidates = [tokenizer.decode(row).strip(" .") for row in query.candidates]
            assert len(set(candidates)) == n and set(candidates) <= {v for _, v in facts}
            assert len(facts) == n or (STYLES[style].haystack == "needles" and len(facts) > 8)
            room = len(query.prompt) + (query.new_tokens if query.values else len(query.answer))
            assert room == length or (STYLES[style].haystack == "needles" and length - 140 < room <= length)  # a needle
            if query.values:
                assert list(query.values) == candidates[: query.right] and query.right == r
                wanted = {key for key, v in facts if v in query.values}
                assert all(key in question for key in wanted) and len(wanted) == (1 if STYLES[style].one_key else r)
                # The text of the answers fits into what is kept free for them.
                assert query.new_tokens >= len(tokenizer.encode(" " + ", ".join(query.values)))


def test_keys_are_unique_and_uuids_are_uuids(tokenizer: Tokenizer) -> None:
    assert len(set(LWM_CITIES)) == len(LWM_CITIES) == 69 and len(set(WORDS)) == len(WORDS)
    hay = np.array(tokenizer.encode(TEXT * 3), dtype=np.int64)
    one, other = (
        needle_queries(np.random.default_rng(3), hay, tokenizer, Cell(1400, 0.5, 4, 1), style="niah_multikey_3")[0]
        for _ in (0, 1)
    )
    assert np.array_equal(one.prompt, other.prompt)  # from the generator alone
    found = re.findall(r"[-0-9a-f]{36}", tokenizer.decode(one.prompt))
    assert len(found) > 16 and all(uuid.UUID(text).version == 4 for text in found)


def test_what_does_not_fit_is_refused(tokenizer: Tokenizer) -> None:
    hay, rng = np.array(tokenizer.encode(TEXT), dtype=np.int64), np.random.default_rng(0)
    with pytest.raises(ValueError, match="fewer needles"):
        needle_queries(rng, hay, tokenizer, Cell(40, 0.5, 8))
    with pytest.raises(ValueError, match="use at most"):
        needle_queries(rng, hay, tokenizer, Cell(4000, 0.5, 500))
    with pytest.raises(ValueError, match="use more digits"):  # the evaluation's numbers of two digits are 19
        needle_queries(rng, hay, tokenizer, Cell(4000, 0.5, 20), digits=2)
    assert needle_queries(rng, np.tile(hay, 5), tokenizer, Cell(2000, 0.5, 19), digits=2)
    with pytest.raises(ValueError, match="longer haystack"):
        needle_queries(rng, hay[:50], tokenizer, Cell(LENGTH, 0.5))
    for style in STYLES.keys() - {"magic"}:
        with pytest.raises(ValueError, match="longer length"):
            needle_queries(rng, hay, tokenizer, Cell(30, 0.5, *(STYLES[style].pair or (1, 1))), style=style)
