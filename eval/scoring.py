"""Many prompts at once: log-probabilities of given continuations, and greedy ones.

A batch's prompts are read together into a KV cache up to where the shortest ends, so no padding is needed and prompts of
several lengths share a batch; all continuations of a prompt start from that one reading. The output head sees only the
positions that are asked about: a long context does not cost its length times the vocabulary.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn

from eval.common import batches, device_of, pad_right
from model.cache import KVCache
from model.config import DecoderConfig


@torch.inference_mode()
def score(
    model: nn.Module, prompts: Sequence[np.ndarray], continuations: Sequence[Sequence[np.ndarray]], batch: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """For each prompt (P,) and each of its continuations (A,), token ids of any lengths above 0:

    whether greedy decoding of the prompt gives it, (n,) bool per prompt, and its log-probability in nats, (n,) per prompt.
    Greedy decoding gives a continuation exactly if, fed with it, every next token is the most probable one.
    """
    hits = [np.zeros(len(rows), dtype=bool) for rows in continuations]
    logprobs = [np.zeros(len(rows)) for rows in continuations]
    longest = max(len(row) for rows in continuations for row in rows)
    for part in _by_length(model, prompts, longest, batch):
        cache, read = _read(model, [prompts[i] for i in part], longest)
        for j in range(max(len(continuations[i]) for i in part)):
            wanted = [continuations[i][min(j, len(continuations[i]) - 1)] for i in part]
            scored = _score(model, cache, read, [prompts[i] for i in part], wanted)
            for i, hit, logprob in zip(part, *scored, strict=True):
                if j < len(continuations[i]):
                    hits[i][j], logprobs[i][j] = hit, logprob
    return hits, logprobs


def _score(
    model: nn.Module, cache: KVCache, read: int, prompts: list[np.ndarray], wanted: list[np.ndarray]
) -> tuple[list[bool], list[float]]:
    _rewind(cache, read)
    rest = [np.concatenate((prompt[read:], row[:-1])) for prompt, row in zip(prompts, wanted, strict=True)]
    tokens = pad_right(rest, device_of(model))  # (B, M)
    answers = pad_right(wanted, tokens.device)  # (B, A)
    lengths = torch.tensor([len(row) for row in wanted], device=tokens.device)
    starts = torch.tensor([len(prompt) - 1 for prompt in prompts], device=tokens.device)
    steps = torch.arange(answers.shape[1], device=tokens.device)
    rows = (starts[:, None] + steps).clamp(max=read + tokens.shape[1] - 1)  # (B, A)
    predicted = model(tokens, rows=rows, cache=cache).float().log_softmax(-1)  # (B, A, V)
    asked = steps < lengths[:, None]  # (B, A)
    hits = ((predicted.argmax(-1) == answers) | ~asked).all(-1)
    logprobs = predicted.gather(-1, answers[..., None])[..., 0].double().masked_fill(~asked, 0.0).sum(-1)
    return hits.tolist(), logprobs.tolist()


@torch.inference_mode()
def continue_greedily(model: nn.Module, prompts: Sequence[np.ndarray], new_tokens: int, batch: int) -> list[np.ndarray]:
    """The `new_tokens` (1 or more) most probable next tokens, one after the other, of each prompt: (new_tokens,) each."""
    out: list[np.ndarray] = [np.empty(0)] * len(prompts)
    for part in _by_length(model, prompts, new_tokens, batch):
        rows = [prompts[i] for i in part]
        cache, read = _read(model, rows, new_tokens)
        tokens = torch.nn.functional.pad(pad_right(rows, device_of(model)), (0, new_tokens))  # (B, S)
        lengths = torch.tensor([len(row) for row in rows], device=tokens.device)
        for t in range(read, tokens.shape[1] - 1):
            logits = model(tokens[:, t : t + 1], cache=cache)[:, -1]  # (B, V)
            given = tokens[:, t + 1]
            tokens[:, t + 1] = torch.where(t + 1 < lengths, given, logits.argmax(-1))
        for i, row, length in zip(part, tokens.cpu().numpy(), lengths.tolist(), strict=True):
            out[i] = row[length : length + new_tokens]
    return out


def _by_length(model: nn.Module, prompts: Sequence[np.ndarray], new_tokens: int, batch: int) -> Iterator[Sequence[int]]:
    """The prompts' numbers in batches of similar lengths that fit in memory."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    longest = max(map(len, prompts)) + new_tokens
    return batches(order, batch, 1, max(longest * floats_per_token(model.cfg), new_tokens * model.cfg.vocab_size))


def _read(model: nn.Module, prompts: list[np.ndarray], new_tokens: int) -> tuple[KVCache, int]:
    """A cache of the tokens that all prompts have, but for the shortest one's last, and how many those are."""
    read, longest = min(map(len, prompts)) - 1, max(map(len, prompts))
    cache = KVCache(longest + new_tokens)
    if read:
        tokens = torch.from_numpy(np.stack([prompt[:read] for prompt in prompts])).to(device_of(model))
        model(tokens, rows=torch.zeros(0, dtype=torch.long), cache=cache)
    return cache, read


def _rewind(cache: KVCache, length: int) -> None:
    """Forget all but the first `length` tokens."""
    cache.length = length
    if cache.tokens is not None:
        cache.tokens = cache.tokens[:, :length]


def floats_per_token(cfg: DecoderConfig) -> int:
    """Roughly what a forward pass without logits holds per token: a block's activations, keys and values of all layers."""
    return (8 + 2 * cfg.n_layer) * cfg.d_model + 3 * cfg.d_ff
