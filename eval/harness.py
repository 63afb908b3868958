"""Tasks of EleutherAI's lm-evaluation-harness, or of your task files, on any run.

    python -m eval.harness run=runs/NAME tasks=[lambada_openai,hellaswag] [include_path=DIR] [num_fewshot=0] [limit=100]
    python -m eval.harness run=runs/NAME tasks=[questions] file=questions.jsonl

Needs lm-eval (`pip install 'lm-eval[hf]'`), whose `HFLM` gets the decoder in the model class of an export to=remote. Every
context starts with the end-of-text token, as every training document does; of a text scored in windows the first window does.
Writes eval/harness.json into the run's folder or out=; with name= or file=, harness_NAME.json, harness_STEM.json.
"""

import hashlib
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from omegaconf import MISSING

from configs import command
from data.tokenizer_export import export_tokenizer
from eval import common
from eval.common import EvalConfig
from model.interop.huggingface import export
from training.checkpoint import LoadedRun

try:
    from lm_eval.models.huggingface import HFLM
except ModuleNotFoundError:  # an optional package: `main` says what to install
    HFLM = object

TASKS = Path(__file__).parent / "tasks"
BOOTSTRAP = 1000  # resamples for standard errors of metrics that are not means, e.g. a corpus perplexity


@dataclass
class HarnessConfig(EvalConfig):
    """tasks: names of lm-eval's tasks, of eval/tasks or of include_path. limit: documents per task, by default all."""

    tasks: list[str] = MISSING
    include_path: str | None = None  # folder with more task files
    file: str | None = None  # what the task `questions` reads: JSON lines with query, endings and label
    name: str | None = None  # name of the result, in place of the file's name
    num_fewshot: Annotated[int | None, "[0, inf)"] = None  # examples in the prompt; None: the task's number
    limit: Annotated[int | None, "[1, inf)"] = None
    length: Annotated[int | None, "[2, inf)"] = None  # tokens of context and continuation; None: the trained context


class RunLM(HFLM):
    """A run as lm-eval's HFLM: its decoder in the model class of the export to=remote, and its exported tokenizer."""

    def __init__(self, run: LoadedRun, batch: int = 32, length: int | None = None) -> None:
        from transformers import AutoTokenizer

        from model.interop.modeling import VariantConfig, VariantForCausalLM

        context = run.model.cfg.context
        if (length or 0) > context and run.model.positions is not None:
            raise ValueError(f"length={length} exceeds the {context} learned positions: use length={context} or less")
        model = VariantForCausalLM(VariantConfig(**export(run.model, "remote", run.tokenizer.eot).config))
        model.decoder = run.model
        with tempfile.TemporaryDirectory() as folder:
            export_tokenizer(run.tokenizer, folder, 2**30)  # lm-eval cuts texts itself
            tokenizer = AutoTokenizer.from_pretrained(folder, add_bos_token=True)
        options = {"backend": "causal", "max_length": length or context, "batch_size": batch, "add_bos_token": True}
        super().__init__(model, tokenizer=tokenizer, **options)

    @property
    def max_gen_toks(self) -> int:
        """New tokens of a task that does not say how many: lm-eval's 256, or half of a short context."""
        return min(256, self.max_length // 2)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """The log-probability of whole texts. lm-eval itself puts the end-of-text token before a text's first window."""
        self.add_bos_token = False
        try:
            return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
        finally:
            self.add_bos_token = True

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """As lm-eval, which scores the tokens after the context's; if the continuation adds none, the last token of both."""
        read, scored = super()._encode_pair(context, continuation)
        if scored:
            return read, scored
        *read, last = self.tok_encode(context + continuation)
        return read, [last]

    def _loglikelihood_tokens(self, requests: list[Any], **options: Any) -> list[tuple[float, bool]]:
        longest = max((len(continuation) for _, _, continuation in requests), default=0)
        if longest > self.max_length:
            wrong = f"a continuation of {longest} tokens exceeds length={self.max_length}"
            raise ValueError(f"{wrong}: leave its task out, or use length={longest} (rotary positions)")
        answers = super()._loglikelihood_tokens(requests, **options)
        common.check_finite(torch.tensor([logprob for logprob, _ in answers]))
        return answers

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """The greedy continuation of each context. With learned positions one at a time: padding would shift them."""
        for request in requests:
            if not 0 < (new := self._new_tokens(request.args[1])) < self.max_length:
                wrong = f"a task asks for {new} new tokens (max_gen_toks), but length={self.max_length}"
                raise ValueError(f"{wrong}: use a number from 1 to {self.max_length - 1}, or leave the task out")
        if self.model.decoder.positions is not None:
            self.batch_size_per_gpu = 1
        return super().generate_until(requests, disable_tqdm=disable_tqdm)

    def is_cut(self, context: str, rest: str | dict[str, Any] | None = None) -> bool:
        """Whether the model reads only the end of a request's context; rest: the continuation, or decoding's settings."""
        if isinstance(rest, dict):
            return len(self.tok_encode(context)) + self._new_tokens(rest) > self.max_length
        return rest is not None and len(self.tok_encode(context + rest)) > self.max_length + 1

    def _new_tokens(self, settings: dict[str, Any]) -> int:
        from lm_eval.models.utils import normalize_gen_kwargs

        return normalize_gen_kwargs(settings, self.max_gen_toks)["max_gen_toks"]


def task_manager(cfg: HarnessConfig) -> Any:
    """The index of tasks. lm-eval's whole index, which takes seconds to read, is read only if a task is not in our folders."""
    from lm_eval.tasks import TaskManager

    if cfg.include_path is not None and not Path(cfg.include_path).is_dir():
        raise ValueError(f"include_path={cfg.include_path} is not a folder: give a folder with task YAML files")
    folders = [str(TASKS), *([cfg.include_path] if cfg.include_path else [])]
    for defaults in (False, True):
        manager = TaskManager(include_path=folders, include_defaults=defaults, metadata={"file": cfg.file})
        if not (unknown := sorted(set(cfg.tasks) - set(manager.all_tasks))):
            return manager
    known = "`lm-eval ls tasks` lists the tasks; your YAML files need include_path=DIR"
    raise ValueError(f"there is no task {', '.join(unknown)}: {known}")


def evaluate(lm: RunLM, cfg: HarnessConfig) -> dict[str, Any]:
    """lm-eval's metrics of each task with their standard errors; cut contexts and a digest of the requests per task."""
    import lm_eval

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # lm-eval logs every step
    options = {"num_fewshot": cfg.num_fewshot, "limit": cfg.limit, "bootstrap_iters": BOOTSTRAP}
    measured = lm_eval.simple_evaluate(lm, tasks=list(cfg.tasks), task_manager=task_manager(cfg), **options)
    tasks: dict[str, dict[str, Any]] = {}
    for name, metrics in measured["results"].items():  # "acc,none" -> acc; other filters than `none` stay in the name
        named = {key.removesuffix(",none"): value for key, value in metrics.items() if "," in key}
        tasks[name] = {key: value if isinstance(value, (int, float)) else None for key, value in named.items()}  # "N/A": None
    for name, counts in measured["n-samples"].items():  # a group of tasks has no counts
        tasks.setdefault(name, {}).update(samples=counts["effective"], num_fewshot=measured["n-shot"].get(name))
    per_task = {}
    for name, samples in measured["samples"].items():
        requests = [args for one in samples if one["filter"] == samples[0]["filter"] for args in one["arguments"]]
        digest = hashlib.sha256("".join(map(repr, requests)).encode())
        per_task[name] = {"truncated": sum(lm.is_cut(*args) for args in requests), "sha256": digest.hexdigest()}
    truncated = sum(part["truncated"] for part in per_task.values())
    about = {"length": lm.max_length, "truncated": truncated, "per_task": per_task, "lm_eval": lm_eval.__version__}
    return {"tasks": tasks} | about


def lines(results: dict[str, Any]) -> list[str]:
    """What is printed."""
    printed = []
    for task, metrics in results["tasks"].items():
        shown = {key: value for key, value in metrics.items() if value is not None and "stderr" not in key}
        values = [f"{key} {value if isinstance(value, int) else f'{value:.4g}'}" for key, value in shown.items()]
        printed.append(f"{task}: {', '.join(values)}")
    cut = f"{results['truncated']} contexts cut to {results['length']} tokens"
    return [*printed, cut] if results["truncated"] else printed


@command("harness", HarnessConfig)
def main(cfg: HarnessConfig) -> None:
    if HFLM is object:
        raise ValueError("harness needs the package 'lm-eval': pip install 'lm-eval[hf]'")
    if not cfg.tasks:
        raise ValueError("tasks is empty: give tasks=[NAME,...]; `lm-eval ls tasks` lists the names")
    if cfg.file is not None and not Path(cfg.file).is_file():
        raise FileNotFoundError(f"there is no file {cfg.file}: correct file=")
    run = common.open_run(cfg)
    name, about = common.claim_result("harness", cfg, [Path(cfg.file).read_bytes()] if cfg.file else [])
    results = evaluate(RunLM(run, cfg.batch, cfg.length), cfg) | about
    common.write_result(run, cfg, name, results, lines(results))


if __name__ == "__main__":
    main()
