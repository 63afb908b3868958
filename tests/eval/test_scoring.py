"""eval/scoring.py against one prompt and one continuation at a time, without a cache."""

import numpy as np
import pytest
import torch

from eval import scoring
from eval.scoring import Job
from model.config import DecoderConfig
from model.decoder import Decoder

V = 50
KINDS = {
    "baseline": {"layers": "b"},
    "differential": {"layers": "bdv"},
    "introspective": {"layers": "i"},
    "learned": {"layers": "b", "position": "learned"},
    "window": {"layers": "d", "window": 4},
    "documents": {"layers": "b", "document_mask": True, "eot": 7},
}


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> Decoder:
    shape = {"n_layer": 3, "n_head": 4, "d_model": 32, "context": 40, "vocab_size": V}
    made = Decoder(DecoderConfig(**shape, **KINDS[request.param]), seed=3).eval()
    for p in made.parameters():
        p.data.mul_(3)  # larger weights, so that what is attended to matters
    return made


RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, V, length) for length in (9, 20, 14, 3, 1)]


@torch.no_grad()
def alone(model: Decoder, prompt: np.ndarray, continuation: np.ndarray) -> float:
    tokens = torch.from_numpy(np.concatenate((prompt, continuation)))
    log_probabilities = model(tokens[None])[0].double().log_softmax(-1)
    steps = range(len(prompt) - 1, len(tokens) - 1)
    return sum(float(log_probabilities[t, tokens[t + 1]]) for t in steps)


@pytest.mark.parametrize("batch", (1, 2, 3, 8))
def test_log_probabilities_are_those_of_each_text_alone_and_hits_what_generate_gives(model: Decoder, batch: int) -> None:
    rng = np.random.default_rng(1)
    continuations = [[rng.integers(0, V, n) for n in rng.integers(1, 6, 1 + i % 3)] for i in range(len(PROMPTS))]
    _, logprobs = scoring.score(model, PROMPTS, continuations, batch)
    for prompt, rows, values in zip(PROMPTS, continuations, logprobs, strict=True):
        # float32 sums of at most 5 terms of size 10: rounding stays below 1e-4
        assert values == pytest.approx([alone(model, prompt, row) for row in rows], abs=1e-4)
    decoded = [model.generate(torch.from_numpy(p)[None], 4)[0, len(p) :].numpy() for p in PROMPTS]
    wrong = [[np.concatenate((row[:k], (row[k : k + 1] + 1) % V, row[k + 1 :])) for k in range(4)] for row in decoded]
    hits, _ = scoring.score(model, PROMPTS, [[row, *rows] for row, rows in zip(decoded, wrong, strict=True)], batch)
    assert all(row.tolist() == [True, False, False, False, False] for row in hits)


def jobs() -> list[Job]:
    rng = np.random.default_rng(0)

    def draw(*lengths: int) -> list[np.ndarray]:
        return [rng.integers(1, V, n) for n in lengths]

    labels = draw(1, 3, 2)
    a, b, c, d = (np.array([7, *row]) for row in draw(9, 5, 9, 4))
    return [Job(a, draw(2, 4, 2), labels), Job(b, draw(3), labels), Job(c, draw(2, 0), draw(1, 1)), Job(d, draw(1, 1), labels)]


@pytest.mark.parametrize("batch", (1, 32))
def test_questions_after_a_prefix_score_as_whole_texts_do(model: Decoder, batch: int) -> None:
    finished: list[int] = []
    hits, logprobs = scoring.score_jobs(model, jobs(), batch, done=finished.append)
    for job, hit, logprob in zip(jobs(), hits, logprobs, strict=True):
        prompts = [np.concatenate((job.prefix, question)) for question in job.questions]
        plain = np.array([[alone(model, prompt, label) for label in job.continuations] for prompt in prompts])
        assert hit.shape == logprob.shape == plain.shape and logprob == pytest.approx(plain, abs=1e-4)
    assert sum(finished) == 4


def test_a_prefix_is_read_once_and_no_logits_of_it_are_computed() -> None:
    model = Decoder(DecoderConfig(n_layer=1, n_head=2, d_model=16, context=40, vocab_size=V)).eval()
    read, scored = [], []
    model.embedding.register_forward_hook(lambda module, given, out: read.append(tuple(out.shape[:2])))
    model.head.register_forward_hook(lambda module, given, out: scored.append(out.numel() // V))
    rows = [np.array([4, 5, 6]), np.array([7])]
    scoring.score_jobs(model, [Job(np.zeros(12, dtype=int), [np.array([1, 2])] * 3, rows)], batch=32)
    # The prefix but its last token, three questions from there but their last, then each continuation.
    assert read == [(1, 11), (3, 2), (3, 3), (3, 1)] and scored == [0, 0, 3 * 3, 3 * 1]
