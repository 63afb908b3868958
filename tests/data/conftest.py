import os
from pathlib import Path

import pytest

from data.config import TokenizerConfig
from data.tokenizer import Tokenizer, build_tokenizer
from tests.conftest import ROOT


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Short texts that tokenizers trip over."""
    return [
        "It was the best of times, it was the worst of times,\n\nit's 1859 and they'll say   so.\t\r\n",
        "def f(x):\n    return x**2  # naïve, 你好, 🙂🙃, Ⅷ, ١٢٣\n" * 3,
        "<|endoftext|> is only text here; so is <|im_start|>.",
        " leading and trailing \n \n  ",
        "\x00\x01 control \x7f, e\u0301 combining, \u200b zero width",
    ]


@pytest.fixture(scope="session")
def corpus() -> list[str]:
    """English enough to train a small bpe vocabulary on: the project's code of data/."""
    return [path.read_text() for path in sorted((ROOT / "data").glob("*.py"))]


@pytest.fixture(scope="session")
def bpe(corpus: list[str]) -> Tokenizer:
    return build_tokenizer(TokenizerConfig("bpe", 700), corpus)


@pytest.fixture(scope="session")
def gpt2() -> Tokenizer:
    cache = Path(os.environ.get("TIKTOKEN_CACHE_DIR", ROOT.parent / "shared" / "data" / "tiktoken_cache"))
    if not cache.is_dir():
        pytest.skip("no TIKTOKEN_CACHE_DIR with GPT-2's vocabulary (tests use no network)")
    os.environ["TIKTOKEN_CACHE_DIR"] = str(cache)
    return build_tokenizer(TokenizerConfig("gpt2"))
