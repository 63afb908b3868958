"""The search for learning rates: on made-up loss curves it finds the best, with equal budgets, and says what it could not."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from ablation import tuning
from ablation.tuning import Point, Score, TuneConfig, beyond, exchanged, in_title, score, tuned, tuning_notes, wanted

VALUES = [[0.005, 0.01, 0.02, 0.04], [0.0015, 0.003, 0.006]]
CFG = TuneConfig(["optim.muon_lr", "optim.lr"], VALUES, refine=["optim.muon_lr"])


def search(cfg: TuneConfig, loss: Callable[[float, float], float]) -> tuple[dict[Point, Score], list[int]]:
    scores, rounds = {}, []
    while points := wanted(cfg, scores):
        rounds.append(len(points))
        scores |= {point: score(cfg, [loss(*point)]) for point in points}
    return scores, rounds


def bowl(best_muon: float, best_lr: float) -> Callable[[float, float], float]:
    return lambda muon, lr: 4 + math.log(muon / best_muon) ** 2 + 0.3 * math.log(lr / best_lr) ** 2


def test_the_best_of_a_bowl_needs_a_fixed_budget_and_at_the_edge_a_wider_grid() -> None:
    scores, rounds = search(CFG, bowl(0.0141, 0.006 / 1.9))
    assert rounds == [4, 2, 2]
    result = tuned(CFG, scores)
    assert result.best == {"optim.muon_lr": 0.0141, "optim.lr": 0.003} and not result.widened and not result.edge
    assert len(result.scores) == 8 == CFG.fewest
    for best, widened, at in ((0.05, 1, 0.0566), (0.08, 2, 0.08), (0.0025, 2, 0.0025)):
        result = tuned(CFG, search(CFG, bowl(best, 0.003))[0])
        assert result.best["optim.muon_lr"] == at and result.widened == widened and not result.edge
    result = tuned(CFG, search(CFG, bowl(10.0, 0.003))[0])
    assert result.widened == 2 and result.edge == ["optim.muon_lr"]
    notes = "\n".join(tuning_notes({"baseline": result, "twin": tuned(CFG, search(CFG, bowl(0.01, 0.003))[0])}, CFG))
    assert "baseline is at an end of the tried values" in notes and "baseline (10)" in notes and "8 trials an arm" in notes
    shorter = {"a": replace(tuned(CFG, search(CFG, bowl(0.01, 0.003))[0]), longest=500)}
    assert in_title(shorter, CFG, 2000) == ", tuned with one seed and by trials of 25% of the longest runs' length"
    assert in_title(shorter, replace(CFG, seeds=[101, 102]), 500) == "" and in_title({}, CFG, 1) == ", rates not tuned here"
    assert tuning_notes({}, CFG)[0].startswith("Not tuned here")
    cfg = replace(CFG, full=True, refine=[])  # all combinations are the same for every arm
    scores, rounds = search(cfg, bowl(10.0, 0.003))
    assert rounds == [12] == [cfg.fewest] and tuned(cfg, scores).edge == ["optim.muon_lr"]


def test_an_arm_whose_trials_all_diverged_is_refused_unless_an_exchange_helps() -> None:
    bad = search(CFG, lambda muon, lr: math.inf)[0]
    good = search(CFG, lambda muon, lr: math.inf if muon > 0.03 else bowl(0.02, 0.006)(muon, lr))[0]
    with pytest.raises(ValueError, match="all trials of an arm diverged .*lower tune.values"):
        tuned(CFG, bad)
    assert exchanged({"bad": bad, "good": good}) == {"bad": [tuple(tuned(CFG, good).best.values())], "good": []}


def test_an_exchange_brings_what_the_search_of_an_arm_has_missed() -> None:
    """An arm with two valleys: its search goes into the near, shallow one; another arm's best value lies in the deep one."""
    near, deep = bowl(0.02, 0.003), bowl(0.0025, 0.024)
    losses = {"deep": deep, "two": lambda *point: min(near(*point), deep(*point) - 1), "twin": deep}
    scores = {arm: search(CFG, loss)[0] for arm, loss in losses.items()}
    assert tuned(CFG, scores["two"]).best["optim.muon_lr"] == 0.02
    more = exchanged(scores)
    assert [len(points) for points in more.values()] == [0, 1, 0]  # the others have tried the shallow valley's best
    for arm, points in more.items():
        scores[arm] |= {point: score(CFG, [losses[arm](*point)]) for point in points}
    best = tuned(CFG, scores["two"]).best
    assert best == tuned(CFG, scores["deep"]).best and best["optim.muon_lr"] < 0.005
    assert "all other arms" in "\n".join(tuning_notes({"two": tuned(CFG, scores["two"])}, replace(CFG, exchange=True)))


def test_an_arm_whose_best_value_came_from_an_exchange_tries_values_beyond_it() -> None:
    """Otherwise the best value lies at an end, and nobody knows whether the arm would gain from a value beyond it."""

    def step(muon: float, lr: float) -> float:
        """With any other muon_lr, the best lr is 0.003, so the arm's search never leaves it."""
        return 5 + bowl(0.01, 0.003)(muon, lr) if muon > 0.004 else 4 + abs(math.log(lr / 0.03))

    scores = search(CFG, step)[0]
    assert beyond(CFG, scores) == []  # the best point is of the arm's search
    scores[0.0025, 0.024] = score(CFG, [step(0.0025, 0.024)])  # the exchange: another arm's best point
    assert tuned(CFG, scores).edge == ["optim.muon_lr", "optim.lr"]
    assert beyond(CFG, scores) == [(0.00125, 0.024), (0.0025, 0.048)]
    lowest = {(0.0025, 0.0005): Score(0, 0.1)}  # both at the lower end
    assert beyond(CFG, scores | lowest) == [(0.00125, 0.0005), (0.0025, 0.00025)]
    scores |= {point: score(CFG, [step(*point) + (0.1 if point[0] < 0.002 else 0)]) for point in beyond(CFG, scores)}
    assert beyond(CFG, scores) == [] and tuned(CFG, scores).edge == []
    assert tuned(CFG, scores).best == {"optim.muon_lr": 0.0025, "optim.lr": 0.024}


def test_a_task_that_is_learned_by_a_jump_is_judged_by_the_seeds_that_solve_it() -> None:
    """At the higher rate two of three seeds jump and one fails badly: the mean and a single seed would reject that rate."""
    cfg = TuneConfig(["optim.lr"], [[0.006, 0.024]], full=True, solved=0.05, seeds=[101, 102, 103])
    plateau, jumps = [1.0, 1.01, 1.02], [3.9, 0.01, 0.002]
    assert wanted(cfg, {}) == [(0.006,), (0.024,)]
    for judge, best in ((cfg, 0.024), (replace(cfg, solved=None), 0.006)):
        scores = {(0.006,): score(judge, plateau), (0.024,): score(judge, jumps)}
        assert wanted(judge, scores) == [] and tuned(judge, scores).best == {"optim.lr": best}
    assert score(cfg, [math.inf, 0.05, 0.06]) == Score(2, 0.06)  # a trial that diverged has not solved it
    arms = {"a": tuned(cfg, {(0.006,): score(cfg, plateau), (0.024,): score(cfg, jumps)})}
    assert "3 seeds solve the task" in tuning_notes(arms, cfg)[0] and tuning.rates_table(arms, cfg)[0].endswith("| 2 of 6 |")
