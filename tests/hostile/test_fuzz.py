"""Mutated files: every loader reads them or refuses them in one line. FUZZ=10000 sets the number of mutations."""

import os
import random
import time

MUTATIONS = int(os.environ.get("FUZZ", "150"))
SLOW = 10.0  # seconds for one file: a hang
SPLICES = [b"", b"\x00", b"\xff\xff\xff\xff", b"[" * 3, b'"', b"}", b"-1", b"1e999", b"null", b"NaN", b"../", b"\n"]


def mutated(content: bytes, draw: random.Random) -> bytes:
    """`content` with one to four changes: bytes flipped, a part removed, doubled or replaced, the end cut off."""
    for _ in range(draw.randint(1, 4)):
        start = draw.randrange(len(content) + 1) if draw.random() < 0.5 else draw.randrange(min(len(content), 300) + 1)
        stop = min(len(content), start + draw.choice((1, 2, 8, 64, 1000)))
        kind = draw.randrange(5)
        if kind == 0:
            content = content[:start] + bytes(byte ^ 1 << draw.randrange(8) for byte in content[start:stop]) + content[stop:]
        elif kind == 1:
            content = content[:start] + content[stop:]
        elif kind == 2:
            content = content[:stop] + content[start:stop] + content[stop:]
        elif kind == 3:
            content = content[:start] + draw.choice(SPLICES) + content[stop:]
        else:
            content = content[:start]
    return content


def test_mutated_files_are_read_or_refused_in_one_line(loaders):
    draw, refused = random.Random(0), 0
    for number in range(MUTATIONS):
        path = list(loaders)[number % len(loaders)]
        whole, began = path.read_bytes(), time.monotonic()
        change = mutated(whole, draw)
        path.write_bytes(change)
        try:
            loaders[path]()
        except (ValueError, OSError) as error:
            refused += 1
            assert "\n" not in str(error), f"{path.name}, mutation {number}: {error}"
        except BaseException as error:
            raise AssertionError(f"{path.name}, mutation {number}: {type(error).__name__}: {error}") from error
        finally:
            path.write_bytes(whole)
        assert time.monotonic() - began < SLOW, f"{path.name}, mutation {number} takes too long"
    print(f"{MUTATIONS} mutations of {len(loaders)} files: {refused} refused")
    assert refused > MUTATIONS / 3
