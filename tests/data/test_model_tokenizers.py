"""Tokenizers of other models' folders as ours, and ours as transformers' AutoTokenizer reads them."""

import json
from pathlib import Path

import pytest
import tiktoken
from tiktoken_ext import openai_public
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as HFTokenizer

from data.config import DataConfig, TokenizerConfig
from data.prepare import prepare
from data.tokenizer import SAMPLE, FolderTokenizer, Tokenizer, build_tokenizer, load_tokenizer, read_tokenizer
from data.tokenizer_export import export_tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
MORE = ["", "<s>written out</s> <|endoftext|>", "a" * 300, "   \n\n \t x\n" * 5, "end   ", SAMPLE]


def sentencepiece(corpus: list[str]) -> HFTokenizer:
    """As Llama 2's and TinyLlama's: a space before the text, unknown characters as bytes, <s> put in front."""
    hf = HFTokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    hf.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    hf.decoder = decoders.Sequence(parts)
    special = ["<unk>", "<s>", "</s>"]
    hf.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=600, special_tokens=special + BYTES, show_progress=False))
    content = json.loads(hf.to_str())
    content["added_tokens"] = content["added_tokens"][:3]  # the bytes are ordinary tokens there
    hf = HFTokenizer.from_str(json.dumps(content))
    hf.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    hf.enable_truncation(8)
    return hf


def byte_level(corpus: list[str]) -> HFTokenizer:
    """As SmolLM2's: single digits, then GPT-2's split; one more token that is not special."""
    hf = HFTokenizer(models.BPE())
    digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    hf.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>"]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    hf.train_from_iterator(corpus, trainer)
    hf.add_tokens([AddedToken("naïve", special=False)])
    return hf


def folder_of(hf: HFTokenizer, folder: Path, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    hf.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(params=[sentencepiece, byte_level], scope="module")
def folder(request: pytest.FixtureRequest, corpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}
    names = names if request.param is sentencepiece else {"bos_token": None, "eos_token": "<|endoftext|>"}
    return folder_of(request.param(corpus), tmp_path_factory.mktemp("folder"), **names)


def test_a_folders_tokenizer_is_one_of_ours(folder: Path, texts: list[str]) -> None:
    tokenizer = read_tokenizer(folder)
    begin = tokenizer.decode([tokenizer.eot])
    assert (begin, tokenizer.name) in (("<s>", "hf"), ("<|endoftext|>", "hf"))
    space = b"" if tokenizer.byte_level else b" "  # sentencepiece puts one before the text
    lengths = tokenizer.byte_lengths()
    assert lengths.shape == (tokenizer.vocab_size,) and lengths[tokenizer.eot] == 0
    for text in [*texts, *MORE]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        written = space + text.encode() if text else b""
        assert b"".join(map(tokenizer.token_bytes, ids)) == written and lengths[ids].sum() == len(written)
        assert tokenizer.eot not in ids and tokenizer.encode_array(text).tolist() == ids
    assert tokenizer.encode_array(texts[0]).dtype == "uint32"
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"
    assert tokenizer.decode([*tokenizer.encode("ab"), 100_000]) == "ab"
    assert tokenizer.decode([tokenizer.encode("\U0001f642")[-1]]) == "\ufffd"  # the last of its bytes


def test_a_run_keeps_a_folders_tokenizer(folder: Path, texts: list[str], tmp_path: Path) -> None:
    tokenizer = read_tokenizer(folder)
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert isinstance(loaded, FolderTokenizer) and loaded.fingerprint == tokenizer.fingerprint
    assert loaded.encode(texts[1]) == tokenizer.encode(texts[1]) and loaded.eot == tokenizer.eot
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["definition"]["model"]["merges"].pop()
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="fingerprint"):
        load_tokenizer(tmp_path)
    export_tokenizer(tokenizer, tmp_path, 99_999)
    assert read_tokenizer(tmp_path).encode(texts[1]) == tokenizer.encode(texts[1])


@pytest.mark.parametrize("name", ("bytes", "bpe", "gpt2", "cl100k_base", "o200k_base"))
def test_autotokenizer_gives_our_ids(
    name: str, texts: list[str], corpus: list[str], request: pytest.FixtureRequest, tmp_path: Path, monkeypatch
) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    if name in ("bpe", "gpt2"):
        tokenizer = request.getfixturevalue(name)
    elif name == "bytes":
        tokenizer = build_tokenizer(TokenizerConfig("bytes"))
    else:
        ranks = request.getfixturevalue("bpe").encoding._mergeable_ranks
        monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: ranks)
        pattern = getattr(openai_public, name)()["pat_str"]
        special = {"<|fim_prefix|>": 720, "<|endoftext|>": 710}  # ids with gaps before them, as cl100k_base has
        tokenizer = Tokenizer(tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special))
    export_tokenizer(tokenizer, tmp_path, 99_999)
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in [*texts, *MORE, *corpus]:
        ids = tokenizer.encode(text)
        assert auto(text)["input_ids"] == ids
        assert auto.decode(ids) == text
    assert auto.bos_token_id == auto.eos_token_id == tokenizer.eot
    assert auto.model_max_length == 99_999
    recognised = read_tokenizer(tmp_path)
    assert recognised.eot == tokenizer.eot and (recognised.fingerprint == tokenizer.fingerprint) == (name == "gpt2")
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: Path(tmp_path, name).read_text())  # OSError, as without network
    assert read_tokenizer(tmp_path).name == "hf"


def test_a_split_that_cannot_be_repeated_is_refused(bpe: Tokenizer, tmp_path: Path) -> None:
    ranks = bpe.encoding._mergeable_ranks
    odd = tiktoken.Encoding("odd", pat_str=r"(?i)they|\S+|\s++", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 710})
    tokenizer = Tokenizer(odd)
    export_tokenizer(tokenizer, tmp_path, 10)  # this one can be
    tokenizer.encode = lambda text: [1, 2]
    with pytest.raises(ValueError, match="tokenizer=false"):
        export_tokenizer(tokenizer, tmp_path, 10)


def test_wrong_folders_are_one_line(folder: Path, corpus: list[str], tmp_path: Path) -> None:
    words = HFTokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    words.add_special_tokens(["[SEP]"])
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "tokenizer.json").write_text("{")
    (tmp_path / "ours").mkdir()
    build_tokenizer(TokenizerConfig("bytes")).save(tmp_path / "ours")
    nameless = folder_of(byte_level(corpus), tmp_path / "nameless")
    (nameless / "config.json").write_text(json.dumps({"bos_token_id": None, "eos_token_id": [9999, 3]}))
    for path, message in (
        (tmp_path, "has no tokenizer.json"),
        (tmp_path / "damaged", "is damaged"),
        (tmp_path / "ours", "not a file of the package 'tokenizers'"),
        (folder_of(words, tmp_path / "words", eos_token="x"), "neither a bos nor an eos"),
        (nameless, "neither a bos nor an eos"),
        (folder_of(words, tmp_path / "named", eos_token="[SEP]"), "decodes by .'WordPiece'."),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            read_tokenizer(path)
        assert "\n" not in str(caught.value)
    (nameless / "config.json").write_text(json.dumps({"bos_token_id": None, "eos_token_id": [1, 3]}))
    assert read_tokenizer(nameless).eot == 1
    for cfg in (TokenizerConfig("hf"), TokenizerConfig("gpt2", path=str(folder))):
        with pytest.raises(ValueError, match="give both"):
            build_tokenizer(cfg)


def test_dropout_is_off(corpus: list[str], tmp_path: Path) -> None:
    hf = byte_level(corpus)
    hf.model.dropout = 0.5
    tokenizer = read_tokenizer(folder_of(hf, tmp_path, eos_token="<|endoftext|>"))
    assert len({tuple(tokenizer.encode("the tokenizers of the text")) for _ in range(20)}) == 1


def test_tokens_that_do_not_hold_the_text_are_refused(corpus: list[str], tmp_path: Path, capsys) -> None:
    """Without a token for a space, spaces become <unk>, whose bytes are not those of the text."""
    content = json.loads(sentencepiece(corpus).to_str())
    content["model"]["byte_fallback"] = False
    for token in [token for token in content["model"]["vocab"] if token == "▁" or token.startswith("<0x")]:
        del content["model"]["vocab"][token]
    content["model"]["merges"] = [pair for pair in content["model"]["merges"] if "▁" not in pair]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    with pytest.raises(ValueError, match="changes the text: .* use a byte-level tokenizer"):
        read_tokenizer(tmp_path)
    lower = byte_level(corpus)
    lower.normalizer = normalizers.Lowercase()
    (tmp_path / "text.txt").write_text("A Text. " * 100)
    cfg = DataConfig(name="mine", source="text", path=str(tmp_path / "text.txt"), dir=str(tmp_path / "shards"))
    cfg.tokenizer = TokenizerConfig("hf", path=str(folder_of(lower, tmp_path / "lower", eos_token="<|endoftext|>")))
    prepare(cfg)
    assert "this tokenizer changes the text, for example its case" in capsys.readouterr().out
