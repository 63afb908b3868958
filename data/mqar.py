"""Multi-query associative recall (MQAR: Arora et al., arXiv 2312.04927, section 4; HazyResearch/zoology) with a known share of
distractors; rows are generated when they are read.

Distractors lie between the pairs, as in MAD's noisy recall (Poli et al., arXiv 2403.17844). Only answers are scored.
"""

from dataclasses import dataclass

import numpy as np

from data.config import MqarConfig
from data.tokenizer import Tokenizer, tokenizer_of_words

SPLITS = ("train", "val", "eval")
VALIDATION_ROWS = 4096


@dataclass(frozen=True)
class Sample:
    """A row's tokens, and the positions of its parts."""

    tokens: np.ndarray  # (length + 1,)
    questions: np.ndarray  # (pairs,): of each key in its question; its value follows
    told: np.ndarray  # (pairs,): of the same key in its pair; its value follows
    distractors: np.ndarray  # (n,)

    def marked(self) -> np.ndarray:
        """The tokens as a training row: tokens that are not answers are marked as unscored, by their bitwise not."""
        row = ~self.tokens
        row[self.questions + 1] = self.tokens[self.questions + 1]
        return row


def mqar_tokenizer(cfg: MqarConfig) -> Tokenizer:
    """One token a word: " k0" " k1" ... the keys, then values " v0" ..., then noise " n0" ...; last the end-of-text token."""
    counts = {"k": cfg.keys, "v": cfg.values, "n": cfg.noise}
    return tokenizer_of_words([f" {letter}{i}" for letter, count in counts.items() for i in range(count)])


class Mqar:
    """Rows of `length` + 1 tokens: end-of-text, slots of two tokens (pairs and distractors in random order, directly after them
    the questions), end-of-text tokens. Row i of a split is a pure function of (split, seed, i).
    """

    def __init__(self, cfg: MqarConfig, length: int) -> None:
        self.cfg, self.length = cfg, length
        self.blank = cfg.keys + cfg.values + cfg.noise
        self.told_slots, needed = told_slots(cfg), shortest_row(cfg)
        if length % 2 or length < needed:
            wrong = f"{cfg.pairs} pairs with a share of {cfg.distractors:g} distractors do not fit {length} tokens"
            raise ValueError(f"{wrong}: use an even model.context of {needed} or more")

    def __len__(self) -> int:
        return VALIDATION_ROWS

    def sample(self, index: int, seed: int) -> np.ndarray:
        """Training row `index`, (length + 1,) int64, unscored tokens marked."""
        return self.draw("train", index, seed).marked()

    def window(self, index: int) -> np.ndarray:
        """Validation row `index`, (length + 1,) int64, unscored tokens marked."""
        return self.draw("val", index, 0).marked()

    def draw(self, split: str, index: int, seed: int) -> Sample:
        """Row `index` of the split train, val or eval: two splits share a row only by chance."""
        cfg, slots = self.cfg, self.length // 2
        rng = np.random.default_rng([SPLITS.index(split), seed, index])
        keys = rng.permutation(cfg.keys)  # the first `pairs` are those of the pairs, the others are free for distractors
        values = cfg.keys + rng.choice(cfg.values, cfg.pairs, replace=False)
        pairs = np.stack((keys[: cfg.pairs], values), axis=1)  # (pairs, 2)
        told = rng.choice(self.told_slots, cfg.pairs, replace=False)
        questions = self.told_slots + rng.permutation(cfg.pairs)
        others = np.setdiff1d(np.arange(self.told_slots), told)
        table = np.full((slots, 2), self.blank, dtype=np.int64)
        table[told], table[questions] = pairs, pairs
        if cfg.kind == "noise":
            table[others] = rng.integers(cfg.keys + cfg.values, self.blank, (len(others), 2))
        else:
            free = keys[cfg.pairs :]
            table[others, 0] = free[rng.integers(len(free), size=len(others))]
            table[others, 1] = rng.integers(cfg.keys, cfg.keys + cfg.values, len(others))
        tokens = np.concatenate(([self.blank], table.ravel()))
        distractors = 1 + np.stack((2 * others, 2 * others + 1), axis=1).ravel()
        return Sample(tokens, 1 + 2 * questions, 1 + 2 * told, distractors)


def shortest_row(cfg: MqarConfig) -> int:
    """Tokens of the shortest row, without the end-of-text token that begins it."""
    return 2 * (told_slots(cfg) + cfg.pairs)


def told_slots(cfg: MqarConfig) -> int:
    """Slots of two tokens that hold the pairs and the distractors. ValueError: the options exclude each other."""
    if not 0 <= cfg.distractors < 1:  # also of the shares of an evaluation
        raise ValueError(f"data.mqar.distractors={cfg.distractors:g} is not a share below 1: use 0.8")
    if cfg.pairs > cfg.values or cfg.pairs >= cfg.keys:
        raise ValueError(f"{cfg.pairs} pairs need as many values, and more keys: raise data.mqar.keys or data.mqar.values")
    slots = round(cfg.pairs / (1 - cfg.distractors))
    possible = 1 - cfg.pairs / slots
    if abs(cfg.distractors - possible) > 1e-6:  # a share written with six digits counts as exact
        wrong = f"{cfg.pairs} pairs cannot have a share of exactly {cfg.distractors:g} distractors"
        raise ValueError(f"{wrong}: use data.mqar.distractors={possible:.6g}, or other pairs")
    return slots
