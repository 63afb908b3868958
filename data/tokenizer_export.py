"""Our tokenizers as the files that transformers' AutoTokenizer reads: tokenizer.json and tokenizer_config.json.

The vocabulary of a `tiktoken.Encoding` becomes a byte-level BPE of the package `tokenizers`. Tiktoken joins any two
neighbours that make a token, the earlier token first; so every split of a token into two tokens is a merge of its rank.
"""

import json
import re
from pathlib import Path

from data.tokenizer import FILE, SAMPLE, FolderTokenizer, Tokenizer, byte_level_alphabet

CONFIG = "tokenizer_config.json"


def export_tokenizer(tokenizer: Tokenizer, folder: str | Path, context: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, with which AutoTokenizer gives the ids of `tokenizer.encode`.

    context: tokens the model takes. Special tokens written out in a text are text, as they are for us; the begin and the
    end of a document are both `tokenizer.eot`, which AutoTokenizer leaves to its caller, as ours does. ValueError: the
    package `tokenizers` is missing, or cannot express the encoding's split pattern.
    """
    definition = tokenizer.definition if isinstance(tokenizer, FolderTokenizer) else _definition(tokenizer)
    definition = {**definition, "post_processor": None}  # would add tokens of its own
    ours, theirs = tokenizer.encode(SAMPLE), FolderTokenizer(definition, tokenizer.eot).encode(SAMPLE)
    if ours != theirs:
        wrong = f"the tokenizer {tokenizer.name} splits text in a way that the package 'tokenizers' does not repeat"
        raise ValueError(f"{wrong}: export with tokenizer=false, and give the text as ids")
    eot = tokenizer.decode([tokenizer.eot])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": eot,
        "eos_token": eot,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
    }
    for name, content in ((FILE, definition), (CONFIG, config)):
        (Path(folder) / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _definition(tokenizer: Tokenizer) -> dict:
    """The content of tokenizer.json for a tiktoken encoding."""
    try:
        from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as HFTokenizer
    except ImportError:
        raise ValueError("exporting a tokenizer needs the package 'tokenizers': pip install tokenizers") from None
    ranks, special = tokenizer.encoding._mergeable_ranks, tokenizer.encoding._special_tokens
    letter = {byte: character for character, byte in byte_level_alphabet().items()}
    text = {piece: "".join(letter[byte] for byte in piece) for piece in ranks}
    splits = [
        (text[piece[:cut]], text[piece[cut:]])
        for piece in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(piece))
        if piece[:cut] in ranks and piece[cut:] in ranks
    ]
    vocabulary = {text[piece]: rank for piece, rank in ranks.items()}
    hf = HFTokenizer(models.BPE(vocabulary | special, splits, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(_pattern(tokenizer.encoding._pat_str)), behavior="isolated")
    hf.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    hf.decoder = decoders.ByteLevel()
    hf.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    return json.loads(hf.to_str())


def _pattern(pattern: str) -> str:
    """A tiktoken split pattern in Oniguruma's syntax, which spells the end of the text and {n,m}+ in other ways."""
    return re.sub(r"(\{\d+,\d*\})\+", r"\1", pattern).replace("$", r"\z")
