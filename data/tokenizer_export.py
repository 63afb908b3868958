"""Our tokenizers as the files that transformers' AutoTokenizer reads: tokenizer.json and tokenizer_config.json.

Tiktoken joins any two neighbours whose bytes are a token, the token of the lowest rank first. So each way to split a token into
two tokens becomes a merge of a byte-level BPE, and the rank of the token is the rank of the merge.
"""

import json
import re
from pathlib import Path

from data.tokenizer import BYTE_OF, FILE, SAMPLE, FolderTokenizer, Tokenizer, import_optional

CONFIG = "tokenizer_config.json"


def export_tokenizer(tokenizer: Tokenizer, folder: str | Path, context: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, with which AutoTokenizer gives the ids of `tokenizer.encode`.

    context: tokens the model takes. ValueError: `tokenizers` is missing, or cannot express the encoding's split pattern.
    """
    definition = tokenizer.definition if isinstance(tokenizer, FolderTokenizer) else _definition(tokenizer)
    definition = {**definition, "post_processor": None}  # a post-processor adds tokens
    ours, exported = tokenizer.encode(SAMPLE), FolderTokenizer(definition, tokenizer.eot).encode(SAMPLE)
    if ours != exported:
        wrong = f"the tokenizer {tokenizer.name} splits text in a way that the package 'tokenizers' does not repeat"
        raise ValueError(f"{wrong}: export with tokenizer=false, and give the text as ids")
    eot = tokenizer.decode([tokenizer.eot])
    config = {"bos_token": eot, "eos_token": eot, "pad_token": eot} | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": not tokenizer.special,
    }
    for name, content in ((FILE, definition), (CONFIG, config)):
        (Path(folder) / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _definition(tokenizer: Tokenizer) -> dict:
    tokenizers = import_optional("tokenizers", "exporting a tokenizer")
    ranks, special = tokenizer.encoding._mergeable_ranks, tokenizer.encoding._special_tokens
    letter = {byte: character for character, byte in BYTE_OF.items()}
    text = {piece: "".join(letter[byte] for byte in piece) for piece in ranks}
    splits = [
        (text[piece[:cut]], text[piece[cut:]])
        for piece in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(piece))
        if piece[:cut] in ranks and piece[cut:] in ranks
    ]
    vocabulary = {text[piece]: rank for piece, rank in ranks.items()}
    hf = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary | special, splits, ignore_merges=True))
    # Oniguruma writes the end of a text as \z, and {n,m}+ does not exist there.
    pattern = re.sub(r"(\{\d+,\d*\})\+", r"\1", tokenizer.encoding._pat_str).replace("$", r"\z")
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    hf.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, byte_level])
    hf.decoder = tokenizers.decoders.ByteLevel()
    hf.add_special_tokens([tokenizers.AddedToken(name, normalized=False, special=True) for name in special])
    return json.loads(hf.to_str())
