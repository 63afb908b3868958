"""Learning rates of every single arm: the trials to run next, and their results (docs/METHODS.md, 8.3, has the rules)."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Annotated, Any, NamedTuple

from eval.report.tables import markdown

Point = tuple[float, ...]  # one value per key of the grid


class Score(NamedTuple):
    """What judges a point; the lowest is best."""

    unsolved: int  # trials that did not solve the task, 0 without `tune.solved`
    loss: float  # mean of the metric over the trials' seeds, or with `tune.solved` the median


@dataclass
class TuneConfig:
    """The search for the learning rates of every arm."""

    keys: list[str] = field(default_factory=list)  # configuration keys to search; empty: no tuning
    values: list[list[float]] = field(default_factory=list)  # for each key, the values to try first, in rising order
    refine: list[str] = field(default_factory=list)  # keys searched once more, halfway to the best value's neighbours
    train: list[str] = field(default_factory=list)  # overrides of the trials, for example their number of steps
    seeds: list[int] = field(default_factory=lambda: [101])  # seeds of the trials, which no compared run may have
    metric: str = "train.val_loss"  # train.NAME, the metric that judges the trials; lower is better
    at: str | None = None  # point of the experiment's grid to tune at, for all points; None: the last point
    each: bool = False  # tune at every point of the grid: each has its trials and rates
    widen: Annotated[int, "[0, inf)"] = 2  # how often a grid may be widened
    full: bool = False  # try all combinations of the values, the same for every arm, and no others
    solved: float | None = None  # a trial whose metric ends at most here has solved the task; None: judge by the mean metric
    exchange: bool = False  # whether every arm finally tries the best values of all other arms, too

    @property
    def fewest(self) -> int:
        """The number of points that an arm tries, if no grid is widened and nothing is exchanged."""
        sizes = [len(values) for values in self.values]
        return math.prod(sizes) if self.full else 1 + sum(size - 1 for size in sizes) + 2 * len(self.refine)


@dataclass
class Tuned:
    """The results of an arm's trials, in order of trial."""

    scores: list[tuple[Point, Score]]
    best: dict[str, float]  # key -> value, in the order of a point's values
    widened: int  # how often a grid was widened
    edge: list[str]  # keys whose best value is the lowest or highest tried
    tokens: int = 0  # read by all of the arm's trials
    longest: int = 0  # tokens of the arm's longest trial
    seconds: float = 0.0


def check(cfg: TuneConfig, seeds: list[int]) -> None:
    """Raise ValueError for a wrong grid, or for trials with seeds of the comparison."""
    if len(cfg.keys) != len(cfg.values):
        raise ValueError(f"tune.keys={cfg.keys}, but tune.values has {len(cfg.values)} lists: give one list for each key")
    for key, values in zip(cfg.keys, cfg.values, strict=True):
        if len(values) < 2 or sorted(set(values)) != list(values) or values[0] <= 0:
            raise ValueError(f"tune.values={list(values)} of {key}: give two or more values above 0 in rising order")
    if unknown := [key for key in cfg.refine if key not in cfg.keys]:
        raise ValueError(f"tune.refine has {unknown[0]}, which is not in tune.keys: use {', '.join(cfg.keys)}")
    if cfg.keys and (not cfg.seeds or set(cfg.seeds) & set(seeds)):
        raise ValueError(f"tune.seeds={cfg.seeds} is empty or has seeds of the comparison: use tune.seeds=[101]")


def score(cfg: TuneConfig, metrics: list[float]) -> Score:
    """The score of a point whose trials ended with these metrics, infinity where a trial diverged."""
    if cfg.solved is None:
        return Score(0, sum(metrics) / len(metrics))
    return Score(sum(not metric <= cfg.solved for metric in metrics), median(metrics))


def wanted(cfg: TuneConfig, scores: Mapping[Point, Score]) -> list[Point]:
    """The points to try next, given the scores so far; [] when the search is over."""
    return [point for point in _search(cfg, scores)[0] if point not in scores]


def exchanged(scores: Mapping[str, Mapping[Point, Score]]) -> dict[str, list[Point]]:
    """Arm -> the best points of the other arms that the arm has not tried. scores: arm -> point -> score."""
    some_ended = [tried for tried in scores.values() if min(tried.values()).loss < math.inf]
    best = dict.fromkeys(min(tried, key=tried.get) for tried in some_ended)
    return {arm: [point for point in best if point not in tried] for arm, tried in scores.items()}


def beyond(cfg: TuneConfig, scores: Mapping[Point, Score]) -> list[Point]:
    """After an exchange that brought an arm its best point: one step beyond it, for each key at an end; else []."""
    best = min(scores, key=scores.get)
    if best in _search(cfg, scores)[0]:
        return []
    axes = enumerate(cfg.values)
    more = [(axis, value) for axis, grid in axes for value in _beyond(grid, best[axis], [point[axis] for point in scores])]
    return [_moved(best, axis, value) for axis, value in more]


def tuned(cfg: TuneConfig, scores: Mapping[Point, Score]) -> Tuned:
    """The result of a search that is over. ValueError if all trials diverged."""
    _, widened = _search(cfg, scores)
    best = min(scores, key=scores.get)
    if all(math.isinf(score.loss) for score in scores.values()):
        tried = ", ".join("/".join(f"{rate:g}" for rate in point) for point in scores)
        raise ValueError(f"all trials of an arm diverged ({'/'.join(cfg.keys)}: {tried}): give lower tune.values")
    by_key = zip(cfg.keys, best, zip(*scores, strict=True), strict=True)
    edge = [key for key, value, tried in by_key if value in (min(tried), max(tried))]
    return Tuned(list(scores.items()), dict(zip(cfg.keys, best, strict=True)), widened, edge)


def _search(cfg: TuneConfig, scores: Mapping[Point, Score]) -> tuple[list[Point], int]:
    """The points of the search that `scores` decide, and how often a grid was widened."""
    if cfg.full:
        return list(itertools.product(*cfg.values)), 0
    grids = [list(values) for values in cfg.values]
    best: Point = tuple(values[len(values) // 2] for values in grids)
    points: dict[Point, None] = {}  # a set in order
    widened = 0
    for axis, grid in enumerate(grids):
        for widening in range(cfg.widen + 1):
            line = [_moved(best, axis, value) for value in grid]
            points |= dict.fromkeys(line)
            if any(point not in scores for point in line):
                return list(points), widened
            best = min(line, key=scores.get)
            more = _beyond(grid, best[axis], grid)
            if not more or widening == cfg.widen:
                break
            grids[axis] = grid = sorted(grid + more)
            widened += 1
    for axis, key in enumerate(cfg.keys):
        if key in cfg.refine:
            near = [_moved(best, axis, value) for value in _halfway(grids[axis], best[axis])]
            points |= dict.fromkeys(near)
            if any(point not in scores for point in near):
                break
            best = min([best, *near], key=scores.get)
    return list(points), widened


def _moved(at: Point, axis: int, value: float) -> Point:
    return (*at[:axis], value, *at[axis + 1 :])


def _beyond(grid: list[float], best: float, tried: list[float]) -> list[float]:
    """The values one step of `grid` beyond `best`, where `best` is at an end of the values `tried`."""
    down = [_rounded(best * grid[0] / grid[1])] if best == min(tried) else []
    return down + ([_rounded(best * grid[-1] / grid[-2])] if best == max(tried) else [])


def _halfway(grid: list[float], best: float) -> list[float]:
    """Two values halfway, in the logarithm, from `best` to its neighbours; at an end, both at the same distance."""
    i = grid.index(best)
    down = best / grid[i - 1] if i else grid[i + 1] / best
    up = grid[i + 1] / best if i + 1 < len(grid) else down
    return [_rounded(best / math.sqrt(down)), _rounded(best * math.sqrt(up))]


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def in_title(results: Mapping[str, Tuned], cfg: TuneConfig, run_tokens: float) -> str:
    """The part of a table's title that names no tuning, one seed, or trials shorter than the runs of `run_tokens`."""
    if not results:
        return ", rates not tuned here"
    share = max(result.longest for result in results.values()) / run_tokens
    how = ["with one seed"] * (len(cfg.seeds) == 1) + [f"by trials of {share:.0%} of the longest runs' length"] * (share < 0.99)
    return f", tuned {' and '.join(how)}" if how else ""


def rates_table(results: Mapping[str, Tuned], cfg: TuneConfig) -> list[str]:
    """The learning rates that the tuning chose, as Markdown, and how many trials solved the task; [] without tuning."""
    if not results:
        return []
    rows = [["chosen for", *cfg.keys, "points tried"]]
    rows += [[arm, *(f"{rate:g}" for rate in t.best.values()), str(len(t.scores))] for arm, t in results.items()]
    if cfg.solved is not None:
        rows[0].append("trials that solved the task")
        for row, t in zip(rows[1:], results.values(), strict=True):
            trials = len(t.scores) * len(cfg.seeds)
            row.append(f"{trials - sum(unsolved for _, (unsolved, _) in t.scores)} of {trials}")
    return [markdown(rows).rstrip()]


def tuning_notes(results: Mapping[str, Tuned], cfg: TuneConfig) -> list[str]:
    """Sentences on the trials' judge, unequal budgets, and best values at an end of the tried values."""
    if not results:
        return ["Not tuned here: this study tried no learning rates; each arm has those of its configuration."]
    counts = {arm: len(result.scores) * len(cfg.seeds) for arm, result in results.items()}
    fewest = min(counts.values())
    judge = "the loss on validation data" if cfg.metric == "train.val_loss" else cfg.metric
    if cfg.solved is not None:
        judge = f"how many of the {len(cfg.seeds)} seeds solve the task ({judge} of {cfg.solved:g} or less), then by the median"
    lines = [
        f"Tuned: {fewest} trials an arm, judged by {judge}, which this table does not read. The trials have seeds of their own."
    ]
    if more := [f"{arm} ({count})" for arm, count in counts.items() if count > fewest]:
        why = "a grid was widened at an end" + (", or other arms' best values were new to the arm" if cfg.exchange else "")
        lines.append(f"Arms with more trials ({why}): {', '.join(more)}.")
    if cfg.exchange:
        lines.append("Every arm also tried the best learning rates that the searches of all other arms found.")
    return lines + [
        f"The best {', '.join(result.edge)} of {arm} is at an end of the tried values: a value beyond may be better."
        for arm, result in results.items()
        if result.edge
    ]


def as_json(results: Mapping[str, Tuned]) -> dict[str, Any]:
    """arm -> the results of its trials, for a result's JSON."""
    return {
        arm: {
            "best": result.best,
            "trials": [
                {**dict(zip(result.best, point, strict=True)), "loss": loss, **({"unsolved": unsolved} if unsolved else {})}
                for point, (unsolved, loss) in result.scores
            ],
            "widened": result.widened,
            "edge": result.edge,
            "tokens": result.tokens,
            "seconds": round(result.seconds, 1),
        }
        for arm, result in results.items()
    }
