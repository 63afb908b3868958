"""What training measures, unchanged by it, beside its loss: loss on validation text and by kind of document, and needles."""

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from data.loader import UNSCORED, Mixture, Windows, inputs_and_targets
from data.retrieval import Facts, as_one_document, hide, sentence_ends
from data.tokenizer import Tokenizer
from model.decoder import Decoder
from training.distributed import World
from training.monitor import evenly

MOST_ROWS = 32  # of a process's micro batch whose loss is reported by kind
LOGITS_AT_ONCE = 2**26  # logits of one forward pass; more rows take several passes
KINDS = ("text", "retrieval")  # the sources of the mixture that data/stream.py makes, in its order


@torch.no_grad()
def validation_loss(model: Decoder, windows: Windows, tokens: int, batch: int, world: World) -> float:
    """Mean loss in nats over `tokens` of the validation set, in windows at even distances, shared out over the processes."""
    count = max(1, min(len(windows), tokens // windows.length))
    chosen = torch.linspace(0, len(windows) - 1, count, dtype=torch.float64).round().long().tolist()
    total = torch.zeros(2, dtype=torch.float64, device=world.device)  # summed loss, windows
    model.eval()
    mine = chosen[world.rank :: world.size]
    # Every process runs the same number of passes, because a pass of a split model needs all processes.
    for start in range(0, len(chosen[:: world.size]), batch):
        part = mine[start : start + batch]
        rows = np.stack([windows.window(i) for i in part or chosen[:1]])  # (b, T + 1)
        loss = model(*world.tensors(*inputs_and_targets(rows)))
        total += torch.tensor([loss.item() * len(part), len(part)], dtype=torch.float64, device=world.device)
    model.train()
    total = world.mean(total)
    return (total[0] / total[1]).item()


@torch.no_grad()
def losses_by_kind(
    model: Decoder, inputs: Tensor, targets: Tensor, source: Mixture, samples: range, world: World
) -> dict[str, float | None]:
    """loss_text and loss_retrieval in nats per token, each over the first rows (b, T), of `samples`, of that kind."""
    inputs, targets = inputs[:MOST_ROWS], targets[:MOST_ROWS]
    rows = max(1, LOGITS_AT_ONCE // (inputs.shape[1] * model.cfg.vocab_size))  # the same on every process
    parts = [  # (rows, T) each
        F.cross_entropy(model(x).float().transpose(1, 2), wanted, reduction="none").double()
        for x, wanted in zip(inputs.split(rows), targets.split(rows), strict=True)
    ]
    if isinstance(model, FSDPModule):
        model.reshard()  # else the root keeps its whole weights, and the next training step uses them without the update
    losses = torch.cat(parts)  # (b, T)
    scored = targets != UNSCORED
    kinds = torch.tensor([source.source_of(i) for i in samples[:MOST_ROWS]], device=inputs.device)
    sums = [torch.stack((losses[kinds == k].sum(), scored[kinds == k].sum().double())) for k in range(len(KINDS))]
    totals = world.mean(torch.stack(sums)).tolist()
    return {f"loss_{name}": loss / tokens if tokens else None for name, (loss, tokens) in zip(KINDS, totals, strict=True)}


class NeedleProbe:
    """`read()` asks `model` one question, always the same, in each of `samples` contexts as long as the training context."""

    def __init__(self, model: Decoder, windows: Windows, tokenizer: Tokenizer, samples: int, digits: int) -> None:
        if not isinstance(windows, Windows):
            raise ValueError("a needle check hides needles in text, and these data have no text: use needle_every=0")
        self.model, device = model, model.embedding.weight.device
        rng, source = np.random.default_rng(0), Facts(tokenizer, "eval", digits)
        facts = [source.draw(rng, 1)[0] for _ in range(samples)]
        rows, chosen = [], evenly(len(windows), min(samples, len(windows)))
        for i, fact in enumerate(facts):
            room = windows.length - 2 * len(fact.tokens)
            if room < 0:
                raise ValueError(f"a context of {windows.length} tokens has no room for a needle: use needle_every=0")
            text = windows.window(chosen[i % len(chosen)])[:room]
            text = as_one_document(text, tokenizer) if model.cfg.document_mask else text
            context, _ = hide(text, [fact], rng.random(1).tolist(), sentence_ends(tokenizer))
            rows.append([tokenizer.eot, *context, *fact.tokens])
        self.rows = torch.tensor(rows, device=device)  # (samples, T + 1): each row ends with its answer
        lengths = torch.tensor([len(fact.value) for fact in facts], device=device)
        self.longest = int(lengths.max())
        self.of_answer = torch.arange(self.longest, device=device) >= self.longest - lengths[:, None]  # (samples, longest)

    @torch.no_grad()
    def read(self) -> float:
        """The share of questions for which greedy decoding gives exactly the answer (number and full stop)."""
        self.model.eval()
        last = torch.arange(self.rows.shape[1] - 1 - self.longest, self.rows.shape[1] - 1, device=self.rows.device)
        with torch.autocast(self.rows.device.type, enabled=False):
            predicted = self.model(self.rows[:, :-1], rows=last).argmax(-1)  # (samples, longest)
        self.model.train()
        right = (predicted == self.rows[:, -self.longest :]) | ~self.of_answer
        return right.all(-1).float().mean().item()
