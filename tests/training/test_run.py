"""A run's folder: its name, and branches, which end as runs of their length that were trained alone."""

import os
import shutil
import threading
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf, open_dict

import train  # noqa: F401  # registers its schema
from configs import CONFIG_DIR, check_ranges
from configs.files import read_run_config
from model.config import DecoderConfig
from tests.conftest import Typed, assert_one_line_error, train_arguments
from tests.faults.runs import ending
from tests.training import processes
from tests.training.test_train import ALONE, trained
from training import parallel
from training.checkpoint import checkpoints, read_state
from training.distributed import World
from training.optim import OptimConfig, decay_start, lr_factor
from training.parallel import compile_problem, compiles
from training.run import Run, TrainConfig, check_config, default_run_dir, goes_on_longer, refuse_other_config, take_architecture

WSD = (
    "optim.schedule=wsd", "optim.decay=0.2", "optim=muon", "model=diff", "monitor.every=5", "eval_every=4", "outlier_z=7",
)  # fmt: skip


@pytest.fixture(scope="module")
def trunk(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("trunk") / "run"
    trained(shards, run_dir, *WSD, "steps=20", "checkpoint.at=[8]", "checkpoint.every=5", "checkpoint.keep=1")
    assert [folder.name for folder in checkpoints(run_dir)] == ["step_00000008", "step_00000020"]
    assert read_run_config(run_dir)["checkpoint"]["at"] == [8] and not list(run_dir.glob(".*part"))
    return run_dir


def test_a_branch_is_the_run_of_its_length_trained_alone(trunk: Path, shards: Path, tmp_path: Path, typed: Typed) -> None:
    alone = trained(shards, tmp_path / "alone", *WSD, "steps=10")
    branch = trained(shards, tmp_path / "branch", *WSD, "steps=10", f"branch_from={trunk}")
    assert ending(branch) == ending(alone)
    guards = [read_state(checkpoints(run)[-1])["guard"] for run in (branch, alone)]
    assert guards[0] == guards[1] and guards[1]["seen"] == [10, 10]
    again = typed(*train_arguments(shards, branch, *WSD, "steps=10", f"branch_from={trunk}", "resume=true"))
    assert "already done" in again.stdout


@pytest.mark.parametrize(
    ("more", "says"),
    (
        (("steps=10", "optim.schedule=linear"), "optim.schedule=wsd"),
        (("steps=10", "seed=2"), "except steps"),
        (("steps=40",), "branch off a run of more than 20 steps"),
        (("steps=15",), "checkpoint.at=[12]"),
        (("steps=10", "init_from=x"), "give one of them"),
        (("steps=10", "optim.warmup=0", "optim.decay=1"), "decays from its first step, so it shares no step"),
        (("steps=10", "branch_from=nowhere"), "branch_from=nowhere is not a run"),
    ),
)
def test_a_branch_that_cannot_be_is_refused(
    more: tuple[str, ...], says: str, trunk: Path, shards: Path, tmp_path: Path, typed: Typed
) -> None:
    arguments = train_arguments(shards, tmp_path / "run", *WSD, f"branch_from={trunk}", *more)
    assert_one_line_error(typed(*arguments), says)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("options", "ends"), ((("optim.min_lr=1",), 8), (("optim.schedule=wsd", "optim.decay=0.25"), 6)))
def test_a_run_goes_on_to_more_steps_as_if_they_had_been_planned(
    options: tuple[str, ...], ends: int, shards: Path, tmp_path: Path
) -> None:
    """After a constant rate (ends: 8 of 8 steps), and before the decay of wsd."""

    def arguments(name: str, *more: str) -> list[str]:
        return train_arguments(shards, tmp_path / name, *options, "optim.warmup=2", "outlier_z=7", *more)[1:]

    with pytest.raises(SystemExit):
        processes.train_until(ALONE, ends, *arguments("longer", "steps=8", "checkpoint.every=2"))
    processes.train(ALONE, *arguments("longer", "steps=12", "resume=true"))
    processes.train(ALONE, *arguments("planned", "steps=12"))
    longer, planned = ending(tmp_path / "longer"), ending(tmp_path / "planned")
    assert {**longer, "metrics": ""} == {**planned, "metrics": ""} and read_run_config(tmp_path / "longer")["steps"] == 12


@pytest.mark.parametrize(
    ("options", "reached", "steps", "want"),
    (
        ({"schedule": "wsd"}, 80, 200, True),
        ({"schedule": "wsd"}, 82, 200, False),
        ({"schedule": "wsd"}, 60, 90, False),  # fewer
        ({"schedule": "cosine"}, 5, 200, True),  # within the warm-up
        ({"schedule": "linear"}, 50, 200, False),
        ({"schedule": "linear", "min_lr": 1.0}, 100, 200, True),
    ),
)
def test_more_steps_are_taken_where_the_rates_so_far_are_the_same(
    options: dict, reached: int, steps: int, want: bool, tmp_path: Path
) -> None:
    cfg = TrainConfig(steps=steps, optim=OptimConfig(warmup=10, **options))
    (tmp_path / "config.yaml").write_text("{model: {}, data: {}, steps: 100}")
    (tmp_path / "checkpoints" / f"step_{reached:08d}").mkdir(parents=True)
    assert goes_on_longer(tmp_path, cfg) == want


def test_a_batch_that_processes_cannot_share_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.run.refuse_unequal_processes", lambda *_: None)
    cfg = TrainConfig(model=DecoderConfig(context=64), batch_tokens=64)
    with pytest.raises(ValueError, match="batch_tokens=64 is not a multiple of context 64 x 2 processes: use batch_tokens=128"):
        check_config(cfg, World(0, 2, torch.device("cpu")))


def test_a_run_that_is_already_done_leaves_no_thread(shards: Path, tmp_path: Path) -> None:
    overrides = train_arguments(shards, tmp_path / "run", "steps=1", "resume=true")[1:]
    for _ in range(2):
        processes.train(ALONE, *overrides)
    for thread in threading.enumerate():
        if thread.name.startswith("prefetch"):
            thread.join(10)
            assert not thread.is_alive()


def test_a_resume_may_change_where_a_machine_reads_and_computes(trunk: Path) -> None:
    ours = read_run_config(trunk)
    other = {"dir": "elsewhere", "path": "books", "workers": 3, "streaming": True}
    refuse_other_config(trunk, ours | {"data": ours["data"] | other, "model": ours["model"] | {"backend": "math"}})
    with pytest.raises(ValueError, match="was started with data.val_fraction="):
        refuse_other_config(trunk, ours | {"data": ours["data"] | other | {"val_fraction": 0.3}})
    for decisive in ({"steps": 9}, {"batch_tokens": 1024}, {"outlier_z": 5.0}, {"seed": 5}):
        with pytest.raises(ValueError, match=f"was started with {next(iter(decisive))}="):
            refuse_other_config(trunk, ours | decisive)


def test_a_resume_may_not_change_the_run_whose_weights_the_run_began_with(trunk: Path, tmp_path: Path) -> None:
    ours = read_run_config(trunk)
    with pytest.raises(ValueError, match=r"was started with init_from=None \(now study/a-s1\)"):
        refuse_other_config(trunk, ours | {"init_from": "runs/study/a-s1"})
    warm, older = tmp_path / "warm", tmp_path / "older"
    for run, more in ((warm, {"init_from": "runs/study/a-s1"}), (older, {})):
        run.mkdir()
        config = {key: value for key, value in ours.items() if key != "init_from"} | more
        (run / "config.yaml").write_text(yaml.safe_dump(config))
    refuse_other_config(warm, ours | {"init_from": "/elsewhere/study/a-s1/"})
    refuse_other_config(older, ours)
    for other in (None, "runs/study/a-s2", "runs/others/a-s1"):
        with pytest.raises(ValueError, match=r"was started with init_from=study/a-s1"):
            refuse_other_config(warm, ours | {"init_from": other})
    refuse_other_config(warm, ours, but=("init_from",))  # a branch takes its weights from the trunk


def test_a_run_without_its_configuration_is_not_continued(trunk: Path, shards: Path, tmp_path: Path, typed: Typed) -> None:
    shutil.copytree(trunk, tmp_path / "run")
    (tmp_path / "run" / "config.yaml").unlink()
    done = typed(*train_arguments(shards, tmp_path / "run", *WSD, "steps=20", "resume=true"))
    assert_one_line_error(done, "already holds a run: its config.yaml is missing, copy it back")


@pytest.mark.parametrize("content", ("steps: [1\n", "model: {}\n"))
def test_a_damaged_configuration_is_named(content: str, trunk: Path, shards: Path, tmp_path: Path, typed: Typed) -> None:
    shutil.copytree(trunk, tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text(content)
    resumed = typed(*train_arguments(shards, tmp_path / "run", *WSD, "steps=20", "resume=true"))
    branched = typed(*train_arguments(shards, tmp_path / "new", *WSD, "steps=10", f"branch_from={tmp_path / 'run'}"))
    for done in (resumed, branched):
        assert_one_line_error(done, f"{tmp_path / 'run' / 'config.yaml'} is damaged")


@pytest.mark.parametrize("decay", (0.1, 0.2, 0.33))
def test_decay_starts_where_a_longer_run_differs(decay: float) -> None:
    cfg = OptimConfig(schedule="wsd", decay=decay, warmup=2)
    for steps in (10, 13, 640):
        start = decay_start(steps, cfg)
        assert all(lr_factor(s, steps, cfg) == lr_factor(s, 10 * steps, cfg) for s in range(start))
        assert lr_factor(start + 1, steps, cfg) < lr_factor(start + 1, 10 * steps, cfg)


def name(*overrides: str) -> str:
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        composed = compose("train", list(overrides), return_hydra_config=True)
        HydraConfig.instance().set_config(composed)
        with open_dict(composed):
            del composed["hydra"]
        return str(default_run_dir(OmegaConf.to_object(composed)))


def test_names_say_what_was_overridden_and_no_two_runs_share_one() -> None:
    assert name() == "runs/baseline-s1"
    assert name("model=diff", "optim.lr=1e-2", "seed=3") == "runs/diff-lr1e-2-s3"
    assert name("monitor.every=1") == "runs/baseline-monitor.every1-s1"
    assert name("checkpoint.every=1") == "runs/baseline-checkpoint.every1-s1"
    assert name("experiment=shakespeare_cpu", "size=micro") == "runs/shakespeare_cpu-baseline-micro-s1"
    long = name(*(f"model.diff.lambda_init={i}" for i in range(30)))
    assert len(long) < 160 and long.endswith("-s1")


def test_names_of_folders_have_at_most_255_bytes() -> None:
    assert len(name(f"data.name='{40 * '中'}'", f"data.path='{60 * '中'}'").encode()) < 255


def test_a_sweep_names_what_is_swept_in_the_folder_of_the_sweep(tmp_path: Path, typed: Typed, monkeypatch) -> None:
    folders = []
    monkeypatch.setattr(train, "check_config", lambda cfg, *_: folders.append(default_run_dir(cfg)))
    monkeypatch.setattr(train, "train", lambda *_: 0.0)
    sweep = ("-m", "size=nano", "steps=1", "optim.lr=1e-3,1e-2", "seed=1,2")
    done = typed("train.py", *sweep, f"hydra.sweep.dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert folders == [tmp_path / f"baseline-lr{lr}-s{seed}" for lr in (0.001, 0.01) for seed in (1, 2)]
    typed("train.py", *sweep, f"runs={tmp_path / 'b'}", f"hydra.sweep.dir={tmp_path}")
    assert folders[-1] == tmp_path / "baseline-lr0.01-s2"


@pytest.mark.parametrize(
    ("values", "says"),
    (
        ({"run_dir": "."}, r"run_dir=\. is not a folder for one run alone: use run_dir=runs/NAME"),
        ({"run_dir": ".."}, "is not a folder for one run alone"),
        ({"batch_tokens": 2**62}, "batch_tokens=4611686018427387904 is out of range"),
    ),
)
def test_a_run_that_can_only_go_wrong_is_refused(values: dict, says: str) -> None:
    cfg = TrainConfig(model=DecoderConfig(context=64), **values)
    with pytest.raises(ValueError, match=says):
        check_ranges(cfg)
        check_config(cfg, World(0, 1, torch.device("cpu")))


def test_a_run_with_init_from_takes_the_architecture_that_is_not_given(tmp_path: Path) -> None:
    source = TrainConfig(model=DecoderConfig(n_layer=3, context=64, layers="d", backend="math"), seed=1)
    source.model.diff.head_norm = "none"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(asdict(source)))
    cfg = TrainConfig(init_from=str(tmp_path), model=DecoderConfig(context=128))
    cfg.model.diff.lambda_warmup = 7
    take_architecture(cfg, ["model.context=128", "model.diff.lambda_warmup=7", "seed=2"])
    model = cfg.model
    assert (model.n_layer, model.layers, model.context, model.backend) == (3, "d", 128, DecoderConfig().backend)
    assert (model.diff.head_norm, model.diff.lambda_warmup) == ("none", 7)
    chosen = TrainConfig(init_from=str(tmp_path))
    take_architecture(chosen, ["model=baseline"])
    assert chosen.model == DecoderConfig()


def test_no_experiment_gives_all_of_its_runs_one_folder() -> None:
    for path in (CONFIG_DIR / "experiment").glob("*.yaml"):
        assert "run_dir" not in yaml.safe_load(path.read_text()), path


@pytest.mark.parametrize(
    ("wish", "steps", "device", "able", "want"),
    (
        (None, 50, "cpu", True, False),
        (None, 50_000, "cpu", True, True),
        (None, 50_000, "cpu", False, False),
        (False, 50_000, "cpu", True, False),
        (True, 1, "cpu", True, True),
        (True, 1, "cpu", False, "c.. is missing, or train with compile=false"),
        (None, 1, "cuda", True, True),
        (None, 1, "cuda", False, "c is missing, or train with compile=false"),
        (False, 1, "cuda", False, False),
    ),
)
def test_a_run_compiles_where_it_pays_and_is_refused_where_it_cannot(
    wish: bool | None, steps: int, device: str, able: bool, want: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "compile_problem", lambda language: "" if able else f"{language} is missing")
    flops, world = 28_000_000 * steps * TrainConfig().batch_tokens, World(0, 1, torch.device(device))
    if isinstance(want, str):
        with pytest.raises(ValueError, match=want):
            compiles(wish, flops, world)
    else:
        assert compiles(wish, flops, world) == want


def test_compiling_wants_a_compiler_headers_and_a_folder_for_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("sysconfig.get_path", lambda name, **scheme: str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache" / "new"))
    for language, variable in (("c++", "CXX"), ("c", "CC")):
        (tmp_path / "Python.h").unlink(missing_ok=True)
        monkeypatch.setenv(variable, "a-compiler")
        assert "Python's headers" in compile_problem(language)
        (tmp_path / "Python.h").touch()
        assert compile_problem(language) == ""
        with monkeypatch.context() as patch:
            patch.setattr("os.statvfs", lambda folder: SimpleNamespace(f_flag=os.ST_NOEXEC if folder == tmp_path else 0))
            assert "(noexec): set TMPDIR or TORCHINDUCTOR_CACHE_DIR to another folder" in compile_problem(language)
        monkeypatch.delenv(variable)
        monkeypatch.setattr("shutil.which", lambda name: None)
        assert f"a compiler for {language.upper()}" in compile_problem(language)


def test_a_resumed_run_remembers_the_window_of_its_guard(shards: Path, tmp_path: Path) -> None:
    def of(name: str, *more: str) -> list[str]:
        return train_arguments(shards, tmp_path / name, "steps=6", "outlier_z=7", "checkpoint.every=3", *more)[1:]

    processes.train(ALONE, *of("whole"))
    with pytest.raises(SystemExit):
        processes.train_until(ALONE, 3, *of("cut"))
    processes.train(ALONE, *of("cut", "resume=true"))
    whole, cut = (read_state(checkpoints(tmp_path / name)[-1])["guard"] for name in ("whole", "cut"))
    assert whole == cut and whole["seen"] == [6, 6]


def test_processes_that_see_other_checkpoints_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "largest", lambda world, number: number + 1)
    with pytest.raises(ValueError, match="put run_dir on a file system that all processes share$"):
        Run(TrainConfig(resume=True, run_dir=str(tmp_path)), None, [], None, None, World(1, 2, torch.device("cpu")))


def test_every_step_and_every_seed_has_dropout_of_its_own(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    monkeypatch.setattr(train.torch, "manual_seed", drawn.append)
    for seed in (1, 2):
        arguments = train_arguments(shards, tmp_path / str(seed), "steps=3", f"seed={seed}")[1:]
        processes.train(ALONE, *arguments)
    assert len(set(drawn)) == 6


def test_losses_by_kind_are_of_the_rows_that_were_trained(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last micro batch of a step, and not its first one."""
    right, seen = train.losses_by_kind, []

    def recorded(model, inputs, targets, source, samples, world):  # noqa: ANN001, ANN202
        seen.append((inputs, source, samples))
        return right(model, inputs, targets, source, samples, world)

    monkeypatch.setattr(train, "losses_by_kind", recorded)
    more = ("steps=2", "data.retrieval.weight=30", "model.context=192", "batch_tokens=1536", "micro_batch=2")
    processes.train(ALONE, *train_arguments(shards, tmp_path / "run", *more)[1:])
    assert len(seen) == 2
    for inputs, source, samples in seen:
        for row, number in zip(inputs.numpy(), samples, strict=True):
            assert (row == source.sample(number, 1)[:-1]).all()
