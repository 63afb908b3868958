"""Tokenizers: the published tiktoken encodings, byte-level BPE trained on the corpus, plain bytes, and those of other models.

All but the last kind wrap a `tiktoken.Encoding`; the package `tokenizers` runs a model folder's tokenizer.json. Every
tokenizer has a fingerprint, which shards and checkpoints record.
"""

import base64
import contextlib
import functools
import hashlib
import importlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import tiktoken

from configs.files import read_json_object, write_json
from data.config import TokenizerConfig
from data.shards import AGAIN

EOT = "<|endoftext|>"
FILE = "tokenizer.json"

# GPT-4's split pattern (cl100k_base), except that numbers take the space before them and split into pairs of digits. A single
# digit recurs too often within one number for a small model to copy digits in order; longer groups are too many to learn.
BPE_PATTERN = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTES_PATTERN = r"[\s\S]"
BPE_TOKENS = 4096  # the vocabulary of a bpe without data.tokenizer.vocab_size
UNSET = {"tokenizer.path": None, "tokenizer.vocab_size": BPE_TOKENS, "tokenizer.special": False}  # what null stands for
WITH_NUMBERS = 1024  # the smallest vocabulary of a bpe that is sure to have all pairs of digits
PIECE = 2**20  # characters; longer documents are tokenized in pieces, so that all threads work on one book
LONE_NEWLINE, LONE_SPACE = re.compile(r"(?<=\S)\n(?=[^\s/])"), re.compile(r"(?<=[a-z])(?= [a-z])")
# Text on which tokenizers that split or merge differently disagree.
ASCII = "It's 1859;\tthey'LL say   so.\r\n\n  if x12345 >= 0.5:\n\n\n"
SAMPLE = ASCII + "na\u00efve \u4f60\u597d \U0001f642 \u0661\u0662 \u216b _a_b \u00a0\u200b e\u0301\n \n "


def pieces(text: str, size: int = PIECE) -> Iterator[str]:
    """Cut a long document only where the split pattern of every tokenizer splits, too, so the tokens stay the same: after a
    lone newline within text (not before a slash: o200k_base), or, where none is near, before the space between two words.
    """
    start = 0
    while len(text) - start > size:
        near = LONE_NEWLINE.search(text, start + size, start + 2 * size)
        lone = near or LONE_SPACE.search(text, start + size) or LONE_NEWLINE.search(text, start + size)
        if lone is None:
            break
        yield text[start : lone.end()]
        start = lone.end()
    if start < len(text):
        yield text[start:]


class Tokenizer:
    """Text to token ids and back. `vocab_size` counts the end-of-text token `eot`, which `encode` never emits, unless a text
    names it and `special` is true: then special tokens that are written out in a text become these tokens.

    `fingerprint` is the SHA-256 (hex) of token bytes, split pattern and special tokens; if it is equal, ids are equal.
    """

    special = False

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self.encoding = encoding
        self.name: str = encoding.name
        self.vocab_size: int = encoding.n_vocab
        self.eot: int = encoding.eot_token
        digest = hashlib.sha256(encoding._pat_str.encode())
        for piece, rank in sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1]):
            digest.update(b"%d %s\n" % (rank, piece.hex().encode()))
        digest.update(json.dumps(encoding._special_tokens, sort_keys=True).encode())
        self.fingerprint: str = digest.hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of `text`."""
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> np.ndarray:
        """As `encode`, returned as (tokens,) uint32, without the GIL, so threads scale."""
        return self.encoding.encode_to_numpy(_valid(text), disallowed_special=())

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. Ids without a token (of a wider model) are left out."""
        return self.encoding.decode([int(i) for i in ids if int(i) in self._ids])

    @functools.cached_property
    def _ids(self) -> frozenset[int]:
        return frozenset((*self.encoding._mergeable_ranks.values(), *self.encoding._special_tokens.values()))

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token (of `eot`: its name). KeyError: no token has this id."""
        return self.encoding.decode_single_token_bytes(int(token))

    def byte_lengths(self) -> np.ndarray:
        """(vocab_size,) int64: bytes per token, for bits per byte. Special and unused ids count 0."""
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for piece, rank in self.encoding._mergeable_ranks.items():
            lengths[rank] = len(piece)
        return lengths

    def save(self, folder: str | Path) -> None:
        """Write `tokenizer.json` into `folder`: names for published encodings, all tokens for a trained one."""
        content = {"name": self.name, "vocab_size": self.vocab_size, "eot": self.eot, "fingerprint": self.fingerprint}
        write_json(Path(folder) / FILE, content | self._definition())

    def _definition(self) -> dict[str, Any]:
        if self.name != "bpe":
            return {}
        ranks = self.encoding._mergeable_ranks
        tokens = [base64.b64encode(piece).decode() for piece in sorted(ranks, key=ranks.__getitem__)]
        return {"pattern": self.encoding._pat_str, "tokens": tokens}


class FolderTokenizer(Tokenizer):
    """The tokenizer.json of a model folder, run by the package `tokenizers`; its kind is byte-level or sentencepiece.

    Sentencepiece puts a space before a text, which `decode` removes and `byte_lengths` counts.
    """

    def __init__(self, definition: dict[str, Any], eot: int, source: str | Path = FILE, special: bool = False) -> None:
        tokenizers = import_optional("tokenizers", str(source))
        self.definition = definition
        decides = {**definition, "truncation": None, "padding": None, "post_processor": None}
        if definition["model"].get("dropout"):  # else a text would have other tokens each time
            decides["model"] = {**definition["model"], "dropout": None}
        try:
            self.hf = tokenizers.Tokenizer.from_str(json.dumps(decides))
        except Exception as error:  # the package raises plain Exception
            raise ValueError(f"{source} is not a tokenizer that 'tokenizers' runs ({error}): save it again") from None
        self.special = special
        self.hf.encode_special_tokens = not special
        self.name, self.eot = "hf", eot
        self.tokens: dict[int, str] = {token: text for text, token in self.hf.get_vocab(with_added_tokens=True).items()}
        self.vocab_size = max(self.tokens) + 1
        self.added = {token["id"]: token for token in definition.get("added_tokens") or ()}
        self.byte_level = _is_byte_level(definition, source)
        what = [decides, eot, special] if special else [decides, eot]  # the fingerprint of older files has no third part
        self.fingerprint = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()

    def encode_array(self, text: str) -> np.ndarray:
        (encoded,) = self.hf.encode_batch_fast([_valid(text)], add_special_tokens=False)
        return np.array(encoded.ids, dtype=np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        known = [int(i) for i in ids if int(i) in self.tokens]
        if self.byte_level:  # the package's decoder takes an added token's letters for bytes
            return b"".join(map(self.token_bytes, known)).decode("utf-8", "replace")
        return self.hf.decode(known, skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        text = self.tokens[int(token)]
        if int(token) in self.added:
            return text.encode()
        if self.byte_level and BYTE_OF.keys() >= set(text):
            return bytes(BYTE_OF[character] for character in text)
        if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", text):
            return bytes.fromhex(byte[1])
        return text.replace("\u2581", " ").encode()  # sentencepiece's sign for a space

    def byte_lengths(self) -> np.ndarray:
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token in self.tokens:
            if token != self.eot and (self.special or not self.added.get(token, {}).get("special")):
                lengths[token] = len(self.token_bytes(token))
        return lengths

    def _definition(self) -> dict[str, Any]:
        return {"definition": self.definition, "special": self.special}


def read_tokenizer(folder: str | Path, special: bool = False) -> Tokenizer:
    """The tokenizer of a transformers model folder (tokenizer.json, tokenizer_config.json) as one of ours.

    GPT-2's becomes the tiktoken encoding `gpt2` if tiktoken has its file, so shards of that encoding fit.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        raise ValueError(f"{folder} has no {FILE}: write it with AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)")
    definition = _read_json(path)
    if "model" not in definition or "version" not in definition:
        raise ValueError(f"{path} is not a file of the package 'tokenizers': give the folder of a transformers model")
    tokenizer = FolderTokenizer(definition, _eot(Path(folder), definition), path, special)
    check_bytes(tokenizer, ASCII)
    if not special and (tokenizer.vocab_size, tokenizer.eot) == (50257, 50256):
        with contextlib.suppress(ValueError):  # without tiktoken's file, use the folder's tokenizer
            gpt2 = Tokenizer(_encoding("gpt2"))
            ranks = {tokenizer.token_bytes(token): token for token in tokenizer.tokens if token != gpt2.eot}
            if ranks == gpt2.encoding._mergeable_ranks and tokenizer.encode(SAMPLE) == gpt2.encode(SAMPLE):
                return gpt2
    return tokenizer


def check_bytes(tokenizer: Tokenizer, text: str) -> None:
    """ValueError if the tokens of `text` have over 1 % more or fewer bytes than `text`, not counting a space put in front."""
    counted, size = int(tokenizer.byte_lengths()[tokenizer.encode(text)].sum()), len(_valid(text).encode())
    if abs(counted - size) > 1 + size / 100:  # bits per byte would be wrong by as much
        fix = "use a byte-level tokenizer, or a sentencepiece tokenizer with byte fallback"
        raise ValueError(f"tokenizer {tokenizer.name} changes the text: {size} bytes became tokens of {counted} bytes: {fix}")


def _read_json(path: Path) -> dict[str, Any]:
    return read_json_object(path, "copy it again") if path.is_file() else {}


def _eot(folder: Path, definition: dict[str, Any]) -> int:
    """The id of the bos token, else of the eos token; tokenizer_config.json names it, or else config.json."""
    ids = {token["content"]: token["id"] for token in definition.get("added_tokens") or ()}
    named, numbered = _read_json(folder / "tokenizer_config.json"), _read_json(folder / "config.json")
    for kind in ("bos", "eos"):
        token, number = named.get(f"{kind}_token"), numbered.get(f"{kind}_token_id")
        token = token.get("content") if isinstance(token, dict) else token
        number = number[0] if isinstance(number, list) and number else number
        if token in ids:
            return ids[token]
        if token is None and number in ids.values():
            return number
    raise ValueError(f"{folder} names neither a bos nor an eos token: add one to its tokenizer_config.json")


def _is_byte_level(definition: dict[str, Any], source: str | Path) -> bool:
    """True if token texts are GPT-2's printable letters for bytes, False for sentencepiece. ValueError: other kinds."""
    decoder = definition.get("decoder") or {}
    kinds = {part.get("type") for part in (decoder, *(decoder.get("decoders") or ()))}
    if not kinds & {"ByteLevel", "Metaspace", "ByteFallback"}:
        raise ValueError(f"{source} decodes by {kinds}: use a model with a byte-level or sentencepiece tokenizer")
    return "ByteLevel" in kinds


def _valid(text: str) -> str:
    """`text` with a question mark for each lone surrogate, which UTF-8 cannot encode."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def load_tokenizer(folder: str | Path, foreign: TokenizerConfig | None = None) -> Tokenizer:
    """The tokenizer saved in `folder`. FileNotFoundError if there is none; ValueError if its file is damaged or edited.

    foreign: the tokenizer of shards without tokenizer.json (llm.c, nanoGPT); bpe, which only we train, then means gpt2.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        if foreign is not None and any(Path(folder).glob("*.bin")):
            return build_tokenizer(TokenizerConfig("gpt2") if foreign.name == "bpe" else foreign)
        raise FileNotFoundError(f"no {FILE} in {folder}: prepare the data first with python -m data.prepare data=NAME")
    content = read_json_object(path, AGAIN)
    try:
        name = content["name"]
        if name == "hf":
            tokenizer: Tokenizer = FolderTokenizer(content["definition"], content["eot"], path, content.get("special", False))
        elif name == "bpe":
            tokenizer = Tokenizer(_encoding_of("bpe", list(map(base64.b64decode, content["tokens"])), content["pattern"]))
        else:
            tokenizer = Tokenizer(_encoding(name))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): {AGAIN}") from None
    if tokenizer.fingerprint != content.get("fingerprint"):
        raise ValueError(f"{path} does not match its fingerprint: {AGAIN}")
    return tokenizer


def build_tokenizer(cfg: TokenizerConfig, texts: Iterable[str] = ()) -> Tokenizer:
    """The tokenizer `cfg` asks for; `bpe` is trained on `texts` and depends on nothing else."""
    if cfg.special and cfg.name != "hf":
        raise ValueError(f"data.tokenizer.special is for data.tokenizer.name=hf alone, not {cfg.name}: leave it false")
    if (cfg.name == "hf") != (cfg.path is not None):
        raise ValueError("data.tokenizer.name=hf and data.tokenizer.path=FOLDER belong together: give both, or neither")
    if cfg.name != "bpe":
        if cfg.vocab_size is not None:
            raise ValueError(f"tokenizer {cfg.name} has a fixed vocabulary: leave data.tokenizer.vocab_size=null")
        return read_tokenizer(cfg.path, cfg.special) if cfg.path else Tokenizer(_encoding(cfg.name))
    return Tokenizer(_encoding_of("bpe", _train_bpe(texts, cfg.vocab_size or BPE_TOKENS), BPE_PATTERN))


def _encoding(name: str) -> tiktoken.Encoding:
    if name == "bytes":
        return _encoding_of("bytes", [bytes([i]) for i in range(256)], BYTES_PATTERN)
    known = tiktoken.list_encoding_names()
    if name not in known:
        raise ValueError(f"unknown tokenizer '{name}': use data.tokenizer.name= one of bpe, bytes, hf, {', '.join(known)}")
    try:
        with mock.patch("tiktoken.load.os.remove"):  # tiktoken deletes a cut file before it knows whether a whole one comes
            return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; ValueError: what came is not the file
        reason, folder = str(error).splitlines()[0][:160], os.environ.get("TIKTOKEN_CACHE_DIR", "is not set")
        wrong = f"no whole copy of the vocabulary of {name} is in TIKTOKEN_CACHE_DIR ({folder}) or comes by download ({reason})"
        fix = "set TIKTOKEN_CACHE_DIR to a folder that has it, or use data.tokenizer.name=bpe"
        raise ValueError(f"{wrong}: {fix}") from None


def _encoding_of(name: str, tokens: list[bytes], pattern: str) -> tiktoken.Encoding:
    ranks = {piece: rank for rank, piece in enumerate(tokens)}
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={EOT: len(tokens)})


def tokenizer_of_words(words: Sequence[str]) -> Tokenizer:
    """A tokenizer that knows these words alone: word i is token i, end-of-text comes last. It is saved as a bpe is."""
    pattern = "|".join(rf"{re.escape(word)}\b" for word in words)
    return Tokenizer(_encoding_of("bpe", [word.encode() for word in words], pattern))


def _train_bpe(texts: Iterable[str], vocab_size: int) -> list[bytes]:
    """Token bytes in rank order, without the end-of-text token: ids 0..255 are the bytes themselves."""
    tokenizers = import_optional("tokenizers", "training bpe")
    hf = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(BPE_PATTERN), behavior="isolated")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    hf.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, byte_level])
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
    # These make every pair of digits frequent enough to become a token, with a space before it and without.
    numbers = " ".join(("", *(f"{number:04}" for number in range(10_000))))
    hf.train_from_iterator(itertools.chain(map(_valid, texts), [numbers] * (5 if vocab_size >= WITH_NUMBERS else 0)), trainer)
    vocab = hf.get_vocab()
    if len(vocab) < vocab_size - 1:
        fix = f"use a data.tokenizer.vocab_size below {len(vocab) + 1}, or data.tokenizer.name=bytes"
        raise ValueError(f"the text is too small for {vocab_size} bpe tokens: {fix}")
    merged = [bytes(BYTE_OF[c] for c in piece) for piece in sorted(vocab, key=vocab.__getitem__)]
    return [bytes([i]) for i in range(256)] + [piece for piece in merged if len(piece) > 1]


def import_optional(module: str, what: str) -> ModuleType:
    """Import an optional package where it is used; ValueError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".")[0]
        raise ValueError(f"{what} needs the package '{package}': pip install {package}") from None


# GPT-2's printable letter for each byte, as {letter: byte} (openai/gpt-2, encoder.py: bytes_to_unicode).
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
