"""Digests of a study's texts on this machine, by which runs and results of other texts are recognised."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from data.config import DataConfig
from data.stream import is_task, open_tokenizer, text_digest
from eval.common import tokens_of
from eval.perplexity import cut_windows, digest


def prepared(data: DataConfig) -> bool:
    """Whether the data are on this machine. A task's rows always are; shards of another project have no tokenizer.json."""
    folder = Path(data.dir)
    return is_task(data) or (folder / "tokenizer.json").is_file() or any(folder.glob("*.bin"))


class Texts:
    """Digests of training shards and of the windows of test texts. A test text is tokenized once per tokenizer."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Any] = {}

    def _once(self, *key: Any, compute: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]

    def refuse_other_shards(self, run: str, trained_on: str | None, data: DataConfig) -> None:
        """ValueError if a run was trained on other shards than those in data.dir; an older run does not say it: None."""
        if trained_on is None or is_task(data) or not prepared(data):
            return
        if trained_on != self._once("shards", data.dir, compute=lambda: text_digest(data)):
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
        tokenizer = self._once("tokenizer", data.dir, compute=lambda: open_tokenizer(data))
        if tokenizer.fingerprint != fingerprint:
            return None
        length, limit = settings["length"] or context, settings["tokens"]
        try:
            tokens = self._once(text, shards, fingerprint, compute=lambda: tokens_of(tokenizer, text, shards))
            windows = (text, shards, fingerprint, length, limit)
            return self._once(*windows, compute=lambda: digest(cut_windows(tokens, length, limit)))
        except FileNotFoundError:
            return None
