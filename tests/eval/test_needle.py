"""eval/needle.py against models that always, never and by chance find the needle."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from eval import needle
from model.config import DecoderConfig
from model.decoder import Decoder

HAY = "Once there was a king. He lived in a small house. His dog was old, and it slept all day.\n" * 30


class Copier(nn.Module):
    """Predicts what followed the last 12 tokens when last seen; `sign` -1 makes it the least probable, 0 all alike."""

    head = staticmethod(lambda logits: logits)  # its hidden states are the logits

    def __init__(self, vocab_size: int, context: int, sign: float = 1.0) -> None:
        super().__init__()
        self.cfg = SimpleNamespace(vocab_size=vocab_size, context=context, n_layer=1, d_model=1, d_ff=1)
        self.sign = sign

    def forward(self, tokens, rows=None, cache=None, keys=None):
        """As Decoder's: `rows` count the cached tokens, too."""
        start = cache.length if cache else 0
        logits = self.predict(cache.seen(tokens) if cache else tokens)  # (B, S, V)
        if cache:
            cache.length += tokens.shape[1]
        if rows is None:
            return logits[:, start:]
        rows = rows.expand(len(tokens), -1)
        return logits.gather(1, rows[..., None].expand(-1, -1, self.cfg.vocab_size))

    hidden = forward

    def predict(self, tokens):
        logits = torch.zeros(*tokens.shape, self.cfg.vocab_size)
        for b, row in enumerate(tokens.tolist()):
            followed: dict[tuple[int, ...], int] = {}
            for t in range(12, len(row)):
                seen = tuple(row[t - 11 : t + 1])
                if seen in followed:
                    logits[b, t, followed[seen]] = 20 * self.sign
                followed[tuple(row[t - 12 : t])] = row[t]
        return logits


def stand_in(model: nn.Module, tokenizer) -> tuple[SimpleNamespace, np.ndarray]:
    """A run of the model, and the tokens of HAY."""
    run = SimpleNamespace(model=model, tokenizer=tokenizer, config={"data": {"retrieval": {"digits": 4}}})
    return run, np.array(tokenizer.encode(HAY))


@pytest.mark.parametrize("sign", [1, -1])
def test_a_copier_finds_every_needle_and_its_opposite_none(tokenizer, sign):
    cfg = needle.NeedleConfig(samples=3, pairs=[[1, 1], [3, 2]], lengths=[320], depths=[0.0, 0.3, 1.0])
    results = needle.evaluate(*stand_in(Copier(tokenizer.vocab_size, 320, sign), tokenizer), cfg)
    assert (results["accuracy"], results["se"], results["rank_accuracy"]) == (float(sign > 0), 0.0, float(sign > 0))
    assert [pair["rank_accuracy"] for pair in results["pairs"]] == [None, float(sign > 0)]
    shapes = [tuple(cell[key] for key in ("length", "depth", "needles", "asked", "samples")) for cell in results["cells"]]
    assert shapes == [(320, depth, *pair, 3) for pair in cfg.pairs for depth in cfg.depths]
    assert all((-0.01 < cell["answer_logprob"] <= 0) == (sign > 0) for cell in results["cells"])


def test_a_uniform_model_gives_the_probability_of_chance_and_default_lengths_leave_out_what_needles_do_not_fit(tokenizer):
    cfg = needle.NeedleConfig(samples=2, pairs=[[2, 1]], lengths=[200], depths=[0.5])
    run, hay = stand_in(Copier(tokenizer.vocab_size, 200, sign=0), tokenizer)
    (cell,) = needle.evaluate(run, hay, cfg)["cells"]
    assert cell["answer_logprob"] == pytest.approx(-5 * math.log(tokenizer.vocab_size), rel=1e-6)  # "4817."
    assert cell["rank_accuracy"] == 0.0  # a tie is not knowing
    # 64 bytes do not hold two sentences; 75 hold the first context, but not the sentences about the longest city
    for context, lengths in ((256, [128, 256]), (300, [150, 300])):
        run.model.cfg.context = context
        assert needle.default_lengths(run, hay, needle.NeedleConfig()) == lengths


def test_cells_do_not_depend_on_the_other_cells(tokenizer):
    run, hay = stand_in(Decoder(DecoderConfig(n_layer=1, n_head=2, d_model=16, context=200, vocab_size=257)), tokenizer)
    few = needle.NeedleConfig(samples=2, lengths=[200], depths=[0.5])
    many = needle.NeedleConfig(samples=2, lengths=[150, 200], depths=[0.0, 0.5], pairs=[[2, 1], [1, 1]])
    (cell,) = needle.evaluate(run, hay, few)["cells"]
    assert cell in needle.evaluate(run, hay, many)["cells"]
