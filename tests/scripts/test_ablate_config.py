"""Experiments and tiers: every one loads, and its arms are what they claim to be. (tests/wrong_inputs has what is refused.)"""

import math
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from ablation.experiment import AblateConfig, evaluation_list, texts_of
from ablation.jobs import environment
from ablation.plan import Study
from ablation.records import PUBLISHED, differing, record_of, recorded_model, write_records
from ablation.study import PlannedRun
from ablation.tuning import TuneConfig
from configs import CONFIG_DIR
from eval.report.runs import Run
from model.config import DecoderConfig
from model.conversion import Conversion, converted_config
from scripts import ablate  # noqa: F401  # registers its schema
from tests.scripts.conftest import quoted
from training.run import TrainConfig

ARMS = ("baseline", "gated", "diff", "diff_v2")
# By name, so that a user's file needs no change here; docs/ablations.md has the same list.
STUDIES = "ablation_v1 ablation_v2 introspective scaling lr_stability hybrid head_count noise mqar family emergence retrieval"
OF_MAIN = "main main_controls main_paths main_lr main_42m main_42m_rates main_family answer pretrained"
EXPERIMENTS = (*OF_MAIN.split(), *STUDIES.split())
SIZES = {"cpu": (1.05e6, "16", "16"), "cpu_long": (1.05e6, "8", "32"), "gpu": (29.4e6, "16", "48")}
SIZES |= {"gpu_12m": (11.8e6, "16", "32")}


def composed(shards: Path, *overrides: str) -> AblateConfig:
    """Without the published records, which would add to the trials of a tuning."""
    data = f"train={quoted(f'data.dir={shards}')}"
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        return OmegaConf.to_object(compose("ablate", [data, "records=none", *overrides]))


def few(cfg: AblateConfig, *arms: str, points: int = 0) -> AblateConfig:
    """The experiment with these arms alone, at the last `points` points of its grid (0: at all): composing takes time."""
    cfg.arms, cfg.fewer_seeds, cfg.select, cfg.pairs = {name: cfg.arms[name] for name in arms}, {}, [], {}
    cfg.grid = dict([*cfg.grid.items()][-points:])
    return cfg


def untuned(cfg: AblateConfig, folder: Path) -> tuple[list, dict[str, PlannedRun]]:
    """Arms, and runs by name, of a study as if nothing were to be tuned."""
    cfg.runs, cfg.tune = str(folder), TuneConfig()
    study = Study(cfg, "study")
    return study.arms, {run.name: run for run in study.runs()}


OF_TIERS = [*(("ablation_v1", tier) for tier in SIZES), ("main", "gpu_12m")]


@pytest.mark.parametrize(("experiment", "tier"), [*((name, None) for name in EXPERIMENTS if name != "pretrained"), *OF_TIERS])
def test_every_experiment_loads_and_its_arms_match(experiment: str, tier: str | None, shards: Path, tmp_path: Path) -> None:
    cfg = composed(shards, f"experiment={experiment}", "seeds=1", *([f"tier={tier}"] if tier else []))
    if cfg.grid and not cfg.tune.each:  # the points of their grids differ in training alone, not in the models
        cfg.grid = dict([*cfg.grid.items()][-1:])
        cfg.tune.at, cfg.branch = None, False
    arms, runs = untuned(cfg, tmp_path)  # refuses arms off by more than 0.5 % where `matched` is claimed
    assert cfg.matched and len(runs) == len(arms) == len(cfg.select or cfg.arms) * max(1, len(cfg.grid))
    for arm in arms:
        if arm.reference:
            (reference,) = (other for other in arms if other.name == arm.reference)
            assert reference.point == arm.point and reference.arm == next(iter(cfg.arms))
            model, other = (asdict(runs[f"{name}-s1"].config.model) for name in (arm.name, reference.name))
            assert experiment in ("main_lr", "main_42m_rates") or model != other  # their arms differ in their rates alone
    shapes = {arm.name: tuple(arm.facts[key] for key in ("heads", "d", "head_norm")) for arm in arms}
    if experiment == "ablation_v1" and tier:
        assert SIZES[tier] == (pytest.approx(arms[0].facts["params_non_embedding"], rel=0.01), *shapes["baseline"][:2])
    if experiment == "ablation_v1" and not tier:  # the shapes of Table 6
        assert shapes["baseline"] == ("16", "16", "no") and shapes["half_heads"] == ("8", "32", "no")
        assert shapes["diff"] == ("8", "16", "yes") and shapes["no_head_norm"] == ("8", "16", "no")


def test_arms_begin_with_converted_models_and_their_records_tell_the_shapes(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ways = {"zero": {}, "mirror": {"init": "mirror"}, "head_norm": {"to": "same", "sublayer_norm": True}}
    ways |= {to: {"to": to} for to in ("same", "diff_v2", "gated", "dex")}
    source = DecoderConfig(n_layer=2, n_head=2, d_model=32, d_ff=48, vocab_size=5000)
    for way, options in ways.items():
        folder = tmp_path / "runs" / "pretrained" / way
        folder.mkdir(parents=True)
        config = TrainConfig(model=converted_config(source, Conversion(**options)))
        (folder / "config.yaml").write_text(yaml.safe_dump(asdict(config)))
    arms, runs = untuned(composed(shards, "experiment=pretrained", "seeds=1"), tmp_path)
    models = {arm.arm: runs[f"{arm.name}-s1"].config.model for arm in arms}
    assert [model.layers for model in models.values()] == list("bddvgbx") and len(runs) == 14
    assert {(model.n_layer, model.d_model, model.d_ff, model.context) for model in models.values()} == {(2, 32, 48, 1024)}
    assert models["head_norm"].baseline.head_norm == "affine" and models["mirror"].diff.lambda_warmup == 0
    assert models["zero"].diff.lambda_init == 0 and models["zero"].diff.lambda_warmup == 200
    records = [{"config": differing(asdict(run.config))} for run in runs.values()]
    assert [recorded_model(records, f"{of}/zero") for of in ("/elsewhere/pretrained", "other")] == [models["zero"], None]


def test_an_experiment_is_tuned_at_the_point_and_by_the_metric_that_it_names(shards: Path, tmp_path: Path) -> None:
    studies = {}
    for name in ("noise", "emergence"):
        cfg = composed(shards, f"experiment={name}", "seeds=1", f"runs={tmp_path}")
        studies[name] = Study(few(cfg, "baseline", "diff"), name)
    noise, emergence = (studies[name].trials() for name in ("noise", "emergence"))
    assert {trial.config.data.mqar.distractors for trial in noise} == {0.8}
    assert {trial.config.model.context for trial in emergence} == {256}  # the last point of the grid
    assert len(noise) == len(emergence) == 4 * 2 and {trial.config.steps for trial in emergence} == {850}
    read = {"train.loss_retrieval": 2.0, "train.val_loss": 3.0}
    emergence[0].measured = lambda: SimpleNamespace(value=read.get)
    assert studies["emergence"].judged(emergence[0]) == 2.0


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the runs that count as finished, without a folder."""
    names: set[str] = set()
    monkeypatch.setattr(PlannedRun, "left", lambda run: [] if run.name in names else [["train.py"]])
    monkeypatch.setattr(PlannedRun, "measured", lambda run: SimpleNamespace(value=lambda name: 1.0))
    return names


def off(rate: float, arm: str, likes: dict[str, float]) -> float:
    """How far Muon's rate is from the one that the arm likes, which is 0.02 where `likes` has none."""
    return abs(math.log(rate / likes.get(arm, 0.02)))


def test_with_an_exchange_every_arm_tries_the_best_of_others_and_beyond(
    shards: Path, tmp_path: Path, finished: set[str]
) -> None:
    """The exchange begins when all searches are over, and ends the tuning when its trials are over."""
    cfg = composed(shards, "experiment=noise", "seeds=1", f"runs={tmp_path}", "~grid.at80_long", "~grid.at90")
    study = Study(few(cfg, *ARMS, points=1), "noise")
    likes = {"baseline-at80": 0.04, "diff-at80": 0.0025}
    hidden = ("gated-at80", 0.0025)  # which its search does not find
    study.judged = lambda t: -1.0 if (t.arm, t.config.optim.muon_lr) == hidden else off(t.config.optim.muon_lr, t.arm, likes)
    rounds = 0
    while wanted := [trial for trial in study.trials() if trial.left()]:
        rounds += 1
        late = "gated-at80" if rounds == 1 else ""  # one arm is behind: it delays the exchange
        finished |= {trial.name for trial in wanted if trial.arm != late}
        assert not study.tuned() or not [trial for trial in study.trials() if trial.left()]
    results = study.tuned()
    assert rounds >= 5 and set(results) == set(study.cfg.arms)
    tried = {arm: {point for point, _ in result.scores} for arm, result in results.items()}
    assert all(tuple(result.best.values()) in points for result in results.values() for points in tried.values())
    assert results["gated"].best["optim.muon_lr"] == 0.0025 and not results["gated"].edge
    assert 0.00125 in {muon for muon, _ in tried["gated"]} and 0.00125 not in {muon for muon, _ in tried["diff_v2"]}


def test_with_each_every_point_of_the_grid_has_its_rates(shards: Path, tmp_path: Path, finished: set[str]) -> None:
    study = Study(composed(shards, "experiment=scaling", "seeds=1", f"runs={tmp_path}", "texts.books=none.txt"), "scaling")
    likes = {"baseline-0.13M": 0.04, "diff-0.13M": 0.01, "baseline-2.1M": 0.005}
    study.judged = lambda t: off(t.config.optim.muon_lr, t.arm, likes) + abs(math.log(t.config.optim.lr / 0.012))
    first = study.trials()
    assert len(first) == 4 * len(study.arms) and len({trial.name for trial in first}) == len(first)
    assert {trial.config.steps for trial in first} == {run.steps for run in study._configs.values()}  # of the whole length
    while wanted := [trial for trial in study.trials() if trial.left()]:
        finished |= {trial.name for trial in wanted if trial.arm != "diff-1.1M"}
        if {trial.arm for trial in wanted} == {"diff-1.1M"}:
            break
    results = study.tuned()
    assert set(results) == {arm.name for arm in study.arms if arm.point != "1.1M"}  # a point waits for its arms alone
    rates = {run.name: run.config.optim.muon_lr for run in study.runs()}
    assert rates == {f"{arm}-s1": likes.get(arm, 0.02) for arm in results}
    tried = {arm: {muon for (muon, _), _ in result.scores} for arm, result in results.items()}
    assert 0.04 in tried["diff-0.13M"] and 0.08 in tried["baseline-0.13M"] and 0.08 not in tried["diff-0.44M"]


def test_a_trunk_that_diverged_before_a_branch_stops_no_study(shards: Path, tmp_path: Path) -> None:
    """A shorter run is then trained as a whole; it branches off if the trunk's checkpoint for it is there."""
    cfg = few(composed(shards, "experiment=main", "seeds=1"), "baseline")
    trunk = tmp_path / "study" / "baseline-10.5M-s1"
    (trunk / "checkpoints" / "step_00000512").mkdir(parents=True)  # where the shortest run's decay begins
    before = [*untuned(cfg, tmp_path)[1].values()]
    assert ["branch_from" in " ".join(run.overrides) for run in before] == [True, True, False]
    (trunk / "diverged.json").write_text('{"error": "the loss is nan at step 600"}')
    after = untuned(cfg, tmp_path)[1].values()
    assert ["branch_from" in " ".join(run.overrides) for run in after] == [True, False, False]
    left = [" ".join(run.left()[0]) for run in before[:2]]
    assert ["branch_from" in command for command in left] == [True, False]  # of a study that goes on after that


def test_a_study_tells_its_costs_and_trains_trunks_first(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Shorter horizons cost their decay alone; arms that are not tuned yet count, too."""
    cfg = few(composed(shards, "experiment=main", "tier=gpu_12m", "seeds=2", f"runs={tmp_path}"), "baseline", "gated")
    Study(cfg, "study").print_costs()
    printed = capsys.readouterr().out
    assert printed.startswith("study: 28 runs left (16 of them or more for the tuning): ")
    assert printed.endswith(f" h at 40 % MFU of 989 TFLOP/s (tier.peak_flops); a log of each in {tmp_path}/study/logs\n")
    cfg.tune = TuneConfig()
    study = Study(cfg, "study")
    work = {run.name: run.work for run in study.runs()}
    assert work["baseline-30M-s1"] == pytest.approx(0.2 * 916 / 3664 * work["baseline-120M-s1"], rel=0.01)
    chains = study.describe(study.runs())
    assert len(chains) == 4 and all([run.config.steps for run in chain] == [3664, 1832, 916] for chain in chains)


def test_a_new_arm_takes_the_records_of_the_others_from_two_studies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = composed(tmp_path, "experiment=family", f"runs={tmp_path}", "+arms.mine=['model=softpick']")
    cfg.arms = {name: cfg.arms[name] for name in ("baseline", "mine")}
    trials = Study(cfg, "family").trials()
    lines = [{"step": 1200, "tokens": 1, "loss": 1.0, "val_loss": 1.0, "time_s": 36.0}]
    for study, seeds in (("mqar", (101, 102)), ("family", (103,))):
        runs = [run for run in trials if run.arm == "baseline-at80" and run.seed in seeds]
        measured = [Run(run.folder, run.name, "baseline", asdict(run.config), {}, lines, lines, {}) for run in runs]
        write_records(tmp_path / "published" / study / PUBLISHED, map(record_of, measured))
    cfg.records = str(tmp_path / "published")
    Study(cfg, "family").print_costs()
    assert capsys.readouterr().out.startswith("family: 76 runs left (36 of them or more for the tuning): about 46 minutes, one")


def test_jobs_share_cores_and_take_a_gpu_each_and_texts_of_evaluations_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "OMP_NUM_THREADS" not in environment(0, 1, [])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert environment(0, 3, [])["OMP_NUM_THREADS"] == "2"
    assert [environment(slot, 3, ["0", "3"])["CUDA_VISIBLE_DEVICES"] for slot in range(3)] == ["0", "3", "0"]
    listed = ["perplexity tokens=5", "perplexity text=there/mine.txt", "needle text=other.txt", "quantization text=q.txt"]
    read = texts_of(evaluation_list(AblateConfig(arms={}, evaluations=listed, texts={"books": "books.txt"})))
    assert read == {"mine": "there/mine.txt", "quantization_q": "q.txt", "books": "books.txt"}
