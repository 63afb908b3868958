"""The tasks of in-context learning: the synthetic task, files of labelled texts, and episodes drawn from both."""

import csv
import io
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from data.retrieval import draw_numbers
from eval.common import EvalConfig

ARRANGEMENTS = ("random", "alternating", "grouped")


@dataclass
class IclConfig(EvalConfig):
    """The task, and how many prompts of it.

    examples: a file to draw demonstrations from; None: the synthetic task. test: a file to draw questions from, by
    default the test split of `examples`, or a fifth of `examples`. name: name of the result, in place of the name of
    `examples`. shots: numbers of demonstrations, by default the powers of two that fit in the trained context, and the
    largest number that fits. episodes: how many, by default 100 of the synthetic task or 10 of a file. queries: questions
    per episode, at most. orders: orders to try in each arrangement of the demonstrations (in at most 20 episodes); 0
    leaves order robustness out. classes: classes of the synthetic task. words: words per class of the synthetic task.
    """

    examples: str | None = None
    test: str | None = None
    name: str | None = None
    format: str = "auto"  # auto | trec | trec_fine | banking77 | clinc150
    shots: Annotated[list[int] | None, "[1, inf)"] = None
    episodes: Annotated[int | None, "[1, inf)"] = None
    queries: Annotated[int, "[1, inf)"] = 50
    orders: Annotated[int, "[0, inf)"] = 10
    classes: Annotated[int, "[2, 8]"] = 4
    words: Annotated[int, "[1, 12]"] = 2
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

READABLE = {  # TREC's coarse classes, Li and Roth 2002
    "ABBR": "abbreviation", "DESC": "description", "ENTY": "entity", "HUM": "human", "LOC": "location", "NUM": "number",
}  # fmt: skip
TEMPLATES = {  # of a question and of its label
    "trec": ("Question: {}\nType:", " {}\n"),
    "trec_fine": ("Question: {}\nType:", " {}\n"),
    "banking77": ("Query: {}\nIntent:", " {}\n"),
    "clinc150": ("Utterance: {}\nIntent:", " {}\n"),
}
SYNTHETIC = ("\nThe magic number of {} is", " {}.")


def read_examples(path: Path, form: str) -> tuple[list[Example], list[Example]]:
    """(demonstrations, questions) of a file; only clinc150 has questions.

    trec: lines "LABEL:fine text". banking77: CSV with the header text,category. clinc150: JSON with train and test lists
    of [text, intent] (its out-of-scope lists are left out). Raises ValueError where the file is in another format.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}: correct examples= or test=")
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("latin-1")  # TREC is published in this encoding
    try:
        if form == "clinc150":
            return _clinc150(text)
        return (_banking77(text) if form == "banking77" else _trec(text, fine=form == "trec_fine")), []
    except ValueError as error:
        others = ", ".join(name for name in TEMPLATES if name != form)
        wrong = f"{path} is not in the format {form}: {error}"
        raise ValueError(f"{wrong}: give another file, or format= one of {others}") from None


def _trec(text: str, fine: bool) -> list[Example]:
    examples = []
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        match = re.fullmatch(r"([A-Z]+):(\w+) (.+)", line)
        if match and match[1] in READABLE:
            examples.append(Example(match[3], READABLE[match[1]] + f" {match[2]}" * fine))
        elif line:
            raise ValueError(f"line {number} ({line[:20]!r}) is not 'LABEL:fine text'")
    return examples


def _banking77(text: str) -> list[Example]:
    rows = csv.DictReader(io.StringIO(text, newline=""))
    try:
        return [Example(" ".join(row["text"].split()), row["category"].replace("_", " ")) for row in rows]
    except (KeyError, AttributeError, csv.Error):  # no such column, a short row, a quotation mark that is never closed
        raise ValueError(f"line {rows.line_num} has no columns text and category") from None


def _clinc150(text: str) -> tuple[list[Example], list[Example]]:
    try:
        content = json.loads(text)
        train, test = ([Example(x, label.replace("_", " ")) for x, label in content[split]] for split in ("train", "test"))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError("it is not JSON with train and test lists of [text, intent]") from None
    return train, test


def load_task(cfg: IclConfig) -> Task:
    """The task that the configuration names. Raises ValueError for files in a wrong format or with different labels."""
    if cfg.examples is None:
        return Task("synthetic", *SYNTHETIC, [], [])
    by_ending = {".csv": "banking77", ".json": "clinc150"}.get(Path(cfg.examples).suffix.lower(), "trec")
    form = by_ending if cfg.format == "auto" else cfg.format
    demonstrations, questions = read_examples(Path(cfg.examples), form)
    if cfg.test:
        first, second = read_examples(Path(cfg.test), form)
        questions = second or first
        if not questions:
            raise ValueError(f"{cfg.test} has no questions: give test= another file, or leave it out")
    labels = {example.label for example in demonstrations}
    if len(labels) < 2:
        wrong = f"{cfg.examples} has {len(labels)} different labels, but a task needs two"
        raise ValueError(f"{wrong}: give another file as examples=")
    if unknown := {example.label for example in questions} - labels:
        few = ", ".join(sorted(unknown)[:3])
        raise ValueError(f"questions have labels that no demonstration has ({few}): give test= and examples= from the same set")
    if not questions:
        order = np.random.default_rng(cfg.seed).permutation(len(demonstrations))
        test, train = np.split(order, [max(1, len(order) // 5)])
        questions, demonstrations = ([demonstrations[i] for i in sorted(part)] for part in (test, train))
    return Task(form, *TEMPLATES[form], demonstrations, questions)


def check(cfg: IclConfig) -> None:
    """Raise ValueError for settings that cannot be evaluated."""
    if cfg.format not in ("auto", *TEMPLATES):
        raise ValueError(f"format={cfg.format} is unknown: use format= one of auto, {', '.join(TEMPLATES)}")
    if cfg.examples is None and (cfg.test or cfg.format != "auto"):
        raise ValueError("test= and format= need a file of demonstrations: give examples=FILE, too")
    if cfg.shots is not None and len(set(cfg.shots)) < max(1, len(cfg.shots)):
        raise ValueError(f"shots={cfg.shots} must be different numbers: use shots=[1,2,4,8]")
    if cfg.orders == 1:
        raise ValueError("order robustness compares two or more orders: use orders=10, or orders=0 to leave it out")


def draw_episode(task: Task, cfg: IclConfig, number: int, shots: int, digits: int) -> Episode:
    """Episode `number` with `shots` demonstrations. Fewer shots give the first of these and the same questions."""
    rng = np.random.default_rng([cfg.seed, number])
    if task.name == "synthetic":
        return _synthetic(rng, cfg, shots, digits)
    if shots > len(task.demonstrations):
        most = len(task.demonstrations)
        raise ValueError(f"{shots} shots need {shots} demonstrations, but there are {most}: use at most shots=[{most}]")
    questions = [task.questions[i] for i in rng.permutation(len(task.questions))[: cfg.queries]]
    shown = [task.demonstrations[i] for i in rng.permutation(len(task.demonstrations))[:shots]]
    return Episode(shown, questions, sorted({example.label for example in (*task.demonstrations, *task.questions)}))


def _synthetic(rng: np.random.Generator, cfg: IclConfig, shots: int, digits: int) -> Episode:
    """Every word is shown once before a word is shown again. Every word is asked for once."""
    numbers = [str(number) for number in draw_numbers(rng, "eval", digits, cfg.classes)]
    kinds = rng.permutation(len(WORDS))[: cfg.classes]
    chosen = [rng.permutation(list(WORDS.values())[kind].split())[: cfg.words].tolist() for kind in kinds]
    examples = [Example(word, number) for words, number in zip(chosen, numbers, strict=True) for word in words]
    questions = [examples[i] for i in rng.permutation(len(examples))[: cfg.queries]]
    rounds = -(-shots // len(examples))
    shown = [examples[i] for _ in range(rounds) for i in rng.permutation(len(examples))]
    return Episode(shown[:shots], questions, numbers)


def arrange(examples: Sequence[Example], how: str, rng: np.random.Generator) -> list[Example]:
    """The same examples in another order: `random`, `grouped` by class, or `alternating` between the classes.

    The order of the classes, and of the examples of a class, is random. Classes without further examples are skipped.
    """
    shuffled = [examples[i] for i in rng.permutation(len(examples))]
    if how == "random":
        return shuffled
    labels = list(dict.fromkeys(example.label for example in shuffled))
    groups = [[example for example in shuffled if example.label == label] for label in labels]
    if how == "grouped":
        return list(itertools.chain(*groups))
    return [example for turn in itertools.zip_longest(*groups) for example in turn if example is not None]
