"""Digests of a study's texts on this machine, by which runs and results of other texts are recognised."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from data.config import DataConfig
from data.stream import is_task, open_tokenizer, text_digest
from data.tokenizer import Tokenizer
from eval.common import TextEvalConfig, evaluation_tokens
from eval.perplexity import cut_windows, digest


def prepared(data: DataConfig) -> bool:
    """Whether the data are on this machine. A task's rows always are; shards of another project have no tokenizer.json."""
    folder = Path(data.dir)
    return is_task(data) or (folder / "tokenizer.json").is_file() or any(folder.glob("*.bin"))


class Texts:
    """Digests that are computed once: of training shards, and of the windows of test texts.

    A test text is tokenized once per tokenizer.
    """

    def __init__(self) -> None:
        self._tokenizers: dict[str, Tokenizer] = {}  # by folder of the data
        self._tokens: dict[tuple[str | None, ...], Any] = {}
        self._digests: dict[tuple[Any, ...], str] = {}
        self._shards: dict[str, str | None] = {}  # folder of the data -> digest

    def refuse_other_shards(self, run: str, theirs: str | None, data: DataConfig) -> None:
        """ValueError if a run was trained on other shards than those in data.dir; `theirs` is None for an older run."""
        if theirs is None or is_task(data) or not prepared(data):
            return
        if data.dir not in self._shards:
            self._shards[data.dir] = text_digest(data)
        if theirs != self._shards[data.dir]:
            wrong = f"{run} was trained on other shards than those in {data.dir} (other numbers of tokens or checksums)"
            fix = "set data.dir= to the folder that it was trained on, or train all runs again with name=OTHER records=none"
            raise ValueError(f"{wrong}: {fix}")

    def tested(self, data: DataConfig, fingerprint: str, context: int, settings: Mapping[str, Any]) -> str | None:
        """`sha256` in a result of eval.perplexity with these settings, by a run with this tokenizer and context.

        None if the settings name no text, or if the text or the tokenizer is not on this machine. ValueError if the text
        cannot be tested on.
        """
        text, shards = settings["text"], settings["shards"]
        if not (text or shards) or is_task(data) or not prepared(data):
            return None
        if data.dir not in self._tokenizers:
            self._tokenizers[data.dir] = open_tokenizer(data)
        tokenizer = self._tokenizers[data.dir]
        if tokenizer.fingerprint != fingerprint:
            return None
        length, where = settings["length"] or context, (text, shards, fingerprint)
        key = (*where, length, settings["tokens"])
        try:
            if where not in self._tokens:
                given = TextEvalConfig(run="", text=text, shards=shards)
                self._tokens[where] = evaluation_tokens(SimpleNamespace(tokenizer=tokenizer), given)
            if key not in self._digests:
                self._digests[key] = digest(cut_windows(self._tokens[where], length, settings["tokens"]))
        except FileNotFoundError:
            return None
        return self._digests[key]
