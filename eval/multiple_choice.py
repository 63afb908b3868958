"""Multiple choice by loss, as HellaSwag is scored: the model's answer is the ending that it finds most probable.

    python -m eval.multiple_choice run=runs/NAME file=hellaswag_val.jsonl [name=NAME] [limit=1000]

file: JSON lines (.jsonl or .jsonl.gz) with "query", "endings" and "label", the right ending's number from 0;
HellaSwag's own "activity_label", "ctx_a" and "ctx_b" may replace "query", and then WikiHow's marks are removed. A query
follows an end-of-text token, an ending follows a space. Where query and ending exceed the trained context, the query loses
its beginning. Questions with an ending as long as the trained context are left out.

Share of questions where the right ending has the highest log-probability: `acc` in sum, `acc_norm` per token
(build-nanogpt, llm.c), `acc_norm_bytes` per byte (the acc_norm of lm-evaluation-harness divides by characters). `loss`:
of the right endings, nats per token.
Writes runs/NAME/eval/multiple_choice_STEM.json and runs/NAME/figures/multiple_choice_STEM.png. STEM is name= if given, else the
name of the file without its suffixes.
"""

import gzip
import hashlib
import json
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from omegaconf import MISSING

from configs import command
from eval.common import GREY, EvalConfig, claim_result, figure, mean_se, open_run, plus_minus, progress, write_result
from eval.scoring import score
from training.checkpoint import LoadedRun

METRICS = {"acc": "log-probability", "acc_norm": "per token", "acc_norm_bytes": "per byte"}


@dataclass
class MultipleChoiceConfig(EvalConfig):
    """file: the file with the questions. name: name of the result, in place of the file's name. limit: number of questions,
    taken at even distances; None: all questions.
    """

    file: str = MISSING
    name: str | None = None
    limit: Annotated[int | None, "[1, inf)"] = None


@dataclass(frozen=True)
class Question:
    """A beginning, its possible endings and the number of the right one."""

    query: str
    endings: tuple[str, ...]
    label: int


def read_questions(path: Path) -> list[Question]:
    """All questions of a file. ValueError that names the line for a line that is not a question."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}: correct file=")
    try:
        text = (gzip.open if path.suffix == ".gz" else open)(path, "rb").read().decode()
    except (gzip.BadGzipFile, zlib.error, EOFError, UnicodeDecodeError):
        raise ValueError(f"{path} is not JSON lines in UTF-8, plain or .gz: give file= another file") from None
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{path} is empty: give file= a file of JSON lines with query, endings and label")
    return [_question(f"{path} line {number}", line) for number, line in lines]


def _question(where: str, line: str) -> Question:
    try:
        item = json.loads(line)
        tidy, query = (str.strip, item["query"]) if "query" in item else (clean, _hellaswag(item))
        query, endings = tidy(query), tuple(tidy(ending) for ending in item["endings"])
        label = int(str(item["label"]))  # no bool, no 1.5
        several = isinstance(item["endings"], list) and len(endings) > 1
        if not (query and several and all(endings) and 0 <= label < len(endings)):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        wanted = '{"query": "...", "endings": ["...", "..."], "label": 0}'
        raise ValueError(f"{where} is not a question with two or more endings: write each line like {wanted}") from None
    return Question(query, endings, label)


def _hellaswag(item: dict[str, Any]) -> str:
    return f"{item['activity_label']}: {item['ctx_a']} {item['ctx_b'].capitalize()}"


def clean(text: str) -> str:
    """The text without WikiHow's marks, as lm-evaluation-harness cleans HellaSwag."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ").strip()


def evaluate(run: LoadedRun, questions: list[Question], batch: int) -> dict[str, Any]:
    """Each accuracy with its standard error, chance, losses of right and wrong endings, and counts.

    Questions with an ending as long as the trained context are left out.
    """
    context, encode = run.model.cfg.context, run.tokenizer.encode
    spelled = [[np.array(encode(f" {ending}")) for ending in question.endings] for question in questions]
    fitting = [i for i, row in enumerate(spelled) if max(map(len, row)) < context]
    if not fitting:
        raise ValueError(
            f"every question has an ending that fills the trained context of {context} tokens: use shorter endings"
        )
    skipped = len(questions) - len(fitting)
    questions, endings = [questions[i] for i in fitting], [spelled[i] for i in fitting]
    queries = [np.array([run.tokenizer.eot, *encode(question.query)]) for question in questions]
    rooms = [context + 1 - max(map(len, row)) for row in endings]  # the model does not read an ending's last token
    prompts = [query[-room:] for query, room in zip(queries, rooms, strict=True)]
    with progress("multiple choice", len(questions)) as bar:
        _, logprobs = score(run.model, prompts, endings, batch, done=bar.update)
    results = summarise(questions, endings, logprobs)
    return results | {
        "truncated": sum(len(query) > room for query, room in zip(queries, rooms, strict=True)),
        "skipped": skipped,
        "sha256": hashlib.sha256(spelled_out(questions)).hexdigest(),
    }


def spelled_out(questions: list[Question]) -> bytes:
    """The questions as bytes, for a digest."""
    return json.dumps([[question.query, question.endings, question.label] for question in questions]).encode()


def summarise(questions: list[Question], endings: list[list[np.ndarray]], logprobs: list[np.ndarray]) -> dict[str, Any]:
    """Results from each question's log-probabilities (endings,)."""
    right: dict[str, list[bool]] = {name: [] for name in METRICS}
    losses, wrong = [], []
    for question, tokens, sums in zip(questions, endings, logprobs, strict=True):
        lengths = np.array([len(ending) for ending in tokens])
        sizes = np.array([len(ending.encode(errors="replace")) for ending in question.endings])
        for name, scores in zip(METRICS, (sums, sums / lengths, sums / sizes), strict=True):
            right[name].append(bool((scores >= scores[question.label]).sum() == 1))  # a tie counts as wrong
        per_token = -sums / lengths
        losses.append(per_token[question.label])
        wrong.append(np.delete(per_token, question.label).mean())
    results: dict[str, Any] = {}
    for name, hits in right.items():
        results[name], results[f"{name}_se"] = mean_se(np.array(hits, dtype=float))
    results["loss"], results["loss_se"] = mean_se(losses)
    results["margin"], results["margin_se"] = mean_se(np.array(wrong) - np.array(losses))
    chance = float(np.mean([1 / len(question.endings) for question in questions]))
    return results | {"chance": chance, "samples": len(questions)}


def draw(path: Path, results: dict[str, Any], title: str, shade: str) -> None:
    """Bars of the three accuracies with 95 % intervals, and chance."""
    with figure(path, 4.6, 3.6) as axes:
        ax = axes[0, 0]
        values, errors = [results[name] for name in METRICS], [1.96 * results[f"{name}_se"] for name in METRICS]
        ax.bar(range(len(METRICS)), values, 0.6, yerr=errors, color=shade, error_kw={"elinewidth": 1})
        for x, (value, error) in enumerate(zip(values, errors, strict=True)):
            at = (x, value + error)
            ax.annotate(f"{value:.3f}", at, (0, 3), textcoords="offset points", ha="center")
        ax.axhline(results["chance"], color=GREY, linewidth=1, linestyle="--", label="chance")
        ax.set_xticks(range(len(METRICS)), METRICS.values())
        ax.tick_params(axis="x", length=0)
        ax.set(title=title, ylabel=f"accuracy, n = {results['samples']:,}")
        tallest = max(results["chance"], *map(sum, zip(values, errors, strict=True)))  # above 0 without a right answer
        ax.set_ylim(0, min(1.05, 1.25 * tallest))
        ax.figure.legend(loc="outside lower right")


@command("multiple_choice", MultipleChoiceConfig)
def main(cfg: MultipleChoiceConfig) -> None:
    questions = whole = read_questions(Path(cfg.file))
    if cfg.limit is not None and cfg.limit < len(questions):
        questions = [questions[i] for i in np.linspace(0, len(questions) - 1, cfg.limit).round().astype(int)]
    run = open_run(cfg)
    file, about = claim_result("multiple_choice", cfg, lambda: [spelled_out(whole)])
    results = evaluate(run, questions, cfg.batch) | about
    said = write_result(run, cfg, file, results, draw)
    accuracies = ", ".join(f"{metric} {plus_minus(results[metric], results[f'{metric}_se'], '.4f')}" for metric in METRICS)
    print(
        f"{said}: {accuracies}, loss {plus_minus(results['loss'], results['loss_se'], '.4f')} "
        f"({results['samples']:,} questions, chance {results['chance']:.3f}, {results['truncated']:,} cut, "
        f"{results['skipped']:,} left out)"
    )


if __name__ == "__main__":
    main()
