"""In-context learning: many-shot classification, and how much it depends on the order of the demonstrations.

    python -m eval.icl run=runs/NAME [shots=[1,2,4,8]] [episodes=100] [orders=10]
    python -m eval.icl run=runs/NAME examples=FILE [format=trec|trec_fine|banking77|clinc150] [test=FILE]

A prompt is a number of demonstrations (text and label) and one more text. Decoding is constrained to the labels: the one
whose tokens have the highest summed log-probability after the prompt is the answer. An episode is one drawing of
demonstrations, of which the first n are used for n shots, and of questions; errors are over episodes. Order robustness:
the same demonstrations in `orders` orders (random, alternating by class, grouped by class), the best minus the worst
accuracy over those. Protocol: arXiv 2410.05258, section 3.4, after Bertsch et al. (arXiv 2405.00200) and Ratner et al.
(arXiv 2212.10947).

Without examples= the task is synthetic: words of a few classes (animals, tools, ...), a number drawn for each class in each
episode, in the sentences of data.retrieval ("The magic number of horse is 4817."), which small models can be trained on.
Words that a demonstration showed ask for recall; the others, for the class.
Writes runs/NAME/eval/icl.json and runs/NAME/figures/icl.png.
"""

import csv
import io
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from configs import command
from data.retrieval import draw_number
from data.tokenizer import Tokenizer
from eval.common import (
    GREY,
    LOGITS_IN_MEMORY,
    EvalConfig,
    colour,
    device_of,
    figure,
    mean_se,
    open_run,
    pad_right,
    progress,
    run_name,
    variant,
    write_result,
)
from model.cache import KVCache
from training.checkpoint import LoadedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

T = TypeVar("T")
ARRANGEMENTS = ("random", "alternating", "grouped")
EPISODES_SYNTHETIC, EPISODES, ORDER_EPISODES = 100, 10, 20


@dataclass
class IclConfig(EvalConfig):
    """What to classify, and how often.

    examples: a file to draw demonstrations from; None is the synthetic task. test: a file to draw questions from, by
    default the test split of `examples` or a fifth of it. shots: demonstrations, by default powers of two up to the most
    that fit the trained context, and that. episodes: 100 of the synthetic task, 10 of a file. queries: questions per
    episode, at most. orders: permutations of the demonstrations (of 20 episodes at most), 0 to leave order robustness out;
    order_shots: of so many demonstrations, by default the most of `shots`. classes, words: of the synthetic task, and
    words per class.
    """

    examples: str | None = None
    test: str | None = None
    format: str = "auto"  # auto | trec | trec_fine | banking77 | clinc150
    shots: list[int] | None = None
    episodes: int | None = None
    queries: int = 50
    orders: int = 10
    order_shots: int | None = None
    classes: int = 4
    words: int = 2
    seed: int = 0  # of the drawings


# Tasks: what is asked, and in which words


@dataclass(frozen=True)
class Example:
    """A text to classify and its label."""

    text: str
    label: str


@dataclass(frozen=True)
class Task:
    """A way to ask and, for a file's examples, what to draw from. `question` and `answer` have one {} each."""

    name: str
    question: str
    answer: str
    demonstrations: list[Example]
    questions: list[Example]


@dataclass(frozen=True)
class Episode:
    """Demonstrations in order, questions, and the labels to choose among."""

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

READABLE = {  # the six coarse classes of TREC, Li and Roth 2002
    "ABBR": "abbreviation",
    "DESC": "description",
    "ENTY": "entity",
    "HUM": "human",
    "LOC": "location",
    "NUM": "number",
}
TEMPLATES = {
    "trec": ("Question: {}\nType:", " {}\n"),
    "trec_fine": ("Question: {}\nType:", " {}\n"),
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
    return _trec(path, text, fine=form == "trec_fine"), []


def _text(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"no evaluation set {path}: correct examples= or test=")
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("latin-1")  # as TREC is published


def _wrong_format(path: Path, form: str, found: str, wanted: str) -> ValueError:
    found = found if len(found) <= 40 else found[:37] + "..."
    others = ", ".join(name for name in TEMPLATES if name != form)
    return ValueError(
        f"{path} is not in the format {form}: {found} is not {wanted}: give such a file, or format={others}"
    )


def _trec(path: Path, text: str, fine: bool) -> list[Example]:
    examples = []
    for number, line in enumerate(text.splitlines(), 1):
        match = re.fullmatch(r"([A-Z]+):(\w+) (.+)", line.strip())
        if match is None or match[1] not in READABLE:
            if not line.strip():
                continue
            raise _wrong_format(path, "trec", f"line {number} ({line.strip()[:20]!r})", "'LABEL:fine text'")
        label = f"{READABLE[match[1]]} {match[2]}" if fine else READABLE[match[1]]
        examples.append(Example(match[3], label))
    return examples


def _banking77(path: Path, text: str) -> list[Example]:
    header, *rows = list(csv.reader(io.StringIO(text, newline=""))) or [[]]
    if header[:2] != ["text", "category"]:
        raise _wrong_format(path, "banking77", f"line 1 ({','.join(header)[:20]!r})", "'text,category'")
    for number, row in enumerate(rows, 2):
        if len(row) < 2:
            raise _wrong_format(path, "banking77", f"row {number}", "a text and a category")
    return [Example(" ".join(row[0].split()), row[1].replace("_", " ")) for row in rows]


def _clinc150(path: Path, text: str) -> tuple[list[Example], list[Example]]:
    try:
        content = json.loads(text)
        parts = [[Example(x, label.replace("_", " ")) for x, label in content[split]] for split in ("train", "test")]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _wrong_format(path, "clinc150", "it", "JSON with train and test lists of [text, intent]") from None
    return parts[0], parts[1]


def detect(path: Path) -> str:
    """The format that a file's name ends on; TREC with its six classes, not its fifty."""
    return {".csv": "banking77", ".json": "clinc150"}.get(path.suffix.lower(), "trec")


def load_task(cfg: IclConfig) -> Task:
    """The task that the configuration names. Raises ValueError for files that do not fit it or each other."""
    if cfg.examples is None:
        return Task("synthetic", *SYNTHETIC, [], [])
    form = detect(Path(cfg.examples)) if cfg.format == "auto" else cfg.format
    demonstrations, questions = read_examples(Path(cfg.examples), form)
    if cfg.test:
        first, second = read_examples(Path(cfg.test), form)
        questions = second or first
    labels = {example.label for example in demonstrations}
    if len(labels) < 2:
        raise ValueError(
            f"{cfg.examples} has {len(labels)} different labels, and two are needed: give another examples="
        )
    if unknown := {example.label for example in questions} - labels:
        few = ", ".join(sorted(unknown)[:3])
        raise ValueError(
            f"questions have labels that no demonstration has ({few}): give test= and examples= of one set"
        )
    if not questions:
        order = np.random.default_rng(cfg.seed).permutation(len(demonstrations))
        held = set(order[: max(1, len(order) // 5)].tolist())
        questions = [example for i, example in enumerate(demonstrations) if i in held]
        demonstrations = [example for i, example in enumerate(demonstrations) if i not in held]
    return Task(form, *TEMPLATES[form], demonstrations, questions)


def draw_episode(task: Task, cfg: IclConfig, number: int, shots: int, digits: int) -> Episode:
    """Episode `number` with `shots` demonstrations; that of fewer shots has the first of them, and the same questions."""
    rng = np.random.default_rng([cfg.seed, number])
    if task.name == "synthetic":
        return _synthetic(rng, cfg, shots, digits)
    if shots > len(task.demonstrations):
        most = len(task.demonstrations)
        raise ValueError(f"{shots} shots, but there are {most} demonstrations to draw: use at most shots=[{most}]")
    asked = rng.permutation(len(task.questions))[: cfg.queries]
    shown = rng.permutation(len(task.demonstrations))[:shots]
    labels = sorted({example.label for example in (*task.demonstrations, *task.questions)})
    return Episode([task.demonstrations[i] for i in shown], [task.questions[i] for i in asked], labels)


def _synthetic(rng: np.random.Generator, cfg: IclConfig, shots: int, digits: int) -> Episode:
    """Every word is shown once before any is shown again, and each is asked for once."""
    numbers: list[str] = []
    while len(numbers) < cfg.classes:
        number = str(draw_number(rng, "eval", digits))
        numbers += [number] if number not in numbers else []
    kinds = rng.permutation(len(WORDS))[: cfg.classes]
    chosen = [rng.permutation(list(WORDS.values())[kind].split())[: cfg.words].tolist() for kind in kinds]
    examples = [Example(word, number) for words, number in zip(chosen, numbers, strict=True) for word in words]
    questions = [examples[i] for i in rng.permutation(len(examples))[: cfg.queries]]
    rounds = -(-shots // len(examples))
    shown = [examples[i] for _ in range(rounds) for i in rng.permutation(len(examples))]
    return Episode(shown[:shots], questions, numbers)


def arrange(examples: Sequence[Example], how: str, rng: np.random.Generator) -> list[Example]:
    """The same examples in another order: `random`, `grouped` by class, or `alternating` between the classes.

    The order of the classes and, within a class, of its examples is random. Classes that run out are skipped.
    """
    shuffled = [examples[i] for i in rng.permutation(len(examples))]
    if how == "random":
        return shuffled
    labels = list(dict.fromkeys(example.label for example in shuffled))
    groups = [[example for example in shuffled if example.label == label] for label in labels]
    if how == "grouped":
        return list(itertools.chain(*groups))
    return [example for turn in itertools.zip_longest(*groups) for example in turn if example is not None]


# Scoring


@dataclass(frozen=True)
class Job:
    """Questions after one prefix (end of text and demonstrations), and the labels to score after each; token ids."""

    prefix: list[int]
    questions: list[list[int]]
    labels: list[list[int]]


class Writer:
    """Turns episodes into token ids. A demonstration and a question are cut into the same tokens."""

    def __init__(self, task: Task, tokenizer: Tokenizer) -> None:
        self.task, self.tokenizer = task, tokenizer
        self._ids: dict[str, list[int]] = {}

    def _encode(self, text: str) -> list[int]:
        if text not in self._ids:
            self._ids[text] = self.tokenizer.encode(text)
        return self._ids[text]

    def question(self, text: str) -> list[int]:
        return self._encode(self.task.question.format(text))

    def label(self, label: str) -> list[int]:
        return self._encode(self.task.answer.format(label))

    def shown(self, example: Example) -> list[int]:
        return self.question(example.text) + self.label(example.label)

    def job(self, demonstrations: Sequence[Example], episode: Episode) -> Job:
        prefix = [self.tokenizer.eot, *(token for example in demonstrations for token in self.shown(example))]
        questions = [self.question(example.text) for example in episode.questions]
        return Job(prefix, questions, [self.label(label) for label in episode.labels])


@torch.inference_mode()
def label_logprobs(
    model: nn.Module, jobs: Sequence[Job], batch: int, done: Callable[[int], object] = lambda n: None
) -> list[np.ndarray]:
    """For each job (Q, C): ln p(label | prefix, question) in nats, summed over the label's tokens.

    A prefix is run once for all its questions, a question once for all its labels: keys and values are copied out of a
    cache. Prefixes of a batch are equally long, questions too, so that nothing but the labels' ends is padded and any
    position encoding is exact. `batch` is in windows of the trained context; `done` is told of finished jobs.
    """
    scores = [np.zeros((len(job.questions), len(job.labels))) for job in jobs]
    for alike in equal(range(len(jobs)), lambda j: len(jobs[j].prefix)):
        for part in chunks(alike, rows_that_fit(model, len(jobs[alike[0]].prefix), batch)):
            cache = KVCache(len(jobs[part[0]].prefix))
            with last_position(model):
                model(ids(model, [jobs[j].prefix for j in part]), cache=cache)
            asked = [(b, j, q) for b, j in enumerate(part) for q in range(len(jobs[j].questions))]
            for rows in equal(asked, lambda row: len(jobs[row[1]].questions[row[2]])):
                _score_questions(model, jobs, rows, cache, scores, batch)
            done(len(part))
    return scores


def _score_questions(
    model: nn.Module,
    jobs: Sequence[Job],
    asked: Sequence[tuple[int, int, int]],
    prefixes: KVCache,
    scores: list[np.ndarray],
    batch: int,
) -> None:
    """Fill in the scores of equally long questions (b, j, q): question q of job j, after row b of the cache."""
    length = prefixes.length + len(jobs[asked[0][1]].questions[asked[0][2]])
    for part in chunks(asked, rows_that_fit(model, length, batch)):
        cache = copied(prefixes, [b for b, _, _ in part], length)
        with last_position(model):
            logits = model(ids(model, [jobs[j].questions[q] for _, j, q in part]), cache=cache)  # (R, 1, V)
        first = logits[:, 0].float().log_softmax(-1)  # (R, V)
        pairs = [(r, j, q, c) for r, (_, j, q) in enumerate(part) for c in range(len(jobs[j].labels))]
        longest = max(len(jobs[j].labels[c]) for _, j, _, c in pairs)
        fit = min(rows_that_fit(model, length + longest, batch), max(1, LOGITS_IN_MEMORY // (longest * first.shape[1])))
        for some in chunks(pairs, fit):
            labels = [jobs[j].labels[c] for _, j, _, c in some]
            logprobs = _continuations(model, cache, first, [r for r, *_ in some], labels)
            for (_, j, q, c), logprob in zip(some, logprobs.tolist(), strict=True):
                scores[j][q, c] = logprob


def _continuations(model: nn.Module, cache: KVCache, first: Tensor, rows: list[int], labels: list[list[int]]) -> Tensor:
    """(P,) log-probability of labels[p] after row rows[p] of the cache; first (R, V): that of their first tokens."""
    padded = pad_right([np.array(label) for label in labels], first.device)  # (P, longest)
    total = first[rows].gather(1, padded[:, :1])[:, 0].double()
    if padded.shape[1] == 1:
        return total
    after = copied(cache, rows, cache.length + padded.shape[1] - 1)
    logprobs = model(padded[:, :-1], cache=after).float().log_softmax(-1)  # (P, longest - 1, V)
    logprobs = logprobs.gather(2, padded[:, 1:, None])[..., 0].double()
    lengths = torch.tensor([len(label) for label in labels], device=padded.device)
    real = torch.arange(1, padded.shape[1], device=padded.device) < lengths[:, None]  # (P, longest - 1)
    return total + (logprobs * real).sum(1)


@contextmanager
def last_position(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes logits of the last position only, (B, 1, V): no others are kept, or computed at all."""
    hook = model.norm.register_forward_hook(lambda module, inputs, output: output[:, -1:])
    try:
        yield
    finally:
        hook.remove()


def copied(cache: KVCache, rows: list[int], max_length: int) -> KVCache:
    """A cache of the sequences `rows` of another one, with room for `max_length` tokens."""
    copy = KVCache(max_length)
    copy.length = cache.length
    for slot, buffers in cache.slots.items():
        copy.slots[slot] = tuple(_grown(buffer[:, :, : cache.length], rows, max_length) for buffer in buffers)
    copy.tokens = None if cache.tokens is None else cache.tokens[rows]
    return copy


def _grown(buffer: Tensor, rows: list[int], max_length: int) -> Tensor:
    """(B, H, S, d) -> (len(rows), H, max_length, d), zeros after S."""
    _, H, S, d = buffer.shape
    grown = buffer.new_zeros(len(rows), H, max_length, d)
    grown[:, :, :S] = buffer[torch.tensor(rows, device=buffer.device)]
    return grown


def ids(model: nn.Module, sequences: list[list[int]]) -> Tensor:
    """Equally long token lists as (B, T)."""
    return torch.tensor(sequences, device=device_of(model))


def rows_that_fit(model: nn.Module, length: int, batch: int) -> int:
    """How many sequences of `length` tokens need no more memory than `batch` of the trained context."""
    return max(1, batch * model.cfg.context // length)


def equal(items: Sequence[T], key: Callable[[T], int]) -> Iterator[list[T]]:
    """The items in groups of equal keys."""
    return (list(group) for _, group in itertools.groupby(sorted(items, key=key), key=key))


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """The items in parts of at most `size`."""
    return (items[start : start + size] for start in range(0, len(items), size))


# Evaluation


def fitting_shots(writer: Writer, episodes: Sequence[Episode], context: int) -> list[int]:
    """Powers of two up to the most that fit the context, with the longest question and label, in every episode; and that."""
    most = len(episodes[0].demonstrations)
    for episode in episodes:
        question = max(len(writer.question(example.text)) for example in episode.questions)
        room = context - 1 - question - max(len(writer.label(label)) for label in episode.labels)
        lengths = np.cumsum([len(writer.shown(example)) for example in episode.demonstrations])
        most = min(most, int(np.searchsorted(lengths, room, side="right")))
    if most < 1:
        raise ValueError(
            f"not one demonstration and a question fit the context of {context} tokens in every episode: "
            "use a run with a longer context, or shots=[1] to go beyond it"
        )
    return sorted({2**i for i in range(most.bit_length())} | {most})


def evaluate(run: LoadedRun, task: Task, cfg: IclConfig) -> dict[str, Any]:
    """Accuracy for each number of shots, `order` robustness, and what they are to be compared with."""
    digits = max(2, run.config["data"].get("retrieval", {}).get("digits", 4))  # of one digit, there are too few numbers
    count = cfg.episodes or (EPISODES_SYNTHETIC if task.name == "synthetic" else EPISODES)
    context = run.model.cfg.context
    most = max(*(cfg.shots or [0]), cfg.order_shots or 0)
    if cfg.shots is None:
        most = max(most, context // 4 if task.name == "synthetic" else min(context // 4, len(task.demonstrations)))
    episodes = [draw_episode(task, cfg, i, max(1, most), digits) for i in range(count)]
    writer = Writer(task, run.tokenizer)
    shots = sorted(cfg.shots) if cfg.shots else fitting_shots(writer, episodes, context)
    jobs = [(n, episode) for n in shots for episode in episodes]
    orders = [] if cfg.orders == 0 else order_jobs(episodes[:ORDER_EPISODES], cfg, cfg.order_shots or shots[-1])
    with progress("icl", len(jobs) + len(orders)) as bar:
        made = [writer.job(episode.demonstrations[:n], episode) for n, episode in jobs]
        made += [writer.job(shown, episode) for _, _, shown, episode in orders]
        scores = label_logprobs(run.model, made, cfg.batch, bar.update)
    rows = [summary(n, episodes, scores[i * count : (i + 1) * count]) for i, n in enumerate(shots)]
    classes = len(episodes[0].labels)
    results = {"task": task.name, "classes": classes, "chance": 1 / classes, "episodes": count}
    results |= {key: rows[-1][key] for key in ("accuracy", "se")}
    order = order_summary(orders, scores[len(jobs) :], cfg) if orders else None
    return results | {"queries": len(episodes[0].questions), "shots": rows, "order": order}


def summary(shots: int, episodes: Sequence[Episode], scores: Sequence[np.ndarray]) -> dict[str, Any]:
    """Accuracy with that many demonstrations, and the loss of the right label among the labels, with errors over episodes.

    label_shown: share of questions whose label a demonstration showed. recall: accuracy on the questions that were
    demonstrations themselves, text_shown their share; new: on the others (None where there are none).
    """
    right = [correct(episode, table) for episode, table in zip(episodes, scores, strict=True)]  # (Q,) each
    losses = [label_loss(episode, table) for episode, table in zip(episodes, scores, strict=True)]
    labels = [{e.label for e in episode.demonstrations[:shots]} for episode in episodes]
    texts = [{e.text for e in episode.demonstrations[:shots]} for episode in episodes]
    label_shown = [q.label in seen for seen, ep in zip(labels, episodes, strict=True) for q in ep.questions]
    known = np.array([q.text in seen for seen, ep in zip(texts, episodes, strict=True) for q in ep.questions])
    accuracy, se = mean_se([hits.mean() for hits in right])
    loss, loss_se = mean_se([values.mean() for values in losses])
    hits = np.concatenate(right)
    return {
        "shots": shots,
        "accuracy": accuracy,
        "se": se,
        "label_loss": loss,
        "label_loss_se": loss_se,
        "label_shown": float(np.mean(label_shown)),
        "text_shown": float(known.mean()),
        "recall": float(hits[known].mean()) if known.any() else None,
        "new": float(hits[~known].mean()) if not known.all() else None,
    }


def correct(episode: Episode, scores: np.ndarray) -> np.ndarray:
    """(Q,) 1.0 where the right label has the highest of the scores (Q, C); a tie with another one is not right."""
    own = [episode.labels.index(example.label) for example in episode.questions]
    best = scores[range(len(own)), own]
    return ((scores >= best[:, None]).sum(axis=1) == 1).astype(float)


def label_loss(episode: Episode, scores: np.ndarray) -> np.ndarray:
    """(Q,) -ln p(right label | one of the labels) in nats; guessing has ln C."""
    own = [episode.labels.index(example.label) for example in episode.questions]
    return np.logaddexp.reduce(scores, axis=1) - scores[range(len(own)), own]


Order = tuple[int, str, list[Example], Episode]  # episode's number, arrangement, demonstrations in order, episode


def order_jobs(episodes: Sequence[Episode], cfg: IclConfig, shots: int) -> list[Order]:
    """The first `shots` demonstrations of each episode in `cfg.orders` orders of each arrangement; none of a single one."""
    if shots < 2:
        return []
    return [
        (
            i,
            how,
            arrange(episode.demonstrations[:shots], how, np.random.default_rng([cfg.seed, i, 1 + a, order])),
            episode,
        )
        for i, episode in enumerate(episodes)
        for a, how in enumerate(ARRANGEMENTS)
        for order in range(cfg.orders)
    ]


def order_summary(orders: Sequence[Order], scores: Sequence[np.ndarray], cfg: IclConfig) -> dict[str, Any]:
    """For each arrangement: best and worst accuracy over the orders, and their margin, averaged over episodes."""
    table: dict[str, dict[int, list[float]]] = {how: {} for how in ARRANGEMENTS}
    for (i, how, _, episode), score in zip(orders, scores, strict=True):
        table[how].setdefault(i, []).append(float(correct(episode, score).mean()))
    episode = orders[0][3]
    results: dict[str, Any] = {"shots": len(orders[0][2]), "orders": cfg.orders}
    results["guessing"] = guessing_margin(1 / len(episode.labels), len(episode.questions), cfg.orders)
    for how, by_episode in table.items():
        margin, se = mean_se([max(values) - min(values) for values in by_episode.values()])
        named = {name: float(np.mean([f(v) for v in by_episode.values()])) for name, f in EXTREMES.items()}
        results[how] = {"margin": margin, "se": se} | named
    return results


EXTREMES: dict[str, Callable[[list[float]], float]] = {"best": max, "worst": min, "mean": lambda v: sum(v) / len(v)}


def guessing_margin(p: float, n: int, orders: int) -> float:
    """Expected best minus worst of `orders` independent guesses of n answers, each right with probability p."""
    below = np.cumsum([math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n)])  # P(at most k right), k < n
    return float((1 - below**orders).sum() - ((1 - below) ** orders).sum()) / n


# Figure


def draw(path: Path, results: dict[str, Any], title: str, line_colour: str) -> None:
    """Accuracy against demonstrations with its chance line, and the margins between orders; bars are standard errors."""
    columns = 1 if results["order"] is None else 2
    with figure(path, 0.4 + 4.8 * columns, 4, columns=columns) as axes:
        _accuracies(axes[0, 0], results, line_colour)
        axes[0, 0].set_title(f"{title} · {results['task']}")
        if columns == 2:
            _margins(axes[0, 1], results["order"], line_colour)
            axes[0, 1].set_title(f"{title} · order of {results['order']['shots']} demonstrations")


def _accuracies(ax: "Axes", results: dict[str, Any], line_colour: str) -> None:
    rows = results["shots"]
    x = [row["shots"] for row in rows]
    errors = [row["se"] for row in rows]
    ax.axhline(results["chance"], color=GREY, linestyle="--", linewidth=1.2, label="chance")
    ax.errorbar(
        x, [row["accuracy"] for row in rows], errors, color=line_colour, marker="o", capsize=3, label="all questions"
    )
    for key, style, label in (("recall", "--", "shown words"), ("new", ":", "new words")):
        points = [(row["shots"], row[key]) for row in rows if row[key] is not None]
        if results["task"] == "synthetic" and points:
            ax.plot(*zip(*points, strict=True), style, color=line_colour, linewidth=1.2, marker=".", label=label)
    ax.set_xscale("log", base=2)
    ax.set_xticks(x, [f"{n:,}" for n in x])
    ax.set(xlabel="demonstrations", ylabel=f"accuracy ({results['classes']} classes)", ylim=(-0.02, 1.02))
    ax.grid(axis="y")
    ax.legend(loc="best")


def _margins(ax: "Axes", order: dict[str, Any], line_colour: str) -> None:
    values, errors = ([order[how][key] for how in ARRANGEMENTS] for key in ("margin", "se"))
    ax.bar(range(len(values)), values, yerr=errors, color=line_colour, ecolor=GREY, capsize=3, width=0.6)
    ax.axhline(order["guessing"], color=GREY, linestyle="--", linewidth=1.2, label="guessing anew each time")
    ax.set_xticks(range(len(values)), ARRANGEMENTS)
    ax.set_ylabel(f"best minus worst accuracy of {order['orders']} orders")
    ax.set_ylim(0, None)
    ax.grid(axis="y")
    ax.legend(loc="best")


# Command


def check(cfg: IclConfig) -> None:
    """Raise ValueError for what cannot be evaluated."""
    if cfg.format not in ("auto", *TEMPLATES):
        raise ValueError(f"format={cfg.format} is unknown: use format= one of auto, {', '.join(TEMPLATES)}")
    if cfg.examples is None and (cfg.test or cfg.format != "auto"):
        raise ValueError("test= and format= are of an evaluation set: give its examples=FILE, too")
    if cfg.shots is not None and (not cfg.shots or min(cfg.shots) < 1 or len(set(cfg.shots)) < len(cfg.shots)):
        raise ValueError(f"shots={cfg.shots} are not different numbers of demonstrations: use shots=[1,2,4,8]")
    if (cfg.episodes is not None and cfg.episodes < 1) or cfg.queries < 1:
        raise ValueError("nothing to measure: use episodes=10 and queries=50, or leave them out")
    if cfg.orders < 0 or cfg.orders == 1 or (cfg.order_shots is not None and cfg.order_shots < 2):
        raise ValueError(
            "order robustness compares orders: use orders=10 and order_shots=8, or orders=0 to leave it out"
        )
    longest = min(len(words.split()) for words in WORDS.values())
    if not (2 <= cfg.classes <= len(WORDS) and 1 <= cfg.words <= longest):
        raise ValueError(
            f"the synthetic task has 2 to {len(WORDS)} classes and 1 to {longest} words: use classes=4 words=2"
        )


@command("icl", IclConfig)
def main(cfg: IclConfig) -> None:
    check(cfg)
    task = load_task(cfg)
    run = open_run(cfg)
    results = evaluate(run, task, cfg)
    write_result(run, cfg, "icl", results)
    name = run_name(cfg.run)
    draw(Path(cfg.run) / "figures" / "icl.png", results, name, colour(variant(run.config)))
    chance = f"chance {results['chance']:.3f}"
    for row in results["shots"]:
        print(
            f"icl  {name}: {task.name}, {row['shots']} shots: accuracy {row['accuracy']:.3f} ± {row['se']:.3f} ({chance})"
        )
    if order := results["order"]:
        margins = ", ".join(f"{how} {order[how]['margin']:.3f} ± {order[how]['se']:.3f}" for how in ARRANGEMENTS)
        print(
            f"icl  {name}: best minus worst of {order['orders']} orders of {order['shots']} demonstrations: {margins} "
            f"(guessing {order['guessing']:.3f})"
        )


if __name__ == "__main__":
    main()
