"""The bench of decoding: one token, with and without a cache."""

from functools import partial
from statistics import median

import torch
from torch import Tensor

from bench.models import BenchConfig, model_config, random_tokens, variants
from bench.timing import Row, attempt, paired_ratios, time_in_turn
from model.cache import KVCache
from model.decoder import Decoder
from training.distributed import World


def decode(cfg: BenchConfig, world: World) -> list[Row]:
    """Greedy decoding of token number `length` of one sequence, with and without a cache; 512 and float32 by default."""
    rows = []
    for length in cfg.lengths or [512]:
        arms = {name: attempt(partial(Decoding, cfg, name, length, world)) for name in variants(cfg)}
        group = [Row({"length": length, "model": name, "cache": how}) for name in arms for how in ("yes", "no")]
        pairs = [(arm, arm) if isinstance(arm, str) else (arm.cached, arm.uncached) for arm in arms.values()]
        time_in_turn("token", group, [work for pair in pairs for work in pair], cfg.rounds, world.device)
        for cached, uncached in zip(group[::2], group[1::2], strict=True):
            if cached.seconds and uncached.seconds:
                cached.facts["faster than without"] = median(paired_ratios(uncached, cached, "token"))
        rows += group
    return rows


class Decoding:
    """Reads the last token of a random sequence with the others cached, or all tokens; both calls return the next id (B,)."""

    def __init__(self, cfg: BenchConfig, variant: str, length: int, world: World) -> None:
        if length < 2:
            raise ValueError(f"length {length} leaves nothing to cache")
        self.model = Decoder(model_config(cfg, variant, context=max(length, cfg.model.context))).to(world.device).eval()
        self.autocast, self.cache = world.autocast(cfg.dtype), KVCache(length)
        self.tokens = random_tokens(cfg.batch or 1, length, self.model.cfg.vocab_size, world)
        self.last = torch.tensor([length - 1], device=world.device)
        with torch.no_grad(), self.autocast:
            self.model(self.tokens[:, :-1], cache=self.cache)

    @torch.no_grad()
    def cached(self) -> Tensor:
        self.cache.length = self.tokens.shape[1] - 1  # forget the last call
        with self.autocast:
            return self.model(self.tokens[:, -1:], cache=self.cache)[:, -1].argmax(-1)

    @torch.no_grad()
    def uncached(self) -> Tensor:
        with self.autocast:
            return self.model(self.tokens, rows=self.last)[:, -1].argmax(-1)
