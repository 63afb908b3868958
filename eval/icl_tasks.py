"""The tasks of in-context learning: the synthetic task, files of labelled texts, and episodes drawn from both."""

import csv
import io
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
    shots: list[int] | None = None
    episodes: Annotated[int | None, "[1, inf)"] = None
    queries: Annotated[int, "[1, inf)"] = 50
    orders: int = 10
    classes: int = 4
    words: int = 2
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


WORDS = {
    "animals": "horse tiger rabbit camel donkey monkey goat sheep wolf fox eagle mouse",
    "food": "bread apple onion butter cheese rice soup potato lemon honey sugar cake",
    "tools": "hammer saw needle shovel axe knife drill ladder rope wheel bucket brush",
    "body": "finger shoulder knee elbow tongue stomach neck ankle heart bone skin thumb",
    "clothes": "shirt coat hat glove boot scarf belt dress sock jacket cap skirt",
    "nature": "river mountain forest island desert valley lake ocean cliff cave beach storm",
    "jobs": "doctor soldier teacher farmer lawyer nurse sailor painter butcher baker pilot judge",
    "furniture": "table chair bed desk shelf sofa lamp mirror carpet curtain drawer bench",
}

CLASSES = "abbreviation description entity human location number".split()  # TREC's coarse classes, Li and Roth 2002
READABLE = dict(zip("ABBR DESC ENTY HUM LOC NUM".split(), CLASSES, strict=True))
_TYPE = ("Question: {}\nType:", " {}\n")
TEMPLATES = {  # of a question and of its label
    "trec": _TYPE,
    "trec_fine": _TYPE,
    "banking77": ("Query: {}\nIntent:", " {}\n"),
    "clinc150": ("Utterance: {}\nIntent:", " {}\n"),
}
SYNTHETIC = ("\nThe magic number of {} is", " {}.")


def read_examples(path: Path, form: str) -> tuple[list[Example], list[Example]]:
    """(demonstrations, questions) of a file; a format without a test split has no questions.

    trec: lines "LABEL:fine text". banking77: CSV with the header text,category. clinc150: JSON with train and test lists
    of [text, intent] (its out-of-scope lists are left out). Raises ValueError where the file is in another format.
    """
    text = _text(path)
    if form == "banking77":
        return _banking77(path, text), []
    if form == "clinc150":
        return _clinc150(path, text)
    return _trec(path, text, form), []


def _text(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}: correct examples= or test=")
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("latin-1")  # TREC is published in this encoding


def _wrong_format(path: Path, form: str, found: str, wanted: str) -> ValueError:
    found = found if len(found) <= 40 else found[:37] + "..."
    others = ", ".join(name for name in TEMPLATES if name != form)
    return ValueError(
        f"{path} is not in the format {form}: {found} is not {wanted}: give another file, or format= one of {others}"
    )


def _trec(path: Path, text: str, form: str) -> list[Example]:
    examples = []
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if not line:
            continue
        match = re.fullmatch(r"([A-Z]+):(\w+) (.+)", line)
        if match is None or match[1] not in READABLE:
            raise _wrong_format(path, form, f"line {number} ({line[:20]!r})", "'LABEL:fine text'")
        label = f"{READABLE[match[1]]} {match[2]}" if form == "trec_fine" else READABLE[match[1]]
        examples.append(Example(match[3], label))
    return examples


def _banking77(path: Path, text: str) -> list[Example]:
    try:
        header, *rows = list(csv.reader(io.StringIO(text, newline=""))) or [[]]
    except csv.Error as error:  # such as a quotation mark that is never closed
        raise _wrong_format(path, "banking77", f"its text ({error})", "comma-separated lines") from None
    if header[:2] != ["text", "category"]:
        raise _wrong_format(path, "banking77", f"line 1 ({','.join(header)[:20]!r})", "'text,category'")
    for number, row in enumerate(rows, 2):
        if len(row) == 1:  # [] is an empty line
            raise _wrong_format(path, "banking77", f"row {number}", "a text and a category")
    return [Example(" ".join(row[0].split()), row[1].replace("_", " ")) for row in rows if row]


def _clinc150(path: Path, text: str) -> tuple[list[Example], list[Example]]:
    try:
        content = json.loads(text)
        parts = [[Example(x, label.replace("_", " ")) for x, label in content[split]] for split in ("train", "test")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _wrong_format(path, "clinc150", "it", "JSON with train and test lists of [text, intent]") from None
    return parts[0], parts[1]


def detect(path: Path) -> str:
    """The format that the ending of a file's name stands for; other endings stand for TREC with its six classes."""
    return {".csv": "banking77", ".json": "clinc150"}.get(path.suffix.lower(), "trec")


def load_task(cfg: IclConfig) -> Task:
    """The task that the configuration names. Raises ValueError for files in a wrong format or with different labels."""
    if cfg.examples is None:
        return Task("synthetic", *SYNTHETIC, [], [])
    form = detect(Path(cfg.examples)) if cfg.format == "auto" else cfg.format
    demonstrations, questions = read_examples(Path(cfg.examples), form)
    if cfg.test:
        first, second = read_examples(Path(cfg.test), form)
        questions = second or first
        if not questions:
            raise ValueError(f"{cfg.test} has no questions: give test= another file, or leave it out")
    labels = {example.label for example in demonstrations}
    if len(labels) < 2:
        raise ValueError(
            f"{cfg.examples} has {len(labels)} different labels, but a task needs two: give another file as examples="
        )
    if unknown := {example.label for example in questions} - labels:
        few = ", ".join(sorted(unknown)[:3])
        raise ValueError(f"questions have labels that no demonstration has ({few}): give test= and examples= from the same set")
    if not questions:
        order = np.random.default_rng(cfg.seed).permutation(len(demonstrations))
        held = set(order[: max(1, len(order) // 5)].tolist())
        questions = [example for i, example in enumerate(demonstrations) if i in held]
        demonstrations = [example for i, example in enumerate(demonstrations) if i not in held]
    return Task(form, *TEMPLATES[form], demonstrations, questions)


def spelled_out(part: Task | Episode) -> bytes:
    """Demonstrations and questions of a task or an episode as bytes, for a digest."""
    return json.dumps(asdict(part)).encode()


def check(cfg: IclConfig) -> None:
    """Raise ValueError for settings that cannot be evaluated."""
    if cfg.format not in ("auto", *TEMPLATES):
        raise ValueError(f"format={cfg.format} is unknown: use format= one of auto, {', '.join(TEMPLATES)}")
    if cfg.examples is None and (cfg.test or cfg.format != "auto"):
        raise ValueError("test= and format= need a file of demonstrations: give examples=FILE, too")
    if cfg.shots is not None and (not cfg.shots or min(cfg.shots) < 1 or len(set(cfg.shots)) < len(cfg.shots)):
        raise ValueError(f"shots={cfg.shots} must be different numbers, each 1 or more: use shots=[1,2,4,8]")
    if cfg.orders < 0 or cfg.orders == 1:
        raise ValueError("order robustness compares two or more orders: use orders=10, or orders=0 to leave it out")
    longest = min(len(words.split()) for words in WORDS.values())
    if not (2 <= cfg.classes <= len(WORDS) and 1 <= cfg.words <= longest):
        raise ValueError(f"the synthetic task has 2 to {len(WORDS)} classes and 1 to {longest} words: use classes=4 words=2")


def draw_episode(task: Task, cfg: IclConfig, number: int, shots: int, digits: int) -> Episode:
    """Episode `number` with `shots` demonstrations. Fewer shots give the first of these and the same questions."""
    rng = np.random.default_rng([cfg.seed, number])
    if task.name == "synthetic":
        return _synthetic(rng, cfg, shots, digits)
    if shots > len(task.demonstrations):
        most = len(task.demonstrations)
        raise ValueError(f"{shots} shots need {shots} demonstrations, but there are {most}: use at most shots=[{most}]")
    asked = rng.permutation(len(task.questions))[: cfg.queries]
    shown = rng.permutation(len(task.demonstrations))[:shots]
    labels = sorted({example.label for example in (*task.demonstrations, *task.questions)})
    return Episode([task.demonstrations[i] for i in shown], [task.questions[i] for i in asked], labels)


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
