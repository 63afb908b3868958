"""Choose the validation documents by their hash; if whole documents miss the requested share, one of them is cut in two."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

TOLERANCE = 0.2  # error of the share that whole documents may have, relative to the wanted share
SURE = 3.0  # measuring ends early once the tolerance is this many standard deviations of the share


class Document(NamedTuple):
    text: str
    split: str
    starts: bool = True  # False: continues the document before it, so no end-of-text token goes in front


@dataclass(frozen=True)
class HoldOut:
    """Splits documents by a hash in [0, 1): validation gets those with a hash less than `below`, training all others."""

    below: float
    share: Fraction = Fraction(0)  # if not 0, the document whose hash is `below` is cut: validation gets this share, its end
    uncut: str = "train"  # the split of that document if it is too short to be cut

    def documents(self, texts: Iterable[str]) -> Iterator[Document]:
        """The documents of `texts`, in order, each with its split; the document that is cut comes as two."""
        for text in texts:
            number, _ = _hashed(text)
            first = int((1 - float(self.share)) * len(text))  # as nanoGPT cuts tinyshakespeare, a single document
            if number != self.below or not self.share:
                yield Document(text, "val" if number < self.below else "train")
            elif text[:first].strip() and text[first:].strip():
                yield Document(text[:first], "train")
                yield Document(text[first:], "val", starts=False)
            else:
                yield Document(text, self.uncut)


def measure(texts: Iterable[str], fraction: float, limit: float = math.inf) -> HoldOut:
    """How to hold out `fraction` of the bytes of `texts`, measured on their first `limit` bytes.

    Documents with a hash below `fraction`, if they have that share of the bytes within TOLERANCE, or else documents in the
    order of their hash until the share is full, the last of them cut.
    """
    if not fraction:
        return HoldOut(0.0)
    sizes: Counter[float] = Counter()  # hash -> bytes
    total = held = squares = 0
    for text in texts:
        number, size = _hashed(text)
        sizes[number] += size
        total, squares = total + size, squares + size * size
        held += size if number < fraction else 0
        fits = 0 < held < total and abs(held - fraction * total) <= TOLERANCE * fraction * total
        if total > limit or (fits and squares * (1 - fraction) / fraction < (TOLERANCE / SURE * total) ** 2):
            break
    if not total or fits:
        return HoldOut(fraction)
    order, wanted = sorted(sizes), Fraction(fraction) * total
    for number in order:
        if wanted <= sizes[number]:
            break
        wanted -= sizes[number]
    share = wanted / sizes[number]
    ends = {order[0]: "val", order[-1]: "train"}  # neither split stays empty
    return HoldOut(number, share, uncut=ends.get(number, "val" if share >= 0.5 else "train"))


def _hashed(text: str) -> tuple[float, int]:
    """A number in [0, 1) that depends on the document alone, and the document's length in bytes."""
    content = text.encode("utf-8", "replace")
    return int.from_bytes(hashlib.sha256(content).digest()[:8]) / 2**64, len(content)
