"""The scorer of all evaluations: log-probabilities of given continuations for many prompts at once.

Tokens that several texts begin with are read once. A batch's prompts are read together into a KV cache up to where the
shortest one ends, so prompts of several lengths share a batch without padding before them, and any position encoding is
exact. All questions after one prefix start from the cache of that prefix, and all continuations of a question start from
the cache of that question. The output head computes logits only at the positions that are wanted, not at all of a long context.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from eval.common import batches, check_finite, device_of, logits_in_parts, pad_right
from model.cache import KVCache
from model.config import DecoderConfig

NOTHING = np.zeros(0, dtype=np.int64)
Scores = tuple[list[np.ndarray], list[np.ndarray]]  # for each prompt or job: hits (bool) and log-probabilities (nats)


@dataclass(frozen=True)
class Job:
    """Questions (perhaps empty) after a prefix of at least one token, and continuations to score after each; token ids (n,)."""

    prefix: np.ndarray
    questions: Sequence[np.ndarray]
    continuations: Sequence[np.ndarray]


def score(model: nn.Module, prompts: Sequence[np.ndarray], continuations: Sequence[Sequence[np.ndarray]], batch: int) -> Scores:
    """Of the n continuations (A,) of each prompt (P,), P >= 1, as token ids: whether greedy decoding gives them, and their
    log-probabilities, (n,) each.
    """
    jobs = [Job(prompt, [NOTHING], rows) for prompt, rows in zip(prompts, continuations, strict=True)]
    hits, logprobs = score_jobs(model, jobs, batch)
    return [table[0] for table in hits], [table[0] for table in logprobs]


@torch.inference_mode()
def score_jobs(model: nn.Module, jobs: Sequence[Job], batch: int, done: Callable[[int], object] | None = None) -> Scores:
    """As `score`, for prompts that share prefixes: (questions, continuations) hits and log-probabilities of each job.

    `batch` prefixes are read at a time, fewer where they would not fit in memory. `done` gets each batch's number of jobs.
    """
    hits = [np.zeros((len(job.questions), len(job.continuations)), dtype=bool) for job in jobs]
    logprobs = [np.zeros(table.shape) for table in hits]
    answer = max((len(row) for job in jobs for row in job.continuations), default=0)
    question = max((len(row) for job in jobs for row in job.questions), default=0)
    # Prefixes with several questions share a batch only if they are equally long. Otherwise each question of a longer
    # prefix would read the rest of that prefix again.
    kinds = [(len(job.continuations), len(job.prefix) if len(job.questions) > 1 else 0) for job in jobs]
    longest = max((len(job.prefix) for job in jobs), default=1) + question + answer
    floats = max(longest * floats_per_token(model.cfg), (question + answer) * model.cfg.vocab_size)
    order = sorted(range(len(jobs)), key=lambda i: (kinds[i], len(jobs[i].prefix)))
    for part in (part for _, alike in groupby(order, key=kinds.__getitem__) for part in batches(list(alike), batch, floats)):
        texts = [jobs[i].prefix for i in part]
        count = kinds[part[0]][0]  # continuations of each question
        start = Reading(model, KVCache(max(map(len, texts)) + question + answer), 0, texts)
        for pairs, reading in _branches(start, [jobs[i].questions for i in part], answer, batch):
            for j in range(count):
                rows = reading.score([jobs[part[row]].continuations[j] for row, _ in pairs])
                for (row, q), hit, logprob in zip(pairs, *rows, strict=True):
                    hits[part[row]][q, j], logprobs[part[row]][q, j] = hit, logprob
        if done:
            done(len(part))
    return hits, logprobs


def _branches(
    start: "Reading", questions: list[Sequence[np.ndarray]], answer: int, batch: int
) -> Iterator[tuple[list[tuple[int, int]], "Reading"]]:
    """Parts that fit in memory: a list of (row, question's number), and the reading of these questions after their prefixes.

    If rows have several questions, the questions of a part are equally long. Otherwise one part has all rows.
    """
    pairs = [(row, q) for row, several in enumerate(questions) for q in range(len(several))]
    if len(pairs) == len(questions):
        yield pairs, start.branch([row for row, _ in pairs], [questions[row][q] for row, q in pairs], answer)
        return
    cfg, prefix = start.model.cfg, start.read + max(map(len, start.rest))
    by_length = sorted((len(questions[row][q]), row, q) for row, q in pairs)
    for long, alike in groupby(by_length, key=itemgetter(0)):
        floats = max((prefix + long + answer) * floats_per_token(cfg), answer * cfg.vocab_size)
        for part in batches([(row, q) for _, row, q in alike], max(1, batch * cfg.context // (prefix + long)), floats):
            yield part, start.branch([row for row, _ in part], [questions[row][q] for row, q in part], answer)


class Reading:
    """Several texts that a model has read in part: the cache has the first `read` tokens of every text.

    `rest`: the other tokens of each text, at least one, because the last token is read together with a continuation.
    """

    def __init__(self, model: nn.Module, cache: KVCache, read: int, rest: list[np.ndarray]) -> None:
        self.model, self.cache, self.read, self.rest = model, cache, read, rest
        ahead = min(map(len, rest)) - 1
        if ahead:
            self.cache.length = self.read  # what later texts added is forgotten
            tokens = torch.from_numpy(np.stack([row[:ahead] for row in rest])).to(device_of(model))
            model(tokens, rows=torch.zeros(0, dtype=torch.long), cache=cache)
            self.read, self.rest = read + ahead, [row[ahead:] for row in rest]

    def branch(self, rows: list[int], more: list[np.ndarray], room: int) -> "Reading":
        """The reading of texts `rows` of this reading (one may occur several times), each followed by its tokens in `more`."""
        rest = [np.concatenate((self.rest[row], new)) for row, new in zip(rows, more, strict=True)]
        cache = self.cache
        if rows != list(range(len(self.rest))):  # else the cache is used as it is
            self.cache.length = self.read
            cache = _copied(cache, rows, self.read + max(map(len, rest)) + room)
        return Reading(self.model, cache, self.read, rest)

    def score(self, wanted: list[np.ndarray]) -> tuple[list[bool], list[float]]:
        """For each text: whether greedy decoding gives its continuation `wanted`, and that continuation's log-probability."""
        self.cache.length = self.read
        rest = [np.concatenate((text, row[:-1])) for text, row in zip(self.rest, wanted, strict=True)]
        tokens = pad_right(rest, device_of(self.model))  # (B, M)
        answers = pad_right(wanted, tokens.device)  # (B, A)
        lengths = torch.tensor([len(row) for row in wanted], device=tokens.device)
        starts = torch.tensor([self.read + len(text) - 1 for text in self.rest], device=tokens.device)
        steps = torch.arange(answers.shape[1], device=tokens.device)
        rows = (starts[:, None] + steps).clamp(max=self.read + tokens.shape[1] - 1)  # (B, A)
        hidden, hits, logprobs = self.model.hidden(tokens, rows=rows, cache=self.cache), [], []  # (B, A, D)
        for logits, token in logits_in_parts(self.model.head, hidden, answers, self.model.cfg.vocab_size):
            predicted = logits.log_softmax(-1)  # (n, V)
            hits.append(predicted.argmax(-1) == token)
            logprobs.append(predicted.gather(-1, token[:, None])[:, 0])
        hit, logprob = (torch.cat(parts).view(answers.shape) for parts in (hits, logprobs))
        real = steps < lengths[:, None]  # (B, A)
        check_finite(logprob[real])
        return (hit | ~real).all(-1).tolist(), logprob.double().masked_fill(~real, 0.0).sum(-1).tolist()


def _copied(cache: KVCache, rows: list[int], max_length: int) -> KVCache:
    """A copy of the sequences `rows` of `cache`, with room for `max_length` tokens."""
    copy = KVCache(max_length)
    copy.length = cache.length
    for slot, buffers in cache.slots.items():
        read = (buffer[rows, :, : cache.length] for buffer in buffers)  # (len(rows), H, S, d) each
        copy.slots[slot] = tuple(F.pad(part, (0, 0, 0, max_length - cache.length)) for part in read)
    return copy


def floats_per_token(cfg: DecoderConfig) -> int:
    """Rough number of floats per token in a forward pass without logits: a block's activations, all layers' keys and values."""
    return (8 + 2 * cfg.n_layer) * cfg.d_model + 3 * cfg.d_ff
