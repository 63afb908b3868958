"""In-context learning: accuracy of many-shot classification, and its dependence on the order of the demonstrations.

    python -m eval.icl run=runs/NAME [shots=[1,2,4,8]] [episodes=100] [orders=10]
    python -m eval.icl run=runs/NAME examples=FILE [format=trec|trec_fine|banking77|clinc150] [test=FILE] [name=NAME]

A prompt is a number of demonstrations (text and label) and one more text. The answer is the label whose tokens have the
highest summed log-probability after the prompt. An episode is one random choice of demonstrations and questions; its
first n demonstrations are used for n shots. Standard errors are over episodes. Order robustness is the best minus the
worst accuracy over `orders` orders of the same demonstrations, for each arrangement (random, alternating by class, grouped
by class). Protocol: arXiv 2410.05258, section 3.4, after Bertsch et al. (2405.00200) and Ratner et al. (2212.10947).

Without examples= the task is synthetic: words of a few classes (animals, tools, ...) and, in each episode, one random
number for each class, in the sentences of data.retrieval ("The magic number of horse is 4817."), which small models can
be trained on. A word that a demonstration has shown tests recall; another word tests whether the model has learned the class.
Writes runs/NAME/eval/icl.json and runs/NAME/figures/icl.png; for given examples icl_STEM.json and icl_STEM.png, where STEM is
name= if given, else the name of the file without its suffixes.
"""

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from configs import command
from data.tokenizer import Tokenizer
from eval.common import GREY, Axes, claim_result, figure, mean_se, open_run, plus_minus, progress, write_result
from eval.icl_tasks import ARRANGEMENTS, Episode, Example, IclConfig, Task, arrange, check, draw_episode, load_task
from eval.needle_text import trained_digits
from eval.scoring import Job, score_jobs
from training.checkpoint import LoadedRun

EPISODES_SYNTHETIC, EPISODES, ORDER_EPISODES = 100, 10, 20


class Writer:
    """Turns episodes into token ids. A text has the same tokens in a demonstration and in a question."""

    def __init__(self, task: Task, tokenizer: Tokenizer) -> None:
        self.task, self.eot, self._encode = task, tokenizer.eot, functools.cache(tokenizer.encode)

    def question(self, text: str) -> list[int]:
        return self._encode(self.task.question.format(text))

    def label(self, label: str) -> list[int]:
        return self._encode(self.task.answer.format(label))

    def shown(self, example: Example) -> list[int]:
        return self.question(example.text) + self.label(example.label)

    def job(self, episode: Episode) -> Job:
        prefix = [self.eot, *(token for example in episode.demonstrations for token in self.shown(example))]
        questions = [np.array(self.question(example.text)) for example in episode.questions]
        return Job(np.array(prefix), questions, [np.array(self.label(label)) for label in episode.labels])


def fitting_shots(writer: Writer, episodes: Sequence[Episode], context: int) -> list[int]:
    """Powers of two up to the largest number of demonstrations that fits in the context, and that number.

    A number fits if it leaves room for the longest question and label in every episode.
    """
    most = len(episodes[0].demonstrations)
    for episode in episodes:
        question = max(len(writer.question(example.text)) for example in episode.questions)
        room = context - 1 - question - max(len(writer.label(label)) for label in episode.labels)
        lengths = np.cumsum([len(writer.shown(example)) for example in episode.demonstrations])
        most = min(most, int(np.searchsorted(lengths, room, side="right")))
    if most < 1:
        wrong = f"the context of {context} tokens is too short for one demonstration and a question of every episode"
        raise ValueError(f"{wrong}: use a run with a longer context, or shots=[1] to exceed the context")
    return sorted({2**i for i in range(most.bit_length())} | {most})


def evaluate(run: LoadedRun, task: Task, cfg: IclConfig) -> dict[str, Any]:
    """Accuracy for each number of shots, `order` robustness, and what chance would give for both."""
    digits = max(2, trained_digits(run.config))  # there are too few numbers of one digit
    count = cfg.episodes or (EPISODES_SYNTHETIC if task.name == "synthetic" else EPISODES)
    context = run.model.cfg.context
    most = context // 4 if task.name == "synthetic" else min(context // 4, len(task.demonstrations))
    episodes = [draw_episode(task, cfg, i, max(1, *(cfg.shots or [most])), digits) for i in range(count)]
    writer = Writer(task, run.tokenizer)
    shots = sorted(cfg.shots) if cfg.shots else fitting_shots(writer, episodes, context)
    shown = [replace(episode, demonstrations=episode.demonstrations[:n]) for n in shots for episode in episodes]
    orders = reordered(shown[-count:][:ORDER_EPISODES], cfg)
    with progress("icl", len(shown) + len(orders)) as bar:
        _, scores = score_jobs(run.model, list(map(writer.job, shown + orders)), cfg.batch, done=bar.update)  # (Q, C) each
    parts = [slice(i * count, (i + 1) * count) for i in range(len(shots))]
    rows = [{"shots": n} | summary(shown[part], scores[part]) for n, part in zip(shots, parts, strict=True)]
    classes, queries = len(episodes[0].labels), len(episodes[0].questions)
    results = {"task": task.name, "classes": classes, "chance": 1 / classes, "episodes": count}
    results |= {key: rows[-1][key] for key in ("accuracy", "se")}
    digest = hashlib.sha256(b"".join(map(spelled_out, episodes))).hexdigest()
    order = order_summary(orders, scores[len(shown) :], cfg.orders) if orders else None
    return results | {"sha256": digest, "queries": queries, "shots": rows, "order": order}


def spelled_out(part: Task | Episode) -> bytes:
    """Demonstrations and questions of a task or an episode as bytes, for a digest."""
    return json.dumps(asdict(part)).encode()


def summary(episodes: Sequence[Episode], scores: Sequence[np.ndarray]) -> dict[str, Any]:
    """Accuracy of the scores (Q, C), and the loss of the right label among the labels, with errors over episodes.

    label_shown: share of questions whose label a demonstration shows. text_shown: share of questions whose text a
    demonstration shows. recall: accuracy on questions with a shown text. new: accuracy on the other questions. recall
    and new are None where there are no such questions.
    """
    right, losses = (np.array([of(*one) for one in zip(episodes, scores, strict=True)]) for of in (correct, label_loss))

    def seen(key: str) -> np.ndarray:  # (episodes, Q)
        shown = [{getattr(example, key) for example in episode.demonstrations} for episode in episodes]
        return np.array([[getattr(q, key) in here for q in ep.questions] for here, ep in zip(shown, episodes, strict=True)])

    known = seen("text")
    (accuracy, se), (loss, loss_se) = mean_se(right.mean(axis=1)), mean_se(losses.mean(axis=1))
    return {"accuracy": accuracy, "se": se, "label_loss": loss, "label_loss_se": loss_se} | {
        "label_shown": float(seen("label").mean()),
        "text_shown": float(known.mean()),
        "recall": float(right[known].mean()) if known.any() else None,
        "new": float(right[~known].mean()) if not known.all() else None,
    }


def correct(episode: Episode, scores: np.ndarray) -> np.ndarray:
    """(Q,) 1.0 where the right label alone has the highest of the scores (Q, C), else 0.0."""
    return ((scores >= right_scores(episode, scores)[:, None]).sum(axis=1) == 1).astype(float)


def label_loss(episode: Episode, scores: np.ndarray) -> np.ndarray:
    """(Q,) -ln p(right label | one of the labels) in nats; for a guess among C labels it is ln C."""
    return np.logaddexp.reduce(scores, axis=1) - right_scores(episode, scores)


def right_scores(episode: Episode, scores: np.ndarray) -> np.ndarray:
    """(Q,) the scores of the right labels."""
    return scores[range(len(scores)), [episode.labels.index(example.label) for example in episode.questions]]


def reordered(episodes: Sequence[Episode], cfg: IclConfig) -> list[Episode]:
    """Each episode with its demonstrations in `cfg.orders` orders of each arrangement; [] for one demonstration."""
    return [
        replace(episode, demonstrations=arrange(episode.demonstrations, how, np.random.default_rng([cfg.seed, i, a, order])))
        for i, episode in enumerate(episodes)
        if len(episode.demonstrations) > 1
        for a, how in enumerate(ARRANGEMENTS, 1)
        for order in range(cfg.orders)
    ]


def order_summary(episodes: Sequence[Episode], scores: Sequence[np.ndarray], orders: int) -> dict[str, Any]:
    """For each arrangement: best and worst accuracy over the orders, and best minus worst, averaged over episodes.

    episodes, scores: as from `reordered`.
    """
    hits = [correct(*one).mean() for one in zip(episodes, scores, strict=True)]
    labels, questions = len(episodes[0].labels), len(episodes[0].questions)
    results: dict[str, Any] = {"shots": len(episodes[0].demonstrations), "orders": orders}
    results["guessing"] = guessing_margin(1 / labels, questions, orders)
    by_arrangement = np.reshape(hits, (-1, len(ARRANGEMENTS), orders)).swapaxes(0, 1)  # each (episodes, orders)
    for how, values in zip(ARRANGEMENTS, by_arrangement, strict=True):
        best, worst = values.max(axis=1), values.min(axis=1)
        margin, se = mean_se(best - worst)
        means = {"best": best, "worst": worst, "mean": [sum(row) / orders for row in values.tolist()]}
        results[how] = {"margin": margin, "margin_se": se} | {name: float(np.mean(v)) for name, v in means.items()}
    return results


def guessing_margin(p: float, n: int, orders: int) -> float:
    """Expected best minus worst of `orders` independent guesses of n answers, each right with probability p."""
    below = stats.binom.cdf(np.arange(n), n, p)  # P(at most k right), k < n
    return float((1 - below**orders).sum() - ((1 - below) ** orders).sum()) / n


def draw(path: Path, results: dict[str, Any], title: str, line_colour: str) -> None:
    """Accuracy against demonstrations, with chance, and the margins between orders; bars are standard errors."""
    order = results["order"]
    with figure(path, 5.2 if order is None else 10, 4, columns=1 if order is None else 2) as axes:
        _accuracies(axes[0, 0], results, line_colour)
        axes[0, 0].set_title(f"{title} · {results['task']}")
        if order:
            ax = axes[0, 1]
            margins, errors = ([order[how][key] for how in ARRANGEMENTS] for key in ("margin", "margin_se"))
            ax.bar(range(len(margins)), margins, yerr=errors, color=line_colour, ecolor=GREY, capsize=3, width=0.6)
            ax.axhline(order["guessing"], color=GREY, linestyle="--", linewidth=1.2, label="best minus worst of random guesses")
            ax.set_xticks(range(len(margins)), ARRANGEMENTS)
            ax.set(ylabel=f"best minus worst accuracy of {order['orders']} orders", ylim=(0, None))
            ax.set_title(f"{title} · order of {order['shots']} demonstrations")
            ax.legend(loc="best")


def _accuracies(ax: Axes, results: dict[str, Any], line_colour: str) -> None:
    rows = results["shots"]
    shots, accuracies, errors = ([row[key] for row in rows] for key in ("shots", "accuracy", "se"))
    ax.axhline(results["chance"], color=GREY, linestyle="--", linewidth=1.2, label="chance")
    ax.errorbar(shots, accuracies, errors, color=line_colour, marker="o", capsize=3, label="all questions")
    for key, style, label in (("recall", "--", "shown words"), ("new", ":", "new words")):
        points = [(row["shots"], row[key]) for row in rows if row[key] is not None]
        if results["task"] == "synthetic" and points:
            ax.plot(*zip(*points, strict=True), style, color=line_colour, linewidth=1.2, marker=".", label=label)
    ax.set_xscale("log", base=2)
    ax.set_xticks(shots, [f"{n:,}" for n in shots])
    ax.set(xlabel="demonstrations", ylabel=f"accuracy ({results['classes']} classes)", ylim=(-0.02, 1.02))
    ax.legend(loc="best")


@command("icl", IclConfig)
def main(cfg: IclConfig) -> None:
    check(cfg)
    task = load_task(cfg)
    run = open_run(cfg)
    file, about = claim_result("icl", cfg, lambda: [spelled_out(task)])
    results = evaluate(run, task, cfg) | about
    begin = write_result(run, cfg, file, results, draw)
    chance = f"chance {results['chance']:.3f}"
    for row in results["shots"]:
        print(f"{begin}: {task.name}, {row['shots']} shots: accuracy {plus_minus(row['accuracy'], row['se'])} ({chance})")
    if order := results["order"]:
        margins = ", ".join(f"{how} {plus_minus(order[how]['margin'], order[how]['margin_se'])}" for how in ARRANGEMENTS)
        print(
            f"{begin}: best minus worst of {order['orders']} orders of {order['shots']} demonstrations: {margins} "
            f"(guessing {order['guessing']:.3f})"
        )


if __name__ == "__main__":
    main()
