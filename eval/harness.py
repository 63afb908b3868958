"""Tasks of EleutherAI's lm-evaluation-harness, or of your own task files, on any run.

    python -m eval.harness run=runs/NAME tasks=[lambada_openai,hellaswag] [include_path=DIR] [num_fewshot=0] [limit=100]

Needs the package lm-eval (tested with 0.4.13). The adapter answers the three kinds of request of its `LM` interface:
the log-likelihood of a continuation, the log-likelihood of a whole text in windows, and greedy decoding up to a stop
string. Every context starts with the end-of-text token, as every training document does; of a text in windows only the
first window does. The model reads at most `length` tokens at once (by default the trained context); older tokens are
cut off, and the result counts the cut contexts.
Writes runs/NAME/eval/harness.json and runs/NAME/figures/harness.png. Tasks that an earlier command measured stay in the
result if step, length, limit, num_fewshot and lm-eval's version are the same; else the new tasks replace them.
"""

import hashlib
import json
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from omegaconf import MISSING
from torch import nn

from configs import command
from eval.common import GREY, EvalConfig, figure, open_run, progress, write_result
from eval.scoring import continue_greedily, score
from training.checkpoint import LoadedRun

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError:  # an optional package: `main` says what to install
    TemplateLM = object

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.tasks import TaskManager

Row = tuple[list[int], list[int]]  # tokens of a context (at least one token) and of its continuation
# lm-eval's names of the largest number of new tokens, and its default
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
MAX_NEW = 256
BOOTSTRAP = 1000  # resamples for standard errors of metrics that are not means, e.g. a corpus perplexity


@dataclass
class HarnessConfig(EvalConfig):
    """tasks: names of lm-eval's tasks, or of tasks under include_path. limit: documents per task, by default all."""

    tasks: list[str] = MISSING
    include_path: str | None = None  # folder with more task files
    num_fewshot: Annotated[int | None, "[0, inf)"] = None  # examples in the prompt; None: the task's own number
    limit: Annotated[int | None, "[1, inf)"] = None
    length: int | None = None  # tokens of context and continuation; None: the trained context


def log_likelihoods(model: nn.Module, rows: Sequence[Row], batch: int) -> list[tuple[float, bool]]:
    """For each (context, continuation): its log-probability (nats), and whether greedy decoding gives the continuation.

    The model reads a context once for all of its continuations, such as the choices of a question.
    """
    same: dict[tuple[int, ...], list[int]] = {}
    for i, (context, _) in enumerate(rows):
        same.setdefault(tuple(context), []).append(i)
    prompts = [np.array(context) for context in same]
    continuations = [[np.array(rows[i][1], dtype=np.int64) for i in members] for members in same.values()]
    with progress("log-likelihoods", len(prompts)) as bar:
        hits, logprobs = score(model, prompts, continuations, batch, done=bar.update)
    found: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
    for members, *columns in zip(same.values(), logprobs, hits, strict=True):
        for i, logprob, hit in zip(members, *columns, strict=True):
            found[i] = float(logprob), bool(hit)
    return found


# ---------------------------------------- the adapter


class RunLM(TemplateLM):
    """A run with the methods of an lm-eval model: `loglikelihood`, `loglikelihood_rolling` and `generate_until`.

    `truncated` counts contexts that lost their beginning. `shortened` counts decodings that were limited to fewer
    tokens than the task asks for, because the prompt needs part of the context, too. `per_task` has both for each task,
    and a digest of its requests.
    """

    def __init__(self, run: LoadedRun, batch: int = 32, length: int | None = None) -> None:
        super().__init__()
        context = run.model.cfg.context
        self.run, self.batch, self.length = run, batch, context if length is None else length
        if self.length < 2:
            raise ValueError(f"length={length} has no room for a context: use length=2 or more")
        if self.length > context and run.model.positions is not None:
            raise ValueError(f"length={length} exceeds the {context} learned positions: use length={context} or less")
        self.truncated, self.shortened = Counter(), Counter()  # task -> cut contexts, limited decodings
        self._digests = defaultdict(hashlib.sha256)  # task -> of its requests
        self._tasks: list[str] = []  # of the requests for log-likelihoods

    def per_task(self) -> dict[str, dict[str, Any]]:
        """Task -> its cut contexts, its limited decodings and the digest of its requests."""
        return {
            task: {"truncated": self.truncated[task], "shortened": self.shortened[task], "sha256": digest.hexdigest()}
            for task, digest in sorted(self._digests.items())
        }

    def _tasks_of(self, requests: list["Instance"]) -> list[str]:
        """The task of each request, whose digest takes the request in."""
        names = [getattr(request, "task_name", None) or "" for request in requests]
        for name, request in zip(names, requests, strict=True):
            self._digests[name].update(repr(request.args).encode())
        return names

    @property
    def eot_token_id(self) -> int:
        return self.run.tokenizer.eot

    @property
    def tokenizer_name(self) -> str:
        return self.run.tokenizer.fingerprint  # lm-eval caches requests per tokenizer

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        return self.run.tokenizer.encode(string)

    def loglikelihood(self, requests: list["Instance"], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """For each (context, continuation): its log-probability, and whether greedy decoding gives the continuation."""
        self._tasks = self._tasks_of(requests)
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)  # lm-eval splits the texts into tokens

    def _loglikelihood_tokens(self, requests: list[Any], **_: object) -> list[tuple[float, bool]]:
        rows = []
        for task, (_, context, continuation) in zip(self._tasks, requests, strict=True):
            if len(continuation) > self.length:
                wrong = f"a continuation of {len(continuation)} tokens exceeds length={self.length}"
                raise ValueError(f"{wrong}: leave its task out, or use length={len(continuation)} (rotary positions)")
            # The model does not read the last token of the continuation.
            context, room = self._started(context), self.length + 1 - len(continuation)
            self.truncated[task] += len(context) > room
            rows.append((context[-room:], continuation))
        return log_likelihoods(self.run.model, rows, self.batch)

    def loglikelihood_rolling(self, requests: list["Instance"], disable_tqdm: bool = True) -> list[float]:
        """For each (text,): the log-probability of the whole text, where every token is predicted once."""
        self._tasks_of(requests)
        texts = [self.run.tokenizer.encode(request.args[0]) for request in requests]
        rolled = [get_rolling_token_windows(text, self.eot_token_id, self.length, context_len=1) for text in texts]
        windows = [list(map(make_disjoint_window, rows)) for rows in rolled]
        scores = iter(log_likelihoods(self.run.model, [row for rows in windows for row in rows], self.batch))
        return [sum(next(scores)[0] for _ in rows) for rows in windows]

    def generate_until(self, requests: list["Instance"], disable_tqdm: bool = True) -> list[str]:
        """For each (context, settings): the greedy continuation up to the first `until` string of the settings."""
        tasks = self._tasks_of(requests)
        jobs = [self._job(task, *request.args) for task, request in zip(tasks, requests, strict=True)]
        texts = [""] * len(jobs)
        with progress("decoding", len(jobs)) as bar:
            order = sorted(range(len(jobs)), key=lambda i: jobs[i][1:])
            for (limit, until), group in groupby(order, key=lambda i: jobs[i][1:]):
                members = list(group)
                stopped = partial(self._stopped, until)
                prompts = [jobs[i][0] for i in members]
                written = continue_greedily(self.run.model, prompts, limit, self.batch, stopped=stopped, done=bar.update)
                for i, new in zip(members, written, strict=True):
                    new = new[:-1] if new[-1] == self.eot_token_id else new
                    texts[i] = before_any(self.run.tokenizer.decode(new), until)
        return texts

    def _job(self, task: str, context: str, settings: dict[str, Any]) -> tuple[np.ndarray, int, tuple[str, ...]]:
        """The prompt's tokens, the number of new tokens, and the stop strings."""
        if settings.get("do_sample") and settings.get("temperature") != 0:
            raise ValueError("a task asks for sampling, but decoding is greedy: set do_sample: false in its YAML file")
        asked = next((settings[name] for name in LIMITS if settings.get(name) is not None), MAX_NEW)
        limit = min(int(asked), self.length // 2)
        self.shortened[task] += limit < asked
        prompt = self._started(self.tok_encode(context))
        self.truncated[task] += len(prompt) > self.length - limit
        until = settings.get("until") or []
        prompt = np.array(prompt[-(self.length - limit) :])
        return prompt, limit, tuple([until] if isinstance(until, str) else until)

    def _stopped(self, until: tuple[str, ...], new: list[int]) -> bool:
        return new[-1] == self.eot_token_id or any(stop in self.run.tokenizer.decode(new) for stop in until if stop)

    def _started(self, context: list[int]) -> list[int]:
        return context if context[:1] == [self.eot_token_id] else [self.eot_token_id, *context]


def before_any(text: str, stops: Sequence[str]) -> str:
    """`text` up to where the first of `stops` begins."""
    return text[: min((text.find(stop) for stop in stops if stop and stop in text), default=len(text))]


# ---------------------------------------- the command


def task_manager(tasks: list[str], include_path: str | None) -> "TaskManager":
    """The index of tasks. If `include_path` has all of `tasks`, lm-eval's own index is not read, which would take seconds."""
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        if not Path(include_path).is_dir():
            raise ValueError(f"include_path={include_path} is not a folder: give a folder with task YAML files")
        own = TaskManager(include_path=include_path, include_defaults=False)
        if set(tasks) <= set(own.all_tasks):
            return own
    manager = TaskManager(include_path=include_path)
    if unknown := sorted(set(tasks) - set(manager.all_tasks)):
        known = "`lm-eval ls tasks` lists the tasks; your own YAML files need include_path=DIR"
        raise ValueError(f"there is no task {', '.join(unknown)}: {known}")
    return manager


def evaluate(lm: RunLM, cfg: HarnessConfig) -> dict[str, Any]:
    """lm-eval's metrics of each task with their standard errors, and the numbers of cut contexts and answers."""
    import lm_eval

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # lm-eval logs every step
    found = lm_eval.simple_evaluate(
        lm,
        tasks=list(cfg.tasks),
        num_fewshot=cfg.num_fewshot,
        limit=cfg.limit,
        task_manager=task_manager(cfg.tasks, cfg.include_path),
        bootstrap_iters=BOOTSTRAP,
        log_samples=False,
    )
    tasks = {name: plain(metrics) for name, metrics in found["results"].items()}
    for name, counts in found["n-samples"].items():  # a group of tasks has no counts
        tasks.setdefault(name, {}).update(samples=counts["effective"], num_fewshot=found["n-shot"].get(name))
    return {
        "tasks": tasks,
        "length": lm.length,
        "truncated": lm.truncated.total(),
        "shortened": lm.shortened.total(),
        "per_task": lm.per_task(),
        "lm_eval": lm_eval.__version__,
    }


def joined(new: dict[str, Any], cfg: HarnessConfig, step: int) -> tuple[dict[str, Any], HarnessConfig]:
    """The results and their settings with the tasks of the run's earlier result, if both were measured in the same way."""
    try:
        before = json.loads((Path(cfg.run) / "eval" / "harness.json").read_text())
        old, had = before["results"], before["config"]
        same = before["step"] == step and all(had[key] == getattr(cfg, key) for key in ("limit", "num_fewshot"))
        same &= all(old[key] == new[key] for key in ("length", "lm_eval"))
        tasks = old["tasks"] | new["tasks"]
        counts = {"truncated": old["truncated"], "shortened": old["shortened"]}
        earlier = old.get("per_task", {"earlier tasks": counts})  # older results count all tasks together
        per_task = earlier | new["per_task"]
        names, path = list(dict.fromkeys([*had["tasks"], *cfg.tasks])), cfg.include_path or had["include_path"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no result, or the file cannot be read
        return new, cfg
    if not same or old["tasks"].keys() <= new["tasks"].keys():
        return new, cfg
    totals = {key: sum(part[key] for part in per_task.values()) for key in counts}
    return new | {"tasks": tasks} | totals | {"per_task": per_task}, replace(cfg, tasks=names, include_path=path)


def plain(metrics: dict[str, Any]) -> dict[str, float | None]:
    """lm-eval's "acc,none" and "acc_stderr,none" as `acc` and `acc_stderr`. Other filters than `none` stay in the name."""
    named = {key.removesuffix(",none"): value for key, value in metrics.items() if "," in key}
    return {key: value if isinstance(value, (int, float)) else None for key, value in named.items()}  # "N/A": None


def shares(results: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(task and metric, value, standard error or nan) of the metrics that are shares of the documents."""
    found = []
    for task, metrics in results["tasks"].items():
        for metric, value in metrics.items():
            name, comma, chosen = metric.partition(",")  # the error of exact_match,strict is exact_match_stderr,strict
            if name in ("acc", "acc_norm", "exact_match", "em", "f1") and value is not None:
                found.append((f"{task} · {metric}", value, metrics.get(f"{name}_stderr{comma}{chosen}") or math.nan))
    return found


def draw(path: Path, results: dict[str, Any], title: str, shade: str) -> None:
    """Bars of the metrics that are shares, with 95 % intervals; no figure without such a metric."""
    bars = shares(results)
    if not bars:
        path.unlink(missing_ok=True)  # that of an earlier result
        return
    with figure(path, 6.2, 1.3 + 0.42 * len(bars), grid="x") as axes:
        ax = axes[0, 0]
        names, values, errors = zip(*bars, strict=True)
        look = {"color": shade, "error_kw": {"elinewidth": 1, "ecolor": GREY}}
        ax.barh(range(len(bars)), values, 0.6, xerr=[1.96 * error for error in errors], **look)
        for y, value in enumerate(values):
            ax.text(1.02, y, f"{value:.3f}", va="center", ha="left")
        ax.set_yticks(range(len(bars)), names)
        ax.invert_yaxis()
        ax.set(xlim=(0, 1), title=title, xlabel="share of the documents")
        ax.tick_params(axis="y", length=0)


@command("harness", HarnessConfig)
def main(cfg: HarnessConfig) -> None:
    if TemplateLM is object:
        raise ValueError("harness needs the package 'lm-eval': pip install lm-eval")
    if not cfg.tasks:
        raise ValueError("tasks is empty: give tasks=[NAME,...]; `lm-eval ls tasks` lists the names")
    run = open_run(cfg)
    results = evaluate(RunLM(run, cfg.batch, cfg.length), cfg)
    whole, settings = joined(results, cfg, run.step)
    said = write_result(run, settings, "harness", whole, draw)
    for task, metrics in results["tasks"].items():
        values = [f"{key} {value:.4g}" for key, value in metrics.items() if value is not None and "stderr" not in key]
        print(f"{said}: {task}: {', '.join(values)}")
    if results["truncated"] or results["shortened"]:
        print(
            f"{said}: {results['truncated']} contexts cut to {results['length']} tokens, "
            f"{results['shortened']} answers limited to {results['length'] // 2}"
        )


if __name__ == "__main__":
    main()
