"""A run's folder: its name, and branches, which end as runs of their length that were trained alone."""

import os
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
from configs import CONFIG_DIR
from configs.files import read_run_config
from model.config import DecoderConfig
from tests.conftest import Typed, assert_one_line_error, train_arguments
from tests.faults.runs import ending
from tests.training import processes
from tests.training.test_train import ALONE, trained
from training import parallel
from training.checkpoint import checkpoints
from training.distributed import World
from training.optim import OptimConfig
from training.parallel import compile_problem, compiles
from training.run import (
    Run,
    TrainConfig,
    check_config,
    default_run_dir,
    goes_on_longer,
    refuse_other_config,
    take_architecture,
    trunk_checkpoint,
)

WSD = (
    "optim.schedule=wsd", "optim.decay=0.2", "optim=muon", "model=diff", "model.n_layer=1", "monitor.every=3", "eval_every=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def trunk(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("trunk") / "run"
    trained(shards, run_dir, *WSD, "steps=10", "checkpoint.at=[4]", "checkpoint.every=3", "checkpoint.keep=1")
    assert [folder.name for folder in checkpoints(run_dir)] == ["step_00000004", "step_00000010"]
    assert read_run_config(run_dir)["checkpoint"]["at"] == [4] and not list(run_dir.glob(".*part"))
    return run_dir


def test_a_branch_is_the_run_of_its_length_trained_alone(trunk: Path, shards: Path, tmp_path: Path, typed: Typed) -> None:
    alone = trained(shards, tmp_path / "alone", *WSD, "steps=5")
    branch = trained(shards, tmp_path / "branch", *WSD, "steps=5", f"branch_from={trunk}")
    assert ending(branch) == ending(alone)
    arguments = train_arguments(shards, branch, *WSD, "steps=5", f"branch_from={trunk}", "resume=true")
    assert "already done" in typed(*arguments).stdout
    (branch / "config.yaml").unlink()
    assert_one_line_error(typed(*arguments), "its config.yaml is missing, copy it back")


def test_a_branch_that_cannot_be_is_refused(trunk: Path) -> None:
    planned = read_run_config(trunk) | {"branch_from": str(trunk), "steps": 5}
    cfg = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainConfig), planned))
    for part, name, value, says in (
        (cfg.optim, "schedule", "linear", "optim.schedule=wsd"),
        (cfg, "seed", 2, "except steps"),
        (cfg, "steps", 20, "branch off a run of more than 10 steps"),
        (cfg, "steps", 8, r"checkpoint.at=\[6\]"),
        (cfg.optim, "decay", 1.0, "optim.decay below 1"),
        (cfg, "branch_from", "nowhere", "branch_from=nowhere: give a longer run"),
    ):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match=says):
            patch.setattr(part, name, value)
            trunk_checkpoint(cfg)


@pytest.mark.parametrize(("options", "ends"), ((("optim.min_lr=1",), 4), (("optim.schedule=wsd", "optim.decay=0.25"), 2)))
def test_a_run_goes_on_to_more_steps_as_if_they_had_been_planned(
    options: tuple[str, ...], ends: int, shards: Path, tmp_path: Path
) -> None:
    """After a constant rate (ends: 4 of 4 steps), and before the decay of wsd."""

    def arguments(name: str, *more: str) -> list[str]:
        return train_arguments(shards, tmp_path / name, *options, "model.n_layer=1", "optim.warmup=1", *more)[1:]

    with pytest.raises(SystemExit):
        processes.train_until(ALONE, ends, *arguments("longer", "steps=4", "checkpoint.every=2"))
    processes.train(ALONE, *arguments("longer", "steps=6", "resume=true"))
    processes.train(ALONE, *arguments("planned", "steps=6"))
    longer, planned = ending(tmp_path / "longer"), ending(tmp_path / "planned")
    assert {**longer, "metrics": ""} == {**planned, "metrics": ""} and read_run_config(tmp_path / "longer")["steps"] == 6


def test_more_steps_are_taken_where_the_rates_so_far_are_the_same(tmp_path: Path) -> None:
    for schedule, min_lr, reached, steps, want in (
        ("wsd", 0.1, 80, 200, True),
        ("wsd", 0.1, 82, 200, False),
        ("wsd", 0.1, 60, 90, False),  # fewer
        ("cosine", 0.1, 5, 200, True),  # within the warm-up
        ("linear", 0.1, 50, 200, False),
        ("linear", 1.0, 100, 200, True),
    ):
        folder = tmp_path / f"{schedule}-{reached}"
        (folder / "checkpoints" / f"step_{reached:08d}").mkdir(parents=True)
        (folder / "config.yaml").write_text("{model: {}, data: {}, steps: 100}")
        cfg = TrainConfig(steps=steps, optim=OptimConfig(schedule=schedule, warmup=10, min_lr=min_lr))
        assert goes_on_longer(folder, cfg) == want


def test_what_is_wrong_is_seen_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.run.refuse_unequal_processes", lambda *_: None)
    monkeypatch.setattr(World, "largest", lambda world, number: number + 1)
    with pytest.raises(ValueError, match="see different checkpoints: put .* on a file system that they share$"):
        Run(TrainConfig(resume=True, run_dir=str(tmp_path)), None, [], None, None, World(1, 2, torch.device("cpu")))
    cfg = TrainConfig(model=DecoderConfig(context=64), batch_tokens=64)
    with pytest.raises(ValueError, match="64 is not a multiple of context 64 x 2 processes: use batch_tokens=128"):
        check_config(cfg, World(0, 2, torch.device("cpu")))


def test_a_resume_may_change_where_a_machine_reads_and_computes_and_nothing_else(trunk: Path, tmp_path: Path) -> None:
    ours = read_run_config(trunk)
    other = {"dir": "elsewhere", "path": "books", "workers": 3, "streaming": True}
    refuse_other_config(trunk, ours | {"data": ours["data"] | other, "model": ours["model"] | {"backend": "math"}})
    for decisive in ({"steps": 9}, {"batch_tokens": 1024}, {"seed": 5}, {"data": ours["data"] | other | {"val_fraction": 0.3}}):
        with pytest.raises(ValueError, match=f"was started with {next(iter(decisive))}"):
            refuse_other_config(trunk, ours | decisive)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(ours | {"init_from": "runs/study/a-s1"}))
    refuse_other_config(tmp_path, ours | {"init_from": "/elsewhere/study/a-s1/"})
    refuse_other_config(tmp_path, ours, but=("init_from",))  # a branch takes its weights from the trunk
    for weights in (None, "runs/study/a-s2", "runs/others/a-s1"):
        with pytest.raises(ValueError, match=r"was started with init_from=study/a-s1"):
            refuse_other_config(tmp_path, ours | {"init_from": weights})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({key: value for key, value in ours.items() if key != "init_from"}))
    refuse_other_config(tmp_path, ours)  # an older run


def test_names_say_what_was_overridden_and_no_two_runs_share_one() -> None:
    def name(*overrides: str) -> str:
        with initialize_config_dir(str(CONFIG_DIR), version_base=None):
            composed = compose("train", list(overrides), return_hydra_config=True)
        HydraConfig.instance().set_config(composed)
        with open_dict(composed):
            del composed["hydra"]
        return str(default_run_dir(OmegaConf.to_object(composed)))

    assert name() == "runs/baseline-s1"
    assert name("model=diff", "optim.lr=1e-2", "seed=3") == "runs/diff-lr1e-2-s3"
    assert name("monitor.every=1") == "runs/baseline-monitor.every1-s1"
    assert name("experiment=shakespeare_cpu", "size=micro") == "runs/shakespeare_cpu-baseline-micro-s1"
    long = name(*(f"model.diff.lambda_init={i}" for i in range(30)), f"data.name='{40 * '中'}'")
    assert len(long.encode()) < 160 and long.endswith("-s1")


def test_a_sweep_names_what_is_swept_in_the_folder_of_the_sweep(tmp_path: Path, typed: Typed, monkeypatch) -> None:
    folders = []
    monkeypatch.setattr(train, "check_config", lambda cfg, *_: folders.append(default_run_dir(cfg)))
    monkeypatch.setattr(train, "train", lambda *_: 0.0)
    more = (f"runs={tmp_path / 'b'}", f"hydra.sweep.dir={tmp_path}")
    done = typed("train.py", "-m", "size=nano", "steps=1", "optim.lr=1e-3,1e-2", "seed=2", *more)
    assert done.returncode == 0, done.stderr
    assert folders == [tmp_path / f"baseline-lr{lr}-s2" for lr in (0.001, 0.01)]


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
    resumed = TrainConfig(init_from="gone", run_dir=str(tmp_path), resume=True)
    take_architecture(resumed, [])
    assert resumed.model.layers == "d"
    chosen = TrainConfig(init_from=str(tmp_path))
    take_architecture(chosen, ["model=baseline"])
    assert chosen.model == DecoderConfig()


def test_a_run_compiles_where_it_pays_and_is_refused_where_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    for wish, steps, device, able, want in (
        (None, 50, "cpu", True, False),
        (None, 50_000, "cpu", True, True),
        (None, 50_000, "cpu", False, False),
        (False, 50_000, "cpu", True, False),
        (True, 1, "cpu", True, True),
        (True, 1, "cpu", False, "c.. is missing, or train with compile=false"),
        (None, 1, "cuda", True, True),
        (None, 1, "cuda", False, "c is missing, or train with compile=false"),
        (False, 1, "cuda", False, False),
    ):
        monkeypatch.setattr(parallel, "compile_problem", lambda language, able=able: "" if able else f"{language} is missing")
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


def test_losses_by_kind_are_of_the_rows_that_were_trained_and_every_step_and_seed_has_another_dropout(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last micro batch of a step, and not its first one."""
    right, seen, drawn = train.losses_by_kind, [], []

    def recorded(model, inputs, targets, source, samples, world):  # noqa: ANN001, ANN202
        seen.append((inputs, source, samples))
        return right(model, inputs, targets, source, samples, world)

    monkeypatch.setattr(train, "losses_by_kind", recorded)
    monkeypatch.setattr(train.torch, "manual_seed", drawn.append)
    more = ("steps=2", "model.n_layer=1", "data.retrieval.weight=30", "model.context=192", "batch_tokens=1536")
    for seed in (1, 2):
        trained(shards, tmp_path / str(seed), *more, "micro_batch=2", f"seed={seed}")
    assert len(set(drawn)) == len(seen) == 4
    for inputs, source, samples in seen:
        for row, number in zip(inputs.numpy(), samples, strict=True):
            assert (row == source.sample(number, 1)[:-1]).all() or (row == source.sample(number, 2)[:-1]).all()
