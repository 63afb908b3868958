import numpy as np
import pytest
import tiktoken
from tiktoken_ext import openai_public

from data.config import TokenizerConfig
from data.tokenizer import FILE, Tokenizer, build_tokenizer, load_tokenizer, pieces


@pytest.fixture(params=["bytes", "bpe", "gpt2"])
def tokenizer(request) -> Tokenizer:
    name = request.param
    return build_tokenizer(TokenizerConfig("bytes")) if name == "bytes" else request.getfixturevalue(name)


def test_round_trip_special_tokens_and_saving(tokenizer, texts, tmp_path):
    lengths = tokenizer.byte_lengths()
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
        assert max(ids) < tokenizer.vocab_size and tokenizer.eot not in ids
        assert tokenizer.encode_array(text).tolist() == ids
        assert lengths[ids].sum() == len(text.encode())
    assert tokenizer.decode(tokenizer.encode_array("a\ud800b")) == "a?b"
    assert tokenizer.decode([*tokenizer.encode("ab"), tokenizer.vocab_size, 10**6]) == "ab"  # ids of a wider model
    assert 0 <= tokenizer.eot < tokenizer.vocab_size and tokenizer.decode([tokenizer.eot]) == "<|endoftext|>"
    assert lengths.shape == (tokenizer.vocab_size,) and lengths[tokenizer.eot] == 0 and np.count_nonzero(lengths == 0) == 1
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert (loaded.name, loaded.vocab_size, loaded.eot) == (tokenizer.name, tokenizer.vocab_size, tokenizer.eot)
    assert loaded.fingerprint == tokenizer.fingerprint and loaded.encode(texts[1]) == tokenizer.encode(texts[1])
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_vocabulary_that_is_not_whole_is_one_line(monkeypatch, tmp_path):
    """As tiktoken does it: a file in its folder whose digest is wrong is downloaded again. Until then it stays."""
    cut = tmp_path / "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"
    cut.write_bytes(b"cut")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.load, "read_file", lambda _: b"a page that says: no network")
    tiktoken.registry.ENCODINGS.pop("cl100k_base", None)
    with pytest.raises(ValueError, match=f"no whole copy of .* cl100k_base is in TIKTOKEN_CACHE_DIR .{tmp_path}"):
        build_tokenizer(TokenizerConfig("cl100k_base"))
    assert cut.read_bytes() == b"cut"
    (tmp_path / FILE).write_text('{"name": "bpe"}')
    with pytest.raises(ValueError, match="is damaged .'tokens'.: "):
        load_tokenizer(tmp_path)


def test_foreign_shards_take_the_configured_tokenizer_or_gpt2s(tmp_path, gpt2):
    """data.dir=FOLDER alone, with the default data=stdlib: a bpe cannot be trained on somebody else's tokens."""
    (tmp_path / "train.bin").write_bytes(b"")
    assert load_tokenizer(tmp_path, TokenizerConfig("bytes")).name == "bytes"
    assert load_tokenizer(tmp_path, TokenizerConfig("bpe", 4096)).fingerprint == gpt2.fingerprint


def test_a_bpe_of_1024_tokens_or_more_has_all_pairs_of_digits(corpus: list[str]) -> None:
    tokenizer = build_tokenizer(TokenizerConfig("bpe", 1500), corpus)
    for number in ("4817", "0907", "12", "6"):
        pieces = [tokenizer.decode([token]) for token in tokenizer.encode(f" {number}")]
        assert pieces == [f" {number[:2]}", number[2:]][: len(pieces)] and len(pieces) == (len(number) + 1) // 2


def split_by(name: str, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    """Bytes, split by the pattern of a published encoding, with a token for each pair of bytes that a cut may part."""
    pairs = [bytes([a, b]) for b in reversed(range(128)) for a in b"\n\r;z "]
    ranks = {token: rank for rank, token in enumerate([bytes([byte]) for byte in range(256)] + pairs)}
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: ranks)
    pattern = getattr(openai_public, name)()["pat_str"]
    special = {"<|fim_prefix|>": len(ranks) + 20, "<|endoftext|>": len(ranks) + 10}  # ids with gaps before them
    return Tokenizer(tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special))


@pytest.mark.parametrize("name", ["bpe", "gpt2", "cl100k_base", "o200k_base"])
def test_pieces_are_invisible_to_tokenizers(request, name, corpus, texts, monkeypatch):
    tokenizer = request.getfixturevalue(name) if name in ("bpe", "gpt2") else split_by(name, monkeypatch)
    ends = [a + b + c for a in ";z\r1 " for b in ("\n", "\r\n", "\n\r", " ") for c in "/;z\r1"]
    for text in ["".join(corpus), "\n\n \n".join(texts * 9), "no newline at all " * 50, "\n" * 500, "", *ends]:
        for size in (1, 7, 100):
            parts = list(pieces(text, size))
            assert "".join(parts) == text
            assert [token for part in parts for token in tokenizer.encode(part)] == tokenizer.encode(text)
