"""eval/needle.py against models that always, never and by chance find the needle."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from eval import needle
from eval.common import wilson
from model.config import DecoderConfig
from model.decoder import Decoder
from tests.conftest import assert_one_line_error, run_command

HAY = "Once there was a king. He lived in a small house. His dog was old, and it slept all day.\n" * 30


class Copier(nn.Module):
    """Predicts what followed when the last 12 tokens were last seen; `sign` -1 makes just that the least probable."""

    def __init__(self, vocab_size: int, context: int, sign: float = 1.0) -> None:
        super().__init__()
        self.cfg, self.sign = SimpleNamespace(vocab_size=vocab_size, context=context), sign

    def forward(self, tokens):
        logits = torch.zeros(*tokens.shape, self.cfg.vocab_size)
        for b, row in enumerate(tokens.tolist()):
            followed: dict[tuple[int, ...], int] = {}
            for t in range(12, len(row)):
                seen = tuple(row[t - 11 : t + 1])
                if seen in followed:
                    logits[b, t, followed[seen]] = 20 * self.sign
                followed[tuple(row[t - 12 : t])] = row[t]
        return logits


class Uniform(Copier):
    def forward(self, tokens):
        return torch.zeros(*tokens.shape, self.cfg.vocab_size)


def stand_in(model: nn.Module, tokenizer) -> SimpleNamespace:
    return SimpleNamespace(model=model, tokenizer=tokenizer, config={"data": {"retrieval": {"digits": 4}}})


@pytest.fixture
def hay(tokenizer) -> np.ndarray:
    return np.array(tokenizer.encode(HAY))


@pytest.mark.parametrize("pair", [[1, 1], [3, 2]])
def test_a_copier_finds_every_needle(tokenizer, hay, pair):
    cfg = needle.NeedleConfig(samples=3, pairs=[pair], lengths=[320], depths=[0.0, 0.3, 1.0])
    results = needle.evaluate(stand_in(Copier(tokenizer.vocab_size, 320), tokenizer), hay, cfg)
    assert results["accuracy"] == 1.0 and results["se"] == 0.0
    assert results["rank_accuracy"] == (1.0 if pair[0] > 1 else None)
    assert [(c["length"], c["depth"], c["needles"], c["asked"], c["samples"]) for c in results["cells"]] == [
        (320, depth, *pair, 3) for depth in cfg.depths
    ]
    assert all(-0.01 < cell["answer_logprob"] <= 0 for cell in results["cells"])


def test_its_opposite_finds_none(tokenizer, hay):
    cfg = needle.NeedleConfig(samples=3, pairs=[[1, 1], [3, 2]], lengths=[320], depths=[0.5])
    results = needle.evaluate(stand_in(Copier(tokenizer.vocab_size, 320, sign=-1), tokenizer), hay, cfg)
    assert results["accuracy"] == 0.0 and results["rank_accuracy"] == 0.0
    assert [pair["needles"] for pair in results["pairs"]] == [1, 3]


def test_a_uniform_model_gives_the_answer_the_probability_of_chance(tokenizer, hay):
    cfg = needle.NeedleConfig(samples=2, pairs=[[2, 1]], lengths=[200], depths=[0.5])
    (cell,) = needle.evaluate(stand_in(Uniform(tokenizer.vocab_size, 200), tokenizer), hay, cfg)["cells"]
    assert cell["answer_logprob"] == pytest.approx(-5 * math.log(tokenizer.vocab_size), rel=1e-6)  # "4817."
    assert cell["rank_accuracy"] == 0.0  # a tie is not knowing


def test_scoring_agrees_with_greedy_decoding():
    cfg = DecoderConfig(layers="bd", n_layer=2, n_head=4, d_model=32, context=40, vocab_size=50)
    model = Decoder(cfg, seed=3).eval()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 50, length) for length in (9, 20, 14)]
    decoded = [model.generate(torch.from_numpy(p)[None], 4)[0, len(p) :].numpy() for p in prompts]
    wrong = [np.concatenate((answer[:-1], (answer[-1:] + 1) % 50)) for answer in decoded]
    hits, right_logprobs = needle.score(model, prompts, decoded, batch=2)
    misses, _ = needle.score(model, prompts, wrong, batch=3)
    assert hits.all() and not misses.any()
    alone = [needle.score(model, [p], [a], batch=1)[1][0] for p, a in zip(prompts, decoded, strict=True)]
    assert right_logprobs == pytest.approx(alone, abs=1e-5)


def test_cells_do_not_depend_on_the_other_cells(tokenizer, hay):
    run = stand_in(Decoder(DecoderConfig(n_layer=1, n_head=2, d_model=16, context=200, vocab_size=257)), tokenizer)
    few = needle.NeedleConfig(samples=2, lengths=[200], depths=[0.5])
    many = needle.NeedleConfig(samples=2, lengths=[150, 200], depths=[0.0, 0.5], pairs=[[2, 1], [1, 1]])
    (cell,) = needle.evaluate(run, hay, few)["cells"]
    assert cell in needle.evaluate(run, hay, many)["cells"]


def test_default_lengths_leave_out_what_needles_do_not_fit(tokenizer, hay):
    run = stand_in(Uniform(tokenizer.vocab_size, 256), tokenizer)
    assert needle.default_lengths(run, hay, needle.NeedleConfig()) == [128, 256]  # 64 bytes do not hold two sentences


def test_wilson_interval():
    assert wilson(1.0, 50) == pytest.approx((0.92865, 1.0), abs=1e-4)  # Wilson 1927, equation in Newcombe 1998
    assert wilson(0.5, 100) == pytest.approx((0.40383, 0.59617), abs=1e-4)


def test_the_command_writes_json_and_figure(make_run, call, capsys):
    run = make_run("a", "i")
    call(needle, f"run={run}", "samples=2", "pairs=[[1,1],[2,1]]", "depths=[0,1]")
    content = json.loads((run / "eval" / "needle.json").read_text())
    assert content["config"]["pairs"] == [[1, 1], [2, 1]] and content["run_config"]["seed"] == 1
    assert len(content["results"]["cells"]) == 4  # only the full context holds two needles
    wanted = {"length", "depth", "needles", "asked", "samples", "accuracy", "se", "answer_logprob"}
    assert all(wanted <= cell.keys() for cell in content["results"]["cells"])
    assert capsys.readouterr().out.count("needle  a: N=") == 2
    assert (run / "figures" / "needle.png").stat().st_size > 10_000


def test_wrong_input_is_one_line(make_run, refused):
    run = make_run("a")
    assert "depths=[0,0.5,1]" in refused(needle, f"run={run}", "depths=[0,25]")
    assert "asked <= needles" in refused(needle, f"run={run}", "pairs=[[1,2]]")
    assert "pairs=[[1,1]]" in refused(needle, f"run={run}", "pairs=[]")
    assert "samples=50" in refused(needle, f"run={run}", "samples=0")
    assert "longer length" in refused(needle, f"run={run}", "lengths=[40]", "samples=1")
    assert "longer haystack" in refused(needle, f"run={run}", "lengths=[9000]", "samples=1")
    assert not (run / "eval").exists()


def test_a_misspelled_key_beside_lists_is_one_line() -> None:
    assert_one_line_error(run_command("-m", "eval.needle", "sample=3"), "did you mean 'samples'?")
