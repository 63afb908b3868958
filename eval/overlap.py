"""Overlap of a test text with the training text: the share of its different 13-word sequences that occur in training.

The measure of GPT-3's contamination study (arXiv 2005.14165, appendix C): words are runs of letters and digits in lower case.
Each Chinese or Japanese character counts as a word.
"""

import hashlib
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from configs.files import read_json_object, write_json
from data.config import DataConfig
from data.shards import Shard, open_split
from data.stream import open_tokenizer
from data.tokenizer import Tokenizer
from eval.common import content_of, read_documents

WORDS = 13
MOST = 0.01  # largest share of a test text's sequences that may occur in training
_RULES = 2  # the version of what a word is: another number makes results in saved files count as not computed
_ALONE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # kana and Chinese characters
_WORD = re.compile(rf"[{_ALONE}]|[^\W{_ALONE}]+")
_PRIME = np.uint64(0x9E3779B97F4A7C15)


def sequence_codes(text: bytes, before: Sequence[int] = ()) -> tuple[np.ndarray, Sequence[int]]:
    """(n,) uint64 codes of a UTF-8 text's word sequences, and the hashes of its last words, as `before` of the next call."""
    hashes = [zlib.crc32(word.encode()) for word in _WORD.findall(text.decode(errors="ignore").lower())]
    words = np.array([*before, *hashes], dtype=np.uint64)
    codes = np.zeros(max(len(words) - WORDS + 1, 0), dtype=np.uint64)
    for i in range(WORDS):
        codes = codes * _PRIME + words[i : i + len(codes)]
    return codes, words[-(WORDS - 1) :]


def overlap(train: Sequence[Shard], tokenizer: Tokenizer, documents: Sequence[str]) -> float:
    """Share of the documents' different 13-word sequences that occur in the training shards; 0 for documents without one."""
    wanted = np.unique(np.concatenate([sequence_codes(document.encode(errors="replace"))[0] for document in documents]))
    if not len(wanted):
        return 0.0
    pieces = np.array([_bytes(tokenizer, token) for token in range(tokenizer.vocab_size)], dtype=object)
    seen = np.zeros(len(wanted), dtype=bool)
    for shard in train:
        tail: Sequence[int] = ()
        for tokens in content_of([shard]):
            codes, tail = sequence_codes(b"".join(pieces[tokens]), tail)
            seen |= np.isin(wanted, codes)
    return float(seen.mean())


def _bytes(tokenizer: Tokenizer, token: int) -> bytes:
    if token == tokenizer.eot:
        return b"\n"
    try:
        return tokenizer.token_bytes(token)
    except KeyError:  # the id is not a token
        return b""


def overlaps(data: DataConfig, texts: Mapping[str, str], kept: Path) -> dict[str, float]:
    """Name -> share, for each of `texts` (name -> file, folder or glob). Each is computed once and saved in the file `kept`."""
    tokenizer = open_tokenizer(data)
    train = open_split(Path(data.dir), "train", vocab_size=tokenizer.vocab_size, fingerprint=tokenizer.fingerprint)
    known = read_json_object(kept, "move it away") if kept.is_file() else {}
    shares = {}
    for name, text in texts.items():
        documents = read_documents(text)
        digest = hashlib.sha256("\0".join([str(_RULES), *documents]).encode(errors="replace"))
        for shard in train:
            digest.update(f"{shard.path.name} {len(shard)} {shard.crc32}".encode())
        key = digest.hexdigest()[:16]
        if key not in known:
            known[key] = overlap(train, tokenizer, documents)
            write_json(kept, known)
        shares[name] = known[key]
    return shares


def refuse_overlap(name: str, share: float) -> None:
    """Raise ValueError for a test text of which more than 1 % was trained on."""
    if share > MOST:
        wrong = f"{name}: {share:.1%} of its different {WORDS}-word sequences occur in the training text, more than {MOST:.0%}"
        raise ValueError(f"{wrong}: give a text that is not part of the training text")
