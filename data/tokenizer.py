"""Tokenizers: the published tiktoken encodings, byte-level BPE trained on the corpus, and plain bytes.

Every one of them is a `tiktoken.Encoding` underneath, so there is one encoder, one decoder and one notion of identity
(the fingerprint that shards and checkpoints carry).
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tiktoken

if TYPE_CHECKING:
    from data.config import TokenizerConfig

EOT = "<|endoftext|>"
FILE = "tokenizer.json"

# GPT-4's split (cl100k_base), but numbers go by pairs of digits: one rule spells every number. Single digits recur too
# often within one number for a small model to keep their order when it copies, longer groups are too many to learn.
BPE_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES_PATTERN = r"[\s\S]"


class Tokenizer:
    """Text to token ids and back. `vocab_size` counts the end-of-text token `eot`, which `encode` never emits.

    `fingerprint` is the SHA-256 (hex) of token bytes, split pattern and special tokens: equal ones mean equal ids.
    """

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self.encoding = encoding
        self.name: str = encoding.name
        self.vocab_size: int = encoding.n_vocab
        self.eot: int = encoding.eot_token
        self.fingerprint: str = _fingerprint(encoding)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`. Special tokens written out in the text are encoded as ordinary text."""
        return self.encoding.encode_ordinary(text)

    def encode_array(self, text: str) -> np.ndarray:
        """As `encode`, returned as (tokens,) uint32. Keeps the GIL free, so threads scale."""
        text = text.encode("utf-8", "replace").decode("utf-8") if not text.isascii() else text  # lone surrogates -> ?
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def encode_batch(self, texts: Sequence[str], threads: int | None = None) -> list[list[int]]:
        """As `encode` for many texts, on `threads` threads (default: all cores)."""
        return self.encoding.encode_ordinary_batch(list(texts), num_threads=threads or os.cpu_count() or 1)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return self.encoding.decode([int(i) for i in ids])

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token stands for (`eot` spells itself out). KeyError for an id no token has."""
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
        if self.name == "bpe":
            ranks = self.encoding._mergeable_ranks
            content["pattern"] = self.encoding._pat_str
            content["tokens"] = [base64.b64encode(piece).decode() for piece in sorted(ranks, key=ranks.__getitem__)]
        path = Path(folder) / FILE
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(temporary, path)


def load_tokenizer(folder: str | Path, foreign: TokenizerConfig | None = None) -> Tokenizer:
    """The tokenizer saved in `folder`. FileNotFoundError if there is none, ValueError if it is not what it says it is.

    `foreign` is the tokenizer to take where `folder` has shards but no tokenizer.json (llm.c, modded-nanogpt).
    """
    path = Path(folder) / FILE
    if not path.is_file():
        if foreign is not None and any(Path(folder).glob("*.bin")):
            return build_tokenizer(foreign)
        raise FileNotFoundError(f"no {FILE} in {folder}: prepare the data first with python -m data.prepare data=NAME")
    try:
        content = json.loads(path.read_text())
        name, fingerprint = content["name"], content["fingerprint"]
        tokens = [base64.b64decode(token) for token in content["tokens"]] if name == "bpe" else None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is not a tokenizer file: delete {folder} and prepare the data again") from None
    tokenizer = Tokenizer(_bpe_encoding(tokens, content["pattern"]) if tokens else _encoding(name))
    if tokenizer.fingerprint != fingerprint:
        raise ValueError(f"{path} does not match its fingerprint: delete {folder} and prepare the data again")
    return tokenizer


def build_tokenizer(cfg: TokenizerConfig, texts: Iterable[str] | None = None) -> Tokenizer:
    """The tokenizer `cfg` asks for; `bpe` is trained on `texts` and depends on nothing else."""
    if cfg.name != "bpe":
        if cfg.vocab_size is not None:
            raise ValueError(f"tokenizer {cfg.name} has a fixed vocabulary: leave data.tokenizer.vocab_size=null")
        return Tokenizer(_encoding(cfg.name))
    if texts is None:
        raise ValueError("a bpe tokenizer is trained on text: run python -m data.prepare with data.tokenizer.name=bpe")
    size = cfg.vocab_size or 4096
    if size < 258:
        raise ValueError(f"vocab_size {size} is too small for bpe: use data.tokenizer.vocab_size=258 or more")
    return Tokenizer(_bpe_encoding(_train_bpe(texts, size), BPE_PATTERN))


def _encoding(name: str) -> tiktoken.Encoding:
    if name == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding("bytes", pat_str=BYTES_PATTERN, mergeable_ranks=ranks, special_tokens={EOT: 256})
    known = tiktoken.list_encoding_names()
    if name not in known:
        raise ValueError(f"unknown tokenizer '{name}': use data.tokenizer.name= one of bpe, bytes, {', '.join(known)}")
    try:
        return tiktoken.get_encoding(name)
    except OSError:  # requests' errors are OSErrors
        raise ValueError(
            f"cannot download the vocabulary of {name}: set TIKTOKEN_CACHE_DIR to a folder that has it, "
            "or use data.tokenizer.name=bpe"
        ) from None


def _bpe_encoding(tokens: list[bytes], pattern: str) -> tiktoken.Encoding:
    ranks = {piece: rank for rank, piece in enumerate(tokens)}
    return tiktoken.Encoding("bpe", pat_str=pattern, mergeable_ranks=ranks, special_tokens={EOT: len(tokens)})


def _fingerprint(encoding: tiktoken.Encoding) -> str:
    digest = hashlib.sha256(encoding._pat_str.encode())
    for piece, rank in sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1]):
        digest.update(b"%d %s\n" % (rank, piece.hex().encode()))
    digest.update(json.dumps(encoding._special_tokens, sort_keys=True).encode())
    return digest.hexdigest()


def _numbers() -> Iterator[str]:
    """Text in which every pair of digits is frequent enough to become a token, with a space before it and without."""
    return (" ".join(("", *(f"{number:04}" for number in range(10_000)))) for _ in range(5))


def _train_bpe(texts: Iterable[str], vocab_size: int) -> list[bytes]:
    """Token bytes in rank order, without the end-of-text token: ids 0..255 are the bytes themselves."""
    try:
        from tokenizers import Regex, models, pre_tokenizers, trainers
        from tokenizers import Tokenizer as HFTokenizer
    except ImportError:
        raise ValueError("training bpe needs the package 'tokenizers': pip install tokenizers") from None
    hf = HFTokenizer(models.BPE())
    hf.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(BPE_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
    hf.train_from_iterator(itertools.chain(texts, _numbers() if vocab_size >= 1024 else ()), trainer)
    vocab = hf.get_vocab()
    if len(vocab) < vocab_size - 1:
        raise ValueError(
            f"the text is too small for {vocab_size} bpe tokens: use data.tokenizer.vocab_size={len(vocab) + 1} or less"
        )
    to_byte = _byte_level_alphabet()
    merged = [bytes(to_byte[c] for c in piece) for piece in sorted(vocab, key=vocab.__getitem__)]
    return [bytes([i]) for i in range(256)] + [piece for piece in merged if len(piece) > 1]


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes (openai/gpt-2, encoder.py: bytes_to_unicode), inverted."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
