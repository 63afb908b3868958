"""The newest whole checkpoint is used; what is damaged, foreign or no number is never used and never written."""

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.decoder import Decoder
from tests.training.test_parts import stepped
from tests.variants import config
from training import checkpoint
from training.checkpoint import CheckpointConfig, save
from training.distributed import World
from training.optim import OptimConfig, build_optimizers
from training.run import lock_run


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, model = tmp_path_factory.mktemp("template"), Decoder(config("baseline"))
    optimizers = stepped(model, OptimConfig())
    for step in (1, 2):
        save(folder, step, model, optimizers)
    return folder


@pytest.fixture
def run(template: Path, tmp_path: Path) -> Path:
    """Checkpoints of the steps 1 and 2."""
    return shutil.copytree(template, tmp_path / "run")


def writer(run: Path, keep: int = 1, at: list[int] | None = None) -> checkpoint.Saver:
    """The saver of a model that has stepped twice."""
    model, alone = Decoder(config("baseline")), World(0, 1, torch.device("cpu"))
    return checkpoint.Saver(run, CheckpointConfig(keep=keep, at=at or []), model, stepped(model, OptimConfig()), alone)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def newest(run: Path) -> str:
    model = Decoder(config("baseline"), seed=5)
    optimizers = build_optimizers(model, OptimConfig())
    return checkpoint.folder_name(
        checkpoint.newest(run, lambda folder: checkpoint.load(folder, model, optimizers), resumes=True)
    )


def signed(folder: Path, **changes: object) -> None:
    """Change state.json so that its checksum fits again."""
    state = json.loads((folder / "state.json").read_text())
    state.pop("checksum")
    state |= {"sha256": {name: checkpoint.sha256(folder / name) for name in state["sha256"]}} | changes
    (folder / "state.json").write_text(json.dumps(state | {"checksum": checkpoint.state_checksum(state)}))


def truncate(folder: Path) -> None:
    path = folder / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def edit(folder: Path) -> None:
    path = folder / "state.json"
    path.write_text(path.read_text().replace('"dropout": 0', '"dropout": 1'))


def changed(name: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / name)
        change(tensors)
        save_file(tensors, folder / name)
        signed(folder)

    return damage


DAMAGES = {
    "truncated": truncate,
    "missing file": lambda folder: (folder / "model.safetensors").unlink(),
    "edited state": edit,
    "empty folder": lambda folder: [path.unlink() for path in folder.iterdir()],
    "state is garbage": lambda folder: (folder / "state.json").write_bytes(b"\0\xff{"),
    "another step's folder": lambda folder: signed(folder, step=7),
    "resolved names": lambda folder: signed(folder, model={"layers": "${oc.env:HOME}"}),
    "no safetensors": lambda folder: ((folder / "model.safetensors").write_bytes(b"PK" * 50), signed(folder)),
    "int8 weights": changed("model.safetensors", lambda t: t.update({k: v.to(torch.int8) for k, v in t.items()})),
    "NaN weights": changed("model.safetensors", lambda t: t["embedding.weight"][0].fill_(float("nan"))),
    "extra tensor": changed("model.safetensors", lambda t: t.update(other=torch.zeros(1))),
    "another shape": changed("optimizer.safetensors", lambda t: t.update({"embedding.weight/exp_avg": torch.zeros(3)})),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(kind: str, run: Path, capsys: pytest.CaptureFixture) -> None:
    (run / "checkpoints" / "step_notes.txt").write_text("a stray")
    (run / "checkpoints" / "step_00000009.txt").mkdir()
    assert newest(run) == "step_00000002" and not capsys.readouterr().err
    DAMAGES[kind](run / "checkpoints" / "step_00000002")
    assert newest(run) == "step_00000001"
    warning = capsys.readouterr().err
    assert warning.count("warning:") == warning.count("\n") == 1 and "step_00000001 is used instead" in warning


def test_a_foreign_newest_checkpoint_gives_way_and_all_damaged_is_one_line(run: Path) -> None:
    folder = run / "checkpoints" / "step_00000002"
    shutil.rmtree(folder)
    other = Decoder(config("diff"))
    save(run, 2, other, stepped(other, OptimConfig()))
    assert newest(run) == "step_00000001"
    with pytest.raises(ValueError, match="use the same model= and size= overrides"):
        checkpoint.newest(run, lambda folder: checkpoint.load(folder, Decoder(config("gated"))))
    truncate(run / "checkpoints" / "step_00000001")
    with pytest.raises(ValueError, match="no older checkpoint can be used: start again with another run_dir=$"):
        newest(run)
    with pytest.raises(ValueError, match="used: copy that run again, or give another one$"):  # it belongs to somebody else
        checkpoint.newest(run, lambda folder: checkpoint.load(folder, Decoder(config("baseline"))))


def test_a_run_that_is_trained_while_it_is_read_is_listed_again(
    run: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen, real = Decoder(config("baseline")), [], checkpoint.dcp.load

    def use(folder: Path) -> int:
        seen.append(folder.name)
        if len(seen) == 1:  # meanwhile the run writes its next checkpoints, and deletes this one
            writer(run, at=[1]).save(3)
        return sorted(folder.iterdir()) and checkpoint.load(folder, model)

    def load(*arguments: object, **options: object) -> None:
        if (newer := run / "checkpoints" / "step_00000003").exists():  # is deleted between two files
            shutil.rmtree(newer)
            raise RuntimeError("unable to open file <optimizer.safetensors> in read-only mode: No such file or directory (2)")
        real(*arguments, **options)

    assert checkpoint.newest(run, use) == 3 and seen == ["step_00000002", "step_00000003"]
    monkeypatch.setattr(checkpoint.dcp, "load", load)
    assert checkpoint.newest(run, lambda folder: checkpoint.load(folder, model)) == 1
    assert not capsys.readouterr().err


def test_what_is_not_finite_is_never_written_and_a_moved_run_gets_no_new_folder(run: Path) -> None:
    one = writer(run)
    one.optimizers[0].state[one.model.embedding.weight]["exp_avg"][0, 0] = float("inf")
    with pytest.raises(ValueError, match="embedding.weight/exp_avg is not finite at step 3"):
        one.save(3)
    assert names(run) == ["step_00000001", "step_00000002"]
    with pytest.raises(ValueError, match="step_00000003 could not be written .*No such file"):
        writer(run / "moved").save(3)
    assert not (run / "moved").exists()


def test_a_later_damaged_checkpoint_does_not_displace_the_one_just_written(run: Path) -> None:
    """The run resumed from step 2, because step 4 is damaged."""
    writer(run, keep=0).save(4)
    truncate(run / "checkpoints" / "step_00000004")
    for step, kept in ((3, ["step_00000001", "step_00000003", "step_00000004"]), (4, ["step_00000001", "step_00000004"])):
        writer(run, at=[1]).save(step)
        assert names(run) == kept
    assert newest(run) == "step_00000004"


def test_a_file_system_that_syncs_no_folders_keeps_its_checkpoints(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CIFS and others; a file that cannot be synced is an error, which keeps the checkpoint before and leaves nothing."""
    fsync, refused = os.fsync, {"files": errno.EIO}

    def picky(handle: int) -> None:
        if code := refused.get("folders" if stat.S_ISDIR(os.fstat(handle).st_mode) else "files"):
            raise OSError(code, os.strerror(code))
        fsync(handle)

    monkeypatch.setattr(checkpoint.os, "fsync", picky)
    for refused["files"] in (errno.EIO, errno.ENOSPC):
        why = os.strerror(refused["files"])
        says = f"step_00000003 could not be written .*{why}: '.*/.step_00000003.part/\\w+\\..*before it is kept"
        with pytest.raises(ValueError, match=says):
            writer(run).save(3)
        assert names(run) == ["step_00000001", "step_00000002"]
    refused.clear()
    refused["folders"] = errno.EINVAL
    writer(run).save(3)
    assert newest(run) == "step_00000003"
    (run / "plain").touch()  # its files have the rights of the umask
    rights = {path.stat().st_mode for path in (run / "checkpoints" / "step_00000003").iterdir()}
    assert rights == {(run / "plain").stat().st_mode}


def test_an_old_checkpoint_that_cannot_be_deleted_does_not_end_training_and_a_link_goes_without_its_target(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def held(path: Path, **options: object) -> None:
        if path.name.endswith(".old.part"):
            raise OSError(errno.EBUSY, "Device or resource busy")

    old = run / "checkpoints" / "step_00000001"
    old.rename(tmp_path / "elsewhere")
    old.symlink_to(tmp_path / "elsewhere")
    (run / "checkpoints" / ".step_00000000.old.part").symlink_to(tmp_path / "elsewhere")  # of an earlier version
    lock_run(run).close()
    one = writer(run)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.shutil, "rmtree", held)
        one.save(3)
    assert "could not be deleted ([Errno 16] Device or resource busy); training goes on" in capsys.readouterr().out
    one.save(4)
    assert [folder.name for folder in checkpoint.checkpoints(run)] == ["step_00000004"]
    assert (tmp_path / "elsewhere/state.json").is_file()
