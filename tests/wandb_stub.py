"""A wandb that sends nothing and remembers what it was asked for."""

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
        self.artifacts: dict[str, dict[str, str]] = {}  # name -> file in it -> file on disk

    def Settings(self, **options: Any) -> dict[str, Any]:  # noqa: N802
        return options

    def Artifact(self, name: str, type: str) -> SimpleNamespace:  # noqa: A002, N802
        files = self.artifacts[name] = {}
        return SimpleNamespace(type=type, add_file=lambda path, name: files.update({name: path}))

    def Html(self, path: str) -> tuple[str, str]:  # noqa: N802
        return "html", path

    def Image(self, path: str) -> tuple[str, str]:  # noqa: N802
        return "image", path

    def init(self, **options: Any) -> SimpleNamespace:
        self.started.append(options)
        return SimpleNamespace(
            group=options["group"],
            summary=self.summary,
            config=SimpleNamespace(update=lambda values, allow_val_change: self.config.update(values)),
            log=self.logged.append,
            log_artifact=lambda artifact: self.logged.append(artifact.type),
            define_metric=lambda *given, **options: None,
            finish=lambda: self.logged.append("finished"),
        )
