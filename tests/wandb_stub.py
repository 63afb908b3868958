"""A wandb that sends nothing and remembers what was sent."""

from types import SimpleNamespace
from typing import Any


class WandbStub:
    """Stands in for the package: `monkeypatch.setitem(sys.modules, "wandb", WandbStub())`."""

    class Error(Exception):
        """The base class of wandb's errors."""

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []  # options of every init
        self.logged: list[Any] = []  # what was logged, and "finished"
        self.summary: dict[str, Any] = {}
        self.config: dict[str, Any] = {}

    def Settings(self, **options: Any) -> dict[str, Any]:  # noqa: N802
        return options

    def init(self, **options: Any) -> SimpleNamespace:
        self.started.append(options)
        return SimpleNamespace(
            summary=self.summary,
            config=SimpleNamespace(update=lambda values, allow_val_change: self.config.update(values)),
            log=self.logged.append,
            define_metric=lambda *given, **options: None,
            finish=lambda: self.logged.append("finished"),
        )
