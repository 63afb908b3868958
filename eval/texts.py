"""Digests of a study's texts on this machine, by which runs and results of other texts are recognised."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from data.config import DataConfig
from data.stream import is_task, open_tokenizer, text_digest
from eval.common import tokens_of
from eval.perplexity import cut_windows, digest


class Texts:
    """Digests of training shards and of the windows of test texts. A test text is tokenized once per tokenizer.

    of_records: digests of shards; where there are some, other shards count as absent. A table made from records needs no text.
    """

    def __init__(self, of_records: Collection[str] = ()) -> None:
        self.of_records = of_records
        self._known: dict[Any, Any] = {}

    def here(self, data: DataConfig) -> bool:
        """Whether the data are on this machine. A task's rows always are; shards of another project have no tokenizer.json."""
        prepared = (Path(data.dir) / "tokenizer.json").is_file() or any(Path(data.dir).glob("*.bin"))
        return is_task(data) or (prepared and (not self.of_records or self._digest(data) in self.of_records))

    def _digest(self, data: DataConfig) -> str | None:
        return self._once(("shards", data.dir), lambda: text_digest(data))

    def _once(self, key: Any, compute: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]

    def refuse_other_shards(self, run: str, trained_on: str | None, data: DataConfig) -> None:
        """ValueError if a run was trained on other shards than those in data.dir; an older run does not say it: None."""
        if trained_on is None or not self.here(data) or trained_on == self._digest(data):
            return
        wrong = f"{run} was trained on other shards than those in {data.dir} (other numbers of tokens or checksums)"
        fix = "set data.dir= to the folder that it was trained on, or train all runs again with name=OTHER records=none"
        raise ValueError(f"{wrong}: {fix}")

    def tested(self, data: DataConfig, fingerprint: str, context: int, settings: Mapping[str, Any]) -> str | None:
        """`sha256` in a result of eval.perplexity with these settings, by a run with this tokenizer and context.

        None if the settings name no text, or if the text or the tokenizer is not on this machine. ValueError if the text
        cannot be tested on.
        """
        text, shards = settings["text"], settings["shards"]
        if not (text or shards) or is_task(data) or not self.here(data):
            return None
        tokenizer = self._once(("tokenizer", data.dir), lambda: open_tokenizer(data))
        if tokenizer.fingerprint != fingerprint:
            return None
        length, limit = settings["length"] or context, settings["tokens"]
        try:
            tokens = self._once((text, shards, fingerprint), lambda: tokens_of(tokenizer, text, shards))
            return self._once((text, shards, fingerprint, length, limit), lambda: digest(cut_windows(tokens, length, limit)))
        except FileNotFoundError:
            return None
