"""Configuration of data: what the text is, how it is tokenized, where the shards lie."""

from dataclasses import dataclass, field
from typing import Annotated

from omegaconf import MISSING


@dataclass
class TokenizerConfig:
    """How text becomes token ids."""

    name: str = "gpt2"  # gpt2, r50k_base, cl100k_base, o200k_base, ... (tiktoken) | bpe (trained on text) | bytes | hf
    vocab_size: Annotated[int | None, "[258, 1048576]"] = None  # bpe only: tokens, end-of-text included; None: 4096
    path: str | None = None  # hf only: a transformers model's folder, whose tokenizer.json is used
    special: bool = False  # hf only: special tokens written out in a text (<|im_start|>) are these tokens, not plain text


@dataclass
class RetrievalMixConfig:
    """The share of training samples that are retrieval documents (facts hidden in a text, and questions), and their shape."""

    weight: Annotated[int, "[0, 100]"] = 0  # percent of all training samples that are retrieval documents
    dense: Annotated[int, "[0, 100]"] = 50  # percent of the retrieval documents that hold facts only, without text
    needles: Annotated[int, "[1, 999]"] = 4  # a document has 1 to this many facts; a small model learns sooner from few
    digits: Annotated[int, "[1, 18]"] = 4  # of a magic number; with 2, a model can learn which are kept for evaluation


@dataclass
class MqarConfig:
    """Associative recall among distractors (data/mqar.py)."""

    keys: Annotated[int, "[2, 1048576]"] = 64  # number of different keys
    values: Annotated[int, "[1, 1048576]"] = 64  # number of different values, none of which is a key
    noise: Annotated[int, "[1, 1048576]"] = 64  # number of different noise tokens, none of which is a key or a value
    pairs: Annotated[int, "[1, 1048576]"] = 4  # key-value pairs that each row states first and asks for afterwards
    distractors: Annotated[float, "[0, 1)"] = 0.8  # share of distractors among the tokens before the questions
    kind: Annotated[str, ("noise", "pairs")] = "noise"  # distractors: noise tokens, or pairs for which the row does not ask


@dataclass
class DataConfig:
    """A text: where it comes from, how it is prepared, and where the shards lie."""

    name: str = MISSING  # name of the prepared set
    source: str = MISSING  # stdlib | shakespeare | text | hf | mqar
    path: str | None = None  # text: file, folder or glob; shakespeare: a local copy
    dataset: str | None = None  # hf: name on the hub, a folder of the package datasets, or a builder (json, parquet)
    data_files: str | None = None  # hf: files for the builder to read, a path or a 'glob'
    subset: str | None = None  # hf: configuration of the data set
    split: str = "train"  # hf: which split to read
    column: str = "text"  # column (hf, parquet) or key (jsonl) that holds the text
    streaming: bool = False  # hf: read over the network instead of downloading first
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    dir: str = "shards/${.name}"  # folder of the prepared set
    val_fraction: Annotated[float, "[0, 1)"] = 0.005  # share of the text kept for validation
    shard_tokens: Annotated[int, "[1, 2147483647]"] = 100_000_000  # tokens per shard file
    max_tokens: Annotated[int | None, "[1, inf)"] = None  # stop once training has so many tokens and validation some text
    workers: Annotated[int | None, "[1, 4096]"] = None  # threads that tokenize; None: one per core
    retrieval: RetrievalMixConfig = field(default_factory=RetrievalMixConfig)
    mqar: MqarConfig = field(default_factory=MqarConfig)
