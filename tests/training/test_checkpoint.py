"""The newest whole checkpoint is found; what is damaged, foreign or no number is never used and never written."""

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
from training import checkpoint, saver
from training.checkpoint import CheckpointConfig
from training.distributed import World
from training.optim import OptimConfig, build_optimizers
from training.run import lock_run
from training.saver import save


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Checkpoints of the steps 1 and 2."""
    model = Decoder(config("baseline"))
    optimizers = stepped(model, OptimConfig())
    for step in (1, 2):
        save(tmp_path, step, model, optimizers)
    return tmp_path


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


def flip(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[len(content) // 2] ^= 4
    (folder / "model.safetensors").write_bytes(content)


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


def no_number(tensors: dict) -> None:
    tensors["embedding.weight"][0, 0] = float("nan")


def wide(tensors: dict) -> None:
    tensors["embedding.weight/exp_avg"] = torch.zeros(3)


DAMAGES = {
    "truncated": truncate,
    "flipped byte": flip,
    "missing file": lambda folder: (folder / "model.safetensors").unlink(),
    "edited state": edit,
    "empty folder": lambda folder: [path.unlink() for path in folder.iterdir()],
    "state is garbage": lambda folder: (folder / "state.json").write_bytes(b"\0\xff{"),
    "state is deep": lambda folder: (folder / "state.json").write_text("[" * 100_000),
    "another step's folder": lambda folder: signed(folder, step=7),
    "resolved names": lambda folder: signed(folder, model={"layers": "${oc.env:HOME}"}),
    "no safetensors": lambda folder: ((folder / "model.safetensors").write_bytes(b"PK" * 50), signed(folder)),
    "int8 weights": changed("model.safetensors", lambda t: t.update({k: v.to(torch.int8) for k, v in t.items()})),
    "NaN weights": changed("model.safetensors", no_number),
    "extra tensor": changed("model.safetensors", lambda t: t.update(other=torch.zeros(1))),
    "missing tensor": changed("model.safetensors", lambda t: t.pop("embedding.weight")),
    "optimizer of another shape": changed("optimizer.safetensors", wide),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(kind: str, run: Path, capsys: pytest.CaptureFixture) -> None:
    (run / "checkpoints" / "step_notes.txt").write_text("a stray")
    (run / "checkpoints" / "step_00000009.txt").mkdir()
    assert newest(run) == "step_00000002" and not capsys.readouterr().err
    DAMAGES[kind](run / "checkpoints" / "step_00000002")
    assert newest(run) == "step_00000001"
    said = capsys.readouterr().err
    assert said.count("warning:") == said.count("\n") == 1 and "step_00000001 is used instead" in said


def test_a_foreign_newest_checkpoint_gives_way_and_all_damaged_is_one_line(run: Path, tmp_path: Path) -> None:
    folder = run / "checkpoints" / "step_00000002"
    shutil.rmtree(folder)
    other = Decoder(config("diff"))
    save(tmp_path, 2, other, stepped(other, OptimConfig()))
    assert newest(run) == "step_00000001"
    with pytest.raises(checkpoint.OtherModel, match="use the same model= and size= overrides$"):
        checkpoint.newest(tmp_path, lambda folder: checkpoint.load(folder, Decoder(config("gated"))))
    truncate(run / "checkpoints" / "step_00000001")
    with pytest.raises(ValueError, match="no older checkpoint can be used: delete"):
        newest(run)
    with pytest.raises(ValueError, match="used: copy that run again, or give another one$"):  # it belongs to somebody else
        checkpoint.newest(run, lambda folder: checkpoint.load(folder, Decoder(config("baseline"))))


def test_a_run_that_is_trained_while_it_is_read_is_listed_again(run: Path, capsys: pytest.CaptureFixture) -> None:
    model, seen = Decoder(config("baseline")), []

    def use(folder: Path) -> int:
        seen.append(folder.name)
        if len(seen) == 1:  # meanwhile the run writes its next checkpoints, and deletes this one
            saver.Saver(run, CheckpointConfig(keep=1), model, [], World(0, 1, torch.device("cpu"))).save(3)
        return checkpoint.load(folder, model)

    assert checkpoint.newest(run, use) == 3 and seen == ["step_00000002", "step_00000003"]
    assert not capsys.readouterr().err


def test_a_checkpoint_that_is_deleted_between_two_files_is_listed_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, model = checkpoint.dcp.load, Decoder(config("baseline"))
    newer = run / "checkpoints" / "step_00000002"

    def load(*arguments: object, **options: object) -> None:
        if newer.exists():
            shutil.rmtree(newer)
            raise RuntimeError("unable to open file <optimizer.safetensors> in read-only mode: No such file or directory (2)")
        real(*arguments, **options)

    monkeypatch.setattr(checkpoint.dcp, "load", load)
    assert checkpoint.newest(run, lambda folder: checkpoint.load(folder, model)) == 1
    monkeypatch.setattr(checkpoint.dcp, "load", lambda *_, **__: torch.zeros(2).view(9))
    with pytest.raises(RuntimeError, match="shape"):  # another error stays one
        checkpoint.newest(run, lambda folder: checkpoint.load(folder, model))


def test_what_is_not_finite_is_never_written(run: Path) -> None:
    model = Decoder(config("baseline"))
    optimizers = stepped(model, OptimConfig())
    optimizers[0].state[model.embedding.weight]["exp_avg"][0, 0] = float("inf")
    with pytest.raises(ValueError, match="embedding.weight/exp_avg is not finite at step 3"):
        save(run, 3, model, optimizers)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_00000001", "step_00000002"]


def test_a_later_damaged_checkpoint_does_not_displace_the_one_just_written(run: Path) -> None:
    """The run resumed from step 2, because step 4 is damaged."""
    model = Decoder(config("baseline"))
    save(run, 4, model, stepped(model, OptimConfig()))
    truncate(run / "checkpoints" / "step_00000004")
    for step, kept in ((3, ["step_00000001", "step_00000003", "step_00000004"]), (4, ["step_00000001", "step_00000004"])):
        alone = World(0, 1, torch.device("cpu"))
        saver.Saver(run, CheckpointConfig(keep=1, at=[1]), model, stepped(model, OptimConfig()), alone).save(step)
        assert [folder.name for folder in checkpoint.checkpoints(run)] == kept
    assert newest(run) == "step_00000004"


def test_a_full_disk_keeps_the_checkpoint_before_and_leaves_no_litter(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: dict, path: Path, header: None) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saver, "save_file", full)
    model = Decoder(config("baseline"))
    with pytest.raises(ValueError, match="No space left on device.*the checkpoint before it is kept"):
        save(run, 3, model, stepped(model, OptimConfig()))
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_00000001", "step_00000002"]


def test_a_file_system_that_syncs_no_folders_keeps_its_checkpoints(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CIFS and others; a file that cannot be synced is an error."""
    fsync, refused = os.fsync, {"folders": errno.EINVAL}

    def picky(handle: int) -> None:
        kind = "folders" if stat.S_ISDIR(os.fstat(handle).st_mode) else "files"
        if kind in refused:
            raise OSError(refused[kind], os.strerror(refused[kind]))
        fsync(handle)

    monkeypatch.setattr(saver.os, "fsync", picky)
    model = Decoder(config("baseline"))
    save(run, 3, model, stepped(model, OptimConfig()))
    assert newest(run) == "step_00000003"
    refused["files"] = errno.EIO
    with pytest.raises(
        ValueError, match="step_00000004 could not be written .*Input/output error: '.*/\\.step_00000004.part/\\w+\\."
    ):
        save(run, 4, model, stepped(model, OptimConfig()))


def test_an_old_checkpoint_that_cannot_be_deleted_does_not_end_training(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def held(path: Path, **options: object) -> None:
        if path.name.endswith(".old.part"):
            raise OSError(errno.EBUSY, "Device or resource busy")

    model, alone = Decoder(config("baseline")), World(0, 1, torch.device("cpu"))
    writer = saver.Saver(run, CheckpointConfig(keep=1), model, stepped(model, OptimConfig()), alone)
    with monkeypatch.context() as patched:
        patched.setattr(saver.shutil, "rmtree", held)
        writer.save(3)
    assert "could not be deleted ([Errno 16] Device or resource busy); training goes on" in capsys.readouterr().out
    writer.save(4)
    assert [folder.name for folder in checkpoint.checkpoints(run)] == ["step_00000004"]


def test_an_old_checkpoint_that_is_a_link_goes_without_its_target(run: Path, tmp_path: Path) -> None:
    checkpoints = run / "checkpoints"
    (checkpoints / "step_00000001").rename(tmp_path / "elsewhere")
    (checkpoints / "step_00000001").symlink_to(tmp_path / "elsewhere")
    (checkpoints / ".step_00000000.old.part").symlink_to(tmp_path / "elsewhere")  # of an earlier version
    lock_run(run).release()
    model = Decoder(config("baseline"))
    saver.Saver(run, CheckpointConfig(keep=1), model, stepped(model, OptimConfig()), World(0, 1, torch.device("cpu"))).save(3)
    assert [path.name for path in checkpoints.iterdir()] == ["step_00000003"] and (tmp_path / "elsewhere/state.json").is_file()


def test_a_checkpoint_makes_no_folder_for_a_run_that_was_moved(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step_00000003 could not be written .*No such file"):
        save(run / "moved", 3, Decoder(config("baseline")), [])
    assert not (run / "moved").exists()


def test_files_of_a_checkpoint_have_the_rights_of_the_umask(run: Path) -> None:
    (run / "plain").touch()
    newest_folder = run / "checkpoints" / newest(run)
    assert {path.stat().st_mode for path in newest_folder.iterdir()} == {(run / "plain").stat().st_mode}


def test_an_evaluation_of_weights_that_are_no_numbers_is_refused(run: Path) -> None:
    (run / "config.yaml").write_text("{}")
    DAMAGES["NaN weights"](run / "checkpoints" / "step_00000002")
    for step in (None, 2):
        with pytest.raises(ValueError, match="embedding.weight is not finite: train again with a lower optim.lr$"):
            checkpoint.load_run(run, step=step)
