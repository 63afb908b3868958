"""In-context learning: accuracy of many-shot classification by number of demonstrations.

    python -m eval.icl run=runs/NAME [shots=[1,2,4,8]] [episodes=100]
    python -m eval.icl run=runs/NAME examples=FILE [test=FILE] [name=NAME]

A prompt is a number of demonstrations (text and label) and one more text; the answer is the label with the highest summed
log-probability. An episode is one random choice of demonstrations and questions; its first n demonstrations are used for n
shots; errors are over episodes. After arXiv 2410.05258, section 3.4; 2405.00200; 2212.10947.
examples= is a CSV file with the header text,label, or text,category as Banking77's file has. Without examples= the task is
synthetic: words of a few classes, and one random number for each class, in the sentences of data.retrieval. A shown word tests
recall; another word tests whether the model has learned the class.
Writes eval/icl.json and figures/icl.png; for given examples icl_STEM, as eval.perplexity for a given text.
"""

import csv
import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from configs import command
from data.retrieval import draw_numbers
from data.tokenizer import Tokenizer
from eval import common
from eval.common import GREY, EvalConfig, figure, mean_se, plus_minus
from eval.needle_text import trained_digits
from eval.scoring import Job, score_jobs
from training.checkpoint import LoadedRun

EPISODES_SYNTHETIC, EPISODES = 100, 10
WORDS = {  # 8 classes of 12 words
    "animals": "horse tiger rabbit camel donkey monkey goat sheep wolf fox eagle mouse",
    "food": "bread apple onion butter cheese rice soup potato lemon honey sugar cake",
    "tools": "hammer saw needle shovel axe knife drill ladder rope wheel bucket brush",
    "body": "finger shoulder knee elbow tongue stomach neck ankle heart bone skin thumb",
    "clothes": "shirt coat hat glove boot scarf belt dress sock jacket cap skirt",
    "nature": "river mountain forest island desert valley lake ocean cliff cave beach storm",
    "jobs": "doctor soldier teacher farmer lawyer nurse sailor painter butcher baker pilot judge",
    "furniture": "table chair bed desk shelf sofa lamp mirror carpet curtain drawer bench",
}
SYNTHETIC = ("\nThe magic number of {} is", " {}.")  # templates of a question and of its label
OF_A_FILE = ("Text: {}\nLabel:", " {}\n")


@dataclass
class IclConfig(EvalConfig):
    """The task, and how many prompts of it."""

    examples: str | None = None  # a file to draw demonstrations from; None: the synthetic task
    test: str | None = None  # a file to draw questions from; None: a fifth of `examples`
    name: str | None = None  # name of the result, in place of the name of `examples`
    shots: Annotated[list[int] | None, "[1, inf)"] = None  # None: powers of two that fit in the trained context, and the most
    episodes: Annotated[int | None, "[1, inf)"] = None  # None: 100 of the synthetic task or 10 of a file
    queries: Annotated[int, "[1, inf)"] = 50  # questions per episode, at most
    classes: Annotated[int, "[2, 8]"] = 4  # of the synthetic task
    words: Annotated[int, "[1, 12]"] = 2  # per class of the synthetic task
    seed: Annotated[int, "[0, 4294967295]"] = 0  # seed of the episodes


@dataclass(frozen=True)
class Example:
    """A text to classify and its label."""

    text: str
    label: str


@dataclass(frozen=True)
class Task:
    """Templates of question and answer, with one {} each, and the examples to draw from (none in the synthetic task)."""

    name: str
    question: str
    answer: str
    demonstrations: list[Example]
    questions: list[Example]


@dataclass(frozen=True)
class Episode:
    """Demonstrations in order, questions, and the labels to choose from."""

    demonstrations: list[Example]
    questions: list[Example]
    labels: list[str]


def read_examples(path: Path) -> list[Example]:
    """The examples of a CSV file with the columns text and label, or category. ValueError where the file has no examples."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}: correct examples= or test=")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            rows = [(row["text"], row["label" if "label" in reader.fieldnames else "category"] or "") for row in reader]
        examples = [Example(" ".join(text.split()), " ".join(label.replace("_", " ").split())) for text, label in rows]
    except (ValueError, KeyError, AttributeError, csv.Error):
        examples = []
    if not examples:
        raise ValueError(f"{path} has no examples: give a CSV file in UTF-8 with the header text,label")
    if empty := [number for number, example in enumerate(examples, 1) if not example.label]:
        raise ValueError(f"example {empty[0]} of {path} has no label: give it one, or leave it out")
    return examples


def load_task(cfg: IclConfig) -> Task:
    """The task that the configuration names. Raises ValueError for files in a wrong format, or if test= has other labels."""
    if cfg.examples is None and cfg.test:
        raise ValueError("test= needs a file of demonstrations: give examples=FILE, too")
    if cfg.examples is None:
        return Task("synthetic", *SYNTHETIC, [], [])
    demonstrations = read_examples(Path(cfg.examples))
    labels = {example.label for example in demonstrations}
    if len(labels) < 2:
        raise ValueError(f"{cfg.examples} has one label, but a task needs two: give another file as examples=")
    if cfg.test:
        questions = read_examples(Path(cfg.test))
    else:
        order = np.random.default_rng(cfg.seed).permutation(len(demonstrations))
        test, train = np.split(order, [max(1, len(order) // 5)])
        questions, demonstrations = ([demonstrations[i] for i in sorted(part)] for part in (test, train))
    if unknown := {example.label for example in questions} - labels:
        few = ", ".join(sorted(unknown)[:3])
        raise ValueError(f"questions have labels that no demonstration has ({few}): give test= and examples= from the same set")
    return Task(Path(cfg.examples).stem, *OF_A_FILE, demonstrations, questions)


def draw_episode(task: Task, cfg: IclConfig, number: int, shots: int, digits: int) -> Episode:
    """Episode `number` with `shots` demonstrations. Fewer shots give the first of these and the same questions."""
    rng = np.random.default_rng([cfg.seed, number])
    if not task.demonstrations:
        return _synthetic(rng, cfg, shots, digits)
    if shots > len(task.demonstrations):
        most = len(task.demonstrations)
        raise ValueError(f"{shots} shots need {shots} demonstrations, but there are {most}: use at most shots=[{most}]")
    questions = [task.questions[i] for i in rng.permutation(len(task.questions))[: cfg.queries]]
    shown = [task.demonstrations[i] for i in rng.permutation(len(task.demonstrations))[:shots]]
    return Episode(shown, questions, sorted({example.label for example in (*task.demonstrations, *task.questions)}))


def _synthetic(rng: np.random.Generator, cfg: IclConfig, shots: int, digits: int) -> Episode:
    """Every word is shown once before a word is shown again. There is one question for every word."""
    numbers = [str(number) for number in draw_numbers(rng, "eval", digits, cfg.classes)]
    kinds = rng.permutation(len(WORDS))[: cfg.classes]
    chosen = [rng.permutation(list(WORDS.values())[kind].split())[: cfg.words].tolist() for kind in kinds]
    examples = [Example(word, number) for words, number in zip(chosen, numbers, strict=True) for word in words]
    questions = [examples[i] for i in rng.permutation(len(examples))[: cfg.queries]]
    rounds = -(-shots // len(examples))
    shown = [examples[i] for _ in range(rounds) for i in rng.permutation(len(examples))]
    return Episode(shown[:shots], questions, numbers)


class Writer:
    """Turns episodes into token ids. A text has the same tokens in a demonstration and in a question."""

    def __init__(self, task: Task, tokenizer: Tokenizer) -> None:
        self.task, self.eot, self._encode = task, tokenizer.eot, functools.cache(tokenizer.encode)

    def question(self, example: Example) -> list[int]:
        return self._encode(self.task.question.format(example.text))

    def label(self, label: str) -> list[int]:
        return self._encode(self.task.answer.format(label))

    def shown(self, example: Example) -> list[int]:
        return self.question(example) + self.label(example.label)

    def job(self, episode: Episode) -> Job:
        prefix = [self.eot, *(token for example in episode.demonstrations for token in self.shown(example))]
        questions = list(map(np.array, map(self.question, episode.questions)))
        return Job(np.array(prefix), questions, [np.array(self.label(label)) for label in episode.labels])


def fitting_shots(writer: Writer, episodes: Sequence[Episode], context: int) -> list[int]:
    """The largest number of demonstrations that leaves room for a question in the context, and all powers of two below it."""
    most = len(episodes[0].demonstrations)
    for episode in episodes:
        question = max(len(writer.question(example)) for example in episode.questions)
        room = context - 1 - question - max(len(writer.label(label)) for label in episode.labels)
        lengths = np.cumsum([len(writer.shown(example)) for example in episode.demonstrations])
        most = min(most, int(np.searchsorted(lengths, room, side="right")))
    if most < 1:
        wrong = f"the context of {context} tokens is too short for one demonstration and a question of every episode"
        raise ValueError(f"{wrong}: use a run with a longer context, or shots=[1] to exceed the context")
    return sorted({2**i for i in range(most.bit_length())} | {most})


def evaluate(run: LoadedRun, task: Task, cfg: IclConfig) -> dict[str, Any]:
    """Accuracy for each number of shots, and what chance would give."""
    digits = max(2, trained_digits(run.config))  # there are too few numbers of one digit
    count = cfg.episodes or (EPISODES_SYNTHETIC if not task.demonstrations else EPISODES)
    context = run.model.cfg.context
    most = context // 4 if not task.demonstrations else min(context // 4, len(task.demonstrations))
    episodes = [draw_episode(task, cfg, i, max(1, *(cfg.shots or [most])), digits) for i in range(count)]
    writer = Writer(task, run.tokenizer)
    shots = sorted(cfg.shots) if cfg.shots else fitting_shots(writer, episodes, context)
    shown = [replace(episode, demonstrations=episode.demonstrations[:n]) for n in shots for episode in episodes]
    with common.progress("icl", len(shown)) as bar:
        _, scores = score_jobs(run.model, list(map(writer.job, shown)), cfg.batch, done=bar.update)  # (Q, C) each
    parts = [slice(i * count, (i + 1) * count) for i in range(len(shots))]
    rows = [{"shots": n} | summary(shown[part], scores[part]) for n, part in zip(shots, parts, strict=True)]
    classes, queries = len(episodes[0].labels), len(episodes[0].questions)
    results = {"task": task.name, "classes": classes, "chance": 1 / classes, "episodes": count}
    results |= {key: rows[-1][key] for key in ("accuracy", "se")}
    digest = hashlib.sha256("".join(json.dumps(asdict(episode)) for episode in episodes).encode()).hexdigest()
    return results | {"sha256": digest, "queries": queries, "shots": rows}


def summary(episodes: Sequence[Episode], scores: Sequence[np.ndarray]) -> dict[str, Any]:
    """Accuracy of the scores (Q, C), and the loss of the right label among the labels, with errors over episodes.

    recall, new: accuracy on questions whose text a demonstration shows, and on the others; None without such questions.
    """
    right, losses = map(np.array, zip(*map(correct, episodes, scores), strict=True))  # (episodes, Q) each
    known = seen(episodes, "text")
    (accuracy, se), (loss, loss_se) = mean_se(right.mean(axis=1)), mean_se(losses.mean(axis=1))
    return {"accuracy": accuracy, "se": se, "label_loss": loss, "label_loss_se": loss_se} | {
        "label_shown": float(seen(episodes, "label").mean()),
        "text_shown": float(known.mean()),
        "recall": float(right[known].mean()) if known.any() else None,
        "new": float(right[~known].mean()) if not known.all() else None,
    }


def seen(episodes: Sequence[Episode], key: str) -> np.ndarray:
    """(episodes, Q) bool: a demonstration of the episode has the question's text, or label."""
    shown = [{getattr(example, key) for example in episode.demonstrations} for episode in episodes]
    return np.array([[getattr(q, key) in here for q in ep.questions] for here, ep in zip(shown, episodes, strict=True)])


def correct(episode: Episode, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """From scores (Q, C): (Q,) 1.0 where the right label alone has the highest score, else 0.0; and
    (Q,) -ln p(right label | one of the labels) in nats, which for a guess among C labels is ln C.
    """
    right = scores[range(len(scores)), [episode.labels.index(example.label) for example in episode.questions]]
    return ((scores >= right[:, None]).sum(axis=1) == 1).astype(float), np.logaddexp.reduce(scores, axis=1) - right


def draw(path: Path, results: dict[str, Any], title: str, line_colour: str) -> None:
    """Accuracy against demonstrations, with chance; bars are standard errors."""
    rows = results["shots"]
    shots, accuracies, errors = ([row[key] for row in rows] for key in ("shots", "accuracy", "se"))
    with figure(path, 5.2, 4) as axes:
        ax = axes[0, 0]
        ax.axhline(results["chance"], color=GREY, linestyle="--", linewidth=1.2, label="chance")
        ax.errorbar(shots, accuracies, errors, color=line_colour, marker="o", capsize=3, label="all questions")
        for key, style, label in (("recall", "--", "shown words"), ("new", ":", "new words")):
            points = [(row["shots"], row[key]) for row in rows if row[key] is not None]
            if results["task"] == "synthetic" and points:
                ax.plot(*zip(*points, strict=True), style, color=line_colour, linewidth=1.2, marker=".", label=label)
        ax.set_xscale("log", base=2)
        ax.set_xticks(shots, [f"{n:,}" for n in shots])
        ax.set(xlabel="demonstrations", ylabel=f"accuracy ({results['classes']} classes)", ylim=(-0.02, 1.02))
        ax.set_title(f"{title} · {results['task']}")
        ax.legend(loc="best")


@command("icl", IclConfig)
def main(cfg: IclConfig) -> None:
    common.check_different("shots", cfg.shots, "[1,2,4,8]")
    task = load_task(cfg)
    run = common.open_run(cfg)
    name, about = common.claim_result("icl", cfg, [Path(file).read_bytes() for file in (cfg.examples, cfg.test) if file])
    results = evaluate(run, task, cfg) | about
    what, chance = task.name, f"(chance {results['chance']:.3f})"
    accuracies = {row["shots"]: plus_minus(row["accuracy"], row["se"]) for row in results["shots"]}
    lines = [f"{what}, {shots} shots: accuracy {accuracy} {chance}" for shots, accuracy in accuracies.items()]
    common.write_result(run, cfg, name, results, lines, draw)


if __name__ == "__main__":
    main()
