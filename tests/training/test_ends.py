"""What several processes print at an end, JSON without NaN, and litter. (tests/faults has runs that end.)"""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from configs import one_line_errors
from configs.files import json_text, remove_leftovers, whole_folder, write_atomic, write_json
from data.loader import inputs_and_targets
from eval.common import EvalConfig
from tests.conftest import Typed, train_arguments
from training import distributed
from training.distributed import World, join_world
from training.run import TrainConfig

CPU = torch.device("cpu")


def test_each_process_of_a_training_prints_its_error_and_torchrun_ends_its_output_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("RANK", "1")
    for every_rank, printed in ((True, "error on rank 1: no room\n"), (False, "")):
        with pytest.raises(SystemExit), one_line_errors(TrainConfig, every_rank), World(1, 2, CPU).errors():
            raise ValueError("no room")
        assert capsys.readouterr().err == printed
    failure = ProcessFailure(0, 1, 2, str(tmp_path / "error.json"))
    assert str(ChildFailedError("train.py", {0: failure})).rstrip(" =\n").endswith("error: no room")


def test_a_process_that_hangs_or_is_lost_is_named_and_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """By those that waited for it in vain, and that say so in the store."""
    monkeypatch.setattr(distributed, "PATIENCE", 0.01)
    late = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 600000ms for recv operation to complete"
    for others, says in (("1", "from rank 2:"), ("", "from rank 1, 2:"), ("12", "from the network between the ranks:")):
        store = dist.HashStore()
        for rank in others:
            store.set(f"waited_{rank}", "")
        with pytest.raises(ConnectionError, match=f"^no answer in time {says}"), World(0, 3, CPU, store).errors():
            raise RuntimeError(late)
    with pytest.raises(ConnectionError, match="another process has ended"), World(0, 2, CPU).errors():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")
    with pytest.raises(RuntimeError, match="shapes"), World(0, 2, CPU).errors():
        raise RuntimeError("shapes differ")


def test_processes_that_never_come_or_share_a_gpu_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(*_: object, **__: object) -> None:
        raise dist.DistStoreError("Timed out after 601 seconds waiting for clients. 1/2 clients joined.")

    monkeypatch.setattr(dist, "rendezvous", nobody)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    two_cards = "use device=cuda and torchrun --nproc_per_node=2 or less"
    for device, rank, size, error, says in (
        ("cpu", 0, 2, ConnectionError, r"WORLD_SIZE=2 processes came \(.* 1/2 clients joined.\): start all, or unset RANK"),
        ("cpu", 1, 1, ValueError, "RANK=1 is not below WORLD_SIZE=1: unset both, or start the processes with torchrun"),
        ("cuda:0", 2, 3, ValueError, two_cards),
        ("cuda", 2, 3, ValueError, two_cards),
    ):
        for name, value in (("RANK", rank), ("LOCAL_WORLD_SIZE", size), ("WORLD_SIZE", size)):
            monkeypatch.setenv(name, str(value))
        with pytest.raises(error, match=says):
            join_world(device)


def test_no_memory_left_is_one_line(capsys: pytest.CaptureFixture) -> None:
    gpu, cpu = (torch.OutOfMemoryError("CUDA out of memory"), "the GPU"), (RuntimeError("std::bad_alloc"), "this machine")
    for config, (error, where) in ((TrainConfig, gpu), (EvalConfig, gpu), (EvalConfig, cpu)):
        with pytest.raises(SystemExit) as end, one_line_errors(config, every_rank=True), World(0, 1, CPU).errors():
            raise error
        line = capsys.readouterr().err
        assert end.value.code == 2 and line.count("\n") == 1
        assert line.startswith(f"error: {where} has too little free memory: use a smaller micro_batch=")
        with pytest.raises(RuntimeError, match="^shapes$"), one_line_errors(config):
            raise RuntimeError("shapes")


def test_after_an_error_no_process_waits_for_the_others_before_it_is_printed(
    shards: Path, tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nccl's end of the group may wait for processes that are in a collective."""
    closed = []
    monkeypatch.setattr(World, "close", lambda world: closed.append(world.rank))
    arguments = train_arguments(shards, tmp_path / "run", "model=baseline", "steps=1")
    assert typed(*arguments).returncode == 0 and closed == [0]
    again = typed(*arguments)
    assert again.returncode == 2 and "resume=true" in again.stderr and closed == [0]


def test_a_gpu_copies_rows_without_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs and targets are views of longer rows; torch would copy such a tensor through memory that is not pinned."""
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: pinned.append(x.is_contiguous()) or x)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *where, **how: x)
    World(0, 1, torch.device("cuda")).tensors(*inputs_and_targets(np.zeros((4, 9), dtype=np.int64)))
    assert pinned == [True, True]


def test_json_holds_what_json_knows_and_a_list_of_numbers_on_one_line(tmp_path: Path) -> None:
    content = {"a": [1.0, math.nan, (math.inf, {"b": -math.inf})], "c": float("nan"), "d": Path("x"), "e": 2}
    wanted = {"a": [1.0, None, [None, {"b": None}]], "c": None, "d": "x", "e": 2}
    write_json(tmp_path / "x.json", content)
    assert json.loads((tmp_path / "x.json").read_text()) == json.loads(json_text(content)) == wanted
    content = {"a": [1, -2.5, 1e-7, None], "b": [[1.5, 2], [3, 4]], "c": ["[\n 1,\n 2\n]", 1], "d": [], "e": [True, 1]}
    write_json(tmp_path / "x.json", content)
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text) == content
    assert '"a": [1, -2.5, 1e-07, null],\n' in text and "\n  [1.5, 2],\n  [3, 4]\n" in text


def test_what_a_killed_command_left_half_written_is_removed_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    killed = os.fork()
    if not killed:
        os.replace = lambda old, new: os._exit(9)
        with whole_folder(folder):
            write_atomic(tmp_path / "a.json", b"{}")
    os.waitpid(killed, 0)
    assert len(list(tmp_path.glob(".*.part"))) == 2 and not folder.exists()
    for text in ("new", "newer"):
        with whole_folder(folder) as partial:
            (partial / "a").write_text(text)
    with pytest.raises(KeyboardInterrupt), whole_folder(folder) as partial:
        (partial / "a").write_text("half")
        raise KeyboardInterrupt
    write_atomic(tmp_path / "b.json", b"{", b"}")
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.json", "folder"]
    assert (folder / "a").read_text() == "newer" and (tmp_path / "b.json").read_text() == "{}"
