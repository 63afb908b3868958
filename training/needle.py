"""Has retrieval appeared yet? A few needle questions, always the same ones, asked now and then while a model trains.

The needles have the wording of the retrieval documents that training mixes in, but cities and numbers of the evaluation
split; they are hidden in text of the validation split. This changes nothing in training: no gradient, no random number of
its generators.
"""

import numpy as np
import torch

from data.loader import Windows
from data.retrieval import Facts, as_one_document, hide, sentence_ends
from data.tokenizer import Tokenizer
from model.decoder import Decoder
from training.monitor import evenly


class NeedleProbe:
    """`read()` asks `model` one question in each of `samples` contexts, which are as long as the training context.

    ValueError where a context has no room for a needle and its question.
    """

    def __init__(self, model: Decoder, windows: Windows, tokenizer: Tokenizer, samples: int, digits: int) -> None:
        if not isinstance(windows, Windows):
            raise ValueError("a needle check hides needles in text, and these data have no text: use needle_every=0")
        self.model, device = model, model.embedding.weight.device
        rng, length = np.random.default_rng(0), windows.length
        source = Facts(tokenizer, "eval", digits)
        facts = [source.draw(rng, 1)[0] for _ in range(samples)]
        rows, chosen = [], evenly(len(windows), min(samples, len(windows)))
        for i, fact in enumerate(facts):
            room = length - 2 * len(fact.tokens)
            if room < 0:
                raise ValueError(f"a context of {length} tokens has no room for a needle: use needle_every=0")
            text = windows.window(chosen[i % len(chosen)])[:room]
            text = as_one_document(text, tokenizer) if model.cfg.document_mask else text
            context, _ = hide(text, [fact], rng.random(1).tolist(), sentence_ends(tokenizer))
            rows.append([tokenizer.eot, *context, *fact.tokens])
        self.rows = torch.tensor(rows, device=device)  # (samples, T + 1): each row ends with its answer
        lengths = torch.tensor([len(fact.value) for fact in facts], device=device)
        self.longest = int(lengths.max())
        self.asked = torch.arange(self.longest, device=device) >= self.longest - lengths[:, None]  # (samples, longest)

    @torch.no_grad()
    def read(self) -> float:
        """The share of questions for which greedy decoding gives exactly the answer (number and full stop)."""
        training = self.model.training
        self.model.eval()
        try:
            last = torch.arange(self.rows.shape[1] - 1 - self.longest, self.rows.shape[1] - 1, device=self.rows.device)
            with torch.autocast(self.rows.device.type, enabled=False):
                predicted = self.model(self.rows[:, :-1], rows=last).argmax(-1)  # (samples, longest)
        finally:
            self.model.train(training)
        right = (predicted == self.rows[:, -self.longest :]) | ~self.asked
        return right.all(-1).float().mean().item()
