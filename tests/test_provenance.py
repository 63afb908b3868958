"""The version of the code that results name."""

import os
import subprocess
from pathlib import Path

import pytest

from configs import provenance
from configs.provenance import version


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}  # the user's may sign commits
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True, env=env)


def test_new_code_makes_a_version_dirty_and_another_repository_s_commit_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "project"
    (root / "model").mkdir(parents=True)
    (root / "model" / "decoder.py").write_text("a = 1\n")
    (root / ".gitignore").write_text("runs/\n*.pyc\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "a")
    monkeypatch.setattr(provenance, "ROOT", root)
    clean = version()
    assert len(clean) == 12
    for name in ("runs/a/config.yaml", "model/decoder.pyc", "model/notes.txt", "out/a/config.yaml", "venv/lib/x.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    assert version() == clean  # ignored, no code, or not where the project has its code
    for name in ("model/attention/mine.py", "configs/size/mine.yaml", "model/möglich.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
        assert version() == f"{clean}-dirty"
        (root / name).unlink()
    (root / "model" / "decoder.py").write_text("a = 2\n")
    assert version() == f"{clean}-dirty"
    (root / "model" / "new.py").write_text("")
    assert version() == f"{clean}-dirty"

    unpacked = root / "vendor" / "copy"
    unpacked.mkdir(parents=True)
    monkeypatch.setattr(provenance, "ROOT", unpacked)
    assert version() == "unknown"
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert version() == "unknown"

    def hangs(command: list[str], timeout: float, **how: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(provenance, "ROOT", root)
    monkeypatch.setattr(subprocess, "run", hangs)
    assert version() == "unknown"
