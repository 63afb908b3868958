"""Tokenizers of other models' folders as ours, and ours as transformers' AutoTokenizer reads them."""

import json
import string
from pathlib import Path

import pytest
import tiktoken
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as HFTokenizer

from data.config import DataConfig, TokenizerConfig
from data.prepare import prepare
from data.tokenizer import SAMPLE, FolderTokenizer, build_tokenizer, load_tokenizer, read_tokenizer
from data.tokenizer_export import export_tokenizer
from tests.data.test_tokenizer import split_by

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


@pytest.fixture(scope="module")
def sentencepiece_folder(corpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}
    return folder_of(sentencepiece(corpus), tmp_path_factory.mktemp("sentencepiece"), **names)


@pytest.fixture(scope="module")
def byte_level_folder(corpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(byte_level(corpus), tmp_path_factory.mktemp("bytes"), bos_token=None, eos_token="<|endoftext|>")


@pytest.fixture(params=["sentencepiece_folder", "byte_level_folder"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def test_a_folders_tokenizer_is_one_of_ours(folder: Path, texts: list[str]) -> None:
    tokenizer = read_tokenizer(folder)
    hf = HFTokenizer.from_file(str(folder / "tokenizer.json"))
    hf.no_truncation()
    assert (tokenizer.decode([tokenizer.eot]), tokenizer.name) in (("<s>", "hf"), ("<|endoftext|>", "hf"))
    space = b"" if tokenizer.byte_level else b" "  # sentencepiece puts one before the text
    lengths = tokenizer.byte_lengths()
    assert lengths.shape == (tokenizer.vocab_size,) and lengths[tokenizer.eot] == 0
    for text in [*texts, *MORE]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        if text in texts and "<|" not in text:  # there, special tokens in a text are special
            assert ids == hf.encode(text, add_special_tokens=False).ids
        written = space + text.encode() if text else b""
        assert b"".join(map(tokenizer.token_bytes, ids)) == written and lengths[ids].sum() == len(written)
        assert tokenizer.eot not in ids and tokenizer.encode_array(text).tolist() == ids
    assert tokenizer.encode_array(texts[0]).dtype == "uint32"
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"
    assert tokenizer.decode([*tokenizer.encode("ab"), 100_000]) == "ab"
    assert tokenizer.decode([tokenizer.encode("\U0001f642")[-1]]) == "\ufffd"  # the last of its bytes


def test_a_run_keeps_a_folders_tokenizer_and_data_is_prepared_with_it(folder: Path, texts: list[str], tmp_path: Path) -> None:
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

    (tmp_path / "text.txt").write_text("\n".join(texts[:2]) * 20)
    cfg = DataConfig(name="mine", source="text", path=str(tmp_path / "text.txt"), dir=str(tmp_path / "shards"))
    cfg.tokenizer, cfg.val_fraction = TokenizerConfig("hf", path=str(folder)), 0.1
    meta = prepare(cfg)
    assert meta["tokenizer"]["fingerprint"] == tokenizer.fingerprint == load_tokenizer(cfg.dir).fingerprint
    assert prepare(cfg) == meta
    for key, value in (("special", True), ("path", "another")):
        setattr(cfg.tokenizer, key, value)
        with pytest.raises(ValueError, match=f"tokenizer.{key}"):
            prepare(cfg)


def test_special_tokens_written_out_in_a_text_are_text_or_tokens(byte_level_folder: Path, tmp_path: Path) -> None:
    text, plain = "<|im_start|>user\n", read_tokenizer(byte_level_folder)
    tokenizer = build_tokenizer(TokenizerConfig("hf", path=str(byte_level_folder), special=True))
    (token,) = (token for token, name in tokenizer.tokens.items() if name == "<|im_start|>")
    assert tokenizer.encode(text) == [token, *plain.encode("user\n")] and token not in plain.encode(text)
    assert tokenizer.byte_lengths()[tokenizer.encode(text)].sum() == len(text) and tokenizer.decode([token]) == "<|im_start|>"
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode(text) == tokenizer.encode(text) and loaded.fingerprint != plain.fingerprint


@pytest.mark.parametrize("name", ("bytes", "bpe", "gpt2", "cl100k_base", "o200k_base", "folder"))
def test_autotokenizer_gives_our_ids(
    name: str, texts: list[str], request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    if name == "folder":
        tokenizer = read_tokenizer(request.getfixturevalue("sentencepiece_folder"))
    elif name == "bytes":
        tokenizer = build_tokenizer(TokenizerConfig("bytes"))
    else:
        tokenizer = split_by(name, monkeypatch) if name.endswith("_base") else request.getfixturevalue(name)
    export_tokenizer(tokenizer, tmp_path, 99_999)
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in [*texts, *MORE, Path(__file__).read_text()]:
        ids = tokenizer.encode(text)
        assert exported(text)["input_ids"] == ids and (name == "folder" or exported.decode(ids) == text)
    assert exported.bos_token_id == exported.eos_token_id == tokenizer.eot
    assert exported.model_max_length == 99_999
    recognised = read_tokenizer(tmp_path)
    assert recognised.eot == tokenizer.eot and (recognised.fingerprint == tokenizer.fingerprint) == (name in ("gpt2", "folder"))
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: Path(tmp_path, name).read_text())  # OSError, as without network
    assert read_tokenizer(tmp_path).name == "hf"


def test_wrong_folders_are_one_line(byte_level_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = HFTokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    words.add_special_tokens(["[SEP]"])
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "tokenizer.json").write_text("{")
    hf = HFTokenizer.from_file(str(byte_level_folder / "tokenizer.json"))
    nameless, foreign = (folder_of(hf, tmp_path / name) for name in ("nameless", "foreign"))
    (foreign / "config.json").write_text(json.dumps({"bos_token_id": None, "eos_token_id": [9999, 3]}))
    for path, message in (
        (tmp_path / "damaged", "is damaged"),
        (folder_of(words, tmp_path / "words", eos_token="[SEP]"), "decodes by .*WordPiece"),
        (nameless, "neither a bos nor an eos"),
        (foreign, "neither a bos nor an eos"),
    ):
        with pytest.raises(ValueError, match=message):
            read_tokenizer(path)
    special = next(iter(hf.get_added_tokens_decoder()))
    (nameless / "config.json").write_text(json.dumps({"bos_token_id": None, "eos_token_id": [special, 3]}))
    assert read_tokenizer(nameless).eot == special
    hf.model.dropout = 0.5  # is off
    tokenizer = read_tokenizer(folder_of(hf, tmp_path / "dropout", eos_token="<|endoftext|>"))
    assert len({tuple(tokenizer.encode("the tokenizers of the text")) for _ in range(20)}) == 1
    monkeypatch.setattr(tokenizer, "encode", lambda text: [1, 2])
    with pytest.raises(ValueError, match="tokenizer=false"):  # a split that cannot be repeated
        export_tokenizer(tokenizer, tmp_path, 10)


def test_tokens_that_do_not_hold_the_text_are_refused(sentencepiece_folder: Path, tmp_path: Path) -> None:
    """Without a token for a space, spaces become <unk>, whose bytes are not those of the text."""
    content = json.loads((sentencepiece_folder / "tokenizer.json").read_text())
    content["model"]["byte_fallback"] = False
    for token in [token for token in content["model"]["vocab"] if token == "▁" or token.startswith("<0x")]:
        del content["model"]["vocab"][token]
    content["model"]["merges"] = [pair for pair in content["model"]["merges"] if "▁" not in pair]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    letters = [(letter, -2.0) for letter in string.ascii_letters]
    no_digits = HFTokenizer(models.Unigram([("<unk>", 0.0), ("▁", -1.0), *letters], unk_id=0))
    no_digits.pre_tokenizer, no_digits.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    no_digits.add_special_tokens(["<unk>"])
    for folder in (tmp_path, folder_of(no_digits, tmp_path / "unigram", bos_token="<unk>")):
        with pytest.raises(ValueError, match="changes the text: .* use a byte-level tokenizer"):
            read_tokenizer(folder)


def test_a_tokenizer_that_changes_the_case_is_said(byte_level_folder: Path, texts: list[str], tmp_path: Path, capsys) -> None:
    hf = HFTokenizer.from_file(str(byte_level_folder / "tokenizer.json"))
    hf.normalizer = normalizers.Lowercase()
    path = tmp_path / "text.txt"
    path.write_text("\n".join(["Upper and lower", *texts[:2]]) * 20)
    tokenizer = TokenizerConfig("hf", path=str(folder_of(hf, tmp_path / "lower", eos_token="<|endoftext|>")))
    prepare(DataConfig(name="mine", source="text", path=str(path), dir=str(tmp_path / "shards"), tokenizer=tokenizer))
    assert "this tokenizer changes the text" in capsys.readouterr().out
