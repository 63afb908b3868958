"""Keys and values kept between decoding steps."""

import torch
from torch import Tensor


class KVCache:
    """The keys and values of every attention call of a decoder, one slot per (layer, call).

    A slot's buffers are made at its first use. `length` is the number of tokens cached. The decoder adds to it once per forward
    pass; code that calls attention modules directly adds to it after the last of them.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0
        self.slots: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.tokens: Tensor | None = None  # (B, length), kept by `seen`

    def layer(self, index: int) -> "LayerCache":
        return LayerCache(self, index)

    def seen(self, tokens: Tensor) -> Tensor:
        """Add the new `tokens` (B, T) and return all token ids so far (B, length + T), from which document masks are made."""
        if self.tokens is not None:
            _refuse_other_batch(len(self.tokens), len(tokens))
            tokens = torch.cat((self.tokens[:, : self.length], tokens), dim=1)
        self.tokens = tokens
        return tokens

    def append(self, k: Tensor, v: Tensor, layer: int, slot: int) -> tuple[Tensor, Tensor]:
        """Append k and v to the slot `slot` of layer `layer`; returns everything in that slot."""
        stop, key = self.length + k.shape[2], (layer, slot)
        if stop > self.max_length:
            raise ValueError(f"{stop} tokens do not fit the KV cache: make it with max_length={stop} or more")
        if key not in self.slots:
            self.slots[key] = tuple(x.new_zeros(*x.shape[:2], self.max_length, x.shape[3]) for x in (k, v))
        _refuse_other_batch(len(self.slots[key][0]), len(k))
        for buffer, new in zip(self.slots[key], (k, v), strict=True):
            buffer[:, :, self.length : stop] = new
        keys, values = self.slots[key]
        return keys[:, :, :stop], values[:, :, :stop]


class LayerCache:
    """One layer's view of a `KVCache`."""

    def __init__(self, cache: KVCache, index: int) -> None:
        self.cache, self.index = cache, index

    @property
    def length(self) -> int:
        """The number of tokens cached."""
        return self.cache.length

    def append(self, k: Tensor, v: Tensor, slot: int = 0) -> tuple[Tensor, Tensor]:
        """Add k (B, H, T, d) and v (B, H', T, d') and return all of the slot's keys and values so far."""
        return self.cache.append(k, v, self.index, slot)


def _refuse_other_batch(held: int, given: int) -> None:
    if held != given:
        raise ValueError(f"the cache holds {held} sequences, and {given} come: make a new KVCache for another batch")
