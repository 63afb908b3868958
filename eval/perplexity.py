"""Loss, perplexity, bits per byte and loss by position of a run, on validation shards or any text file.

    python -m eval.perplexity run=runs/NAME [text=FILE | shards=DIR] [name=NAME] [length=256] [tokens=1000000]
        [training_counts=false]

Windows of `length` tokens (default: the trained context) do not overlap, and lie at even distances if the data have more than
`tokens` tokens. `recall` splits the loss: a token is a `hit` if it completes a bigram that has occurred before in its window,
else `other`; a hit is rare or frequent in the run's training shards, if they still exist. docs/METHODS.md, section 7.1.
text= is a file, a folder or a 'glob' of .txt, .jsonl and .parquet files, plain or compressed; of 2 to 32 documents in it,
`by_document` has the loss of each.
Writes eval/perplexity.json and figures/perplexity.png into the run's folder or out=. Results on a given text= or shards= have
other files, perplexity_STEM: name= if given, else the name of the file or folder without suffixes.
"""

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from configs import command
from data.config import DataConfig
from data.loader import Windows
from data.shards import Shard, TextTokens, open_split
from data.stream import refuse_other_text
from eval import common
from eval.common import TextEvalConfig, figure, mean_se, plus_minus
from eval.recall import frequent_bigrams, ngram_codes, recall_hits
from training.checkpoint import LoadedRun

LARGEST = 709.0  # nats: beyond, exp(loss) is no float64
DOCUMENTS = 64  # the most whose losses are told apart
FREQUENT = 1250  # occurrences in training beyond which arXiv 2312.04927 counts a bigram as frequent


@dataclass
class PerplexityConfig(TextEvalConfig):
    """What to test on."""

    length: Annotated[int | None, "[2, inf)"] = None  # tokens per window; None: the trained context
    tokens: Annotated[int, "[1, inf)"] = 1_000_000  # largest number of tokens to test on
    training_counts: bool = True  # count bigrams in the training shards and split the hits into rare and frequent ones


def cut_windows(parts: Sequence[Shard], length: int, limit: int) -> np.ndarray:
    """(n, length + 1) token ids: windows side by side, none across two parts; at even distances if `limit` is exceeded."""
    longest = max(map(len, parts))
    if longest <= length:
        wrong = f"the text has {longest} tokens and a window needs {length + 1}: give more text"
        raise ValueError(wrong + (f", or length={longest - 1}" if longest > 1 else ""))
    if limit < length:
        raise ValueError(f"tokens={limit} is less than one window of {length}: use tokens={length} or more")
    windows = Windows(parts, length)
    chosen = np.linspace(0, len(windows) - 1, min(len(windows), limit // length)).round().astype(int)
    return np.stack([windows.window(int(index)) for index in chosen])


def claim_windows(evaluation: str, run: LoadedRun, cfg: TextEvalConfig) -> tuple[np.ndarray, str, dict, np.ndarray | None]:
    """Windows (n, T + 1) of the text to test on, as `cfg.length` and `cfg.tokens` say, and what `claim_result` gives.

    At the end the numbers (n, T + 1) of the documents that the tokens are from; None for shards.
    """
    parts, length = common.evaluation_tokens(run, cfg), cfg.length or run.model.cfg.context
    name, about = common.claim_result(evaluation, cfg, common.content_of(parts))
    documents = None
    if cfg.text:
        about["text_sha256"] = parts[0].sha256
        documents = cut_windows([TextTokens(parts[0].documents)], length, cfg.tokens)
    return cut_windows(parts, length, cfg.tokens), name, about, documents


def token_losses(model: nn.Module, windows: Tensor, vocab_size: int) -> Tensor:
    """(B, T) cross-entropy in nats of each next token, for windows (B, T + 1), without holding all logits at once.

    ValueError if one is not finite.
    """
    hidden = model.hidden(windows[:, :-1])  # (B, T, D)
    parts = common.logits_in_parts(model.head, hidden, windows[:, 1:], vocab_size)
    losses = [F.cross_entropy(logits, wanted, reduction="none") for logits, wanted in parts]
    per_token = torch.cat(losses).view(len(windows), -1)
    common.check_finite(per_token)
    return per_token


@torch.inference_mode()
def window_losses(model: nn.Module, windows: np.ndarray, batch: int, vocab_size: int) -> Tensor:
    """(n, T) losses of windows (n, T + 1) as float64, in nats."""
    losses = []
    with common.progress("losses", len(windows)) as bar:
        for part in common.batches(windows, batch, (windows.shape[1] - 1) * vocab_size):
            tokens = torch.from_numpy(part).to(common.device_of(model))
            losses.append(token_losses(model, tokens, vocab_size).double().cpu())
            bar.update(len(part))
    return torch.cat(losses)


def evaluate(
    model: nn.Module,
    windows: np.ndarray,
    byte_lengths: np.ndarray,
    batch: int = 32,
    frequent: np.ndarray | None = None,
    documents: np.ndarray | None = None,
) -> dict[str, Any]:
    """Test on windows (n, T + 1). byte_lengths (V,): UTF-8 bytes of each token, 0 for the end of a text.

    frequent: codes of bigrams that are frequent in training, which split recall's hits into rare_hit and frequent_hit.
    documents: the number of each token's document (n, T + 1).
    """
    n, length, vocab_size = windows.shape[0], windows.shape[1] - 1, len(byte_lengths)
    losses = window_losses(model, windows, batch, vocab_size).numpy()  # (n, T)
    by_position = losses.sum(axis=0) / n
    loss, se = mean_se(losses.sum(axis=1) / length)
    n_bytes = int(byte_lengths[windows[:, 1:]].sum())
    return {
        "loss": loss,
        "se": se,
        "ppl": math.inf if loss > LARGEST else math.exp(loss),
        "bits_per_byte": loss * n * length / math.log(2) / n_bytes,
        "tokens": n * length,
        "bytes": n_bytes,
        "windows": n,
        "length": length,
        "sha256": digest(windows),
        "by_position": by_position.tolist(),
        "by_octave": by_octave(losses.sum(axis=0), np.full(length, n)),
        "cumulative": (by_position.cumsum() / np.arange(1, length + 1)).tolist(),
        "recall": {"ngram": 2} | recalled(losses, windows, vocab_size, frequent),
        **({} if documents is None else by_document(losses, documents[:, 1:])),
    }


def recalled(losses: np.ndarray, windows: np.ndarray, vocab_size: int, frequent: np.ndarray | None) -> dict[str, Any]:
    """Mean losses, from losses (n, T), of hits and of other targets, and with the frequent bigrams of two kinds of hits."""
    hits = recall_hits(windows, vocab_size)
    kinds = {"hit": hits}
    if frequent is not None:
        known = np.isin(ngram_codes(windows, 2, vocab_size), frequent)
        kinds |= {"rare_hit": hits & ~known, "frequent_hit": hits & known}
    kinds["other"] = ~hits
    results: dict[str, Any] = {
        kind: ratio_se((losses * chosen).sum(axis=1), chosen.sum(axis=1)) for kind, chosen in kinds.items()
    }
    results["other"]["by_octave"] = by_octave((losses * ~hits).sum(axis=0), (~hits).sum(axis=0))
    return results


def by_document(losses: np.ndarray, documents: np.ndarray) -> dict[str, dict[str, float]]:
    """Mean loss in each document, from losses and numbers of documents (n, T); nothing for one document or very many."""
    numbers, which, tokens = np.unique(documents, return_inverse=True, return_counts=True)
    means = (np.bincount(which.ravel(), losses.ravel()) / tokens).tolist()
    return {"by_document": dict(zip(map(str, numbers), means, strict=True))} if 2 <= len(numbers) <= DOCUMENTS else {}


def ratio_se(sums: np.ndarray, counts: np.ndarray) -> dict[str, float | int | None]:
    """Mean loss per token, its standard error over windows (of a ratio, linearised: Cochran 1977, equation 2.45), and the
    number of tokens, from each window's summed loss (n,) and count of tokens (n,). Loss and error are None for 0 tokens.
    """
    tokens, n = int(counts.sum()), len(sums)
    if not tokens:
        return {"loss": None, "se": None, "tokens": 0}
    mean = float(sums.sum() / tokens)
    spread = float(((sums - mean * counts) ** 2).sum())
    return {"loss": mean, "se": math.sqrt(spread * n / (n - 1)) / tokens if n > 1 else math.nan, "tokens": tokens}


def by_octave(sums: np.ndarray, counts: np.ndarray) -> dict[str, float | None]:
    """Mean loss at the positions 1 to 3, 4 to 7, 8 to 15 and so on, from summed losses (T,) and numbers of targets (T,).

    Less than half an octave at the end joins the one before. None where there are no targets.
    """
    T, octaves = len(sums), {}
    starts = [1, *(start for start in (2**k for k in range(2, T.bit_length())) if T + 1 - start >= start / 2)]
    for first, after in itertools.pairwise([*starts, T + 1]):
        last, total, count = after - 1, sums[first - 1 : after - 1].sum(), counts[first - 1 : after - 1].sum()
        octaves[str(first) if first == last else f"{first}-{last}"] = float(total / count) if count else None
    return octaves


def draw(path: Path, results: dict[str, Any], title: str, line_colour: str) -> None:
    """Loss by position, as means over log-spaced buckets, and its mean up to the position."""
    positions = np.arange(1, results["length"] + 1)
    cuts = np.flatnonzero(np.diff(np.floor(2 * np.log2(positions)))) + 1  # two buckets per octave
    middles = [math.sqrt(part[0] * part[-1]) for part in np.split(positions, cuts)]
    means = [part.mean() for part in np.split(np.array(results["by_position"]), cuts)]
    with figure(path, 9.6, 3.9, columns=2) as axes:
        at, upto = axes[0]
        at.plot(middles, means, "-", color=line_colour, marker="o", markersize=3.5)
        upto.plot(positions, results["cumulative"], "-", color=line_colour)
        for ax, where in ((at, "At the position"), (upto, "Mean up to the position")):
            ax.set_xscale("log", base=2)
            ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
            ax.set(title=where, xlabel="position in the window (tokens)", ylabel="loss (nats per token)")


def frequent_in_training(run: LoadedRun, windows: np.ndarray) -> np.ndarray | None:
    """Codes of the hits' bigrams that are frequent in the run's training shards; None where these are gone or others."""
    folder, size, fingerprint = Path(run.config["data"]["dir"]), run.tokenizer.vocab_size, run.tokenizer.fingerprint
    try:
        shards = open_split(folder, "train", vocab_size=size, fingerprint=fingerprint)
        refuse_other_text(run.path, DataConfig(name=folder.name, source="text", dir=str(folder)))
        return frequent_bigrams(folder, shards, windows, size, FREQUENT)
    except FileNotFoundError:  # as on another machine
        return None
    except ValueError as error:
        common.say(f"note: recalled tokens are not split into rare and frequent ones: {error}")
        return None


def digest(windows: np.ndarray) -> str:
    """SHA-256 (hex) of windows (n, T + 1): losses on windows of equal digests can be compared."""
    return hashlib.sha256(np.ascontiguousarray(windows)).hexdigest()


def lines(results: dict[str, Any]) -> list[str]:
    """What is printed."""
    loss = f"loss {plus_minus(results['loss'], results['se'], '.4f')}, ppl {results['ppl']:.2f}"
    size = f"({results['tokens']:,} tokens, windows of {results['length']})"
    parts = []
    for kind in ("hit", "other", "rare_hit", "frequent_hit"):
        if (part := results["recall"].get(kind)) and part["tokens"]:
            parts.append(f"{kind} {plus_minus(part['loss'], part['se'], '.4f')} ({part['tokens']:,} tokens)")
    return [f"{loss}, {results['bits_per_byte']:.4f} bits/byte {size}", f"recall of bigrams: {', '.join(parts)}"]


@command("perplexity", PerplexityConfig)
def main(cfg: PerplexityConfig) -> None:
    run = common.open_run(cfg)
    windows, name, about, documents = claim_windows("perplexity", run, cfg)
    frequent = frequent_in_training(run, windows) if cfg.training_counts else None
    results = evaluate(run.model, windows, run.tokenizer.byte_lengths(), cfg.batch, frequent, documents)
    results["recall"]["rare_at_most"] = None if frequent is None else FREQUENT
    common.write_result(run, cfg, name, results | about, lines(results), draw)


if __name__ == "__main__":
    main()
