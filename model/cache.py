"""Keys and values kept between decoding steps."""

from typing import NamedTuple

from torch import Tensor


class KVCache:
    """The keys and values of every attention call of a decoder, one slot per (layer, call)."""

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0  # tokens cached; the caller of the attention modules raises it after the last module
        self.slots: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def layer(self, index: int) -> "LayerCache":
        return LayerCache(self, index)

    def seen(self, tokens: Tensor) -> Tensor:
        """Add the new `tokens` (B, T) and return all token ids so far (B, length + T), from which document masks are made."""
        column = tokens[:, None, :, None]  # (B, 1, T, 1); in a slot, so that what copies or reorders keys takes the ids, too
        return self.append(column, column, layer=-1, slot=0)[0][:, 0, :, 0]

    def append(self, k: Tensor, v: Tensor, layer: int, slot: int) -> tuple[Tensor, Tensor]:
        """Add k (B, H, T, d) and v (B, H', T, d') and return all that the layer's slot has so far."""
        start, stop, slots, key = self.length, self.length + k.shape[2], self.slots, (layer, slot)
        if stop > self.max_length:
            raise ValueError(f"{stop} tokens do not fit the KV cache: make it with max_length={stop} or more")
        if key not in slots:
            slots[key] = tuple(x.new_zeros(*x.shape[:2], self.max_length, x.shape[3]) for x in (k, v))
        if (held := len(slots[key][0])) != len(k):
            raise ValueError(f"the cache holds {held} sequences, and {len(k)} come: make a new KVCache for another batch")
        for buffer, new in zip(slots[key], (k, v), strict=True):
            buffer[:, :, start:stop] = new
        keys, values = slots[key]
        return keys[:, :, :stop], values[:, :, :stop]


class LayerCache(NamedTuple):
    """One layer's view of a `KVCache`."""

    cache: KVCache
    index: int

    @property
    def length(self) -> int:
        return self.cache.length

    def append(self, k: Tensor, v: Tensor, slot: int = 0) -> tuple[Tensor, Tensor]:
        """Add k (B, H, T, d) and v (B, H', T, d') and return all of the slot's keys and values so far."""
        return self.cache.append(k, v, self.index, slot)
