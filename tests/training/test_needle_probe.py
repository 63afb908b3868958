"""Needle questions during training: known readers."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from data.config import TokenizerConfig
from data.loader import Windows
from data.retrieval import cities
from data.shards import TextTokens
from data.tokenizer import build_tokenizer
from training.monitor import NeedleProbe

TOKENIZER = build_tokenizer(TokenizerConfig("bytes"))
TEXT = "It was a long road. Nobody knew where it began.\nThe rain had stopped. " * 40


class Reader(nn.Module):
    """Copies what followed the longest text that stood before; a share of the questions it answers wrongly."""

    def __init__(self, vocabulary: int, wrong: int = 0) -> None:
        super().__init__()
        self.embedding, self.vocabulary, self.wrong = nn.Embedding(1, 1), vocabulary, wrong
        self.cfg = SimpleNamespace(document_mask=False)

    def forward(self, tokens: Tensor, rows: Tensor) -> Tensor:
        logits = torch.zeros(len(tokens), len(rows), self.vocabulary)
        for b, sequence in enumerate(tokens.tolist()):
            for r, t in enumerate(rows.tolist()):
                text = sequence[t - 20 : t + 1]
                starts = [i for i in range(t - 20) if sequence[i : i + 21] == text]
                logits[b, r, sequence[starts[0] + 21] if starts and b >= self.wrong else 0] = 1
        return logits


def test_known_readers() -> None:
    windows = Windows([TextTokens(np.array(TOKENIZER.encode(TEXT)))], 160)
    probe = NeedleProbe(Reader(TOKENIZER.vocab_size), windows, TOKENIZER, 16, 4)
    assert probe.read() == 1.0 and probe.rows.shape == (16, 161)
    probe.model.wrong = 4
    assert probe.read() == 0.75 and probe.model.training
    held_out = set(cities("eval"))
    for row in probe.rows:
        named = TOKENIZER.decode(row.tolist()).split("The magic number of ")[1:]
        assert len(named) == 2 and named[0].split(".")[0] == named[1].split(".")[0] and named[0].split()[0] in held_out
    again = NeedleProbe(Reader(TOKENIZER.vocab_size), windows, TOKENIZER, 16, 4)
    assert torch.equal(again.rows, probe.rows)


def test_a_document_mask_hides_no_needle() -> None:
    windows = Windows([TextTokens(np.array([TOKENIZER.eot, *TOKENIZER.encode(TEXT[:30])] * 40))], 160)
    reader = Reader(TOKENIZER.vocab_size)
    ends = {}
    for reader.cfg.document_mask in (False, True):
        ends[reader.cfg.document_mask] = NeedleProbe(reader, windows, TOKENIZER, 16, 4).rows.eq(TOKENIZER.eot).sum(1)
    assert (ends[False] > 1).all() and (ends[True] == 1).all()
    with pytest.raises(ValueError, match="needle_every=0"):  # no question fits
        NeedleProbe(reader, Windows([TextTokens(np.array(TOKENIZER.encode(TEXT)))], 60), TOKENIZER, 4, 4)
